"""The Llama family against a forward pass written apart, in float64 numpy."""

import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models import LlamaConfig, RopeScaling, llama, llama_params
from specjax.models.attention import BLOCK, attend, reach, sliding
from specjax.models.config import Rope

DATA = Path(__file__).parent.parent / "data" / "tiny_models"
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


# --- numbers


@pytest.mark.parametrize(
    ("name", "scan_layers"), [*((name, False) for name in CONFIGS), *((name, True) for name in SCANNED)]
)
def test_logits_and_hidden_states_equal_the_oracle(name, scan_layers):
    config = CONFIGS[name]
    model, params, weights = made(config, scan_layers=scan_layers)
    tokens = sequences(1, 40)
    logits, streams = oracle(weights, config, tokens[0])
    layers = (0, 1, config.num_layers, config.num_layers + 1)
    out = apply(model, params, tokens, model.init_cache(1, 64), feature_layers=layers)
    np.testing.assert_allclose(out.logits[0], logits, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(out.features[0], np.concatenate([streams[i] for i in layers], -1), rtol=2e-4, atol=2e-4)
    assert out.logits.dtype == out.features.dtype == jnp.float32


# --- windows


@pytest.mark.parametrize("chunks", [(5, 5), (4, 4, 2), (1,) * 10])
def test_chunks_give_what_one_pass_gives(chunks):
    model, params, _ = made(BASE)
    tokens = sequences(2, 10)
    whole, cache = read(model, params, tokens, model.init_cache(2, 32), (10,))
    parts, chunked = read(model, params, tokens, model.init_cache(2, 32), chunks)
    np.testing.assert_allclose(parts, whole, atol=1e-4)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(chunked)):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_rows_of_different_length_equal_the_row_alone():
    model, params, weights = made(BASE)
    tokens, lengths = sequences(3, 12), np.array([1, 9, 5])
    _, cache = read(model, params, tokens, model.init_cache(3, 32), (9,))
    cache = kv.crop(cache, jnp.asarray(lengths))
    window = np.stack([row[at : at + 3] for row, at in zip(tokens, lengths)])
    together = apply(model, params, window, cache).logits
    for row, at in enumerate(lengths):
        logits, _ = oracle(weights, BASE, tokens[row, : at + 3])
        np.testing.assert_allclose(together[row], logits[at:], rtol=2e-4, atol=2e-4)


TREE = [-1, 0, 0, 1, -1, 2, 3]  # parents of the nodes; depths 1 2 2 3 1 3 4


