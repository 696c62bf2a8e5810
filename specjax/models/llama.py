"""Llama and the families that differ from it in a few constants, as flax NNX modules that hold only weights.

`model` is the pure model of a configuration; `Llama` is the module behind it, for those who train or change one.
What a family sets in the configuration: `specjax.models.families`.
Names and shapes of the weights, and where they come from: `specjax.models.llama_params`.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.models.attention import Reach, attend, reach, sliding
from specjax.models.config import LayerKind, LlamaConfig
from specjax.models.llama_params import abstract_params, gate_block
from specjax.models.nnx import from_nnx
from specjax.models.rope import inverse_frequencies, layer_angles, rotate
from specjax.sharding import KEYS, QUERIES, on_a_mesh, told
from specjax.types import Array, KVCache, Model, ModelOutput

FEW = 64  # rows of a window for which a product has one part for each core
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def model(config: LlamaConfig, *, dtype=jnp.float32, scan_layers: bool = False) -> Model:
    """The pure model of a configuration, made without any weight. Equal arguments give equal models.

    Args:
      config: sizes and constants.
      dtype: of the weights it will be given, float32 or bfloat16; the cache has the same.
      scan_layers: whether it will be given stacked layers.
    """
    inverse_frequencies(config, config.rope)  # an odd head_dim is refused now, not at the first pass
    module = nnx.eval_shape(lambda: Llama(config, dtype=dtype, scan_layers=scan_layers))
    return from_nnx(module)[0]


def linear(
    x: Array, weight: nnx.Param, bias: nnx.Param | None = None, scale: nnx.Param | None = None, dtype: Any = None
) -> Array:
    """x [B, T, in] float32 times weight [out, in], accumulated in float32 from operands of the weight's type.

    An int8 weight has a scale [out] for the sums, and its operands have the given dtype.
    """
    dtype = weight.dtype if scale is None else dtype
    rows, matrix = x.reshape(-1, x.shape[-1]).astype(dtype), weight[...].astype(dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")
    if dtype == jnp.float32 and len(rows) <= FEW and jax.default_backend() == "cpu" and not on_a_mesh():
        y = _by_cores(rows, matrix, product)
    else:
        y = product("ti,oi->to", rows, matrix)
    y = y.reshape(*x.shape[:-1], len(matrix))
    y = y if scale is None else y * _row(scale)
    return y if bias is None else y + _row(bias)


def _by_cores(rows: Array, matrix: Array, product: Callable) -> Array:
    """A few rows [T, in] times matrix [out, in] -> [T, out], a part of the matrix for each core, weights on the left:
    what stands on the right XLA:CPU packs anew in every product."""
    count, parts = len(rows), math.gcd(len(matrix), CORES)
    width = count if count <= 4 else -(-count // 8) * 8  # sizes between have slow kernels
    rows = jnp.broadcast_to(jnp.pad(rows, ((0, width - count), (0, 0))), (parts, width, rows.shape[1]))
    y = product("poi,pti->pot", matrix.reshape(parts, len(matrix) // parts, matrix.shape[1]), rows)
    return y.reshape(len(matrix), width).T[:count]


def rms_norm(x: Array, scale: nnx.Param, eps: float, offset: float = 0.0) -> Array:
    """x / rms(x) * (scale + offset) over the last axis of x [.., E], in float32."""
    row = _row(scale, x.ndim)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * (row + offset if offset else row)


def _row(param: nnx.Param, ndim: int = 3) -> Array:
    return param[...].astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def _capped(x: Array, cap: float) -> Array:
    return cap * jnp.tanh(x / cap) if cap else x


def _of_tokens(logits: Array, num_tokens: int) -> Array:
    """Rows of a padded vocabulary are untrained: no law gives them mass. Those between the tokenizer's last id and an
    end id behind it count as tokens and keep theirs."""
    if not num_tokens or num_tokens == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < num_tokens, logits, -jnp.inf)


class Layer(nnx.Module):
    """Attention and a gated MLP, each added to the residual stream; norms stand where there are weights for them."""

    def __init__(self, weights: dict[str, Array]):
        def maybe(name):
            return nnx.Param(weights[name]) if name in weights else None

        self.input_norm, self.attention_norm = maybe("input_norm"), maybe("attention_norm")
        self.post_norm: Any = maybe("post_norm")
        self.mlp_norm = maybe("mlp_norm")
        self.qkv, self.qkv_bias = nnx.Param(weights["qkv"]), maybe("qkv_bias")
        self.q_norm, self.k_norm = maybe("q_norm"), maybe("k_norm")
        self.o, self.o_bias = nnx.Param(weights["o"]), maybe("o_bias")
        self.gate_up, self.gate_up_bias = nnx.Param(weights["gate_up"]), maybe("gate_up_bias")
        self.down, self.down_bias = nnx.Param(weights["down"]), maybe("down_bias")
        self.qkv_scale, self.o_scale = maybe("qkv_scale"), maybe("o_scale")
        self.gate_up_scale, self.down_scale = maybe("gate_up_scale"), maybe("down_scale")

    def __call__(self, x: Array, k: Any, v: Any, lengths: Array | None, window: "Window"):
        """x [B, T, E] and this layer's cache k, v [B, H, S, D] (or all layers', or None) -> the same three."""
        config = window.config
        y, k, v = self.attention(_normed(x, self.input_norm, config), k, v, lengths, window)
        x = x + _normed(y, self.attention_norm, config)
        y = self.mlp(_normed(x, self.post_norm, config), config.activation)
        return x + _normed(y, self.mlp_norm, config), k, v

    def attention(self, y: Array, k: Any, v: Any, lengths: Array | None, window: "Window"):
        """What attention adds to the stream: y [B, T, in], already normed, -> ([B, T, E], k, v)."""
        config, (batch, width, _) = window.config, y.shape
        q, k_new, v_new = self.heads(y, window)
        if lengths is None:
            k_here, v_here = (new.swapaxes(1, 2).astype(self.dtype) for new in (k_new, v_new))
        else:
            k, v = kv.write(k, k_new, lengths, window.layer), kv.write(v, v_new, lengths, window.layer)
            k_here, v_here = (k, v) if window.layer is None else (k[window.layer], v[window.layer])
        scale = config.query_scalar**-0.5 if config.query_scalar else None
        y = attend(q, k_here, v_here, window.slots, scale=scale, softcap=config.attention_softcap)
        return self.times("o", y.reshape(batch, width, config.q_size)), k, v

    def heads(self, y: Array, window: "Window") -> tuple[Array, Array, Array]:
        """y [B, T, in] -> queries [B, T, Hq, D], keys and values [B, T, H, D]; the first two turned to the window's
        positions, after a norm of their own if the model has one."""
        config, (batch, width, _) = window.config, y.shape
        # Each key head behind its query heads and before its value: a device that holds some of them has all it needs.
        groups = config.num_heads // config.num_kv_heads
        y = self.times("qkv", y).reshape(batch, width, config.num_kv_heads, groups + 2, config.head_dim)
        q = y[:, :, :, :groups].reshape(batch, width, config.num_heads, config.head_dim)
        k, v = y[:, :, :, groups], y[:, :, :, groups + 1]
        # Keys that the cache holds whole must not reach it in parts: the compiler would add up whole caches.
        q, k, v = told(QUERIES, q), told(KEYS, k), told(KEYS, v)
        q, k = _heads_normed(q, self.q_norm, config), _heads_normed(k, self.k_norm, config)
        return rotate(q, window.cos_sin), rotate(k, window.cos_sin), v

    def mlp(self, y: Array, activation: str = "silu") -> Array:
        """What the gated MLP adds to the stream: y [B, T, E], already normed, -> [B, T, E]."""
        y = self.times("gate_up", y)
        blocks = y.reshape(*y.shape[:2], -1, 2, gate_block(y.shape[-1] // 2))
        y = ACTIVATIONS[activation](blocks[..., 0, :]) * blocks[..., 1, :]
        return self.times("down", y.reshape(*y.shape[:2], -1))

    def times(self, name: str, x: Array) -> Array:
        """x [B, T, in] times one of the matrices, its bias added -> [B, T, out]."""
        weight, bias, scale = (getattr(self, name + what) for what in ("", "_bias", "_scale"))
        return linear(x, weight, bias, scale, self.dtype)

    @property
    def dtype(self) -> Any:
        """Of the operands of products, and of the cache: the weights' own, the norms' if the matrices are int8."""
        if self.qkv_scale is None:
            return self.qkv.dtype
        return next(norm.dtype for norm in (self.post_norm, self.mlp_norm) if norm is not None)


def _normed(x: Array, scale: nnx.Param | None, config: LlamaConfig) -> Array:
    return x if scale is None else rms_norm(x, scale, config.rms_eps, config.norm_offset)


def _heads_normed(x: Array, scale: nnx.Param | None, config: LlamaConfig) -> Array:
    """x [B, T, H, D] normed over as many channels as there are weights: those of a head, or of all heads."""
    if scale is None or scale.shape[-1] == config.head_dim:
        return _normed(x, scale, config)
    return _normed(x.reshape(*x.shape[:2], -1), scale, config).reshape(x.shape)


class Window(NamedTuple):
    """What all layers of a kind share in one forward pass."""

    config: LlamaConfig
    cos_sin: tuple[Array, Array]  # of the window's positions
    slots: Reach
    layer: Array | None = None  # index into a stacked cache; None if k and v are one layer's


class Llama(nnx.Module):
    """A Llama-family language model: weights only; the cache is an argument and a result.

    Made with random weights (standard deviation 0.02), for training and tests; checkpoints come in through
    `llama_params.params_from_tensors`.
    """

    def __init__(
        self, config: LlamaConfig, *, dtype=jnp.float32, scan_layers: bool = False, rngs: nnx.Rngs | None = None
    ):
        """Random weights.

        Args:
          config: sizes and constants.
          dtype: float32 or bfloat16, of every weight. Sums, norms and the residual stream are float32 either way.
          scan_layers: one stacked layer under `lax.scan` (compiles once; the convention on TPU) instead of a list
            (faster on CPU, where scan copies the weights of each layer).
          rngs: source of the randomness; None is ``nnx.Rngs(0)``.
        """
        rngs = nnx.Rngs(0) if rngs is None else rngs

        def fresh(path, shape: jax.ShapeDtypeStruct) -> Array:
            name = path[-1].key
            if shape.dtype == jnp.int8:
                return jax.random.randint(rngs.params(), shape.shape, -127, 128, jnp.int8)
            if name.endswith("_scale"):  # -127..127 drawn uniformly have a standard deviation of 73.3
                return jnp.full(shape.shape, 0.02 / 73.3, shape.dtype)
            if name.endswith(("norm", "bias")):
                return jnp.full(shape.shape, 1 - config.norm_offset if name.endswith("norm") else 0, shape.dtype)
            return (0.02 * jax.random.normal(rngs.params(), shape.shape)).astype(shape.dtype)

        shapes = abstract_params(config, dtype=dtype, scan_layers=scan_layers)
        weights = jax.tree_util.tree_map_with_path(fresh, shapes)
        self.config = config
        self.scan_layers = scan_layers
        self.embedding = nnx.Param(weights["embedding"])
        if scan_layers:
            self.layers = Layer(weights["layers"])
        else:
            self.layers = nnx.List([Layer(weights["layers"][index]) for index in range(config.num_layers)])
        self.final_norm = nnx.Param(weights["final_norm"])
        self.head = None if config.tie_embeddings else nnx.Param(weights["head"])

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        return self.config.max_position_embeddings

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache in the weights' type; bfloat16 is kept as its bits in uint16, see `specjax.cache.write`."""
        return kv.init(
            num_layers=self.config.num_layers, batch=batch, capacity=capacity, num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim, dtype=jnp.uint16 if self.embedding.dtype == jnp.bfloat16 else jnp.float32,
            stacked=self.scan_layers,
        )  # fmt: skip

    def __call__(
        self, tokens: Array, positions: Array, window_mask: Array | None, cache: KVCache | None, *,
        feature_layers: tuple[int, ...] = (), logits_at: Array | None = None,
    ) -> ModelOutput:  # fmt: skip
        """Reads a window; arguments and result as in `specjax.types.Model`.

        Without a cache (None) the window is the whole text and the result has none either: the way to take gradients.
        """
        if tokens.size == 1 and self.embedding.dtype == jnp.bfloat16:
            window = _doubled(tokens, positions, window_mask)
            out = self(*window, cache, feature_layers=feature_layers, logits_at=logits_at)
            return out._replace(logits=out.logits[:, :1], features=out.features[:, :1])
        config, (batch, width) = self.config, tokens.shape
        if cache is None:
            lengths = jnp.zeros(batch, jnp.int32)
            slots = reach(window_mask, lengths, width, width)._replace(written=None)
        else:
            lengths = cache.lengths
            slots = reach(window_mask, lengths, width, jax.tree.leaves(cache.k)[0].shape[-2])
        kinds = tuple(dict.fromkeys(config.layers))
        windows = [_window(config, kind, positions, lengths, slots) for kind in kinds]
        run = self._scanned if self.scan_layers else self._unrolled
        x = lookup(self.embedding, tokens)
        x = x if config.embedding_scale == 1.0 else x * config.embedding_scale
        x, streams, cache_now = run(x, cache, windows, [kinds.index(kind) for kind in config.layers], feature_layers)
        x = _normed(x, self.final_norm, config)
        features = jnp.concatenate([[*streams, x][layer] for layer in feature_layers] or [x[..., :0]], axis=-1)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        logits = _capped(linear(x, self.embedding if self.head is None else self.head), config.logit_softcap)
        return ModelOutput(_of_tokens(logits, config.num_tokens), features, cache_now)

    def _unrolled(
        self, x: Array, cache: KVCache | None, windows: list[Window], kinds: list[int], keep: tuple[int, ...]
    ) -> tuple[Array, list, Any]:
        """``kinds``: for each layer, which of the windows is its own. ``keep``: whether streams are wanted."""
        layers: Any = self.layers
        none = (None,) * len(layers)
        ks, vs, lengths = (none, none, None) if cache is None else cache
        streams, caches = [x], []
        for layer, k, v, kind in zip(layers, ks, vs, kinds):
            x, *kv_now = layer(x, k, v, lengths, windows[kind])
            streams.append(x)
            caches.append(kv_now)
        ks, vs = zip(*caches)
        return x, streams, None if lengths is None else KVCache(ks, vs, lengths)

    def _scanned(
        self, x: Array, cache: KVCache | None, windows: list[Window], kinds: list[int], keep: tuple[int, ...]
    ) -> tuple[Array, list, Any]:
        graph, weights = nnx.split(self.layers)
        ks, vs, lengths = (None, None, None) if cache is None else cache
        views = [(own.cos_sin, own.slots) for own in windows]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *views) if len(views) > 1 else None

        def step(carry, layer):
            index, kind, weights = layer
            module: Any = nnx.merge(graph, weights)
            cos_sin, slots = views[0] if stacked is None else jax.tree.map(lambda x: x[kind], stacked)
            x, k, v = module(*carry, lengths, Window(self.config, cos_sin, slots, index))
            return (x, k, v), x if keep else None

        # The cache is carried and written in place: as an input and output of the scan it would be copied.
        indices = jnp.arange(self.config.num_layers), jnp.array(kinds, jnp.int32)
        (y, k, v), streams = jax.lax.scan(step, (x, ks, vs), (*indices, weights))
        streams = [] if streams is None else [x, *streams]
        return y, streams, None if lengths is None else KVCache(k, v, lengths)


