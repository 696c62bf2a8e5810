"""logits -> sampling law. One function for target, draft, plain decoding and reported log-probabilities.

Order: repetition, then presence and frequency penalties (counts over prompt, committed tokens and the drafted tokens
a row is conditioned on); logit bias and bans; min_new_tokens; temperature; top-k; top-p on what top-k kept (the token
that crosses the threshold stays); min-p relative to the largest probability. Ties are decided by rank, the lower id
first, so a filter never keeps more than it was asked for. Temperature 0 is a point mass at the lowest-index argmax.

A row that has no law (a NaN or +inf logit, or every id at -inf) comes back as NaN: it is reported by the round,
never turned into a token.

Nothing is sorted: top-k and top-p are thresholds found by bisection over the bits of the float, which is an order
of magnitude cheaper than a sort of the vocabulary; a filter that no row uses costs nothing.

Sources: repetition penalty, Keskar et al., CTRL, arXiv 1909.05858 (2019); nucleus, Holtzman et al., The Curious Case of
Neural Text Degeneration, arXiv 1904.09751 (2019); min-p, Nguyen et al., Turning Up the Heat, arXiv 2407.01082 (2024).
"""

import jax
import jax.numpy as jnp
from jax import lax

from specjax import rows
from specjax.noise import argmax
from specjax.sharding import COUNTS, told
from specjax.types import Array, Sampling, Text

GREEDY_BELOW = 1e-30  # temperatures under this are 0: logit / T would overflow and every law is a point mass there


def warp(
    logits: Array,
    sampling: Sampling,
    text: Text | None = None,
    drafted: Array | None = None,
    seen: Array | None = None,
    ids: Array | None = None,
) -> Array:
    """The sampling law of each window row.

    Args:
      logits: [B, T, V], raw; or [B, T, M] over a reduced vocabulary, see ``ids``.
      sampling: per-row parameters.
      text: prompt and committed tokens, counted by the penalties; None counts only what was drafted.
      drafted: [B, A] drafted tokens that some row is conditioned on.
      seen: [1 or B, T, A] bool, row t is the law after drafted token a.
      ids: [M] int32, ascending: the token of each column of a reduced vocabulary. Penalties, bias and held-back ends
        fall on the columns of their tokens. None: column i is token i.

    Returns:
      [B, T, V] or [B, T, M] float32 probabilities; NaN in rows that have no law.
    """
    logits = logits.astype(jnp.float32)
    batch, width, _ = logits.shape
    if drafted is None or seen is None:
        drafted, seen = jnp.zeros((batch, 0), jnp.int32), jnp.zeros((1, width, 0), bool)
    seen = jnp.broadcast_to(seen, (batch, width, drafted.shape[1]))
    logits = _penalise(logits, sampling, text, drafted, seen, ids)
    logits = _bias(logits, sampling, ids)
    logits = _hold_back_eos(logits, sampling, text, seen, ids)
    return _law(logits, sampling)


def _columns(tokens: Array, width: int, ids: Array | None) -> Array:
    """The columns of ``tokens``, any shape; ``width``, which is dropped, for a token that has none."""
    if ids is None:
        return jnp.where((tokens >= 0) & (tokens < width), tokens, width)
    place = jnp.minimum(jnp.searchsorted(ids, tokens).astype(jnp.int32), width - 1)
    return jnp.where(ids[place] == tokens, place, width)


