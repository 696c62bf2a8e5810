"""The joint law of five tokens equals plain decoding's, over several rounds, for every rule, drafter and sampler.

The target depends on its whole history through the cache, so a slot kept wrongly, a position, a penalty count or a
noise used twice shows as a wrong law. All option sets run as rows of one batch.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax import LanguageModel
from tests.doubles import hash_lm, sampled, table_lm
from tests.exactness.harness import PAD, PROMPT, assert_law, emit, histogram, padded, target_laws
from tests.oracle.hashlm import HashConfig, hash_logits, hash_params
from tests.oracle.joint import joint
from tests.oracle.warp import Options, warp

ROOT = Path(__file__).resolve().parents[2]
CONFIG, LENGTH, ROWS = HashConfig(3), 5, 5000
MODEL, PARAMS = hash_lm(CONFIG, seed=0)
DRAFT = LanguageModel(*hash_lm(HashConfig(3, num_layers=1), seed=5))
TARGET = LanguageModel(MODEL, PARAMS)
Q = np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.25, 0.35, 0.4]])
OPTIONS = [
    Options(),
    Options(temperature=0.6),
    Options(temperature=1.5),
    Options(top_k=2),
    Options(top_p=0.8),
    Options(min_p=0.4),
    Options(repetition_penalty=1.8),
    Options(presence_penalty=1.2),
    Options(frequency_penalty=0.9),
    Options(bias={0: 1.0, 2: -0.7}),
    Options(bias={1: -np.inf}),
    Options(temperature=0.8, top_k=2, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4),
]
TREE = [-1, -1, 0, 1]
QUICK = {
    "rejection, chain": ("rejection", lambda: sampled(Q, num_draft_tokens=3)),
    "rejection, chain of sparse laws, ragged": (
        "rejection", lambda: sampled(Q, num_draft_tokens=3, sparse="rows", ragged="path"),
    ),
    "rejection, i.i.d. siblings": ("rejection", lambda: sampled(Q, TREE)),
    "rejection, siblings without replacement": ("rejection", lambda: sampled(Q, TREE, kind="distinct")),
    "rejection, top children": ("rejection", lambda: sampled(Q, TREE, kind="top")),
    "rejection, model": ("rejection", lambda: specjax.drafters.model(DRAFT, TARGET, 3)),
    "block, chain": ("block", lambda: sampled(Q, num_draft_tokens=3)),
    "match, tree": ("match", lambda: sampled(Q, TREE, kind="distinct", ragged="text")),
    "match, plain decoding": ("match", specjax.plain),
    "rejection, plain decoding": ("rejection", specjax.plain),
}  # fmt: skip
FULL = {
    "rejection, chain of shared sparse laws": ("rejection", lambda: sampled(Q, num_draft_tokens=2, sparse="shared")),
    "rejection, chain of top tokens": ("rejection", lambda: sampled(Q, num_draft_tokens=3, kind="top")),
    "rejection, tree by row, ragged": (
        "rejection", lambda: sampled(Q, TREE, kind="distinct", dynamic=True, ragged="text"),
    ),
    "rejection, star": ("rejection", lambda: sampled(Q, [-1, -1, -1], kind="distinct", sparse="rows")),
    "rejection, deep tree": ("rejection", lambda: sampled(Q, [-1, 0, 0, 1, 1, 2, 3])),
    "rejection, ngram": ("rejection", lambda: specjax.drafters.ngram(3)),
    "block, sparse, ragged": ("block", lambda: sampled(Q, num_draft_tokens=3, sparse="shared", ragged="text")),
    "block, chain of one": ("block", lambda: sampled(Q, num_draft_tokens=1)),
    "block, top tokens": ("block", lambda: sampled(Q, num_draft_tokens=2, kind="top")),
    "block, model": ("block", lambda: specjax.drafters.model(DRAFT, TARGET, 4)),
    "match, chain": ("match", lambda: sampled(Q, num_draft_tokens=3)),
    "match, coupled model": ("match", lambda: specjax.drafters.model(DRAFT, TARGET, 3, coupled=True)),
    "match, ngram": ("match", lambda: specjax.drafters.ngram(3)),
}  # fmt: skip


@pytest.fixture(scope="module")
def laws():
    return target_laws(CONFIG, 0, OPTIONS, LENGTH)


def record(name, p_values):
    """Leaves the p-values for scripts/exactness_table.py."""
    folder = ROOT / ".cache" / "exactness"
    folder.mkdir(parents=True, exist_ok=True)
    columns = [", ".join(f"{k} {v}" for k, v in vars(o).items() if v != getattr(Options(), k)) for o in OPTIONS]
    entry = {"name": name, "rows": ROWS, "p_values": dict(zip(columns, p_values, strict=True))}
    (folder / f"{name}.json").write_text(json.dumps(entry))


def check(name, rule, drafter, laws):
    rounds = []

    def sample(seed):
        tokens, taken = emit(MODEL, PARAMS, drafter, rule, OPTIONS, LENGTH, ROWS, seed)
        rounds.append(taken)
        return np.stack([histogram(rows, 3) for rows in tokens])

    record(name, assert_law(sample, laws, OPTIONS))
    # One round cannot show noise that is used twice or a cache that is wrong afterwards.
    assert (rounds[0] >= 3).mean() > 0.15, "too few rows took three rounds for this to mean much"


@pytest.mark.parametrize("name", QUICK)
def test_five_tokens_follow_the_law_of_plain_decoding(name, laws):
    rule, drafter = QUICK[name]
    check(name, rule, drafter(), laws)


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_five_tokens_follow_the_law_of_plain_decoding_more_drafters(name, laws):
    rule, drafter = FULL[name]
    check(name, rule, drafter(), laws)


@pytest.mark.full
@pytest.mark.parametrize("rule", ["rejection", "block", "match"])
def test_six_tokens_follow_the_law_of_plain_decoding(rule):
    options = [Options(), Options(temperature=0.7, top_p=0.9, frequency_penalty=0.3)]
    laws = target_laws(CONFIG, 0, options, 6)

    def sample(seed):
        tokens, rounds = emit(MODEL, PARAMS, sampled(Q, num_draft_tokens=2), rule, options, 6, 30_000, seed)
        assert (rounds >= 3).mean() > 0.5
        return np.stack([histogram(rows, 3) for rows in tokens])

    assert_law(sample, laws, options)


@pytest.fixture(scope="module")
def plain_tokens():
    return emit(MODEL, PARAMS, specjax.plain(), "match", OPTIONS, LENGTH, ROWS, 0)[0]


MATCH_FULL = [pytest.param(name, marks=pytest.mark.full) for name in FULL if name.startswith("match")]


@pytest.mark.parametrize("name", ["match, tree", *MATCH_FULL])
def test_match_says_the_same_whatever_drafts(name, plain_tokens):
    """Same seeds, token for token, as no drafter at all: 60,000 rows under every option."""
    drafter = {**QUICK, **FULL}[name][1]()
    np.testing.assert_array_equal(emit(MODEL, PARAMS, drafter, "match", OPTIONS, LENGTH, ROWS, 0)[0], plain_tokens)


def stopped_law(options, eos, length):
    """Joint law in histogram cells of texts that end at ``eos``: PAD behind it."""
    params, law = hash_params(CONFIG, 0), np.zeros((4,) * length)

    def extend(text, mass):
        new = text[len(PROMPT) :]
        if len(new) == length or (new and new[-1] in eos):
            law[*new, *[3] * (length - len(new))] += mass
            return
        following = warp(hash_logits(CONFIG, params, text)[-1], options, text, len(new))
        for token in np.flatnonzero(following):
            extend((*text, int(token)), mass * following[token])

    extend(PROMPT, 1.0)
    return law


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_case_68_end_tokens_inside_blocks_stop_the_text_and_are_held_back(rule):
    options = [Options(min_new_tokens=n, eos_ids=(2,)) for n in (0, 1, 2, 3)]
    laws = [stopped_law(o, (2,), LENGTH) for o in options]

    def sample(seed):
        drafter = sampled(Q, num_draft_tokens=3)
        tokens, _ = emit(MODEL, PARAMS, drafter, rule, options, LENGTH, ROWS, seed, eos_ids=(2,))
        assert (tokens[0] == PAD).any()
        return np.stack([histogram(rows, 3) for rows in tokens])

    assert_law(sample, laws, options)


def test_a_larger_vocabulary_with_two_drafted_tokens():
    config = HashConfig(4)
    model, params = hash_lm(config, seed=2)
    q = np.random.default_rng(3).dirichlet(np.ones(4), 4)
    options = [Options(), Options(top_k=3, top_p=0.9)]
    laws = target_laws(config, 2, options, 3)

    def sample(seed):
        tokens, _ = emit(model, params, sampled(q, num_draft_tokens=2), "rejection", options, 3, 20_000, seed)
        return np.stack([histogram(rows, 4) for rows in tokens])

    assert_law(sample, laws, options)


def test_prompts_of_different_lengths_side_by_side_each_have_their_own_law():
    prompts = [(2,), (1, 2, 0), (0, 0, 1, 1, 2, 0, 1)]  # shorter, equal to and longer than a prefill chunk
    options = [Options(temperature=0.8)] * 3
    laws = [target_laws(CONFIG, 0, options[:1], 4, prompt)[0] for prompt in prompts]

    def sample(seed):
        drafter = specjax.drafters.model(DRAFT, TARGET, 3)
        tokens, _ = emit(MODEL, PARAMS, drafter, "rejection", options, 4, ROWS, seed, prompts=prompts)
        return np.stack([histogram(rows, 3) for rows in tokens])

    assert_law(sample, laws, prompts)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_case_13_a_target_of_distinct_rows_gives_the_joint_law_of_its_table(rule):
    table = np.array([[0.5, 0.5, 0.0], [0.1, 0.9, 0.0], [0.6, 0.4, 0.0]])
    exact = joint(lambda c: table[c[-1] if c else 2], 4)
    np.testing.assert_allclose(exact.sum((2, 3))[:2, :2].ravel(), [0.30, 0.30, 0.04, 0.36])
    with np.errstate(divide="ignore"):
        params = np.log(table).astype(np.float32)

    def sample(seed):
        drafter = sampled(Q, num_draft_tokens=3)
        tokens, _ = emit(table_lm(3), params, drafter, rule, [Options()], 4, 20_000, seed, prompts=[(2,)])
        return np.stack([histogram(rows, 3) for rows in tokens])

    assert_law(sample, [padded(exact)], ["table"])


def test_generate_says_what_the_rounds_say():
    drafter, count = sampled(Q, num_draft_tokens=3), 64
    tokens, _ = emit(MODEL, PARAMS, drafter, "block", [Options(temperature=0.8)], LENGTH, count, 1)
    out = specjax.generate(
        TARGET, [list(PROMPT)] * count, drafter=drafter, rule="block", max_new_tokens=LENGTH, temperature=0.8,
        seed=[count + row for row in range(count)], eos_ids=[],
    )  # fmt: skip
    np.testing.assert_array_equal(out.tokens, tokens[0])
    assert out.finish_reasons == ["length"] * count


def test_every_sampling_option_is_exercised():
    used = {name for o in OPTIONS for name, value in vars(o).items() if value != getattr(Options(), name)}
    used |= {"min_new_tokens", "eos_ids"}  # test_case_68_*
    assert used == set(vars(Options()))
    known = {name.replace("bias_ids", "bias") for name in specjax.Sampling._fields}
    assert known == used, "a sampling option without a test of its joint law"


def test_padding_cell_is_empty_without_stops(laws):
    tokens, _ = emit(MODEL, PARAMS, specjax.plain(), "match", OPTIONS[:1], LENGTH, 100, 0)
    assert (tokens != PAD).all()
    assert all(law.sum() == pytest.approx(1) for law in laws)
    assert padded(np.ones((3, 3))).sum() == 9
    assert jax.device_count() == 8
