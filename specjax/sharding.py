"""Several devices: a mesh with axes "data" and "model", and what lies where on it.

One table, in three parts: `WEIGHTS` names the axes of a Llama's matrices, `CACHE`, `TOKENS`, `LOGITS` and `FEATURES`
those of what a pass reads and writes, and `Rules` says which axis of the mesh each of them is shared out over. `place`
puts a language model on a mesh; `generate`, `stream`, `round` and `Engine` then take it as any other, and `jit` does
the rest. `load_drafter` puts heads and draft models where their target lies, by the same table; `place_drafter` does it
for one that was made otherwise. A lookup needs nothing.

An axis is shared out only where the mesh divides it: a vocabulary or a number of key heads that it does not divide is
kept whole on every device. What would leave nothing to share is refused.
"""

import contextlib
import contextvars
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.static import Bound, bind, show, whole
from specjax.types import Array, Drafter, KVCache, Model, ModelOutput, PyTree

AXES = ("data", "model")


class Rules(NamedTuple):
    """Axis of the mesh for each logical axis; None is not shared out. ``Rules(vocab=None)`` overrides one."""

    batch: str | None = "data"
    heads: str | None = "model"  # of queries, keys and values: the rows of qkv, the columns of o
    kv_heads: str | None = "model"  # of the cache
    ffn: str | None = "model"
    vocab: str | None = "model"
    fused: str | None = "model"  # what the first matrix of a head reads
    hidden: str | None = None
    features: str | None = None
    window: str | None = None
    slots: str | None = None
    head_dim: str | None = None


RULES = Rules()


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and its rules as one static value (a bare Mesh is callable, and callables are held weakly)."""

    mesh: Mesh
    rules: Rules

    def bound(self, axes: tuple[str, ...], x: Array) -> Array:
        """x, told where it lies."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec(self.mesh, axes, x.shape, self.rules)))

    def cache(self, cache: KVCache) -> KVCache:
        """A cache, told where it lies."""
        k, v = (jax.tree.map(lambda x: self.bound(CACHE, x), part) for part in (cache.k, cache.v))
        return KVCache(k, v, self.bound(("batch",), cache.lengths))


# Rows where each device can make its own part of the result, columns where the parts are added up. Names and shapes:
# `specjax.models.llama_params`; any tree that uses the names can be placed. A stacked leaf has an axis more in front.
WEIGHTS = {
    "embedding": ("vocab", "hidden"), "head": ("vocab", "hidden"),
    "qkv": ("heads", "hidden"), "o": ("hidden", "heads"),
    "gate_up": ("ffn", "hidden"), "down": ("hidden", "ffn"),
    "fc": ("hidden", "fused"), "projection": ("vocab", "hidden"),  # of heads
    "qkv_scale": ("heads",), "o_scale": ("hidden",), "gate_up_scale": ("ffn",), "down_scale": ("hidden",),  # of int8
}  # fmt: skip
CACHE = ("batch", "kv_heads", "slots", "head_dim")
TOKENS = ("batch", "window")
LOGITS = ("batch", "window", "vocab")
COUNTS = ("batch", "vocab")
FEATURES = ("batch", "window", "features")
QUERIES = ("batch", "window", "heads", "head_dim")
KEYS = ("batch", "window", "kv_heads", "head_dim")  # of a window, as the cache will hold them

_LAYOUT: contextvars.ContextVar = contextvars.ContextVar("layout", default=None)


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
        raise ValueError(f"mesh={show(mesh)}: must have the automatic axes {AXES}, as specjax.sharding.make_mesh has")


def _needed(mesh: Any) -> None:
    """`check`, where there must be one."""
    if mesh is None:
        raise ValueError("mesh=None: give what specjax.sharding.make_mesh returns; without a mesh nothing is placed")
    check(mesh)


def spec(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...], rules: Rules = RULES) -> PartitionSpec:
    """Where an array of this shape lies; ``axes`` names its last axes, further ones in front are not shared out."""
    names = [None] * (len(shape) - len(axes)) + [getattr(rules, axis) for axis in axes][-len(shape) or len(axes) :]
    return PartitionSpec(*(n if n and size % mesh.shape[n] == 0 else None for n, size in zip(names, shape)))


def weight_sharding(mesh: Mesh, path: tuple, shape: tuple[int, ...], rules: Rules = RULES) -> NamedSharding:
    """Where the weight at a path of the parameter tree lies; what `WEIGHTS` does not name is on every device."""
    axes = WEIGHTS.get(str(getattr(path[-1], "key", "")) if path else "", ())
    return NamedSharding(mesh, spec(mesh, axes if len(shape) >= len(axes) else (), shape, rules))