def _window(config: LlamaConfig, kind: LayerKind, positions: Array, lengths: Array, slots: Reach) -> Window:
    """What layers of one kind see of a window at ``positions [B, T]``."""
    if kind.window:
        slots = sliding(slots, positions, lengths, kind.window)
    return Window(config, layer_angles(config, kind.rope, positions), slots)


def _doubled(tokens: Array, positions: Array, window_mask: Array | None) -> tuple[Array, Array, Array | None]:
    """A window of one as a window of two: XLA:CPU multiplies a bfloat16 matrix by one row 8 times slower than by two.

    The second row's slot is scratch, like any slot past the window.
    """
    if window_mask is not None:
        window_mask = jnp.ones((2, 2), bool).at[0, 1].set(False)
    return jnp.tile(tokens, (1, 2)), jnp.tile(positions, (1, 2)), window_mask


def lookup(embedding: nnx.Param, tokens: Array) -> Array:
    """Rows of embedding [V, E] at tokens [B, T] -> [B, T, E] float32."""
    # The barrier ties the weights to the tokens of this step: XLA:CPU gathers bfloat16 as float32, and in a decoding
    # loop it would convert the whole embedding once, ahead of the loop, and keep it.
    weights, tokens = jax.lax.optimization_barrier((embedding[...], tokens))
    return jnp.take(weights, tokens, axis=0, mode="clip").astype(jnp.float32)
