"""Rows of a decoding state as slots: a prompt is read alone, chunk by chunk, its row is put into a free slot, and one
step is a round of all slots.

Pure functions with one compiled program each, whatever the prompts, their lengths and the slots. Every array of the
state has one axis that counts rows, so that putting a row in is one tree_map; `check_rows` refuses drafters whose rows
share something. Unlike in `specjax.round`, end ids and stop sequences are a row's own, because requests share slots and
nothing else: the round knows no ends, and `step` cuts what it emitted.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax import sharding, tree
from specjax.loop import Program, Weights, learn, play
from specjax.round import (
    LENGTH,
    RUNNING,
    STOP,
    Limits,
    State,
    feature_shape,
    inside,
    stops_of,
    truncate,
    window_seen,
)
from specjax.stats import Counts
from specjax.types import Array, Committed, Drafter, PyTree, Sampling, Text


class Slots(NamedTuple):
    """Everything the next step needs, one row per slot."""

    state: State  # rows that hold no request have finished
    sampling: Sampling  # here with eos_ids [B, C], each row's own
    limits: Limits  # here with stop_sequences [B, Q, W], each row's own


class Reading(NamedTuple):
    """A prompt that is being read, or B empty rows."""

    state: State
    features: Array  # [B, 1, E] of the last token read


class Step(NamedTuple):
    """What one step added and how the rows stand, for the one transfer to the host."""

    tokens: Array  # [B, T]
    count: Array  # [B] emitted tokens, 0 in rows that had finished
    num_accepted: Array  # [B] draft tokens among them
    raw_logprobs: Array | None  # [B, T]
    warped_logprobs: Array | None  # [B, T]
    finish: Array  # [B]
    counts: Counts


def _drafter(program: Program, weights: Weights) -> Drafter:
    return program.drafter._replace(params=weights.drafter)


@functools.partial(jax.jit, static_argnames=("program",))
def begin(program: Program, weights: Weights, text: Text, key_data: Array) -> Reading:
    """The state before the first chunk, for `Program.prefill`'s part of a program."""
    drafter, (batch, capacity) = _drafter(program, weights), text.tokens.shape
    cache = program.model.init_cache(batch, capacity)
    shape = feature_shape(program.model, weights.target, drafter, cache)
    state = State(
        text, cache, drafter.init(drafter.params, batch, capacity), jax.random.wrap_key_data(key_data),
        jnp.full(batch, RUNNING, jnp.int32), Counts.zeros(batch, drafter.num_draft_tokens),
    )  # fmt: skip
    state = sharding.settled(program.model.layout, state)
    return Reading(state, jnp.zeros((batch, 1, shape.shape[-1]), shape.dtype))


@functools.partial(jax.jit, static_argnames=("program", "chunk"), donate_argnames=("reading",))
def read(program: Program, weights: Weights, reading: Reading, index: Array, *, chunk: int) -> Reading:
    """Reads tokens index * chunk and on, as `specjax.prefill` does; all but the last token of the prompt."""
    model, drafter, (state, previous) = program.model, _drafter(program, weights), reading
    text, start = state.text, index * chunk
    batch = text.lengths.shape[0]
    tokens = lax.dynamic_slice_in_dim(text.tokens, start, chunk, axis=1)
    positions = jnp.broadcast_to((start + jnp.arange(chunk, dtype=jnp.int32))[None], (batch, chunk))
    out = model.apply(
        weights.target, tokens, inside(model, positions), None, state.cache, feature_layers=drafter.feature_layers
    )
    lengths = jnp.minimum(text.prompt_lengths - 1, start + chunk)
    features = jnp.concatenate([previous, out.features[:, :-1]], axis=1)
    count = jnp.clip(text.prompt_lengths - start, 0, chunk)
    begins = jnp.broadcast_to(start, (batch,)).astype(jnp.int32)
    real = jnp.arange(chunk)[None] < count[:, None]
    window = window_seen(drafter, tokens, None, real, begins, out.logits) if drafter.prompt_window else None
    seen = drafter.observe(drafter.params, state.drafter, Committed(tokens, features, count, begins, window))
    state = state._replace(cache=out.cache._replace(lengths=lengths), drafter=seen)
    return Reading(sharding.settled(model.layout, state), out.features[:, -1:])


