"""`accept` alone, with nothing but arrays: its outcome law, its algebra, and the published faults.

Randomness is integrated out where the code allows it (uniforms are replaced by a grid), sampled otherwise.
"""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from specjax import Proposal
from tests.accept_world import assert_outcomes, decide, module, random_case
from tests.exactness.harness import p_value
from tests.oracle import rules

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