@pytest.mark.parametrize("capacity", [32, BLOCK + 100])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_tree_nodes_equal_their_paths_read_as_plain_text(scan_layers, capacity):
    model, params, weights = made(BASE, scan_layers=scan_layers)
    text, nodes = sequences(1, 6)[0], sequences(1, len(TREE), seed=2)[0]
    mask = ancestors(TREE)
    _, cache = read(model, params, text[None, :5], model.init_cache(1, capacity), (5,))
    window = np.concatenate([text[5:], nodes])[None]
    positions = 4 + mask.sum(-1)[None]
    out = apply(model, params, window, cache, mask=jnp.asarray(mask), positions=positions)
    for row in range(len(window[0])):
        path = np.concatenate([text[:5], window[0][np.flatnonzero(mask[row])]])
        logits, _ = oracle(weights, BASE, path)
        np.testing.assert_allclose(out.logits[0, row], logits[-1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("capacity", [32, BLOCK + 100])
def test_what_a_row_may_not_see_does_not_change_a_bit(dtype, capacity):
    model, params, _ = made(BASE, dtype=dtype)
    window, other = sequences(2, len(TREE) + 1), sequences(2, len(TREE) + 1, seed=5)
    mask = np.stack([ancestors(TREE), ancestors([-1, -1, 1, 1, 0, 2, 5])])  # a tree of its own for every row
    cache = model.init_cache(2, capacity)._replace(lengths=jnp.array([7, 2]))
    before = apply(model, params, window, cache, mask=jnp.asarray(mask)).logits
    for node in range(1, len(TREE) + 1):
        changed = window.copy()
        changed[:, node] = other[:, node]
        after = apply(model, params, changed, cache, mask=jnp.asarray(mask)).logits
        blind = ~mask[:, :, node]
        np.testing.assert_array_equal(np.asarray(after)[blind], np.asarray(before)[blind])
        assert (np.asarray(after)[:, node] != np.asarray(before)[:, node]).any()


@pytest.mark.parametrize(
    "dtype, scan_layers, capacity, width",
    [
        (jnp.float32, False, 32, 1),
        (jnp.float32, False, 32, 5),
        (jnp.float32, True, 32, 5),
        (jnp.float32, False, BLOCK + 100, 5),
        (jnp.bfloat16, False, 32, 5),
        (jnp.bfloat16, False, BLOCK + 100, 1),
    ],
)
def test_garbage_in_unused_slots_is_harmless(dtype, scan_layers, capacity, width):
    model, params, _ = made(BASE, dtype=dtype, scan_layers=scan_layers)
    tokens = sequences(2, 6 + width)
    _, cache = read(model, params, tokens, model.init_cache(2, capacity), (6,))
    cache = kv.crop(cache, jnp.array([6, 3]))

    def spoil(layer):
        garbage = jnp.full((), jnp.nan, dtype)
        if layer.dtype == jnp.uint16:
            garbage = jax.lax.bitcast_convert_type(garbage, jnp.uint16)
        used = jnp.arange(capacity)[None] < cache.lengths[:, None]
        used = used[:, None, :, None] if layer.ndim == 4 else used[None, :, None, :, None]
        return jnp.where(used, layer, garbage)

    spoilt = cache._replace(k=jax.tree.map(spoil, cache.k), v=jax.tree.map(spoil, cache.v))
    clean = apply(model, params, tokens[:, 6:], cache).logits
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(apply(model, params, tokens[:, 6:], spoilt).logits, clean)


@pytest.mark.parametrize("capacity", [32, BLOCK + 100])
def test_a_committed_value_that_is_not_finite_is_not_hidden(capacity):
    model, params, _ = made(BASE)
    _, cache = read(model, params, sequences(2, 6), model.init_cache(2, capacity), (6,))
    bad = cache._replace(v=(cache.v[0].at[0, :, 2].set(jnp.nan), *cache.v[1:]))
    window = sequences(2, 3, seed=3)
    spoilt, clean = apply(model, params, window, bad).logits, apply(model, params, window, cache).logits
    assert np.isnan(spoilt[0]).all()
    np.testing.assert_array_equal(spoilt[1], clean[1])


def test_a_window_past_the_end_loses_its_tail_and_hurts_nothing():
    model, params, _ = made(BASE)
    tokens = sequences(1, 10)
    _, cache = read(model, params, tokens, model.init_cache(1, 8), (6,))
    full = apply(model, params, tokens[:, 6:8], cache)
    over = apply(model, params, tokens[:, 6:], cache)
    np.testing.assert_allclose(over.logits[:, :2], full.logits, atol=1e-5)
    for a, b in zip(jax.tree.leaves(over.cache), jax.tree.leaves(full.cache)):
        np.testing.assert_allclose(a, b, atol=1e-5)


# --- attention alone


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("window", [0, 3, BLOCK + 9])
@pytest.mark.parametrize("tree", [False, True])
def test_blocks_of_slots_equal_attention_over_all_of_them(tree, window, dtype):
    capacity, width, heads, kv_heads, dim = 2 * BLOCK + 77, 8, 4, 2, 8
    rng = np.random.default_rng(0)
    lengths = np.array([0, BLOCK - 3, BLOCK + 200, capacity - width])
    kv_shape = (2, len(lengths), kv_heads, capacity, dim)
    k, v = np.asarray(jnp.asarray(rng.normal(size=kv_shape), dtype).astype(jnp.float32))
    q = np.asarray(jnp.asarray(rng.normal(size=(len(lengths), width, heads, dim)), dtype).astype(jnp.float32))
    mask = ancestors(TREE) if tree else np.tril(np.ones((width, width), bool))
    slots = reach(jnp.asarray(mask) if tree else None, jnp.asarray(lengths), width, capacity)
    positions = lengths[:, None] + mask.sum(-1)[None] - 1
    if window:
        slots = sliding(slots, jnp.asarray(positions), jnp.asarray(lengths), window)

    def stored(x):
        x = jnp.asarray(x, dtype)
        return x if dtype == jnp.float32 else jax.lax.bitcast_convert_type(x, jnp.uint16)

    out = jax.jit(attend)(jnp.asarray(q), stored(k), stored(v), slots)
    for b, length in enumerate(lengths):
        back = positions[b][:, None] - np.concatenate([np.arange(length), positions[b]])[None]
        for head in range(heads):
            scores = q[b, :, head].astype(np.float64) @ k[b, head // 2, : length + width].T / math.sqrt(dim)
            visible = np.concatenate([np.ones((width, length), bool), mask], axis=1)
            visible = visible & (back < window) if window else visible
            share = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
            expected = share / share.sum(-1, keepdims=True) @ v[b, head // 2, : length + width]
            np.testing.assert_allclose(out[b, :, head], expected, atol=1e-5 if dtype == jnp.float32 else 0.02)


def test_slots_behind_the_text_of_every_row_are_not_visited():
    def end(lengths, width, capacity=100):
        return int(reach(None, jnp.asarray(lengths), width, capacity).end)

    assert end([0, 3], 1) == 4
    assert end([5, 61], 8) == 69
    assert end([98], 8) == 100  # a window past the end


def test_slots_that_every_row_has_left_behind_are_not_visited():
    def first(lengths, window, width=4):
        lengths = jnp.asarray(lengths)
        slots = reach(None, lengths, width, 100)
        return int(sliding(slots, lengths[:, None] + jnp.arange(width)[None], lengths, window).first)

    assert first([50], 1) == 50
    assert first([50], 2) == 49
    assert first([50, 9], 2) == 8
    assert first([3], 7) == 0


# --- bfloat16


def test_bfloat16_rounds_the_operands_of_products_and_nothing_else():
    model, params, weights = made(BASE, dtype=jnp.bfloat16)
    tokens = sequences(1, 24)
    rounded = {name: bfloat16(x) for name, x in weights.items()}
    logits, streams = oracle(rounded, BASE, tokens[0], cast=bfloat16)
    unrounded, _ = oracle(rounded, BASE, tokens[0])
    out = apply(model, params, tokens, model.init_cache(1, 32), feature_layers=(2,))
    # A value next to the middle of two bfloat16 numbers may go either way: hence means, not every entry.
    assert out.logits.dtype == jnp.float32
    assert np.abs(out.logits[0] - logits).mean() < 0.2 * np.abs(unrounded - logits).mean()
    assert np.abs(out.features[0] - streams[2]).mean() < 1e-2 * np.abs(streams[2]).mean()


@pytest.mark.parametrize("given", [False, True])
def test_one_bfloat16_row_is_read_as_two(given):
    model, params, _ = made(BASE, dtype=jnp.bfloat16)
    tokens = sequences(1, 9)
    _, cache = read(model, params, tokens, model.init_cache(1, 32), (8,))
    mask = jnp.ones((1, 1, 1), bool) if given else None
    at = jnp.zeros(1, jnp.int32) if given else None
    out = apply(model, params, tokens[:, 8:], cache, mask=mask, logits_at=at, feature_layers=(0, 3))
    two = apply(model, params, np.tile(tokens[:, 8:], (1, 2)), cache, feature_layers=(0, 3))
    assert out.logits.shape == (1, 1, BASE.vocab_size) and out.features.shape == (1, 1, 2 * BASE.hidden_size)
    np.testing.assert_allclose(out.logits, two.logits[:, :1], atol=1e-6)
    jaxpr = str(jax.make_jaxpr(lambda p, t, c: model.apply(p, t, t, None, c).logits)(params, tokens[:, 8:], cache))
    rows = [int(match) for match in re.findall(r":f32\[(\d+),\d+\] = dot_general", jaxpr)]
    assert rows and set(rows) == {2}


# --- what is compiled


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("capacity", [96, BLOCK + 96])
@pytest.mark.parametrize("width", [1, 4])
def test_a_decoding_loop_never_copies_the_cache_or_the_weights(dtype, capacity, width):
    config = dataclasses.replace(BASE, vocab_size=3001, tie_embeddings=True)
    model = llama.model(config, dtype=dtype)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), llama_params.abstract_params(config, dtype=dtype))

    def loop(params, cache, tokens):
        def step(_, carry):
            cache, tokens = carry
            out = model.apply(params, tokens, cache.lengths[:, None] + jnp.arange(width)[None], None, cache)
            return kv.commit(out.cache, None, jnp.array([1])), jnp.argmax(out.logits, -1).astype(jnp.int32)

        return jax.lax.fori_loop(0, 5, step, (cache, tokens))

    args = params, model.init_cache(1, capacity), jnp.zeros((1, width), jnp.int32)
    text = jax.jit(loop, donate_argnums=1).lower(*args).compile().as_text()
    big = [rf"1,2,{capacity},6", rf"2,{capacity},6", "24,3001", "3001,24", "40,24", "24,40", "24,48", "48,24"]
    made = rf"= \w+\[({'|'.join(big)})\]\S* "
    # Anything but a scatter that makes an array as large as a layer of the cache, or a weight again, is a copy.
    found = [line.strip() for line in text[text.index("ENTRY") :].splitlines() + _bodies(text) if re.search(made, line)]
    found = [line for line in found if not re.search(r"\b(parameter|get-tuple-element|bitcast)\(|scatter", line)]
    if capacity <= BLOCK:  # cleaning or reinterpreting the values of the one block is no copy of the cache
        found = [line for line in found if not re.search(r"(select|bitcast-convert)[\w.-]* = ", line)]
    assert found == []


def _bodies(text):
    """Lines of the while bodies of a compiled module (what they call is fused, and makes nothing)."""
    names = re.findall(r"body=%?([\w.-]+)", text)
    lines = []
    for computation in text.split("\n\n"):
        if re.match(rf"\s*%?({'|'.join(map(re.escape, names))}) ", computation):
            lines += computation.splitlines()
    return lines


def test_nothing_is_traced_again_when_lengths_change():
    model, params, _ = made(BASE)
    traces = []

    @jax.jit
    def step(params, tokens, cache):
        traces.append(1)
        return model.apply(params, tokens, cache.lengths[:, None], None, cache)

    cache = model.init_cache(1, BLOCK + 100)
    for length in (0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 50):
        step(params, jnp.array([[3]]), cache._replace(lengths=jnp.array([length])))
    assert len(traces) == 1


def test_logits_at_limits_the_head_to_one_row():
    model, params, _ = made(BASE)
    tokens, at = sequences(2, 8), jnp.array([7, 2])
    every = apply(model, params, tokens, model.init_cache(2, 16)).logits
    out = apply(model, params, tokens, model.init_cache(2, 16), logits_at=at)
    assert out.logits.shape == (2, 1, BASE.vocab_size)
    np.testing.assert_allclose(out.logits[:, 0], every[jnp.arange(2), at], atol=1e-5)
    jaxpr = jax.make_jaxpr(lambda: model.apply(params, tokens, tokens, None, model.init_cache(2, 16), logits_at=at))()
    assert "f32[2,8,67]" not in str(jaxpr) and "f32[16,67]" not in str(jaxpr)


def test_the_head_is_dead_code_when_logits_are_not_used():
    model, params, _ = made(BASE)
    run = jax.jit(lambda p, t, c: model.apply(p, t, t, None, c).cache)
    text = run.lower(params, jnp.asarray(sequences(1, 8)), model.init_cache(1, 16)).compile().as_text()
    assert "8,67]" not in text


# --- the tree of weights


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_abstract_params_describe_the_params(config):
    for scan_layers in (False, True):
        _, params, _ = made(config, dtype=jnp.bfloat16, scan_layers=scan_layers)
        abstract = llama_params.abstract_params(config, dtype=jnp.bfloat16, scan_layers=scan_layers)
        assert jax.tree.structure(params) == jax.tree.structure(abstract)
        jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or pytest.fail(f"{a} {b}"), params, abstract)


def test_stacking_and_unstacking_are_inverse():
    _, params, _ = made(BASE)
    _, stacked, _ = made(BASE, scan_layers=True)
    assert jax.tree.map(np.array_equal, llama_params.stack_layers(params), stacked)
    back = llama_params.unstack_layers(stacked)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, back, params)))


