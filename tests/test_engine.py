"""Engine: a text does not depend on its slot, its neighbours or when it was inserted, and slots are kept full."""

import contextlib
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, parity
from specjax import slots as compiled
from specjax.round import LENGTH, RUNNING
from specjax.theory import CostModel
from tests.small import BUDGET, CAPACITY, EOS, PROMPTS, V, draft_source, oracle, position_lm, target
from tests.test_smollm2 import prompts as real_prompts

SLOTS, LONGEST = 4, 70
LONG = (PROMPTS[0] * 5)[:29]  # four chunks of 8


def engine(name="close", rule="match", slots=SLOTS, drafter=None, **options):
    """All tests of this file share its programs, unless they name another drafter or rule."""
    drafter = draft_source(name, 3) if drafter is None else drafter
    fixed = {"logprobs": True, "prefill_chunk": 8, **options}
    return specjax.Engine(target(), slots=slots, capacity=LONGEST, drafter=drafter, rule=rule, **fixed)


def alone(prompt, name="close", rule="match", drafter=None, **options):
    drafter = draft_source(name, 3) if drafter is None else drafter
    return specjax.generate(target(), [prompt], drafter=drafter, rule=rule, logprobs=True, **options)


REQUESTS = [
    (PROMPTS[0], {"max_new_tokens": 9}),
    (LONG, {"max_new_tokens": BUDGET, "temperature": 1.0, "seed": 3}),
    (PROMPTS[2], {"max_new_tokens": 25, "eos_ids": [4]}),
    (PROMPTS[3], {"max_new_tokens": 30, "temperature": 1.0, "seed": 7, "eos_ids": [2, 3], "min_new_tokens": 6}),
    (PROMPTS[4], {"max_new_tokens": 1}),
    (PROMPTS[1], {"max_new_tokens": 35, "temperature": 0.7, "top_k": 4, "repetition_penalty": 1.4, "seed": 2}),
    (LONG[:8], {"max_new_tokens": 20, "banned_tokens": [2, 5], "logit_bias": {4: 1.5}}),
    (LONG[:9], {"max_new_tokens": 28, "temperature": 1.0, "stop": [[6], [9, 4]], "eos_ids": [], "seed": 5}),
    (PROMPTS[6], {"max_new_tokens": 12, "temperature": 1.5, "top_p": 0.8, "min_p": 0.05}),
    (PROMPTS[0], {"max_new_tokens": 33, "temperature": 1.0, "eos_ids": range(2, 10), "min_new_tokens": 13}),
    (PROMPTS[7], {"max_new_tokens": 0}),
    (PROMPTS[5], {"max_new_tokens": 17, "frequency_penalty": 0.4, "presence_penalty": 0.2}),
]  # fmt: skip


@functools.cache
def expected():
    return [alone(prompt, **options) for prompt, options in REQUESTS]


HELD = (3, 9)  # minimum lengths, where drafts are shorter than in generate


def assert_is(result, number):
    """The result is that of a request alone."""
    assert_same(result, expected()[number], counts=number not in HELD)


def assert_same(result, wanted, counts=True):
    """Tokens, text, reason and counts, which also tell that the drafter saw its own text and no other."""
    assert (result.tokens, result.texts, result.finish_reasons) == (wanted.tokens, wanted.texts, wanted.finish_reasons)
    assert result.stats.emitted == len(result.tokens[0])
    for ours, theirs in zip(result.stats.counts, wanted.stats.counts, strict=True) if counts else ():
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in ((result.logprobs, wanted.logprobs), (result.warped_logprobs, wanted.warped_logprobs)):
        np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs), atol=1e-4)


def drain(served, results=None):
    """Results by id."""
    results = {} if results is None else results
    for event in served.events():
        if event.result is not None:
            results[event.id] = event.result
    return results


# --- the same text


