"""Prompt lookup: what is proposed is what followed the last tokens before, and nothing else."""

import functools

import jax
import numpy as np
import pytest

import specjax
from specjax import drafters
from tests.small import V, dictated, padded, position_lm

X = -1  # not proposed


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draft(draft, n, text, keys, sampling):
    return draft((), keys, (), text, sampling, n)[0]


def propose(texts, n=4, *, eos_ids=(), fill=0, longest=3, shortest=1):
    """Proposed tokens [B, n], X where nothing is proposed."""
    drafter = drafters.ngram(n, max_ngram=longest, min_ngram=shortest)
    sampling = specjax.make_sampling(len(texts), V, eos_ids=eos_ids)
    keys = specjax.row_keys(range(len(texts)))
    proposal = _draft(drafter.draft, n, padded(texts, 16, fill), keys, sampling)
    assert proposal.probs is None and proposal.parents is None
    valid = np.asarray(proposal.valid)
    assert (np.diff(valid.astype(int), axis=1) <= 0).all()  # no gaps
    return np.where(valid, proposal.tokens, X).tolist()


def one(text, **options):
    return propose([text], **options)[0]


def test_nothing_is_proposed_where_nothing_matches():
    """Case 91: no made-up id 0; the suffix does not match itself (case 92)."""
    assert one([1, 2, 3]) == [X] * 4
    assert one([5]) == [X] * 4
    assert one([0]) == [X] * 4


def test_a_round_without_a_match_is_a_plain_step():
    """Case 91: nothing proposed, judged or accepted; as many rounds as plain decoding."""
    text = [2, *range(3, 15)]
    lm = position_lm(dictated(text, V))
    stats = specjax.generate(lm, [[2]], drafter=drafters.ngram(4, min_ngram=1), max_new_tokens=12).stats
    assert (stats.rounds, stats.proposed, stats.acceptance_rate, stats.alpha) == (12, 0, None, None)


def test_the_continuation_of_an_earlier_match_is_proposed_up_to_the_end_of_the_text():
    """Case 92: overlapping matches are fine, what is not there is not proposed."""
    assert one([1, 2, 3, 4, 1, 2]) == [3, 4, 1, 2]
    assert one([1, 2, 1, 2]) == [1, 2, X, X]
    assert one([7, 7, 7, 7]) == [7, X, X, X]
    assert one([7, 7]) == [7, X, X, X]
    assert one([1, 2, 3, 9, 1, 2, 3], n=6) == [9, 1, 2, 3, X, X]


def test_a_full_buffer_is_not_read_past_its_end():
    """Case 92: the text fills its buffer to the last slot; nothing wraps around."""
    text = [9, 8, *range(1, 13), 9, 8]
    assert len(text) == 16 and one(text, n=7) == [1, 2, 3, 4, 5, 6, 7]
    assert one([5, *[3] * 14, 5], n=7) == [3] * 7
    assert one([8, *[3] * 13, 4, 9], n=7) == [X] * 7  # [9, 8] would match across the seam


def test_the_longest_match_wins_then_the_most_recent():
    """Case 94."""
    assert one([1, 2, 3, 5, 9, 3, 6, 1, 2, 3], longest=3) == [5, 9, 3, 6]  # three tokens beat one
    assert one([1, 2, 3, 5, 9, 3, 6, 1, 2, 3], longest=1) == [6, 1, 2, 3]  # the last 3 but itself
    assert one([1, 2, 4, 1, 2, 5, 1, 2], longest=2) == [5, 1, 2, X]
    assert one([4, 2, 5, 3, 2, 6, 4, 2], longest=9) == [5, 3, 2, 6]  # as long as there is, no longer


def test_matches_shorter_than_the_minimum_propose_nothing():
    """Case 94: n_min = 3 and only a 2-match."""
    assert one([9, 1, 2, 5, 3, 1, 2], shortest=3) == [X] * 4
    assert one([9, 1, 2, 5, 9, 1, 2], shortest=3) == [5, 9, 1, 2]
    assert one([1, 2, 5, 9, 1, 2], shortest=3) == [X] * 4  # the start of the text cuts the match to 2


def test_generated_tokens_are_searched_too():
    """Case 94: a text that repeats itself only in what was generated."""
    text = [2, *([3, 4, 5, 6] * 6)]
    lm = position_lm(dictated(text, V))
    stats = specjax.generate(lm, [[2]], drafter=drafters.ngram(4, min_ngram=1), max_new_tokens=24).stats
    assert stats.alpha == 1.0 and stats.accepted >= 14


def test_padding_and_neighbours_are_no_context():
    """Case 96: padding is id 0 and the text ends in a real 0; any padding, any neighbour, the same proposal."""
    texts = [[5, 0, 7, 0], [3, 0], [0, 0, 4], [1, 2, 3, 4, 5, 6, 1]]
    expected = [[7, 0, X, X], [X] * 4, [X] * 4, [2, 3, 4, 5]]
    for fill in (0, 3, 4, 7):
        assert propose(texts, fill=fill) == expected
    assert [one(text) for text in texts] == expected


def test_nothing_is_proposed_behind_an_end_id():
    """Case 69: a b EOS c d a b."""
    text = [2, 3, 1, 4, 5, 2, 3]
    assert one(text, eos_ids=[1]) == [1, X, X, X]
    assert one(text, eos_ids=[9, 4]) == [1, 4, X, X]
    assert one(text, eos_ids=[]) == [1, 4, 5, 2]


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_looked_up_token_is_a_point_mass(rule):
    """Cases 4 and 97: p = (.3, .7), 0 is proposed: the law stays p, and a rejection never gives 0."""
    rows = 20_000
    target = np.broadcast_to(np.array([0.3, 0.7], np.float32), (rows, 2, 2))
    tokens = np.zeros((rows, 1), np.int32)
    proposal = specjax.Proposal(jax.numpy.asarray(tokens), None, None, jax.numpy.ones((rows, 1), bool))
    got = specjax.accept(rule, specjax.row_keys(np.arange(rows)), proposal, jax.numpy.asarray(target))
    accepted = np.asarray(got.num_accepted) == 1
    assert abs(accepted.mean() - 0.3) < 5 * (0.21 / rows) ** 0.5
    assert (np.asarray(got.next_token)[~accepted] == 1).all()


def test_settings_that_make_no_sense_are_refused():
    """Static settings fail where they are given."""
    for settings, message in (
        ({"num_draft_tokens": 0}, r"num_draft_tokens=0.*1 or more"),
        ({"min_ngram": 0}, r"min_ngram=0"),
        ({"max_ngram": 1, "min_ngram": 2}, r"min_ngram=2, max_ngram=1"),
    ):
        with pytest.raises(ValueError, match=message):
            drafters.ngram(**settings)
