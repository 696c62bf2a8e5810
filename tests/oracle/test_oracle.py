"""The oracle agrees with itself: exact rules give plain decoding, known-wrong ones give the published wrong numbers."""

import dataclasses

import numpy as np
import pytest

from tests.oracle import rules
from tests.oracle.hashlm import HashConfig, hash_logits, hash_params
from tests.oracle.joint import completed, joint, warped
from tests.oracle.warp import Options, margin, warp

TOPOLOGIES = {"chain": [-1, 0, 1], "star": [-1, -1, -1], "tree": [-1, -1, 0, 1], "deep": [-1, 0, 0, 1]}
CONFIG = HashConfig(3)
TARGET, DRAFT = hash_params(CONFIG, 0), hash_params(CONFIG, 1)


def law_of(params, options=None, prompt=(1, 2, 0)):
    return warped(lambda text: hash_logits(CONFIG, params, text)[-1], options or Options(), prompt)


def distance(blocks, p, length=4):
    return np.abs(completed(blocks, p, length) - joint(p, length)).sum()


def one_token(kind, parents, p, q, rule):
    """The law of the first emitted token, p and q the same at every position."""
    p, q = np.asarray(p, float), np.asarray(q, float)
    return completed(rules.blocks(kind, parents, lambda _: p, lambda _: q, rule), lambda _: p, 1)


def test_the_target_depends_on_its_whole_history():
    law = law_of(TARGET)
    for position in range(3):
        laws = [law(tuple(t if i == position else 0 for i in range(3))) for t in range(3)]
        assert min(np.abs(laws[0] - laws[1]).sum(), np.abs(laws[0] - laws[2]).sum()) > 0.02
    assert np.abs(law_of(TARGET, prompt=(2, 1, 0))(()) - law(())).sum() > 0.02  # and on the order