def putting(mesh: Mesh | None) -> Any:
    """``(path, weight) -> array`` that takes a weight straight to where it lies; None for the default device."""
    if mesh is None:
        return None
    return lambda path, weight: put(weight, weight_sharding(mesh, path, np.shape(weight)))


def place_params(mesh: Mesh, params: PyTree, rules: Rules = RULES) -> PyTree:
    """Params on a mesh; matrices that cannot be divided evenly are kept whole.

    Args:
      mesh: see `make_mesh`.
      params: unrolled or stacked, as `specjax.load` returns them.
      rules: see `Rules`.
    """
    _needed(mesh)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: put(leaf, weight_sharding(mesh, path, np.shape(leaf), rules)), params
    )


def place(mesh: Mesh, lm: Any, rules: Rules = RULES) -> Any:
    """A `LanguageModel` on a mesh: weights by the table, cache by rows and key heads, logits by rows and vocabulary.

    Every batch it decodes must have one row, or a number of rows that ``data`` divides.

    Raises:
      ValueError: no mesh, no language model; a configuration whose heads or MLP the mesh does not divide: the message
        has the numbers.
    """
    _needed(mesh)
    if not isinstance(getattr(lm, "model", None), Model):
        way = "place_drafter(mesh, drafter) is for drafters" if isinstance(lm, Drafter) else "specjax.load returns one"
        raise ValueError(f"lm={show(lm)} is not a language model: {way}")
    refuse(mesh, lm.config, rules)
    return lm._replace(model=on_mesh(mesh, lm.model, rules), params=place_params(mesh, lm.params, rules))


def refuse(mesh: Mesh, config: Any, rules: Rules = RULES) -> None:
    """Refuses a configuration (or None) of which the mesh cannot share out the layers.

    Raises:
      ValueError: naming the mesh, the size and the numbers that fit; a note says how to keep it whole.
    """
    sizes = {axis: (name, getattr(config, name, None)) for axis, name in (("heads", "num_heads"),
                                                                         ("ffn", "intermediate_size"))}  # fmt: skip
    for axis, (name, size) in sizes.items():
        over = getattr(rules, axis)
        if size is None or over is None or size % mesh.shape[over] == 0:
            continue
        together = [count for other, (_, count) in sizes.items() if count and getattr(rules, other) == over]
        fit = [parts for parts in range(1, jax.device_count() + 1) if not any(count % parts for count in together)]
        error = ValueError(
            f"mesh={','.join(map(str, mesh.shape.values()))}: {name}={size} cannot be shared out over "
            f"{over}={mesh.shape[over]}; with {jax.device_count()} devices {over} may be {' or '.join(map(str, fit))}"
        )
        error.add_note(f"Or load without a mesh and keep it whole on every device: specjax.sharding.place(mesh, lm, "
                       f"specjax.sharding.Rules({axis}=None))")  # fmt: skip
        raise error


def on_mesh(mesh: Mesh, model: Model, rules: Rules = RULES) -> Model:
    """The model with its cache and what it reads and writes bound to the mesh. Equal arguments give equal models."""
    layout = Layout(mesh, rules)
    init_cache, apply = bind(_init_cache, layout, model.init_cache), bind(_apply, layout, model.apply)
    return model._replace(init_cache=init_cache, apply=apply, layout=layout)


def place_drafter(mesh: Mesh, drafter: Drafter, rules: Rules = RULES) -> Drafter:
    """A drafter on a mesh: matrices by the table, all else whole on every device; what is there in parts already, such
    as a target's embedding, stays. `load_drafter` does it for a target on a mesh.

    Raises:
      ValueError: no mesh, no drafter, or one that was placed otherwise before.
    """
    _needed(mesh)
    if not isinstance(drafter, Drafter):
        raise ValueError(f"drafter={show(drafter)} is not a drafter: give one such as specjax.load_drafter returns; "
                         "place(mesh, lm) is for models")
    layout, before = Layout(mesh, rules), layout_of(drafter)
    if before not in (None, layout):
        raise ValueError(f"drafter was placed on {shown(before.mesh)} before, and mesh={shown(mesh)} or its rules are "
                         "others: place the one it was made from")

    def lay(path, leaf):
        own = getattr(leaf, "sharding", None)
        there = isinstance(own, NamedSharding) and own.mesh == mesh and not own.is_fully_replicated
        return leaf if there else put(leaf, weight_sharding(mesh, path, np.shape(leaf), rules))

    params = jax.tree_util.tree_map_with_path(lay, drafter.params)
    functions = (drafter.init, drafter.observe, drafter.draft)
    init, observe, draft = functions if before else (bind(_within, layout, fn) for fn in functions)
    return drafter._replace(params=params, init=init, observe=observe, draft=draft)


