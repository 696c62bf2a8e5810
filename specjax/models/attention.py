"""Attention of a window over the fixed-shape cache, at a cost that follows the text and not the capacity.

Slots are read in blocks; only blocks that hold text are visited, in a loop whose trip count is traced, with the running
softmax of Milakov and Gimelshein (arXiv 1805.02867, 2018). One block needs no loop.

Slots past the window may hold anything, NaN included: their scores are replaced, and their values are zeroed because
0 * NaN is NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.types import Array

BLOCK = 512  # slots; on CPU smaller blocks cost more in dispatch than they save in reading,
BLOCK_16 = 256  # but where they are bfloat16: then the products of larger ones leave the CPU's own caches
FEW = 4  # rows
HIDDEN = -1e30  # a score that no visible one is near; finite, so that a block without visible slots stays finite


class Reach(NamedTuple):
    """What a window may look at: made once per forward pass, shared by all layers."""

    visible: Array  # [B, T, S] bool, window row t of row b sees slot s
    written: Array | None  # [B, S] bool, the slot is committed or in the window; None: all of them are
    end: Array  # [] int32, behind the last written slot of all rows
    first: Array | int = 0  # [] int32, no slot before this one is visible


def reach(window_mask: Array | None, lengths: Array, width: int, capacity: int) -> Reach:
    """The slots that a window [B, T] written behind lengths [B] committed slots may see.

    Args:
      window_mask: [T, T] or [B, T, T] bool, window row sees window column; None is causal.
      lengths: [B] committed slots, always visible.
      width: T.
      capacity: S.
    """
    batch = lengths.shape[0]
    column = jnp.arange(capacity)[None] - lengths[:, None]  # [B, S] place of a slot in the window
    if window_mask is None:
        visible = column[:, None] <= jnp.arange(width)[None, :, None]
    else:
        mask = jnp.broadcast_to(window_mask, (batch, width, width))
        index = jnp.broadcast_to(jnp.clip(column, 0, width - 1)[:, None], (batch, width, capacity))
        inside = (column >= 0) & (column < width)
        visible = jnp.where(inside[:, None], jnp.take_along_axis(mask, index, axis=2), column[:, None] < 0)
    return Reach(visible, column < width, jnp.minimum(jnp.max(lengths) + width, capacity))


def sliding(slots: Reach, positions: Array, lengths: Array, window: int) -> Reach:
    """The same slots, for a layer that sees ``window`` tokens back, the row itself included.

    Nothing is evicted, so dropping tokens restores what they pushed out of the window: the cache holds all slots, and
    only what a row sees moves. Blocks that every row has left behind are not read.

    Args:
      slots: see `reach`.
      positions: [B, T] of the window's rows; that of a committed slot is its index.
      lengths: [B] committed slots.
      window: how many positions a row reaches back; siblings of a tree have the same.
    """
    index = jnp.arange(slots.visible.shape[2], dtype=jnp.int32)[None]
    column = jnp.clip(index - lengths[:, None], 0, positions.shape[1] - 1)
    where = jnp.where(index < lengths[:, None], index, jnp.take_along_axis(positions, column, axis=1))  # [B, S]
    near = positions[:, :, None] - where[:, None] < window
    return slots._replace(visible=slots.visible & near, first=jnp.maximum(jnp.min(positions) - window + 1, 0))


def attend(
    q: Array, k: Array, v: Array, slots: Reach, *, scale: float | None = None, softcap: float = 0.0
) -> Array:
    """Softmax attention with grouped heads.

    Args:
      q: [B, T, Hq, D] float32 queries.
      k: [B, H, S, D] keys; uint16 holds the bits of bfloat16.
      v: [B, H, S, D] values, likewise.
      slots: see `reach` and `sliding`.
      scale: of the scores; None is D ** -0.5.
      softcap: scores become softcap * tanh(scores / softcap); 0 leaves them.

    Returns:
      [B, T, Hq, D] float32.
    """
    batch, width, heads, dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    groups = heads // kv_heads
    dtype = jnp.bfloat16 if k.dtype == jnp.uint16 else k.dtype
    # The query heads of one kv head are rows of one matrix: XLA:CPU transposes all keys for two row axes.
    q = (q * (dim**-0.5 if scale is None else scale)).astype(dtype).reshape(batch, width, kv_heads, groups, dim)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, groups * width, dim)
    if capacity <= BLOCK or slots.written is None:
        _, total, out = _block(q, k, v, slots.visible, slots.written, softcap)
    else:
        _, total, out = _blocks(q, k, v, slots, softcap)
    out = (out / total).reshape(batch, kv_heads, groups, width, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads, dim)


def _block(
    q: Array, k: Array, v: Array, visible: Array, written: Array | None, softcap: float
) -> tuple[Array, Array, Array]:
    """q [B, H, M, D], M = groups * T -> highest score, summed weights [B, H, M, 1], weighted values [B, H, M, D]."""
    batch, kv_heads, rows, _ = q.shape
    width, size = visible.shape[1:]
    scores = _scores(q, k)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = scores.reshape(batch, kv_heads, rows // width, width, size)
    scores = jnp.where(visible[:, None, None], scores, HIDDEN).reshape(batch, kv_heads, rows, size)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    return top, jnp.sum(weights, axis=-1, keepdims=True), _mix(weights.astype(q.dtype), v, written)


def _scores(q: Array, k: Array) -> Array:
    """q [B, H, M, D] against k [B, H, S, D] -> [B, H, M, S] float32."""
    if k.dtype == jnp.uint16:
        k = jax.lax.bitcast_convert_type(k, q.dtype)
    rows = q.shape[2]
    if rows > FEW or q.dtype == jnp.bfloat16:
        return jnp.einsum("bhmd,bhsd->bhms", q, k, preferred_element_type=jnp.float32, precision="highest")
    # A few rows at a time XLA:CPU packs the keys first, which takes longer than one product after the other.
    return jnp.stack([jnp.einsum("bhd,bhsd->bhs", q[:, :, m], k, precision="highest") for m in range(rows)], axis=2)


def _mix(weights: Array, v: Array, written: Array | None) -> Array:
    """weights [B, H, M, S] times v [B, H, S, D], whatever the slots that are not written hold."""

    def mix(v):
        return jnp.einsum("bhms,bhsd->bhmd", weights, v, preferred_element_type=jnp.float32, precision="highest")

    if written is None:
        return mix(v)

    def clean(written):
        return jnp.where(written[:, None, :, None], v, jnp.zeros((), v.dtype))

    if v.dtype == jnp.uint16:  # to be copied in any case
        return mix(jax.lax.bitcast_convert_type(clean(written), weights.dtype))
    # Cleaning copies all values of the layer. The weight of an unseen slot is exactly 0, so if the result is finite
    # they were clean; if not, once more. A loop of at most one turn: around a cond XLA:CPU would copy the cache, and
    # without `again` in the mask it would clean ahead of the loop.
    def redo(carry):
        again, _ = carry
        return jnp.zeros_like(again), mix(clean(written & again))

    def dirty(carry):
        again, out = carry
        return again & ~jnp.all(jnp.isfinite(out))

    return jax.lax.while_loop(dirty, redo, (jnp.array(True), mix(v)))[1]


def _blocks(q: Array, k: Array, v: Array, slots: Reach, softcap: float) -> tuple[Array, Array, Array]:
    """`_block` over every block that holds text, merged."""
    capacity, block = k.shape[2], BLOCK_16 if k.dtype == jnp.uint16 else BLOCK

    def step(index, carry):
        start = jnp.minimum(index * block, capacity - block)  # the last block may overlap the one before,
        fresh = start + jnp.arange(block) >= index * block  # whose slots are not counted twice

        def cut(x, axis):
            return jax.lax.dynamic_slice_in_dim(x, start, block, axis)

        visible, written = cut(slots.visible, 2) & fresh[None, None], cut(slots.written, 1)
        here = _block(q, cut(k, 2), cut(v, 2), visible, written, softcap)
        top = jnp.maximum(carry[0], here[0])
        old, new = jnp.exp(carry[0] - top), jnp.exp(here[0] - top)
        return top, carry[1] * old + here[1] * new, carry[2] * old + here[2] * new

    one = (*q.shape[:3], 1)
    carry = jnp.full(one, HIDDEN), jnp.zeros(one), jnp.zeros(q.shape)
    return jax.lax.fori_loop(slots.first // block, -(-slots.end // block), step, carry)
