"""Rounds one at a time: what every row keeps, and that after any acceptance the caches are those of a fresh pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, noise, tree
from tests.oracle.hashlm import HashConfig
from tests.small import (
    CAPACITY,
    V,
    advance,
    assert_cache_is_fresh,
    assert_invariants,
    begin,
    close,
    emitted,
    flipped,
    logits_of,
    oracle,
    padded,
    poisoned,
    position_lm,
    shares_memory,
    table_positions_lm,
    target,
    tree_scripted,
)  # fmt: skip

PROMPTS = [[3], [2, 5, 13, 2, 5, 4, 9], [6, 6, 2]]
K = 4


@pytest.fixture(scope="module")
def plain_text():
    """[3, CAPACITY] prompt and greedy continuation of PROMPTS, by rounds without drafts."""
    state = begin(target(), PROMPTS)
    for _ in range(40):
        state, _ = advance(target(), None, state)
    assert_invariants(target(), state)
    return np.asarray(state.text.tokens)


def missing_at(text: np.ndarray, state, accepted) -> specjax.Drafter:
    """An oracle that misses, in the next round, after ``accepted [B]`` tokens."""
    text = text.copy()
    rows = np.arange(len(text))
    where = np.asarray(state.text.lengths) + np.asarray(accepted)
    text[rows, where] = (text[rows, where] + 1) % V
    return oracle(text, K)


def start():
    """The state after prefill for drafters of `missing_at`."""
    return begin(target(), PROMPTS, oracle(np.zeros((3, CAPACITY)), K))


def assert_greedy(state, plain_text) -> None:
    for row, tokens in enumerate(emitted(state)):
        start = len(PROMPTS[row])
        assert tokens == plain_text[row, start : start + len(tokens)].tolist()


SCHEDULE = [(0, 2, 4), (4, 0, 1), (3, 3, 0), (1, 4, 2), (2, 1, 3), (4, 4, 4), (0, 0, 0)]


def test_rows_that_accept_different_numbers_keep_their_own_text_and_cache(plain_text):
    """Cases 15, 38, 41, 51: lengths are right, nothing committed changes, the cache is a fresh one."""
    lm, state = target(), start()
    assert_invariants(lm, state)
    for accepted in SCHEDULE:
        before = state
        state, info = advance(lm, missing_at(plain_text, state, accepted), state)
        assert info.num_accepted.tolist() == list(accepted)
        assert info.count.tolist() == [a + 1 for a in accepted]
        assert_invariants(lm, state, before)
    assert_greedy(state, plain_text)
    seen = np.asarray(state.text.tokens)[:, :30]
    np.testing.assert_array_equal(np.asarray(state.drafter.tokens)[:, :30], seen)  # the drafter observed just that
    assert state.drafter.in_order.all()


def test_a_row_that_accepts_everything_does_not_wait_for_one_that_accepts_nothing(plain_text):
    """Case 52: 20 tokens in 4 rounds beside a row that needs 20."""
    lm, state = target(), start()
    rounds = 0
    while not np.asarray(state.finish).all():
        left = 20 - (np.asarray(state.text.lengths) - np.asarray(state.text.prompt_lengths))
        state, _ = advance(lm, missing_at(plain_text, state, [K, 0, 0]), state, budget=20)
        rounds += 1
        if left[0] <= 5:
            assert state.finish[0] != 0
    assert state.counts.rounds.tolist() == [4, 20, 20] and rounds == 20
    assert_invariants(lm, state)
    assert_greedy(state, plain_text)


def test_a_finished_row_does_not_change(plain_text):
    """Cases 54, 58: its text, cache, counts and noise stay while others go on."""
    lm, state = target(), start()
    budget = np.array([2, 30, 30])
    for _ in range(2):
        state, _ = advance(lm, missing_at(plain_text, state, [1, 1, 1]), state, budget=budget)
    assert state.finish.tolist() == [2, 0, 0]
    later = state
    for _ in range(3):
        later, info = advance(lm, missing_at(plain_text, later, [1, 1, 1]), later, budget=budget)
        assert info.count[0] == 0
    for old, new in zip(jax.tree.leaves((state.text, state.counts)), jax.tree.leaves((later.text, later.counts))):
        np.testing.assert_array_equal(new[0], old[0])
    assert later.cache.lengths[0] == state.cache.lengths[0]
    assert_invariants(lm, later)


def test_what_other_rows_and_unused_slots_hold_changes_no_bit_of_a_row(plain_text):
    """Cases 45, 54, 96: garbage neighbours, garbage behind the text, NaN in every unused slot of both caches."""
    lm, drafter = target(), drafters.model(close(), target(), 3)
    clean = begin(lm, PROMPTS, drafter)
    text = padded([PROMPTS[0], [9, 1, 1, 7], [12]], fill=13)
    dirty = begin(lm, PROMPTS, drafter, text=text)
    for _ in range(4):
        clean, clean_info = advance(lm, drafter, clean)
        dirty = dirty._replace(
            cache=poisoned(dirty.cache), drafter=dirty.drafter._replace(cache=poisoned(dirty.drafter.cache))
        )
        dirty, dirty_info = advance(lm, drafter, dirty)
        kept = int(clean_info.count[0])
        assert dirty_info.count[0] == kept
        np.testing.assert_array_equal(dirty_info.tokens[0, :kept], clean_info.tokens[0, :kept])
        for ours, theirs in ((clean.cache, dirty.cache), (clean.drafter.cache, dirty.drafter.cache)):
            length = int(ours.lengths[0])
            for a, b in zip(jax.tree.leaves((ours.k, ours.v)), jax.tree.leaves((theirs.k, theirs.v)), strict=True):
                np.testing.assert_array_equal(a[0, :, :length], b[0, :, :length])
    assert emitted(clean)[0] == emitted(dirty)[0] == plain_text[0, 1 : 1 + len(emitted(clean)[0])].tolist()


@pytest.mark.parametrize("chunk", [64, 16, 4, 1])
def test_prefill_in_any_chunks_gives_the_same_caches_and_first_round(chunk):
    """Cases 50 and 60: prompts of 2, 5 and 10 tokens read 1, 4, 16 or all at a time."""
    lm, drafter = target(), drafters.model(close(), target(), 3)
    prompts = [[2, 5], [3, 3, 9, 4, 2], [2, 5, 13, 2, 5, 4, 9, 6, 6, 2]]
    state = begin(lm, prompts, drafter, chunk=chunk)
    assert_invariants(lm, state, draft=close())
    usual = begin(lm, prompts, drafter)
    np.testing.assert_allclose(state.drafter.logits, usual.drafter.logits, atol=1e-5)
    after, info = advance(lm, drafter, state)
    expected, expected_info = advance(lm, drafter, usual)
    np.testing.assert_array_equal(info.count, expected_info.count)
    assert emitted(after) == emitted(expected)


@pytest.mark.parametrize("k", [4, *(pytest.param(k, marks=pytest.mark.full) for k in (1, 2, 3, 5))])
def test_the_draft_models_cache_is_fresh_after_every_number_of_accepted_tokens(k):
    """Case 34: every (K, a), one row for each a; the cache holds one entry per committed token, the last draft too."""
    lm = target()
    prompts = [[2, 5, 3, 7][: 1 + row % 4] for row in range(k + 1)]
    drafter = flipped(drafters.model(lm, lm, k), [*range(k), -1])
    state = begin(lm, prompts, drafter)
    for _ in range(3):
        before = state
        state, info = advance(lm, drafter, state)
        assert info.num_accepted.tolist() == list(range(k + 1))
        assert_invariants(lm, state, before, draft=lm)


def test_rounds_without_drafts_still_feed_the_draft_model():
    """Case 36: schedule 3, 0, 0, 3; the last round of a self-draft accepts all 3."""
    lm, drafter = target(), drafters.model(target(), target(), 3)
    state = begin(lm, PROMPTS, drafter)
    for n, accepted in ((3, 3), (0, 0), (0, 0), (3, 3)):
        before = state
        state, info = advance(lm, drafter, state, n=n)
        assert info.num_accepted.tolist() == [accepted] * 3
        assert_invariants(lm, state, before, draft=lm)


def test_the_schedule_of_draft_lengths_does_not_change_what_match_says():
    """Case 58: noise belongs to (row, position), never to a round: any schedule, the same text at T = 1."""
    lm, drafter = target(), drafters.model(close(), target(), 3)
    sampling = specjax.make_sampling(3, V, temperature=1.0)
    texts = []
    for schedule in ((3, 3, 3, 3, 3), (0, 3, 0, 3, 0, 0, 3), (0,) * 8):
        state = begin(lm, PROMPTS, drafter)
        for n in schedule:
            state, _ = advance(lm, drafter, state, n=n, sampling=sampling)
        texts.append(emitted(state))
    for a, b, c in zip(*texts):
        shared = min(len(a), len(b), len(c))
        assert shared >= 5 and a[:shared] == b[:shared] == c[:shared]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_draws_of_rows_without_drafts_do_not_depend_on_rounds_or_neighbours(plain_text, rule):
    """Case 58: `rejection` and `block` may draw differently between K schedules, but a row that proposed nothing
    draws as in a plain round, whatever its neighbours propose."""
    lm, state = target(), start()
    sampling = specjax.make_sampling(3, V, temperature=1.0)
    count = np.full(CAPACITY, K)
    count[len(PROMPTS[0]) - 1] = 0  # row 0 is alone at this position
    _, info = advance(lm, oracle(plain_text, K, count=count), state, rule=rule, sampling=sampling)
    _, alone_info = advance(lm, None, begin(lm, PROMPTS), rule=rule, sampling=sampling)
    assert info.count[0] == 1 and info.tokens[0, 0] == alone_info.tokens[0, 0]


def test_accept_noise_does_not_depend_on_how_wide_the_window_is():
    """Case 58: a round narrows its window to the longest draft of the batch; a row's own draws stay the same."""
    keys, at = specjax.row_keys(range(4)), jnp.arange(4, dtype=jnp.int32)
    widest = noise.accept_uniforms(keys, at, 7)
    for nodes in range(1, 7):
        np.testing.assert_array_equal(noise.accept_uniforms(keys, at, nodes), widest[:, :nodes])


