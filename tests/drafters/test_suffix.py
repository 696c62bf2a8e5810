"""Suffix decoding: the longest match goes on as it did, in the text or in a pool; nothing else is proposed."""

import functools

import jax
import numpy as np
import pytest

import specjax
from specjax.drafters.suffix import SEPARATOR, Pool, remember, suffix, suffix_pool
from specjax.loop import compiled_programs
from tests.doubles import hash_lm
from tests.exactness.harness import assert_law, emit, histogram, target_laws
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options
from tests.small import PROMPTS, V, dictated, padded, position_lm, run, target

X = -1  # not proposed


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draft(draft, n, params, text, keys, sampling):
    return draft(params, keys, (), text, sampling, n)[0]


def proposal(texts, n=4, *, eos_ids=(), fill=0, factor=9.0, longest=5, shortest=1, **options):
    drafter = suffix(n, max_match=longest, min_match=shortest, factor=factor, **options)
    sampling = specjax.make_sampling(len(texts), V, eos_ids=eos_ids)
    keys = specjax.row_keys(range(len(texts)))
    out = _draft(drafter.draft, n, drafter.params, padded(texts, 16, fill), keys, sampling)
    assert out.probs is None
    valid = np.asarray(out.valid)
    assert (np.diff(valid.astype(int), axis=1) <= 0).all()  # no gaps, so narrow windows lose nothing
    return out


def propose(texts, n=4, **options):
    """Proposed tokens [B, n] of chains, X where nothing is proposed."""
    out = proposal(texts, n, **options)
    assert out.parents is None
    return np.where(out.valid, out.tokens, X).tolist()


def one(text, n=4, **options):
    return propose([text], n, **options)[0]


def paths(texts, n=4, **options):
    """Per row, the tree as a sorted list of root paths to every node."""
    out = jax.device_get(proposal(texts, n, branching=True, **options))
    found = []
    for tokens, parents, valid in zip(out.tokens, out.parents, out.valid):
        below = {-1: ()}
        for node in np.flatnonzero(valid):
            assert parents[node] in below  # parents come first and are valid
            below[node] = (*below[parents[node]], int(tokens[node]))
        assert len(set(below.values())) == len(below)  # no token twice below one node
        found.append(sorted(below.values())[1:])
    return found


def test_nothing_is_proposed_where_nothing_matches():
    """Case 91: no made-up id 0; the suffix does not match itself (case 92)."""
    assert propose([[1, 2, 3], [5], [0], [1, 2, 3, 4]]) == [[X] * 4] * 4
    assert paths([[1, 2, 3], [5], [0]]) == [[]] * 3
    assert one([9, 1, 2, 5, 3, 1, 2], shortest=3) == [X] * 4  # case 94: two tokens match, three are asked for


def test_a_round_without_a_match_is_a_plain_step():
    """Case 91: nothing proposed, judged or accepted; as many rounds as plain decoding."""
    text = [2, *range(3, 15)]
    stats = specjax.generate(position_lm(dictated(text, V)), [[2]], drafter=suffix(4), max_new_tokens=12).stats
    assert (stats.rounds, stats.proposed, stats.acceptance_rate, stats.alpha) == (12, 0, None, None)


def test_what_followed_is_proposed_and_at_the_end_of_the_text_begins_again():
    """Case 92: matches may overlap the suffix; the text goes round, what lies behind it in the buffer is never read."""
    assert one([1, 2, 3, 4, 1, 2]) == [3, 4, 1, 2]
    assert one([1, 2, 3, 1, 2], n=7) == [3, 1, 2, 3, 1, 2, 3]
    assert one([7, 7, 7, 7], fill=9) == [7] * 4 and one([7, 7], fill=9) == [7] * 4
    assert one([*range(14), 0, 1]) == [2, 3, 4, 5]  # a full buffer
    assert one([8, *[3] * 13, 4, 9]) == [X] * 4  # 9 8 would match across the seam


def test_the_longest_match_wins_then_the_majority_then_the_latest():
    """Case 94."""
    assert one([1, 2, 3, 5, 9, 3, 6, 1, 2, 3]) == [5, 9, 3, 6]  # three tokens beat one
    assert one([1, 2, 3, 5, 9, 3, 6, 1, 2, 3], longest=1) == [6, 1, 2, 3]
    assert one([2, 4, 8, 2, 4, 9, 2, 5, 6, 2], n=2) == [4, 9]  # twice 4, once 5; behind 4 the latest
    assert one([2, 4, 8, 2, 5, 6, 2], n=2) == [5, 6]
    assert one([4, 2, 5, 3, 2, 6, 4, 2], longest=9) == [5, 3, 2, 6]


