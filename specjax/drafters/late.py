"""A drafter that reads what plain rounds committed later, many tokens at a time.

A drafter with a network of its own (a model, a head) reads every committed token, also those of rounds without drafts:
one more pass in a round that should cost what plain decoding costs. Here such tokens wait, with the target's features,
until the next draft or until there are DELAY of them, and are read like a chunk of the prompt. What the drafter knows
when it drafts is the same.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.static import bind
from specjax.types import Array, Committed, Drafter, PyTree

DELAY = 32  # tokens read at a time: enough to make a pass over them cheap per token


class Late(NamedTuple):
    """The drafter's state and what it has not yet read."""

    inner: PyTree
    waiting: Committed  # [B, DELAY]


def late(drafter: Drafter, features: Any) -> Drafter:
    """``drafter``, reading late; itself if it keeps no state, or learns from windows, which are not kept.

    The owner of the loop calls `catch_up` before it drafts.

    Args:
      features: has the last axis and the dtype of the target's features.
    """
    if drafter.window_top or not jax.tree.leaves(jax.eval_shape(lambda: drafter.init(drafter.params, 1, DELAY))):
        return drafter
    return drafter._replace(
        init=bind(_init, drafter.init, features.shape[-1], features.dtype.name),
        observe=bind(_observe, drafter.observe),
        draft=bind(_draft, drafter.draft),
    )


def catch_up(drafter: Drafter, state: PyTree, due: Array) -> PyTree:
    """The state of a `late` drafter with nothing waiting where ``due []``; any other state is returned as it is."""
    if not isinstance(state, Late):
        return state
    observe: Any = drafter.observe
    return _read(observe.args[0], drafter.params, state, due)


def _init(init, size: int, dtype: str, params: PyTree, batch: int, capacity: int) -> Late:
    """The last tokens of a text may be read in a window that is wider than what is left of it."""
    none = jnp.zeros(batch, jnp.int32)
    waiting = Committed(jnp.zeros((batch, DELAY), jnp.int32), jnp.zeros((batch, DELAY, size), dtype), none, none)
    return Late(init(params, batch, capacity + DELAY), waiting)


def _observe(observe, params: PyTree, state: Late, committed: Committed) -> Late:
    if committed.tokens.shape[1] > 1:  # a prompt chunk, or a round that drafted: nothing waits
        return state._replace(inner=observe(params, state.inner, committed))
    waiting = state.waiting
    slot = jnp.where(committed.count > 0, waiting.count, DELAY)
    here = jnp.arange(DELAY, dtype=jnp.int32)[None] == slot[:, None]
    waiting = Committed(
        jnp.where(here, committed.tokens, waiting.tokens),
        jnp.where(here[:, :, None], committed.features, waiting.features),
        waiting.count + committed.count,
        jnp.where(waiting.count > 0, waiting.start, committed.start),
    )
    return _read(observe, params, state._replace(waiting=waiting), jnp.any(waiting.count == DELAY))


def _draft(draft, params: PyTree, keys: Array, state: Late, *args: Any):
    proposal, inner = draft(params, keys, state.inner, *args)
    return proposal, state._replace(inner=inner)


def _read(observe, params: PyTree, state: Late, due: Array) -> Late:
    """A loop of at most one step: unlike `lax.cond` it copies no cache."""
    waiting = state.waiting
    due = due & jnp.any(waiting.count > 0)
    start = (due, state.inner)
    inner = lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(due), observe(params, c[1], waiting)), start)[1]
    return Late(inner, waiting._replace(count=jnp.where(due, 0, waiting.count)))
