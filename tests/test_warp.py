"""logits -> law against the float64 oracle: every option alone, in pairs, mixed in one batch, with ties and bans."""

import dataclasses
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import specjax
from specjax import Sampling, Text
from tests.oracle import warp as oracle
from tests.oracle.warp import Options

V, S = 12, 16
LEVELS = {
    "temperature": (1.0, 0.0, 0.5, 2.0),
    "top_k": (0, 1, 3, V + 5),
    "top_p": (1.0, 0.7, 1e-9),
    "min_p": (0.0, 0.3, 1.0),
    "repetition_penalty": (1.0, 1.3, 0.7),
    "presence_penalty": (0.0, 0.7, -0.4),
    "frequency_penalty": (0.0, 0.35, -0.2),
    "min_new_tokens": (0, 3, 4),
    "bias": ({}, {2: 1.5, 7: -0.5}, {0: -np.inf, 5: -np.inf, 3: 0.25}),
}


def pairwise(levels):
    """Option sets in which every pair of levels of two options occurs, chosen greedily."""
    rng = np.random.default_rng(0)
    names = list(levels)
    sizes = [len(levels[name]) for name in names]
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }

    def covered(row):
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(names)), 2)}

    rows = []
    while missing:
        i, a, j, b = min(missing)
        tries = rng.integers(0, sizes, (40, len(names)))
        tries[:, i], tries[:, j] = a, b
        best = max(map(tuple, tries), key=lambda row: len(covered(row) & missing))
        missing -= covered(best)
        rows.append({name: levels[name][level] for name, level in zip(names, best)})
    return rows


def sampling_of(options, vocab=V, eos_ids=()) -> Sampling:
    """`Options` of several rows as the library's arrays."""
    values = {
        field.name: [getattr(o, field.name) for o in options]
        for field in dataclasses.fields(Options)
        if field.name not in ("bias", "eos_ids")
    }
    return specjax.make_sampling(
        len(options), vocab, **values, logit_bias=[dict(o.bias) for o in options], eos_ids=eos_ids
    )


def text_of(histories, prompt_lengths, capacity=S) -> Text:
    """Right-padded texts; the padding is token 0, which must not be counted."""
    tokens = np.zeros((len(histories), capacity), np.int32)
    for row, history in enumerate(histories):
        tokens[row, : len(history)] = history
    lengths = jnp.array([len(h) for h in histories], jnp.int32)
    return Text(jnp.array(tokens), lengths, jnp.array(prompt_lengths, jnp.int32))


warp = jax.jit(specjax.warp)


def check(logits, options, histories=None, prompt_lengths=None, atol=3e-6):
    """One call for all rows against the oracle row by row; rows within rounding of a threshold are not allowed."""
    logits = np.asarray(logits, np.float32)
    histories = [()] * len(options) if histories is None else histories
    prompt_lengths = [len(h) for h in histories] if prompt_lengths is None else prompt_lengths
    eos_ids = options[0].eos_ids
    text = text_of(histories, prompt_lengths)
    got = np.asarray(warp(jnp.array(logits[:, None]), sampling_of(options, logits.shape[1], eos_ids), text))[:, 0]
    for row, (option, history, start) in enumerate(zip(options, histories, prompt_lengths)):
        emitted = len(history) - start
        assert oracle.margin(logits[row], option, history, emitted) > 1e-5, "the input sits on a threshold"
        want = oracle.warp(logits[row], option, history, emitted)
        np.testing.assert_allclose(got[row], want, atol=atol, err_msg=f"row {row}: {option}, history {history}")
        np.testing.assert_array_equal(got[row] > 0, want > 1e-12, err_msg=f"row {row}: {option}")
    return got


def test_every_pair_of_option_values_mixed_in_one_batch():
    rows = [Options(**values, eos_ids=(1, 4)) for values in pairwise(LEVELS)]
    assert len(rows) >= 16
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(len(rows), V)) * 2
    logits[::3, 4] = logits[::3, 6]  # some ties
    logits[1::5, 8] = -np.inf
    histories = [rng.integers(0, V, rng.integers(3, 10)).tolist() for _ in rows]
    check(logits, rows, histories, [2] * len(rows))


