"""Drafting with a model of another vocabulary: what is shared, how the rest is read, and that the law stays exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import LanguageModel, drafters, loop
from specjax.drafters.translate import compare
from specjax.types import Text
from tests.doubles import hash_lm
from tests.exactness.harness import assert_law, emit, histogram, target_laws
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options
from tests.small import (
    BUDGET,
    EOS,
    PIECES,
    PROMPTS,
    ToyTokenizer,
    V,
    advance,
    assert_cache_is_fresh,
    begin,
    dictated,
    emitted,
    logits_of,
    position_lm,
    run,
    target,
)  # fmt: skip


class Toy(ToyTokenizer):
    """A `ToyTokenizer` that tells which of its pieces are control tokens; ``begins`` puts a begin token first."""

    def __init__(self, pieces, special=(b"<s>", b"</s>"), bos=b"<s>", eos=b"</s>", begins=False):
        super().__init__(pieces, None)
        self.special_ids = frozenset(i for i, piece in enumerate(pieces) if piece in special)
        self.bos_id = self.pieces.index(bos) if bos in self.pieces else None
        self.eos_id = self.pieces.index(eos) if eos in self.pieces else None
        self.begins = begins

    def encode(self, text):
        return [self.bos_id] * self.begins + super().encode(text)


def lm_of(pieces, seed=5, *, size=None, context=None, layers=1, **how) -> LanguageModel:
    """A random model of ``size`` (default: as many as there are pieces) tokens."""
    model, params = hash_lm(HashConfig(size or len(pieces), num_layers=layers), seed)
    return LanguageModel(model._replace(context_length=context), params, Toy(pieces, **how))


def compared(ours, theirs, **how):
    """{target piece: draft piece} and {target piece: its spelling} of two lists of pieces."""
    draft = lm_of(theirs, **how)
    maps = compare(draft, lm_of(ours))
    spelling, starts = np.asarray(maps.spelling), np.asarray(maps.starts)
    shared = {ours[t]: theirs[d] for t, d in zip(maps.target_ids, maps.draft_ids, strict=True)}
    words = {p: [theirs[t] for t in spelling[starts[i] : starts[i + 1]]] for i, p in enumerate(ours)}
    assert (np.diff(maps.target_ids) > 0).all() and maps.num_shared == len(shared)
    return shared, words


# --- vocabularies


def test_pieces_are_shared_by_their_bytes_and_never_by_id():
    shared, _ = compared([b"a", b"b", b" c", b"\xe2"], [b"b", b"a", b"c", b"\xe2", b"a "])
    assert shared == {b"a": b"a", b"b": b"b", b"\xe2": b"\xe2"}


def test_control_tokens_are_shared_by_string_or_else_by_role():
    """Case 121: a control token never equals text of the same spelling; end stands for end, begin for begin."""
    ours, theirs = [b"<s>", b"</s>", b"a", b"<u>"], [b"a", b"<end>", b"<u>", b"<s>", b"</s>"]
    special = {"special": (b"<end>", b"<u>", b"<s>")}
    draft = lm_of(theirs, eos=b"<end>", **special)  # here </s> is text
    maps = compare(draft, lm_of(ours, special=(b"<s>", b"</s>", b"<u>")))
    pairs = {ours[t]: theirs[d] for t, d in zip(maps.target_ids, maps.draft_ids, strict=True)}
    assert pairs == {b"<s>": b"<s>", b"</s>": b"<end>", b"a": b"a", b"<u>": b"<u>"}
    without = lm_of([b"a", b"<u>"], special=())  # text in one, control token in the other
    assert compare(without, lm_of([b"a", b"<u>"], special=(b"<u>",))).target_ids.tolist() == [0]


def test_a_role_is_not_taken_twice():
    """The target's end token is the draft's begin token by string: the draft's end token stays alone."""
    target_lm = lm_of([b"a", b"<x>"], special=(b"<x>",), eos=b"<x>", bos=b"-")
    draft = lm_of([b"<x>", b"a", b"<y>"], special=(b"<x>", b"<y>"), bos=b"<x>", eos=b"<y>")
    maps = compare(draft, target_lm)
    assert (maps.target_ids.tolist(), maps.draft_ids.tolist()) == ([0, 1], [1, 0])


