"""Sampling options as people write them -> traced arrays. Everything is checked here, before any compute."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.static import show, whole
from specjax.types import Sampling

# name: (default, dtype, test, what is allowed)
_RANGES: dict[str, tuple[Any, Any, Any, str]] = {
    "temperature": (0.0, np.float32, lambda x: x >= 0, "0 (greedy) or more"),
    "top_k": (0, np.int32, lambda x: x >= 0, "0 (off) or more"),
    "top_p": (1.0, np.float32, lambda x: 0 < x <= 1, "over 0, at most 1 (off)"),
    "min_p": (0.0, np.float32, lambda x: 0 <= x <= 1, "0 (off) to 1"),
    "repetition_penalty": (1.0, np.float32, lambda x: x > 0, "over 0; 1 is off"),
    "presence_penalty": (0.0, np.float32, lambda x: True, "finite; 0 is off"),
    "frequency_penalty": (0.0, np.float32, lambda x: True, "finite; 0 is off"),
    "min_new_tokens": (0, np.int32, lambda x: x >= 0, "0 or more"),
    "max_new_tokens": (128, np.int32, lambda x: x >= 0, "0 or more"),
}


def host(value: Any) -> Any:
    """Arrays and sequences of them as plain lists and numbers; anything else as it is."""
    if isinstance(value, (str, bytes, type)) or hasattr(value, "_fields"):
        return value
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    if hasattr(value, "__array__"):
        return np.asarray(value).tolist()
    return [host(item) for item in value] if isinstance(value, Sequence) else value


def is_int(value: Any) -> bool:
    """Whether this is a whole number and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def rows(name: str, value: Any, batch: int) -> np.ndarray:
    """A scalar or a per-row sequence as a checked array [B].

    Raises:
      ValueError: wrong length, not a number, not finite, or out of the option's range; names row and value.
    """
    _, dtype, allowed, rule = _RANGES[name]
    value = host(value)
    try:
        given = np.asarray(value)
    except (ValueError, TypeError, OverflowError):  # lists of different lengths
        raise ValueError(f"{name}={show(value)}: give one value, or one per prompt") from None
    if given.ndim > 1 or (given.ndim == 1 and given.shape[0] != batch):
        raise ValueError(f"{name} has shape {given.shape} for {batch} prompts: give one value, or one per prompt")
    booleans = isinstance(value, list) and any(isinstance(item, (bool, np.bool_)) for item in value)
    if given.dtype.kind not in "iuf" or booleans:  # numpy reads [0.5, True] as [0.5, 1.0]
        reason = "too large a number; it must be finite and " if is_int(value) else "give a number, or one per prompt; "
        raise ValueError(f"{name}={show(value)}: {reason}{rule}")
    for row, number in enumerate(given.reshape(-1).tolist()):
        where = f"{name}={number!r}" + (f" (prompt {row})" if given.ndim else "")
        if dtype is np.float32:
            number = _float32(number)
        if not math.isfinite(number) or not allowed(number):
            finite = "" if math.isfinite(number) or "finite" in rule else "finite, "
            raise ValueError(f"{where}: must be {finite}{rule}")
        if dtype is np.int32 and (number != int(number) or number >= 2**31):
            raise ValueError(f"{where}: must be a whole number below 2**31")
    return np.broadcast_to(given.astype(dtype), (batch,))


def _float32(value: Any) -> float:
    """The value after rounding to float32: 1e39 is inf, 1e-46 is 0."""
    with np.errstate(over="ignore"):
        try:
            return float(np.float32(value))
        except OverflowError:  # an int of over 300 digits
            return math.inf if value > 0 else -math.inf


def token_id(name: str, value: Any, vocab_size: int) -> int:
    """A checked token id."""
    if not is_int(value) or not 0 <= int(value) < vocab_size:
        raise ValueError(f"{name}: {show(value)} is not a token id of this model (0..{vocab_size - 1})")
    return int(value)


