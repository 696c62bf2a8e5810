"""Rounds simulated through the library's own `accept`, against closed forms and p."""

import math

import numpy as np
import pytest

from specjax import simulation, theory

P = (0.30, 0.25, 0.18, 0.12, 0.10, 0.05)
Q = (0.44, 0.15, 0.16, 0.05, 0.12, 0.08)
SIGMAS = 4.5  # of a fixed key: a failure is a bug, not bad luck


@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_simulated_rounds_agree_with_the_closed_forms(rule):
    k, made = 4, theory.simulate(P, Q, 4, rule=rule, rounds=40_000)
    tokens = {
        "rejection": theory.expected_tokens(theory.alpha(P, Q), k),
        "block": theory.expected_tokens_block(P, Q, k),
        "match": theory.expected_tokens(theory.match_alpha(P, Q), k),
    }[rule]
    assert made.rounds == 40_000
    assert abs(made.tokens_per_round - tokens) < SIGMAS * made.tokens_per_round_error
    assert made.tokens.sum() == pytest.approx(made.tokens_per_round * made.rounds)
    assert_law_is_p(made)
    if rule != "block":
        a = theory.alpha(P, Q) if rule == "rejection" else theory.match_alpha(P, Q)
        judged = made.lengths[::-1].cumsum()[::-1]
        for position, measured in enumerate(made.per_position):
            assert measured is not None
            assert abs(measured - a) < SIGMAS * math.sqrt(a * (1 - a) / judged[position]), position


def assert_law_is_p(made, p=P):
    for measured, mass in zip(made.law, p, strict=True):  # binomial: tokens of a round are independent under p
        assert abs(measured - mass) < SIGMAS * math.sqrt(mass * (1 - mass) / made.tokens.sum())


def test_the_numbers_of_the_textbook_example():
    made = theory.simulate(P, Q, 4, rounds=200_000)
    assert theory.alpha(P, Q) == pytest.approx(0.810, abs=1e-12)
    assert made.alpha == pytest.approx(0.810, abs=0.002)
    assert made.tokens_per_round == pytest.approx(3.428, abs=0.01)
    assert np.abs(made.law - P).max() < 0.002


def test_expected_tokens_of_the_measured_positions_is_the_measured_tokens_per_round():
    made = theory.simulate(P, Q, 4, rule="block", rounds=40_000)
    assert theory.expected_tokens([a or 0.0 for a in made.per_position]) == pytest.approx(made.tokens_per_round)


def test_coupled_drafts_are_accepted_more_often_than_independent_ones_and_emit_p():
    made = theory.simulate(P, Q, 4, rule="match", coupled=True, rounds=20_000)
    bound = theory.alpha(P, Q) / (2 - theory.alpha(P, Q))  # (1 - TV) / (1 + TV), Daliri et al., arXiv 2408.07978
    assert bound - 0.02 < made.alpha < theory.alpha(P, Q) + 0.02
    assert made.alpha > 2 * theory.match_alpha(P, Q)
    assert_law_is_p(made)


def test_chunks_do_not_change_the_counts_and_progress_is_reported(monkeypatch):
    whole = theory.simulate(P, Q, 4, rounds=1_000, seed=3)
    monkeypatch.setattr(simulation, "CHUNK_ROUNDS", 300)
    seen = []
    parts = theory.simulate(P, Q, 4, rounds=1_000, seed=3, progress=lambda *counts: seen.append(counts))
    np.testing.assert_array_equal(whole.lengths, parts.lengths)
    np.testing.assert_array_equal(whole.tokens, parts.tokens)
    assert seen == [(300, 1_000), (600, 1_000), (900, 1_000), (1_000, 1_000)]


def test_another_seed_gives_other_rounds_and_the_same_seed_the_same():
    first, again, other = (theory.simulate(P, Q, 4, rounds=1_000, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


def test_without_drafts_a_round_is_a_plain_draw():
    made = theory.simulate(P, Q, 0, rounds=20_000)
    assert (made.tokens_per_round, made.tokens_per_round_error, made.alpha, made.per_position) == (1.0, 0.0, None, [])
    assert_law_is_p(made)


def test_disjoint_laws_accept_nothing_and_equal_laws_everything():
    never = theory.simulate((0.5, 0.5, 0, 0, 0, 0), (0, 0, 1, 0, 0, 0), 4, rounds=500)
    assert (never.alpha, never.per_position) == (0.0, [0.0, None, None, None])
    assert never.tokens.tolist()[2:] == [0, 0, 0, 0]
    assert theory.simulate(P, P, 4, rounds=500).tokens_per_round == 5.0