def test_the_proposal_grows_with_the_match():
    """A match of m tokens supports factor * m, at least one."""
    assert one([1, 2, 3, 4, 5, 6, 2], factor=1.0) == [3, X, X, X]
    assert one([1, 2, 3, 4, 5, 6, 1, 2], factor=1.5) == [3, 4, 5, X]
    assert one([1, 2, 3, 4, 5, 6, 1, 2], factor=0.1) == [3, X, X, X]
    assert paths([[1, 2, 3, 4, 5, 6, 1, 2]], factor=1.0) == [[(3,), (3, 4)]]


def test_nothing_is_proposed_behind_an_end_id():
    """Case 69: a b EOS c d a b, in the text, in a tree and in the pool."""
    text = [2, 3, 1, 4, 5, 2, 3]
    assert one(text, eos_ids=[1]) == [1, X, X, X]
    assert one(text, eos_ids=[9, 4]) == [1, 4, X, X]
    assert one(text, eos_ids=[]) == [1, 4, 5, 2]
    assert paths([text], eos_ids=[1]) == [[(1,)]]
    assert one([2, 3], eos_ids=[1], pool=remember(suffix_pool(9), [text[:5]])) == [1, X, X, X]


def test_padding_and_neighbours_are_no_context():
    """Case 96: padding is id 0 and the text ends in a real 0; any padding, any neighbour, the same proposal."""
    texts = [[5, 0, 7, 0], [3, 0], [0, 0, 4], [1, 2, 3, 4, 5, 6, 1]]
    expected = [[7, 0, 7, 0], [X] * 4, [X] * 4, [2, 3, 4, 5]]
    for fill in (0, 3, 4, 7):
        assert propose(texts, fill=fill) == expected
    assert [one(text) for text in texts] == expected
    assert paths(texts) == [paths([text])[0] for text in texts]


def test_disagreeing_continuations_branch_and_share_their_beginnings():
    """Case 87: what two occurrences agree on is one node; siblings differ."""
    assert paths([[2, 4, 8, 2, 4, 9, 2]], n=3) == [[(4,), (4, 8), (4, 9)]]
    assert paths([[2, 5, 2, 4, 8, 2, 4, 9, 2]], n=4) == [[(4,), (4, 8), (4, 9), (5,)]]
    assert paths([[3, 6, 8, 2, 3, 5, 2, 3]], n=2) == [[(5,), (5, 2)]]  # two tokens outweigh one
    tree = [(5,), (5, 2), (5, 2, 3), (5, 2, 3, 5), (6,), (6, 8)]
    assert paths([[3, 6, 8, 2, 3, 5, 2, 3]], n=6, factor=2.0) == [tree]