VALUES = st.sampled_from([-np.inf, *np.arange(-8, 9) / 4.0])
ROW = st.fixed_dictionaries(
    {
        "logits": st.lists(VALUES, min_size=8, max_size=8).filter(lambda row: np.isfinite(row).any()),
        "history": st.lists(st.integers(0, 7), max_size=8),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 1, 2, 3, 5, 8]),
        "top_p": st.sampled_from([1.0, 0.03, 0.31, 0.617, 0.953]),
        "min_p": st.sampled_from([0.0, 0.11, 0.53]),
        "repetition_penalty": st.sampled_from([1.0, 2.0]),  # dyadic: ties stay ties in float32
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.25]),
    }
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ROW, min_size=8, max_size=8))
def test_random_rows_full_of_ties_and_bans(rows):
    logits, options, histories = [], [], []
    for row in rows:
        row = dict(row)
        x, history = np.array(row.pop("logits")), row.pop("history")
        option = Options(**row)
        if oracle.margin(x, option, history) < 1e-5:
            option = dataclasses.replace(option, top_p=1.0, min_p=0.0)
        logits.append(x), options.append(option), histories.append(history)
    check(logits, options, histories)


def test_large_vocabulary_needs_no_sort_to_be_right():
    rng = np.random.default_rng(2)
    logits = np.concatenate([rng.normal(size=(6, 5000)) * scale for scale in (0.5, 3.0)])
    options = [
        Options(temperature=t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in [(1, 0, 0.9, 0), (0.7, 50, 0.95, 0), (1.3, 0, 0.5, 0.01), (1, 7, 1, 0), (2, 0, 0.99, 0.05)]
    ]
    chosen = [(row, o) for row in logits for o in options if oracle.margin(row, o) > 1e-5]
    assert len(chosen) > 30
    check(np.stack([row for row, _ in chosen]), [o for _, o in chosen], atol=1e-5)


# --- ties, case 74


@pytest.mark.parametrize(
    ("logits", "options", "kept"),
    [
        ([2, 1, 1, 1], Options(top_k=2), [0, 1]),
        ([1, 1, 1, 1], Options(top_k=3), [0, 1, 2]),
        ([1, 2, 1, 2], Options(top_k=1), [1]),
        ([0, -0.0, -1, 0], Options(top_k=2), [0, 1]),
        ([1, 1, 1, 1], Options(top_p=0.6), [0, 1, 2]),
        ([2, 1, 1, 1], Options(top_p=0.6), [0, 1]),
        ([3, 3, 1, 1], Options(temperature=0), [0]),
    ],
)
def test_ties_are_cut_by_rank_the_lower_id_first(logits, options, kept):
    (law,) = check(np.array([logits]), [options])
    assert np.flatnonzero(law).tolist() == kept


def test_a_thousand_equal_logits_are_cut_by_rank():
    (law,) = check(np.zeros((1, 1000)), [Options(top_p=0.5005)])
    assert np.flatnonzero(law).tolist() == list(range(501))


# --- nucleus boundary, case 72


@pytest.mark.parametrize(
    ("probs", "top_p", "law"),
    [
        ([0.4, 0.3, 0.2, 0.1], 0.8, [0.4444, 0.3333, 0.2222, 0]),
        ([0.5, 0.41, 0.09, 0], 0.9, [0.5495, 0.4505, 0, 0]),
        ([0.5, 0.41, 0.09, 0], 1e-9, [1, 0, 0, 0]),
    ],
)
def test_the_token_that_crosses_top_p_is_kept(probs, top_p, law):
    with np.errstate(divide="ignore"):
        (got,) = check(np.log([probs]), [Options(top_p=top_p)])
    np.testing.assert_allclose(got, law, atol=1e-4)


# --- temperature, cases 26 and 27


def test_greedy_rows_in_a_mixed_batch_are_point_masses_and_leave_the_others_alone():
    logits = np.random.default_rng(3).normal(size=(3, V))
    got = check(logits, [Options(temperature=0), Options(), Options(temperature=0)])
    assert got[0].max() == got[2].max() == 1.0
    alone = warp(jnp.array(logits[1:2, None], jnp.float32), sampling_of([Options()]), text_of([()], [0]))
    np.testing.assert_array_equal(got[1], alone[0, 0])


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-30, 1e-39])
def test_tiny_temperatures_are_the_argmax(temperature):
    logits = np.random.default_rng(4).normal(size=(6, V)) * 30
    options = [Options(temperature=temperature, top_p=p, top_k=k) for p in (1.0, 0.5) for k in (0, 1, 4)]
    got = warp(jnp.array(logits[:, None], jnp.float32), sampling_of(options), text_of([()] * 6, [0] * 6))
    np.testing.assert_array_equal(got[:, 0], np.eye(V)[logits.argmax(-1)])