def test_a_tensor_of_another_shape_is_refused_by_name():
    weights = random_weights(BASE)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].T
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*\(24, 40\).*\(40, 24\)"):
        llama_params.params_from_tensors(BASE, lambda name, shape: weights[name])


def test_every_tensor_is_asked_for_once():
    weights, asked = random_weights(BASE), []
    llama_params.params_from_tensors(BASE, lambda name, shape: (asked.append(name), weights[name])[1])
    assert sorted(asked) == sorted(llama_params.tensor_shapes(BASE))


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_other_weight_types_are_refused(dtype):
    with pytest.raises(ValueError, match=f"float32 or bfloat16, not {dtype}"):
        llama.model(BASE, dtype=dtype)


# --- configuration


def test_head_dim_is_derived_only_when_it_is_not_given():
    assert BASE.head_dim == 6
    assert dataclasses.replace(BASE, hidden_size=20, head_dim=8).q_size == 32
    with pytest.raises(ValueError, match=r"hidden_size \(21\).*num_heads \(4\)"):
        LlamaConfig(67, 21, 40, 2, 4, 2)


@pytest.mark.parametrize("kind", ["ntk", "dynamic", "longrope", "mrope"])
def test_an_unknown_rope_type_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"'{kind}'.*default, linear, llama3"):
        RopeScaling(kind)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 3}, r"num_heads \(4\) is not a multiple of num_kv_heads \(3\)"),
        ({"num_layers": 0}, "num_layers must be positive, got 0"),
        ({"num_layers": 10**9}, "num_layers must be 10000 at most, got 1000000000"),
        ({"num_layers": True}, "num_layers must be a whole number, got True"),
        ({"norm_offset": "x"}, "norm_offset must be a number, got 'x'"),
        ({"qk_norm": 1}, "qk_norm must be True or False, got 1"),
        ({"bos_id": []}, r"bos_id must be a whole number or None, got \[\]"),
        ({"eos_ids": (None,)}, r"eos_ids must be whole numbers, got \(None,\)"),
        ({"head_dim": -2}, "head_dim must be positive, got -2"),
        ({"windows": (4,)}, "windows has 1 entries for num_layers=2"),
        ({"windows": (4, -1)}, r"windows must be 0 \(none\) or positive, got \(4, -1\)"),
        ({"ropes": (None,) * 3}, "ropes has 3 entries for num_layers=2"),
        ({"norms": "between"}, "norms 'between' is not supported; supported: before, after, both"),
        ({"activation": "relu"}, "activation 'relu' is not supported; supported: silu, gelu_tanh"),
        ({"qk_norm": True, "wide_qk_norm": True}, "qk_norm and wide_qk_norm are both set"),
        ({"logit_softcap": -1.0}, r"logit_softcap must be positive, or 0 for none, got -1\.0"),
        ({"embedding_scale": 0.0}, r"embedding_scale must be positive, got 0\.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)


def test_an_odd_head_dim_is_refused_with_the_model():
    with pytest.raises(ValueError, match="head_dim must be even, got 5"):
        llama.model(dataclasses.replace(BASE, hidden_size=20, head_dim=0))


def test_configurations_are_values():
    assert hash(BASE) == hash(dataclasses.replace(BASE))
    assert dataclasses.replace(BASE, eos_ids=[2, 3]).eos_ids == (2, 3)
    assert dataclasses.replace(BASE, windows=[0, 0], ropes=[Rope(), Rope()]) == BASE
