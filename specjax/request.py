"""What a user asks for -> checked arrays: prompts, limits, keys, sampling, capacity."""

import dataclasses
import difflib
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import adaptive as pacing
from specjax import loop, noise, options, sharding
from specjax.accept import Rule, check_rule
from specjax.autoregressive import plain
from specjax.costs import cost_model, features_of
from specjax.drafters.checked import LONGEST_WINDOW, checked_drafter
from specjax.drafters.late import late
from specjax.loop import Program, Weights, capacity, split
from specjax.models.chat import messages_of
from specjax.models.language_model import LanguageModel, checked
from specjax.round import Limits, State
from specjax.static import show, whole
from specjax.types import Array, Drafter, PyTree, Sampling, Text


class Request(NamedTuple):
    """Everything `loop.start` needs, and what the host needs to report the result."""

    program: Program
    weights: Weights
    text: Text
    keys: Array
    sampling: Sampling
    limits: Limits
    chunk: int
    truncated: np.ndarray  # [B] bool, the budget was cut to fit (on_capacity="truncate")
    stop_strings: tuple[str, ...]
    host: Callable[[], Callable[..., PyTree]] | None  # the drafter's
    pace: PyTree = ()  # state of the program's policy before the first round, numpy

    def start(self) -> State:
        """The state after prefill."""
        state = loop.start(self.program.prefill(), self.weights, self.text, self.keys, self.limits, chunk=self.chunk)
        return state._replace(pace=self.first_pace())

    def first_pace(self) -> PyTree:
        """``pace`` on the devices."""
        layout = self.program.model.layout
        return sharding.spread(layout and layout.mesh, jax.tree.map(jnp.asarray, self.pace))


def make(
    lm: LanguageModel,
    prompts: Any,
    *,
    drafter: Drafter | None = None,
    rule: Rule | None = None,
    max_new_tokens: Any = 128,
    seed: int | Sequence[int] = 0,
    n: int = 1,
    chat: bool = False,
    eos_ids: Any = None,
    stop: Any = (),
    logprobs: bool = False,
    on_capacity: str = "error",
    prefill_chunk: int | None = None,
    adaptive: bool | pacing.Policy = False,
    **sampling: Any,
) -> Request | None:
    """Checks a request; None if there is no prompt in it. See `specjax.generate` for the arguments."""
    _check_names(sampling)
    lm = checked("lm", lm)
    drafter = plain() if drafter is None else checked_drafter(drafter, lm, ", or None to decode plainly")
    rule = _rule(rule, drafter)
    policy = pacing.checked(adaptive, drafter.num_draft_tokens)
    if policy is not None and drafter.host is not None:
        raise ValueError(f"adaptive={show(adaptive)}: this drafter drafts in Python between the rounds: leave it out")
    n = whole("n", n, 1)
    if prefill_chunk is not None:
        prefill_chunk = whole("prefill_chunk", prefill_chunk, 1)
        if prefill_chunk > LONGEST_WINDOW:
            raise ValueError(
                f"prefill_chunk={show(prefill_chunk)}: must be at most {LONGEST_WINDOW}; 64 to 512 is usual"
            )
    for name, flag in (("chat", chat), ("logprobs", logprobs)):
        if not isinstance(flag, (bool, np.bool_)):
            raise ValueError(f"{name}={show(flag)}: must be True or False")
    chat, logprobs = bool(chat), bool(logprobs)
    if not isinstance(on_capacity, str) or on_capacity not in ("error", "truncate"):
        raise ValueError(f"on_capacity={show(on_capacity)}: choose 'error' or 'truncate'")
    vocab = lm.model.vocab_size
    encoded = [_checked(ids, row, lm) for row, ids in enumerate(_encode(lm, prompts, chat))]
    count = len(encoded)
    ends = options.eos(lm.eos_ids if eos_ids is None else eos_ids, vocab)
    sequences, strings = _stop(stop, lm, vocab)
    laws = options.make_sampling(count, vocab, eos_ids=ends, **sampling)
    budget = options.rows("max_new_tokens", max_new_tokens, count)
    seeds = _seeds(seed, count * n)
    if not count:
        return None
    lengths = np.asarray([len(ids) for ids in encoded], np.int32)
    budget, truncated = _fit(lengths, budget, lm.model.context_length, drafter, on_capacity)
    # The window may run 1 + N past the budget; a prefill chunk may start at the last prompt token.
    longest = int(np.max(lengths + budget)) + 1 + drafter.num_draft_tokens
    slots = capacity(longest, 1)
    chunk = min(slots, prefill_chunk or _chunk(slots, count * n, drafter))
    slots = capacity(longest, chunk)
    tokens = np.zeros((count, slots), np.int32)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)] = ids
    repeated = jnp.repeat(jnp.asarray(lengths), n)
    text = Text(jnp.repeat(jnp.asarray(tokens), n, axis=0), repeated, repeated)
    limits = Limits(jnp.repeat(jnp.asarray(budget), n), jnp.asarray(sequences))
    each = {name: jnp.repeat(x, n, axis=0) for name, x in laws._asdict().items() if name != "eos_ids"}
    policy, pace = _pace(policy, lm, drafter, count * n)
    if policy is not None and not policy.sizes[0]:
        drafter = late(drafter, features_of(lm, drafter))
    program, weights = split(lm.model, lm.params, drafter, rule, logprobs, policy)
    return Request(
        program, weights, text, noise.row_keys(seeds), laws._replace(**each), limits, chunk,
        np.repeat(truncated, n), strings, drafter.host, pace,
    )  # fmt: skip