def test_other_tokens_are_spelled_with_the_fewest_draft_tokens_of_the_same_bytes():
    """Case 123: multi-byte characters byte by byte; what cannot be written and unknown control tokens are left out."""
    ours = [b"abab", b"\xe2\x82\xac", b"  a", b"zz", b"az", b"<s>", b"ab", b""]
    theirs = [b"a", b"b", b"aba", b"ab", b" ", b"\xe2", b"\x82\xac", b"  "]
    _, words = compared(ours, theirs)
    assert words == {
        b"abab": [b"ab", b"ab"], b"\xe2\x82\xac": [b"\xe2", b"\x82\xac"], b"  a": [b"  ", b"a"], b"zz": [],
        b"az": [], b"<s>": [], b"ab": [b"ab"], b"": [],
    }  # fmt: skip


def test_of_draft_tokens_with_equal_bytes_one_is_proposed():
    """A law over target ids has one column per token; the last id wins, byte fallback has the low ids."""
    draft = lm_of([b"a", b"b", b"a"])
    maps = compare(draft, lm_of([b"b", b"a"]))
    assert maps.draft_ids.tolist() == [1, 2]


def test_ids_past_a_tokenizers_end_are_no_tokens():
    """Case 122: rows that pad a vocabulary are not shared and not spelled."""
    maps = compare(lm_of([b"a", b"b"], size=8), lm_of([b"b", b"c", b"a"], size=16))
    assert (maps.target_ids.tolist(), maps.draft_ids.tolist()) == ([0, 2], [1, 0])
    assert maps.starts.shape == (17,) and maps.starts[-1] == 2
    maps = compare(lm_of([b"a", b"b", b"c"], size=2), lm_of([b"b", b"c", b"a"], size=2))  # and tokens need a row
    assert (maps.target_ids.tolist(), maps.draft_ids.tolist(), maps.starts.tolist()) == ([0], [1], [0, 1, 1])


def test_pieces_of_a_tokenizer_are_the_bytes_of_its_tokens(smollm2):
    text = smollm2.tokenizer
    assert len(text.pieces) == text.vocab_size
    assert all(text.pieces[i] == text.token_bytes(i) for i in range(0, text.vocab_size, 97))
    ids = text.encode(" a  b €é\n", add_special_tokens=False)
    assert b"".join(text.pieces[i] for i in ids).decode() == " a  b €é\n"


def test_what_cannot_be_translated_is_refused():
    """Settings fail where they are given, with the remedy."""
    bare = target()._replace(tokenizer=None)
    plain_tokenizer = target()._replace(tokenizer=ToyTokenizer())
    del plain_tokenizer.tokenizer.pieces
    fine = lm_of(PIECES)
    for draft, lm, how, message in (
        (bare, fine, {}, r"draft model has no tokenizer.*bytes"),
        (fine, bare, {}, r"target model has no tokenizer"),
        (plain_tokenizer, fine, {}, r"draft model has a tokenizer without `pieces` and `special_ids`"),
        (lm_of([b"<s>", b"x"]), lm_of([b"<s>", b"y"]), {}, r"no piece of text in common \(2 and 2 tokens\)"),
        (lm_of(PIECES, context=8), lm_of(PIECES, context=9), {}, r"context is 8 .* 9: pass max_length=8"),
        (fine, fine, {"num_draft_tokens": 0}, r"num_draft_tokens=0.*drafter=None"),
        (fine, fine, {"max_length": 1.5}, r"max_length=1\.5.*whole"),
        (fine, fine, {"coupled": 1}, r"coupled=1: must be True or False"),
        ("name", fine, {}, r"draft='name'.*specjax\.load"),
    ):
        with pytest.raises(ValueError, match=message):
            drafters.translate(draft, lm, **how)


def test_another_vocabulary_names_the_remedy():
    """Cases 121 and 123: drafters.model still refuses."""
    for pieces in (PIECES[::-1], [*PIECES, b"!"]):
        with pytest.raises(ValueError, match=r"specjax\.drafters\.translate\(draft, target\)"):
            drafters.model(lm_of(pieces), target())


# --- text


OTHER = (
    b"</s>", b"b", b"\xe2\x82", b"a", b" a", b" ", b"\xc3\xa9", b"c", b"\xc3", b"\xa9", b"\xac", b"\xe2", b"x", b"d",
    b"  ", b"<s>", b"\n", b"ea", b"\x82",
)  # fmt: skip  # no e, ab, € in one piece
SPACED = [" a  b", "\u00e9\u20ac a\n", "\u20ac", "abc  "]


@functools.cache
def toy_target() -> LanguageModel:
    return target()._replace(tokenizer=Toy(PIECES))


@functools.cache
def other(**how) -> LanguageModel:
    return lm_of(OTHER, **how)


