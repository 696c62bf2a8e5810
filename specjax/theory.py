"""What speculation should give: closed forms, and the same numbers simulated through `accept`.

Host-side numpy in float64, except for `simulate`, which is jitted. p is the target's law, q the draft's, a the
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

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specjax.accept import RULES, accept
from specjax.costs import CostModel as CostModel
from specjax.costs import cost_model as cost_model
from specjax.noise import Role, at, inverse_cdf, row_keys, target_draw, uniform
from specjax.options import host
from specjax.static import real, show, whole
from specjax.types import Array, Proposal

SUM_TOLERANCE = 1e-5  # a law written with float32 numbers sums to 1 within this
CHUNK_ROUNDS = 1 << 14  # rounds simulated at a time
CHUNK_ENTRIES = 1 << 22  # and at most this many entries of target_probs [rounds, 1 + K, V]
BLOCK_PREFIXES = 1 << 20  # distinct prefix weights `expected_tokens_block` is willing to keep

Acceptance = float | Sequence[float]
Cost = float | Callable[[int], float]


# --- two laws


def alpha(p: ArrayLike, q: ArrayLike) -> float:
    """sum_x min(p(x), q(x)) = 1 - TV(p, q): the probability that a draft from q survives `rejection` (theorem 3.5).

    Args:
      p, q: laws [V].

    Raises:
      ValueError: not laws (negative, not finite, not summing to 1), or of different length.
    """
    p, q = _two_laws(p, q)
    return float(np.minimum(p, q).sum())


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """sum_x |p(x) - q(x)| / 2, of laws [V]. Raises as `alpha`."""
    p, q = _two_laws(p, q)
    return float(np.abs(p - q).sum() / 2)


def match_alpha(p: ArrayLike, q: ArrayLike) -> float:
    """sum_x p(x) q(x): acceptance of `match` with drafts independent of the target's noise. Raises as `alpha`."""
    p, q = _two_laws(p, q)
    return float(p @ q)


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
    p, q = _two_laws(p, q)
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


# --- simulation


