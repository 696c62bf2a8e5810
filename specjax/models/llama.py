"""The Llama family as flax NNX modules that hold only weights.

`model` is the pure model of a configuration; `Llama` is the module behind it, for those who train or change one.
Names and shapes of the weights, and where they come from: `specjax.models.llama_params`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.models.attention import Reach, attend, reach
from specjax.models.config import LlamaConfig
from specjax.models.llama_params import abstract_params
from specjax.models.nnx import from_nnx
from specjax.models.rope import angles, inverse_frequencies, rotate
from specjax.types import Array, KVCache, Model, ModelOutput

SMALL = 2**20  # weights; a larger matrix XLA:CPU shares out by itself


def model(config: LlamaConfig, *, dtype=jnp.float32, scan_layers: bool = False) -> Model:
    """The pure model of a configuration, made without any weight. Equal arguments give equal models.

    Args:
      config: sizes and constants.
      dtype: of the weights it will be given, float32 or bfloat16; the cache has the same.
      scan_layers: whether it will be given stacked layers.
    """
    inverse_frequencies(config)  # an odd head_dim is refused now, not at the first pass
    module = nnx.eval_shape(lambda: Llama(config, dtype=dtype, scan_layers=scan_layers))
    return from_nnx(module)[0]


def linear(x: Array, weight: nnx.Param, bias: nnx.Param | None = None) -> Array:
    """x [B, T, in] float32 times weight [in, out], accumulated in float32 from operands of the weight's type."""
    # Rows, not [B, T]: for two axes XLA:CPU transposes some weights first.
    rows, matrix = x.reshape(-1, x.shape[-1]).astype(weight.dtype), weight[...]
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")
    if len(rows) == 1 and matrix.size < SMALL and matrix.shape[0] % 2 == 0:
        # One row times a small matrix keeps one of two cores busy; a batch of two halves, both (51 us against 80).
        y = product("hi,hio->ho", rows.reshape(2, -1), matrix.reshape(2, -1, matrix.shape[1])).sum(0)
    else:
        y = product("ti,io->to", rows, matrix)
    y = y.reshape(*x.shape[:-1], -1)
    return y if bias is None else y + _row(bias)