def test_a_request_says_in_any_company_what_it_says_alone():
    """Twelve requests, four slots, prompts of 1 to 29 tokens, own samplers, seeds, ends and budgets; the later ones
    come while others are mid-text. What the events bring is the result."""
    served, ids, results, said, texts = engine(), [], {}, Counter(), Counter()
    while len(results) < len(REQUESTS):
        for prompt, options in REQUESTS[len(ids) : 5 if not ids else len(ids) + 1]:
            ids.append(served.insert(prompt, **options))
        for event in [*served.step(), *served.step(), *served.step()]:
            said[event.id] += len(event.tokens)
            texts[event.id] = (texts[event.id] or "") + event.text
            if event.result is not None:
                results[event.id] = event.result
                assert (texts[event.id], said[event.id]) == (event.result.texts[0], len(event.result.tokens[0]))
    assert (served.in_use, served.waiting, served.step()) == (0, 0, [])
    for number, id in enumerate(ids):
        assert_is(results[id], number)
    assert {result.finish_reasons[0] for result in results.values()} == {"stop", "length"}


def unsteady(costs=(2.2, 0.2)):
    """A policy that drafts until it has lost what it may lose, then decodes plainly until it has gained enough."""
    return specjax.Adaptive(tiers=(0, 3), costs=CostModel((0, 3), (1.0, costs[0]), (0.0, costs[1])))


def test_slots_draft_as_many_tokens_as_pay_and_say_the_same():
    """Rows come while others decode plainly, and their drafter reads late; the tier is of all rows."""
    served, tiers = engine(adaptive=unsteady()), []
    ids = [served.insert(prompt, **options) for prompt, options in REQUESTS]
    results = {}
    while len(results) < len(ids):
        tiers.append(int(served._state.state.pace.tier))
        results |= {event.id: event.result for event in served.step() if event.result is not None}
    for number, id in enumerate(ids):
        assert_same(results[id], expected()[number], counts=False)
    assert {*tiers} == {0, 1} and tiers[-8:] != tiers[:8]


def test_texts_of_one_token_pay_for_one_token():
    """The account is the engine's: no text is so short that drafts for it cost nothing."""
    served, tiers = engine(adaptive=unsteady()), []
    for prompt in PROMPTS * 5:
        served.insert(prompt, max_new_tokens=1)
    while served.in_use or served.waiting:
        tiers.append(int(served._state.state.pace.tier))
        served.step()
    assert len(tiers) > 9 and sum(tiers) < 3


@pytest.mark.full
def test_one_slot_drafts_in_the_rounds_in_which_generate_does():
    options = {"max_new_tokens": BUDGET, "temperature": 1.0, "seed": 3, "adaptive": unsteady()}
    wanted = alone(LONG, **options)
    served = engine(slots=1, adaptive=options.pop("adaptive"))
    served.insert(LONG, **options)
    assert_same(drain(served)[0], wanted)
    judged = wanted.stats.counts.judged_at[0]
    assert 0 < judged[0] < wanted.stats.rounds  # some rounds drafted, some did not


def test_order_of_insertion_does_not_matter():
    """Other slots, other neighbours, the same texts."""
    served = engine()
    order = [9, 1, 11, 6, 3, 0, 10, 2, 8, 7, 4, 5]
    ids = {served.insert(REQUESTS[i][0], **REQUESTS[i][1]): i for i in order}
    results = drain(served)
    for id, number in ids.items():
        assert_is(results[id], number)


def test_ends_are_a_request_s_own():
    """The same prompt beside itself with other ends: ids, sequences and strings; text oracle by cutting."""
    whole = alone(LONG, max_new_tokens=30, temperature=1.0, eos_ids=[])
    tokens, text = whole.tokens[0], whole.texts[0]
    stop = text[9:11]
    served = engine()
    ends = ({"eos_ids": [tokens[4]]}, {"eos_ids": []}, {"stop": [tokens[6:9]]}, {"stop": stop})
    ids = [served.insert(LONG, max_new_tokens=30, temperature=1.0, **options) for options in ends]
    results = drain(served)
    end = next(i for i in range(3, 31) if tokens[i - 3 : i] == tokens[6:9])
    assert results[ids[0]].tokens[0] == tokens[: tokens.index(tokens[4]) + 1]
    assert results[ids[1]].tokens[0] == tokens
    assert results[ids[2]].tokens[0] == tokens[:end]
    assert results[ids[3]].texts[0] == text[: text.index(stop)]
    assert tokens[: len(results[ids[3]].tokens[0])] == results[ids[3]].tokens[0]
    assert results[ids[3]].stats.emitted == len(results[ids[3]].tokens[0])
    assert [results[id].finish_reasons[0] for id in ids] == ["stop", "length", "stop", "stop"]


