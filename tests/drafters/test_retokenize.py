"""Drafting by way of text: what the draft model reads and writes, and what becomes of it in target tokens."""

import functools

import numpy as np
import pytest

import specjax
from specjax import LanguageModel, drafters
from specjax.drafters.retokenize import _continue, _read, _suffix, _Writer
from tests.doubles import hash_lm
from tests.drafters.test_translate import OTHER, SPACED, Toy
from tests.oracle.hashlm import HashConfig
from tests.small import EOS, PIECES, PROMPTS, V, dictated, position_lm, target

SINGLE = (b"<s>", b"</s>", *(bytes([byte]) for byte in b"abcdef "))


class Text(Toy):
    """A `Toy` whose encode takes what the library's does."""

    def encode(self, text, *, add_special_tokens=True):
        data, ids = text.encode(), []
        while data:
            fitting = [i for i, piece in enumerate(self.pieces) if data.startswith(piece)]
            ids += [max(fitting, key=self._length)] if fitting else []  # what it does not know it leaves out
            data = data[self._length(ids[-1]) if fitting else 1 :]
        return [self.bos_id] * (self.begins and add_special_tokens) + ids


@functools.cache
def lm() -> LanguageModel:
    return target()._replace(tokenizer=Text(PIECES))


def model_of(pieces, seed=5, *, context=None, **how) -> LanguageModel:
    model, params = hash_lm(HashConfig(len(pieces), num_layers=1), seed)
    return LanguageModel(model._replace(context_length=context), params, Text(pieces, **how))


def writer(draft, target_lm, own=4):
    return _Writer(draft, target_lm, own)


def prompts_of():
    return [*PROMPTS, *map(lm().tokenizer.encode, SPACED)]


@pytest.mark.parametrize("begins", [True, pytest.param(False, marks=pytest.mark.full)])
def test_greedy_text_is_that_of_plain_decoding(begins):
    """Case 123: ' a  b', parts of characters, control tokens, tokens that encoding would never give, in one batch."""
    drafter = drafters.retokenize(model_of(OTHER, begins=begins), lm(), 4)
    out = specjax.generate(lm(), prompts_of(), drafter=drafter, max_new_tokens=24)
    expected = specjax.generate(lm(), prompts_of(), max_new_tokens=24)
    assert (out.tokens, out.texts) == (expected.tokens, expected.texts)
    assert 0 < out.stats.accepted < out.stats.proposed and out.lossless


def test_the_target_itself_under_other_ids_is_always_right():
    """Where a text has one spelling only: what it reads, its positions and its cache over rounds are right."""
    model, params = hash_lm(HashConfig(len(SINGLE)), 5)  # says different things
    banned = {"banned_tokens": [0, 1]}
    theirs = LanguageModel(model, params, Text(SINGLE))
    order = np.array([4, 7, 3, 8, 2, 6, 5])  # no control tokens
    same = {**params, "embed": params["embed"][order], "head": params["head"][order]}
    draft = LanguageModel(hash_lm(HashConfig(len(order)))[0], same, Text([SINGLE[i] for i in order]))
    prompts = [theirs.tokenizer.encode(text) for text in ("abc", "f", "ab cd", "eeee")]
    drafter = drafters.retokenize(draft, theirs, 3)
    out = specjax.generate(theirs, prompts, drafter=drafter, max_new_tokens=24, **banned)
    assert out.tokens == specjax.generate(theirs, prompts, max_new_tokens=24, **banned).tokens
    assert out.stats.alpha == 1.0 and min(len({*row}) for row in out.tokens) > 2


def test_a_draft_token_may_be_several_target_tokens():
    """More target tokens per round than the draft writes; they are all right here."""
    text = [2, *([3, 6, 13, 2] * 5)]  # a bcda bcda ..
    theirs = position_lm(dictated(text, V), Text([*PIECES[:4], b"-", *PIECES[5:]]))  # no piece for ab
    pieces = [b"a", b"bcda", b"b"]
    draft = position_lm(dictated([0, *[1] * 20], 3), Text(pieces))
    drafter = drafters.retokenize(draft, theirs, 7, num_own_tokens=2)
    stream = specjax.stream(theirs, [2], drafter=drafter, max_new_tokens=16)
    assert "".join(stream) == "bcda" * 4
    assert stream.result.stats.rounds == 2 and stream.result.stats.alpha == 1.0