def test_a_number_of_drafts_the_drafter_was_not_built_for_is_refused():
    """Case 147."""
    state = begin(target(), PROMPTS)
    with pytest.raises(ValueError, match=r"num_draft_tokens=5.*0\.\.4"):
        advance(target(), oracle(np.zeros(CAPACITY), K), state, n=5)


def test_a_short_draft_context_pauses_drafting_and_never_reads_past_its_table():
    """Case 43: draft table 16, target 64, generated to 40; whatever lies past the table is NaN."""
    lm, draft = target(), table_positions_lm(HashConfig(V), 16)
    drafter = drafters.model(draft, lm._replace(tokenizer=None), 3, max_length=16)
    with pytest.raises(ValueError, match=r"drafter's context is 16"):
        specjax.generate(lm, [PROMPTS[0]], drafter=drafter, max_new_tokens=16)
    state = begin(lm, PROMPTS, drafter)
    while np.min(state.text.lengths) < 40:
        before = state
        state, _ = advance(lm, drafter, state)
        proposed = np.asarray(state.counts.proposed - before.counts.proposed)
        room = np.clip(16 - np.asarray(before.text.lengths), 0, 3)
        np.testing.assert_array_equal(proposed, room)
        assert np.isfinite(np.asarray(state.drafter.logits)).all()
    plain = begin(lm, PROMPTS)
    for _ in range(40):
        plain, _ = advance(lm, None, plain)
    for ours, theirs in zip(emitted(state), emitted(plain)):
        assert ours[:30] == theirs[:30]


