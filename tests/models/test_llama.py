"""The Llama family against a forward pass written apart, in float64 numpy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models import llama, llama_params
from specjax.models.attention import BLOCK
from tests.models.llama_oracle import (
    BASE,
    CONFIGS,
    SCANNED,
    TREE,
    ancestors,
    apply,
    bfloat16,
    made,
    oracle,
    read,
    sequences,
)

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
