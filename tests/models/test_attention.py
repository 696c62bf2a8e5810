"""Attention over the blocks of a cache against all of it at once, in float64 numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.attention import BLOCK, attend, reach, sliding
from tests.models.llama_oracle import TREE, ancestors


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
