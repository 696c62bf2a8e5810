"""Every sampling option means the same with and without speculation; so do reported log-probabilities."""

import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters
from tests.doubles import flip
from tests.small import (
    CAPACITY,
    PROMPTS,
    V,
    logits_of,
    oracle,
    padded,
    position_lm,
    run,
    target,
)  # fmt: skip

OPTIONS = {  # name -> options under which it changes the text
    "temperature": {"temperature": [0.0, 0.2, 0.5, 0.8, 1.0, 1.3, 2.0, 4.0]},
    "top_k": {"temperature": 1.0, "top_k": [1, 2, 3, 4, 5, 6, V, 10**6]},
    "top_p": {"temperature": 1.0, "top_p": [1e-9, 0.2, 0.4, 0.5, 0.6, 0.8, 0.95, 1.0]},
    "min_p": {"temperature": 1.0, "min_p": [0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.9, 1.0]},
    "repetition_penalty": {"repetition_penalty": [1.1, 1.3, 2.0, 0.7, 5.0, 1.0, 1.5, 1.2]},
    "presence_penalty": {"presence_penalty": [0.2, 0.5, 1.0, -1.0, 2.0, 0.0, 5.0, 0.1]},
    "frequency_penalty": {"frequency_penalty": [0.1, 0.3, 0.5, -0.5, 1.0, 0.0, 2.0, 0.2]},
    "logit_bias": {"logit_bias": [{i: 3.0, (i + 1) % V: -2.0, (i + 2) % V: -np.inf} for i in range(8)]},
    "banned_tokens": {"banned_tokens": [[1, 3], [3], [0, 1, 2], [5], [1], [4, 4], list(range(8)), [9]]},
    "min_new_tokens": {"temperature": 1.0, "eos_ids": [1, 3, 4], "min_new_tokens": [0, 1, 2, 3, 5, 8, 13, 40]},
    "eos_ids": {"temperature": 1.0, "eos_ids": [7, 2]},
}


def test_the_table_has_every_public_sampling_option():
    """Case 76: an option added later has to be added here."""
    public = set(inspect.signature(specjax.make_sampling).parameters) - {"batch", "vocab_size"}
    assert public == set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_speculation_honours_every_sampling_option(option):
    """Cases 68, 72-77: plain's own text under `match`, looked up or drafted; the option does something."""
    options = OPTIONS[option]
    expected = run(**options)
    without = {name: value for name, value in options.items() if name != option}
    assert expected.tokens != run(**without).tokens
    for name in ("ngram", "coupled"):
        out = run(name, **options)
        assert out.tokens == expected.tokens and out.finish_reasons == expected.finish_reasons


def test_all_sampling_options_together():
    """Case 76: and all of it at once, penalties at temperature one included."""
    options = {
        "temperature": 0.9, "top_k": 9, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.0}, "banned_tokens": [5],
        "min_new_tokens": 6, "eos_ids": [1, 4],
    }  # fmt: skip
    assert set(options) == set(OPTIONS)
    expected = run(**options)
    for name in ("ngram", "coupled", "self"):
        assert run(name, **options).tokens == expected.tokens


def test_filters_are_the_same_in_draft_and_verification_for_every_combination():
    """Case 75: 27 combinations; a self-draft under `rejection` is accepted whole only if both laws are equal."""
    grid = list(itertools.product([0.5, 1.0, 2.0], [0, 2, 5], [1.0, 0.8, 0.3], [0.0, 0.1, 0.3]))
    grid += grid[: -len(grid) % 8]
    for i in range(0, len(grid), 8):
        temperature, top_k, top_p, min_p = (list(column) for column in zip(*grid[i : i + 8]))
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "max_new_tokens": 12}
        assert run("self", rule="rejection", **options).stats.alpha == 1.0
        assert run("self", **options).tokens == run(**options).tokens