def permuted() -> LanguageModel:
    """The target itself under other ids, between ids that are no tokens of it."""
    order = np.random.default_rng(2).permutation(V)
    pieces = [PIECES[i] for i in order]
    lm = target()
    params = {**lm.params, "embed": lm.params["embed"][order], "head": lm.params["head"][order]}
    return LanguageModel(lm.model, params, Toy(pieces))


def prompts_of(texts=SPACED):
    return [*PROMPTS, *map(toy_target().tokenizer.encode, texts)]


@pytest.mark.parametrize("begins", [False, pytest.param(True, marks=pytest.mark.full)])
def test_greedy_text_is_that_of_plain_decoding(begins):
    """Case 123: ' a  b', parts of characters, control tokens in the middle, ragged prompts, in one batch."""
    drafter = drafters.translate(other(begins=begins), toy_target(), 3)
    out = specjax.generate(toy_target(), prompts_of(), drafter=drafter, max_new_tokens=BUDGET)
    expected = specjax.generate(toy_target(), prompts_of(), max_new_tokens=BUDGET)
    assert (out.tokens, out.texts) == (expected.tokens, expected.texts)
    assert 0 < out.stats.accepted < out.stats.proposed


@pytest.mark.full
@pytest.mark.parametrize("coupled", [True, False])
def test_the_target_itself_under_other_ids_is_always_right(coupled):
    """Maps, positions and cache of the draft are those of the target: every draft token is accepted."""
    drafter = drafters.translate(permuted(), toy_target(), 3, coupled=coupled)
    temperature = [0.0, 1.0] * 4 if coupled else 0.0
    out = specjax.generate(toy_target(), PROMPTS, drafter=drafter, temperature=temperature, max_new_tokens=24)
    assert out.stats.alpha == 1.0 and out.stats.tau > 3.9
    assert out.tokens == run(temperature=temperature, max_new_tokens=24).tokens


@pytest.mark.full
def test_coupled_drafts_leave_the_text_of_a_seed_alone():
    drafter = drafters.translate(other(), toy_target(), 3, coupled=True)
    assert (drafter.default_rule, drafters.translate(other(), toy_target()).default_rule) == ("match", "rejection")
    out = specjax.generate(toy_target(), PROMPTS, drafter=drafter, temperature=0.9, seed=3, max_new_tokens=24)
    assert out.tokens == run(temperature=0.9, seed=3, max_new_tokens=24).tokens
    assert out.stats.accepted > 0


def test_coupled_drafts_use_the_noise_of_their_target_ids():
    """Two models that think the same of what they share: only tokens the draft cannot say are ever missed."""
    logits = np.random.default_rng(1).normal(size=V).astype(np.float32)
    lm = position_lm(np.tile(logits, (64, 1)), Toy(PIECES))
    common = [PIECES.index(piece) for piece in OTHER if piece in PIECES]
    draft = position_lm(np.tile(logits[common], (128, 1)), Toy([PIECES[i] for i in common]))
    drafter = drafters.translate(draft, lm, 3, coupled=True)
    out = specjax.generate(lm, PROMPTS, drafter=drafter, temperature=1.0, max_new_tokens=24)
    missed = sum(token not in common for row in out.tokens for token in row)
    judged = out.stats.accepted / out.stats.alpha
    assert 0 < round(judged - out.stats.accepted) <= missed and out.stats.alpha > 0.7


def spelled(drafter, tokens, begin_id=None):
    maps = drafter.params.vocabularies
    spelling, starts = np.asarray(maps.spelling).tolist(), np.asarray(maps.starts)
    if begin_id is not None and tokens[:1] == [int(maps.begin)]:
        tokens = tokens[1:]
    words = [spelling[starts[token] : starts[token + 1]] for token in tokens]
    return [*([] if begin_id is None else [begin_id]), *(piece for word in words for piece in word)]