def rms_norm(x: Array, scale: nnx.Param, eps: float) -> Array:
    """x / rms(x) * scale over the last axis of x [.., E], in float32."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * _row(scale, x.ndim)


def _row(param: nnx.Param, ndim: int = 3) -> Array:
    return param[...].astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


class Layer(nnx.Module):
    """Attention and a gated MLP, each behind a norm and added to the residual stream."""

    def __init__(self, weights: dict[str, Array]):
        def maybe(name):
            return nnx.Param(weights[name]) if name in weights else None

        self.input_norm, self.post_norm = maybe("input_norm"), nnx.Param(weights["post_norm"])
        self.qkv, self.qkv_bias = nnx.Param(weights["qkv"]), maybe("qkv_bias")
        self.q_norm, self.k_norm = maybe("q_norm"), maybe("k_norm")
        self.o, self.o_bias = nnx.Param(weights["o"]), maybe("o_bias")
        self.gate_up, self.gate_up_bias = nnx.Param(weights["gate_up"]), maybe("gate_up_bias")
        self.down, self.down_bias = nnx.Param(weights["down"]), maybe("down_bias")

    def __call__(self, x: Array, k: Any, v: Any, lengths: Array | None, window: "Window"):
        """x [B, T, E] and this layer's cache k, v [B, H, S, D] (or all layers', or None) -> the same three."""
        normed = x if self.input_norm is None else rms_norm(x, self.input_norm, window.config.rms_eps)
        y, k, v = self.attention(normed, k, v, lengths, window)
        x = x + y
        return x + self.mlp(rms_norm(x, self.post_norm, window.config.rms_eps)), k, v

    def attention(self, y: Array, k: Any, v: Any, lengths: Array | None, window: "Window"):
        """What attention adds to the stream: y [B, T, in], already normed, -> ([B, T, E], k, v)."""
        config, (batch, width, _) = window.config, y.shape
        q, k_new, v_new = self.heads(y, window)
        if lengths is None:
            k_here, v_here = (new.swapaxes(1, 2).astype(self.qkv.dtype) for new in (k_new, v_new))
        else:
            k, v = kv.write(k, k_new, lengths, window.layer), kv.write(v, v_new, lengths, window.layer)
            k_here, v_here = (k, v) if window.layer is None else (k[window.layer], v[window.layer])
        y = attend(q, k_here, v_here, window.slots)
        return linear(y.reshape(batch, width, config.q_size), self.o, self.o_bias), k, v

    def heads(self, y: Array, window: "Window") -> tuple[Array, Array, Array]:
        """y [B, T, in] -> queries [B, T, Hq, D], keys and values [B, T, H, D]; the first two turned to the window's
        positions, after a norm of their own if the model has one."""
        config, (batch, width, _) = window.config, y.shape
        y = linear(y, self.qkv, self.qkv_bias)
        y = y.reshape(batch, width, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q, k, v = jnp.split(y, [config.num_heads, config.num_heads + config.num_kv_heads], axis=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, config.rms_eps), rms_norm(k, self.k_norm, config.rms_eps)
        return rotate(q, window.cos_sin), rotate(k, window.cos_sin), v

    def mlp(self, y: Array) -> Array:
        """What the gated MLP adds to the stream: y [B, T, E], already normed, -> [B, T, E]."""
        gate, up = jnp.split(linear(y, self.gate_up, self.gate_up_bias), 2, axis=-1)
        return linear(jax.nn.silu(gate) * up, self.down, self.down_bias)


class Window(NamedTuple):
    """What all layers share in one forward pass."""

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
            if name.endswith(("norm", "bias")):
                return jnp.full(shape.shape, name.endswith("norm"), shape.dtype)
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
        batch, width = tokens.shape
        if cache is None:
            slots = reach(window_mask, jnp.zeros(batch, jnp.int32), width, width)._replace(written=None)
        else:
            slots = reach(window_mask, cache.lengths, width, jax.tree.leaves(cache.k)[0].shape[-2])
        window = Window(self.config, angles(self.config, positions), slots)
        run = self._scanned if self.scan_layers else self._unrolled
        x, streams, cache_now = run(lookup(self.embedding, tokens), cache, window, bool(feature_layers))
        x = rms_norm(x, self.final_norm, self.config.rms_eps)
        features = jnp.concatenate([[*streams, x][layer] for layer in feature_layers] or [x[..., :0]], axis=-1)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        logits = linear(x, self.embedding if self.head is None else self.head)
        return ModelOutput(logits, features, cache_now)

    def _unrolled(self, x: Array, cache: KVCache | None, window: Window, keep: bool) -> tuple[Array, list, Any]:
        layers: Any = self.layers
        none = (None,) * len(layers)
        ks, vs, lengths = (none, none, None) if cache is None else cache
        streams, caches = [x], []
        for layer, k, v in zip(layers, ks, vs):
            x, *kv_now = layer(x, k, v, lengths, window)
            streams.append(x)
            caches.append(kv_now)
        ks, vs = zip(*caches)
        return x, streams, None if lengths is None else KVCache(ks, vs, lengths)

    def _scanned(self, x: Array, cache: KVCache | None, window: Window, keep: bool) -> tuple[Array, list, Any]:
        graph, weights = nnx.split(self.layers)
        ks, vs, lengths = (None, None, None) if cache is None else cache

        def step(carry, layer):
            index, weights = layer
            module: Any = nnx.merge(graph, weights)
            x, k, v = module(*carry, lengths, window._replace(layer=index))
            return (x, k, v), x if keep else None

        # The cache is carried and written in place: as an input and output of the scan it would be copied.
        (y, k, v), streams = jax.lax.scan(step, (x, ks, vs), (jnp.arange(self.config.num_layers), weights))
        streams = [] if streams is None else [x, *streams]
        return y, streams, None if lengths is None else KVCache(k, v, lengths)


def _doubled(tokens: Array, positions: Array, window_mask: Array | None) -> tuple[Array, Array, Array | None]:
    """A window of one as a window of two: XLA:CPU multiplies a bfloat16 matrix by one row 8 times slower than by two.

    The second row's slot is scratch, like any slot past the window.
    """
    if window_mask is not None:
        window_mask = jnp.ones((2, 2), bool).at[0, 1].set(False)
    return jnp.tile(tokens, (1, 2)), jnp.tile(positions, (1, 2)), window_mask


def lookup(embedding: nnx.Param, tokens: Array) -> Array:
    """Columns of embedding [E, V] at tokens [B, T] -> [B, T, E] float32.

    One array serves as embedding and tied head, in the head's layout: reading a few columns costs microseconds.
    """
    # The barrier ties the weights to the tokens of this step: XLA:CPU gathers bfloat16 as float32, and in a decoding
    # loop it would convert the whole embedding once, ahead of the loop, and keep it.
    weights, tokens = jax.lax.optimization_barrier((embedding[...], tokens))
    return jnp.moveaxis(jnp.take(weights, tokens, axis=1, mode="clip"), 0, -1).astype(jnp.float32)