def test_a_minimum_length_holds_for_exactly_that_many_tokens():
    """Case 68: wherever in the window it falls. The model would end at once; the drafter proposes what is next best."""
    logits = np.zeros((CAPACITY, V), np.float32)
    logits[:, EOS], logits[:, 5] = 20, 10
    drafter = oracle(np.full(CAPACITY, 5), 4)
    minimum = list(range(12))
    lm = position_lm(logits)._replace(eos_ids=(EOS,))
    served = specjax.Engine(lm, slots=3, capacity=20, drafter=drafter)
    out = served.run([[2]] * 12, min_new_tokens=minimum, max_new_tokens=15)
    assert out.tokens == [[5] * least + [EOS] for least in minimum] and out.stats.accepted > 30


def test_a_removed_request_leaves_no_trace():
    """Mid-text, while its prompt is read, and while it waits: the slot is used again, and no text changes."""
    served = engine()
    ids = [served.insert(REQUESTS[i][0], **REQUESTS[i][1]) for i in (1, 5, 1, 7, 5, 1, 6)]
    for _ in range(9):
        served.step()
    assert (served.in_use, served.waiting) == (SLOTS, 3)
    mid = served.remove(ids[0])
    wanted = expected()[1]
    assert mid.finish_reasons == [None] and 0 < len(mid.tokens[0]) < BUDGET
    assert mid.tokens[0] == wanted.tokens[0][: len(mid.tokens[0])] and wanted.texts[0].startswith(mid.texts[0])
    assert served.remove(ids[5]).tokens == [[]]
    assert served.remove(ids[4]).tokens == [[]]
    assert served.in_use == SLOTS - 1
    for id in (ids[0], 99, None):
        with pytest.raises(ValueError, match=r"id=.*no such request"):
            served.remove(id)
    ids.append(served.insert(REQUESTS[3][0], **REQUESTS[3][1]))
    results = drain(served)
    assert set(results) == {ids[i] for i in (1, 2, 3, 6, 7)}
    for id, number in zip(ids[1:4] + ids[6:], (5, 1, 7, 6, 3), strict=True):
        assert_is(results[id], number)


def test_a_slot_that_is_given_up_holds_no_text():
    """Nothing runs there, and attention does not read it."""
    served = engine()
    ids = [served.insert(LONG, max_new_tokens=40, temperature=1.0, seed=3) for _ in range(2)]
    while served.waiting:
        served.step()
    served.remove(ids[0])
    served.step()
    state = served._state.state
    assert [int(code) == RUNNING for code in state.finish] == [False, True, False, False]
    assert [int(x[0]) for x in (state.text.lengths, state.text.prompt_lengths, state.cache.lengths)] == [1, 1, 0]
    assert_is(drain(served)[ids[1]], 1)


