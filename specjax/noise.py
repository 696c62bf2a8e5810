"""Randomness: which bits decide what, and draws from a law.

Two kinds of noise, never mixed. *Target noise* is a function of (row key, absolute position of the token, token id)
alone: it makes the text of `match`, of coupled drafts and of plain decoding independent of drafter, K and batch.
*Round noise* (draft, accept, residual) is keyed by (row key, role, position of the pending token, node):
every round moves the pending token, so no draw that helped to cut a block is ever used again.
"""

import enum
import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import rows, sharding
from specjax.static import show, whole
from specjax.types import Array

TOP_BLOCK = 256  # entries whose maximum is compared first in `top_k`
MOST_PARTS = 64  # of a vocabulary, if 2 divides it so often: as many devices can share one
BLOCK = 128  # token ids per block of target noise: a shard of the vocabulary makes only its own blocks


class Role(enum.IntEnum):
    """What a draw is for. Two roles never share bits."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def row_keys(seeds) -> Array:
    """Keys [B] of rows with the given integer seeds [B], 0 <= seed < 2**32.

    Raises:
      ValueError: anything else than a list or an array [B] of such numbers; names the first that is not.
    """
    return jax.vmap(jax.random.key)(jnp.asarray(_checked(seeds)))


def _checked(seeds: Any) -> np.ndarray:
    if isinstance(seeds, (str, bytes)) or not hasattr(seeds, "__iter__") or getattr(seeds, "ndim", None) == 0:
        number = isinstance(seeds, numbers.Integral) or getattr(seeds, "ndim", None) == 0
        remedy = f"one whole number per row, here [{show(seeds)}]" if number else "one whole number per row"
        raise ValueError(f"seeds={show(seeds)}: give a list, {remedy}")
    kind = getattr(getattr(seeds, "dtype", None), "kind", "")
    if kind in ("i", "u") and seeds.ndim == 1:
        values = np.asarray(seeds)
        wrong = np.flatnonzero((values < 0) | (values.astype(np.uint64) >= 2**32))[:1]
    else:
        values = list(seeds)
        values = [whole(f"seeds[{row}]", value, 0, ", below 2**32") for row, value in enumerate(values)]
        wrong = [row for row, value in enumerate(values) if value >= 2**32][:1]
    for row in wrong:
        raise ValueError(f"seeds[{row}]={show(values[row])}: must be a whole number, 0 or more, below 2**32")
    return np.asarray(values, np.uint32)


def at(keys: Array, role: Role, positions: Array) -> Array:
    """Keys [B] of a role at absolute ``positions [B]``, below 2**29.

    One hash: the compile time of the loop is mostly hashes.
    """
    return jax.vmap(jax.random.fold_in)(keys, positions.astype(jnp.uint32) * len(Role) + role)


def uniform(keys: Array, shape: tuple[int, ...] = ()) -> Array:
    """Uniform float32 [B, *shape] on {0, 2**-24, .., 1 - 2**-24}, one independent array per key."""
    bits = jax.vmap(lambda key: jax.random.bits(key, shape, jnp.uint32))(keys)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def accept_uniforms(keys: Array, positions: Array, num_nodes: int) -> Array:
    """Accept noise [B, N] of the round whose pending token is at ``positions [B]``."""
    return uniform(at(keys, Role.ACCEPT, positions), (num_nodes,))


def gumbel(keys: Array, positions: Array, vocab_size: int) -> Array:
    """Target noise [B, V] for the tokens at absolute ``positions [B]``: standard Gumbel, 32 bits near the top.

    The large values decide who wins, so the uniform is taken where float32 is fine (near 0) and reaches a
    Gumbel of 22.9; a 23-bit uniform near 1 would cap it at 16.
    """
    parts = sharding.parts("vocab", vocab_size)
    ends = np.arange(parts + 1) * (vocab_size // parts)
    first = ends[:-1] // BLOCK
    blocks = np.max(-(-ends[1:] // BLOCK) - first)  # that hold a part; those at its ends may be made twice
    numbers = jnp.asarray(first[:, None] + np.arange(blocks), jnp.uint32)
    own = at(keys, Role.TARGET, positions)
    every = jax.vmap(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (None, 0)), (0, None))(own, numbers)
    bits = jax.vmap(jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (BLOCK,), jnp.uint32))))(every)
    bits = bits.reshape(keys.shape[0], parts, blocks * BLOCK)
    skipped = ends[:-1] - first * BLOCK
    if np.any(skipped):
        cut = functools.partial(lax.dynamic_slice_in_dim, slice_size=vocab_size // parts)
        bits = jax.vmap(jax.vmap(cut), (0, None))(bits, jnp.asarray(skipped))
    bits = bits[:, :, : vocab_size // parts].reshape(keys.shape[0], vocab_size)
    bits = sharding.told(sharding.COUNTS, bits)
    v = jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), jnp.float32(1 - 2**-24))
    return -jnp.log(-jnp.log1p(-v))


def argmax(x: Array) -> Array:
    """Lowest index of the largest entry along the last axis; 0 where the row has a NaN (two reductions vectorise
    on CPU, ``jnp.argmax`` does not)."""
    ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    first = jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), ids, x.shape[-1]), axis=-1)
    return jnp.where(first == x.shape[-1], 0, first)


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The k largest entries along the last axis and their indices, ties to the lowest index, as ``lax.top_k``.

    Among few: the k blocks with the largest maxima hold the k largest entries. On CPU ten times faster over a
    vocabulary, and it stays so when rows of the result are sliced, where XLA:CPU would sort everything.
    """
    blocks, starts = _blocks(x, TOP_BLOCK, -jnp.inf)
    count, block = blocks.shape[-2:]
    if count <= k:
        # A barrier each: XLA:CPU's partitioner fails on one around both.
        top, ids = lax.top_k(x, k)
        return lax.optimization_barrier(top), lax.optimization_barrier(ids)
    padded, lowest = blocks.size > x.size, jnp.finfo(x.dtype).min
    if padded:  # padding comes behind all that is not
        blocks, _ = _blocks(jnp.maximum(x, lowest), TOP_BLOCK, -jnp.inf)
    best = jnp.sort(lax.top_k(jnp.max(blocks, axis=-1), k)[1], axis=-1)
    near = jnp.take_along_axis(blocks, best[..., None], axis=-2).reshape(*x.shape[:-1], k * block)
    top, place = lax.top_k(near, k)
    chosen = jnp.take_along_axis(best, place // block, axis=-1)
    return jnp.where(padded & (top == lowest), -jnp.inf, top), starts(chosen) + place % block


def _blocks(x: Array, block: int, padding: float) -> tuple[Array, Callable[[Array], Array]]:
    """x [.., V] as [.., blocks, at most block], ids ascending, and a function from blocks to the id they begin with.

    No block lies in two of `MOST_PARTS` equal parts of the vocabulary, if they are equal: on a mesh each device looks
    at its own blocks, and which blocks there are does not depend on the mesh.
    """
    vocab = x.shape[-1]
    parts = min(MOST_PARTS, vocab & -vocab)
    part = vocab // parts
    block = min(block, 1 << (part - 1).bit_length())
    each = -(-part // block)
    x = x.reshape(*x.shape[:-1], parts, part)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, each * block - part)], constant_values=padding)
    return x.reshape(*x.shape[:-2], parts * each, block), lambda chosen: chosen // each * part + chosen % each * block


