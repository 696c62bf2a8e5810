"""Policies: how many tokens to draft in the next round, decided on the device from past rounds.

A policy is a hashable setting with ``sizes`` (its tiers: the numbers of draft tokens it chooses from) and three pure
functions: ``init`` makes its state, ``choose`` reads the tier of the next round from it, ``update`` adds what a round
brought. The tier is chosen before anything is drafted, so whether a token is verified never depends on that token, and
every exact rule stays exact. Counts are sums of whole numbers over the batch: all replicas choose the same.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.costs import CostModel
from specjax.static import real, show, whole
from specjax.types import Array, PyTree

TIERS = (0, 2, 4, 8, 16)
PRIOR = 0.7  # acceptance before anything is known; it weighs as much as one judged token
SAVED = 4  # allowances that past gains may add up to


class Outcome(NamedTuple):
    """What a policy learns from a round."""

    tier: Array  # [] int32, index into the policy's sizes
    nodes: Array  # [] int32, draft nodes in the window that the target read: at most the tier's, 0 if none were valid
    proposed: Array  # [B] int32 valid draft nodes
    accepted: Array  # [B] int32, of those that were emitted
    emitted: Array  # [B] int32: one more than accepted, unless an end cut the block; 0 in rows that took no part


class Pace(NamedTuple):
    """State of `Adaptive`. M tiers, N draft tokens in the largest; times in plain rounds."""

    draft: Array  # [M] time of drafting in each tier
    verify: Array  # [N + 1] time of a window with 0 .. N draft nodes
    judged: Array  # [M, N] rows that reached depth i + 1 in rounds of a tier, older ones fading; float32
    accepted: Array  # [M, N] rows that got past it
    rounds: Array  # [M] rounds of a tier in which something was proposed
    spent: Array  # [M] what they took, and the drafting in the others
    balance: Array  # [] time that may still be lost against plain decoding
    tier: Array  # [] int32, of the next round


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """The tier of the most expected tokens per second, by measured costs and the acceptance of past rounds.

    It keeps an account. Every emitted token pays in what it would have taken to decode it plainly, plus ``max_loss``;
    every round is paid from it. A tier is only chosen if the account covers a round in which nothing is accepted. So
    whatever the drafts are worth, the whole takes at most 1 + ``max_loss`` of plain decoding's time plus ``allowance``
    plain rounds, as far as the costs are right; and where drafts do not pay, some are tried from time to time.

    Args:
      tiers: numbers of draft tokens to choose from; 0 is plain decoding, without which there is no account. None: 0, 2,
        4, 8, 16 and the drafter's own.
      costs: None: measured once and remembered, see `specjax.theory.cost_model`.
      decay: weight of the evidence after one more round.
      margin: share by which another tier must be faster before it replaces the one in use.
      max_loss: share of plain decoding's time that may be lost.
      allowance: plain rounds that may be lost besides; past gains may raise it to four times as much.

    Raises:
      ValueError: tiers that are no different whole numbers, or more than the costs are of; settings out of range.
    """

    tiers: tuple[int, ...] | None = None
    costs: CostModel | None = None
    decay: float = 0.9
    margin: float = 0.03
    max_loss: float = 0.01
    allowance: float = 2.0

    def __post_init__(self):
        if self.tiers is not None:
            object.__setattr__(self, "tiers", _sizes(self.tiers, 0))
        for name, low, high in (("decay", 0, 1), ("margin", 0, 1), ("max_loss", 1e-4, 1), ("allowance", 0, 1e6)):
            number = real(f"adaptive.{name}", getattr(self, name), low, high, f"a number from {low} to {high:g}")
            object.__setattr__(self, name, number)
        if self.costs is not None:
            if not isinstance(self.costs, CostModel):
                raise ValueError(f"adaptive.costs={show(self.costs)}: give None or what theory.cost_model returned")
            self.costs.seconds((0,))
            if self.sizes[-1] > (most := self.costs.sizes[-1]):
                raise ValueError(
                    f"adaptive.costs={show(self.costs)} are of 0..{most} draft tokens, not of {self.sizes[-1]}: give "
                    f"tiers of at most {most}, as tiers=(0, {most}), or measure again: theory.cost_model(lm, drafter)"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Draft tokens per tier, ascending."""
        return self.tiers or (0,)

    def init(self) -> Pace:
        """Starts with the tier that the prior acceptance suggests.

        Raises:
          ValueError: there are no costs.
        """
        if self.costs is None:
            raise ValueError("adaptive.costs=None: generate measures them; give what theory.cost_model returns")
        known, most = self.costs, self.sizes[-1]
        unit = known.verify[0] + known.draft[0]
        draft = jnp.asarray(np.interp(self.sizes, known.sizes, known.draft) / unit, jnp.float32)
        verify = jnp.asarray(np.interp(np.arange(most + 1), known.sizes, known.verify) / unit, jnp.float32)
        judged, accepted = jnp.zeros((2, len(self.sizes), most))
        rounds, spent = jnp.zeros((2, len(self.sizes)))
        start = Pace(draft, verify, judged, accepted, rounds, spent, jnp.float32(self.allowance), jnp.int32(-1))
        return start._replace(tier=self._best(start))

    def choose(self, pace: Pace) -> Array:
        """[] index of the next round's tier."""
        return pace.tier

    def update(self, pace: Pace, outcome: Outcome) -> Pace:
        """After a round."""
        tier, depth = outcome.tier, jnp.arange(self.sizes[-1], dtype=jnp.int32)[None]
        here = jnp.arange(len(self.sizes), dtype=jnp.int32) == tier
        found = outcome.nodes > 0
        reached = outcome.emitted[:, None] > depth
        passed = outcome.accepted[:, None] > depth
        tried = here[:, None] & found & (depth < jnp.asarray(self.sizes, jnp.int32)[:, None])

        def add(old: Array, rows: Array) -> Array:
            new = jnp.sum(rows, axis=0, dtype=jnp.int32).astype(jnp.float32)
            return self.decay * old + jnp.where(tried, new[None], 0.0)

        took = pace.draft[tier] + pace.verify[outcome.nodes]
        # A round in which nothing was found to propose is a plain one: only the search is charged to the tier.
        charged = jnp.where(found, took, pace.draft[tier])
        emitted, took_part = (jnp.sum(x, dtype=jnp.int32) for x in (outcome.emitted, outcome.emitted > 0))
        each = emitted.astype(jnp.float32) / jnp.maximum(took_part, 1).astype(jnp.float32)
        paid = jnp.where(took_part > 0, each * (1 + self.max_loss) - took, 0.0)
        pace = pace._replace(
            judged=add(pace.judged, reached),
            accepted=add(pace.accepted, passed),
            rounds=self.decay * pace.rounds + (here & found).astype(jnp.float32),
            spent=self.decay * pace.spent + jnp.where(here, charged, 0.0),
            balance=jnp.minimum(pace.balance + paid, SAVED * self.allowance),
        )
        return pace._replace(tier=self._best(pace))

    def _best(self, pace: Pace) -> Array:
        """The tier of the most tokens per time among those that the account covers."""
        sizes = np.asarray(self.sizes)
        full = pace.draft + pace.verify[sizes]
        covered = (full - (1 + self.max_loss) <= pace.balance) | jnp.asarray(sizes == 0) | bool(sizes[0])
        time = jnp.where(jnp.asarray(sizes > 0), (pace.spent + full) / (pace.rounds + 1), full)
        speed = _tokens(self._acceptance(pace), sizes) / time
        speed = jnp.where(jnp.arange(len(sizes)) == pace.tier, (1 + self.margin) * speed, speed)
        return jnp.argmax(jnp.where(covered, speed, 0.0)).astype(jnp.int32)

    def _acceptance(self, pace: Pace) -> Array:
        """[M, N]: of each tier at each depth; what all tiers saw there counts as one more judged token, and to that one
        more what was seen at all depths."""
        everywhere = (jnp.sum(pace.accepted) + PRIOR) / (jnp.sum(pace.judged) + 1)
        there = (jnp.sum(pace.accepted, axis=0) + everywhere) / (jnp.sum(pace.judged, axis=0) + 1)
        return (pace.accepted + there[None]) / (pace.judged + 1)