def test_generate_through_slots_is_generate():
    """Same order, samples and seeds, texts and reasons; also [], fewer rows than slots, and `Engine.run`."""
    prompts, budgets = [PROMPTS[i % 8] for i in range(6)], [5, 30, 0, 17, 1, 9]
    fixed = {"drafter": draft_source("close", 3), "rule": "match", "logprobs": True}
    options = {"temperature": 1.0, "eos_ids": [3], "stop": [[9, 9]]}
    rows = [alone(prompts[i // 2], max_new_tokens=budgets[i // 2], seed=4 + i, **options) for i in range(12)]
    cut = rows[2].texts[0][3:6]
    options |= {"max_new_tokens": budgets, "seed": 4, "n": 2, "stop": [[9, 9], cut]}
    first = engine()
    first.insert(PROMPTS[0], max_new_tokens=2)
    drain(first)
    with Compiled() as new:
        got = specjax.generate(target(), prompts, **options, **fixed, slots=SLOTS, prefill_chunk=8)
    for i, row in enumerate(rows):
        assert got.texts[i] == row.texts[0].split(cut)[0]
        if cut not in row.texts[0]:
            assert (got.tokens[i], got.finish_reasons[i]) == (row.tokens[0], row.finish_reasons[0])
            np.testing.assert_allclose(got.warped_logprobs[i], row.warped_logprobs[0], atol=1e-4)
    assert got.lossless and new.programs == {} and got.stats.emitted == sum(map(len, got.tokens))
    served = engine()
    other = served.insert(REQUESTS[1][0], **REQUESTS[1][1])
    assert served.run(prompts, **options).tokens == got.tokens
    assert_is(drain(served)[other], 1)  # the events of others are kept
    assert specjax.generate(target(), [], slots=2).tokens == served.run([]).tokens == []


# --- slots are kept full


class Compiled:
    """Counts programs compiled inside a ``with``."""

    def __enter__(self):
        self.before = Counter(compiled.compiled_programs())
        return self

    def __exit__(self, *_):
        self.programs = dict(Counter(compiled.compiled_programs()) - self.before)


def test_no_slot_is_free_while_a_prompt_has_been_read(monkeypatch):
    """Twelve requests through four slots take about a quarter of their rounds; at most one chunk comes between two
    rounds; each function is compiled once."""
    served, log = engine(), []

    def spy(name, fn):
        def call(*args, **options):
            ready = served._next is not None and served._read_all()
            log.append((name, served.in_use, ready))
            return fn(*args, **options)

        return call

    for name in ("read", "step"):
        monkeypatch.setattr(compiled, name, spy(name, getattr(compiled, name)))
    ids = [served.insert(prompt, **{**options, "max_new_tokens": 20}) for prompt, options in REQUESTS]
    results = drain(served)
    rounds = sum(results[id].stats.rounds for id in ids)
    steps = [entry for entry in log if entry[0] == "step"]
    assert rounds == sum(in_use for _, in_use, _ in steps)
    assert all(in_use == SLOTS or not ready for _, in_use, ready in steps)
    between = "".join("s" if name == "step" else "r" if in_use else "" for name, in_use, _ in log).split("s")
    assert max(map(len, between)) == 1 and len(between) > 12
    longest = max(results[id].stats.rounds for id in ids)
    assert math.ceil(rounds / SLOTS) <= len(steps) <= rounds / SLOTS + longest


def test_nothing_compiles_for_other_prompts_lengths_slots_or_options():
    """One program per function (rows and a single row begin apart), whatever comes."""
    drain_one = engine()
    drain_one.insert([3], max_new_tokens=2)
    drain(drain_one)
    with Compiled() as new:
        served = engine()
        for prompt, options in REQUESTS[:9]:
            served.insert(np.asarray(prompt), **{**options, "max_new_tokens": 3})
        drain(served)
    assert new.programs == {}


def test_a_step_reads_from_the_device_once(monkeypatch):
    """Cases 150 and 162; the state before a step is given to it."""
    served, calls, device_get = engine(), [], jax.device_get
    for prompt, options in REQUESTS[:6]:
        served.insert(prompt, **options)
    monkeypatch.setattr(jax, "device_get", lambda tree: calls.append(1) or device_get(tree))
    steps = 0
    while served.in_use or served.waiting:
        before = served._state
        served.step()
        steps += 1
        assert all(x.is_deleted() for x in jax.tree.leaves(before.state.cache))
    assert len(calls) == steps


def test_an_interrupted_step_loses_nothing(monkeypatch):
    """Ctrl-C while the host waits for a round: the next step delivers it."""
    served, device_get = engine(), jax.device_get
    ids = [served.insert(REQUESTS[i][0], **REQUESTS[i][1]) for i in (1, 5, 6)]
    turns, results = iter(range(100)), {}

    def flaky(tree):
        if next(turns) % 3 == 1:
            raise KeyboardInterrupt
        return device_get(tree)

    monkeypatch.setattr(jax, "device_get", flaky)
    while len(results) < 3:
        with contextlib.suppress(KeyboardInterrupt):
            results |= {event.id: event.result for event in served.step() if event.result is not None}
    monkeypatch.undo()
    for id, number in zip(ids, (1, 5, 6)):
        assert_is(results[id], number)


def test_an_interrupt_before_a_round_forgets_no_removal(monkeypatch):
    served, step = engine(), compiled.step
    ids = [served.insert(prompt, max_new_tokens=30) for prompt in PROMPTS[:2]]
    while served.in_use < 2:
        served.step()
    served.remove(ids[1])

    def interrupted(*args):
        monkeypatch.setattr(compiled, "step", step)
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled, "step", interrupted)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            served.step()
    assert np.asarray(served._state.state.finish)[:2].tolist() == [RUNNING, LENGTH]


def test_a_row_goes_where_rows_are_counted():
    """Leading axis, the second axis of stacked layers, a single slot, typed keys."""
    rows = {"lead": jnp.zeros((3, 2)), "stacked": jnp.zeros((4, 3, 5)), "keys": specjax.row_keys([1, 2, 3])}
    row = {"lead": jnp.ones((1, 2)), "stacked": jnp.ones((4, 1, 5)), "keys": specjax.row_keys([9])}
    out = jax.tree.map(functools.partial(compiled._put, np.int32(1)), rows, row)
    np.testing.assert_array_equal(out["lead"][:, 0], [0, 1, 0])
    np.testing.assert_array_equal(out["stacked"][:, :, 4], [[0, 1, 0]] * 4)
    np.testing.assert_array_equal(
        jax.random.key_data(out["keys"]), jax.random.key_data(specjax.row_keys([1, 9, 3]))
    )
    np.testing.assert_array_equal(compiled._put(np.int32(0), jnp.zeros((1, 2)), jnp.ones((1, 2))), [[1, 1]])


# --- every kind of drafter, and the real model

SOURCES = {
    "close, rejection": (lambda: draft_source("close", 3), "rejection", 3),
    "lookahead, one slot": (lambda: drafters.lookahead(width=3, ngram=3, candidates=2), "match", 1),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SOURCES)
def test_every_kind_of_drafter_keeps_its_state_to_itself(name):
    """Counts too are those of the request alone: its state has come along, and no neighbour's. (Without ends and
    minimum lengths, of which drafters are told otherwise, so that they may propose more or less.)"""
    make, rule, slots = SOURCES[name]
    served = engine(drafter=make(), rule=rule, slots=slots, logprobs=False)
    chosen = [(p, {k: v for k, v in o.items() if k not in ("eos_ids", "min_new_tokens")}) for p, o in REQUESTS[:9]]
    ids = [served.insert(prompt, **options) for prompt, options in chosen]
    results = drain(served)
    for id, (prompt, options) in zip(ids, chosen):
        wanted = specjax.generate(target(), [prompt], drafter=make(), rule=rule, **options)
        assert (results[id].tokens, results[id].texts) == (wanted.tokens, wanted.texts)
        for ours, theirs in zip(results[id].stats.counts, wanted.stats.counts, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.full
def test_the_real_model_says_through_slots_what_it_says_alone(smollm2):
    """Five prompts, three slots, trees against plain decoding; greedy and float32, up to near-ties."""
    prompts, budgets = real_prompts(5), [10, 16, 5, 12, 16]
    drafter = drafters.recycling(smollm2, 3, read_prompts=False)
    got = specjax.generate(smollm2, prompts, chat=True, max_new_tokens=budgets, drafter=drafter, slots=3)
    for prompt, budget, tokens in zip(prompts, budgets, got.tokens, strict=True):
        wanted = specjax.generate(smollm2, prompt, chat=True, max_new_tokens=budget).tokens[0]
        found = parity.divergence(smollm2, smollm2.encode_chat(prompt), wanted, tokens)
        assert found is None or found.margin < 1e-4, (prompt, found)
    assert got.stats.accepted > 0
