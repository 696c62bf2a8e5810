"""`accept` alone: arrays of any kind work, and arrays that do not belong together are refused by name."""

import jax
import numpy as np
import pytest

import specjax
from specjax import Proposal, Sparse, accept
from tests.accept_world import decide, rows_of

TOKENS, VALID = np.array([[1, 2]]), np.ones((1, 2), bool)
LAW = np.full((1, 3, 4), 0.25, np.float32)
KEYS = specjax.row_keys([0])
PROBS = {
    "points": None,
    "dense": np.full((1, 2, 4), 0.25, np.float32),
    "sparse": Sparse(np.arange(4), np.full((1, 2, 4), 0.25, np.float32)),
}


@pytest.mark.parametrize("parents", [None, [-1, -1], np.array([-1, 0])])
@pytest.mark.parametrize("probs", PROBS)
@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_numpy_arrays_and_jax_arrays_decide_alike(rule, probs, parents):
    if rule == "block":
        parents = None
    proposal = Proposal(TOKENS, PROBS[probs], parents, VALID)
    got = accept(rule, KEYS, proposal, LAW, np.array([3]))
    arrays = jax.tree.map(jax.numpy.asarray, proposal._replace(parents=None))
    static = None if parents is None else np.asarray(parents)
    wanted = accept(rule, KEYS, arrays._replace(parents=static), jax.numpy.asarray(LAW), jax.numpy.array([3]))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("token", [-1, 4, 99])
@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_a_token_outside_the_vocabulary_is_never_accepted(rule, token):
    keys = specjax.row_keys(range(200))
    tokens, valid = np.full((200, 1), token), np.ones((200, 1), bool)
    out = accept(rule, keys, Proposal(tokens, None, None, valid), np.full((200, 2, 4), 0.25, np.float32))
    assert np.all(out.num_accepted == 0)
    assert set(np.unique(out.next_token)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keys": [0]}, "keys"),
        ({"keys": specjax.row_keys([0, 1])}, "keys"),
        ({"keys": np.array([0], np.uint32)}, "keys"),
        ({"proposal": (TOKENS, None, None, VALID)}, "Proposal"),
        ({"proposal": Proposal(TOKENS.astype(np.float32), None, None, VALID)}, "tokens"),
        ({"proposal": Proposal(TOKENS[:, :1], None, None, VALID)}, "proposal.tokens"),
        ({"proposal": Proposal(TOKENS, None, None, VALID[:, :1])}, "proposal.valid"),
        ({"proposal": Proposal(TOKENS, LAW, None, VALID)}, "proposal.probs"),
        ({"proposal": Proposal(TOKENS, None, [-1], VALID)}, "proposal.parents"),
        ({"proposal": Proposal(TOKENS, None, [0, 0], VALID)}, "parents"),
        ({"target_probs": LAW[0]}, "target_probs"),
        ({"positions": np.array([1, 2])}, "positions"),
        ({"rule": "greedy"}, "rule"),
    ],
)
def test_what_does_not_belong_together_is_refused_by_name(change, words):
    given = {
        "rule": "rejection", "keys": KEYS, "proposal": Proposal(TOKENS, None, None, VALID), "target_probs": LAW,
    } | change  # fmt: skip
    with pytest.raises((ValueError, AssertionError), match=words):
        accept(**given)


def test_block_refuses_trees_and_unknown_rules_are_named():
    proposal, target = rows_of([0, 1], None, np.full((3, 2), 0.5), parents=[-1, -1])
    with pytest.raises(ValueError, match="tree"):
        decide("block", proposal, target)
    with pytest.raises(ValueError, match="'greedy'"):
        accept("greedy", specjax.row_keys([0]), proposal, target)


@pytest.mark.parametrize("parents", [[1, -1], [0, -1], [-1, 2], [-1, -2]])
def test_case_89_malformed_topologies_are_refused(parents):
    proposal, target = rows_of([0, 1], None, np.full((3, 2), 0.5), parents=parents)
    with pytest.raises(ValueError, match="parent"):
        accept("rejection", specjax.row_keys([0]), proposal, target)


def test_keys_of_another_kind_are_refused():
    proposal, target = rows_of([0], None, np.full((2, 2), 0.5))
    for keys in (jax.random.split(jax.random.key(0, impl="rbg"), 1), jax.random.split(jax.random.PRNGKey(0), 1)):
        with pytest.raises(ValueError, match="threefry"):
            accept("rejection", keys, proposal, target)


def test_wrong_shapes_are_refused_at_trace_time():
    proposal, target = rows_of([0, 1], None, np.full((2, 2), 0.5))
    with pytest.raises(AssertionError):
        decide("rejection", proposal, target)