def test_ties_at_the_edge_of_top_k_keep_two_ids_in_every_path():
    """Case 74: logits (2, 1, 1, 1), top_k = 2: ids 0 and 1, drafted, verified or plain."""
    lm = position_lm(np.tile([2.0, 1.0, 1.0, 1.0], (CAPACITY, 1)))
    for drafter in (None, drafters.model(lm, lm, 4)):
        out = specjax.generate(lm, [[3]], n=8, drafter=drafter, temperature=2.0, top_k=2, max_new_tokens=25)
        assert set(itertools.chain(*out.tokens)) == {0, 1}
        assert drafter is None or out.stats.alpha == 1.0


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-30, 1e-39])
def test_tiny_temperatures_are_greedy_in_every_path(temperature):
    """Case 27."""
    for name in ("none", "self"):
        assert run(name, temperature=temperature, rule="match").tokens == run().tokens


PENALTIES = ["repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize("option", PENALTIES)
@pytest.mark.parametrize("wrong", [flip(9, 4), flip(0, 4), flip(2, 4), np.ones(4, bool)], ids=str)
def test_penalties_count_drafted_ancestors_and_forget_rejected_ones(option, wrong):
    """Cases 77 and 79: drafts that are right, wrong first, wrong in the middle, all wrong; greedy text equals plain."""
    options = {option: 1.7, "max_new_tokens": 24}
    expected = run(prompts=[[1]], **options)
    assert expected.tokens[0] != run(prompts=[[1]], max_new_tokens=24).tokens[0]
    script = np.zeros((1, CAPACITY), np.int32)
    script[0, :25] = [1, *expected.tokens[0]]
    drafter = oracle(script, 4, wrong=wrong)
    out = specjax.generate(target(), [[1]], drafter=drafter, **options)
    assert out.tokens == expected.tokens
    slots = 4 if not wrong.any() else int(np.argmax(wrong))
    assert out.stats.rounds == math.ceil(24 / (1 + slots))


# --- log-probabilities


@pytest.mark.parametrize("name, rule", [("ngram", "match"), ("close", "rejection")])
def test_reported_logprobs_are_those_of_plain_decoding(name, rule):
    """Case 80: raw and warped, one per emitted token, bonus and residual tokens and a cut at an end id included."""
    options = {"prompts": PROMPTS[:3], "logprobs": True, "eos_ids": [5], "repetition_penalty": 1.1}
    expected, out = run(**options), run(name, rule=rule, **options)
    assert out.tokens == expected.tokens and "stop" in out.finish_reasons
    for ours, theirs in ((out.logprobs, expected.logprobs), (out.warped_logprobs, expected.warped_logprobs)):
        for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert len(a) == len(out.tokens[row]) and a.dtype == np.float32
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_logprobs_of_sampled_text_are_those_of_reading_it_again():
    """Case 80 at temperature one under `rejection`: recomputed from one pass over the emitted text."""
    sampling = {"temperature": [1.0, 0.7, 1.3], "top_k": [0, 6, 0], "top_p": [1.0, 1.0, 0.9]}
    out = run("close", prompts=PROMPTS[:3], rule="rejection", logprobs=True, **sampling)
    texts = padded([p + t for p, t in zip(PROMPTS, out.tokens)])
    logits = logits_of(target().model, target().params, texts.tokens)
    raw, warped = jax.nn.log_softmax(logits), jnp.log(specjax.warp(logits, specjax.make_sampling(3, V, **sampling)))
    for row, tokens in enumerate(out.tokens):
        at = len(PROMPTS[row]) - 1 + np.arange(len(tokens))
        np.testing.assert_allclose(out.logprobs[row], raw[row, at, np.array(tokens)], atol=1e-5)
        np.testing.assert_allclose(out.warped_logprobs[row], warped[row, at, np.array(tokens)], atol=2e-5)
    assert 0 < out.stats.accepted < out.stats.proposed


def test_greedy_warped_logprobs_are_zero_and_raw_ones_are_not():
    """Case 80: a point mass has log-probability 0; the raw law says how sure the model was."""
    out = run(prompts=PROMPTS[:3], logprobs=True)
    assert all((row == 0).all() for row in out.warped_logprobs)
    assert all((row < 0).all() for row in out.logprobs)
    assert run(prompts=PROMPTS[:3]).logprobs is None
