"""stream: the same text as generate, in whole characters, interruptible."""

import itertools

import numpy as np
import pytest

import specjax
from specjax import loop
from tests.doubles import flip
from tests.small import (
    BUDGET,
    CAPACITY,
    PROMPTS,
    ToyTokenizer,
    V,
    dictated,
    draft_source,
    oracle,
    position_lm,
    run,
    target,
)  # fmt: skip


def assert_same(result: specjax.Generation, expected: specjax.Generation):
    assert (result.tokens, result.texts, result.finish_reasons) == (
        expected.tokens, expected.texts, expected.finish_reasons,
    )  # fmt: skip
    for ours, theirs in zip(result.stats.counts, expected.stats.counts, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name, rule", [("none", "match"), ("ngram", "match"), ("close", "rejection")])
def test_a_stream_says_what_generate_says_in_whole_characters(name, rule):
    """Pieces put together are the text; the result is the same, counts included."""
    for prompt, seed in itertools.product(PROMPTS[:3], (0, 5, 9)):
        options = {"max_new_tokens": BUDGET, "temperature": 1.0, "seed": seed, "rule": rule}
        stream = specjax.stream(target(), prompt, drafter=draft_source(name, 3), **options)
        pieces = list(stream)
        expected = run(name, prompts=[prompt], **options)
        assert_same(stream.result, expected)
        assert "".join(pieces) == expected.texts[0] and all(pieces)


def test_no_piece_ends_in_half_a_character():
    """é in two tokens, € in three, across rounds; a text that ends in half of one says so at its end."""
    said = "é€a\n"
    ids = [7, 8, 10, 11, 12, 2, 15]
    lm = position_lm(dictated([2, *ids, 7], V), ToyTokenizer())
    for k in (1, 2, 4):
        drafter = oracle(np.pad([2, *ids, 7], (0, CAPACITY - 9)), k)
        pieces = list(specjax.stream(lm, [2], drafter=drafter, max_new_tokens=7))
        assert "".join(pieces) == said and not any("\ufffd" in piece for piece in pieces)
        assert list(specjax.stream(lm, [2], drafter=drafter, max_new_tokens=8))[-1] == "\ufffd"


def test_pieces_tell_whether_they_were_drafted():
    """Runs of accepted tokens are one piece with drafted=True, the target's own token another."""
    text = [2, *([3, 4, 5, 6, 13, 14] * 3)]
    lm = position_lm(dictated(text, V), ToyTokenizer())
    stream = specjax.stream(lm, [2], drafter=oracle(np.pad(text, (0, CAPACITY - 19)), 4, wrong=flip(3, 4)),
                            max_new_tokens=12)  # fmt: skip
    pieces = [(piece, stream.drafted) for piece in stream]
    decode = ToyTokenizer().decode
    assert pieces == [(decode(text[i:j]), j - i > 1) for i, j in ((1, 4), (4, 5), (5, 8), (8, 9), (9, 12), (12, 13))]
    assert stream.result.stats.accepted == 9


def test_two_streams_at_once_do_not_touch_each_other():
    """Interleaved, uneven, with the same drafter."""
    drafter = draft_source("close", 3)
    options = {"drafter": drafter, "max_new_tokens": BUDGET, "temperature": 1.0, "rule": "rejection"}
    make = [lambda i=i: specjax.stream(target(), PROMPTS[i], seed=i, **options) for i in (0, 2)]
    expected = [list(each()) for each in make]
    streams, got = [each() for each in make], [[], []]
    for turn in itertools.cycle([0, 1, 1]):
        piece = next(streams[turn], None)
        if piece is None:
            break
        got[turn].append(piece)
    for turn in (0, 1):
        got[turn] += list(streams[turn])
    assert got == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_stream_keeps_what_it_had(monkeypatch, error):
    """Ctrl-C in the middle of a round: text, tokens and counts of the rounds before it."""
    text = [2, *([3, 4, 5, 6, 13] * 4)]
    lm = position_lm(dictated(text, V), ToyTokenizer())
    stream = specjax.stream(lm, [2], drafter=oracle(np.pad(text, (0, CAPACITY - 21)), 4), max_new_tokens=20)
    step, calls = loop.step, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return step(*args)

    monkeypatch.setattr(loop, "step", interrupted)
    pieces = []
    with pytest.raises(error):
        for piece in stream:
            pieces.append(piece)
    result = stream.result
    assert result.tokens == [text[1:11]] and result.texts == ["".join(pieces)] and result.finish_reasons == [None]
    assert result.stats.emitted == 10 and result.stats.tau == 5.0
    assert list(stream) == []


def test_a_stream_left_early_keeps_what_it_had():
    """break, then .result; before the first piece there is an empty one."""
    stream = specjax.stream(target(), PROMPTS[0], max_new_tokens=BUDGET)
    assert stream.result.tokens == [[]] and stream.result.finish_reasons == [None]
    for _ in stream:
        break
    kept = stream.result
    assert 0 < len(kept.tokens[0]) < BUDGET
    assert kept.tokens[0] == run(prompts=[PROMPTS[0]]).tokens[0][: len(kept.tokens[0])]
