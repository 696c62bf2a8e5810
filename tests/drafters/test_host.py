"""Python between the rounds: what it is asked, what becomes of its answer, and that the law stays exact."""

import numpy as np
import pytest

import specjax
from specjax import LanguageModel, drafters, loop
from specjax.drafters.host import written
from tests.doubles import hash_lm
from tests.exactness.harness import assert_law, histogram, target_laws
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options
from tests.small import PROMPTS, V, begin, run, target

N = 3


def follow(texts, wrong=()):
    """Proposes the continuation of whichever of ``texts`` a row begins; at the lengths in ``wrong`` the second id is
    off by one. Keeps what it was asked."""
    asked = []

    def propose(rows):
        asked.append([None if row is None else list(row) for row in rows])
        return [[] if row is None else next_of(row) for row in rows]

    def next_of(row):
        text = next(text for text in texts if text[: len(row)] == row)
        ids = text[len(row) : len(row) + N]
        return [(t + 1) % V if i == 1 and len(row) in wrong else t for i, t in enumerate(ids)]

    return propose, asked


@pytest.fixture(scope="module")
def plain_texts():
    tokens = run(max_new_tokens=16).tokens
    return tokens, [prompt + new for prompt, new in zip(PROMPTS, tokens, strict=True)]


def test_the_host_is_asked_before_every_round_and_its_tokens_are_judged(plain_texts):
    """Right ones are accepted, a wrong one costs nothing but time; the rows it sees are prompt and committed tokens."""
    tokens, texts = plain_texts
    propose, asked = follow([text + [0] * N for text in texts])
    out = specjax.generate(target(), PROMPTS, drafter=drafters.host(lambda: propose, N), max_new_tokens=16)
    assert out.tokens == tokens and out.stats.alpha == 1.0 and out.stats.tau == 4
    assert len(asked) == 4 and asked[0] == PROMPTS
    assert asked[2] == [text[: len(prompt) + 8] for text, prompt in zip(texts, PROMPTS, strict=True)]
    propose, asked = follow([text + [0] * N for text in texts], wrong=range(3, 9))
    out = specjax.generate(target(), PROMPTS, drafter=drafters.host(lambda: propose, N), max_new_tokens=16)
    assert out.tokens == tokens and out.stats.alpha < 1 and len(asked) > 4


def test_rows_that_have_finished_are_none_and_rows_without_a_proposal_decode_plainly(plain_texts):
    tokens, texts = plain_texts
    propose, asked = follow([texts[0], *[[*text, 0] for text in texts[1:]]])
    budget = [2, *[16] * 7]
    drafter = drafters.host(lambda: lambda rows: [p if i < 2 else [] for i, p in enumerate(propose(rows))], N)
    out = specjax.generate(target(), PROMPTS, drafter=drafter, max_new_tokens=budget)
    assert out.tokens == [row[:size] for row, size in zip(tokens, budget, strict=True)]
    assert asked[1][0] is None and all(row is not None for row in asked[1][1:])
    assert (out.stats.counts.proposed[2:] == 0).all() and out.stats.counts.rounds[2] == 16


def test_every_generation_starts_anew(plain_texts):
    """start is called once per generation; streams too; other functions compile nothing new."""
    tokens, texts = plain_texts
    started = []

    def start():
        started.append(len(started))
        return follow([text + [0] * N for text in texts])[0]

    drafter = drafters.host(start, N)
    streams = [specjax.stream(target(), PROMPTS[i], drafter=drafter, max_new_tokens=16) for i in (0, 2)]
    assert started == []
    for stream, row in zip(streams, (0, 2), strict=True):
        list(stream)
        assert stream.result.tokens == [tokens[row]] and stream.result.stats.tau == 4
    assert started == [0, 1]
    before = loop.compiled_programs()
    again = specjax.stream(target(), PROMPTS[0], drafter=drafters.host(lambda: lambda rows: [[]], N), max_new_tokens=16)
    list(again)
    assert again.result.tokens == [tokens[0]] and again.result.stats.proposed == 0
    assert loop.compiled_programs() == before


