"""What speculation should give: closed forms, and the same numbers simulated through `accept`.

Closed forms: host-side numpy in float64. `alpha` and its like are in `specjax.laws`, `simulate` in
`specjax.simulation`, costs in `specjax.costs`; all are here by name. p is the target's law, q the draft's, a the
probability that a judged draft token is accepted, K the number of draft tokens, E the tokens a round emits, residual or
bonus token included. Costs are in plain target steps.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv 2211.17192 (2023): E and a in section
3.1-3.2, speed-up and best K in 3.3-3.5. Sun et al., Block Verification Accelerates Speculative Decoding, arXiv
2403.10444 (2024), for `block`.

>>> round(expected_tokens(0.8, 4), 4)
3.3616
>>> best_k(0.6, draft_cost=0.05)
4
>>> round(alpha([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), 2)
0.7
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specjax.costs import CostModel as CostModel
from specjax.costs import cost_model as cost_model
from specjax.laws import alpha as alpha
from specjax.laws import match_alpha as match_alpha
from specjax.laws import total_variation as total_variation
from specjax.laws import two_laws
from specjax.options import host
from specjax.simulation import Simulation as Simulation
from specjax.simulation import simulate as simulate
from specjax.static import real, whole

BLOCK_PREFIXES = 1 << 20  # distinct prefix weights `expected_tokens_block` is willing to keep

Acceptance = float | Sequence[float]
Cost = float | Callable[[int], float]


# --- tokens per round


def expected_tokens(acceptance: Acceptance, num_draft_tokens: int | None = None) -> float:
    """E = 1 + a_1 + a_1 a_2 + .. + a_1 .. a_K, which is (1 - a^(K+1)) / (1 - a) when all are a (equation 1).

    Summed term by term, so a = 1 is no special case and nothing cancels near it.

    Args:
      acceptance: a, or a_1 .. a_K with a_i the acceptance of draft token i given that the ones before were accepted
        (what ``stats.per_position`` estimates).
      num_draft_tokens: K, 0 or more. Optional for a sequence, of which it takes the first K.

    Raises:
      ValueError: an acceptance outside [0, 1], K negative or longer than the sequence, K missing.
    """
    return 1.0 + math.fsum(itertools.accumulate(_acceptances(acceptance, num_draft_tokens), operator.mul))


def expected_tokens_block(p: ArrayLike, q: ArrayLike, num_draft_tokens: int) -> float:
    """E of rule `block` for a chain drafted independently from q, target independent p: 1 + sum_i E_q[P_i].

    P_i = min(P_{i-1} p(x_i) / q(x_i), 1) is the probability that a drafted prefix x_1 .. x_i survives. Equal
    weights are merged, so few tokens or few distinct ratios go far.

    Args:
      p, q: laws [V].
      num_draft_tokens: K.

    Raises:
      ValueError: as `alpha`; K negative; more than 2**20 distinct prefix weights (use `simulate`).
    """
    p, q = two_laws(p, q)
    ratio, mass = p[q > 0] / q[q > 0], q[q > 0]
    weights, shares, total = np.ones(1), np.ones(1), 1.0
    for _ in range(whole("num_draft_tokens", num_draft_tokens, 0)):
        if weights.size * ratio.size > BLOCK_PREFIXES:
            raise ValueError(
                f"block with {p.size} tokens and num_draft_tokens={num_draft_tokens} has too many different "
                "prefixes to enumerate: use simulate(p, q, num_draft_tokens, rule='block')"
            )
        longer = np.round(np.minimum(weights[:, None] * ratio, 1.0), 15).ravel()  # merges what differs by rounding
        weights, where = np.unique(longer, return_inverse=True)
        shares = np.bincount(where, (shares[:, None] * mass).ravel())
        total += float(weights @ shares)
    return total


# --- time


def speed_up(
    acceptance: Acceptance,
    num_draft_tokens: int | None = None,
    *,
    draft_cost: float = 0.0,
    draft_overhead: float = 0.0,
    verify_cost: Cost = 1.0,
) -> float:
    """E / (D + v), tokens per plain-step time; D = K c + overhead. Theorem 3.8 is the case overhead = 0, v = 1.

    Args:
      acceptance, num_draft_tokens: as `expected_tokens`. K = 0 is plain decoding: 1 by definition.
      draft_cost: c, one draft step / one plain target step.
      draft_overhead: cost of a round's draft that does not depend on K (all of D, for a one-pass drafter).
      verify_cost: v, one pass over the window / one plain step; a number, or a function of the window's width 1 + K.

    Raises:
      ValueError: as `expected_tokens`; a cost that is negative or not finite, verification that costs nothing.
    """
    chain = _acceptances(acceptance, num_draft_tokens)
    time = _round_cost(len(chain), draft_cost, draft_overhead, verify_cost)
    return expected_tokens(chain) / time


def best_k(
    acceptance: Acceptance,
    *,
    draft_cost: float = 0.0,
    draft_overhead: float = 0.0,
    verify_cost: Cost = 1.0,
    longest: int = 128,
) -> int:
    """The K in 0 .. longest of the largest `speed_up`; the shortest of equals, 0 where speculation does not pay.

    Args:
      acceptance, draft_cost, draft_overhead, verify_cost: as `speed_up`.
      longest: K considered, at most; a sequence of acceptances ends the search too. Free drafts
        (both costs 0, v constant) have no optimum: the answer is then this bound.

    Raises:
      ValueError: as `speed_up`; longest negative.
    """
    longest = whole("longest", longest, 0)
    acceptance = host(acceptance)
    if isinstance(acceptance, list):
        longest = min(longest, len(acceptance))
    costs = {"draft_cost": draft_cost, "draft_overhead": draft_overhead, "verify_cost": verify_cost}
    return max(range(longest + 1), key=lambda k: speed_up(acceptance, k, **costs))  # the first of equals


def break_even(
    num_draft_tokens: int, *, draft_cost: float = 0.0, draft_overhead: float = 0.0, verify_cost: Cost = 1.0
) -> float | None:
    """The acceptance at which K draft tokens cost as much as they save: E = D + v. None if no acceptance pays.

    For K = 1 it is D + v - 1. With v = 1 and no overhead some K pays as soon as a > c (corollary 3.9).

    Args:
      num_draft_tokens: K, 1 or more.
      draft_cost, draft_overhead, verify_cost: as `speed_up`.

    Raises:
      ValueError: K < 1, or as `speed_up`.
    """
    size = whole("num_draft_tokens", num_draft_tokens, 1)
    time = _round_cost(size, draft_cost, draft_overhead, verify_cost)
    if time > size + 1:
        return None
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):  # E grows with a: halve down to neighbouring floats
        low, high = (middle, high) if expected_tokens(middle, size) < time else (low, middle)
    return 0.0 if time <= 1 else high


# --- arguments


def _acceptances(acceptance: Acceptance, num_draft_tokens: int | None) -> list[float]:
    """a_1 .. a_K, checked."""
    acceptance = host(acceptance)
    if not isinstance(acceptance, list):
        each = _probability("acceptance", acceptance)
        if num_draft_tokens is None:
            raise ValueError("num_draft_tokens is missing: one acceptance for all positions does not tell how many")
        return [each] * whole("num_draft_tokens", num_draft_tokens, 0)
    chain = [_probability(f"acceptance[{i}]", a) for i, a in enumerate(acceptance)]
    size = len(chain) if num_draft_tokens is None else whole("num_draft_tokens", num_draft_tokens, 0)
    if size > len(chain):
        raise ValueError(f"num_draft_tokens={size}: acceptance has {len(chain)} positions; give one for each")
    return chain[:size]


def _round_cost(size: int, draft_cost: float, draft_overhead: float, verify_cost: Cost) -> float:
    """D + v; 1 for a plain step."""
    draft = size * _cost("draft_cost", draft_cost) + _cost("draft_overhead", draft_overhead)
    verify = _cost("verify_cost", verify_cost(size + 1) if callable(verify_cost) else verify_cost)
    if verify == 0:
        raise ValueError("verify_cost=0: a pass over the window is not free; 1 is the cost of a plain step")
    return draft + verify if size else 1.0


def _probability(name: str, value: Any) -> float:
    return real(name, value, 0, 1, "a probability, 0 to 1")


def _cost(name: str, value: Any) -> float:
    return real(name, value, 0, math.inf, "0 or more plain steps, and finite")
