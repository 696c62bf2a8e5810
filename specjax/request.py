"""What a user asks for -> checked arrays: prompts, limits, keys, sampling, capacity."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import noise, options
from specjax.accept import RULES
from specjax.autoregressive import plain
from specjax.loop import Program, Weights, capacity, split
from specjax.models.language_model import LanguageModel
from specjax.round import Limits
from specjax.types import Array, Drafter, Sampling, Text


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


def make(
    lm: LanguageModel,
    prompts: Any,
    *,
    drafter: Drafter | None = None,
    rule: str | None = None,
    max_new_tokens: Any = 128,
    seed: int | Sequence[int] = 0,
    n: int = 1,
    chat: bool = False,
    eos_ids: Any = None,
    stop: Any = (),
    logprobs: bool = False,
    on_capacity: str = "error",
    prefill_chunk: int = 64,
    **sampling: Any,
) -> Request | None:
    """Checks a request; None if there is no prompt in it. See `specjax.generate` for the arguments."""
    drafter = plain() if drafter is None else drafter
    rule = _rule(rule, drafter)
    _check_numbers(n=n, prefill_chunk=prefill_chunk)
    if on_capacity not in ("error", "truncate"):
        raise ValueError(f"on_capacity={on_capacity!r}: choose 'error' or 'truncate'")
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
    slots = capacity(int(np.max(lengths + budget)) + 1 + drafter.num_draft_tokens, prefill_chunk)
    tokens = np.zeros((count, slots), np.int32)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)] = ids
    repeated = jnp.repeat(jnp.asarray(lengths), n)
    text = Text(jnp.repeat(jnp.asarray(tokens), n, axis=0), repeated, repeated)
    limits = Limits(jnp.repeat(jnp.asarray(budget), n), jnp.asarray(sequences))
    each = {name: jnp.repeat(x, n, axis=0) for name, x in laws._asdict().items() if name != "eos_ids"}
    program, weights = split(lm.model, lm.params, drafter, rule, logprobs)
    return Request(
        program, weights, text, noise.row_keys(seeds), laws._replace(**each), limits, prefill_chunk,
        np.repeat(truncated, n), strings,
    )  # fmt: skip


def _rule(rule: str | None, drafter: Drafter) -> str:
    if rule is None:
        return drafter.default_rule
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: choose one of {sorted(RULES)}")
    return rule


def _check_numbers(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
            raise ValueError(f"{name}={value!r}: must be a whole number, 1 or more")


def _encode(lm: LanguageModel, prompts: Any, chat: bool) -> list[Any]:
    """Prompts in any accepted form as a list of id lists."""
    if not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts={prompts!r}: give a string, token ids, a conversation, or a list of them")
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts] if isinstance(prompts, str) else [[prompts]]
    elif len(prompts) and all(isinstance(item, numbers.Integral) for item in prompts):
        prompts = [prompts]  # one prompt of token ids
    elif len(prompts) and all(isinstance(item, Mapping) for item in prompts):
        prompts = [prompts]  # one conversation
    return [_encode_one(lm, prompt, chat, row) for row, prompt in enumerate(prompts)]


def _encode_one(lm: LanguageModel, prompt: Any, chat: bool, row: int) -> Any:
    if not hasattr(prompt, "__len__"):
        raise ValueError(f"prompt {row} is {prompt!r}: give a string, token ids, or a list of messages")
    is_text = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))
    if is_text and lm.tokenizer is None:
        raise ValueError(f"prompt {row} is text, but this model has no tokenizer: pass token ids")
    if chat:
        if not is_text:
            raise ValueError(f"chat=True: prompt {row} is token ids; give a string or a list of messages")
        return lm.encode_chat(prompt)
    if is_text and not isinstance(prompt, str):
        raise ValueError(f"prompt {row} is a list of messages: pass chat=True to apply the chat template")
    return lm.tokenizer.encode(prompt) if isinstance(prompt, str) and lm.tokenizer is not None else prompt


def _checked(ids: Any, row: int, lm: LanguageModel) -> list[int]:
    bos = getattr(lm.tokenizer, "bos_id", None)
    if not len(ids):
        if bos is None:
            raise ValueError(f"prompt {row} is empty and this model has no begin token: give at least one token")
        return [bos]
    return [options.token_id(f"prompt {row}", token, lm.model.vocab_size) for token in ids]


def _stop(stop: Any, lm: LanguageModel, vocab: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Token sequences, left-padded with -1 to bucketed sizes, and stop strings."""
    items: list[Any] = [stop] if isinstance(stop, (str, numbers.Integral)) else list(() if stop is None else stop)
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
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
        seeds = [int(seed) + row for row in range(batch)]
    else:
        given = np.asarray(seed)
        seeds = given.tolist() if given.ndim == 1 and given.dtype.kind in "iu" else []
        if len(seeds) != batch:
            raise ValueError(f"seed={seed!r}: give one whole number, or one per row (here {batch})")
    for value in seeds:
        if not 0 <= value < 2**32:
            raise ValueError(f"seed={seed!r} gives a row the seed {value}: seeds are 0..2**32 - 1")
    return np.asarray(seeds, np.uint32)


def _fit(lengths: np.ndarray, budget: np.ndarray, context: int | None, drafter: Drafter, on_capacity: str):
    """Budgets that fit the model's context, and which of them were cut."""
    limit = min(x for x in (context, drafter.context_length, 2**30) if x is not None)
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
