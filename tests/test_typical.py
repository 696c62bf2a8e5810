"""`Typical`: what it keeps, that it is lossy, and that everything says so."""

import jax
import numpy as np
import pytest

import specjax
from specjax import Proposal, Typical
from tests.exactness.harness import p_value
from tests.small import PROMPTS, draft_source, target

accept = jax.jit(specjax.accept, static_argnums=0)


def kept(tokens, parents, valid, target_probs, rule):
    """The longest plausible path, by hand: window indices without the root."""
    best = ()
    paths = {}
    for node, token in enumerate(tokens):
        parent = parents[node]
        above = target_probs[parent + 1]
        entropy = -sum(x * np.log(x) for x in above if x > 0)
        plausible = above[token] > min(rule.threshold, rule.alpha * np.exp(-entropy))
        if valid[node] and plausible and (parent < 0 or parent in paths):
            paths[node] = (*paths.get(parent, ()), node + 1)
            best = max(best, paths[node], key=len)
    return best


@pytest.mark.parametrize("rule", [Typical(), Typical(0.3, 0.6), Typical(0.0, 1.0)])
def test_the_longest_plausible_path_is_kept_and_the_next_token_is_drawn_from_its_law(rule):
    rng = np.random.default_rng(1)
    rows, parents = 200, np.asarray([-1, -1, 0, 0, 1, 4], np.int32)
    tokens = rng.integers(0, 5, (rows, 6)).astype(np.int32)
    valid = rng.random((rows, 6)) < 0.9
    probs = rng.dirichlet(np.full(5, 0.4), (rows, 7)).astype(np.float32)
    got = accept(rule, specjax.row_keys(range(rows)), Proposal(tokens, None, parents, valid), probs)
    for row in range(rows):
        path = kept(tokens[row], parents, valid[row], probs[row].astype(np.float64), rule)
        assert int(got.num_accepted[row]) == len(path)
        assert got.path[row, : len(path) + 1].tolist() == [0, *path]
        assert probs[row, path[-1] if path else 0, got.next_token[row]] > 0


def test_typical_is_lossy_and_the_exactness_test_notices():
    """p = (.6, .4), always 0 is drafted: exact rules emit it 60% of the time, this one always."""
    rows = 5000
    target_probs = np.broadcast_to(np.asarray([0.6, 0.4], np.float32), (rows, 2, 2))
    proposal = Proposal(np.zeros((rows, 1), np.int32), None, None, np.ones((rows, 1), bool))
    for rule, exact in ((Typical(), False), ("rejection", True)):
        got = accept(rule, specjax.row_keys(range(rows)), proposal, target_probs)
        first = np.where(np.asarray(got.num_accepted) == 1, 0, np.asarray(got.next_token))
        assert (p_value(np.bincount(first, minlength=2), np.asarray([0.6, 0.4])) > 1e-3) == exact


def test_a_generation_says_whether_its_rule_was_exact():
    options = {"drafter": draft_source("ngram", 3), "max_new_tokens": 12}
    plain = specjax.generate(target(), PROMPTS[:2], max_new_tokens=12)
    lossy = specjax.generate(target(), PROMPTS[:2], rule=Typical(), **options)
    assert plain.lossless and not lossy.lossless
    assert lossy.tokens == plain.tokens  # at temperature 0 only the argmax is plausible
    streamed = specjax.stream(target(), PROMPTS[0], rule=Typical(), **options)
    assert "".join(streamed) == plain.texts[0] and not streamed.result.lossless


@pytest.mark.parametrize("rule", ["typical", Typical(-0.1), Typical(alpha=2), Typical("x"), 3, Typical(True)])
def test_rules_that_are_none_are_refused_and_the_lossy_one_has_to_be_meant(rule):
    with pytest.raises(ValueError, match=r"specjax.Typical|from 0 to 1"):
        specjax.generate(target(), [2], rule=rule)