@functools.partial(jax.jit, static_argnames=("layout",), donate_argnames=("slots",))
def insert(slots: Slots, slot: Array, fresh: Slots, *, layout: sharding.Layout | None = None) -> Slots:
    """``slots`` with the one row of ``fresh`` in ``slot []``; whatever was there is gone. The pace is of all rows."""
    fresh = fresh._replace(state=fresh.state._replace(pace=slots.state.pace))
    return _settled(layout, jax.tree.map(functools.partial(_put, slot), slots, fresh))


def _settled(layout: sharding.Layout | None, slots: Slots) -> Slots:
    if layout is None:
        return slots
    asked = sharding.by_rows(layout, slots._replace(state=()), slots.state.text.lengths.shape[0])
    return asked._replace(state=sharding.settled(layout, slots.state))


def _put(slot: Array, rows: Array, row: Array) -> Array:
    axis = [i for i, (many, one) in enumerate(zip(rows.shape, row.shape, strict=True)) if many != one]
    return lax.dynamic_update_slice_in_dim(rows, row, slot, axis[0]) if axis else row  # a single slot


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("slots",))
def step(program: Program, weights: Weights, slots: Slots, dropped: Array, ends: Array) -> tuple[Slots, Step]:
    """One round of all slots.

    Args:
      dropped: [B] bool, rows whose request has ended or is no longer wanted: they are empty from here on.
      ends: [C] ids that end most texts, padded with -1: drafters propose nothing behind them. Ends of a row are in
        ``slots.sampling``.
    """
    old = _vacated(slots.state, dropped)
    left = slots.sampling.min_new_tokens - (old.text.lengths - old.text.prompt_lengths)
    sampling = _endless(slots.sampling, left, program.model.vocab_size)
    limits = slots.limits._replace(stop_sequences=jnp.full((1, 1), -1, jnp.int32))
    drafter = _shortened(_drafter(program, weights), left, ends)
    new, info = play(program, weights.target, drafter, old, sampling, limits)
    stops = jax.vmap(_row_stops)(old.text, slots.sampling.eos_ids, slots.limits.stop_sequences, info.tokens)
    width = info.tokens.shape[1]
    first = jnp.min(jnp.where(stops, jnp.arange(width, dtype=jnp.int32)[None], width), axis=1)
    stopped = first < info.count
    count = jnp.where(stopped, first + 1, info.count)
    new = new._replace(counts=_cut(old.counts, new.counts, count))
    new = truncate(new, old.text.lengths + count, jnp.where(stopped, jnp.int32(STOP), new.finish))
    new = learn(program, old, new, info)
    return _settled(program.model.layout, slots._replace(state=new)), Step(
        info.tokens, count, jnp.minimum(count, info.num_accepted), info.raw_logprobs, info.warped_logprobs, new.finish,
        new.counts,
    )  # fmt: skip


def _vacated(state: State, dropped: Array) -> State:
    """Dropped rows as in `empty`: attention need not run over a text that nobody wants."""
    one = jnp.int32(1)
    text = state.text._replace(
        lengths=jnp.where(dropped, one, state.text.lengths),
        prompt_lengths=jnp.where(dropped, one, state.text.prompt_lengths),
    )
    cache = state.cache._replace(lengths=jnp.where(dropped, one - 1, state.cache.lengths))
    return state._replace(text=text, cache=cache, finish=jnp.where(dropped, jnp.int32(LENGTH), state.finish))