def _tokens(acceptance: Array, sizes: np.ndarray) -> Array:
    """[M] expected tokens of a round in each tier, by acceptance [M, N] of draft token i given those before."""
    drafted = np.arange(acceptance.shape[1])[None] < sizes[:, None]
    return 1.0 + jnp.sum(jnp.where(jnp.asarray(drafted), jnp.cumprod(acceptance, axis=1), 0.0), axis=1)


@dataclasses.dataclass(frozen=True)
class Heuristic:
    """Two draft tokens more after a round in which all were accepted, else one fewer; for comparison.

    The schedule "heuristic" of Hugging Face Transformers' assisted generation, which has one row; here all rows must
    have accepted all. It never drafts less than one token, so it cannot fall back to plain decoding.

    Args:
      tiers: numbers of draft tokens that have a program. The number that is wanted is rounded down to one of them; the
        smallest is used where fewer are wanted. None: 1, 2, 4, 8, 16 and the drafter's own.
      start: draft tokens wanted at first, from the smallest tier to the largest; None: the largest.

    Raises:
      ValueError: tiers that are no different whole numbers from 1 on; a start outside of them.
    """

    tiers: tuple[int, ...] | None = None
    start: int | None = None

    def __post_init__(self):
        if self.tiers is not None:
            object.__setattr__(self, "tiers", _sizes(self.tiers, 1))
        if self.start is None:
            return
        object.__setattr__(self, "start", whole("adaptive.start", self.start, 1))
        if self.tiers is not None and not self.tiers[0] <= self.start <= self.tiers[-1]:
            span = f"{self.tiers[0]} to {self.tiers[-1]}"
            raise ValueError(f"adaptive.start={self.start}: must lie within the tiers, {span}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Draft tokens per tier, ascending."""
        return self.tiers or (1,)

    def init(self) -> Array:
        """[] int32: draft tokens of the next round, before they are cut to a tier."""
        return jnp.int32(self.sizes[-1] if self.start is None else self.start)

    def choose(self, wanted: Array) -> Array:
        """[] index of the largest tier that is not larger than wanted."""
        return jnp.maximum(jnp.sum(jnp.asarray(self.sizes, jnp.int32) <= wanted, dtype=jnp.int32) - 1, 0)

    def update(self, wanted: Array, outcome: Outcome) -> Array:
        """After a round."""
        most = jnp.minimum(outcome.proposed, outcome.emitted)  # of a block that an end cut
        everything = jnp.all(outcome.accepted >= most) & jnp.any(most > 0)
        return jnp.clip(wanted + jnp.where(everything, 2, -1), 1, self.sizes[-1]).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same number of draft tokens in every round, for comparison.

    Args:
      num_draft_tokens: 0 (plain decoding) to the drafter's own number.

    Raises:
      ValueError: no whole number from 0 on.
    """

    num_draft_tokens: int

    def __post_init__(self):
        object.__setattr__(self, "num_draft_tokens", whole("adaptive.num_draft_tokens", self.num_draft_tokens, 0))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The one tier."""
        return (self.num_draft_tokens,)

    def init(self) -> tuple:
        """Nothing to remember."""
        return ()

    def choose(self, state: PyTree) -> Array:
        """[] 0."""
        return jnp.int32(0)

    def update(self, state: PyTree, outcome: Outcome) -> PyTree:
        """Nothing is learned."""
        return state


Policy = Adaptive | Heuristic | Fixed


def checked(adaptive: Any, num_draft_tokens: int) -> Policy | None:
    """The policy with its tiers filled in; None for False.

    Raises:
      ValueError: no policy, or one for no draft tokens; more draft tokens than this drafter has; costs of fewer.
    """
    if adaptive is False or adaptive is None:
        return None
    policy = Adaptive() if adaptive is True else adaptive
    if not isinstance(policy, Policy):
        raise ValueError(f"adaptive={show(adaptive)}: give True, False, or specjax.Adaptive(), Heuristic() or Fixed(k)")
    if not num_draft_tokens:
        raise ValueError(f"adaptive={show(adaptive)} without a drafter: give one, or leave it out")
    if not isinstance(policy, Fixed) and policy.tiers is None:
        least = 0 if isinstance(policy, Adaptive) else 1
        tiers = (*(size for size in (least, *TIERS[1:]) if size < num_draft_tokens), num_draft_tokens)
        return dataclasses.replace(policy, tiers=tiers)
    if policy.sizes[-1] > num_draft_tokens:
        name = "num_draft_tokens" if isinstance(policy, Fixed) else "tiers"
        raise ValueError(f"adaptive.{name}={show(getattr(policy, name))}: this drafter has {num_draft_tokens} at most")
    return policy


def _sizes(tiers: Any, least: int) -> tuple[int, ...]:
    """Ascending."""
    sizes = [whole("adaptive.tiers", size, least) for size in tiers] if isinstance(tiers, (tuple, list)) else []
    if not sizes or len(set(sizes)) != len(sizes):
        raise ValueError(f"adaptive.tiers={show(tiers)}: give a tuple of different numbers of draft tokens")
    return tuple(sorted(sizes))
