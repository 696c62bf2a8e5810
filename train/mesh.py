"""Several devices: a mesh with axes "data" and "model", and where things lie on it. `jit` does the rest."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.static import show, whole
from specjax.types import PyTree

AXES = ("data", "model")

# Which axis of a Llama's matrices (from the end) is shared out over "model": columns where each device can make its own
# part of the result, rows where the parts are added up. See `specjax.models.llama_params` for names and shapes.
COLUMNS = ("embedding", "head", "qkv", "gate_up")
ROWS = ("o", "down")


def make_mesh(data: int | None = None, model: int = 1) -> Mesh:
    """A mesh of ``data * model`` devices.

    Args:
      data: parts of a batch; None is all devices there are, over ``model``.
      model: parts of the target's matrices.

    Raises:
      ValueError: more devices than there are.
    """
    model = whole("model", model, 1)
    count = jax.device_count()
    data = whole("data", max(count // model, 1) if data is None else data, 1)
    if data * model > count:
        raise ValueError(f"data={data}, model={model}: needs {data * model} devices, there are {count}")
    return jax.make_mesh((data, model), AXES, (AxisType.Auto,) * 2, devices=jax.devices()[: data * model])


def check(mesh: Any) -> None:
    """Refuses what is no mesh of ours.

    Raises:
      ValueError: other axes, or axes that are not left to the compiler.
    """
    if mesh is None:
        return
    if not isinstance(mesh, Mesh) or tuple(mesh.axis_names) != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(f"mesh={show(mesh)}: must have the automatic axes {AXES}, as specjax.train.mesh.make_mesh has")


def place_target(mesh: Mesh, params: PyTree) -> PyTree:
    """A Llama's params on a mesh: its large matrices shared out over "model", the rest on every device.

    Works for any tree that uses the same names; matrices that cannot be divided evenly are kept whole.

    Args:
      params: unrolled or stacked, as `specjax.load` returns them.
    """
    check(mesh)

    def place(path, leaf):
        name = str(getattr(path[-1], "key", "")) if path else ""
        axis = -1 if name in COLUMNS else -2 if name in ROWS else None
        spec = [None] * leaf.ndim
        if axis is not None and leaf.ndim >= 2 and leaf.shape[axis] % mesh.shape["model"] == 0:
            spec[axis] = "model"
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree_util.tree_map_with_path(place, params)


def spread(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Copies to every device what does not lie on the mesh yet."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(leaf):
        sharding = getattr(leaf, "sharding", None)
        there = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
        return leaf if there else jax.device_put(leaf, everywhere)

    return jax.tree.map(place, tree)


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
    return batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