def _chunk(slots: int, rows: int, drafter: Drafter) -> int:
    """Prompt tokens per forward pass: a third of the slots, up to 256 in all rows together, where a pass has reached
    its rate. By the slots and not by the prompts, which share programs; 64 where the logits of every token are made."""
    if drafter.window_top and drafter.prompt_window:
        return 64
    most = min(slots // 3, 256 >> (rows - 1).bit_length())
    return max(64, 1 << (most.bit_length() - 1) if most else 0)


def _pace(
    policy: pacing.Policy | None, lm: LanguageModel, drafter: Drafter, rows: int
) -> tuple[pacing.Policy | None, PyTree]:
    """The policy without costs, which are no part of a program, and its state, which has them."""
    if not isinstance(policy, pacing.Adaptive):
        return policy, () if policy is None else jax.device_get(policy.init())
    costs = cost_model(lm, drafter, batch=rows) if policy.costs is None else policy.costs
    pace = jax.device_get(dataclasses.replace(policy, costs=costs).init())
    return dataclasses.replace(policy, costs=None), pace


_OPTIONS = set(inspect.signature(make).parameters) - {"lm", "prompts", "sampling"}
_SAMPLING = set(inspect.signature(options.make_sampling).parameters) - {"batch", "vocab_size", "eos_ids"}
_ALIASES = {  # what other libraries call it
    "max_tokens": "max_new_tokens", "max_length": "max_new_tokens", "num_tokens": "max_new_tokens",
    "seeds": "seed", "key": "seed", "rng": "seed", "num_return_sequences": "n", "num_samples": "n",
    "stop_strings": "stop", "stop_token_ids": "eos_ids", "eos_token_id": "eos_ids", "min_tokens": "min_new_tokens",
    "bad_words_ids": "banned_tokens", "num_draft_tokens": "drafter", "draft": "drafter", "draft_model": "drafter",
}  # fmt: skip


def _rule(rule: Rule | None, drafter: Drafter) -> Rule:
    if rule is None:
        return drafter.default_rule
    return check_rule(rule)


def _check_names(given: Mapping[str, Any]) -> None:
    """Names that are no option of `generate`, with the one that was probably meant."""
    for name in given:
        if name in _SAMPLING:
            continue
        near = _ALIASES.get(name) or next(iter(difflib.get_close_matches(name, [*_OPTIONS, *_SAMPLING], n=1)), None)
        raise TypeError(f"generate() has no option {name!r}" + (f"; did you mean {near!r}?" if near else ""))


def _encode(lm: LanguageModel, prompts: Any, chat: bool) -> list[Any]:
    """Prompts in any accepted form as a list of id lists."""
    prompts = options.host(prompts)
    if isinstance(prompts, bytes):
        raise ValueError(f"prompts={show(prompts)} is bytes: decode it to a string, e.g. with .decode()")
    if not isinstance(prompts, (str, Mapping, list)):
        raise ValueError(f"prompts={show(prompts)}: give a string, token ids, a conversation, or a list of them")
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts] if isinstance(prompts, str) else [[prompts]]
    elif len(prompts) and all(isinstance(item, numbers.Integral) for item in prompts):
        prompts = [prompts]  # one prompt of token ids
    elif len(prompts) and all(isinstance(item, Mapping) for item in prompts):
        prompts = [prompts]  # one conversation
    return [_encode_one(lm, prompt, chat, row) for row, prompt in enumerate(prompts)]


