"""Where a text ends and why: end ids, stop sequences, stop strings, budgets, rows without a law."""

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.round import FINISH_REASONS
from tests.small import (
    BOS,
    CAPACITY,
    EOS,
    ToyTokenizer,
    V,
    advance,
    assert_invariants,
    begin,
    dictated,
    oracle,
    position_lm,
    target,
)  # fmt: skip

K = 4
FILLER = [(5 * i) % 13 + 3 for i in range(40)]  # no end id, no 2; a token comes back after 13


def dictate(generated, prompt=(2,)):
    """(a model that says just that after the prompt, a drafter that knows, the prompt)"""
    text = [*prompt, *generated]
    lm = position_lm(dictated(text, V), ToyTokenizer())
    return lm, oracle(np.pad(text, (0, CAPACITY - len(text))), K), list(prompt)


def both(lm, drafter, prompts, **options):
    """Plain and speculative results, which must be equal in all but speed."""
    plain = specjax.generate(lm, prompts, **options)
    out = specjax.generate(lm, prompts, drafter=drafter, **options)
    assert out.tokens == plain.tokens
    assert out.texts == plain.texts
    assert out.finish_reasons == plain.finish_reasons
    for row, counts in enumerate(zip(out.stats.counts.emitted, plain.stats.counts.emitted)):
        assert counts == (len(out.tokens[row]),) * 2
    return out


@pytest.mark.parametrize("slot", range(2 * (K + 1)))
def test_a_text_ends_with_its_end_id_wherever_in_the_block_it_falls(slot):
    """Cases 62 and 70: at every draft slot and as bonus, in the first and the second round; what follows is dropped
    from tokens, text and every count."""
    generated = [*FILLER[:slot], EOS, *FILLER[slot:]]
    lm, drafter, prompt = dictate(generated)
    out = both(lm, drafter, [prompt], eos_ids=EOS, max_new_tokens=30)
    assert out.tokens == [generated[: slot + 1]] and out.finish_reasons == ["stop"]
    assert out.texts == [lm.tokenizer.decode(FILLER[:slot])]
    rounds = slot // (K + 1) + 1
    assert out.stats.rounds == rounds and out.stats.tau == (slot + 1) / rounds
    assert out.stats.accepted == slot + 1 - slot // (K + 1) - (slot % (K + 1) == K)
    assert out.stats.alpha == (None if out.stats.accepted == 0 else 1.0)


def test_counters_leave_out_what_was_accepted_and_then_dropped():
    """Case 70: block [d1, d2, EOS, d4, ..]: three emitted, at most three accepted, tau counts three."""
    lm, drafter, prompt = dictate([3, 4, EOS, 5, 6, 7])
    stats = both(lm, drafter, [prompt], eos_ids=EOS).stats
    assert (stats.emitted, stats.accepted, stats.rounds, stats.tau) == (3, 3, 1, 3.0)
    assert stats.proposed == K and stats.acceptance_rate == 3 / K
    assert stats.per_position == [1.0, 1.0, 1.0, None]


def test_caches_are_cut_where_the_text_ends():
    """Case 62: lengths of text and caches exclude the dropped tokens, and so does what the drafter observed."""
    lm = target()
    prompts = [[3], [2, 5, 13, 2, 5, 4, 9], [6, 6, 2]]
    plain = specjax.generate(lm, prompts, max_new_tokens=20, eos_ids=[])
    script = np.zeros((3, CAPACITY), np.int32)
    for row, (prompt, tokens) in enumerate(zip(prompts, plain.tokens)):
        script[row, : len(prompt) + 20] = prompt + tokens
    drafter, end = oracle(script, K), plain.tokens[1][7]
    sampling = specjax.make_sampling(3, V, eos_ids=[end])
    state = begin(lm, prompts, drafter)
    while not np.asarray(state.finish).all():
        before = state
        state, _ = advance(lm, drafter, state, sampling=sampling, budget=20)
        assert_invariants(lm, state, before)
    expected = [row[: row.index(end) + 1] if end in row else row for row in plain.tokens]
    np.testing.assert_array_equal(state.text.lengths, [len(p) + len(e) for p, e in zip(prompts, expected)])
    np.testing.assert_array_equal(state.drafter.count, state.text.lengths)
    assert not np.asarray(state.text.tokens)[:, 30:].any()


def test_any_of_several_end_ids_ends_a_text_and_none_never_does():
    """Case 66: a set, at any slot; default the model's own; [] goes on past all of them."""
    generated = [3, 4, 7, 5, 3, 9, 7, 3]
    lm, drafter, prompt = dictate(generated)
    cases = ([7, 3], 1), ([7], 3), ([9, 5], 4), (9, 6), ((), 8), ([14, 9, 7], 3), (np.array([5, 9]), 4)
    for eos_ids, length in cases:
        out = both(lm, drafter, [prompt], eos_ids=eos_ids, max_new_tokens=8)
        assert out.tokens == [generated[:length]]
        assert out.finish_reasons == ["length" if length == 8 else "stop"]
    own = lm._replace(eos_ids=(9, 5))
    assert both(own, drafter, [prompt], max_new_tokens=8).tokens == [generated[:4]]
    assert both(own, drafter, [prompt], max_new_tokens=8, eos_ids=[]).tokens == [generated]
    assert both(own, drafter, [prompt], max_new_tokens=8, eos_ids=[9]).tokens == [generated[:6]]


