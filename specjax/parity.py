"""Where two texts part, and how close the decision was.

Windows of different widths sum in different orders, so two exact decoders can differ where the target itself hardly
prefers one token to the other. A first divergence with a wide margin is a bug; with a narrow one it is rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import noise
from specjax.models.language_model import LanguageModel


class Divergence(NamedTuple):
    """The first place where two continuations differ."""

    index: int  # of the generated token
    margin: float  # how decided the target was there, see `divergence`


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ (one may end earlier); None if they are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def divergence(
    lm: LanguageModel, prompt: Sequence[int], a: Sequence[int], b: Sequence[int], *, temperature: float = 0.0,
    top_p: float = 1.0, seed: int = 0,
) -> Divergence | None:  # fmt: skip
    """The first difference of two continuations of ``prompt`` with the margin of the target's decision; None if equal.

    Greedy: the best logit minus the second best. Drawn (rule "match"): the same of logits / temperature plus the noise
    of that place, or, if that is less, how far the probability before either token is from ``top_p``.
    """
    index = first_difference(a, b)
    if index is None:
        return None
    ids = [*prompt, *a[:index]]
    if not temperature:
        return Divergence(index, top2_margin(lm, ids))
    return Divergence(index, _drawn_margin(lm, ids, [*a[index : index + 1], *b[index : index + 1]], temperature, top_p,
                                           seed))  # fmt: skip


def top2_margin(lm: LanguageModel, ids: Sequence[int]) -> float:
    """Best minus second best logit of the token that follows ``ids``, read in one pass of the whole text."""
    top = jax.lax.top_k(_logits(lm, ids), 2)[0]
    return float(top[0] - top[1])


def _drawn_margin(
    lm: LanguageModel, ids: Sequence[int], tokens: Sequence[int], temperature: float, top_p: float, seed: int
) -> float:
    logits = np.asarray(_logits(lm, ids), np.float64) / temperature
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    before = np.empty_like(probs)
    before[order] = np.cumsum(probs[order]) - probs[order]  # mass of the tokens ahead of each
    drawn = noise.gumbel(noise.row_keys([seed]), jnp.asarray([len(ids)], jnp.int32), probs.size)
    scores = np.sort(np.where(before < top_p, logits + np.asarray(drawn[0], np.float64), -np.inf))
    edges: list[Any] = [abs(before[token] - top_p) for token in tokens] if top_p < 1 else []
    return float(min([scores[-1] - scores[-2], *edges]))


def _logits(lm: LanguageModel, ids: Sequence[int]) -> jax.Array:
    width = -(-len(ids) // 64) * 64
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(ids)] = ids
    positions = np.arange(width, dtype=np.int32)[None]
    cache = lm.model.init_cache(1, width)
    out = lm.model.apply(
        lm.params, jnp.asarray(tokens), jnp.asarray(positions), None, cache, logits_at=jnp.asarray([len(ids) - 1])
    )
    return out.logits[0, 0]