# --- trees

PARENTS = [-1, 0, 0, 1, 2]


def tree_round(plain_text, shift):
    """The window [3, 6], its positions and its logits in one round with a proposal of topology PARENTS."""
    drafter = tree_scripted(plain_text, PARENTS, shift)
    state = begin(target(), PROMPTS, drafter)
    return state, *_spied_round(target().model, drafter._replace(params=()), target().params, drafter.params, state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _spied_round(model, drafter, params, drafter_params, state):
    calls = []

    def spy(params, tokens, positions, *args, **options):
        out = model.apply(params, tokens, positions, *args, **options)
        calls.append((tokens, positions, out.logits))
        return out

    drafter = drafter._replace(params=drafter_params)
    sampling, limits = specjax.make_sampling(3, V), specjax.no_limits(50, 3)
    specjax.round(model._replace(apply=spy), params, drafter, "match", state, sampling, limits)
    return calls[-1]


def test_tree_nodes_stand_at_their_depth_and_see_their_ancestors_only(plain_text):
    """Cases 82 and 83: parents [-1, 0, 0, 1, 2] stand at L + [0, 1, 2, 2, 3, 3]; the logits of every node are those of
    its path read as plain text; another token elsewhere changes no bit of them."""
    lm, shift = target(), np.array([[0, 3, 0, 1, 0]] * 3)
    state, window, positions, logits = tree_round(plain_text, shift)
    pending = np.asarray(state.text.lengths) - 1
    np.testing.assert_array_equal(positions, pending[:, None] + [[0, 1, 2, 2, 3, 3]])
    mask = tree.window_mask(np.array(PARENTS), len(PARENTS))
    for node in range(len(PARENTS) + 1):
        path = np.flatnonzero(mask[node])
        texts = padded([[*p[:-1], *tokens[path]] for p, tokens in zip(PROMPTS, np.asarray(window))])
        read = logits_of(lm.model, lm.params, texts.tokens)[np.arange(3), pending + len(path) - 1]
        np.testing.assert_allclose(read, logits[:, node], atol=1e-5)
    for changed in range(len(PARENTS)):
        other = shift.copy()
        other[:, changed] += 5
        _, _, _, moved = tree_round(plain_text, other)
        blind = ~mask[:, changed + 1]
        np.testing.assert_array_equal(np.asarray(moved)[:, blind], np.asarray(logits)[:, blind])
        assert (np.asarray(moved)[:, ~blind] != np.asarray(logits)[:, ~blind]).any()


@pytest.mark.parametrize("rule", ["rejection", pytest.param("match", marks=pytest.mark.full)])
def test_an_accepted_path_through_a_tree_leaves_the_cache_of_sequential_decoding(plain_text, rule):
    """Case 88: nodes 0, 2, 4 of 5 kept in one row, 0 and 1 in another, none in the third; then further rounds."""
    lm = target()
    shift = np.array([[0, 1, 0, 1, 0], [0, 0, 2, 3, 4], [1, 2, 3, 4, 5]])
    drafter = tree_scripted(plain_text, PARENTS, shift)
    state = begin(lm, PROMPTS, drafter)
    for _ in range(5):
        before = state
        state, info = advance(lm, drafter, state, rule=rule)
        assert info.num_accepted.tolist() == [3, 2, 0]
        assert_invariants(lm, state, before)
    assert_greedy(state, plain_text)
    assert state.counts.accepted_at.tolist() == [[5, 5, 5, 0, 0], [5, 5, 0, 0, 0], [0] * 5]


def test_a_tree_of_width_one_is_a_chain(plain_text):
    """Case 89, at the level of rounds: same tokens, same cache."""
    lm = target()
    chain = missing_at(plain_text, start(), [4, 1, 0])
    shift = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]])
    line = tree_scripted(plain_text, [-1, 0, 1, 2], shift)
    a, a_info = advance(lm, chain, start())
    b, b_info = advance(lm, line, begin(lm, PROMPTS, line))
    assert a_info.count.tolist() == b_info.count.tolist() == [5, 2, 1]
    assert emitted(a) == emitted(b)
    assert_invariants(lm, a)
    assert_invariants(lm, b)