@pytest.mark.full
@pytest.mark.parametrize("begins", [True, False])
def test_the_draft_has_read_the_spelling_of_what_was_committed(begins):
    """Cases 34 and 123: positions and cache are those of one pass over the spelling, the begin token once and first."""
    draft = other(begins=begins)
    drafter = drafters.translate(draft, toy_target(), 3)
    prompts = [p[:8] for p in prompts_of()]
    state = begin(toy_target(), prompts, drafter)
    for rounds in range(4):
        rows = [prompt + new for prompt, new in zip(prompts, emitted(state), strict=True)]
        whole = [spelled(drafter, row, draft.tokenizer.bos_id if begins else None) for row in rows]
        assert any(len(a) > len(b) for a, b in zip(whole, rows, strict=True)) and len({*map(len, whole)}) > 3
        tokens = np.zeros((len(rows), 128), np.int32)
        for row, ids in enumerate(whole):
            tokens[row, : len(ids)] = ids
        lengths = jnp.asarray([*map(len, whole)], jnp.int32)
        np.testing.assert_array_equal(state.drafter.read, lengths)
        text = Text(jnp.asarray(tokens), lengths, lengths)
        assert_cache_is_fresh(draft.model, draft.params, state.drafter.cache, text, lengths)
        fresh = logits_of(draft.model, draft.params, text.tokens)[jnp.arange(len(rows)), lengths - 1]
        read = np.asarray(lengths) > 0
        np.testing.assert_allclose(state.drafter.logits[read], fresh[read], atol=1e-4)
        if rounds < 3:
            state, _ = advance(toy_target(), drafter, state)


@functools.partial(jax.jit, static_argnums=0)
def draft3(draft, params, keys, state, text, sampling):
    return draft(params, keys, state, text, sampling, 3)


def test_proposed_laws_are_over_shared_tokens_and_warped_there():
    """Cases 1 and 122: each token has mass in its law; bans, top-k and penalties count target ids; no padded id, though
    the draft model is sure of one."""
    draft = other(size=32)
    params = {**draft.params, "head": draft.params["head"].at[len(OTHER) :].multiply(50.0)}
    drafter = drafters.translate(draft._replace(params=params), toy_target(), 3)
    ids = np.asarray(drafter.params.vocabularies.target_ids)
    assert {PIECES[i] for i in range(V)} - {PIECES[i] for i in ids} == {b"ab", b"e", b"\xe2\x82\xac"}
    state = begin(toy_target(), PROMPTS[:3], drafter)
    sampling = specjax.make_sampling(3, V, temperature=[0.0, 1.0, 0.5], top_k=[0, 0, 3], banned_tokens=[6])
    proposal, after = draft3(drafter.draft, drafter.params, state.keys, state.drafter, state.text, sampling)
    laws = np.asarray(proposal.probs.probs)
    np.testing.assert_array_equal(proposal.probs.ids, ids)
    np.testing.assert_allclose(laws.sum(-1), 1, atol=1e-5)
    assert ((laws > 0).sum(-1) == np.array([[1], [len(ids) - 1], [3]])).all() and not laws[..., ids == 6].any()
    columns = np.searchsorted(ids, np.asarray(proposal.tokens))
    np.testing.assert_array_equal(ids[columns], proposal.tokens)
    assert (np.take_along_axis(laws, columns[..., None], -1) > 0).all() and np.asarray(proposal.valid).all()
    again, _ = draft3(drafter.draft, drafter.params, state.keys, after, state.text, sampling)
    np.testing.assert_array_equal(again.tokens, proposal.tokens)


def test_padded_ids_are_never_emitted():
    """Case 122: 16 tokens padded to 32 in the target, 19 to 32 in the draft; both models prefer the padding."""
    logits = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    logits[:, V:] += 50.0
    lm = position_lm(logits, Toy(PIECES))
    draft = position_lm(logits, Toy(OTHER))
    options = {"banned_tokens": list(range(V, 32)), "max_new_tokens": 24, "temperature": [0.0, 1.0, 5.0]}
    drafter = drafters.translate(draft, lm, 3)
    out = specjax.generate(lm, [[2], [3, 4], [5]], drafter=drafter, **options)
    assert max(max(row) for row in out.tokens) < V and out.stats.proposed > 0
    assert out.tokens[0] == specjax.generate(lm, [[2]], **{**options, "temperature": 0.0}).tokens[0]


# --- where the draft cannot follow


