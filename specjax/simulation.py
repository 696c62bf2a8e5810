"""Rounds simulated through `accept`: what the closed forms of `specjax.theory` are held against."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specjax.accept import RULES, accept
from specjax.laws import two_laws
from specjax.noise import Role, at, inverse_cdf, row_keys, target_draw, uniform
from specjax.static import show, whole
from specjax.types import Array, Proposal

CHUNK_ROUNDS = 1 << 14  # rounds simulated at a time
CHUNK_ENTRIES = 1 << 22  # and at most this many entries of target_probs [rounds, 1 + K, V]


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
    p, q = two_laws(p, q)
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