def test_longer_proposals_are_cut_and_a_proposal_is_for_one_round():
    state = written([[1, 2, 3, 4, 5], [], np.array([7])], N)
    np.testing.assert_array_equal(state.tokens, [[1, 2, 3], [0, 0, 0], [7, 0, 0]])
    np.testing.assert_array_equal(state.count, [3, 0, 1])
    drafter = drafters.host(lambda: lambda rows: [[]], N)
    start = begin(target(), PROMPTS[:3], drafter)
    assert not start.drafter.count.any()
    committed = specjax.Committed(state.tokens, state.tokens[..., None], state.count, state.count)
    assert not drafter.observe((), state, committed).count.any()


def test_answers_that_make_no_sense_are_refused():
    """With row and value; settings where they are given."""
    for answer, message in (
        ([], r"gave 0 proposals for 1 rows"),
        ([[1], [2]], r"gave 2 proposals for 1 rows"),
        ([[1, -1]], r"proposal 0, token 1=-1: must be a whole number"),
        ([[1.0]], r"proposal 0, token 0=1\.0"),
        ([["a"]], r"proposal 0, token 0='a'"),
        (None, r"gave None: give a list of token ids per row"),
        ([None], r"proposal 0 is None: give a list of token ids"),
        (["ab"], r"proposal 0 is 'ab': give a list of token ids"),
    ):
        drafter = drafters.host(lambda answer=answer: lambda rows: answer, N)
        with pytest.raises(ValueError, match=message):
            specjax.generate(target(), [[1]], drafter=drafter, max_new_tokens=16)
    for start, how, message in (
        (5, {}, r"start=5: give a function"),
        (list, {"vocab_size": 0}, r"vocab_size=0.*None is any"),
        (list, {"num_draft_tokens": 0}, r"num_draft_tokens=0.*drafter=None"),
    ):
        with pytest.raises(ValueError, match=message):
            drafters.host(start, **how)
    with pytest.raises(ValueError, match=r"made for a target of 5 tokens"):
        specjax.generate(target(), [[1]], drafter=drafters.host(list, vocab_size=5))


def test_a_token_outside_the_vocabulary_is_never_accepted(plain_texts):
    drafter = drafters.host(lambda: lambda rows: [[V + 3, 1]] * len(rows), N)
    out = specjax.generate(target(), PROMPTS, drafter=drafter, max_new_tokens=16)
    assert out.tokens == plain_texts[0] and out.stats.accepted == 0


@pytest.mark.parametrize("rule", ["rejection", pytest.param("match", marks=pytest.mark.full)])
def test_three_tokens_follow_the_law_of_plain_decoding(rule):
    """A function of the text is a point mass, also when Python makes it."""
    config, rows = HashConfig(3), 3000
    model, params = hash_lm(config, seed=0)
    options = [Options(), Options(temperature=0.7, top_p=0.9)]
    laws = target_laws(config, 0, options, 3)
    drafter = drafters.host(lambda: lambda rows: [[] if r is None else [sum(r) % 3, r[-1], 1] for r in rows], N)

    def sample(seed):
        out = specjax.generate(
            LanguageModel(model, params), [[1, 2, 0]] * (2 * rows), drafter=drafter, rule=rule, max_new_tokens=3,
            temperature=[1.0] * rows + [0.7] * rows, top_p=[1.0] * rows + [0.9] * rows, seed=seed * 2 * rows,
            prefill_chunk=4,
        )  # fmt: skip
        assert 0.2 < out.stats.alpha < 0.9
        tokens = np.asarray(out.tokens).reshape(2, rows, 3)
        return np.stack([histogram(each, 3) for each in tokens])

    assert_law(sample, laws, options)
