"""Choosing from many, and the target's own draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.noise import TOP_BLOCK, gumbel, inverse_cdf, row_keys, target_draw, top_k


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


@pytest.mark.parametrize("size", [1, 7, 640, 642, 1000])
def test_a_draw_is_an_id_with_mass_however_a_vocabulary_is_cut_into_blocks(size):
    """Blocks are padded inside the vocabulary; a padded id is never drawn, at the edges of the uniforms neither."""
    edges = np.float32([0, 0.5, 1 - 2**-24])
    u = jnp.asarray(np.stack(np.meshgrid(edges, edges), axis=-1).reshape(-1, 2))
    for held in ([0], [size - 1], sorted({0, size // 2, size - 1}), range(size)):
        weights = np.zeros((len(u), size), np.float32)
        weights[:, list(held)] = 0.1
        drawn = np.asarray(jax.jit(inverse_cdf)(jnp.asarray(weights), u))
        assert set(drawn.tolist()) <= set(held)
        assert {min(held), max(held)} <= set(drawn.tolist())


def test_a_draw_follows_the_law_whatever_the_size_of_the_vocabulary():
    """A grid of uniforms, every pair of 64 x 64, against the masses."""
    weights = np.random.default_rng(0).random(60).astype(np.float32) ** 3  # four parts of fifteen
    grid = (np.arange(64, dtype=np.float32) + 0.5) / 64
    u = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    drawn = np.asarray(inverse_cdf(jnp.broadcast_to(jnp.asarray(weights)[None], (len(u), 60)), jnp.asarray(u)))
    np.testing.assert_allclose(np.bincount(drawn, minlength=60) / len(u), weights / weights.sum(), atol=0.02)


@pytest.mark.parametrize("decided", [True, False])
def test_a_row_draws_the_same_whether_or_not_noise_is_made_for_its_batch(decided):
    """Laws that are point masses need no noise; one that is not makes noise for all."""
    laws = np.eye(50, dtype=np.float32)[[3, 49, 0, 17]]
    if not decided:
        laws[3] = np.random.default_rng(0).random(50)
        laws[3] /= laws[3].sum()
    keys, positions = row_keys(range(4)), jnp.arange(4)
    drawn = jax.jit(target_draw)(keys, positions, jnp.asarray(laws))
    with np.errstate(divide="ignore"):
        expected = np.argmax(np.log(laws) + np.asarray(gumbel(keys, positions, 50)), axis=-1)
    np.testing.assert_array_equal(drawn, expected)
    assert drawn[:3].tolist() == [3, 49, 0]
