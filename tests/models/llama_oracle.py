"""The Llama family in float64 numpy, one token sequence, nothing of specjax; and small configurations of every kind."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax.models import LlamaConfig, RopeScaling, llama, llama_params
from specjax.models.config import Rope

BASE = LlamaConfig(vocab_size=67, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2)
GEMMA = {"norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 4.9}
CONFIGS = {
    "grouped": BASE,
    "every head its own": dataclasses.replace(BASE, num_kv_heads=4, rms_eps=1e-2),
    "one kv head, tied": dataclasses.replace(BASE, num_kv_heads=1, tie_embeddings=True),
    "biases": dataclasses.replace(BASE, attention_bias=True, mlp_bias=True),
    "norms of queries and keys": dataclasses.replace(BASE, qk_norm=True),
    "explicit head_dim": dataclasses.replace(BASE, hidden_size=20, head_dim=8, rope_theta=500.0),
    "indivisible hidden size": dataclasses.replace(BASE, hidden_size=21, head_dim=6),
    "linear rope": dataclasses.replace(BASE, rope_scaling=RopeScaling("linear", 4.0)),
    "llama3 rope": dataclasses.replace(
        BASE, head_dim=16, rope_theta=1000.0, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16)
    ),
    "yarn rope": dataclasses.replace(
        BASE, head_dim=16, rope_theta=50.0, rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=128)
    ),
    "mistral": dataclasses.replace(BASE, windows=(7, 7)),
    "qwen 2": dataclasses.replace(BASE, qkv_bias=True),
    "gemma 2": dataclasses.replace(
        BASE, **GEMMA, tie_embeddings=True, query_scalar=9.0, attention_softcap=2.0, logit_softcap=3.0, windows=(5, 0)
    ),
    "gemma 3": dataclasses.replace(
        BASE, **GEMMA, qk_norm=True, windows=(5, 0), rope_theta=900.0, rope_scaling=RopeScaling("linear", 2.0),
        ropes=(Rope(100.0), Rope(900.0, RopeScaling("linear", 2.0))),
    ),
    "smollm 3": dataclasses.replace(BASE, ropes=(Rope(), None)),
    "olmo 2": dataclasses.replace(BASE, norms="after", wide_qk_norm=True),
}  # fmt: skip
SCANNED = ("grouped", "every head its own", "one kv head, tied", "biases", "norms of queries and keys",
           "explicit head_dim", "linear rope", "gemma 3", "smollm 3")
TREE = [-1, 0, 0, 1, -1, 2, 3]  # parents of the nodes; depths 1 2 2 3 1 3 4


# --- the oracle: float64 numpy, one token sequence, nothing of specjax


def oracle_frequencies(config, rope):
    dim, scaling = config.head_dim, rope.scaling
    out = []
    for pair in range(dim // 2):
        frequency = 1.0 / rope.theta ** (2 * pair / dim)
        if scaling.kind == "yarn":  # by the pair's index, between those that turn beta_fast and beta_slow times
            first, last = (
                dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi))
                / (2 * math.log(rope.theta)) for turns in (scaling.beta_fast, scaling.beta_slow)
            )  # fmt: skip
            first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
            share = min(max((pair - first) / (last - first), 0.0), 1.0)  # of the divided frequency
            frequency = share * frequency / scaling.factor + (1 - share) * frequency
        if scaling.kind == "linear":
            frequency /= scaling.factor
        if scaling.kind == "llama3":
            wavelength = 2 * math.pi / frequency
            longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
            shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
            if wavelength > longest:
                frequency /= scaling.factor
            elif wavelength >= shortest:
                smooth = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        out.append(frequency)
    return np.array(out)


def oracle_rotate(x, positions, config, *ropes):
    """x [T, heads, D]: element d turns with element d + D / 2. ``ropes``: the layer's own, if it has one."""
    (rope,) = ropes or (Rope(config.rope_theta, config.rope_scaling),)
    if rope is None:
        return x
    half = config.head_dim // 2
    angle = np.asarray(positions)[:, None] * oracle_frequencies(config, rope)
    stretch = 0.1 * math.log(rope.scaling.factor) + 1 if rope.scaling.kind == "yarn" else 1.0
    cos, sin = stretch * np.cos(angle)[:, None], stretch * np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def bfloat16(x):
    return np.asarray(x, jnp.bfloat16).astype(np.float64)