@pytest.mark.parametrize("temperature", [-1.0, np.nan, np.inf])
def test_temperatures_without_a_law_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        specjax.make_sampling(1, V, temperature=temperature)


# --- rows without a law, case 30


def test_a_row_whose_last_id_is_banned_has_no_law_and_says_so():
    logits = np.full((2, V), -np.inf, np.float32)
    logits[:, 3] = 1.0
    options = [Options(top_k=1, bias={3: -np.inf}), Options(top_k=1)]
    got = warp(jnp.array(logits[:, None]), sampling_of(options), text_of([(), ()], [0, 0]))[:, 0]
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(got[1], np.eye(V)[3])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_poisoned_row_is_all_nan_and_its_neighbours_are_not(poison, temperature):
    logits = np.random.default_rng(5).normal(size=(2, 3, V)).astype(np.float32)
    logits[1, 2] = poison if poison == -np.inf else np.where(np.arange(V) == 4, poison, logits[1, 2])
    options = [Options(temperature=temperature, top_p=0.9, top_k=5)] * 2
    got = np.array(warp(jnp.array(logits), sampling_of(options), text_of([(), ()], [0, 0])))
    assert np.isnan(got[1, 2]).all()
    got[1, 2] = 0
    assert np.isfinite(got).all()


def test_banning_every_id_is_refused_before_any_compute():
    with pytest.raises(ValueError, match="leave no token"):
        specjax.make_sampling(1, 3, banned_tokens=[0, 1, 2])
    with pytest.raises(ValueError, match="leave no token"):
        specjax.make_sampling(1, 3, banned_tokens=[0, 1], eos_ids=[2], min_new_tokens=1)


# --- rows of a window, cases 68, 75 and 77

PARENTS = [-1, 0, 0, 1]  # window rows: 0 the pending token, then nodes 0..3
SEEN = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)


def window_check(options, logits, histories, prompt_lengths, drafted, seen):
    """Every window row against the oracle with the ancestors in its history."""
    got = warp(
        jnp.array(logits, jnp.float32), sampling_of(options, eos_ids=options[0].eos_ids),
        text_of(histories, prompt_lengths), jnp.array(drafted, jnp.int32), jnp.array(seen),
    )  # fmt: skip
    seen = np.broadcast_to(seen, (len(options), *seen.shape[1:]))
    for row, node in np.ndindex(logits.shape[:2]):
        history = [*histories[row], *np.asarray(drafted)[row, seen[row, node]].tolist()]
        emitted = len(history) - prompt_lengths[row]
        want = oracle.warp(logits[row, node].astype(np.float32), options[row], history, emitted)
        np.testing.assert_allclose(got[row, node], want, atol=3e-6, err_msg=f"row {row} node {node} {options[row]}")


def test_penalties_count_the_drafted_ancestors_of_each_row_and_nothing_else():
    rng = np.random.default_rng(6)
    options = [
        Options(repetition_penalty=1.7), Options(presence_penalty=0.9), Options(frequency_penalty=0.6),
        Options(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4, temperature=0.8, top_p=0.93),
    ]  # fmt: skip
    logits = rng.normal(size=(4, 5, V)) * 2
    drafted = np.array([[2, 2, 2, 2], [5, 2, 5, 2], [1, 1, 3, 1], [7, 7, 7, 8]])  # repeats on a path and across paths
    histories = [[1], [2, 2, 5], [1, 0, 0], [7]]
    window_check(options, logits, histories, [1, 2, 1, 1], drafted, SEEN[None])
    window_check(options, logits, histories, [1, 2, 1, 1], drafted, np.stack([SEEN, SEEN, np.tri(5, 4, -1) > 0, SEEN]))