def _penalise(
    logits: Array, sampling: Sampling, text: Text | None, drafted: Array, seen: Array, ids: Array | None
) -> Array:
    repetition, presence, frequency = (
        value[:, None, None]
        for value in (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    )

    def penalty(x, count):
        scaled = jnp.where(x > 0, x / repetition, x * repetition)
        return jnp.where(count > 0, scaled - presence - frequency * count.astype(jnp.float32), x)

    def apply(logits):
        batch, _, vocab = logits.shape
        counts = told(COUNTS, jnp.zeros((batch, vocab), jnp.int32))
        if text is not None:
            real = jnp.arange(text.tokens.shape[1])[None] < text.lengths[:, None]
            columns = jnp.where(real, _columns(text.tokens, vocab, ids), vocab)
            counts = told(COUNTS, rows.add(counts, jnp.ones_like(columns), columns))
        penalised = penalty(logits, counts[:, None, :])
        # Drafted ancestors change the count of a few ids per row: rewrite those entries only.
        same = (drafted[:, :, None] == drafted[:, None, :]).astype(jnp.int32)
        extra = jnp.einsum("bta,bac->btc", seen.astype(jnp.int32), same)
        column = _columns(drafted, vocab, ids)
        inside = jnp.minimum(column, vocab - 1)
        entries = penalty(
            jnp.take_along_axis(logits, jnp.broadcast_to(inside[:, None, :], seen.shape), axis=2),
            jnp.take_along_axis(counts, inside, axis=1)[:, None, :] + extra,
        )
        return _put(penalised, entries, jnp.where(seen, column[:, None, :], vocab))

    wanted = jnp.any(repetition != 1) | jnp.any(presence != 0) | jnp.any(frequency != 0)
    return lax.cond(wanted, apply, lambda x: x, logits)


def _put(logits: Array, entries: Array, columns: Array) -> Array:
    """logits [B, T, V] with ``entries [B, T, A]`` at ``columns [B, T, A]``; V is dropped."""
    return jax.vmap(rows.put)(logits, entries, columns)


def _bias(logits: Array, sampling: Sampling, ids: Array | None) -> Array:
    def apply(logits):
        columns = _columns(sampling.bias_ids, logits.shape[-1], ids)
        bias = rows.add(jnp.zeros((logits.shape[0], logits.shape[-1])), sampling.bias, columns)
        return logits + told(COUNTS, bias)[:, None]

    return lax.cond(jnp.any(sampling.bias != 0), apply, lambda x: x, logits)


def _hold_back_eos(
    logits: Array, sampling: Sampling, text: Text | None, seen: Array, ids: Array | None
) -> Array:
    emitted = jnp.sum(seen, axis=-1, dtype=jnp.int32)
    if text is not None:
        emitted = emitted + (text.lengths - text.prompt_lengths)[:, None]
    early = emitted < sampling.min_new_tokens[:, None]

    def apply(logits):
        vocab = logits.shape[-1]
        ends = _columns(sampling.eos_ids, vocab, ids)  # padding is -1, no token
        held = jnp.zeros(vocab, bool).at[ends].set(True, mode="drop")
        return jnp.where(early[:, :, None] & held[None, None], -jnp.inf, logits)

    return lax.cond(jnp.any(early), apply, lambda x: x, logits)


def _law(logits: Array, sampling: Sampling) -> Array:
    top = jnp.max(logits, axis=-1, keepdims=True)
    temperature = sampling.temperature[:, None, None]
    greedy = temperature < GREEDY_BELOW

    def sampled(_):
        weights = jnp.exp((logits - top) / jnp.where(greedy, 1.0, temperature))
        k, p = sampling.top_k[:, None, None], sampling.top_p[:, None, None]
        weights = _filter(logits, weights, jnp.where(greedy, 0, k), jnp.where(greedy, 1.0, p))
        weights = jnp.where(weights >= sampling.min_p[:, None, None], weights, 0.0)  # the largest weight is 1
        return weights / jnp.sum(weights, axis=-1, keepdims=True)

    law = lax.cond(jnp.all(greedy), jnp.zeros_like, sampled, logits)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    law = jnp.where(greedy, (ids == argmax(logits)[..., None]).astype(jnp.float32), law)
    return jnp.where(jnp.isfinite(top), law, jnp.nan)


def _filter(logits: Array, weights: Array, k: Array, p: Array) -> Array:
    """Top-k, then top-p: both keep a prefix in the order (logit descending, id ascending), so the shorter one decides.

    A prefix is a threshold on the bits of the logit and a number of ids kept among those that tie with it.

    Args:
      logits, weights: [B, T, V]; weights are exp(logits / T) on any scale.
      k: [B, 1, 1], 0 is off.
      p: [B, 1, 1], 1 is off. The shortest prefix with at least this share of what top-k kept.
    """
    vocab = logits.shape[-1]
    k = jnp.where((k > 0) & (k < vocab), k, vocab)

    def apply(weights):
        bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)  # the two zeros are one
        keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # int32 order is float order
        low = jnp.full((*keys.shape[:-1], 1), -(2**31), jnp.int32)

        def size(kept):
            return jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.int32)

        def mass(kept):
            return jnp.sum(jnp.where(kept, weights, 0.0), axis=-1, keepdims=True)

        def weight_at(cut):
            return jnp.max(jnp.where(keys == cut, weights, 0.0), axis=-1, keepdims=True)

        cut_k = lax.cond(jnp.any(k < vocab), lambda: _bisect(lambda cut: size(keys >= cut) >= k, low), lambda: low)
        ties_k = k - size(keys > cut_k)
        wanted = p * (mass(keys > cut_k) + ties_k.astype(jnp.float32) * weight_at(cut_k))

        def enough(cut):
            return (cut <= cut_k) | (mass(keys >= cut) >= wanted)

        cut = lax.cond(jnp.any(p < 1), lambda: _bisect(enough, low), lambda: cut_k)
        cut = jnp.where(p < 1, cut, cut_k)
        edge = weight_at(cut)
        missing = (wanted - mass(keys > cut)) / jnp.where(edge > 0, edge, 1.0)
        ties_p = jnp.where(p < 1, jnp.clip(jnp.ceil(missing), 1, vocab), vocab).astype(jnp.int32)
        ties = jnp.minimum(jnp.where(cut == cut_k, ties_k, vocab), ties_p)
        return jnp.where((keys > cut) | _first(keys == cut, ties), weights, 0.0)

    return lax.cond(jnp.any(k < vocab) | jnp.any(p < 1), apply, lambda w: w, weights)


def _bisect(enough, low: Array, bits: int = 32) -> Array:
    """The largest int32 threshold that is ``enough`` (true for ``low``, never true again once false)."""

    def step(i, threshold):
        candidate = threshold + lax.shift_left(jnp.int32(1), bits - 1 - i)  # from -2**31 the first step wraps to 0
        return jnp.where(enough(candidate), candidate, threshold)

    return lax.fori_loop(0, bits, step, low)


def _first(tied: Array, count: Array) -> Array:
    """The first ``count [.., 1]`` true entries of ``tied [.., V]``."""

    def some(tied):
        ids = jnp.arange(tied.shape[-1], dtype=jnp.int32)[None, None]
        bits = max(1, tied.shape[-1].bit_length())
        cut = _bisect(
            lambda end: jnp.sum(tied & (ids < end), axis=-1, keepdims=True, dtype=jnp.int32) <= count,
            jnp.zeros_like(count), bits,
        )
        return tied & (ids < cut)

    total = jnp.sum(tied, axis=-1, keepdims=True, dtype=jnp.int32)
    return lax.cond(jnp.any(total > count), some, lambda tied: tied, tied)