def oracle(weights, config, tokens, positions=None, visible=None, cast=np.float64, last=0):
    """(logits [T, V], or of the ``last`` rows, streams: [T, E] after 0 .. L layers and the final norm); `cast`
    rounds what is multiplied."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    count = len(tokens)
    positions = np.arange(count) if positions is None else np.asarray(positions)
    visible = np.tril(np.ones((count, count), bool)) if visible is None else visible

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_eps) * (w[name] + config.norm_offset)

    def cap(x, limit):
        return limit * np.tanh(x / limit) if limit else x

    def activate(x):
        if config.activation == "silu":
            return x / (1 + np.exp(-x))
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2

    def linear(x, name):
        return cast(x) @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    before, after = config.norms in ("before", "both"), config.norms in ("after", "both")
    x = w["model.embed_tokens.weight"][np.asarray(tokens)] * config.embedding_scale
    streams = [x]
    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        window, rope = (config.windows or [0] * 9)[index], (config.ropes or [config.rope] * 9)[index]
        seen = visible & (positions[:, None] - positions < window) if window else visible
        y = norm(x, f"{at}.input_layernorm.weight") if before else x
        q, k, v = (linear(y, f"{at}.self_attn.{name}_proj") for name in ("q", "k", "v"))
        if config.wide_qk_norm:
            q, k = (norm(x, f"{at}.self_attn.{name}_norm.weight") for x, name in ((q, "q"), (k, "k")))
        q, k, v = (x.reshape(count, -1, config.head_dim) for x in (q, k, v))
        if config.qk_norm:
            q, k = (norm(x, f"{at}.self_attn.{name}_norm.weight") for x, name in ((q, "q"), (k, "k")))
        q, k = oracle_rotate(q, positions, config, rope), oracle_rotate(k, positions, config, rope)
        mixed = np.zeros_like(q)
        for head in range(config.num_heads):
            group = head // (config.num_heads // config.num_kv_heads)
            scores = cast(q[:, head] / math.sqrt(config.query_scalar or config.head_dim)) @ cast(k[:, group]).T
            scores = np.where(seen, cap(scores, config.attention_softcap), -np.inf)
            share = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, head] = cast(share) @ cast(v[:, group]) / share.sum(-1, keepdims=True)
        y = linear(mixed.reshape(count, -1), f"{at}.self_attn.o_proj")
        x = x + (norm(y, f"{at}.post_attention_layernorm.weight") if after else y)
        name = "pre_feedforward" if after else "post_attention"
        y = norm(x, f"{at}.{name}_layernorm.weight") if before else x
        gate = linear(y, f"{at}.mlp.gate_proj")
        y = linear(activate(gate) * linear(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
        x = x + (norm(y, f"{at}.post_feedforward_layernorm.weight") if after else y)
        streams.append(x)
    read = norm(x, "model.norm.weight")
    head = w["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    return cap(cast(read[-last:]) @ head.T, config.logit_softcap), [*streams, read]


# --- helpers


def random_weights(config, seed=0):
    """Hugging Face tensors, large enough that every part of the model shows in the logits."""
    rng = np.random.default_rng(seed)
    shapes = llama_params.tensor_shapes(config)
    out = {name: rng.normal(size=shape) * (0.4 if len(shape) > 1 else 0.3) for name, shape in shapes.items()}
    one = 1 - config.norm_offset
    return {name: (one + x if name.endswith("norm.weight") else x).astype(np.float32) for name, x in out.items()}


def made(config, *, dtype=jnp.float32, scan_layers=False, seed=0):
    weights = random_weights(config, seed)
    params = llama_params.params_from_tensors(config, lambda n, s: weights[n], dtype=dtype, scan_layers=scan_layers)
    return llama.model(config, dtype=dtype, scan_layers=scan_layers), params, weights


@functools.partial(jax.jit, static_argnames=("model", "feature_layers"))
def _apply(model, params, tokens, mask, cache, positions, logits_at, feature_layers):
    return model.apply(
        params, tokens, positions, mask, cache, feature_layers=feature_layers, logits_at=logits_at
    )


def apply(model, params, tokens, cache, mask=None, positions=None, logits_at=None, feature_layers=()):
    tokens = jnp.asarray(tokens)
    if positions is None:
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    return _apply(model, params, tokens, mask, cache, jnp.asarray(positions), logits_at, feature_layers)


def read(model, params, tokens, cache, chunks):
    """Reads tokens [B, sum(chunks)] chunk by chunk; (logits of all, cache)."""
    logits, at = [], 0
    for chunk in chunks:
        out = apply(model, params, tokens[:, at : at + chunk], cache)
        logits.append(out.logits)
        cache = kv.commit(out.cache, None, jnp.full(tokens.shape[0], chunk))
        at += chunk
    return jnp.concatenate(logits, axis=1), cache


def sequences(batch, length, seed=1, vocab=BASE.vocab_size):
    return np.random.default_rng(seed).integers(0, vocab, (batch, length))


def ancestors(parents):
    """[T, T] bool: window row 0 is the root, row n + 1 is node n."""
    mask = np.eye(len(parents) + 1, dtype=bool)
    for node, parent in enumerate(parents):
        mask[node + 1] |= mask[parent + 1]
    return mask
