"""The parameters of a Llama: names, shapes, and how checkpoint tensors become them.

`params_from_tensors` fills the tree strictly by name, so that no weight is ever random by accident. The table maps
Hugging Face tensors (i counts layers) to the tree; matrices are ``[out, in]`` there and here.

    ours                     shape                         Hugging Face tensors
    embedding                [vocab, hidden]               model.embed_tokens.weight (the head too if tie_embeddings)
    layers/i/input_norm      [hidden]                      model.layers.i.input_layernorm.weight
    layers/i/qkv             [(Hq + 2 Hkv) D, hidden]      model.layers.i.self_attn.{q,k,v}_proj.weight, in turns
    layers/i/qkv_bias        [(Hq + 2 Hkv) D]              model.layers.i.self_attn.{q,k,v}_proj.bias (attention_bias,
                                                           qkv_bias)
    layers/i/{q,k}_norm      [D]                           model.layers.i.self_attn.{q,k}_norm.weight (qk_norm)
                             [Hq D], [Hkv D]               (wide_qk_norm)
    layers/i/o               [hidden, Hq D]                model.layers.i.self_attn.o_proj.weight
    layers/i/o_bias          [hidden]                      model.layers.i.self_attn.o_proj.bias (attention_bias)
    layers/i/post_norm       [hidden]                      model.layers.i.post_attention_layernorm.weight
    layers/i/gate_up         [2 ffn, hidden]               model.layers.i.mlp.{gate,up}_proj.weight, in turns
    layers/i/gate_up_bias    [2 ffn]                       model.layers.i.mlp.{gate,up}_proj.bias (mlp_bias)
    layers/i/down            [hidden, ffn]                 model.layers.i.mlp.down_proj.weight
    layers/i/down_bias       [hidden]                      model.layers.i.mlp.down_proj.bias (mlp_bias)
    final_norm               [hidden]                      model.norm.weight
    head                     [vocab, hidden]               lm_head.weight (absent when tie_embeddings)

Tensors "in turns" share the rows of one matrix in a repeating order, so that a device which holds a contiguous part
of them holds what belongs together, and needs nothing of the others to go on. In qkv each key head has its query heads,
then its key, then its value. In gate_up a block of `gate_block` rows of gate stands before the same rows of up.

Norms are those of ``norms="before"``. Families that norm what attention and MLP give back have other names for them:

    layers/i/input_norm      model.layers.i.input_layernorm.weight               (both)
    layers/i/attention_norm  model.layers.i.post_attention_layernorm.weight      (both, after)
    layers/i/post_norm       model.layers.i.pre_feedforward_layernorm.weight     (both)
    layers/i/mlp_norm        model.layers.i.post_feedforward_layernorm.weight    (both, after)

With int8 weights (`specjax.models.int8`) qkv, o, gate_up and down are int8, and qkv_scale [out] and so on stand beside
them. With ``scan_layers`` the tree under ``layers`` is one layer whose leaves have a leading axis L.
"""

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import int8
from specjax.models.config import LlamaConfig
from specjax.types import Array, PyTree

