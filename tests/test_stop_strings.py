"""Stop strings: where tokens end, where the text is cut, what a stream holds back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.result import StopStrings
from tests.small import EOS, ToyTokenizer
from tests.test_stops import both, dictate

SAID = "cab é€ da\nbé ab"


def said(prompt=(2,)):
    return dictate([*ToyTokenizer().encode(SAID), EOS], prompt)


def expected(tokens, tokenizer, stop):
    """Tokens up to the one that completes a stop string, and the text before it."""
    for length in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:length])
        found = [text.find(s) for s in stop if s in text]
        if found:
            return tokens[:length], text[: min(found)], "stop"
    return tokens, tokenizer.decode(tokens), "stop"  # its end id


@pytest.mark.parametrize(
    "stop", ["a", "é", "€ d", "b é", "ab", "é€", "a\nb", "\nbé a", ["zz", "da"], ["é", "b é"], "no", "c", "cab é"]
)
def test_tokens_end_with_the_one_that_completes_a_stop_string_and_the_text_is_cut_before_it(stop):
    """Case 64: one rule for tokens, log-probabilities, counts and text; in halves of characters, across rounds."""
    lm, drafter, prompt = said()
    stops = [stop] if isinstance(stop, str) else stop
    tokens, text, reason = expected([*ToyTokenizer().encode(SAID), EOS], lm.tokenizer, stops)
    out = both(lm, drafter, [prompt], stop=stop, eos_ids=EOS, logprobs=True)
    assert (out.tokens, out.texts, out.finish_reasons) == ([tokens], [text], [reason])
    assert len(out.logprobs[0]) == len(out.warped_logprobs[0]) == len(tokens)
    assert out.stats.accepted <= out.stats.emitted and sum(out.stats.counts.judged_at[0]) <= len(tokens)
    stream = specjax.stream(lm, prompt, stop=stop, eos_ids=EOS, drafter=drafter, logprobs=True)
    assert "".join(stream) == text
    assert stream.result.tokens == [tokens] and stream.result.finish_reasons == [reason]
    np.testing.assert_array_equal(stream.result.logprobs[0], out.logprobs[0])


def test_rows_of_a_batch_meet_their_stop_strings_each_in_its_own_round():
    """Case 64 in a batch: one row stops at once, one late, one at its budget; each as alone."""
    lm, drafter, _ = said()
    text = [2, *ToyTokenizer().encode(SAID)]
    prompts = [text[:1], text[:3], text[:10]]
    options = {"stop": ["é€", "é a"], "max_new_tokens": [20, 2, 20], "eos_ids": EOS}
    out = both(lm, drafter, prompts, **options)
    assert out.finish_reasons == ["stop", "length", "stop"]
    assert out.texts == ["cab ", " \ufffd", ToyTokenizer().decode(text[10:]).split("é a")[0]]
    for row, prompt in enumerate(prompts):
        alone = specjax.generate(lm, [prompt], drafter=drafter, **{**options, "max_new_tokens": [20, 2, 20][row]})
        assert (alone.tokens[0], alone.texts[0]) == (out.tokens[row], out.texts[row])


def test_a_stop_string_across_the_prompt_boundary_does_not_match():
    """Only generated text is searched."""
    text = ToyTokenizer().encode("cab ab")
    lm, drafter, _ = dictate(text[2:], prompt=tuple(text[:2]))
    out = both(lm, drafter, [text[:2]], stop="cab", max_new_tokens=2)
    assert out.finish_reasons == ["length"]


def test_stop_strings_and_sequences_together_whichever_comes_first():
    """Case 64."""
    lm, drafter, prompt = said()
    tokens = ToyTokenizer().encode(SAID)
    first = both(lm, drafter, [prompt], stop=["é€", tokens[:2]], max_new_tokens=12)
    assert first.tokens == [tokens[:2]] and first.finish_reasons == ["stop"]
    second = both(lm, drafter, [prompt], stop=["a", tokens[2:4]], max_new_tokens=12)
    assert second.texts == ["c"] and second.finish_reasons == ["stop"]


@settings(deadline=None, max_examples=150)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.data())
def test_stop_strings_hold_back_only_what_may_still_become_one(text, stops, data):
    """Pieces in, safe text out: however the text is cut into pieces."""
    watch, shown, rest = StopStrings(stops), "", text
    while rest and not watch.found:
        size = data.draw(st.integers(1, len(rest)))
        shown, rest = shown + watch.push(rest[:size]), rest[size:]
        so_far = text[: len(text) - len(rest)]
        if not watch.found:
            assert so_far == shown + watch.held
            assert not watch.held or any(stop.startswith(watch.held) for stop in stops)
    if watch.found:
        assert not any(stop in shown for stop in stops) and any(stop in text for stop in stops)
        assert text.startswith(shown)
    else:
        assert shown + watch.flush() == text and not any(stop in text for stop in stops)
