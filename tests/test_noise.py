"""Choosing from many: the parts of `specjax.noise` that draw nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.noise import TOP_BLOCK, top_k


@pytest.mark.parametrize("k", [1, 4, 9])
@pytest.mark.parametrize("size", [9, TOP_BLOCK, 9 * TOP_BLOCK, 40 * TOP_BLOCK - 7])
def test_top_k_is_that_of_lax_ties_and_all(size, k):
    """Many ties, and rows of which nothing but one entry is allowed: padding is never chosen."""
    rng = np.random.default_rng(size + k)
    x = rng.integers(0, 30, (3, 2, size)).astype(np.float32)
    x[1] = rng.normal(size=(2, size))
    x[2] = -np.inf
    x[2, 0, size - 1] = 1.0
    found = jax.jit(top_k, static_argnums=1)(jnp.asarray(x), k)
    for mine, theirs in zip(found, lax.top_k(jnp.asarray(x), k), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_slicing_rows_of_top_k_does_not_sort_the_vocabulary():
    compiled = jax.jit(lambda x: top_k(x, 1)[1][:, 3:, 0]).lower(jnp.zeros((1, 16, 49_152))).compile().as_text()
    sorts = [line for line in compiled.splitlines() if " sort(" in line]
    assert not any("49152" in line or "196608" in line for line in sorts), sorts