class Simulation(NamedTuple):
    """Counts of simulated rounds; everything else is read from them."""

    lengths: np.ndarray  # [K + 1] int64: rounds that accepted 0 .. K draft tokens
    tokens: np.ndarray  # [V] int64: how often each token was emitted

    @property
    def rounds(self) -> int:
        """Simulated rounds."""
        return int(self.lengths.sum())

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per round, residual or bonus token included."""
        return 1.0 + float(self.lengths @ np.arange(self.lengths.size)) / self.rounds

    @property
    def tokens_per_round_error(self) -> float:
        """Standard error of ``tokens_per_round``."""
        spread = (np.arange(self.lengths.size) + 1 - self.tokens_per_round) ** 2
        return math.sqrt(float(self.lengths @ spread) / max(self.rounds - 1, 1) / self.rounds)

    @property
    def alpha(self) -> float | None:
        """Accepted / judged draft tokens; None without any."""
        accepted, judged = self._reached()[1:].sum(), self._reached()[:-1].sum()
        return float(accepted / judged) if judged else None

    @property
    def per_position(self) -> list[float | None]:
        """Acceptance of draft token 1 .. K given that the ones before were accepted; None where none was judged."""
        reached = self._reached()
        return [float(after / before) if before else None for before, after in itertools.pairwise(reached)]

    @property
    def law(self) -> np.ndarray:
        """[V] float64: shares of all emitted tokens. An exact rule emits p."""
        return self.tokens / self.tokens.sum()

    def _reached(self) -> np.ndarray:
        """[K + 1] rounds that accepted at least 0 .. K draft tokens."""
        return self.lengths[::-1].cumsum()[::-1]


def simulate(
    p: ArrayLike,
    q: ArrayLike,
    num_draft_tokens: int,
    *,
    rule: str = "rejection",
    rounds: int = 200_000,
    seed: int = 0,
    coupled: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> Simulation:
    """Independent rounds through the library's own `accept`: drafts i.i.d. from q, target law p in every row.

    Rounds are made in chunks of one compiled program, so memory does not grow with their number.

    Args:
      p, q: laws [V].
      num_draft_tokens: K, the length of the chain; 0 draws from p alone.
      rule: "rejection", "block" or "match".
      rounds: 1 or more, below 2**32.
      seed: 0 <= seed < 2**32.
      coupled: draw the drafts with the noise the target will use; only with "match".
      progress: called after every chunk with (rounds done, rounds).

    Raises:
      ValueError: an argument out of range, an unknown rule, coupled drafts with another rule than "match".
    """
    p, q = _two_laws(p, q)
    size, rounds = whole("num_draft_tokens", num_draft_tokens, 0), whole("rounds", rounds, 1)
    seed = whole("seed", seed, 0)
    for name, value in (("rounds", rounds), ("seed", seed)):
        if value >= 2**32:
            raise ValueError(f"{name}={value}: must be below 2**32")
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"rule={show(rule)}: choose one of {sorted(RULES)}")
    if coupled and rule != "match":
        raise ValueError(f"coupled=True with rule={rule!r}: drafts made with the target's noise need rule='match'")
    needed = max(1024, 1 << (rounds - 1).bit_length())  # few sizes, so that few programs are compiled
    rows = max(1, min(needed, CHUNK_ROUNDS, CHUNK_ENTRIES // ((size + 1) * p.size)))
    laws = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
    key = row_keys([seed])[0]
    total = Simulation(np.zeros(size + 1, np.int64), np.zeros(p.size, np.int64))
    for start in range(0, rounds, rows):
        counts = _chunk(key, np.uint32(start), np.uint32(rounds - start), *laws, rows, size, rule, coupled)
        total = Simulation(*(have + np.asarray(new, np.int64) for have, new in zip(total, counts, strict=True)))
        if progress is not None:
            progress(min(start + rows, rounds), rounds)
    return total


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8))
def _chunk(
    key: Array, start: Array, left: Array, p: Array, q: Array, rows: int, size: int, rule: str, coupled: bool
) -> tuple[Array, Array]:
    """Counts of ``rows`` rounds from number ``start`` on, those past ``left`` not counted. Each has its own key."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(start + jnp.arange(rows, dtype=jnp.uint32))
    here = jnp.zeros(rows, jnp.int32)
    vocab = p.shape[0]
    if coupled:
        each = jnp.broadcast_to(q[None], (rows, vocab))
        drafted = [target_draw(keys, here + depth + 1, each) for depth in range(size)]
        tokens = jnp.stack(drafted, axis=1) if drafted else jnp.zeros((rows, 0), jnp.int32)
    else:
        u = uniform(at(keys, Role.DRAFT, here), (size, 2)).reshape(rows * size, 2)
        tokens = inverse_cdf(jnp.broadcast_to(q[None], (rows * size, vocab)), u).reshape(rows, size)
    laws = None if coupled else jnp.broadcast_to(q[None, None], (rows, size, vocab))
    proposal = Proposal(tokens, laws, None, jnp.ones((rows, size), bool))
    accepted = accept(rule, keys, proposal, jnp.broadcast_to(p[None, None], (rows, size + 1, vocab)))
    real = (jnp.arange(rows, dtype=jnp.uint32) < left)[:, None]
    count, slots = accepted.num_accepted[:, None], jnp.arange(size + 1, dtype=jnp.int32)[None]
    padded = jnp.concatenate([tokens, jnp.zeros((rows, 1), jnp.int32)], axis=1)
    emitted = jnp.where(slots == count, accepted.next_token[:, None], padded)
    emitted = jnp.where(real & (slots <= count), emitted, vocab)
    lengths = jnp.sum(real & (count == slots), axis=0, dtype=jnp.int32)
    return lengths, jnp.zeros(vocab, jnp.int32).at[emitted].add(1, mode="drop")


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


def _two_laws(p: ArrayLike, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    p, q = _law("p", p), _law("q", q)
    if p.size != q.size:
        raise ValueError(f"p has {p.size} tokens and q {q.size}: both must be laws over the same vocabulary")
    return p, q
