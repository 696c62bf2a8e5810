"""Closed forms against float64 enumeration, and what they refuse."""

import itertools
import math

import numpy as np
import pytest

from specjax import theory
from tests.oracle import rules

P = (0.30, 0.25, 0.18, 0.12, 0.10, 0.05)
Q = (0.44, 0.15, 0.16, 0.05, 0.12, 0.08)
SIGMAS = 4.5  # of a fixed key: a failure is a bug, not bad luck


def random_laws(seed, vocab):
    p, q = np.random.default_rng(seed).dirichlet(np.ones(vocab), size=2)
    return p, q


def enumerated_tokens(p, q, k, rule):
    """Expected block length from the oracle's law over blocks."""
    laws = np.asarray(p, np.float64), np.asarray(q, np.float64)
    blocks = rules.blocks("iid", rules.chain_parents(k), lambda _: laws[0], lambda _: laws[1], rule)
    return sum(len(block) * mass for block, mass in blocks.items())


# --- closed forms


@pytest.mark.parametrize("a", [0.0, 0.1, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("k", [0, 1, 4, 30])
def test_expected_tokens_is_the_geometric_closed_form(a, k):
    assert theory.expected_tokens(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a), rel=1e-12)


def test_case_152_four_drafts_at_acceptance_08_give_33616_tokens_with_the_bonus():
    assert theory.expected_tokens(0.8, 4) == pytest.approx(3.3616, abs=1e-12)


def test_certain_acceptance_emits_the_whole_window_and_nearly_certain_acceptance_does_not_cancel():
    assert theory.expected_tokens(1, 7) == 8.0
    assert theory.expected_tokens(1 - 1e-15, 7) == pytest.approx(8.0, abs=1e-12)


def test_per_position_acceptances_are_multiplied_along_the_chain():
    chain = (0.9, 0.5, 0.2)
    products = [math.prod(chain[:i]) for i in range(4)]
    assert theory.expected_tokens(chain) == pytest.approx(sum(products), rel=1e-15)
    assert theory.expected_tokens(chain, 2) == pytest.approx(sum(products[:3]), rel=1e-15)
    assert theory.expected_tokens([0.7] * 5) == theory.expected_tokens(0.7, 5)


@pytest.mark.parametrize("seed", range(5))
def test_alpha_is_the_overlap_and_one_minus_the_total_variation(seed):
    p, q = random_laws(seed, 7)
    assert theory.alpha(p, q) == pytest.approx(sum(min(a, b) for a, b in zip(p, q)), rel=1e-12)
    assert theory.total_variation(p, q) == pytest.approx(1 - theory.alpha(p, q), abs=1e-12)
    assert theory.match_alpha(p, q) == pytest.approx(sum(a * b for a, b in zip(p, q)), rel=1e-12)
    assert theory.match_alpha(p, q) <= theory.alpha(p, q)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_per_round_equal_the_enumeration_of_every_block(k, seed):
    p, q = random_laws(seed, 4)
    rejection, block, match = (
        enumerated_tokens(p, q, k, rule) for rule in (rules.rejection_rule, rules.block_rule, rules.match_rule)
    )
    assert theory.expected_tokens(theory.alpha(p, q), k) == pytest.approx(rejection, rel=1e-10)
    assert theory.expected_tokens(theory.match_alpha(p, q), k) == pytest.approx(match, rel=1e-10)
    assert theory.expected_tokens_block(p, q, k) == pytest.approx(block, rel=1e-10)


@pytest.mark.parametrize("seed", range(10))
def test_block_is_never_shorter_than_rejection_and_equal_for_one_draft_and_for_point_masses(seed):
    p, q = random_laws(seed, 5)
    for k in range(6):
        rejection = theory.expected_tokens(theory.alpha(p, q), k)
        assert theory.expected_tokens_block(p, q, k) >= rejection - 1e-12
    assert theory.expected_tokens_block(p, q, 1) == pytest.approx(1 + theory.alpha(p, q), rel=1e-12)
    point = np.eye(5)[2]
    assert theory.expected_tokens_block(p, point, 4) == pytest.approx(theory.expected_tokens(p[2], 4), rel=1e-12)


# --- time


def test_best_k_of_the_textbook():
    assert theory.best_k(0.6, draft_cost=0.05) == 4
    assert theory.best_k(0.9, draft_cost=0.05) == 13
    assert theory.speed_up(0.9, 13, draft_cost=0.05) == pytest.approx(4.7, abs=0.05)


@pytest.mark.parametrize("a, c, v", [(0.6, 0.05, 1.0), (0.75, 0.1, 1.3), (0.9, 0.02, 1.6), (0.3, 0.5, 1.0)])
def test_best_k_is_the_argmax_of_the_speed_up(a, c, v):
    values = [1.0] + [(1 - a ** (k + 1)) / (1 - a) / (k * c + v) for k in range(1, 129)]
    best = theory.best_k(a, draft_cost=c, verify_cost=v)
    assert best == int(np.argmax(values))
    assert theory.speed_up(a, best, draft_cost=c, verify_cost=v) == pytest.approx(max(values), rel=1e-12)


def test_speculation_that_does_not_pay_is_not_recommended():
    assert theory.best_k(0.2, draft_cost=0.5) == 0
    assert theory.speed_up(0.2, 0, draft_cost=0.5, draft_overhead=3, verify_cost=1.6) == 1.0


def test_one_pass_drafters_pay_once_and_verification_may_depend_on_the_width():
    widths = []

    def verify(width):
        widths.append(width)
        return 1 + 0.05 * width

    speed = theory.speed_up((0.9, 0.8), draft_overhead=0.3, verify_cost=verify)
    assert speed == pytest.approx((1 + 0.9 + 0.72) / (0.3 + 1.15), rel=1e-12)
    assert widths == [3]
    assert theory.best_k((0.9, 0.8, 0.0), draft_overhead=0.3, verify_cost=verify) == 2


@pytest.mark.parametrize("k, c, v", [(1, 0.05, 1.1), (4, 0.05, 1.0), (8, 0.1, 1.6)])
def test_at_break_even_speculation_costs_what_it_saves(k, c, v):
    a = theory.break_even(k, draft_cost=c, verify_cost=v)
    assert a is not None
    assert theory.speed_up(a, k, draft_cost=c, verify_cost=v) == pytest.approx(1, rel=1e-12)


def test_break_even_at_its_ends():
    assert theory.break_even(1, draft_cost=0.2, verify_cost=1.1) == pytest.approx(0.3, abs=1e-12)
    assert theory.break_even(3) == 0.0  # free drafts
    assert theory.break_even(2, draft_cost=1) == 1.0
    assert theory.break_even(2, draft_cost=1.01) is None


def test_some_k_pays_as_soon_as_acceptance_exceeds_the_draft_cost():
    for a, c in itertools.product((0.1, 0.3, 0.7), repeat=2):
        assert (theory.best_k(a, draft_cost=c) > 0) == (a > c + 1e-12)


# --- arguments


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: theory.expected_tokens(1.2, 4), r"acceptance=1.2: must be a probability"),
        (lambda: theory.expected_tokens(math.nan, 4), "acceptance=nan: must be a probability"),
        (lambda: theory.expected_tokens((0.5, -0.1)), r"acceptance\[1\]=-0.1"),
        (lambda: theory.expected_tokens((0.5, None)), r"acceptance\[1\]=None"),
        (lambda: theory.expected_tokens(0.5, -1), "num_draft_tokens=-1: must be a whole number, 0 or more"),
        (lambda: theory.expected_tokens(0.5, 2.5), "num_draft_tokens=2.5"),
        *((lambda wrong=wrong: theory.expected_tokens(wrong, 2), "^acceptance=.*probability")
          for wrong in (None, "0.5", {0.5}, True, 10**400)),
        *((lambda wrong=wrong: theory.speed_up(0.5, 2, draft_cost=wrong), "^draft_cost=")
          for wrong in (None, "0.5", math.nan, [0.1], True)),
        (lambda: theory.best_k(None), "^acceptance=None"),
        (lambda: theory.best_k("0.9"), "^acceptance='0.9'"),
        (lambda: theory.speed_up(0.5, 2, verify_cost=lambda width: "1"), "^verify_cost='1'"),
        (lambda: theory.alpha(None, Q), "^p "),
        (lambda: theory.alpha("ab", Q), "^p='ab'"),
        (lambda: theory.alpha({1: 2}, Q), "^p="),
        (lambda: theory.simulate(P, Q, 4, rule=["match"]), r"rule=\['match'\]"),
        (lambda: theory.expected_tokens(0.5), "num_draft_tokens is missing"),
        (lambda: theory.expected_tokens((0.5, 0.5), 3), "acceptance has 2 positions"),
        (lambda: theory.alpha((0.5, 0.6), (0.5, 0.5)), "p sums to 1.1, not to 1"),
        (lambda: theory.alpha((0.5, 0.5), (1.5, -0.5)), "q: every probability"),
        (lambda: theory.alpha((0.5, math.nan), (0.5, 0.5)), "p: every probability"),
        (lambda: theory.alpha((1.0,), (0.5, 0.5)), "p has 1 tokens and q 2"),
        (lambda: theory.alpha([[1.0]], [[1.0]]), r"p has shape \(1, 1\)"),
        (lambda: theory.alpha([], []), r"p has shape \(0,\)"),
        (lambda: theory.speed_up(0.5, 2, draft_cost=-0.1), "draft_cost=-0.1"),
        (lambda: theory.speed_up(0.5, 2, draft_overhead=math.inf), "draft_overhead=inf"),
        (lambda: theory.speed_up(0.5, 2, verify_cost=0), "verify_cost=0"),
        (lambda: theory.best_k(0.5, longest=-1), "longest=-1"),
        (lambda: theory.break_even(0), "num_draft_tokens=0: must be a whole number, 1 or more"),
        (lambda: theory.expected_tokens_block(*random_laws(0, 300), 4), "too many different prefixes"),
        (lambda: theory.simulate(P, Q, 4, rule="typical"), "rule='typical': choose one of"),
        (lambda: theory.simulate(P, Q, 4, coupled=True), "need rule='match'"),
        (lambda: theory.simulate(P, Q, 4, rounds=0), "rounds=0"),
        (lambda: theory.simulate(P, Q, 4, seed=2**32), "seed=4294967296"),
        (lambda: theory.simulate(P, Q, -1), "num_draft_tokens=-1"),
    ],
)  # fmt: skip
def test_an_argument_that_makes_no_sense_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_arrays_are_welcome_as_acceptances():
    chain = np.asarray([0.9, 0.5, 0.2], np.float32)
    assert theory.expected_tokens(chain) == theory.expected_tokens([float(a) for a in chain])
    assert theory.best_k(chain, draft_cost=np.float32(0.05)) == theory.best_k(tuple(chain), draft_cost=0.05)
    assert theory.expected_tokens(np.asarray(0.5), np.int64(4)) == theory.expected_tokens(0.5, 4)