def test_the_callers_arrays_stay_valid():
    """Cases 42 and 150: prefill and round own nothing they are given."""
    lm, drafter = target(), drafters.model(target(), target(), 3)
    text = padded(PROMPTS)
    state = begin(lm, PROMPTS, drafter, text=text)
    assert not shares_memory(state.cache, state.drafter)
    advance(lm, drafter, state)
    assert np.isfinite(np.asarray(state.cache.k[0])).all() and text.tokens.shape == (3, CAPACITY)
    assert_cache_is_fresh(lm.model, lm.params, state.cache, text, np.asarray(text.lengths) - 1)


def test_wrong_shapes_from_a_model_or_a_drafter_are_reported():
    """Case 147: at trace time, not as garbage."""
    lm = target()
    state = begin(lm, PROMPTS)
    wider = lm.model._replace(vocab_size=V + 1)
    with pytest.raises(AssertionError):
        advance(lm._replace(model=wider), None, state, sampling=specjax.make_sampling(3, V + 1))
    good = oracle(np.zeros(CAPACITY), K)
    def short(*args):
        proposal, drafter_state = good.draft(*args)
        return proposal._replace(tokens=proposal.tokens[:, :-1]), drafter_state
    with pytest.raises(AssertionError):
        advance(lm, good._replace(draft=short), begin(lm, PROMPTS, good))


def test_a_model_without_cache_decodes_too():
    """Case 39: nothing to roll back."""
    script = np.eye(V, dtype=np.float32)[(np.arange(CAPACITY) + 1) % V] * 9
    lm = position_lm(script)
    drafter = oracle(np.arange(CAPACITY) % V, K)
    state, info = advance(lm, drafter, begin(lm, [[0], [0, 1]], drafter))
    assert emitted(state) == [[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]] and info.num_accepted.tolist() == [4, 4]
