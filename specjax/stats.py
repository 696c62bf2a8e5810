"""Counts kept on the device, and the metrics read from them.

judged    a draft token was judged: accepted, or it (or all its siblings) rejected. What lies behind a rejection is not.
alpha     accepted / judged, an estimate of E[sum min(p, q)].
acceptance_rate  accepted / proposed; None if nothing was proposed.
tau       emitted tokens / rounds, after stops cut a block.
A stop inside an accepted block cuts the counts with it: tokens that were not emitted are neither accepted nor judged.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import rows
from specjax.types import Acceptance, Array, Proposal


class Counts(NamedTuple):
    """Per-row counts of a text so far, int32."""

    rounds: Array  # [B]
    emitted: Array  # [B]
    proposed: Array  # [B]
    judged_at: Array  # [B, N] rounds in which depth i + 1 was judged
    accepted_at: Array  # [B, N] rounds in which it was accepted

    @classmethod
    def zeros(cls, batch: int, num_draft_tokens: int) -> "Counts":
        """Counts before the first round."""
        row, depth = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, num_draft_tokens), jnp.int32)
        return cls(row, row, row, depth, depth)

    def add(self, proposal: Proposal, acceptance: Acceptance, count: Array, active: Array) -> "Counts":
        """Adds a round that emitted ``count [B]`` tokens in the rows where ``active [B]``."""
        num_nodes = proposal.tokens.shape[1]
        last = rows.take(acceptance.path, acceptance.num_accepted)
        parents = jnp.arange(num_nodes) if proposal.parents is None else jnp.asarray(proposal.parents) + 1
        parents = jnp.atleast_2d(parents)
        rejected = jnp.any(proposal.valid & (parents == last[:, None]), axis=1)
        accepted = jnp.minimum(acceptance.num_accepted, count)
        judged = accepted + (rejected & (count > acceptance.num_accepted)).astype(jnp.int32)
        depth = jnp.arange(self.judged_at.shape[1])[None]
        one = active.astype(jnp.int32)
        return Counts(
            self.rounds + one,
            self.emitted + count,
            self.proposed + one * jnp.sum(proposal.valid, axis=1, dtype=jnp.int32),
            self.judged_at + one[:, None] * (depth < judged[:, None]).astype(jnp.int32),
            self.accepted_at + one[:, None] * (depth < accepted[:, None]).astype(jnp.int32),
        )

    def cut(self, after: "Counts", count: np.ndarray) -> "Counts":
        """``after`` as if the round since ``self`` had emitted only ``count [B]`` tokens (numpy)."""
        emitted = np.asarray(after.emitted) - self.emitted
        shorter = (count < emitted)[:, None]
        kept = np.arange(after.accepted_at.shape[1])[None] < count[:, None]
        accepted = self.accepted_at + (after.accepted_at - self.accepted_at) * kept
        judged = self.judged_at + (after.judged_at - self.judged_at) * kept
        return after._replace(
            emitted=self.emitted + np.minimum(count, emitted),
            accepted_at=np.where(shorter, accepted, after.accepted_at),
            judged_at=np.where(shorter, judged, after.judged_at),
        )


class Stats(NamedTuple):
    """Metrics of a finished generation, over all rows; ``counts`` has them row by row (numpy)."""

    counts: Counts

    @property
    def rounds(self) -> int:
        """Rounds summed over rows; a row counts the rounds it took part in."""
        return int(np.sum(self.counts.rounds))

    @property
    def emitted(self) -> int:
        """Emitted tokens."""
        return int(np.sum(self.counts.emitted))

    @property
    def proposed(self) -> int:
        """Proposed draft nodes."""
        return int(np.sum(self.counts.proposed))

    @property
    def accepted(self) -> int:
        """Emitted tokens that came from a draft."""
        return int(np.sum(self.counts.accepted_at))

    @property
    def tau(self) -> float | None:
        """Emitted tokens per round; None before the first round."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / proposed; None if nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def alpha(self) -> float | None:
        """accepted / judged; None if nothing was judged."""
        judged = int(np.sum(self.counts.judged_at))
        return self.accepted / judged if judged else None

    @property
    def per_position(self) -> list[float | None]:
        """alpha at depth 1, 2, .., N; None where no token was judged."""
        judged = np.sum(self.counts.judged_at, axis=0)
        accepted = np.sum(self.counts.accepted_at, axis=0)
        return [float(a) / float(j) if j else None for a, j in zip(accepted, judged, strict=True)]
