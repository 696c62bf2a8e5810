"""`accept` alone, with nothing but arrays: its outcome law, its algebra, and the published faults.

Randomness is integrated out where the code allows it (uniforms are replaced by a grid), sampled otherwise.
"""

import importlib
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import specjax
from specjax import Proposal, Sparse
from tests.exactness.harness import p_value
from tests.oracle import rules

module = importlib.import_module("specjax.accept")
accept = jax.jit(specjax.accept, static_argnums=0)
JUST_BELOW_ONE = np.float32(1 - 2**-24)


def rows_of(tokens, probs, target, *, parents=None, valid=None, batch=1):
    """One proposal as ``batch`` equal rows."""
    tokens = jnp.asarray(tokens, jnp.int32)
    valid = jnp.ones(len(tokens), bool) if valid is None else jnp.asarray(valid)

    def tile(x):
        return jnp.broadcast_to(jnp.asarray(x), (batch, *np.shape(x)))

    if isinstance(probs, Sparse):
        probs = Sparse(tile(probs.ids), tile(probs.probs))
    elif probs is not None:
        probs = tile(jnp.asarray(probs, jnp.float32))
    parents = None if parents is None else np.asarray(parents, np.int32)
    return Proposal(tile(tokens), probs, parents, tile(valid)), tile(jnp.asarray(target, jnp.float32))


def decide(rule, proposal, target, seed=0):
    return accept(rule, specjax.row_keys(seed * 1_000_003 + np.arange(target.shape[0])), proposal, target)


def with_uniforms(monkeypatch, rule, proposal, target, accept_u, next_u):
    """The decision when the accept uniforms [B, N] and the two of the residual [B, 2] are given."""
    monkeypatch.setattr(module, "accept_uniforms", lambda keys, positions, n: jnp.asarray(accept_u, jnp.float32))
    monkeypatch.setattr(module, "uniform", lambda keys, shape: jnp.asarray(next_u, jnp.float32))
    run = jax.jit(lambda *arrays: specjax.accept(rule, *arrays))  # a new function: traced with the replacements
    return run(specjax.row_keys(np.zeros(target.shape[0], int)), proposal, target)


def random_case(seed, parents=None, n=3, vocab=4, concentration=0.7):
    """(tokens, probs, target) with tokens drawn from their laws; some mass exactly 0."""
    rng = np.random.default_rng(seed)
    n = len(parents) if parents is not None else n
    probs, target = rng.dirichlet(np.full(vocab, concentration), n), rng.dirichlet(np.full(vocab, concentration), n + 1)
    target[0, rng.integers(vocab)] = 0
    target /= target.sum(-1, keepdims=True)
    tokens = np.array([rng.choice(vocab, p=q) for q in probs])
    return tokens, probs, target


def assert_outcomes(rule, want, tokens, probs, target, *, parents=None, valid=None, rows=20_000):
    """The sampled (path, next token) follow the exact outcome law: one key, then 16 pooled ones."""
    vocab, cells = np.shape(target)[1], {outcome: i for i, outcome in enumerate(want)}
    law = np.array([*want.values(), 0.0])  # the last cell: whatever the oracle says cannot happen
    assert law.sum() == pytest.approx(1)

    def sample(seed):
        proposal, rows_target = rows_of(tokens, probs, target, parents=parents, valid=valid, batch=rows)
        out = decide(rule, proposal, rows_target, seed)
        counts = np.zeros(len(law))
        found, number = np.unique(
            np.column_stack([out.path, out.num_accepted, out.next_token]), axis=0, return_counts=True
        )
        for row, many in zip(found, number):
            path, count, token = row[:-2], row[-2], row[-1]
            assert path[0] == 0 and (path[count:] == path[count]).all() and 0 <= token < vocab
            counts[cells.get((tuple(map(int, path[1 : count + 1])), int(token)), -1)] += many
        return counts

    if p_value(sample(0), law) < 1e-3:
        assert p_value(sum(sample(seed) for seed in range(1, 17)), law) >= 1e-3


# --- the outcome law of a given proposal


@pytest.mark.parametrize("seed", range(4))
def test_rejection_on_a_chain_has_the_exact_outcome_law(seed):
    tokens, probs, target = random_case(seed)
    want = rules.outcomes_rejection(tokens, probs, None, [True] * 3, target)
    assert_outcomes("rejection", want, tokens, probs, target)


