"""Rules where floating point bites: edges of the random numbers, tiny probabilities, NaN; one rule in two forms."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Proposal, Sparse
from tests.accept_world import JUST_BELOW_ONE, assert_outcomes, decide, module, random_case, rows_of, with_uniforms
from tests.oracle import rules

# --- one rule in two forms


@pytest.mark.parametrize("probs_kind", ["dense", "sparse", "point"])
def test_the_vectorised_chain_equals_the_tree_scan(probs_kind):
    rng = np.random.default_rng(2)
    batch, n, vocab = 400, 4, 6
    probs = rng.dirichlet(np.full(vocab, 0.5), (batch, n)).astype(np.float32)
    target = rng.dirichlet(np.full(vocab, 0.5), (batch, n + 1)).astype(np.float32)
    tokens = np.argmax(np.log(probs) + rng.gumbel(size=probs.shape), axis=-1)
    valid = jnp.asarray(rng.random((batch, n)) < 0.9)
    laws = jnp.asarray(probs)
    if probs_kind == "sparse":
        ids = np.argsort(rng.random((batch, n, vocab)), -1).astype(np.int32)
        laws = Sparse(jnp.asarray(ids), jnp.asarray(np.take_along_axis(probs, ids, -1)))
    laws = None if probs_kind == "point" else laws
    tokens = jnp.asarray(tokens, jnp.int32)
    chain = decide("rejection", Proposal(tokens, laws, None, valid), jnp.asarray(target))
    for parents in (np.arange(n, dtype=np.int32) - 1, jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32) - 1, (batch, n))):
        tree = decide("rejection", Proposal(tokens, laws, parents, valid), jnp.asarray(target))
        for a, b in zip(chain, tree):
            np.testing.assert_array_equal(a, b)
    assert 0 < chain.num_accepted.mean() < n


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sparse_and_dense_laws_decide_alike(rule):
    rng = np.random.default_rng(3)
    batch, n, vocab, ids = 400, 3, 8, np.array([6, 1, 4], np.int32)
    small = rng.dirichlet(np.ones(3), (batch, n)).astype(np.float32)
    dense = np.zeros((batch, n, vocab), np.float32)
    dense[..., ids] = small
    tokens = jnp.asarray(ids[rng.integers(0, 3, (batch, n))])
    target = jnp.asarray(rng.dirichlet(np.ones(vocab), (batch, n + 1)), jnp.float32)
    valid = jnp.ones((batch, n), bool)
    first = decide(rule, Proposal(tokens, jnp.asarray(dense), None, valid), target)
    for sparse in (Sparse(jnp.asarray(ids), jnp.asarray(small)),
                   Sparse(jnp.broadcast_to(jnp.asarray(ids), small.shape), jnp.asarray(small))):  # fmt: skip
        second = decide(rule, Proposal(tokens, sparse, None, valid), target)
        np.testing.assert_array_equal(first.num_accepted, second.num_accepted)
        assert (first.next_token == second.next_token).mean() > 0.999  # a residual summed in another order may round


def test_padding_of_a_sparse_law_has_no_mass_and_changes_nothing():
    target = [[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]]
    padded = Sparse(np.array([[2, 0, 0, 0]], np.int32), np.array([[0.6, 0.4, 0, 0]], np.float32))
    exact = rules.outcomes_rejection([0], [[0.4, 0, 0.6]], None, [True], target)
    assert_outcomes("rejection", exact, [0], padded, target)


def test_block_equals_rejection_in_law_for_point_masses():
    tokens, _, target = random_case(9)
    one = rules.outcomes_block(tokens, None, [True] * 3, target)
    two = rules.outcomes_rejection(tokens, None, None, [True] * 3, target)
    assert one.keys() == two.keys()
    np.testing.assert_allclose(list(one.values()), [two[k] for k in one])


# --- boundaries of the random numbers


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_case_11_u_zero_does_not_accept_what_p_forbids_and_u_near_one_accepts_certainty(rule, monkeypatch):
    proposal, target = rows_of([0], [[0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]])
    out = with_uniforms(monkeypatch, rule, proposal, target, [[0.0]], [[0.3, 0.3]])
    assert out.num_accepted[0] == 0 and out.next_token[0] == 1
    proposal, target = rows_of([0], [[0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]])
    out = with_uniforms(monkeypatch, rule, proposal, target, [[JUST_BELOW_ONE]], [[0.3, 0.3]])
    assert out.num_accepted[0] == 1


@pytest.mark.parametrize("u", [0.0, 1e-7, 0.5, JUST_BELOW_ONE])
def test_case_10_a_residual_lost_to_rounding_falls_back_to_p(u, monkeypatch):
    q = np.array([0.0, 0.25, 0.75], np.float32)
    p = (q * np.float32(1 - 1e-7)).astype(np.float32)
    proposal, target = rows_of([1], [q], [p, p])
    out = with_uniforms(monkeypatch, "rejection", proposal, target, [[JUST_BELOW_ONE]], [[u, u]])
    token = int(out.next_token[0]) if out.num_accepted[0] == 0 else 1
    assert p[token] > 0
    for v in (0.0, u):
        proposal, target = rows_of([1], [q], [q, q])
        out = with_uniforms(monkeypatch, "rejection", proposal, target, [[v]], [[u, u]])
        assert out.num_accepted[0] == 1  # p == q is never rejected


def test_case_9_no_token_with_p_at_most_q_is_ever_recovered(monkeypatch):
    vocab, grid = 5000, np.array([0, 2**-24, 0.1, 0.5, 0.9, 1 - 2**-12, JUST_BELOW_ONE], np.float32)
    p, q = np.full(vocab, 0.8 / (vocab - 1), np.float32), np.full(vocab, 1.0 / (vocab - 1), np.float32)
    p[4321], q[4321] = 0.2, 0.0
    u = np.array(list(itertools.product(grid, grid)))
    proposal, target = rows_of([17], [q], [p, p], batch=len(u))
    out = with_uniforms(monkeypatch, "rejection", proposal, target, np.full((len(u), 1), JUST_BELOW_ONE), u)
    assert (out.num_accepted == 0).all() and (out.next_token == 4321).all()


@pytest.mark.parametrize("probs", [np.full(10, 0.0999, np.float32), np.array([0.5, 0.5, 0, 0], np.float32)])
def test_case_21_the_upper_edge_of_the_cdf_stays_inside_the_support(probs, monkeypatch):
    grid = np.array([0.0, 0.9995, 1 - 2**-20, JUST_BELOW_ONE], np.float32)
    u = np.array(list(itertools.product(grid, grid)))
    target = jnp.broadcast_to(jnp.asarray(probs), (len(u), 1, len(probs)))
    none = Proposal(jnp.zeros((len(u), 0), jnp.int32), None, None, jnp.zeros((len(u), 0), bool))
    out = with_uniforms(monkeypatch, "rejection", none, target, np.zeros((len(u), 0)), u)
    assert (probs[np.asarray(out.next_token)] > 0).all()
    assert out.next_token[-1] == np.flatnonzero(probs)[-1] and out.next_token[0] == 0


@pytest.mark.parametrize("u", [0.0, 0.5, JUST_BELOW_ONE])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_case_18_a_draft_outside_the_nucleus_is_rejected_and_nothing_is_nan(rule, u, monkeypatch):
    for q in ([0.999999, 1e-6], [1.0, 0.0], [1.0, 1e-45]):  # also 0 / 0, and a q that underflowed
        proposal, target = rows_of([1], [q], [[1.0, 0.0], [0.5, 0.5]])
        out = with_uniforms(monkeypatch, rule, proposal, target, [[u]], [[u, u]])
        assert out.num_accepted[0] == 0 and out.next_token[0] == 0


@pytest.mark.parametrize("n", range(1, 7))
def test_case_12_only_the_leading_run_counts(n, monkeypatch):
    masks = np.array(list(itertools.product([0, 1], repeat=n)))
    proposal, target = rows_of(np.zeros(n, int), None, np.full((n + 1, 2), 0.5), batch=len(masks))
    u = np.where(masks, 0.25, 0.75)
    leading = np.cumprod(masks, axis=1).sum(1)
    out = with_uniforms(monkeypatch, "rejection", proposal, target, u, np.full((len(masks), 2), 0.5))
    np.testing.assert_array_equal(out.num_accepted, leading)
    assert ((out.next_token == 1) | (leading == n)).all()  # the drafted id is not in the residual


@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_case_13_every_draft_is_judged_by_the_row_before_it_and_the_bonus_by_the_last(rule):
    """Row i of the target allows token i only: every other alignment rejects."""
    n = 4
    proposal, target = rows_of(np.arange(n), np.eye(n + 1)[:n], np.eye(n + 1))
    out = decide(rule, proposal, target)
    assert out.num_accepted[0] == n and out.next_token[0] == n
    for slot in range(n):
        tokens = np.arange(n)
        tokens[slot] = n
        proposal, target = rows_of(tokens, None, np.eye(n + 1))
        out = decide(rule, proposal, target)
        assert (out.num_accepted[0], out.next_token[0]) == (slot, slot)
        np.testing.assert_array_equal(out.path[0], np.minimum(np.arange(n + 1), slot))


def test_accept_noise_of_a_node_does_not_depend_on_how_many_nodes_there_are():
    """Windows are narrowed to the longest draft of the batch: a row must not notice."""
    noise = importlib.import_module("specjax.noise")
    keys, positions = specjax.row_keys(np.arange(5)), jnp.arange(5, dtype=jnp.int32)
    wide = noise.accept_uniforms(keys, positions, 7)
    for n in range(1, 7):
        np.testing.assert_array_equal(noise.accept_uniforms(keys, positions, n), wide[:, :n])


# --- numerics


def test_case_23_tiny_probabilities_keep_their_ratio(monkeypatch):
    p, q = np.exp(-20), np.exp(-12)
    for u, accepted in ((0.9 * np.exp(-8), 1), (1.1 * np.exp(-8), 0)):
        proposal, target = rows_of([0], [[q, 1 - q]], [[p, 1 - p], [0.5, 0.5]])
        out = with_uniforms(monkeypatch, "rejection", proposal, target, [[u]], [[0.5, 0.5]])
        assert out.num_accepted[0] == accepted


@pytest.mark.parametrize("exponent", range(1, 9))
def test_case_24_small_differences_of_p_and_q_survive_in_the_residual(exponent):
    """The residual mass of a near-equal pair is the float difference, not a logarithm of 1 - r."""
    r = 10.0**-exponent
    p = np.array([0.25 * (1 + r), 0.75 - 0.25 * r], np.float32)
    q = np.array([0.25, 0.75], np.float32)
    rest = np.asarray(module.residual(p[None], q[None]))[0]
    want = np.maximum(p.astype(np.float64) - q, 0)
    want = want / want.sum() if want.sum() else p
    np.testing.assert_allclose(rest, want, rtol=1e-5)


def test_case_25_rare_tokens_are_drawn_at_their_rate_by_both_samplers():
    """p = 1e-6 over 4M draws of each kind: 4 expected; a 16-bit uniform gives 0 or hundreds."""
    noise = importlib.import_module("specjax.noise")
    batch, repeats = 500_000, 8

    @jax.jit
    def count(seed):
        keys = jax.vmap(jax.random.key)(seed * batch + jnp.arange(batch, dtype=jnp.uint32))
        probs = jnp.broadcast_to(jnp.array([1 - 1e-6, 1e-6], jnp.float32), (batch, 2))
        gumbel = noise.target_draw(keys, jnp.zeros(batch, jnp.int32), probs)
        inverse = noise.inverse_cdf(probs, noise.uniform(keys, (2,)))
        return jnp.sum(gumbel), jnp.sum(inverse)

    totals = np.sum([count(jnp.uint32(i)) for i in range(repeats)], axis=0)
    assert (totals > 0).all() and (totals < 16).all(), totals  # Poisson(4): outside has probability 2e-2 + 1e-6


@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_case_19_a_nan_row_does_not_touch_its_neighbours_and_no_id_leaves_the_vocabulary(rule):
    rng = np.random.default_rng(4)
    target = rng.dirichlet(np.ones(5), (3, 4)).astype(np.float32)
    probs = rng.dirichlet(np.ones(5), (3, 3)).astype(np.float32)
    tokens, valid = jnp.asarray(rng.integers(0, 5, (3, 3)), jnp.int32), jnp.ones((3, 3), bool)
    clean = decide(rule, Proposal(tokens, jnp.asarray(probs), None, valid), jnp.asarray(target))
    target[1] = np.nan
    out = decide(rule, Proposal(tokens, jnp.asarray(probs), None, valid), jnp.asarray(target))
    for a, b in zip(clean, out):
        np.testing.assert_array_equal(np.asarray(a)[[0, 2]], np.asarray(b)[[0, 2]])
    assert out.num_accepted[1] == 0 and 0 <= out.next_token[1] < 5  # the round reads the NaN and reports the row


# --- duplicates, case 87


def test_case_87_a_repeated_deterministic_sibling_is_judged_once():
    target = [[0.3, 0.5, 0.2], [0.2, 0.2, 0.6], [1.0, 0, 0], [0.6, 0.2, 0.2]]
    want = rules.outcomes_rejection([0, 0, 1], None, [-1, -1, -1], [True] * 3, target)
    assert not any(path == (2,) for path, _ in want)
    assert_outcomes("rejection", want, [0, 0, 1], None, target, parents=[-1, -1, -1])