def eos(eos_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Checked end-of-text ids from an int, a sequence or a set; None is none."""
    eos_ids = sorted(eos_ids) if isinstance(eos_ids, (set, frozenset)) else host(eos_ids)
    if isinstance(eos_ids, numbers.Integral):
        eos_ids = [eos_ids]
    if eos_ids is None:
        eos_ids = []
    if not isinstance(eos_ids, list):
        raise ValueError(f"eos_ids={show(eos_ids)}: give a token id, or a list of them; [] never stops")
    return tuple(dict.fromkeys(token_id("eos_ids", token, vocab_size) for token in eos_ids))


def padded_ids(ids: Sequence[int], multiple: int = 8) -> np.ndarray:
    """Ids padded with -1 to a bucketed length, so that their number does not recompile."""
    width = max(1, -(-len(ids) // multiple)) * multiple
    return np.asarray([*ids, *[-1] * (width - len(ids))], np.int32)


def make_sampling(
    batch: int,
    vocab_size: int,
    *,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None = None,
    banned_tokens: Sequence[int] | Sequence[Sequence[int]] | None = (),
    min_new_tokens: Any = 0,
    eos_ids: int | Sequence[int] | None = (),
) -> Sampling:
    """Sampling parameters of ``batch`` rows; every option is one value or one per row.

    Args:
      temperature: 0 is greedy.
      top_k, top_p, min_p: filters in this order; 0, 1 and 0 switch them off.
      repetition_penalty, presence_penalty, frequency_penalty: over prompt and generated tokens; 1, 0 and 0 are off.
      logit_bias: {token id: added to its logit}; -inf bans.
      banned_tokens: ids that are never emitted; None is none.
      min_new_tokens: eos ids are banned before this many generated tokens.
      eos_ids: ids that end a text; None is none.

    Raises:
      ValueError: a value out of range, a list of the wrong length, an id outside the vocabulary, every id banned.
    """
    batch, vocab_size = whole("batch", batch, 0), whole("vocab_size", vocab_size, 1)
    values = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "min_new_tokens": min_new_tokens,
    }  # fmt: skip
    arrays = {name: rows(name, value, batch) for name, value in values.items()}
    ends = eos(eos_ids, vocab_size)
    bias = _bias_tables(batch, vocab_size, logit_bias, banned_tokens)
    for row, table in enumerate(bias):
        banned = {token for token, value in table.items() if value == -math.inf}
        held = set(ends) if arrays["min_new_tokens"][row] > 0 else set()
        if len(banned | held) >= vocab_size:
            raise ValueError(
                f"prompt {row}: banned_tokens and logit_bias{' with min_new_tokens' if held else ''} leave no token"
            )
    width = max([8, *(1 << (len(table) - 1).bit_length() for table in bias if table)])
    ids = np.full((batch, width), vocab_size, np.int32)
    added = np.zeros((batch, width), np.float32)
    for row, table in enumerate(bias):
        ids[row, : len(table)] = list(table)
        added[row, : len(table)] = list(table.values())
    converted = {name: jnp.asarray(value) for name, value in arrays.items()}
    return Sampling(
        **converted, eos_ids=jnp.asarray(padded_ids(ends)), bias_ids=jnp.asarray(ids), bias=jnp.asarray(added)
    )


def _bias_tables(batch: int, vocab_size: int, logit_bias: Any, banned_tokens: Any) -> list[dict[int, float]]:
    tables: list[dict[int, float]] = [{} for _ in range(batch)]
    biases = {} if logit_bias is None else logit_bias
    if isinstance(biases, Mapping):
        biases = [biases] * batch
    if not isinstance(biases, (list, tuple)) or not all(isinstance(item, Mapping) for item in biases):
        raise ValueError(f"logit_bias={show(logit_bias)}: give a dict {{token id: number}}, or one per prompt")
    bans = [] if banned_tokens is None else host(banned_tokens)
    per_row = isinstance(bans, list) and any(isinstance(item, list) for item in bans)
    if not isinstance(bans, list) or (per_row and not all(isinstance(item, list) for item in bans)):
        raise ValueError(f"banned_tokens={show(banned_tokens)}: give a list of token ids, or a list of one per prompt")
    bans = bans if per_row else [bans] * batch
    for name, given in (("logit_bias", biases), ("banned_tokens", bans)):
        if len(given) != batch:
            raise ValueError(
                f"{name} has {len(given)} entries for {batch} prompts: give one for all, or one per prompt"
            )
    for row, table in enumerate(tables):
        for token, value in biases[row].items():
            value = host(value)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not _float32(value) < math.inf:
                where = f"logit_bias[{show(token)}]={show(value)}"
                raise ValueError(f"{where}: must be a finite number, or -inf to ban the token")
            if value != 0:
                table[token_id("logit_bias", token, vocab_size)] = _float32(value)
        for token in bans[row]:
            table[token_id("banned_tokens", token, vocab_size)] = -math.inf
    return tables
