"""What a round consists of, part by part, and the machine's ceilings: compiled loops that are called by turns.

Every part runs a few times inside one program, so that the cost of a call is no part of it; each step depends on the
one before, so that the compiler cannot do it once.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench_runs import PLAIN, Way, make
from jax import lax

import specjax
from specjax import cache as kv
from specjax import loop, tree
from specjax.proposal import first_nodes
from specjax.round import RUNNING, window_seen
from specjax.types import Array, Committed, Drafter, Model, Proposal

STEPS = 4
MANY = 40  # of parts that take less than a call
READ = 150_000_000  # float32 numbers of the memory stream, 0.6 GB
SIDE = 2048  # of the matrices that are multiplied
ROWS = 512


class Part(NamedTuple):
    """Something that can be timed."""

    call: Callable[[], Any]
    steps: int = STEPS


class Timer:
    """Milliseconds of named parts, which take turns."""

    def __init__(self):
        self.parts: dict[Any, Part] = {}
        self.times: dict[Any, list[float]] = {}

    def add(self, name: Any, part: Callable[[], Part]) -> None:
        """A part that is not there yet; made and run once, which compiles it."""
        if name not in self.parts:
            self.parts[name] = part()
            self.times[name] = []
            jax.block_until_ready(self.parts[name].call())

    def turn(self) -> None:
        for name, part in self.parts.items():
            began = time.perf_counter()
            jax.block_until_ready(part.call())
            self.times[name].append(1e3 * (time.perf_counter() - began) / part.steps)

    def median(self, name: Any) -> float:
        return statistics.median(self.times[name])


# --- the machine


def stream(read: int) -> Part:
    """Reads so many float32 numbers."""
    numbers, total = jnp.ones(read, jnp.float32), jax.jit(jnp.sum)
    return Part(lambda: total(numbers), 1)


def add_ceilings(timer: Timer, read: int = READ, side: int = SIDE) -> None:
    """A stream of reads, and matrix products in both types."""

    def product(dtype):
        a, b = jnp.ones((ROWS, side), dtype), jnp.ones((side, side), dtype)
        run = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
        return Part(lambda: run(a, b), 1)

    timer.add("read", functools.partial(stream, read))
    for dtype in ("float32", "bfloat16"):
        timer.add(("matmul", dtype), functools.partial(product, dtype))


def ceilings(timer: Timer, read: int = READ, side: int = SIDE) -> dict:
    """GB/s and GFLOP/s of the medians."""
    rates = {dtype: 2e-6 * ROWS * side * side / timer.median(("matmul", dtype)) for dtype in ("float32", "bfloat16")}
    return {"read_gb_s": 4e-6 * read / timer.median("read"), "matmul_gflop_s": rates}


def work(lm, batch: int, width: float, length: float) -> tuple[float, float]:
    """FLOPs and bytes of one pass over windows of ``width`` behind ``length`` tokens: every weight is read once, and
    the keys and values of the text."""
    params = lm.params
    leaves = jax.tree.leaves(params)
    size, stored = sum(x.size for x in leaves if x.ndim > 1), sum(x.size * x.dtype.itemsize for x in leaves)
    if isinstance(params, dict) and {"embedding", "head"} <= params.keys():  # rows of the embedding are looked up
        size, stored = size - params["embedding"].size, stored - params["embedding"].nbytes
    shapes = jax.eval_shape(lambda: lm.model.init_cache(batch, 1))  # [.., B, H, 1, D]
    cached = jax.tree.leaves((shapes.k, shapes.v))
    numbers = sum(math.prod(x.shape) for x in cached)  # of all layers, keys and values, one slot
    heads, key_heads = (getattr(lm.config, name, 1) for name in ("num_heads", "num_kv_heads"))
    flops = 2.0 * batch * width * size + 2.0 * width * heads / key_heads * numbers * (length + width / 2)
    return flops, stored + sum(math.prod(x.shape) * x.dtype.itemsize for x in cached) * (length + width)


# --- forward passes


@functools.partial(jax.jit, static_argnames=("model", "width", "features"), donate_argnames=("cache",))
def _passes(model: Model, params, cache, tokens: Array, mask, positions: Array, *, width: int, features: tuple):
    def step(index, carry):
        cache, _ = carry
        window = (tokens + index) % model.vocab_size
        out = model.apply(params, window, positions, mask, cache, feature_layers=features)
        return out.cache, (out.logits, out.features)

    first = jax.eval_shape(lambda c: step(0, (c, None))[1], cache)
    return lax.fori_loop(0, STEPS, step, (cache, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)))


def passes(lm, batch: int, width: int, capacity: int, length: int, parents=None, features: tuple = ()) -> Part:
    """The target reads a window of ``width`` tokens behind ``length`` others."""
    held = [lm.model.init_cache(batch, capacity)._replace(lengths=jnp.full(batch, length, jnp.int32))]
    tokens = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width)) % lm.model.vocab_size
    depth = jnp.atleast_2d(tree.depths(parents, width - 1))
    positions = jnp.broadcast_to(length + depth, (batch, width)).astype(jnp.int32)
    if lm.model.context_length is not None:
        positions = jnp.minimum(positions, lm.model.context_length - 1)
    mask = None if parents is None or width == 1 else jnp.asarray(tree.window_mask(parents, width - 1))

    def call():
        held[0], out = _passes(lm.model, lm.params, held[0], tokens, mask, positions, width=width, features=features)
        return out

    return Part(call)


def quickest(models: dict, window: int = 8, turns: int = 7) -> dict[str, float]:
    """Milliseconds in which each model, by the type of its weights, reads a window of so many tokens, the least first.
    Which is the least depends on the processor: of CPUs, some multiply bfloat16 and others do not."""
    timer = Timer()
    for dtype, lm in models.items():
        timer.add(dtype, functools.partial(passes, lm, 1, window, 512, 256))
    for _ in range(turns):
        timer.turn()
    return dict(sorted(((dtype, timer.median(dtype)) for dtype in models), key=lambda pair: pair[1]))


# --- the parts of a round


@functools.partial(jax.jit, static_argnames=("program",))
def _draft(program, weights, state, sampling, steps: int):
    drafter = program.drafter._replace(params=weights.drafter)
    rows, at = jnp.arange(state.finish.shape[0]), state.text.lengths - 1

    def one(tokens, kept):
        text = state.text._replace(tokens=tokens)
        return drafter.draft(drafter.params, state.keys, kept, text, sampling, drafter.num_draft_tokens)

    def step(_, carry):
        tokens, kept, _ = carry
        proposal, kept = one(tokens, kept)
        pending = jnp.where(proposal.tokens[:, 0] < 0, 0, tokens[rows, at])  # the same; only we know
        return tokens.at[rows, at].set(pending), kept, proposal

    proposal = jax.eval_shape(one, state.text.tokens, state.drafter)[0]
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), proposal)
    return lax.fori_loop(0, steps, step, (state.text.tokens, state.drafter, empty))[2]


@functools.partial(jax.jit, static_argnames=("program",))
def _accept(program, logits: Array, keys: Array, proposal: Proposal, text, sampling):
    count = proposal.tokens.shape[1]
    seen = jnp.asarray(tree.window_mask(proposal.parents, count))[..., 1:]

    def step(_, carry):
        logits, _ = carry
        law = specjax.warp(logits, sampling, text, proposal.tokens, seen if seen.ndim == 3 else seen[None])
        taken = specjax.accept(program.rule, keys, proposal, law, text.lengths - 1)
        corner = jnp.where(taken.next_token[0] < 0, 0.0, logits[0, 0, 0])  # the same; only we know
        return logits.at[0, 0, 0].set(corner), taken.next_token

    return lax.fori_loop(0, MANY, step, (logits, jnp.zeros(logits.shape[0], jnp.int32)))


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("cache",))
def _commit(program, weights, kept, cache, text, nodes: Proposal, logits: Array, features: Array):
    """Two tokens a row go to the cache and to the drafter, which sees the window if it asks."""
    drafter = program.drafter._replace(params=weights.drafter)
    batch, width = logits.shape[:2]
    pending = jnp.take_along_axis(text.tokens, text.lengths[:, None] - 1, axis=1)
    window = jnp.concatenate([pending, nodes.tokens], axis=1)
    valid = jnp.concatenate([jnp.ones((batch, 1), bool), nodes.valid], axis=1)
    path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    count = jnp.full(batch, min(2, width), jnp.int32)

    def step(_, carry):
        logits, kept, cache = carry
        seen = window_seen(drafter, window, nodes.parents, valid, text.lengths - 1, logits)
        kept = drafter.observe(drafter.params, kept, Committed(window, features, count, text.lengths, seen))
        after = kv.commit(cache, None if nodes.parents is None else path, count)
        corner = jnp.where(after.lengths[0] < 0, 0.0, logits[0, 0, 0])  # the same; only we know
        return logits.at[0, 0, 0].set(corner), kept, after._replace(lengths=cache.lengths)

    return lax.fori_loop(0, MANY, step, (logits, kept, cache))


@functools.partial(jax.jit, static_argnames=("program",))
def _windows(program, weights, state, sampling, limits):
    """How often each width of window is used [W] until every row has finished."""
    drafter = program.drafter._replace(params=weights.drafter)
    widths = jnp.asarray(window_widths(drafter))

    def step(carry):
        state, used = carry
        count = drafter.num_draft_tokens
        proposal, _ = drafter.draft(drafter.params, state.keys, state.drafter, state.text, sampling, count)
        place = jnp.arange(1, count + 1, dtype=jnp.int32)[None]
        longest = jnp.max(jnp.where(proposal.valid & (state.finish == RUNNING)[:, None], place, 0))
        state, _ = specjax.round(program.model, weights.target, drafter, program.rule, state, sampling, limits)
        return state, used.at[jnp.argmax(widths >= longest)].add(1)

    start = state, jnp.zeros(widths.shape, jnp.int32)
    return lax.while_loop(lambda carry: jnp.any(carry[0].finish == RUNNING), step, start)[1]


def window_widths(drafter: Drafter) -> list[int]:
    """Nodes of the windows that a round of this drafter may choose from."""
    return sorted({*(w for w in drafter.widths if w < drafter.num_draft_tokens), drafter.num_draft_tokens})


def add_round(timer: Timer, way: Way, group, law, how) -> dict:
    """Adds the parts of a way's round, in the middle of the texts of a group.

    Returns:
      Where `split` finds them: the names of the parts by width of window, and how often each is used.
    """
    made = make(way.lm, way.drafter, way.rule, group, law, how)
    program, weights, text = made.program, made.weights, made.text
    half = made.limits._replace(max_new_tokens=jnp.maximum(1, made.limits.max_new_tokens // 2))

    def prefilled():
        return loop.start(program.prefill(), weights, text, made.keys, made.limits, chunk=made.chunk)

    state, _ = loop.decode(program, weights, prefilled(), made.sampling, half)
    batch, capacity = text.tokens.shape
    length = int(np.max(jax.device_get(state.text.lengths))) - 1
    drafter = program.drafter._replace(params=weights.drafter)
    widths, name = window_widths(drafter), way.name
    none = Proposal(jnp.zeros((batch, 0), jnp.int32), None, None, jnp.zeros((batch, 0), bool))
    shares, proposal = [1.0], None
    if way.kind != PLAIN:
        proposal = _draft(program, weights, state, made.sampling, 1)
        timer.add(("draft", name), lambda: Part(lambda: _draft(program, weights, state, made.sampling, MANY), MANY))
        if len(widths) > 1:
            used = np.asarray(_windows(program, weights, prefilled(), made.sampling, made.limits), np.float64)
            shares = (used / max(1.0, used.sum())).tolist()
    named = {"draft": ("draft", name) if proposal is not None else None, "windows": [], "length": length}
    for width, share in zip(widths, shares, strict=True):
        nodes = none if proposal is None else first_nodes(proposal, width)
        verify = "verify", way.dtype, batch, 1 + width, capacity, nodes.parents is not None, drafter.feature_layers
        timer.add(verify, functools.partial(passes, way.lm, batch, 1 + width, capacity, length, nodes.parents,
                                            drafter.feature_layers))  # fmt: skip
        read = timer.parts[verify].call()
        timer.add(("accept", name, width), functools.partial(_accept_part, made, state, nodes, read))
        timer.add(("commit", name, width), functools.partial(_commit_part, made, state, nodes, read))
        named["windows"].append({"nodes": width, "share": share, "verify": verify, "accept": ("accept", name, width),
                                 "commit": ("commit", name, width)})  # fmt: skip
    return named


def _accept_part(made, state, nodes: Proposal, read: tuple[Array, Array]) -> Part:
    held = [read[0]]

    def call():
        held[0], token = _accept(made.program, held[0], made.keys, nodes, state.text, made.sampling)
        return token

    return Part(call, MANY)


def _commit_part(made, state, nodes: Proposal, read: tuple[Array, Array]) -> Part:
    cache = made.program.model.init_cache(*state.text.tokens.shape)
    held = [cache._replace(lengths=state.text.lengths - 1)]

    def call():
        _, kept, held[0] = _commit(made.program, made.weights, state.drafter, held[0], state.text, nodes, *read)
        return kept, held[0].lengths

    return Part(call, MANY)


def split(timer: Timer, named: dict) -> dict:
    """Milliseconds of the parts of a round, windows weighted by use; mean width and text length."""
    windows = named["windows"]

    def over(part):
        return sum(window["share"] * timer.median(window[part]) for window in windows)

    return {
        "draft_ms": timer.median(named["draft"]) if named["draft"] else 0.0, "verify_ms": over("verify"),
        "accept_ms": over("accept"), "commit_ms": over("commit"),
        "width": 1 + sum(window["share"] * window["nodes"] for window in windows),
        "length": named["length"], "windows": {str(1 + w["nodes"]): w["share"] for w in windows},
        "verify_by_window_ms": {str(1 + w["nodes"]): timer.median(w["verify"]) for w in windows},
    }  # fmt: skip