@pytest.mark.parametrize("seed", range(4))
def test_block_has_the_exact_outcome_law(seed):
    tokens, probs, target = random_case(seed)
    assert_outcomes("block", rules.outcomes_block(tokens, probs, [True] * 3, target), tokens, probs, target)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_ragged_chains_are_judged_up_to_their_length(rule):
    tokens, probs, target = random_case(7)
    exact = {"rejection": lambda v: rules.outcomes_rejection(tokens, probs, None, v, target),
             "block": lambda v: rules.outcomes_block(tokens, probs, v, target)}[rule]  # fmt: skip
    for valid in ([True, True, False], [True, False, True], [False, True, True]):
        assert_outcomes(rule, exact(valid), tokens, probs, target, valid=valid)


@pytest.mark.parametrize("parents", [[-1, -1, -1], [-1, -1, 0, 1], [-1, 0, 0, 1, 2]])
def test_rejection_on_a_tree_has_the_exact_outcome_law(parents):
    tokens, probs, target = random_case(11, parents)
    valid = [True] * len(parents)
    want = rules.outcomes_rejection(tokens, probs, parents, valid, target)
    assert_outcomes("rejection", want, tokens, probs, target, parents=parents)
    valid = [i != 1 for i in range(len(parents))]
    want = rules.outcomes_rejection(tokens, probs, parents, valid, target)
    assert_outcomes("rejection", want, tokens, probs, target, parents=parents, valid=valid)


@pytest.mark.parametrize("parents", [None, [-1, -1, 0, 1]])
def test_match_has_the_exact_outcome_law(parents):
    tokens, _, target = random_case(5, parents)
    want = rules.outcomes_match(tokens, parents, [True] * len(tokens), target)
    assert_outcomes("match", want, tokens, None, target, parents=parents)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_point_masses_zero_the_drafted_id_in_the_residual(rule):
    tokens, _, target = random_case(6)
    want = rules.outcomes_rejection(tokens, None, None, [True] * 3, target)
    assert_outcomes(rule, want, tokens, None, target)


def test_a_wrong_outcome_law_is_noticed():
    tokens, probs, target = random_case(0)
    want = rules.wrong_resample_from_p(tokens, probs, None, [True] * 3, target)
    with pytest.raises(AssertionError):
        assert_outcomes("rejection", want, tokens, probs, target)


# --- published numbers: cases 1, 4, 6, 7 and 85, the drafter's draw sampled too


def first_token(p, q, parents=None, kind="iid", rows=200_000, rule="rejection"):
    """The empirical law of the first emitted token."""
    rng = np.random.default_rng(0)
    p, q = np.asarray(p, float), np.asarray(q, float)
    n, vocab = len(parents or [-1]), len(p)
    if kind == "top":
        tokens, probs = np.tile(np.argsort(-q, kind="stable")[:n], (rows, 1)), None
    else:
        noise = rng.gumbel(size=(rows, n, vocab))
        with np.errstate(divide="ignore"):
            if kind == "distinct":  # Gumbel top-n: without replacement, in order
                tokens = np.argsort(-(np.log(q) + noise[:, 0]), axis=-1)[:, :n]
            else:
                tokens = np.argmax(np.log(q) + noise, -1)
        probs = np.tile(q, (rows, n, 1))
        if kind == "distinct":
            for i in range(1, n):
                for j in range(i):
                    probs[np.arange(rows), i, tokens[:, j]] = 0
            probs /= probs.sum(-1, keepdims=True)
        probs = jnp.asarray(probs, jnp.float32)
    parents = None if parents is None else np.asarray(parents, np.int32)
    proposal = Proposal(jnp.asarray(tokens, jnp.int32), probs, parents, jnp.ones((rows, n), bool))
    out = decide(rule, proposal, jnp.broadcast_to(jnp.asarray(p, jnp.float32), (rows, n + 1, vocab)))
    path, drafted = np.asarray(out.path), np.asarray(proposal.tokens)
    first = np.where(out.num_accepted > 0, drafted[np.arange(rows), path[:, min(1, n)] - 1], out.next_token)
    return np.bincount(first, minlength=vocab), np.asarray(out.num_accepted)