@pytest.mark.full
@pytest.mark.parametrize(
    ("context", "sizes", "valid"),
    [
        (48, [7, 6, 4], [[0, 0, 0], [1, 0, 0], [1, 1, 1]]),
        pytest.param(  # two slots for each of 64 target tokens
            None, [30, 16, 4], [[0, 0, 0], [1, 0, 0], [1, 1, 1]], marks=pytest.mark.full,
        ),
    ],
)
def test_a_spelling_that_outgrows_the_draft_ends_drafting_and_nothing_else(context, sizes, valid):
    """Case 121: where the draft's context or cache is full drafting pauses, row by row; nothing is clamped."""
    draft = lm_of([b"a", b"b", b"c", b"d"], context=context)
    lm = target()._replace(tokenizer=Toy([*PIECES[:4], b"abcdabcd", *PIECES[5:]]))  # token 4 is read as eight
    drafter = drafters.translate(draft, lm, 3, max_length=48)
    prompts = [[4] * size for size in sizes]
    state, alone = begin(lm, prompts, drafter), begin(lm, prompts)
    np.testing.assert_array_equal(state.drafter.read, 8 * np.array(sizes))
    np.testing.assert_array_equal(state.drafter.cache.lengths, np.minimum(8 * np.array(sizes), 128))
    sampling = specjax.make_sampling(3, V)
    proposal, _ = draft3(drafter.draft, drafter.params, state.keys, state.drafter, state.text, sampling)
    np.testing.assert_array_equal(proposal.valid, np.array(valid, bool))
    for _ in range(2):
        state, info = advance(lm, drafter, state)
    np.testing.assert_array_equal(state.counts.proposed[0], 0)
    assert info.count[0] == 1 and state.counts.proposed[2] > 0
    for _ in range(8):
        alone, _ = advance(lm, None, alone)
    for got, expected in zip(emitted(state), emitted(alone), strict=True):
        assert got and got == expected[: len(got)]


def test_a_text_of_which_the_draft_read_nothing_is_not_drafted_for():
    """An unknown control token alone; as soon as there is text there are drafts."""
    lm = position_lm(dictated([EOS, 2, 3, 2, 3, 2, 3], V), Toy(PIECES))
    draft = lm_of([b"a", b"b", b"c", b"d"])
    drafter = drafters.translate(draft, lm, 2)
    state = begin(lm, [[EOS], [2]], drafter)
    np.testing.assert_array_equal(state.drafter.read, [0, 1])
    state, info = advance(lm, drafter, state)
    np.testing.assert_array_equal(state.counts.proposed, [0, 2])
    assert info.count[0] == 1 and emitted(state)[0] == [2]
    state, _ = advance(lm, drafter, state)
    assert state.counts.proposed[0] == 2


# --- laws and programs


LAW_PIECES = (b"ab", b"a", b"b")
LAW_LENGTH, ROWS = 4, 8000
LAWS = {"two shared": (b"b", b"x", b"a", b"y"), "three shared": (b"b", b"x", b"ab", b"a")}
LAW_OPTIONS = [
    Options(temperature=0.0), Options(), Options(temperature=0.7, top_p=0.9), Options(repetition_penalty=1.7),
    Options(bias={1: 0.8, 0: -0.5}, top_k=2), Options(bias={1: -np.inf}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "shared", "how"),
    [
        ("rejection", "two shared", {}),
        pytest.param("rejection", "three shared", {}, marks=pytest.mark.full),
        pytest.param("block", "two shared", {}, marks=pytest.mark.full),
        pytest.param("match", "three shared", {}, marks=pytest.mark.full),
        pytest.param("match", "two shared", {"coupled": True}, marks=pytest.mark.full),
        pytest.param("rejection", "three shared", {"begins": True}, marks=pytest.mark.full),
    ],
)
def test_four_tokens_follow_the_law_of_plain_decoding(rule, shared, how):
    """Vocabularies of 3 and 4 tokens that share 2 or 3, over several rounds; a token the draft cannot say is said
    with its right probability."""
    config = HashConfig(3)
    model, params = hash_lm(config, seed=0)
    lm = LanguageModel(model, params, Toy(LAW_PIECES))
    pieces = LAWS[shared]
    if how.get("begins"):
        pieces = (*pieces, b"<s>")
    draft = lm_of(pieces, begins=how.get("begins", False))
    drafter = drafters.translate(draft, lm, 2, coupled=how.get("coupled", False))
    assert drafter.params.vocabularies.num_shared == {"two": 2, "three": 3}[shared.split()[0]]
    laws = target_laws(config, 0, LAW_OPTIONS, LAW_LENGTH)

    def sample(seed):
        tokens, rounds = emit(model, params, drafter, rule, LAW_OPTIONS, LAW_LENGTH, ROWS, seed)
        assert (rounds < LAW_LENGTH).mean() > 0.2 and (rounds >= 2).mean() > 0.5
        return np.stack([histogram(rows, 3) for rows in tokens])

    assert_law(sample, laws, LAW_OPTIONS)


def test_freshly_built_equal_drafters_compile_once():
    def generate(budget):
        drafter = drafters.translate(lm_of(OTHER), toy_target(), 3)
        return specjax.generate(toy_target(), prompts_of(), drafter=drafter, max_new_tokens=budget)

    generate(BUDGET)
    before = loop.compiled_programs()
    generate(BUDGET - 1)
    assert loop.compiled_programs() == before
