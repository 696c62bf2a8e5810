"""generate on tiny models: the text is the target's own, whatever drafts it; what it costs; how it is called."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters
from tests.small import (
    BUDGET,
    CAPACITY,
    PROMPTS,
    ToyTokenizer,
    close,
    draft_source,
    position_lm,
    run,
    target,
)  # fmt: skip

RULES, DEPTHS, BATCHES = ("rejection", "match", "block"), (1, 2, 4, 7), (1, 3, 8)


@functools.cache
def plain(batch: int, temperature: float = 0.0) -> list[list[int]]:
    return run(prompts=PROMPTS[:batch], temperature=temperature).tokens


# --- the same text


def covering():
    """Every combination; those outside a subset that covers all pairs of values only in full runs."""
    for (i, k), (j, batch) in itertools.product(enumerate(DEPTHS), enumerate(BATCHES)):
        for rule, name in itertools.product(RULES, ("ngram", "close")):
            chosen = rule == RULES[(i + j) % 3] and name == ("ngram", "close")[(i + j) % 2]
            yield pytest.param(name, rule, k, batch, marks=[] if chosen else pytest.mark.full)


@pytest.mark.parametrize("name, rule, k, batch", list(covering()))
def test_greedy_speculative_text_is_plain_text(name, rule, k, batch):
    """Cases 29, 48: float32, token for token, both drafters, every rule, ragged batches."""
    out = run(name, k, PROMPTS[:batch], rule=rule)
    assert out.tokens == plain(batch)
    assert out.stats.emitted == batch * BUDGET and out.stats.tau > 1
    assert 0 < out.stats.accepted <= out.stats.proposed


@pytest.mark.parametrize("name, k", [("ngram", 3), ("ngram", 7), ("self", 3), ("coupled", 3)])
def test_match_says_at_temperature_one_what_plain_decoding_says(name, k):
    """Case 58: same seed, same text, for no drafter, any drafter, any K."""
    out = run(name, k, temperature=1.0)
    assert out.tokens == plain(8, 1.0)
    assert out.stats.accepted > 0


@pytest.mark.parametrize(
    "name, rule",
    [
        ("none", "match"), ("ngram", "match"), ("coupled", "match"), ("close", "rejection"),
        pytest.param("close", "block", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_row_says_alone_what_it_says_in_any_batch_at_any_index(name, rule):
    """Cases 26, 48, 56, 57: temperatures 0, 0.3 and 1 side by side, each row with its own seed."""
    temperatures = [0.0, 0.3, 1.0, 1.0, 0.3, 0.0, 1.0, 0.7]
    seeds = [7, 7, 0, 3, 2**32 - 1, 5, 12, 1]
    batch = run(name, rule=rule, temperature=temperatures, seed=seeds)
    order = [4, 2, 7, 0, 6, 1, 5, 3]
    moved = run(
        name, prompts=[PROMPTS[i] for i in order], rule=rule, temperature=[temperatures[i] for i in order],
        seed=[seeds[i] for i in order],
    )  # fmt: skip
    assert [batch.tokens[i] for i in order] == moved.tokens
    for row in (0, 2, 7):
        alone = run(name, prompts=[PROMPTS[row]], rule=rule, temperature=temperatures[row], seed=seeds[row])
        assert alone.tokens == [batch.tokens[row]]
    np.testing.assert_array_equal(alone.stats.counts.accepted_at[0], batch.stats.counts.accepted_at[7])


def test_the_neighbours_do_not_matter():
    """Case 57: other prompts, seeds and options beside a row."""
    usual = run("close", rule="rejection", temperature=1.0)
    others = [PROMPTS[0], *([[5, 5, 11]] * 6), PROMPTS[7]]
    other = run("close", prompts=others, rule="rejection", temperature=[1.0, *range(6), 1.0], seed=[0, *[9] * 6, 7])
    assert (other.tokens[0], other.tokens[7]) == (usual.tokens[0], usual.tokens[7])


@pytest.mark.parametrize("name", ["none", "ngram", "coupled"])
def test_samples_of_a_prompt_are_rows_with_seeds_of_their_own(name):
    """n: row i * n + j is sample j of prompt i, with seed s + i * n + j."""
    out = run(name, prompts=PROMPTS[:2], n=4, seed=20, temperature=1.0)
    expected = run(prompts=[PROMPTS[i // 4] for i in range(8)], seed=range(20, 28), temperature=1.0)
    assert out.tokens == expected.tokens
    assert len({tuple(row) for row in out.tokens[:4]}) == 4


def test_seeds_decide_and_an_int_counts_up():
    """A request is (prompt, its seed)."""
    assert run(temperature=1.0, seed=4).tokens == run(temperature=1.0, seed=np.arange(4, 12)).tokens
    same = run(prompts=[[3]] * 8, temperature=1.0, seed=[5, 6] * 4).tokens
    assert same[:2] * 4 == same and same[0] != same[1]
    assert run(prompts=[[3]] * 8).tokens == [run(prompts=[[3]] * 8, seed=99).tokens[0]] * 8  # greedy needs no seed


# --- acceptance


@pytest.mark.parametrize("rule, name", [("rejection", "self"), ("block", "self"), ("match", "self-coupled")])
def test_a_self_draft_at_temperature_one_is_accepted_whole(rule, name):
    """Cases 16 and 161: equal laws are never rejected."""
    stats = run(name, rule=rule, temperature=1.0).stats
    assert stats.alpha == 1.0 and stats.tau == BUDGET / math.ceil(BUDGET / 4)


def test_a_self_draft_is_accepted_whole_for_200_greedy_tokens():
    """Case 34: nothing decays with length."""
    stats = run("self", max_new_tokens=200).stats
    assert stats.alpha == 1.0 and stats.rounds == 8 * 50


def test_coupled_drafts_are_accepted_more_often_than_independent_ones():
    """Case 16: `match` with independent drafts is exact and wasteful."""
    coupled = run("coupled", temperature=1.0).stats
    independent = run("close", temperature=1.0).stats
    assert coupled.alpha > independent.alpha + 0.2


P, Q = (0.5, 0.5, 0.0, 0.0), (0.7, 0.3, 0.0, 0.0)


def test_acceptance_and_tokens_per_round_are_those_of_the_textbook():
    """Cases 16 and 152: K = 4, sum min(p, q) = 0.8, 3.3616 tokens a round with the bonus token; within 4 sigma."""
    lm, draft = (position_lm(np.tile(jnp.log(jnp.array(law)), (CAPACITY, 1))) for law in (P, Q))
    drafter = drafters.model(draft, lm, 4)
    stats = specjax.generate(lm, [[0]], n=8, drafter=drafter, max_new_tokens=250, temperature=1.0).stats
    judged = int(np.sum(stats.counts.judged_at))
    assert abs(stats.alpha - 0.8) < 4 * (0.8 * 0.2 / judged) ** 0.5
    assert abs(stats.tau - 3.3616) < 4 * 1.5 / stats.rounds**0.5
    assert stats.acceptance_rate == stats.accepted / stats.proposed
    np.testing.assert_allclose(stats.per_position, 0.8, atol=0.1)


def test_metrics_of_nothing_are_none():
    """Case 152: 0 / 0 is no rate."""
    stats = run().stats
    assert (stats.alpha, stats.acceptance_rate, stats.tau, stats.per_position) == (None, None, 1.0, [])
    assert specjax.generate(target(), []).stats.tau is None


# --- plumbing


def test_the_drafter_is_asked_for_as_many_tokens_as_were_requested():
    """Case 147."""
    asked, inner = [], drafters.ngram(5)

    def spy(*args):
        asked.append(args[-1])
        return inner.draft(*args)

    run_with = inner._replace(draft=spy)
    specjax.generate(target(), [PROMPTS[0]], drafter=run_with, max_new_tokens=5)
    assert set(asked) == {5} and drafters.model(target(), target(), 5).num_draft_tokens == 5


@pytest.mark.parametrize("option", ["echo", "prompt_logprobs", "num_draft_tokens", "temprature", "dtype"])
def test_an_unknown_option_is_a_type_error_that_names_it(option):
    """Cases 147 and 153: what is not supported is refused, never ignored."""
    with pytest.raises(TypeError, match=option):
        specjax.generate(target(), [[1]], **{option: 1})
    with pytest.raises(TypeError, match=option):
        specjax.stream(target(), [1], **{option: 1})


def test_the_users_arrays_survive():
    """Case 150: prompts, seeds and weights can be used again, also when target and draft share them."""
    prompt, seeds = jnp.asarray(PROMPTS[0]), jnp.arange(8)
    lm = target()
    for _ in range(2):
        specjax.generate(lm, [np.asarray(prompt)] * 8, drafter=draft_source("self", 3), seed=seeds, rule="rejection",
                         max_new_tokens=BUDGET)  # fmt: skip
    list(specjax.stream(lm, np.asarray(prompt), drafter=draft_source("ngram", 3), max_new_tokens=5))
    assert not any(x.is_deleted() for x in jax.tree.leaves((lm.params, close().params, prompt, seeds)))


def test_clean_models_run_under_debug_nans():
    """Case 150: no NaN is made on the way that is then hidden."""
    with jax.debug_nans(True):
        out = run(
            "close", prompts=[PROMPTS[0]], rule="rejection", temperature=0.8, top_p=0.9, top_k=5, logprobs=True
        )
    assert len(out.tokens[0]) == BUDGET


def test_prompts_come_as_text_ids_arrays_or_lists_of_them():
    """One prompt or many, in any form, the same text."""
    ids = ToyTokenizer().encode("ab é")
    expected = run(prompts=[ids]).tokens
    for prompts in ("ab é", ["ab é"], ids, [ids], np.array(ids), [np.array(ids)], tuple(ids), [tuple(ids)]):
        assert run(prompts=prompts).tokens == expected
    assert run(prompts=["ab é", PROMPTS[1], np.array(PROMPTS[2])]).tokens == [expected[0], *plain(3)[1:]]


def test_chat_renders_the_template():
    """chat=True on a string and on messages."""
    lm = target()._replace(chat_template="{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    tokenizer = ChatTokenizer()
    lm = lm._replace(tokenizer=tokenizer)
    expected = specjax.generate(lm, ["ab\n"], max_new_tokens=6).tokens
    messages = [{"role": "user", "content": "ab"}]
    for prompts in ("ab", ["ab"], messages, [messages], messages[0]):
        assert specjax.generate(lm, prompts, chat=True, max_new_tokens=6).tokens == expected


class ChatTokenizer(ToyTokenizer):
    bos_token, eos_token = "", ""

    def encode(self, text, add_special_tokens=True):
        return super().encode(text)
