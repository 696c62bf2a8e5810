"""The distillation losses: closed forms, masks, and bans that must not become NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train import acceptance, distillation_loss

P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])


@pytest.mark.parametrize(("loss", "value"), [("forward_kl", 0.7 * np.log(1.4) + 0.3 * np.log(0.6)), ("tv", 0.2)])
def test_closed_form_whatever_the_number_of_positions(loss, value):
    for positions in (1, 4):
        p = jnp.tile(jnp.array(P, jnp.float32), (positions, 1))
        logits = jnp.log(jnp.tile(jnp.array(Q, jnp.float32), (positions, 1)))
        got, alpha = distillation_loss(logits, p, jnp.ones(positions, bool), loss=loss)
        np.testing.assert_allclose(got, value, rtol=1e-5)
        np.testing.assert_allclose(alpha, 0.8, rtol=1e-6)


def test_direction_is_forward():
    logits, p = jnp.log(jnp.array([Q], jnp.float32)), jnp.array([P], jnp.float32)
    forward, _ = distillation_loss(logits, p, jnp.array([True]))
    np.testing.assert_allclose(forward, 0.0823, atol=1e-4)  # the reverse is 0.0872


def test_acceptance_is_one_minus_total_variation():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(7), 5), rng.dirichlet(np.ones(7), 5)
    got = acceptance(jnp.array(p, jnp.float32), jnp.array(q, jnp.float32))
    np.testing.assert_allclose(got, 1 - 0.5 * np.abs(p - q).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("loss", ["forward_kl", "tv"])
def test_banned_ids_give_finite_values_and_gradients(loss):
    logits = jnp.array([[0.0, 1.0, -jnp.inf], [2.0, -jnp.inf, -jnp.inf]])
    p = jnp.array([[0.4, 0.6, 0.0], [1.0, 0.0, 0.0]])
    value, grad = jax.value_and_grad(lambda x: distillation_loss(x, p, jnp.ones(2, bool), loss=loss)[0])(logits)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert not grad[:, 2].any()


@pytest.mark.parametrize("loss", ["forward_kl", "tv"])
def test_masked_positions_add_neither_loss_nor_gradient(loss):
    rng = np.random.default_rng(1)
    logits = jnp.array(rng.normal(size=(3, 5)), jnp.float32)
    p = jnp.array(rng.dirichlet(np.ones(5), 3), jnp.float32)
    mask = jnp.array([True, False, True])
    value, grad = jax.value_and_grad(lambda x: distillation_loss(x, p, mask, loss=loss)[0])(logits)
    alone, _ = distillation_loss(logits[::2], p[::2], jnp.ones(2, bool), loss=loss)
    np.testing.assert_allclose(value, alone, rtol=1e-6)
    assert grad[0].any() and not grad[1].any()
    value, grad = jax.value_and_grad(lambda x: distillation_loss(x, p, jnp.zeros(3, bool), loss=loss)[0])(logits)
    assert value == 0 and not grad.any()


def test_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="reverse_kl"):
        distillation_loss(jnp.zeros((1, 2)), jnp.ones((1, 2)) / 2, jnp.ones(1, bool), loss="reverse_kl")