BLOCK = 2**18  # numbers read at a time
THREADS = min(8, os.cpu_count() or 1)
LANES = 128  # channels that a TPU lays out together
NORMS = {  # ours: theirs, by `LlamaConfig.norms`
    "before": {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    "after": {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "both": {
        "input_norm": "input_layernorm", "attention_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm", "mlp_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip


class Source(NamedTuple):
    """Where one weight of ours comes from: tensors of a Hugging Face checkpoint, joined along their first axis; with
    ``blocks`` in turns, so many rows of each at a time."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype | None = None  # that it has in our tree; None: what is asked for
    blocks: tuple[int, ...] = ()  # empty: one tensor behind the other

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight in our tree."""
        if not self.shapes[0]:
            return ()
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    def place(self, part: int, row: int) -> tuple[int, int]:
        """Where a row of one of the tensors stands in the joined ones, and how many rows from it on stand together."""
        blocks = self.blocks or [shape[0] for shape in self.shapes]
        turn, inside = divmod(row, blocks[part])
        return turn * sum(blocks) + sum(blocks[:part]) + inside, blocks[part] - inside

    def join(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The tensors [out, ..] as one."""
        if not self.blocks:
            return np.concatenate(tensors) if self.shapes[0] else tensors[0]
        turns = [x.reshape(-1, block, *x.shape[1:]) for block, x in zip(self.blocks, tensors, strict=True)]
        return np.concatenate(turns, axis=1).reshape(-1, *tensors[0].shape[1:])

    def part(self, joined: np.ndarray) -> list[np.ndarray]:
        """The inverse of `join`."""
        blocks = self.blocks or [shape[0] for shape in self.shapes if shape]
        if len(blocks) < 2:
            return [joined]
        turns = joined.reshape(-1, sum(blocks), *joined.shape[1:])
        return [x.reshape(-1, *joined.shape[1:]) for x in np.split(turns, np.cumsum(blocks)[:-1], axis=1)]


class Stack(NamedTuple):
    """One weight of scanned layers: a source for each layer."""

    layers: tuple[Source, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """A tensor that is read a few rows at a time: ``rows[start:stop]``."""

    shape: tuple[int, ...]
    take: Callable[[int, int], np.ndarray]  # (start, stop) -> rows
    step: int = 0  # how many at a time are read best; 0: any number

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        return self.take(start, stop)


def gate_block(ffn: int) -> int:
    """Rows of gate, and of up behind them, that stand together in gate_up.

    Sixteen blocks of each if they are whole lanes of a TPU, else fewer, but eight at least where that divides them: as
    many parts as a matrix is usually shared out in. Large, since the product is cut at every block.
    """
    return ffn // max(math.gcd(ffn, 16 * LANES) // LANES, math.gcd(ffn, 8))


def layer_sources(config: LlamaConfig, prefix: str, *, inputs: int | None = None) -> dict[str, Source]:
    """One layer of the table, under Hugging Face names that start with ``prefix``.

    ``inputs``: width of what attention reads, if it is not the hidden size.
    """
    e, f, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size

    def source(names, outs, *ins, blocks=()):
        return Source(tuple(prefix + name for name in names), tuple((out, *ins) for out in outs), blocks=blocks)

    group, block = (q // config.num_kv_heads, config.head_dim, config.head_dim), (gate_block(f),) * 2
    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    gate_up = ["mlp.gate_proj", "mlp.up_proj"]
    sources = {
        "qkv": source([f"{name}.weight" for name in qkv], [q, kv, kv], inputs or e, blocks=group),
        "o": source(["self_attn.o_proj.weight"], [e], q),
        "gate_up": source([f"{name}.weight" for name in gate_up], [f, f], e, blocks=block),
        "down": source(["mlp.down_proj.weight"], [e], f),
    }
    sources |= {ours: source([f"{theirs}.weight"], [e]) for ours, theirs in NORMS[config.norms].items()}
    if config.attention_bias or config.qkv_bias:
        sources["qkv_bias"] = source([f"{name}.bias" for name in qkv], [q, kv, kv], blocks=group)
    if config.attention_bias:
        sources["o_bias"] = source(["self_attn.o_proj.bias"], [e])
    if config.qk_norm or config.wide_qk_norm:
        sizes = (q, kv) if config.wide_qk_norm else (config.head_dim, config.head_dim)
        sources["q_norm"] = source(["self_attn.q_norm.weight"], [sizes[0]])
        sources["k_norm"] = source(["self_attn.k_norm.weight"], [sizes[1]])
    if config.mlp_bias:
        sources["gate_up_bias"] = source([f"{name}.bias" for name in gate_up], [f, f], blocks=block)
        sources["down_bias"] = source(["mlp.down_proj.bias"], [e])
    return sources


def side_by_side(config: LlamaConfig, name: str) -> np.ndarray | None:
    """[out]: where the rows of a matrix in turns stand, in the order of its tensors side by side; None for a weight
    that has no such rows. ``name`` may be a path with dots, a bias or a scale."""
    of = name.rpartition(".")[2].removesuffix("_bias").removesuffix(int8.SCALE)
    source = layer_sources(config, "").get(of)
    return np.concatenate(source.part(np.arange(source.shape[0]))) if source and source.blocks else None


def sources(config: LlamaConfig) -> dict[str, Any]:
    """The unrolled parameter tree with a `Source` at every leaf: the table of this module's docstring as data."""
    e, v = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {
        "embedding": Source(("model.embed_tokens.weight",), ((v, e),)),
        "layers": {index: layer_sources(config, f"model.layers.{index}.") for index in range(config.num_layers)},
        "final_norm": Source(("model.norm.weight",), ((e,),)),
    }
    if not config.tie_embeddings:
        tree["head"] = Source(("lm_head.weight",), ((v, e),))
    return tree


def _is_source(node) -> bool:
    return isinstance(node, Source | Stack)


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor a checkpoint of this configuration must have, with its shape there."""
    return shapes_of(sources(config))


def params_from_tensors(
    config: LlamaConfig, tensor: Callable[[str, tuple[int, ...]], "np.ndarray | Rows"], *, dtype=jnp.float32,
    scan_layers: bool = False, put: Callable[[tuple, np.ndarray], Array] | None = None,
) -> PyTree:
    """The parameters, filled strictly by name.

    Args:
      config: the model's configuration; with ``quantization`` the matrices of layers become int8 as they are read.
      tensor: ``(name, shape) -> array``, or `Rows` to be read a few at a time; called once for every entry of
        `tensor_shapes`. It raises if there is no such tensor; a wrong shape is refused here.
      dtype: float32 or bfloat16, of every weight that is not quantised.
      scan_layers: layers along a leading axis, as `stack_layers` would make them.
      put: see `fill`.
    """
    tree = stacked(sources(config)) if scan_layers else sources(config)
    return fill(tree, tensor, dtype, put, quantise=bool(config.quantization))


def stacked(tree: dict[str, Any]) -> dict[str, Any]:
    """An unrolled tree of `Source` as that of scanned layers."""
    layers = list(tree["layers"].values())
    return tree | {"layers": {name: Stack(tuple(layer[name] for layer in layers)) for name in layers[0]}}


def fill(
    tree: PyTree, tensor: Callable[[str, tuple[int, ...]], "np.ndarray | Rows"], dtype=jnp.float32,
    put: Callable[[tuple, np.ndarray], Array] | None = None, *, quantise: bool = False,
) -> PyTree:
    """A tree of `Source` as weights; ``tensor`` and ``dtype`` as in `params_from_tensors`.

    ``put(path, weight)`` takes each to its devices as soon as it is read; None is the default device. ``quantise``:
    the matrices of layers become int8, and their scales stand beside them.
    """
    dtype = weight_dtype(dtype)
    put = (lambda path, weight: jax.device_put(weight)) if put is None else put
    scales = []

    def build(path, leaf: Source | Stack) -> Array:
        layers = leaf.layers if isinstance(leaf, Stack) else (leaf,)
        shape, inside = layers[0].shape, quantise and path[-1].key in int8.MATRICES
        weight = aligned((len(layers), *shape), np.dtype(np.int8) if inside else layers[0].dtype or dtype)
        scale = np.empty((len(layers), shape[0]), np.float32) if inside else [None] * len(layers)
        for index, source in enumerate(layers):
            _read(source, tensor, weight[index, ...], scale[index], pool)  # a view also of single numbers
        if isinstance(leaf, Source):
            weight, scale = weight[0, ...], scale[0]
        if inside:
            to = (*path[:-1], jax.tree_util.DictKey(path[-1].key + int8.SCALE))
            scales.append((to, put(to, np.asarray(scale))))
        return put(path, weight)

    with ThreadPoolExecutor(THREADS) as pool:
        params = jax.tree_util.tree_map_with_path(build, tree, is_leaf=_is_source)
    for path, scale in scales:
        functools.reduce(lambda node, key: node[key.key], path[:-1], params)[path[-1].key] = scale
    return params


def _read(source: Source, tensor: Callable, weight: np.ndarray, scale: np.ndarray | None, pool) -> None:
    """Fills a weight, and its scale if it is to be int8, with the tensors of its source."""
    for part, (name, shape) in enumerate(zip(source.names, source.shapes)):
        found = tensor(name, shape)
        if tuple(found.shape) != shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(found.shape)}, the configuration needs {shape}")
        if not shape:
            weight[...] = found
            continue
        step = getattr(found, "step", 0) or max(1, BLOCK // math.prod(shape[1:]))
        block = functools.partial(_block, found, functools.partial(source.place, part), step, weight, scale, name)
        for _ in pool.map(block, range(0, shape[0], step)):
            pass  # the first error is raised here


def _block(
    tensor: "np.ndarray | Rows", place: Callable[[int], tuple[int, int]], step: int, weight: np.ndarray,
    scale: np.ndarray | None, name: str, first: int,
) -> None:  # fmt: skip
    """Reads a block of rows straight to their place: whole copies would double the peak of memory."""
    block, row = np.asarray(tensor[first : first + step]), 0
    while row < len(block):
        start, together = place(first + row)
        few = block[row : row + together]
        at, row = slice(start, start + len(few)), row + len(few)
        if scale is not None:
            few, scale[at] = int8.rounded(few, f"tensor {name!r}")
        weight[at] = few


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array at a multiple of 64 bytes, which jax on a CPU takes as it is instead of copying it."""
    raw = np.empty(math.prod(shape) * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + raw.size - 64].view(dtype).reshape(shape)


def spill(tree: PyTree, params: PyTree) -> dict[str, np.ndarray]:
    """The inverse of `fill`: Hugging Face tensors of weights that stand where the `Source` does."""
    tensors = {}
    leaves, where = jax.tree.flatten(tree, is_leaf=_is_source)
    for source, weight in zip(leaves, where.flatten_up_to(params), strict=True):
        parts = source.part(np.asarray(weight))
        tensors |= {name: np.ascontiguousarray(part) for name, part in zip(source.names, parts, strict=True)}
    return tensors


def shapes_of(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Every tensor that a tree of `Source` needs, with its shape there."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_source)
    return {name: shape for leaf in leaves for name, shape in zip(leaf.names, leaf.shapes)}


def abstract(tree: PyTree, dtype=jnp.float32) -> PyTree:
    """A tree of `Source` as ShapeDtypeStructs of the weights."""
    return jax.tree.map(lambda source: jax.ShapeDtypeStruct(source.shape, dtype), tree, is_leaf=_is_source)


def abstract_params(config: LlamaConfig, *, dtype=jnp.float32, scan_layers: bool = False) -> PyTree:
    """The parameter tree as ShapeDtypeStructs: what `params_from_tensors` returns, without the numbers."""
    params = abstract(sources(config), weight_dtype(dtype))
    if config.quantization:
        params["layers"] = {index: int8.abstract(layer) for index, layer in params["layers"].items()}
    return jax.eval_shape(stack_layers, params) if scan_layers else params


def stack_layers(params: PyTree) -> PyTree:
    """An unrolled parameter tree as the stacked one that scanned layers read."""
    layers = [params["layers"][index] for index in range(len(params["layers"]))]
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def unstack_layers(params: PyTree) -> PyTree:
    """The inverse of `stack_layers`."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = [jax.tree.map(operator.itemgetter(index), params["layers"]) for index in range(count)]
    return {**params, "layers": dict(enumerate(layers))}


def weight_dtype(dtype) -> np.dtype:
    """float32 or bfloat16 as a dtype. Raises ValueError for anything else."""
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"weights are float32 or bfloat16, not {dtype.name}")
    return dtype
