"""What `specjax.load` returns: a model, its weights, and what is needed to talk to it in text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.models import chat
from specjax.models.tokenizer import Tokenizer
from specjax.static import show
from specjax.types import Model, PyTree


class LanguageModel(NamedTuple):
    """A model with its weights, tokenizer and chat template. Only the first two are needed to decode token ids."""

    model: Model
    params: PyTree
    tokenizer: Tokenizer | None = None
    config: Any = None  # LlamaConfig of a loaded model
    chat_template: str | None = None  # jinja2 source
    eos_ids: tuple[int, ...] = ()  # any of these ends a text

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        dtypes = "/".join(sorted({str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in leaves})) or "none"
        kind = type(self.config).__name__.removesuffix("Config") + ", " if self.config is not None else ""
        tokenizer = None if self.tokenizer is None else type(self.tokenizer).__name__
        context = getattr(self.model, "context_length", None)
        return (
            f"LanguageModel({kind}{getattr(self.model, 'vocab_size', '?')} tokens, "
            f"{'any context' if context is None else f'context {context}'}, "
            f"{sum(int(np.size(leaf)) for leaf in leaves):,} parameters ({dtypes}), "
            f"tokenizer={tokenizer}, chat_template={'yes' if self.chat_template else None}, "
            f"eos_ids={show(self.eos_ids)})"
        )

    def encode_chat(self, prompt: str | chat.Message | Sequence[chat.Message], **variables: Any) -> list[int]:
        """Token ids of a conversation (a string is one user turn), ending where the assistant's answer begins.

        Raises:
          ValueError: if there is no tokenizer or no chat template.
        """
        if self.tokenizer is None or self.chat_template is None:
            missing = "tokenizer" if self.tokenizer is None else "chat template"
            raise ValueError(f"this model has no {missing}, which chat=True needs; pass plain prompts or token ids")
        text = chat.render(
            self.chat_template, prompt, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token,
            **variables,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them


def checked(name: str, value: Any) -> LanguageModel:
    """The argument called ``name`` if it is a `LanguageModel`.

    Raises:
      ValueError: if it is not; says how to get one.
    """
    if isinstance(value, LanguageModel):
        return value
    if isinstance(value, str):
        remedy = f"a name has to be loaded: {name}=specjax.load({show(value)})"
    elif isinstance(value, Model):
        remedy = f"a Model needs its weights: {name}=specjax.LanguageModel(model, params)"
    else:
        remedy = "give what specjax.load returns, or specjax.LanguageModel(model, params) around your own"
    shown = "<Model>" if isinstance(value, Model) else show(value)
    raise ValueError(f"{name}={shown} is not a language model: {remedy}")