def target_draw(keys: Array, positions: Array, probs: Array) -> Array:
    """The target's own token [B] at absolute ``positions [B]`` under its warped law ``probs [B, V]`` (Gumbel-max).

    Where every law is a point mass, the noise, which could not change it, is not made.
    """
    decided = jnp.all(jnp.max(probs, axis=-1) == 1)
    return lax.cond(
        decided, lambda: argmax(probs), lambda: argmax(jnp.log(probs) + gumbel(keys, positions, probs.shape[-1]))
    )


def inverse_cdf(weights: Array, u: Array) -> Array:
    """Draws ids [R] from non-negative ``weights [R, V]`` (any positive scale) with two uniforms per row, ``u [R, 2]``.

    A block of ids is drawn by its mass, then an id inside it with fresh bits: rare tokens keep their probability and
    no cumulative sum runs over the vocabulary. An id of weight 0 is never drawn. A row without mass gives 0.
    """
    blocks, starts = _blocks(weights, 1 << ((weights.shape[-1] - 1).bit_length() + 1) // 2, 0.0)
    outer = _pick(jnp.sum(blocks, axis=-1), u[:, 0])
    return starts(outer) + _pick(rows.take(blocks, outer), u[:, 1])


def _pick(mass: Array, u: Array) -> Array:
    cumulative = jnp.cumsum(mass, axis=-1)
    ids = jnp.arange(mass.shape[-1], dtype=jnp.int32)[None]
    above = (mass > 0) & (cumulative > u[:, None] * cumulative[:, -1:])
    first = jnp.min(jnp.where(above, ids, mass.shape[-1]), axis=-1)
    last = jnp.max(jnp.where(mass > 0, ids, 0), axis=-1)  # u * total rounded up to the total
    return jnp.minimum(first, last)