def _encode_one(lm: LanguageModel, prompt: Any, chat: bool, row: int) -> Any:
    if isinstance(prompt, Mapping):
        raise ValueError(f"prompt {row} is one message: give a list of messages and chat=True")
    if isinstance(prompt, bytes):
        raise ValueError(f"prompts: prompt {row} is bytes, {show(prompt)}: decode it to a string, e.g. with .decode()")
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"prompts: prompt {row} is {show(prompt)}: give a string, token ids, or a list of messages")
    is_text = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))
    if is_text and lm.tokenizer is None:
        raise ValueError(f"prompt {row} is text, but this model has no tokenizer: pass token ids")
    if chat:
        if not is_text:
            raise ValueError(f"chat=True: prompt {row} is token ids; give a string or a list of messages")
        try:
            messages = prompt if isinstance(prompt, str) else messages_of(prompt)
            for text in [messages] if isinstance(messages, str) else [m.get("content") or "" for m in messages]:
                _unicode(text)
            return lm.encode_chat(messages)
        except ValueError as error:
            raise ValueError(f"prompt {row}: {error}") from error
    if is_text and not isinstance(prompt, str):
        raise ValueError(f"prompt {row} is a list of messages: pass chat=True to apply the chat template")
    if not isinstance(prompt, str) or lm.tokenizer is None:
        return prompt
    try:
        _unicode(prompt)
    except ValueError as error:
        raise ValueError(f"prompt {row}: {error}") from None
    return lm.tokenizer.encode(prompt)


def _unicode(text: str) -> None:
    """Refuses half characters, which come from undecodable bytes or cut UTF-16 and cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is {text[error.start]!r}, a lone surrogate: replace it, e.g. with "
            "text.encode('utf-8', 'replace').decode()"
        ) from None


def _checked(ids: Any, row: int, lm: LanguageModel) -> list[int]:
    bos = getattr(lm.tokenizer, "bos_id", None)
    if not len(ids):
        if bos is None:
            raise ValueError(f"prompt {row} is empty and this model has no begin token: give at least one token")
        return [bos]
    return [options.token_id(f"prompt {row}", token, lm.model.vocab_size) for token in ids]


def _stop(stop: Any, lm: LanguageModel, vocab: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Token sequences, left-padded with -1 to bucketed sizes, and stop strings."""
    stop = options.host(stop)
    items: Any = [stop] if isinstance(stop, (str, numbers.Integral)) else [] if stop is None else stop
    if not isinstance(items, list):
        raise ValueError(f"stop={show(stop)}: give a string, or a list of strings and token sequences")
    strings = tuple(item for item in items if isinstance(item, str))
    if "" in strings:
        raise ValueError("stop contains the empty string, which every text ends with: remove it")
    if strings and lm.tokenizer is None:
        raise ValueError(f"stop={strings[0]!r} is text, but this model has no tokenizer: give token sequences")
    sequences = []
    for item in items:
        if isinstance(item, str):
            continue
        if isinstance(item, numbers.Integral):
            raise ValueError(f"stop contains the number {item}: single ids go into eos_ids, sequences are lists of ids")
        if not isinstance(item, list):
            raise ValueError(f"stop contains {show(item)}: give strings and token sequences (lists of ids)")
        if not len(item):
            raise ValueError("stop contains an empty token sequence: remove it")
        sequences.append([options.token_id("stop", token, vocab) for token in item])
    width = 1 << (max([4, *map(len, sequences)]) - 1).bit_length()
    height = 1 << (max(1, len(sequences)) - 1).bit_length()
    table = np.full((height, width), -1, np.int32)
    for row, sequence in enumerate(sequences):
        table[row, width - len(sequence) :] = sequence
    return table, strings


def _seeds(seed: Any, batch: int) -> np.ndarray:
    seed = options.host(seed)
    if options.is_int(seed):
        seeds = [int(seed) + row for row in range(batch)]
    else:
        seeds = seed
        if not isinstance(seeds, list) or len(seeds) != batch or not all(map(options.is_int, seeds)):
            what = "a JAX key" if isinstance(seed, jax.Array) else show(seed)
            raise ValueError(f"seed={what}: give one whole number (an int), or one per row (here {batch})")
    for value in seeds:
        if not 0 <= value < 2**32:
            raise ValueError(f"seed={show(seed)} gives a row the seed {show(value)}: seeds are 0..2**32 - 1")
    return np.asarray(seeds, np.uint32)


def _fit(lengths: np.ndarray, budget: np.ndarray, context: int | None, drafter: Drafter, on_capacity: str):
    """Budgets that fit the model's context, and which of them were cut."""
    limit = min(x for x in (context, drafter.context_length, 2**30) if x is not None)
    if drafter.num_draft_tokens > limit:
        raise ValueError(
            f"drafter has num_draft_tokens={drafter.num_draft_tokens}, but texts may have {limit} tokens: "
            "make it with fewer draft tokens"
        )
    owners = {drafter.context_length: "the drafter's context", context: "the model's context"}
    whose = owners.get(limit, "the longest possible text")
    over = lengths.astype(np.int64) + budget > limit
    for row in np.flatnonzero(over):
        if on_capacity == "error" or lengths[row] > limit:
            remedy = "lower max_new_tokens or pass on_capacity='truncate'"
            raise ValueError(
                f"prompt {row} has {lengths[row]} tokens and max_new_tokens is {budget[row]}, but {whose} is {limit}: "
                + ("shorten the prompt" if lengths[row] > limit else remedy)
            )
    return np.where(over, limit - lengths, budget).astype(np.int32), over
