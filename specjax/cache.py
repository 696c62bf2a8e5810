"""The fixed-shape key/value cache: make one, write a window to its scratch slots, commit an accepted path.

Rollback is free: only ``lengths`` says what is real, so dropping tokens is writing a smaller number.

>>> cache = init(num_layers=1, batch=1, capacity=8, num_kv_heads=1, head_dim=1)
>>> cache = cache._replace(lengths=jnp.array([2]))
>>> window = jnp.arange(4.0).reshape(1, 4, 1, 1)  # four nodes, [B, T, H, D]
>>> cache = cache._replace(k=(write(cache.k[0], window, cache.lengths),))
>>> cache.k[0][0, 0, :, 0].tolist()
[0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0]
>>> cache = commit(cache, jnp.array([[0, 2, 2, 2]]), jnp.array([2]))  # nodes 0 and 2 were kept
>>> cache.k[0][0, 0, :4, 0].tolist(), cache.lengths.tolist()
([0.0, 0.0, 0.0, 2.0], [4])
"""

import jax
import jax.numpy as jnp

from specjax.types import Array, KVCache


def init(
    *, num_layers: int, batch: int, capacity: int, num_kv_heads: int, head_dim: int, dtype=jnp.float32,
    stacked: bool = False,
) -> KVCache:
    """An empty cache; ``stacked`` makes one [L, B, H, S, D] array for scanned layers."""
    shape = (batch, num_kv_heads, capacity, head_dim)
    def zeros():
        if stacked:
            return jnp.zeros((num_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
    return KVCache(k=zeros(), v=zeros(), lengths=jnp.zeros(batch, jnp.int32))


def write(layer: Array, window: Array, lengths: Array, index: Array | None = None) -> Array:
    """Writes window [B, T, H, D] into slots lengths[b] .. lengths[b] + T - 1 of layer [B, H, S, D].

    Slots past the end are dropped: never clamped onto committed ones, as ``dynamic_update_slice`` would.

    A uint16 layer keeps the bits of bfloat16. XLA:CPU has no bfloat16 scatter, slice or gather: it converts the whole
    layer to float32 and back around each, at every step. Reinterpret what you read with
    ``jax.lax.bitcast_convert_type(x, jnp.bfloat16)``.

    Args:
      layer: one layer of the cache, or all of them, [L, B, H, S, D], if index is given.
      window: what to write.
      lengths: [B] committed entries.
      index: [] which layer of a stacked cache.
    """
    batch, width = window.shape[:2]
    if layer.dtype == jnp.uint16 and window.dtype != jnp.uint16:
        window = _bits(window)
    rows = jnp.arange(batch)[:, None]
    slots = lengths[:, None] + jnp.arange(width)[None]
    if batch * width == 1:
        # A scatter of one row becomes a dynamic-update-slice, which XLA:CPU fuses into each of its readers; then the
        # layer must be copied. A second row, past the end, keeps it a scatter, in place.
        slots = jnp.concatenate([slots, slots + layer.shape[-2]], axis=1)
        window = jnp.concatenate([window, window], axis=1)
    # One update per head, though a slice would say the same: for a slice over the heads the TPU's compiler puts slots
    # before heads, and turns every layer around at the edges of a loop and for every product.
    heads = jnp.arange(layer.shape[-3])[None, :, None]
    at = (rows[:, None], heads, slots[:, None]) if index is None else (index, rows[:, None], heads, slots[:, None])
    window = jnp.swapaxes(window, 1, 2).astype(layer.dtype)
    return layer.at[at].set(window, mode="drop", indices_are_sorted=True, unique_indices=True)


@jax.custom_jvp
def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


@_bits.defjvp
def _no_gradient(primals, tangents):
    raise TypeError("gradients do not flow through a bfloat16 cache: it holds bits; train without a cache")


def commit(cache: KVCache, path: Array | None, count: Array) -> KVCache:
    """Keeps ``count [B]`` window entries: those at ``path [B, T]``, or the first ones when path is None (a chain)."""
    if path is not None:
        def move(layer):
            slots = (cache.lengths[:, None] + path)[:, None, :, None]
            kept = jnp.take_along_axis(layer, slots, axis=2)
            return write(layer, jnp.swapaxes(kept, 1, 2), cache.lengths)
        move_all = jax.vmap(move) if not isinstance(cache.k, tuple) else lambda layers: tuple(map(move, layers))
        cache = cache._replace(k=move_all(cache.k), v=move_all(cache.v))
    return cache._replace(lengths=cache.lengths + count)


def crop(cache: KVCache, lengths: Array) -> KVCache:
    """Drops everything past ``lengths [B]``. Never grows a row; a negative length is 0."""
    return cache._replace(lengths=jnp.clip(lengths, 0, cache.lengths))