@pytest.mark.parametrize("budget", range(2 * K + 3))
def test_a_budget_is_met_exactly(budget):
    """Case 65: K larger than what is left; 0 gives no tokens."""
    lm, drafter, prompt = dictate(FILLER)
    out = both(lm, drafter, [prompt], max_new_tokens=budget)
    assert out.tokens == [FILLER[:budget]] and out.finish_reasons == ["length"]
    assert out.stats.emitted == budget and (out.stats.tau is None) == (budget == 0)


def test_every_row_has_its_own_budget_and_prompt_length():
    """Case 65."""
    lm, drafter, _ = dictate(FILLER)
    text = [2, *FILLER]
    prompts, budgets = [text[:1], text[:9], text[:4]], [0, 7, 3]
    out = both(lm, drafter, prompts, max_new_tokens=budgets)
    assert out.tokens == [text[len(p) : len(p) + b] for p, b in zip(prompts, budgets)]
    assert out.finish_reasons == ["length"] * 3


def test_an_end_id_in_the_last_place_of_the_budget_is_a_stop():
    """Case 149: reasons are not mixed up."""
    lm, drafter, prompt = dictate([3, 4, EOS, 5])
    assert both(lm, drafter, [prompt], eos_ids=EOS, max_new_tokens=3).finish_reasons == ["stop"]
    assert both(lm, drafter, [prompt], eos_ids=EOS, max_new_tokens=2).finish_reasons == ["length"]


@pytest.mark.parametrize("least", [0, 1, 2, 4, 5, 6, 7])
def test_end_ids_drafted_too_early_are_refused_also_where_a_block_straddles_the_boundary(least):
    """Case 68: EOS near certain at tokens 1 and 6; emitted at the first of them that min_new_tokens allows."""
    generated = [3, EOS, 4, 5, 6, 7, EOS, 8, 9]
    lm, drafter, prompt = dictate(generated)
    out = both(lm, drafter, [prompt], eos_ids=EOS, min_new_tokens=least, max_new_tokens=9)
    end = next((i for i in (1, 6) if i >= least), None)
    assert out.finish_reasons == ["length" if end is None else "stop"]
    assert len(out.tokens[0]) == (9 if end is None else end + 1)
    assert EOS not in out.tokens[0][:least]


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_min_new_tokens_holds_at_temperature_one(rule):
    """Case 68: for the draft model too; a text has at least that many tokens."""
    lm = target()
    least = [0, 1, 2, 3, 5, 6, 7, 8]
    options = {"temperature": 1.0, "eos_ids": [1, 3, 5, 9], "min_new_tokens": least, "max_new_tokens": 9}
    out = specjax.generate(lm, [[3]] * 8, drafter=drafters.model(lm, lm, 3), rule=rule, **options)
    assert all(len(row) > bound for row, bound in zip(out.tokens, least))
    assert min(out.stats.counts.emitted) < 6 and "stop" in out.finish_reasons
    if rule == "match":
        assert out.tokens == specjax.generate(lm, [[3]] * 8, **options).tokens


@pytest.mark.parametrize("options", [{"banned_tokens": [EOS]}, {"logit_bias": {EOS: -np.inf}}])
def test_a_banned_token_is_not_emitted_however_much_it_is_drafted(options):
    """Case 68."""
    lm, drafter, prompt = dictate([3, EOS, 4, EOS, EOS, 5])
    out = both(lm, drafter, [prompt], max_new_tokens=6, eos_ids=[], **options)
    assert len(out.tokens[0]) == 6 and EOS not in out.tokens[0]


# --- stop sequences of token ids


def ends(generated, sequences):
    """How many tokens are emitted: up to the first end of a sequence lying in the generated part."""
    for length in range(1, len(generated) + 1):
        if any(generated[:length][-len(s) :] == list(s) for s in sequences):
            return length
    return len(generated)


def test_stop_sequences_end_a_text_with_their_last_token_in_and_across_rounds():
    """Case 62 for sequences: every place in two rounds of 5; the text keeps the sequence."""
    lm, drafter, prompt = dictate(FILLER)
    for start in range(9):
        for size in (1, 2, 3):
            sequence = FILLER[start : start + size]
            out = both(lm, drafter, [prompt], stop=[sequence], max_new_tokens=12)
            assert out.tokens == [FILLER[: start + size]] and out.finish_reasons == ["stop"]
            assert out.texts == [lm.tokenizer.decode(FILLER[: start + size])]


def test_stop_sequences_do_not_match_in_or_across_the_prompt():
    """The prompt ends [7, 8]; only what was generated counts."""
    lm, drafter, prompt = dictate([9, 4, 7, 8, 9, 5], prompt=(7, 8))
    for sequence, length in (([7, 8], 4), ([8, 9], 5), ([7, 8, 9], 5), ([8], 4), ([7, 8, 9, 4], 6)):
        assert both(lm, drafter, [prompt], stop=[sequence], max_new_tokens=6).tokens == [[9, 4, 7, 8, 9, 5][:length]]