@pytest.mark.parametrize("options", [Options(), Options(top_k=2), Options(temperature=0.5, repetition_penalty=1.3)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kind", ["iid", "distinct", "top"])
def test_rejection_and_match_are_exact_on_every_topology(kind, topology, options):
    p, q = law_of(TARGET, options), law_of(DRAFT)
    for rule in (rules.rejection_rule, rules.match_rule):
        assert distance(rules.blocks(kind, TOPOLOGIES[topology], p, q, rule), p) < 1e-12


@pytest.mark.parametrize("kind", ["iid", "top"])
def test_block_is_exact_on_chains_and_accepts_at_least_as_much(kind):
    p, q = law_of(TARGET), law_of(DRAFT)
    block = rules.blocks(kind, [-1, 0, 1], p, q, rules.block_rule)
    plain = rules.blocks(kind, [-1, 0, 1], p, q, rules.rejection_rule)
    assert distance(block, p) < 1e-12

    def mean_length(blocks):
        return sum(len(tokens) * mass for tokens, mass in blocks.items())

    if kind == "iid":
        assert mean_length(block) > mean_length(plain) + 1e-3
    else:
        assert mean_length(block) == pytest.approx(mean_length(plain))


WRONG = {
    "resample from p (case 6)": ("iid", "chain", rules.wrong_resample_from_p),
    "softmax q for top tokens (case 4)": ("top", "chain", rules.wrong_q(lambda q, n: np.array([0.5, 0.3, 0.2]))),
    "raw q (case 1)": ("iid", "chain", rules.wrong_q(lambda q, n: q**2 / (q**2).sum())),
    "epsilon (case 9)": ("iid", "chain", rules.wrong_epsilon_in_residual(1e-2)),
    "flags counted (case 12)": ("iid", "chain", rules.wrong_count_accepted),
    "siblings against first p (case 85)": ("distinct", "star", rules.wrong_siblings_against_first_p),
    "dropped by own probability": ("iid", "chain", rules.wrong_drop_by_own_probability(0.3)),
    "lock-step": (
        "iid", "chain", lambda *arrays: rules.wrong_lockstep(*arrays, neighbour=0.6),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_negative_control_is_caught(name):
    kind, topology, rule = WRONG[name]
    p, q = law_of(TARGET), law_of(DRAFT)
    assert distance(rules.blocks(kind, TOPOLOGIES[topology], p, q, rule), p) > 1e-3


# --- the numbers of the published reports


def test_case_1_raw_q_in_the_ratio():
    raw, drawn = np.array([0.4, 0.3, 0.3]), np.array([4 / 7, 3 / 7, 0])
    p = [0.5, 0.3, 0.2]
    np.testing.assert_allclose(one_token("iid", [-1], p, drawn, rules.rejection_rule), p)
    wrong = one_token("iid", [-1], p, drawn, rules.wrong_q(lambda q, n: raw))
    np.testing.assert_allclose(wrong, [0.5714, 0.4286, 0], atol=1e-4)


def test_case_4_softmax_q_for_an_argmax_draft():
    p, q = [0.3, 0.7], np.array([0.6, 0.4])
    np.testing.assert_allclose(one_token("top", [-1], p, q, rules.rejection_rule), p)
    np.testing.assert_allclose(one_token("top", [-1], p, q, rules.wrong_q(lambda _, n: q)), [0.5, 0.5])


def test_case_6_resample_from_p():
    p, q = [0.9, 0.1], [0.5, 0.5]
    np.testing.assert_allclose(one_token("iid", [-1], p, q, rules.rejection_rule), p)
    np.testing.assert_allclose(one_token("iid", [-1], p, q, rules.wrong_resample_from_p), [0.86, 0.14])


def test_case_7_shared_uniform():
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.8, 0.1, 0.1])
    np.testing.assert_allclose(rules.wrong_shared_uniform(p, q), [0.2, 0.1667, 0.6333], atol=1e-4)


def test_case_9_epsilon_leaks_most_of_the_residual():
    vocab = 50_000
    p, q = np.full(vocab, 0.8 / (vocab - 1)), np.full(vocab, 1.0 / (vocab - 1))
    p[0], q[0] = 0.2, 0.0
    rest = np.maximum(p - q, 1e-5)
    assert 1 - rest[0] / rest.sum() == pytest.approx(0.71, abs=0.01)


@pytest.mark.parametrize(
    ("p", "rule", "wrong"),
    [
        ([0.3, 0.4, 0.3], rules.wrong_siblings_against_first_p, [0.3315, 0.462, 0.2065]),
        ([0.2, 0.3, 0.5], rules.wrong_siblings_against_first_p, [0.236, 0.474, 0.29]),
        ([0.3, 0.4, 0.3], rules.wrong_q(lambda _, n: np.array([0.6, 0.3, 0.1])), [0.3, 0.525, 0.175]),
    ],
)
def test_case_85_siblings_without_replacement(p, rule, wrong):
    q = [0.6, 0.3, 0.1]
    np.testing.assert_allclose(one_token("distinct", [-1, -1], p, q, rules.rejection_rule), p)
    np.testing.assert_allclose(one_token("distinct", [-1, -1], p, q, rule), wrong, atol=1e-3)


def test_case_16_equality_accepts_less_than_the_ratio():
    p = np.array([0.5, 0.3, 0.2])
    assert rules.accepted_mass(p, p) == 1
    blocks = rules.blocks("iid", [-1], lambda _: p, lambda _: p, rules.match_rule)
    assert sum(mass for tokens, mass in blocks.items() if len(tokens) == 2) == pytest.approx(0.38)


def test_case_13_joint_law_from_distinct_rows():
    table = {(): [0.6, 0.4], (0,): [0.5, 0.5], (1,): [0.1, 0.9]}
    np.testing.assert_allclose(joint(lambda c: np.array(table[c[-1:]]), 2).ravel(), [0.30, 0.30, 0.04, 0.36])


# --- the warp oracle on cases worked out by hand


@pytest.mark.parametrize(
    ("logits", "options", "law"),
    [
        (np.log([0.4, 0.3, 0.2, 0.1]), Options(top_p=0.8), [0.4444, 0.3333, 0.2222, 0]),
        (np.log([0.5, 0.41, 0.09]), Options(top_p=0.9), [0.5495, 0.4505, 0]),
        (np.log([0.5, 0.41, 0.09]), Options(top_p=1e-9), [1, 0, 0]),
        ([2, 1, 1, 1], Options(top_k=2), [0.7311, 0.2689, 0, 0]),
        (np.log([0.6, 0.4]), Options(temperature=0.5), [0.6923, 0.3077]),
        ([1.0, 3.0, 3.0], Options(temperature=0), [0, 1, 0]),
        (np.log([0.5, 0.3, 0.2]), Options(min_p=0.5), [0.625, 0.375, 0]),
        (np.log([0.5, 0.3, 0.2]), Options(bias={0: -np.inf}), [0, 0.6, 0.4]),
    ],
)
def test_warp_oracle_by_hand(logits, options, law):
    np.testing.assert_allclose(warp(logits, options), law, atol=1e-4)


def test_warp_oracle_penalties_by_hand():
    options = Options(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    got = warp([1.0, -1.0, 0.5], options, history=(0, 0, 1))
    want = np.exp([1.0 / 2 - 0.5 - 2 * 0.25, -2.0 - 0.5 - 0.25, 0.5])
    np.testing.assert_allclose(got, want / want.sum())


def test_warp_oracle_holds_the_end_back():
    options = Options(min_new_tokens=2, eos_ids=(0,))
    assert warp([9.0, 0, 0], options, emitted=1)[0] == 0
    assert warp([9.0, 0, 0], options, emitted=2)[0] > 0.9


def test_order_of_filters_matters_and_is_fixed():
    logits, options = np.log([0.4, 0.3, 0.2, 0.1]), Options(top_k=2, top_p=0.5)
    np.testing.assert_allclose(warp(logits, options), [1, 0, 0, 0])  # 0.4 / 0.7 > 0.5: top-p sees what top-k left
    np.testing.assert_allclose(warp(logits, dataclasses.replace(options, top_k=0))[:2].sum(), 1)
    assert margin(logits, options) == pytest.approx(0.4 / 0.7 - 0.5)