def test_the_text_is_proposed_as_a_numpy_oracle_says():
    """Random texts over three tokens: match lengths, votes and repetition, counted one occurrence at a time."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 3, rng.integers(2, 15)).tolist() for _ in range(64)]
    assert propose(texts, n=5, longest=4, shortest=2, factor=1.5) == [oracle(t, 5, 4, 2, 1.5) for t in texts]


def oracle(text, n, longest, shortest, factor):
    end, found = len(text), []
    for slot in range(end - 1):
        match = 0
        while match < min(longest, slot + 1) and text[slot - match] == text[end - 1 - match]:
            match += 1
        if match >= shortest:
            found.append((match, slot, [text[slot + 1 + d % (end - 1 - slot)] for d in range(n)]))
    tokens = []
    for depth in range(n):
        best = max((match for match, _, _ in found), default=0)
        if depth >= max(1, int(factor * best)) or not found:
            break
        leading = [(slot, after[depth]) for match, slot, after in found if match == best]
        votes = [token for _, token in leading]
        tokens.append(max(leading, key=lambda x: (votes.count(x[1]), x[0]))[1])
        found = [x for x in found if x[2][depth] == tokens[-1]]
    return tokens + [X] * (n - len(tokens))


def test_a_pool_offers_what_other_texts_said_and_never_across_them():
    """Texts in the pool end where they end; a longer match there beats a shorter one here, an equal one does not."""
    pool = remember(suffix_pool(16), [[4, 5, 6, 7], [8, 4, 9]])
    assert one([3, 4, 5], pool=pool) == [6, 7, X, X]
    assert one([3, 7], pool=pool) == [X] * 4  # 8 stands behind it, in the next text
    assert one([9], pool=pool) == [X] * 4  # the pool's end is not the text's beginning
    assert one([5, 3, 4, 5], pool=pool) == [6, 7, X, X]
    assert one([4, 3, 4], pool=pool, n=2) == [3, 4]
    assert paths([[4, 3, 4]], pool=pool, n=3) == [[(3,), (5,), (9,)]]
    assert one([3, 4, 5]) == [X] * 4  # nothing is shared unless a pool is passed


def test_the_oldest_texts_make_room_and_pools_are_values():
    empty = suffix_pool(8)
    first = remember(empty, [[1, 2], [3]])
    assert first.tokens.tolist() == [X, X, X, 1, 2, X, 3, X]
    second = remember(first, np.asarray([[4, 5, 6]]))
    assert second.tokens.tolist() == [2, X, 3, X, 4, 5, 6, X]
    assert remember(second, [range(20)]).tokens.tolist() == [*range(13, 20), X]
    assert remember(second, [[]]).tokens.tolist() == [X, 3, X, 4, 5, 6, X, X]
    assert (np.asarray(empty.tokens) == SEPARATOR).all() and first.tokens.shape == second.tokens.shape
    assert one([9, 4], pool=second) == [5, 6, X, X]


@pytest.mark.parametrize("branching", [False, pytest.param(True, marks=pytest.mark.full)])
def test_greedy_text_is_that_of_plain_decoding(branching):
    """Ragged batch; T=0 and `match` at T=1; a pool of other texts changes the speed and no token. Pools of one size
    and equal settings compile once."""
    pool = suffix_pool(64)
    for settings in ({}, {"temperature": 1.0}):
        plain = run(**settings)
        for given in (pool, remember(pool, plain.tokens[:1])):
            drafter = suffix(6 if branching else 4, branching=branching, pool=given)
            out = specjax.generate(target(), PROMPTS, drafter=drafter, max_new_tokens=40, **settings)
            assert out.tokens == plain.tokens and out.lossless
            programs = compiled_programs() if given is pool and not settings else programs  # noqa: F821
            if given is not pool:
                counts = out.stats.counts
                assert counts.emitted[0] / counts.rounds[0] > 3  # has been said before
    assert compiled_programs() == programs


MODEL, PARAMS = hash_lm(HashConfig(3), seed=0)
OPTIONS = [Options(), Options(temperature=0.0), Options(temperature=0.7, top_p=0.9)]
FORMS = {"chain": {}, "tree": {"branching": True}, "pool": {"branching": True, "pool": Pool(np.asarray([0, 2, 1, X]))}}
QUICK = {("pool", "rejection")}
PROGRAMS = [
    pytest.param(form, rule, marks=[] if (form, rule) in QUICK else pytest.mark.full)
    for form in FORMS for rule in ("rejection", "match", "block") if form == "chain" or rule != "block"
]  # fmt: skip


@pytest.mark.parametrize(("form", "rule"), PROGRAMS)
def test_four_tokens_follow_the_law_of_plain_decoding(form, rule):
    """Cases 87 and 97: looked-up nodes, trees of them too, are point masses, whatever the sampler."""
    prompt, drafter = (1, 2, 0, 1), suffix(3, factor=1.0, **FORMS[form])

    def sample(seed):
        tokens, _ = emit(MODEL, PARAMS, drafter, rule, OPTIONS, 4, 5000, seed, prompts=[prompt] * 3)
        return np.stack([histogram(rows, 3) for rows in tokens])

    assert_law(sample, target_laws(HashConfig(3), 0, OPTIONS, 4, prompt), OPTIONS)


def test_settings_that_make_no_sense_are_refused():
    """Static settings fail where they are given, by name."""
    for settings, message in (
        ({"num_draft_tokens": 0}, r"num_draft_tokens=0.*1 or more"),
        ({"min_match": 0}, r"min_match=0"),
        ({"max_match": 1, "min_match": 2}, r"min_match=2, max_match=1"),
        ({"factor": 0}, r"factor=0: must be a number over 0"),
        ({"factor": float("nan")}, r"factor=nan"),
        ({"factor": "2"}, r"factor='2'"),
        ({"factor": 10**400}, r"factor=1000"),
        ({"pool": suffix_pool(4)._replace(tokens=None)}, r"pool=Pool.*suffix_pool"),
        ({"branching": 2}, r"branching=2: must be True or False"),
        ({"pool": [1, 2]}, r"pool=\[1, 2\].*suffix_pool"),
    ):
        with pytest.raises(ValueError, match=message):
            suffix(**settings)
    with pytest.raises(ValueError, match=r"size=1"):
        suffix_pool(1)
    with pytest.raises(ValueError, match=r"pool=\[\].*suffix_pool"):
        remember([], [[1]])
    with pytest.raises(ValueError, match=r"texts=None: give a list of texts"):
        remember(suffix_pool(4), None)
    for texts in ([1, 2], [[1, -1]], [[0.5]], ["ab"], [[[1]]], [[1, [2]]]):
        with pytest.raises(ValueError, match=r"texts: text 0 is"):
            remember(suffix_pool(4), texts)


def test_a_tree_is_refused_by_block():
    with pytest.raises(ValueError, match=r"rule='block' judges chains"):
        specjax.generate(target(), [[1]], drafter=suffix(4, branching=True), rule="block", max_new_tokens=2)