def _endless(sampling: Sampling, left: Array, vocab_size: int) -> Sampling:
    """Ends as the round sees them: there are none, and a row that must go on for ``left [B]`` tokens has its own
    banned (with `_shortened`, in all tokens that this round can emit)."""
    held = (left > 0)[:, None] & (sampling.eos_ids >= 0)
    return sampling._replace(
        min_new_tokens=jnp.zeros_like(left),
        eos_ids=jnp.full(1, -1, jnp.int32),
        bias_ids=jnp.concatenate([sampling.bias_ids, jnp.where(held, sampling.eos_ids, vocab_size)], axis=1),
        bias=jnp.concatenate([sampling.bias, jnp.where(held, -jnp.inf, 0.0)], axis=1),
    )


def _shortened(drafter: Drafter, left: Array, ends: Array) -> Drafter:
    """A drafter that proposes at most ``left - 1`` tokens in a row where ``left [B]`` is positive, so that a round
    ends where the minimum length does. That depends on positions alone, hence changes no law."""
    def draft(params: PyTree, keys: Array, state: PyTree, text: Text, sampling: Sampling, n: int):
        proposal, state = drafter.draft(params, keys, state, text, sampling._replace(eos_ids=ends), n)
        depth = jnp.atleast_2d(tree.depths(proposal.parents, n))[:, 1:]
        allowed = (left <= 0)[:, None] | (depth < left[:, None])
        return proposal._replace(valid=proposal.valid & allowed), state

    return drafter._replace(draft=draft)


def _row_stops(text: Text, eos_ids: Array, sequences: Array, tokens: Array) -> Array:
    return stops_of(jax.tree.map(lambda x: x[None], text), eos_ids, sequences, tokens[None])[0]


def _cut(before: Counts, after: Counts, count: Array) -> Counts:
    """Counts of a round that was cut to ``count [B]`` tokens, in rows where it was."""
    emitted = after.emitted - before.emitted
    kept = jnp.arange(after.judged_at.shape[1])[None] < count[:, None]
    kept = kept | (count == emitted)[:, None]

    def at(before: Array, after: Array) -> Array:
        return jnp.where(kept, after, before)

    return after._replace(
        emitted=before.emitted + count,
        judged_at=at(before.judged_at, after.judged_at),
        accepted_at=at(before.accepted_at, after.accepted_at),
    )


def empty(
    program: Program, weights: Weights, text: Text, key_data: Array, pace: PyTree, sampling: Sampling, limits: Limits
) -> Slots:
    """Slots without a request; every text is one token long."""
    state = begin(program, weights, text, key_data).state._replace(pace=pace)
    slots = Slots(state._replace(finish=jnp.full(text.lengths.shape, LENGTH, jnp.int32)), sampling, limits)
    layout = program.model.layout
    return slots if layout is None else jax.jit(_settled, static_argnums=0)(layout, slots)


def check_rows(program: Program, weights: Weights, capacity: int) -> None:
    """Every array of caches and drafter state has one axis that counts rows.

    Raises:
      ValueError: one has not; says whose.
    """
    with sharding.on(program.model.layout):
        few, more = (count * sharding.dividing("batch") for count in (2, 3))

    def of(make):
        sizes = [jax.tree.leaves(jax.eval_shape(functools.partial(make, batch))) for batch in (few, more)]
        return list(zip(*sizes, strict=True))

    drafter = _drafter(program, weights)
    for owner, leaves in (
        ("model", of(lambda batch: program.model.init_cache(batch, capacity))),
        ("drafter", of(lambda batch: drafter.init(drafter.params, batch, capacity))),
    ):
        for one, other in leaves:
            differ = [(a, b) for a, b in zip(one.shape, other.shape, strict=True) if a != b]
            if differ != [(few, more)]:
                raise ValueError(
                    f"{owner} keeps an array of shape {one.shape} for {few} rows and {other.shape} for {more}, "
                    "which is not one entry per row: rows of an Engine come and go alone; use specjax.generate"
                )


def compiled_programs() -> dict[str, int]:
    """How many programs each function has compiled in this process."""
    functions: dict[str, Any] = {"begin": begin, "read": read, "insert": insert, "step": step}
    return {name: fn._cache_size() for name, fn in functions.items()}
