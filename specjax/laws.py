"""Two laws over one vocabulary: how much they overlap. Host-side numpy in float64.

p is the target's law, q the draft's. Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv
2211.17192 (2023), section 3.
"""

import numpy as np
from numpy.typing import ArrayLike

from specjax.static import show

SUM_TOLERANCE = 1e-5  # a law written with float32 numbers sums to 1 within this


def alpha(p: ArrayLike, q: ArrayLike) -> float:
    """sum_x min(p(x), q(x)) = 1 - TV(p, q): the probability that a draft from q survives `rejection` (theorem 3.5).

    Args:
      p, q: laws [V].

    Raises:
      ValueError: not laws (negative, not finite, not summing to 1), or of different length.
    """
    p, q = two_laws(p, q)
    return float(np.minimum(p, q).sum())


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """sum_x |p(x) - q(x)| / 2, of laws [V]. Raises as `alpha`."""
    p, q = two_laws(p, q)
    return float(np.abs(p - q).sum() / 2)


def match_alpha(p: ArrayLike, q: ArrayLike) -> float:
    """sum_x p(x) q(x): acceptance of `match` with drafts independent of the target's noise. Raises as `alpha`."""
    p, q = two_laws(p, q)
    return float(p @ q)


def _law(name: str, value: ArrayLike) -> np.ndarray:
    try:
        law = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={show(value)}: give one probability per token, [V]") from None
    if law.ndim != 1 or not law.size:
        raise ValueError(f"{name} has shape {law.shape}: give one probability per token, [V]")
    if not np.all(np.isfinite(law)) or np.any(law < 0):
        raise ValueError(f"{name}: every probability must be finite and not negative")
    if abs(law.sum() - 1) > SUM_TOLERANCE:
        raise ValueError(f"{name} sums to {law.sum():.6g}, not to 1")
    return law


def two_laws(p: ArrayLike, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 arrays. Raises as `alpha`."""
    p, q = _law("p", p), _law("q", q)
    if p.size != q.size:
        raise ValueError(f"p has {p.size} tokens and q {q.size}: both must be laws over the same vocabulary")
    return p, q