def test_what_was_read_before_changes_nothing():
    """One writer over growing, shrinking, finished and unreadable rows says what a fresh one says each time."""
    draft, tokenizer = model_of([piece for piece in OTHER if piece != b"x"], 1), lm().tokenizer
    kept, said = writer(draft, lm()), []
    a, b, long = tokenizer.encode("ab a"), tokenizer.encode("  b\n"), tokenizer.encode("dcab " * 12)
    half = [*a, PIECES.index(b"\xc3")]
    for rows in (
        [a, b, a], [[*a, 3], b, long], [half, [*b, 2], long[:20]], [[*half, 8], None, [*long, 2]], [a, None, b],
        [long, None, a], [[*a, 2, 3, 5], None, a],
    ):  # fmt: skip
        expected = writer(draft, lm())(rows)
        assert kept(rows) == expected
        assert (rows[0] != half or expected[0] == []) and (rows[1] is not None or expected[1] == [])
        said += expected
    assert sum(len(ids) > 1 for ids in said) > 10


def test_equal_models_compile_once():
    """Writers come and go with every generation; their programs stay."""
    rows = [lm().tokenizer.encode(text) for text in ("ab a", "  b\n", "dcab " * 12)]

    def programs():
        writer(model_of(OTHER, 1), lm())(rows)
        return _read._cache_size(), _continue._cache_size()

    assert programs() == programs()


def test_caches_grow_and_a_full_context_ends_drafting():
    draft, long = model_of(OTHER), lm().tokenizer.encode("dcab " * 60)
    kept = writer(draft, lm())
    assert kept([long[:100]]) and kept.slots == 256
    assert kept([long]) == writer(draft, lm())([long]) != [[]] and kept.slots == 512
    short = writer(model_of(OTHER, context=40), lm())
    text = lm().tokenizer.encode("dcab" * 9)
    assert short([text, [2]])[0] and len(short.read[0]) == 36 + 3
    got = short([[*text, 13], [2]])
    assert got[0] == [] and got[1]


def test_the_end_of_the_draft_is_the_end_token_of_the_target():
    draft = position_lm(dictated([0, 1, 3], 4), Text([b"a", b"b", b"c", b"<end>"], special=(b"<end>",), eos=b"<end>"))
    assert writer(draft, lm())([[2]]) == [[3, EOS]]
    assert writer(draft, lm())([[2, 3]]) == [[EOS]]
    bare = lm()._replace(tokenizer=Text(PIECES, eos=b"-"))
    assert writer(draft, bare)([[2]]) == [[3]]


def test_the_tokens_of_an_ending_are_cut_where_it_begins():
    """The first piece may depend on what is before it; a token across the border is no answer."""
    tokenizer = Text([b"a", b"b", b"ab", b" ", b"\xe2\x82\xac", b"\xc3", b"\xa9"])
    assert _suffix(tokenizer, "b ab", "ab") == [2]
    assert _suffix(tokenizer, "aab", "b") == []
    assert _suffix(tokenizer, "b", "b") == [1]
    assert _suffix(tokenizer, "a€é", "€é") == [4, 5, 6]
    assert _suffix(tokenizer, "a", "") == _suffix(tokenizer, "abx", "x") == _suffix(tokenizer, "a bxb", "bxb") == []
    # ... in which case the ending is encoded alone
    draft = position_lm(dictated([0, 1], 2), Text([b"a", b"b"]))
    theirs = position_lm(dictated([0, 1], 3), Text([b"a", b"b", b"ab"]))
    assert writer(draft, theirs, 1)([[0]]) == [[1]]


def test_a_begin_token_comes_first_and_once():
    """Case 123: no begin token in the middle of a text, and not a second one."""
    draft = model_of(OTHER, begins=True)
    each = writer(draft, lm())
    for row in ([0, 2, 3], [2, 3]):
        each([row])
        assert each.read[0][:3] == draft.tokenizer.encode("ab") and each.read[0].count(draft.tokenizer.bos_id) == 1
    each([[2, 0, 3]])
    assert each.read[0][:4] == [OTHER.index(piece) for piece in (b"<s>", b"a", b"<s>", b"b")]  # one that was committed


def test_what_has_no_text_is_refused():
    bare = lm()._replace(tokenizer=None)
    for draft, theirs, how, message in (
        (bare, lm(), {}, r"draft model has no tokenizer.*text"),
        (lm(), bare, {}, r"target model has no tokenizer"),
        (lm(), lm(), {"num_draft_tokens": 0}, r"num_draft_tokens=0"),
        (lm(), lm(), {"num_own_tokens": 0}, r"num_own_tokens=0"),
        ("name", lm(), {}, r"specjax\.load"),
    ):
        with pytest.raises(ValueError, match=message):
            drafters.retokenize(draft, theirs, **how)
