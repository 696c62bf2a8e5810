"""The compiled programs: start (prefill), decode (the whole loop) and step (one round).

One jit cache serves the process. Its static key holds the functions of model and drafter by value where they compare
by value, else weakly (see `specjax.static`); weights are always arguments, so a cache entry keeps no model alive.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax import rows, sharding
from specjax.accept import Rule
from specjax.adaptive import Outcome, Policy
from specjax.drafters.late import catch_up
from specjax.round import LENGTH, RUNNING, Limits, Round, State, once, pad, prefill, round, truncate
from specjax.static import weak
from specjax.types import Array, Drafter, Model, PyTree, Sampling, Text


class Program(NamedTuple):
    """The static half of a decoding request."""

    model: Model
    drafter: Drafter  # without params
    rule: Rule
    logprobs: bool
    policy: Policy | None = None  # chooses the number of draft tokens round by round; None: always the drafter's

    def prefill(self) -> "Program":
        """The part that `start` depends on: one prefill program serves all rules."""
        return self._replace(rule="", logprobs=False, policy=None)


class Weights(NamedTuple):
    """The traced half that does not change between calls."""

    target: PyTree
    drafter: PyTree


class Logprobs(NamedTuple):
    """Log-probabilities by absolute position, [B, S]; zeros where nothing was emitted."""

    raw: Array
    warped: Array


def split(
    model: Model, params: PyTree, drafter: Drafter, rule: Rule, logprobs: bool, policy: Policy | None = None
) -> tuple[Program, Weights]:
    """Separates what is compiled in from what is passed in."""
    program = Program(model, drafter._replace(params=(), host=None), rule, logprobs, policy)
    return weak(program), Weights(params, drafter.params)


def _drafter(program: Program, weights: Weights) -> Drafter:
    return program.drafter._replace(params=weights.drafter)


@functools.partial(jax.jit, static_argnames=("program", "chunk"))
def start(program: Program, weights: Weights, text: Text, keys: Array, limits: Limits, *, chunk: int) -> State:
    """Prefill; rows without a budget are finished at once."""
    state = prefill(program.model, weights.target, _drafter(program, weights), text, keys, chunk=chunk)
    return state._replace(finish=jnp.where(limits.max_new_tokens > 0, jnp.int32(RUNNING), jnp.int32(LENGTH)))


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def decode(
    program: Program, weights: Weights, state: State, sampling: Sampling, limits: Limits
) -> tuple[State, Logprobs | None]:
    """Rounds until every row has finished, as one program without a host transfer."""
    shape = state.text.tokens.shape
    record = Logprobs(jnp.zeros(shape), jnp.zeros(shape)) if program.logprobs else None

    def running(carry):
        return jnp.any(carry[0].finish == RUNNING)

    def body(carry):
        state, record = carry
        new, info = _round(program, weights, state, sampling, limits)
        return new, record if record is None else _record(record, state.text, info)

    return lax.while_loop(running, body, (state, record))


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def step(
    program: Program, weights: Weights, state: State, sampling: Sampling, limits: Limits
) -> tuple[State, Round]:
    """One round, for people who read along."""
    return _round(program, weights, state, sampling, limits)


cut = jax.jit(truncate, donate_argnums=0)


def _round(program: Program, weights: Weights, state: State, sampling: Sampling, limits: Limits):
    new, info = play(program, weights.target, _drafter(program, weights), state, sampling, limits)
    return learn(program, state, new, info), info


def play(
    program: Program, target: PyTree, drafter: Drafter, state: State, sampling: Sampling, limits: Limits
) -> tuple[State, Round]:
    """A round with as many draft tokens as the policy chooses, one branch for each of its sizes, and a `Round` as wide
    as that of the largest; without a policy, with the drafter's own number. Then `learn`."""

    def run(state: State, size: int | None) -> tuple[State, Round]:
        return round(
            program.model, target, drafter, program.rule, state, sampling, limits, num_draft_tokens=size,
            logprobs=program.logprobs,
        )  # fmt: skip

    if program.policy is None:
        return run(state, None)
    sizes, tier = program.policy.sizes, program.policy.choose(state.pace)
    state = state._replace(drafter=catch_up(drafter, state.drafter, jnp.asarray(sizes, jnp.int32)[tier] > 0))
    blank = jax.eval_shape(lambda state: run(state, sizes[-1])[1], state)
    carry = (state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank))
    for index, size in enumerate(sizes):

        def branch(carry, size=size):
            new, info = run(carry[0], size)
            return new, pad(info, 1 + sizes[-1])

        carry = once(tier == index, branch, carry)
    return carry


def learn(program: Program, before: State, state: State, info: Round) -> State:
    """``state``, whose policy knows what came of the round that `play` ran from ``before``; of blocks that ends have
    cut since, what is left."""
    if program.policy is None:
        return state
    proposed, emitted = (getattr(state.counts, name) - getattr(before.counts, name) for name in ("proposed", "emitted"))
    accepted = jnp.minimum(info.num_accepted, emitted)
    outcome = Outcome(program.policy.choose(before.pace), info.nodes, proposed, accepted, emitted)
    return sharding.settled(program.model.layout, state._replace(pace=program.policy.update(before.pace, outcome)))


def _record(record: Logprobs, text: Text, info: Round) -> Logprobs:
    slots = jnp.arange(info.tokens.shape[1])[None]
    where = jnp.where(slots < info.count[:, None], text.lengths[:, None] + slots, record.raw.shape[1])

    def put(buffer, values):
        return rows.put(buffer, values, where)

    return Logprobs(put(record.raw, info.raw_logprobs), put(record.warped, info.warped_logprobs))


def capacity(longest: int, chunk: int) -> int:
    """Cache slots for texts of ``longest`` tokens with headroom: rounded up so that few sizes are ever compiled."""
    grain = max(256, 1 << max(0, longest.bit_length() - 3))
    slots = -(-longest // grain) * grain
    return -(-slots // chunk) * chunk


def compiled_programs() -> dict[str, int]:
    """How many programs each function has compiled in this process."""
    functions: dict[str, Any] = {"prefill": start, "decode": decode, "step": step, "cut": cut}
    return {name: fn._cache_size() for name, fn in functions.items()}