@pytest.mark.parametrize(
    ("p", "q", "parents", "kind"),
    [
        ([0.5, 0.3, 0.2], [4 / 7, 3 / 7, 0], None, "iid"),  # case 1
        ([0.3, 0.7], [0.6, 0.4], None, "top"),  # case 4
        ([0.9, 0.1], [0.5, 0.5], None, "iid"),  # case 6
        ([0.2, 0.3, 0.5], [0.8, 0.1, 0.1], None, "iid"),  # case 7
        ([0.3, 0.4, 0.3], [0.6, 0.3, 0.1], [-1, -1], "distinct"),  # case 85
        ([0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [-1, -1], "distinct"),
        ([0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [-1, -1, -1], "distinct"),  # the last one is certain
        ([0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [-1, -1, -1], "iid"),  # case 87: duplicates happen
        ([0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [-1, -1], "top"),
    ],
)
def test_first_token_follows_p(p, q, parents, kind):
    counts, _ = first_token(p, q, parents, kind)
    assert p_value(counts, np.asarray(p)) > 1e-3


def test_the_numbers_of_the_reports_would_be_noticed():
    counts, _ = first_token([0.2, 0.3, 0.5], [0.8, 0.1, 0.1])
    assert p_value(counts, np.array([0.2, 1 / 6, 0.6333 + 1e-4 / 3])) < 1e-9  # case 7, shared uniform
    counts, _ = first_token([0.3, 0.4, 0.3], [0.6, 0.3, 0.1], [-1, -1], "distinct")
    for wrong in ([0.3315, 0.462, 0.2065], [0.3, 0.525, 0.175]):  # case 85
        assert p_value(counts, np.array(wrong)) < 1e-9


def test_case_16_acceptance_is_the_overlap_under_rejection_and_less_under_match():
    p, q, rows = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.3, 0.2]), 200_000
    for rule, alpha in (("rejection", np.minimum(p, q).sum()), ("match", (p * q).sum())):
        _, accepted = first_token(p, q, rule=rule)
        assert abs(accepted.mean() - alpha) < 4 * np.sqrt(alpha * (1 - alpha) / rows)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_case_16_a_draft_from_p_itself_is_always_accepted(rule):
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(50), 5)
    tokens = np.array([[rng.choice(50, p=row) for row in p[:4]] for _ in range(500)])
    target = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (500, 5, 50))
    out = decide(rule, Proposal(jnp.asarray(tokens, jnp.int32), target[:, :4], None, jnp.ones((500, 4), bool)), target)
    assert (out.num_accepted == 4).all()


# --- algebra: accepted mass + residual mass == p, no sampling

LAWS = st.lists(st.floats(0, 1, width=32) | st.just(0.0), min_size=6, max_size=6).filter(lambda x: sum(x) > 1e-3)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(LAWS, LAWS)
def test_accepted_mass_plus_residual_mass_is_p(p, q):
    p, q = (np.asarray(x, np.float64) / sum(x) for x in (p, q))
    p32, q32 = p.astype(np.float32), q.astype(np.float32)
    rest = np.asarray(module.residual(p32[None], q32[None]))[0].astype(np.float64)
    accepted = np.minimum(p, q)
    np.testing.assert_allclose(accepted + (1 - accepted.sum()) * rest, p, atol=1e-6)
    if (p32 > q32).any():
        assert (rest[p32 <= q32] == 0).all()


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([1, 0, 0], [0, 1, 0]),
        ([1, 0, 0], [1, 0, 0]),
        ([0.5, 0.5, 0], [0, 0, 1]),
        ([1e-30, 1 - 1e-30, 0], [1, 0, 0]),
        ([0.3, 0.3, 0.4], [0.3, 0.3, 0.4]),
    ],
)
def test_adversarial_residuals(p, q):
    p, q = np.asarray(p, np.float32), np.asarray(q, np.float32)
    rest = np.asarray(module.residual(p[None], q[None]))[0]
    np.testing.assert_allclose(rest, rules.residual(p.astype(float), q.astype(float)), atol=1e-6)


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


# --- refusals


def test_block_refuses_trees_and_unknown_rules_are_named():
    proposal, target = rows_of([0, 1], None, np.full((3, 2), 0.5), parents=[-1, -1])
    with pytest.raises(ValueError, match="tree"):
        decide("block", proposal, target)
    with pytest.raises(ValueError, match="'greedy'"):
        specjax.accept("greedy", specjax.row_keys([0]), proposal, target)


@pytest.mark.parametrize("parents", [[1, -1], [0, -1], [-1, 2], [-1, -2]])
def test_case_89_malformed_topologies_are_refused(parents):
    proposal, target = rows_of([0, 1], None, np.full((3, 2), 0.5), parents=parents)
    with pytest.raises(ValueError, match="parent"):
        specjax.accept("rejection", specjax.row_keys([0]), proposal, target)


def test_keys_of_another_kind_are_refused():
    proposal, target = rows_of([0], None, np.full((2, 2), 0.5))
    for keys in (jax.random.split(jax.random.key(0, impl="rbg"), 1), jax.random.split(jax.random.PRNGKey(0), 1)):
        with pytest.raises(ValueError, match="threefry"):
            specjax.accept("rejection", keys, proposal, target)


def test_wrong_shapes_are_refused_at_trace_time():
    proposal, target = rows_of([0, 1], None, np.full((2, 2), 0.5))
    with pytest.raises(AssertionError):
        decide("rejection", proposal, target)
