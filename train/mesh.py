"""Batches on a mesh. Where weights lie is said once, in `specjax.sharding`."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.sharding import AXES, check, make_mesh, put, spread, weight_sharding
from specjax.sharding import place_params as place_target
from specjax.types import PyTree

__all__ = ["AXES", "check", "constrained", "make_mesh", "place_target", "placed", "share", "spread"]


def share(mesh: Mesh | None, batch: Any, parts: int = 1) -> Any:
    """A batch on the mesh, its rows shared out over "data".

    Args:
      batch: leaves [rows, ...].
      parts: micro-batches it will be cut into.

    Raises:
      ValueError: rows that cannot be divided evenly.
    """
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(batch)}
    devices = 1 if mesh is None else mesh.shape["data"]
    for shape in shapes:
        if not shape or shape[0] % (parts * devices):
            raise ValueError(
                f"a batch has leaves of shape {shape}: the first axis must be a multiple of accumulate={parts}"
                + (f" times {devices} devices along data" if mesh is not None else "")
            )
    if mesh is None:
        return batch
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(lambda leaf: put(leaf, rows), batch)


def placed(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """What is trained, and the optimiser's slots, by the table of weights: matrices in parts, all else everywhere."""
    return tree if mesh is None else place_target(mesh, tree)


def constrained(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """`placed`, inside a program."""
    if mesh is None:
        return tree

    def told(path, leaf):
        return jax.lax.with_sharding_constraint(leaf, weight_sharding(mesh, path, leaf.shape))

    return jax.tree_util.tree_map_with_path(told, tree)
