"""Chat templates: the jinja2 programs that turn a conversation into the text a model was tuned on."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.static import show

Message = Mapping[str, Any]


def messages_of(prompt: str | Message | Sequence[Message]) -> list[Message]:
    """A plain string is one user turn, one message a conversation of length one.

    Raises:
      ValueError: a message that is no mapping of a role and a content, both strings. Only one with tool calls may lack
        the content.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = [prompt] if isinstance(prompt, Mapping) else list(prompt)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {i} is {show(message)}: give {{'role': ..., 'content': ...}}")
        for key in ("role", "content"):
            if key == "content" and message.get("tool_calls") and message.get(key) is None:
                continue
            if key not in message:
                raise ValueError(f"message {i} has no {key!r}: give {{'role': ..., 'content': ...}}")
            if not isinstance(message[key], str):
                raise ValueError(f"message {i} has {key!r} {show(message[key])}: it must be a string")
    return messages


def render(
    template: str,
    prompt: str | Message | Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Renders a conversation the way Transformers does.

    Args:
      template: jinja2 source. It comes with the weights, from strangers, so it runs sandboxed: no attribute that
        reaches Python internals, nothing mutable.
      prompt: a user's text, or messages ``{"role": ..., "content": ...}``.
      bos_token, eos_token: begin and end tokens as text; the template decides where they go.
      add_generation_prompt: ends with the header of the assistant's turn, so that the model answers.
      variables: anything else the template reads, e.g. ``tools`` or ``date_string``.

    Raises:
      ValueError: with the template's own words if it refuses the conversation (``raise_exception``); see `compiled`.
    """
    import jinja2

    program = compiled(template)
    try:
        return program.render(
            messages=messages_of(prompt), bos_token=bos_token, eos_token=eos_token,
            add_generation_prompt=add_generation_prompt, **variables,
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refused the conversation: {error}") from error


def compiled(template: str) -> Any:
    """The program of a template.

    Raises:
      ValueError: with the line if it is not valid jinja2.
    """
    import jinja2

    try:
        return _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the checkpoint's chat template is not valid jinja2, line {error.lineno}: {error.message}; correct it "
            "(in chat_template.jinja, tokenizer_config.json, specjax.json or the GGUF file), or pass plain text "
            "without chat=True"
        ) from error


@functools.lru_cache(maxsize=8)
def _compiled(template: str):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson  # jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment.from_string(template)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    import jinja2

    raise jinja2.TemplateError(message)


def pick(template: Any, source: str) -> str | None:
    """The template of a ``tokenizer_config.json``: a string, or a list of named ones of which "default" is ours."""
    if template is None or isinstance(template, str):
        return template
    entries: list[Any] = template if isinstance(template, list) else [None]
    if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in entries):
        raise ValueError(f"{source}: chat_template is {show(template)}, neither a text nor a list of named ones")
    named = {entry["name"]: entry["template"] for entry in entries}
    if "default" not in named:
        raise ValueError(f"{source} has chat templates {sorted(named)} but none called 'default'")
    return pick(named["default"], source)
