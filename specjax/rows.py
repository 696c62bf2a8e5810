"""Reads and writes that stay inside a row of the batch, said so that a compiler can tell: on a mesh every device then
keeps to its own rows, where an index array that counts the rows would make it fetch those of all others."""

import jax

from specjax.types import Array


def take(x: Array, *index: Array) -> Array:
    """``x[b, index_1[b], index_2[b], ..]`` for every row b.

    Args:
      x: [B, ..].
      index: [B, ..] each, of shapes that broadcast behind the first axis.
    """
    return jax.vmap(lambda x, *index: x[index])(x, *index)


def put(x: Array, values: Array, *index: Array) -> Array:
    """x with ``values[b]`` at ``[b, index_1[b], ..]``; what lies outside is dropped."""
    return jax.vmap(lambda x, values, *index: x.at[index].set(values, mode="drop"))(x, values, *index)


def add(x: Array, values: Array, *index: Array) -> Array:
    """x with ``values[b]`` added at ``[b, index_1[b], ..]``; what lies outside is dropped."""
    return jax.vmap(lambda x, values, *index: x.at[index].add(values, mode="drop"))(x, values, *index)
