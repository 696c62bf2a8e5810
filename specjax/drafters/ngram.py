"""Prompt lookup: what followed the last few tokens when they occurred before is proposed again.

Saxena, Prompt Lookup Decoding (2023); Yang et al., Inference with Reference, arXiv 2304.04487 (2023).
The proposal is a function of the text, hence a point mass; nothing is learned and no state is kept.
"""

import jax.numpy as jnp

from specjax.static import bind, whole
from specjax.types import Array, Committed, Drafter, Proposal, PyTree, Sampling, Text


def ngram(num_draft_tokens: int = 7, *, max_ngram: int = 4, min_ngram: int = 2) -> Drafter:
    """Looks up the longest suffix of the text, max_ngram .. min_ngram tokens long, that occurred before.

    The most recent occurrence wins. Proposes what followed it, up to and including an end id and never past the text
    there is; proposes nothing when nothing matches.

    Args:
      num_draft_tokens: longest proposal, N.
      max_ngram, min_ngram: tokens that have to match. A single token is a poor guide and seldom pays for the
        wider window.

    Raises:
      ValueError: not whole numbers, num_draft_tokens < 1 or not 1 <= min_ngram <= max_ngram.
    """
    num_draft_tokens = whole("num_draft_tokens", num_draft_tokens, 1, "; drafter=None decodes plainly")
    max_ngram, min_ngram = whole("max_ngram", max_ngram, 1), whole("min_ngram", min_ngram, 1)
    if min_ngram > max_ngram:
        raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: must be 1 <= min_ngram <= max_ngram")
    return Drafter(
        params=(),
        init=_init,
        observe=_observe,
        draft=bind(_draft, max_ngram, min_ngram),
        num_draft_tokens=num_draft_tokens,
        widths=(0,),
    )


def _init(params: PyTree, batch: int, capacity: int) -> tuple:
    return ()


def _observe(params: PyTree, state: tuple, committed: Committed) -> tuple:
    return state


def _draft(
    max_ngram: int, min_ngram: int, params: PyTree, keys: Array, state: tuple, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, tuple]:
    length = text.lengths[:, None]
    slots = jnp.arange(text.tokens.shape[1], dtype=jnp.int32)[None]
    matched = match_lengths(text, max_ngram)
    score = jnp.where(matched >= min_ngram, matched * text.tokens.shape[1] + slots, -1)  # longest, then most recent
    best = jnp.max(score, axis=1, keepdims=True)
    follow = best % text.tokens.shape[1] + 1 + jnp.arange(n, dtype=jnp.int32)[None]
    valid = (best >= 0) & (follow < length)
    tokens = jnp.where(valid, jnp.take_along_axis(text.tokens, jnp.where(valid, follow, 0), axis=1), 0)
    ends = jnp.any(tokens[:, :, None] == sampling.eos_ids[None, None], axis=-1) & valid
    first_end = jnp.min(jnp.where(ends, jnp.arange(n, dtype=jnp.int32)[None], n), axis=1, keepdims=True)
    valid = valid & (jnp.arange(n, dtype=jnp.int32)[None] <= first_end)
    return Proposal(jnp.where(valid, tokens, 0), None, None, valid), state


def match_lengths(text: Text, longest: int) -> Array:
    """[B, S]: how many tokens ending at slot i equal the last tokens of the text, at most ``longest``; 0 at and past
    the last token, which would match itself."""
    slots = jnp.arange(text.tokens.shape[1], dtype=jnp.int32)[None]
    earlier = slots < text.lengths[:, None] - 1
    run = jnp.zeros(text.tokens.shape, jnp.int32)
    alive = earlier
    for back in range(longest):
        last = jnp.take_along_axis(text.tokens, jnp.maximum(text.lengths[:, None] - 1 - back, 0), axis=1)
        shifted = jnp.roll(text.tokens, back, axis=1)
        alive = alive & (shifted == last) & (slots >= back)
        run = run + alive.astype(jnp.int32)
    return run
