"""Where two texts part, and how close the decision was.

Windows of different widths sum in different orders, so two exact decoders can differ where the target itself hardly
prefers one token to the other. A first divergence with a wide margin is a bug; with a narrow one it is rounding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.language_model import LanguageModel


class Divergence(NamedTuple):
    """The first place where two continuations differ."""

    index: int  # of the generated token
    margin: float  # logit of the best token minus logit of the second best there


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ (one may end earlier); None if they are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def divergence(lm: LanguageModel, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Divergence | None:
    """The first difference of two greedy continuations of ``prompt`` with the target's top-2 margin; None if equal."""
    index = first_difference(a, b)
    if index is None:
        return None
    return Divergence(index, top2_margin(lm, [*prompt, *a[:index]]))


def top2_margin(lm: LanguageModel, ids: Sequence[int]) -> float:
    """Best minus second best logit of the token that follows ``ids``, read in one pass of the whole text."""
    width = -(-len(ids) // 64) * 64
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(ids)] = ids
    top = jax.lax.top_k(_logits(lm, tokens, len(ids) - 1), 2)[0]
    return float(top[0] - top[1])


def _logits(lm: LanguageModel, tokens: np.ndarray, at: int) -> jax.Array:
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    cache = lm.model.init_cache(1, tokens.shape[1])
    out = lm.model.apply(
        lm.params, jnp.asarray(tokens), jnp.asarray(positions), None, cache, logits_at=jnp.asarray([at])
    )
    return out.logits[0, 0]