def test_case_77_greedy_with_a_repetition_penalty_leaves_the_repeated_token():
    logits = np.zeros((1, 4, V), np.float32)
    logits[..., 2], logits[..., 5] = 2.0, 1.5
    options = [Options(temperature=0, repetition_penalty=1.5)]
    got = warp(
        jnp.array(logits), sampling_of(options), text_of([[1]], [1]), jnp.array([[2, 2, 2]], jnp.int32),
        jnp.array(np.tri(4, 3, -1)[None] > 0),
    )  # fmt: skip
    assert np.argmax(got[0], -1).tolist() == [2, 5, 5, 5]


@pytest.mark.parametrize("emitted", [0, 1, 2, 3, 4])
def test_case_68_the_end_is_held_back_token_by_token_inside_a_block(emitted):
    logits = np.zeros((1, 5, V))
    logits[..., 1] = 6.0  # p(eos) over 0.97
    options = [Options(min_new_tokens=4, eos_ids=(1, 9))]
    window_check(options, logits, [[3] * (2 + emitted)], [2], np.array([[5, 5, 5, 5]]), np.tri(5, 4, -1)[None] > 0)


def test_case_75_one_law_whatever_the_window_it_is_computed_in():
    rng = np.random.default_rng(7)
    grid = [
        Options(temperature=t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in itertools.product((0.0, 0.7, 1.0), (0, 2, 5), (1.0, 0.6, 0.9), (0.0, 0.2))
    ]
    logits = rng.normal(size=(len(grid), 4, V)).astype(np.float32)
    text = text_of([()] * len(grid), [0] * len(grid))
    whole = warp(jnp.array(logits), sampling_of(grid), text)
    for row in range(4):
        single = warp(jnp.array(logits[:, row : row + 1]), sampling_of(grid), text)
        np.testing.assert_array_equal(single[:, 0], whole[:, row])
    for b, option in enumerate(grid):
        for row in range(4):
            assert oracle.margin(logits[b, row], option) > 1e-6
            np.testing.assert_allclose(whole[b, row], oracle.warp(logits[b, row], option), atol=3e-6)


def test_no_value_of_any_option_traces_again():
    traces = []

    def counted(*args):
        traces.append(1)
        return specjax.warp(*args)

    run = jax.jit(counted)
    logits, text = jnp.zeros((2, 1, V)), text_of([(1,), ()], [1, 0])
    for values in pairwise(LEVELS)[:12]:
        run(logits, sampling_of([Options(**values)] * 2, eos_ids=(1,)), text)
    assert len(traces) == 1


def test_a_reduced_vocabulary_has_the_law_of_the_full_one_with_everything_else_banned():
    """Every option at once, over columns that leave out some of the text, the bias, the ends and the drafts."""
    rng = np.random.default_rng(7)
    vocab, ids = 12, np.array([1, 2, 5, 6, 9, 11], np.int32)
    tokens = rng.integers(0, vocab, (3, 8)).astype(np.int32)
    lengths = jnp.asarray([8, 5, 3], jnp.int32)
    text = specjax.Text(jnp.asarray(tokens), lengths, jnp.asarray([4, 5, 2], jnp.int32))
    drafted = jnp.asarray([[2, 3, 2], [9, 9, 0], [1, 11, 4]], jnp.int32)
    seen = jnp.asarray(rng.random((3, 4, 3)) < 0.6)
    sampling = specjax.make_sampling(
        3, vocab, temperature=[0.0, 0.8, 1.3], top_k=[0, 3, 0], top_p=[1.0, 0.9, 0.8], repetition_penalty=1.4,
        frequency_penalty=0.3, presence_penalty=0.2, logit_bias={2: 1.0, 3: 5.0, 11: -0.5}, min_new_tokens=4,
        eos_ids=[5, 7],
    )  # fmt: skip
    logits = rng.normal(size=(3, 4, vocab)).astype(np.float32) * 2
    others = np.setdiff1d(np.arange(vocab), ids)
    banned = logits.copy()
    banned[..., others] = -np.inf
    full = specjax.warp(jnp.asarray(banned), sampling, text, drafted, seen)
    reduced = specjax.warp(jnp.asarray(logits[..., ids]), sampling, text, drafted, seen, ids=jnp.asarray(ids))
    np.testing.assert_allclose(reduced, np.asarray(full)[..., ids], atol=1e-6)
    assert (np.asarray(reduced)[0].max(-1) == 1).all()
