"""The doubles are what they claim to be: the target's logits come from its cache, and equal ones compile once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from tests.doubles import hash_lm, sampled, scripted, table_lm
from tests.oracle.hashlm import HashConfig, hash_logits, hash_params

CONFIG = HashConfig(5)
TOKENS = np.array([3, 1, 4, 1, 0, 2, 2, 3])


def read(model, params, tokens, splits, capacity=16, mask=None, fill=0.0):
    """Logits of ``tokens`` read in windows of the given widths; unused slots hold ``fill``."""
    cache = model.init_cache(1, capacity)
    cache = jax.tree.map(lambda x: jnp.full_like(x, fill) if x.ndim > 1 else x, cache)
    logits, start = [], 0
    for width in splits:
        positions = jnp.arange(start, start + width, dtype=jnp.int32)[None]
        out = model.apply(params, jnp.array(tokens[None, start : start + width]), positions, mask, cache)
        cache = kv.commit(out.cache, None, jnp.array([width]))
        logits.append(out.logits[0])
        start += width
    return np.concatenate(logits), cache


@pytest.mark.parametrize("splits", [(8,), (1,) * 8, (3, 1, 4)])
def test_hash_lm_reads_its_past_from_the_cache_and_equals_the_oracle(splits):
    model, params = hash_lm(CONFIG, seed=4)
    logits, _ = read(model, params, TOKENS, splits, fill=np.nan)
    np.testing.assert_allclose(logits, hash_logits(CONFIG, hash_params(CONFIG, 4), TOKENS), atol=2e-5)


def test_every_slot_of_the_cache_matters():
    model, params = hash_lm(CONFIG)
    _, cache = read(model, params, TOKENS, (7,))
    window, position = jnp.array(TOKENS[None, 7:]), jnp.array([[7]], jnp.int32)
    right = model.apply(params, window, position, None, cache).logits
    for slot in range(7):
        k = tuple(layer.at[:, :, slot].set(layer[:, :, (slot + 1) % 7]) for layer in cache.k)
        wrong = model.apply(params, window, position, None, cache._replace(k=k)).logits
        assert np.abs(wrong - right).max() > 1e-3, slot
    assert np.abs(model.apply(params, window, position + 1, None, cache).logits - right).max() > 1e-2


def test_equal_doubles_compare_equal():
    assert hash_lm(CONFIG)[0] == hash_lm(CONFIG, seed=9)[0] != hash_lm(HashConfig(4))[0]
    assert table_lm(3) == table_lm(3)
    q = np.full((3, 3), 1 / 3)
    assert hash(sampled(q, [-1, 0]).draft) == hash(sampled(q, [-1, 0]).draft)
    assert sampled(q, [-1, 0]).draft != sampled(q, [-1, -1]).draft
    assert scripted([0, 1], 3, 2).draft == scripted([1, 1], 3, 2).draft
