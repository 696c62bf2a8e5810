"""Python drafts: a function on the host proposes token ids between the rounds.

For sources that no compiled program can hold: another tokenizer, a search engine, a service. The rounds are then run
from Python, with one transfer to the device and one back each, as they are for stop strings; the compiled round itself
has no callback. A proposal is a point mass, a deterministic function of the text, hence exact under every rule.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.static import bind, show, whole
from specjax.types import Array, Committed, Drafter, Proposal, PyTree, Sampling, Text

Rows = list[list[int] | None]
Propose = Callable[[Rows], Sequence[Sequence[int]]]


class Written(NamedTuple):
    """What the host proposes in the next round; the drafter's whole state."""

    tokens: Array  # [B, N] int32
    count: Array  # [B] int32


def host(start: Callable[[], Propose], num_draft_tokens: int = 8, *, vocab_size: int | None = None) -> Drafter:
    """Drafts with a Python function. For `specjax.generate` and `specjax.stream`.

    In a loop of your own, put ``written(proposals, num_draft_tokens)`` into ``state.drafter`` before each round.

    Args:
      start: called once per generation, returns ``propose``: called before every round with the token ids of every
        row, prompt included (None for a row that has finished), it returns up to num_draft_tokens ids per row; more
        are cut off, [] is a plain step. It may depend on the ids alone, never on chance.
      num_draft_tokens: longest proposal, N.
      vocab_size: that of the target it was made for; None: any.

    Raises:
      ValueError: start is not callable, num_draft_tokens or vocab_size no whole number. During generation: proposals
        that are not lists of token ids, one per row.
    """
    if not callable(start):
        raise ValueError(f"start={show(start)}: give a function that returns the function which proposes")
    num_draft_tokens = whole("num_draft_tokens", num_draft_tokens, 1, "; drafter=None decodes plainly")
    if vocab_size is not None:
        vocab_size = whole("vocab_size", vocab_size, 1, "; None is any")
    return Drafter(
        params=(),
        init=bind(_init, num_draft_tokens),
        observe=_observe,
        draft=_draft,
        num_draft_tokens=num_draft_tokens,
        widths=(0,),
        vocab_size=vocab_size,
        host=bind(_begin, start, num_draft_tokens),
    )


def _begin(start: Callable[[], Propose], num_draft_tokens: int) -> Callable[[Rows], Written]:
    propose = start()

    def fill(rows: Rows) -> Written:
        proposals = propose(rows)
        if not hasattr(proposals, "__len__"):
            raise ValueError(f"the host drafter gave {show(proposals)}: give a list of token ids per row, [] for none")
        if len(proposals) != len(rows):
            raise ValueError(f"the host drafter gave {len(proposals)} proposals for {len(rows)} rows: give one each")
        return written(proposals, num_draft_tokens)

    return fill


def written(proposals: Sequence[Sequence[int]], num_draft_tokens: int) -> Written:
    """The state of a `host` drafter of N = num_draft_tokens that proposes these ids, row by row.

    Raises:
      ValueError: naming the row and what is no token id in it.
    """
    tokens = np.zeros((len(proposals), num_draft_tokens), np.int32)
    counts = np.zeros(len(proposals), np.int32)
    for row, proposal in enumerate(proposals):
        if isinstance(proposal, str) or not hasattr(proposal, "__getitem__"):
            raise ValueError(f"proposal {row} is {show(proposal)}: give a list of token ids, [] for none")
        ids = [whole(f"proposal {row}, token {i}", token, 0) for i, token in enumerate(proposal[:num_draft_tokens])]
        counts[row], tokens[row, : len(ids)] = len(ids), ids
    return Written(jnp.asarray(tokens), jnp.asarray(counts))


def _init(num_draft_tokens: int, params: PyTree, batch: int, capacity: int) -> Written:
    return Written(jnp.zeros((batch, num_draft_tokens), jnp.int32), jnp.zeros(batch, jnp.int32))


def _observe(params: PyTree, state: Written, committed: Committed) -> Written:
    return state._replace(count=jnp.zeros_like(state.count))  # a proposal is for one round


def _draft(
    params: PyTree, keys: Array, state: Written, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, Written]:
    valid = jnp.arange(n, dtype=jnp.int32)[None] < state.count[:, None]
    return Proposal(state.tokens[:, :n], None, None, valid), state