def test_stop_sequences_match_as_a_plain_search_does():
    """Partial matches that start again, several sequences, one the end of another, next to end ids."""
    rng = np.random.default_rng(3)
    for _ in range(25):
        generated = rng.integers(3, 5, 12).tolist()
        sequences = [[*rng.integers(3, 5, rng.integers(1, 5)).tolist(), 3], rng.integers(3, 5, 3).tolist()]
        lm, drafter, prompt = dictate(generated)
        out = both(lm, drafter, [prompt], stop=[s[:4] for s in sequences], max_new_tokens=12)
        assert out.tokens == [generated[: ends(generated, [s[:4] for s in sequences])]]


def test_a_long_stop_sequence_spans_three_rounds():
    """Longer than a block."""
    lm, drafter, prompt = dictate(FILLER)
    out = both(lm, drafter, [prompt], stop=[FILLER[3:14], [14, 14, 14]], max_new_tokens=20)
    assert out.tokens == [FILLER[:14]]


# --- rows without a law

BAD = {"nan": np.nan, "one nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def broken(kind, at, generated):
    """A model without a law for the token at absolute position ``at``."""
    logits = dictated([2, *generated], V)
    if kind in ("nan", "-inf"):
        logits[at - 1] = BAD[kind]
    else:
        logits[at - 1, 5] = BAD[kind]
    return position_lm(logits, ToyTokenizer())


@pytest.mark.parametrize("kind", BAD)
def test_a_row_without_a_law_ends_with_nonfinite_and_others_go_on(kind):
    """Case 19: the tokens before it are kept, no token is made of it, though the draft says id 0, which wins every
    argmax over NaN; other rows are what they are alone. At every place in the block."""
    generated = list(FILLER)
    for at in range(9, 15):
        generated[at - 1] = BOS  # the draft at the lawless place
        text = [2, *generated]
        prompts, budgets = [text[:5], text[:1], text[:16]], [20, 7, 6]
        lm, drafter = broken(kind, at, generated), oracle(np.pad(text, (0, CAPACITY - len(text))), K)
        out = both(lm, drafter, prompts, max_new_tokens=budgets)
        assert out.finish_reasons == ["nonfinite", "length", "length"]
        assert out.tokens == [text[5:at], text[1:8], text[16:22]]


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_every_rule_stops_at_the_same_place_for_sampled_drafts(rule):
    """Case 19: with a draft model that sees nothing wrong, and with one that is as broken as the target."""
    generated = list(FILLER)
    generated[9] = BOS
    lm = broken("nan", 10, generated)
    healthy = position_lm(dictated([2, *generated], V), ToyTokenizer())
    for draft in (healthy, lm):
        drafter = drafters.model(draft, lm, K)
        for start in range(1, 10):
            prompts = [[2, *generated[: start - 1]]]
            out = specjax.generate(lm, prompts, drafter=drafter, rule=rule, temperature=1.0, max_new_tokens=20)
            assert out.finish_reasons == ["nonfinite"] and out.tokens == [generated[start - 1 : 9]]


def test_a_prompt_whose_first_token_has_no_law_gives_nothing_but_the_reason():
    """Case 19."""
    lm = broken("nan", 1, FILLER)
    out = specjax.generate(lm, [[2]], logprobs=True)
    assert (out.tokens, out.texts, out.finish_reasons) == ([[]], [""], ["nonfinite"])
    stream = specjax.stream(lm, [2])
    assert list(stream) == [] and stream.result.finish_reasons == ["nonfinite"]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_law_of_nan_biases_nothing(rule):
    """Case 19 on the draft's side: the node is not judged and the token is the target's, p = (.3, .7)."""
    rows = 20_000
    p = jnp.broadcast_to(jnp.array([0.3, 0.7]), (rows, 3, 2))
    for laws in (jnp.full((rows, 2, 2), jnp.nan), jnp.full((rows, 2, 2), 0.5).at[:, 1].set(jnp.nan)):
        drawn = jnp.asarray(np.random.default_rng(0).integers(0, 2, (rows, 2)), jnp.int32)
        drawn = jnp.where(jnp.isnan(laws[:, :, 0]), 0, drawn)
        proposal = specjax.Proposal(drawn, laws, None, jnp.ones((rows, 2), bool))
        got = specjax.accept(rule, specjax.row_keys(np.arange(rows)), proposal, p)
        first = np.where(np.asarray(got.num_accepted) > 0, proposal.tokens[:, 0], got.next_token)
        assert abs(np.mean(first == 0) - 0.3) < 5 * (0.21 / rows) ** 0.5
        assert (np.asarray(got.num_accepted) <= int(not jnp.isnan(laws[0, 0, 0]))).all()


def test_reasons_are_words_from_a_closed_list():
    """Case 149."""
    assert FINISH_REASONS == (None, "stop", "length", "capacity", "nonfinite")
