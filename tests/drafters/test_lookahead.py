"""Lookahead decoding: the guesses are the target's own, what is drafted was guessed or said, and the text is exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.drafters.cascade import cascade
from specjax.drafters.lookahead import EMPTY, lookahead
from specjax.loop import compiled_programs
from specjax.types import Committed
from tests.doubles import hash_lm
from tests.exactness.harness import assert_hash_law
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options
from tests.small import PROMPTS, V, advance, begin, dictated, logits_of, padded, position_lm, run, target

W, LEVELS, G = 3, 2, 2
SMALL = {"width": W, "ngram": LEVELS + 1, "candidates": G, "keys": 32}  # V = 16: each token has a bucket of its own
FIRST = G * LEVELS  # the first node that is a guess


def commit(drafter, pieces, batch=1):
    """The state after committing ``pieces`` (lists of tokens, the same in every row), the way prefill does."""
    state, start = drafter.init(drafter.params, batch, 64), 0
    for piece in pieces:
        tokens = jnp.broadcast_to(jnp.asarray([*piece, *[9] * (6 - len(piece))], jnp.int32), (batch, 6))
        count, at = jnp.full(batch, len(piece), jnp.int32), jnp.full(batch, start, jnp.int32)
        state = _observe(drafter.observe, drafter.params, state, Committed(tokens, jnp.zeros((batch, 6, 0)), count, at))
        start += len(piece)
    return state


@functools.partial(jax.jit, static_argnums=0)
def _observe(observe, params, state, committed):
    return observe(params, state, committed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draft(draft, n, state, text, sampling):
    keys = specjax.row_keys(range(text.lengths.shape[0]))
    return draft((), keys, state, text, sampling, n)


def propose(drafter, state, texts, eos_ids=()):
    sampling = specjax.make_sampling(len(texts), V, eos_ids=eos_ids)
    return _draft(drafter.draft, drafter.num_draft_tokens, state, padded(texts), sampling)


def paths(proposal, row=0):
    """Sorted root paths of the valid nodes."""
    tokens, parents, valid = (np.asarray(x)[row] for x in (proposal.tokens, proposal.parents, proposal.valid))
    assert (parents < np.arange(len(parents))).all() and (parents >= -1).all()
    below = {-1: ()}
    for node in np.flatnonzero(valid):
        below[node] = (*below[parents[node]], int(tokens[node]))
    assert len(set(below.values())) == len(below)  # case 87: no token twice below one node
    return sorted(below.values())[1:]


def test_ngrams_of_the_text_are_drafted_across_chunks():
    """Case 92: those that are complete, wherever the chunks end; case 91: nothing for a token that is new."""
    drafter = lookahead(**SMALL)
    for pieces in ([[1, 2, 3, 4, 1]], [[1, 2], [3], [4, 1]], [[1], [2, 3, 4], [1]]):
        state = commit(drafter, pieces)
        assert paths(propose(drafter, state, [[1, 2, 3, 4, 1]])[0]) == [(2,), (2, 3)]
        assert paths(propose(drafter, state, [[1, 2, 3, 4, 3]])[0]) == [(4,), (4, 1)]
        assert paths(propose(drafter, state, [[1, 2, 3, 4]])[0]) == []  # 4 1 is no n-gram yet
        assert paths(propose(drafter, state, [[9]])[0]) == []
    untaught = lookahead(**SMALL, text=False)
    assert paths(propose(untaught, commit(untaught, [[1, 2, 3, 4, 1]]), [[1, 2, 3, 4, 1]])[0]) == []


def test_the_newest_ngrams_of_a_first_token_are_kept_once_each_and_share_their_beginnings():
    """Case 87: two candidates with one beginning are one node with two children; a third drops the oldest."""
    drafter = lookahead(**SMALL)
    draft = lambda pieces: paths(propose(drafter, commit(drafter, pieces), [[1]])[0])
    assert draft([[1, 2, 3], [1, 2, 4], [5]]) == [(2,), (2, 3), (2, 4)]
    assert draft([[1, 2, 3], [1, 5, 3], [8]]) == [(2,), (2, 3), (5,), (5, 3)]
    assert draft([[1, 2, 3], [1, 5, 3], [1, 2, 3], [8]]) == [(2,), (2, 3), (5,), (5, 3)]
    assert draft([[1, 2, 3], [1, 5, 3], [1, 2, 3], [1, 6, 6], [8]]) == [(2,), (2, 3), (6,), (6, 6)]


def test_a_first_token_that_shares_a_bucket_takes_it_over():
    """A pool that is too small forgets; it never offers what followed another token."""
    drafter = lookahead(width=W, ngram=LEVELS + 1, candidates=G, keys=4)
    assert paths(propose(drafter, commit(drafter, [[1, 2, 3], [8]]), [[5]])[0]) == []
    state = commit(drafter, [[1, 2, 3], [5, 7, 7], [8, 8]])
    assert paths(propose(drafter, state, [[5]])[0]) == [(7,), (7, 7)]
    assert paths(propose(drafter, state, [[1]])[0]) == []


def test_nothing_is_drafted_behind_an_end_id():
    """Case 69."""
    drafter = lookahead(**SMALL)
    state = commit(drafter, [[1, 2, 3, 4]])
    assert paths(propose(drafter, state, [[1]], eos_ids=[2])[0]) == [(2,)]
    assert paths(propose(drafter, state, [[1]], eos_ids=[3])[0]) == [(2,), (2, 3)]


def test_padding_and_neighbours_are_no_context():
    """Case 96: rows have pools of their own, and a row alone drafts what it drafts beside others."""
    drafter = lookahead(**SMALL)
    texts = [[5, 0, 7, 0], [3, 0], [1, 2, 0, 0, 4, 1]]
    alone = [advance(target(), drafter, begin(target(), [text], drafter))[0] for text in texts]
    together, _ = advance(target(), drafter, begin(target(), texts, drafter))
    for row, state in enumerate(alone):
        jax.tree.map(
            lambda a, b, row=row: np.testing.assert_array_equal(a[0], b[row]), state.drafter, together.drafter
        )


def test_guesses_hang_beside_the_candidates_and_are_never_judged():
    """Cases 82 and 89: level 0 is a chain, level l of a column hangs below level l - 1; invalid, after the others."""
    drafter = lookahead(**SMALL)
    proposal, state = propose(drafter, commit(drafter, [[1, 2, 3, 4, 1]]), [[1, 2, 3, 4, 1]])
    parents, valid = np.asarray(proposal.parents[0]), np.asarray(proposal.valid[0])
    assert parents[FIRST:].tolist() == [-1, FIRST, FIRST + 1, FIRST, FIRST + 1, FIRST + 2]
    assert not valid[FIRST:].any() and proposal.tokens.shape == (1, drafter.num_draft_tokens) == (1, 10)
    np.testing.assert_array_equal(proposal.tokens[0, FIRST:], np.ravel(state.guesses[0]))


def test_the_new_guesses_are_what_the_target_says_after_each_column():
    """Cases 82 and 83: each column is read as the text, level 0 up to it, then downwards: as plain sequences say."""
    drafter, lm = lookahead(**SMALL), target()
    state = begin(lm, PROMPTS[:3], drafter)
    for _ in range(3):
        before, text = jax.device_get(state.drafter), state.text
        if (before.age == 0).any():
            before = jax.device_get(propose(drafter, state.drafter, PROMPTS[:3])[1])
        state, info = advance(lm, drafter, state)
        after = jax.device_get(state.drafter)
        assert (after.age == before.age + 1).all()
        for row in range(3):
            own, moved = np.asarray(text.tokens[row]).copy(), int(info.count[row]) - 1
            length, guesses = int(text.lengths[row]), before.guesses[row]
            for column in range(W):
                ahead = [*guesses[0, : column + 1], *guesses[1:, column]]
                own[length : length + len(ahead)] = ahead
                logits = _logits(lm, own)[length + len(ahead) - 1]
                new = after.guesses[row, :, (column - moved) % W]
                assert new.tolist() == [*guesses[1:, column], int(np.argmax(logits))]


def _logits(lm, tokens):
    return np.asarray(logits_of(lm.model, lm.params, jnp.asarray(tokens)[None]))[0]


def test_columns_become_ngrams_once_they_are_the_targets_own():
    """Without learning from the text everything in the pool comes from the guesses, after levels steps."""
    drafter = lookahead(**SMALL, text=False)
    state = begin(target(), PROMPTS[:3], drafter)
    for step in range(3):
        if step <= LEVELS - 1:
            assert (np.asarray(state.drafter.pool.owner) == EMPTY).all()
        before = jax.device_get(state.drafter)
        state, info = advance(target(), drafter, state)
        after = jax.device_get(state.drafter)
        for row in range(3) if step >= LEVELS - 1 else ():
            first, *rest = before.guesses[row, :, -1].tolist()  # of the last column, hence on top
            new = int(after.guesses[row, -1, (W - int(info.count[row])) % W])
            assert after.pool.owner[row, first] == first
            assert after.pool.rest[row, first, 0].tolist() == [*rest, new]


def test_a_text_the_target_can_foresee_is_foreseen():
    """Case 108: a target that counts by position guesses every n-gram right, so rounds emit more than one token."""
    text = [3, 4, 5, 6, 7, 8] * 10
    lm = position_lm(dictated(text, V))
    stats = specjax.generate(lm, [[3]], drafter=lookahead(**SMALL, text=False), max_new_tokens=40).stats
    assert stats.tau > 1.8 and stats.per_position[0] > 0.7
    assert stats.proposed < stats.rounds * FIRST + 1  # guesses are not proposals


def test_finished_rows_and_rounds_without_a_window_keep_their_state():
    """Plain steps move the guesses along with the text; rows that have finished do not change."""
    drafter = lookahead(**SMALL)
    state, _ = advance(target(), drafter, begin(target(), PROMPTS[:3], drafter))
    plain, _ = advance(target(), drafter, state, n=0)
    np.testing.assert_array_equal(plain.drafter.guesses, np.roll(state.drafter.guesses, -1, axis=2))
    np.testing.assert_array_equal(plain.drafter.age, state.drafter.age)
    over = state._replace(finish=jnp.full(3, 1, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, advance(target(), drafter, over)[0].drafter, state.drafter)


def test_a_part_of_a_cascade_looks_ahead_whoever_speaks():
    """Merged, its guesses are in every window; as a second source in the rounds in which it was asked."""
    own = lookahead(**SMALL)
    merged = cascade(own, drafters.ngram(2), merged=True)
    assert merged.widths == (10,) and cascade(drafters.ngram(2), own).widths == ()
    state = begin(target(), PROMPTS[:3], merged)
    for steps in (1, 2):
        state, _ = advance(target(), merged, state)
        assert (np.asarray(state.drafter[0].age) == steps).all()


def small():
    return lookahead(**SMALL)


def test_greedy_text_is_that_of_plain_decoding():
    """Ragged batch, T = 0 and match at T = 1; equal drafters compile once."""
    assert specjax.generate(target(), PROMPTS, drafter=small(), max_new_tokens=40).tokens == run().tokens
    before = compiled_programs()
    sampled = specjax.generate(target(), PROMPTS, drafter=small(), max_new_tokens=40, temperature=1.0)
    assert sampled.tokens == run(temperature=1.0).tokens
    assert compiled_programs() == before


MODEL, PARAMS = hash_lm(HashConfig(3), seed=0)
OPTIONS = [Options(), Options(temperature=0.0), Options(temperature=0.7, top_p=0.9)]
FORMS = {
    "text and guesses": lambda: lookahead(width=2, ngram=3, candidates=2, keys=4),
    "guesses": lambda: lookahead(width=3, ngram=2, candidates=2, keys=2, text=False),
}
PROGRAMS = [
    pytest.param(form, rule, marks=[] if (form, rule) == ("text and guesses", "rejection") else pytest.mark.full)
    for form in FORMS for rule in ("rejection", "match")
]  # fmt: skip


@pytest.mark.parametrize(("form", "rule"), PROGRAMS)
def test_four_tokens_follow_the_law_of_plain_decoding(form, rule):
    """Cases 87 and 97: whatever is in the pool, candidates are point masses and guesses are not judged."""
    assert_hash_law(MODEL, PARAMS, FORMS[form](), rule, OPTIONS, (1, 2, 0, 1))


def test_settings_that_make_no_sense_are_refused():
    """Static settings fail where they are given, by name."""
    for name, value in (("width", 0), ("ngram", 1), ("candidates", 0), ("keys", 1.5), ("text", 1)):
        with pytest.raises(ValueError, match=rf"{name}={value}"):
            lookahead(**{name: value})
    with pytest.raises(ValueError, match=r"rule='block' judges chains"):
        specjax.generate(target(), [[1]], drafter=small(), rule="block", max_new_tokens=2)
