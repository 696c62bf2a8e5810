"""Many conversations at once, as fast as the target goes: plain decoding in a batch of slots that are refilled.

A slot holds one conversation. Every step feeds each slot one token: a given one while there are any, else the one drawn
in the step before; there is no separate prefill. The target's likeliest next tokens after every token are kept, under
its own softmax whatever the temperature. What a conversation says depends on (seed, its number) alone, up to the
rounding of the target's matrix products: not on its slot, nor on how many slots there are.

What all conversations begin with, the opening of the chat template, is read once: it stays in the cache of every slot.

On a mesh the slots are shared out over "data", what the target makes of them as in decoding; of several processes each
runs the whole of this with the same arguments, and gets every conversation.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import processes, rows, sharding
from specjax.models.language_model import LanguageModel
from specjax.noise import inverse_cdf, top_k
from specjax.static import whole
from specjax.types import Array, KVCache

TOP = 8  # next tokens kept of every law
STEPS = 8  # tokens per slot between two looks from Python
REDRAWS = 64  # a draw falls outside the nucleus with chance 1 - top_p


class Plan(NamedTuple):
    """A conversation before it is written."""

    number: int  # its noise is keyed by this
    tokens: Sequence[int]  # given, the opening included; 1 or more
    limit: int  # longest the whole may get
    turn: int = 0  # tokens of its own that the user's turn may have before the answer begins; 0: answer at once
    temperature: float = 0.0  # of the answer
    turn_temperature: float = 1.0
    turn_top_p: float = 1.0
    start: int = -1  # what counts as the answer's first token; -1: what follows the given ones, or the user's turn


class Conversation(NamedTuple):
    """A conversation, with the law of the NEXT token at every place."""

    number: int
    tokens: np.ndarray  # [L] int32
    start: int  # first token of the answer
    temperature: float
    top_ids: np.ndarray  # [L, TOP] int32
    top_probs: np.ndarray  # [L, TOP] float16


class Rows(NamedTuple):
    """What a slot is doing. Traced."""

    text: Array  # [B, S] int32
    known: Array  # [B] int32, tokens of text that are decided
    limit: Array  # [B] int32, length at which it ends
    turn_start: Array  # [B] int32, first place of the user's own words, -1: none
    turn_end: Array  # [B] int32, place at which the user's turn must end
    start: Array  # [B] int32, first place of the answer; S or more while the user's turn is being written
    temperature: Array  # [B] float32
    turn_temperature: Array  # [B] float32
    top_p: Array  # [B] float32, of the user's turn
    number: Array  # [B] uint32


class State(NamedTuple):
    """All slots. Traced."""

    rows: Rows
    cache: KVCache  # lengths [B]: tokens that were fed
    top_ids: Array  # [B, S, TOP] int32
    top_probs: Array  # [B, S, TOP] float16
    finite: Array  # [] bool, no law was undefined


class Template(NamedTuple):
    """What ends a turn. Traced."""

    middle: Array  # [M] int32, from the end of the user's turn to the beginning of the answer
    ends: Array  # [E] int32, any of these ends a turn
    answer: Array  # [] int32, longest answer


def converse(
    target: LanguageModel, plans: Iterable[Plan], *, opening: Sequence[int] = (), middle: Sequence[int] = (),
    answer: int = 1 << 20, seed: int = 0, batch: int = 256, slots: int = 320, steps: int = STEPS,
) -> Iterator[Conversation]:  # fmt: skip
    """Writes conversations, in the order in which they end.

    Args:
      target: a language model, on a mesh or not; its ``eos_ids`` end turns.
      plans: what to write; as many are read ahead as there are free slots.
      opening: token ids with which every plan begins, fewer than its tokens.
      middle: token ids from the end of a user's turn to the answer, for plans with a turn.
      answer: longest answer, in tokens.
      seed: of all noise.
      batch: slots; a multiple of the mesh's ``data``.
      slots: longest conversation; places in the cache of a slot.
      steps: tokens per slot between two looks from Python.

    Raises:
      ValueError: slots that the mesh cannot share out; a plan that does not fit; logits that are not finite.
    """
    batch, slots, steps = whole("batch", batch, 1), whole("slots", slots, 2), whole("steps", steps, 1)
    limit = target.model.context_length
    if limit is not None and slots > limit:
        raise ValueError(f"slots={slots}: the target was made for {limit} positions")
    return _converse(target, iter(plans), tuple(opening), tuple(middle), answer, seed, batch, slots, steps)


def _converse(target, plans, opening, middle, answer, seed, batch, slots, steps):
    template = Template(
        jnp.asarray(middle, jnp.int32), jnp.asarray(target.eos_ids or (-1,), jnp.int32), jnp.int32(answer)
    )
    model, params, key = target.model, target.params, jax.random.key(seed)
    state = begin(model, batch, slots, params, jnp.asarray(opening, jnp.int32))
    held: list[Plan | None] = [None] * batch
    more = True
    while True:
        free = [row for row, plan in enumerate(held) if plan is None] if more else []
        new = {}
        for row in free:
            plan = next(plans, None)
            if plan is None:
                more = False
                break
            _check(plan, opening, middle, slots)
            new[row] = held[row] = plan
        if new:
            state = _refill(model, state, *_fresh(new, batch, slots, len(opening)))
        if all(plan is None for plan in held):
            return
        state = run(model, steps, params, key, template, state)
        yield from _harvest(state, held)


def _check(plan: Plan, opening: tuple, middle: tuple, slots: int) -> None:
    what = f"conversation {plan.number}"
    if tuple(plan.tokens[: len(opening)]) != opening or len(plan.tokens) <= len(opening):
        raise ValueError(f"{what} does not begin with the opening of {len(opening)} tokens and at least one more")
    if plan.turn and not middle:
        raise ValueError(f"{what} has a turn to be written: give middle, what stands between it and the answer")
    needed = len(plan.tokens) + (plan.turn + len(middle) + 1 if plan.turn else 0)
    if needed > min(plan.limit, slots) or plan.limit > slots:
        raise ValueError(f"{what} needs {needed} tokens, its limit is {plan.limit}, slots={slots}")


def _fresh(plans: dict[int, Plan], batch: int, slots: int, opening: int) -> tuple[Rows, Array, int]:
    """Rows with these plans, which rows those are, and how many of their tokens the cache holds already."""
    def column(value, kind):
        out = np.zeros(batch, kind)
        for row, plan in plans.items():
            out[row] = value(plan)
        return jnp.asarray(out)

    text, mask = np.zeros((batch, slots), np.int32), np.zeros(batch, bool)
    for row, plan in plans.items():
        text[row, : len(plan.tokens)], mask[row] = plan.tokens, True
    rows = Rows(
        jnp.asarray(text), column(lambda p: len(p.tokens), np.int32), column(lambda p: p.limit, np.int32),
        column(lambda p: len(p.tokens) if p.turn else -1, np.int32),
        column(lambda p: len(p.tokens) + p.turn, np.int32),
        column(lambda p: slots if p.turn else p.start if p.start >= 0 else len(p.tokens), np.int32),
        column(lambda p: p.temperature, np.float32), column(lambda p: p.turn_temperature, np.float32),
        column(lambda p: p.turn_top_p, np.float32), column(lambda p: p.number, np.uint32),
    )  # fmt: skip
    return rows, jnp.asarray(mask), opening


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def begin(model, batch: int, slots: int, params, opening: Array) -> State:
    """Idle rows (limit 0), with the opening in the cache and its laws in place."""
    cache, size = model.init_cache(batch, slots), opening.shape[0]
    ids, probs = jnp.zeros((batch, slots, TOP), jnp.int32), jnp.zeros((batch, slots, TOP), jnp.float16)
    finite = jnp.array(True)
    if size:
        one = model.init_cache(1, slots)
        out = model.apply(params, opening[None], jnp.arange(size, dtype=jnp.int32)[None], None, one)
        cache = jax.tree.map(lambda all_rows, row: jnp.broadcast_to(row, all_rows.shape), cache, out.cache)
        top, best, total = _law(out.logits[0])
        ids = ids.at[:, :size].set(jnp.broadcast_to(best[None], (batch, size, TOP)))
        shares = jnp.exp(top - total).astype(probs.dtype)
        probs = probs.at[:, :size].set(jnp.broadcast_to(shares[None], (batch, size, TOP)))
        finite = jnp.all(jnp.isfinite(total))
    idle = _fresh({}, batch, slots, size)[0]
    return _settled(model, State(idle, cache._replace(lengths=jnp.zeros(batch, jnp.int32)), ids, probs, finite))


def _settled(model, state: State) -> State:
    """The state, told where it lies: as it did before, whatever the compiler would choose."""
    layout = model.layout
    return state if layout is None else sharding.by_rows(layout, state, state.rows.known.shape[0])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _refill(model, state: State, fresh: Rows, mask: Array, opening: int) -> State:
    def put(new, old):
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    lengths = jnp.where(mask, jnp.asarray(opening, jnp.int32), state.cache.lengths)
    cache = state.cache._replace(lengths=lengths)
    return _settled(model, state._replace(rows=jax.tree.map(put, fresh, state.rows), cache=cache))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def run(model, steps: int, params, key: Array, template: Template, state: State) -> State:
    """Up to this many tokens into every slot; fewer if all conversations end."""
    def busy(carry):
        i, state = carry
        return (i < steps) & jnp.any(state.cache.lengths < state.rows.limit)

    def step(carry):
        i, state = carry
        return i + 1, _step(model, params, key, template, state)

    return lax.while_loop(busy, step, (jnp.int32(0), state))[1]


def _step(model, params, key: Array, template: Template, state: State) -> State:
    """One token into every slot."""
    now, cache = state.rows, state.cache
    slots = now.text.shape[1]
    at = jnp.minimum(cache.lengths, slots - 1)
    running = cache.lengths < now.limit
    out = model.apply(params, rows.take(now.text, at)[:, None], at[:, None], None, cache)
    logits = out.logits[:, 0]
    top, ids, total = _law(logits)
    here = jnp.where(running, at, slots)  # a row that has ended keeps what it has
    state = state._replace(
        top_ids=rows.put(state.top_ids, ids, here),
        top_probs=rows.put(state.top_probs, jnp.exp(top - total).astype(jnp.float16), here),
        finite=state.finite & jnp.all(jnp.where(running[:, None], jnp.isfinite(total), True)),
        cache=out.cache._replace(lengths=jnp.where(running, at + 1, cache.lengths)),
    )
    drawing = running & (at + 1 >= now.known) & (at + 1 < now.limit)
    token = _draw(key, now, logits, top[:, :1], ids[:, 0], template.ends, at + 1, drawing)
    return _settled(model, state._replace(rows=_write(now, template, token, at + 1, drawing)))


def _law(logits: Array) -> tuple[Array, Array, Array]:
    """The TOP largest logits, their ids, and the logarithm of the sum [.., 1]."""
    # The barrier: without it XLA:CPU looks for the top entry again at every entry of the sum.
    top, ids = lax.optimization_barrier(top_k(logits, min(TOP, logits.shape[-1])))
    total = jnp.log(jnp.sum(jnp.exp(logits - top[..., :1]), axis=-1, keepdims=True)) + top[..., :1]
    if ids.shape[-1] < TOP:  # a vocabulary of fewer tokens: no mass on the rest
        wide = [(0, 0)] * (top.ndim - 1) + [(0, TOP - ids.shape[-1])]
        top, ids = jnp.pad(top, wide, constant_values=-jnp.inf), jnp.pad(ids, wide)
    return top, ids, total


def _draw(key, now: Rows, logits, best, greedy, ends, at, drawing) -> Array:
    """The next token [B] at places ``at``: the user's turn under its own temperature and top_p, the answer under its
    temperature. The nucleus needs no sort: a draw is repeated until what is likelier than it has less than top_p."""
    in_turn = at < now.start
    temperature = jnp.where(in_turn, now.turn_temperature, now.temperature)
    top_p = jnp.where(in_turn, now.top_p, 1.0)
    sampled = drawing & (temperature > 0)
    weights = jnp.exp((logits - best) / jnp.where(temperature > 0, temperature, 1.0)[:, None])
    silent = jnp.where((at == now.turn_start)[:, None] & (ends >= 0)[None], ends[None], logits.shape[-1])
    weights = rows.put(weights, jnp.zeros(silent.shape), silent)  # the user says something
    keys = jax.vmap(lambda number, place: jax.random.fold_in(jax.random.fold_in(key, number), place))(now.number, at)

    def again(carry):
        i, pending, _ = carry
        return (i < REDRAWS) & jnp.any(pending)

    def redraw(carry):
        i, pending, token = carry
        u = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, i), (2,)))(keys)
        drawn = inverse_cdf(weights, u)
        return i + 1, pending & ~_inside(weights, drawn, top_p), jnp.where(pending, drawn, token)

    return lax.while_loop(again, redraw, (jnp.int32(0), sampled, greedy))[2]


def _inside(weights: Array, token: Array, top_p: Array) -> Array:
    """Whether the token [B] is in the nucleus: the likelier ones (ties: lower ids) have less than top_p."""
    def look(_):
        column = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None]
        own = jnp.take_along_axis(weights, token[:, None], axis=1)
        before = (weights > own) | ((weights == own) & (column < token[:, None]))
        mass = jnp.sum(jnp.where(before, weights, 0.0), axis=-1)
        return mass < top_p * jnp.sum(weights, axis=-1)

    free = top_p >= 1
    return free | lax.cond(jnp.all(free), lambda _: free, look, None)


def _write(now: Rows, template: Template, token: Array, at: Array, drawing: Array) -> Rows:
    """Tokens at places ``at``; where a user's turn ends, the middle of the template instead, and the answer begins."""
    slots, size = now.text.shape[1], template.middle.shape[0]
    end = jnp.any(token[:, None] == template.ends[None], axis=1)
    in_turn = drawing & (at < now.start)
    turning = in_turn & (end | (at >= now.turn_end))
    text = rows.put(now.text, token, jnp.where(drawing, at, slots))
    if size:
        places = jnp.where(turning[:, None], at[:, None] + jnp.arange(size, dtype=jnp.int32)[None], slots)
        text = rows.put(text, jnp.broadcast_to(template.middle[None], places.shape), places)
    start = jnp.where(turning, at + size, now.start)
    limit = jnp.where(turning, jnp.minimum(now.limit, start + template.answer), now.limit)
    limit = jnp.where(drawing & ~in_turn & end, at + 1, limit)  # the end itself is read too
    known = jnp.where(turning, at + size, jnp.where(drawing, at + 1, now.known))
    return now._replace(text=text, start=start, limit=limit, known=known)


def _harvest(state: State, held: list[Plan | None]) -> Iterator[Conversation]:
    lengths, limits, finite = processes.fetch((state.cache.lengths, state.rows.limit, state.finite))
    if not finite:
        raise ValueError("the target gave logits that are not finite: its weights are damaged, or its type too narrow")
    ended = [row for row, plan in enumerate(held) if plan is not None and lengths[row] >= limits[row]]
    if not ended:
        return
    text, start, ids, probs = processes.fetch((state.rows.text, state.rows.start, state.top_ids, state.top_probs))
    for row in ended:
        plan, size = held[row], lengths[row]
        assert plan is not None
        held[row] = None
        yield Conversation(
            plan.number, text[row, :size].copy(), int(start[row]), plan.temperature, ids[row, :size].copy(),
            probs[row, :size].copy(),
        )  # fmt: skip