def layout_of(drafter: Drafter) -> Layout | None:
    """Where `place_drafter` put a drafter."""
    fn = drafter.draft
    return fn.args[0] if isinstance(fn, Bound) and fn.fn is _within else None


def shown(mesh: Mesh) -> str:
    """A mesh in messages."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"a mesh {sizes} of devices {show([device.id for device in mesh.devices.flat], 40)}"


def _within(layout: Layout, fn: Any, *args: Any, **kwargs: Any) -> Any:
    with _active(layout):
        return fn(*args, **kwargs)


def spread(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Copies to every device what does not lie on the mesh yet."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def copy(leaf):
        sharding = getattr(leaf, "sharding", None)
        there = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
        return leaf if there else put(leaf, everywhere)

    return jax.tree.map(copy, tree)


def put(x: Any, where: NamedSharding) -> Array:
    """x on the devices of a mesh. Of several processes, which all have the same x, each gives the parts of its own
    devices; `jax.device_put` would send the whole of it around and compare it."""
    if jax.process_count() == 1 or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, where)
    array = np.asarray(x)
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def settled(layout: Layout | None, state: Any) -> Any:
    """What a round leaves, told where it lies: see `by_rows`; the pace on every device. A state then lies as
    it did before, whatever the compiler would choose, and the next round is the same program.

    Args:
      layout: None changes nothing.
      state: a `specjax.round.State`.
    """
    if layout is None:
        return state
    rest = by_rows(layout, state._replace(pace=()), state.text.lengths.shape[0])
    return rest._replace(pace=jax.tree.map(lambda x: layout.bound(("window",) * x.ndim, x), state.pace))


def by_rows(layout: Layout, tree: PyTree, batch: int) -> PyTree:
    """Told what is shared out: rows and key heads of caches, rows and vocabulary of ``logits``, and of arrays whose
    first or second axis counts the ``batch`` rows these alone."""

    def bound(path, x):
        if isinstance(x, KVCache):
            return layout.cache(x)
        if x.ndim == 2 and getattr(path[-1], "name", "") == "logits":
            return layout.bound(COUNTS, x)
        axis = x.shape[:2].index(batch) if batch in x.shape[:2] else x.ndim
        names = ["window"] * x.ndim
        names[axis : axis + 1] = ["batch"] * (axis < x.ndim)
        return layout.bound(tuple(names), x)

    return jax.tree_util.tree_map_with_path(bound, tree, is_leaf=lambda x: isinstance(x, KVCache))


def on(layout: Layout | None):
    """While a function is traced inside, `told` binds its arrays to this mesh; None changes nothing."""
    return contextlib.nullcontext() if layout is None else _active(layout)


def told(axes: tuple[str, ...], x: Array) -> Array:
    """x, told where it lies if what is being traced is on a mesh: a model, and how its logits are judged."""
    layout = _LAYOUT.get()
    return x if layout is None else layout.bound(axes, x)


def on_a_mesh() -> bool:
    """Whether what is being traced is on a mesh."""
    return _LAYOUT.get() is not None


def dividing(axis: str) -> int:
    """How many devices of the mesh share out an axis, by its name in `Rules`, if they divide it; 1 off a mesh."""
    layout = _LAYOUT.get()
    over = None if layout is None else getattr(layout.rules, axis)
    return layout.mesh.shape[over] if layout is not None and over else 1


def parts(axis: str, size: int) -> int:
    """In how many parts an axis of this size lies."""
    count = dividing(axis)
    return 1 if size % count else count


@contextlib.contextmanager
def _active(layout: Layout):
    token = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(token)


def _init_cache(layout: Layout, init_cache: Any, batch: int, capacity: int) -> KVCache:
    axis = layout.rules.batch
    parts = layout.mesh.shape[axis] if axis else 1
    if batch > 1 and batch % parts:
        raise ValueError(
            f"a batch of {batch} rows cannot be shared out over {axis}={parts}: give a multiple of {parts} prompts "
            "(or slots), or a mesh with fewer parts of a batch"
        )
    return layout.cache(init_cache(batch, capacity))


def _apply(
    layout: Layout, apply: Any, params, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None
) -> ModelOutput:
    tokens, positions = layout.bound(TOKENS, tokens), layout.bound(TOKENS, positions)
    with _active(layout):
        out = apply(params, tokens, positions, window_mask, cache, feature_layers=feature_layers, logits_at=logits_at)
    now: Any = None if out.cache is None else layout.cache(out.cache)
    return ModelOutput(layout.bound(LOGITS, out.logits), layout.bound(FEATURES, out.features), now)
