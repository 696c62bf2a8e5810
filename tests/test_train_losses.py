"""The losses place by place: closed forms, gradients against finite differences, bans, reduced vocabularies, sums."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train import losses
from specjax.train.types import Mean

P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
SOFT = [name for name in losses.NAMES if name != "cross_entropy"]
IDS, TOKENS = np.array([0, 2, 3, 6]), np.array([2, 5, 0])  # of 7; token 5 is outside
inf = np.inf


# --- what the losses are, in float64 numpy


def softmax(x):
    x = np.exp(x - np.max(x, -1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def kl(p, q):
    return (p * np.log(p / q)).sum(-1)


def oracle(name, q_logits, p_logits, ids=None, temperature=1.0, mix=None, tokens=None):
    """[..., ] values; ``mix``: the weight of KL in hybrid."""
    p, q = softmax(p_logits / temperature), softmax(q_logits / temperature)
    inside = p if ids is None else p[..., ids]
    overlap, share = np.minimum(inside, q).sum(-1), inside.sum(-1)
    p = inside / share[..., None]
    if name == "cross_entropy":
        return -np.log(np.take_along_axis(q, tokens[..., None], -1)[..., 0])
    if name == "hybrid":
        return mix * temperature**2 * share * kl(p, q) + (1 - mix) * (1 - overlap)
    values = {
        "forward_kl": kl(p, q), "reverse_kl": kl(q, p), "js": (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
        "tv": 1 - overlap, "nla": -np.log(overlap),
    }  # fmt: skip
    return values[name] * (1 if name in ("tv", "nla") else temperature**2)


def mix_of(q_logits, p_logits, ids, temperature):
    p, q = softmax(p_logits / temperature), softmax(q_logits / temperature)
    return np.exp(-3.0 * np.minimum(p if ids is None else p[..., ids], q).sum(-1))


class Found(NamedTuple):
    values: Any
    weight: Any
    alpha: Any
    tangent: Any  # of values and alpha, along ones
    grad: Any  # of the sum of values
    weighted: Any  # of the sum of weight * values


@functools.partial(jax.jit, static_argnums=(0, 1))
def _every(names, temperature, q_logits, p_logits, tokens, ids):
    def one(name):
        how = losses.divergence(name, temperature=temperature)

        def of(x):
            return losses.compare(how, x, losses.law(p_logits, ids, how), tokens, ids)

        made, tangent = jax.jvp(of, (q_logits,), (jnp.ones_like(q_logits),))
        grads = [
            jax.grad(total)(q_logits)
            for total in (lambda x: of(x).values.sum(), lambda x: losses.mean(*of(x)[:2]).total)
        ]
        return Found(*made, (tangent.values, tangent.alpha), *grads)

    return {name: one(name) for name in names}


def every(q_logits, p_logits, tokens=None, ids=None, temperature=1.0) -> dict[str, Found]:
    """All losses in one program: values and derivatives."""
    tokens = np.zeros(q_logits.shape[:-1], np.int32) if tokens is None else tokens
    names = tuple(losses.NAMES) if temperature == 1 else tuple(SOFT)
    return jax.device_get(_every(names, temperature, q_logits, p_logits, tokens, ids))


# --- values


@pytest.mark.parametrize("name", losses.NAMES)
def test_values_are_the_closed_forms_however_the_places_are_split(name):
    """Case 132: the direction of KL, and a mean that does not depend on how many places there are or where cuts are."""
    log = {"forward_kl": 0.0823, "reverse_kl": 0.0872, "tv": 0.2, "nla": -np.log(0.8), "cross_entropy": np.log(2)}
    mix = np.exp(-3 * 0.8)
    log |= {"hybrid": mix * 0.0823 + (1 - mix) * 0.2, "js": (kl(P, (P + Q) / 2) + kl(Q, (P + Q) / 2)) / 2}
    q, p = (np.log(np.tile(x, (4, 1))).astype(np.float32) for x in (Q, P))
    made = every(q, p)[name]
    np.testing.assert_allclose(made.values, log[name], atol=1e-4)
    np.testing.assert_allclose(made.alpha, 0.8, rtol=1e-6)
    counts = np.array([1, 1, 0, 1], np.float32)
    whole = losses.mean(made.values, counts)
    halves = [losses.mean(made.values[cut], counts[cut]) for cut in (slice(1), slice(1, 4))]
    for mean in (whole, Mean(*(sum(x) for x in zip(*halves)))):
        np.testing.assert_allclose(mean.value(), log[name], atol=1e-4)
        assert mean.weight == 3


def test_acceptance_is_one_minus_total_variation_of_the_whole_law():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(7), 3), rng.dirichlet(np.ones(4), 3)
    widened = np.zeros((3, 7))
    widened[:, IDS] = q
    made = every(np.log(q).astype(np.float32), np.log(p).astype(np.float32), TOKENS, IDS)
    for name in losses.NAMES:
        np.testing.assert_allclose(made[name].alpha, 1 - 0.5 * np.abs(p - widened).sum(-1), rtol=1e-5)
    from_probs = losses.law_of_probs(jnp.asarray(p, jnp.float32), IDS)
    np.testing.assert_allclose(np.exp(from_probs.whole), p[:, IDS], rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.7, pytest.param(1.0, marks=pytest.mark.full)])
def test_gradients_are_those_of_finite_differences(temperature):
    """Of an oracle in float64, with a reduced vocabulary; T^2 for the divergences."""
    rng = np.random.default_rng(1)
    q, p = 1.5 * rng.normal(size=(3, 4)), 1.5 * rng.normal(size=(3, 7))
    with jax.enable_x64(True):
        made = every(jnp.asarray(q), jnp.asarray(p), TOKENS, IDS, temperature)
    single = every(q.astype(np.float32), p.astype(np.float32), TOKENS, IDS, temperature)
    for name, found in made.items():
        ours = functools.partial(
            oracle, name, p_logits=p, ids=IDS, temperature=temperature, mix=mix_of(q, p, IDS, temperature),
            tokens=np.array([1, 3, 0]),  # columns of TOKENS; the second is outside: any column, it weighs nothing
        )  # fmt: skip
        step, expected = 1e-5, np.zeros_like(q)
        for column in range(4):
            move = step * np.eye(4)[column]
            expected[:, column] = (ours(q + move) - ours(q - move)) / (2 * step)
        assert found.values.dtype == np.float64
        np.testing.assert_allclose(found.values, ours(q), rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(found.grad, expected, atol=1e-8, err_msg=name)
        np.testing.assert_allclose(found.tangent[0], expected.sum(-1), atol=1e-8, err_msg=name)
        np.testing.assert_allclose(single[name].values, found.values, rtol=1e-4, atol=1e-6, err_msg=name)


def test_hybrid_goes_from_kl_to_tv():
    rng = np.random.default_rng(2)
    q, p = (jnp.asarray(rng.normal(size=(2, 5)), jnp.float32) for _ in range(2))

    @jax.jit
    def compare():
        hows = [losses.divergence("hybrid", eta=0), losses.divergence(), losses.divergence("hybrid", eta=1e4),
                losses.divergence("tv")]  # fmt: skip
        return [losses.compare(how, q, losses.law(p)).values for how in hows]

    little, forward, much, variation = compare()
    np.testing.assert_allclose(little, forward, rtol=1e-5)
    np.testing.assert_allclose(much, variation, rtol=1e-5)


# --- bans


def test_banned_ids_give_finite_values_and_derivatives():
    """Case 130: -inf for the student, the teacher, both, and a row that has nothing else; grad and jvp."""
    q = np.array([[0, 1, -inf, 2], [-inf, 0, -inf, 1], [1, 2, 0, 1], [-inf] * 4, [0, -inf, -inf, -inf]], np.float32)
    p = np.array([[1, 0, -inf, 2], [0, 1, 2, 1], [-inf, 0, -inf, -inf], [0, 1, 2, 3], [-inf, 0, 1, 2]], np.float32)
    for name, found in every(q, p, np.array([3, 2, 1, 0, 2])).items():
        for values in jax.tree.leaves(found):
            assert np.isfinite(values).all(), name
        assert not found.grad[np.isneginf(q)].any() and not found.tangent[1].any()
        assert (found.values >= -1e-6).all()
    unsaid = every(np.where(np.arange(4) == 1, np.nan, q), p)  # of the same shapes: nothing new is compiled
    assert all(np.isnan(found.values[2]) for name, found in unsaid.items() if name != "cross_entropy")


def test_places_of_weight_zero_add_neither_value_nor_gradient_whatever_they_hold():
    values, weight = np.array([1.0, np.nan, 3.0], np.float32), np.array([1.0, 0.0, 0.5], np.float32)
    mean, grad = jax.value_and_grad(lambda x: losses.mean(x, weight).total)(values)
    assert mean == 2.5 and grad.tolist() == [1.0, 0.0, 0.5]
    nothing = losses.mean(values, np.zeros(3, np.float32))
    assert nothing.value() == 0 and nothing.weight == 0


# --- reduced vocabularies


@pytest.mark.parametrize("name", losses.NAMES)
def test_places_weigh_what_the_draft_vocabulary_can_say(name):
    """Case 136: the mass inside for what is renormalised, the token for cross-entropy, 1 for acceptance itself."""
    p = np.array([[0.1, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1], [0, 0.5, 0, 0, 0.5, 0, 0], [0.25, 0, 0.25, 0.25, 0, 0, 0.25]])
    with np.errstate(divide="ignore"):
        logits = np.log(p).astype(np.float32)
    q = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
    made = every(q, logits, TOKENS, IDS)[name]
    share = p[:, IDS].sum(-1)
    weights = {"cross_entropy": [1, 0, 1], "tv": [1] * 3, "nla": [1] * 3, "hybrid": [1] * 3}
    np.testing.assert_allclose(made.weight, weights.get(name, share), atol=1e-6)

    assert np.isfinite(made.values).all() and made.weighted[0].any()
    assert not made.weighted[1].any()  # nothing the drafter can say is right there, so nothing is learnt


def test_log_odds_learn_the_chance_itself():
    chance, odds = np.array([0.2, 0.9, 0.0, 1.0]), np.array([0.3, -2.0, 30.0, 1.0])
    got, grad = jax.vjp(lambda x: losses.binary(x, jnp.asarray(chance, jnp.float32)), jnp.asarray(odds, jnp.float32))
    sigmoid = 1 / (1 + np.exp(-odds))
    with np.errstate(divide="ignore"):
        expected = -(chance * np.log(sigmoid) + (1 - chance) * np.log1p(-sigmoid))
    np.testing.assert_allclose(got, expected, rtol=1e-3)
    np.testing.assert_allclose(grad(jnp.ones(4))[0], sigmoid - chance, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "kl"}, "loss='kl': choose one of 'forward_kl', 'reverse_kl'"),
        ({"temperature": 0}, "temperature=0: must be a number of 0.001 or more"),
        ({"temperature": True}, "temperature=True"),
        ({"name": "hybrid", "eta": -1}, "eta=-1: must be a number of 0 or more"),
        ({"name": "cross_entropy", "temperature": 2}, "cross_entropy is about tokens"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(arguments, words):
    with pytest.raises(ValueError, match=words):
        losses.divergence(**arguments)
