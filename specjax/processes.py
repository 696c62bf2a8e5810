"""Several processes, one program: each host runs the same Python, and arrays lie on the devices of all of them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specjax.types import PyTree


def first() -> bool:
    """Whether this is the process that prints and writes files."""
    return jax.process_index() == 0


def wait(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def each(number: int) -> list[int]:
    """The numbers, below 2**31, that the processes have come here with."""
    if jax.process_count() == 1:
        return [number]
    from jax.experimental import multihost_utils

    return [int(value) for value in multihost_utils.process_allgather(np.int32(number))]


def fetch(tree: PyTree) -> Any:
    """`jax.device_get`, also of arrays of which other processes hold parts: each process gets the whole, and every one
    of them must come here."""
    leaves, structure = jax.tree.flatten(tree)
    parted = [i for i, leaf in enumerate(leaves) if not _readable(leaf)]
    if parted:
        everywhere = NamedSharding(leaves[parted[0]].sharding.mesh, PartitionSpec())
        copies = jax.jit(_same, out_shardings=everywhere)([leaves[i] for i in parted])
        for i, copy in zip(parted, copies, strict=True):
            leaves[i] = copy
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def local(tree: PyTree) -> PyTree:
    """A tree that programs of this process alone can take: with several processes copies of its arrays on the host."""
    return tree if jax.process_count() == 1 else fetch(tree)


def _readable(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


def _same(leaves: list) -> list:
    return leaves
