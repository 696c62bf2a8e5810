"""What is compiled, how often, and what the compiled programs contain."""

import gc
import weakref
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import LanguageModel, drafters, loop, request
from specjax import cache as kv
from specjax.types import Model, ModelOutput
from tests.doubles import hash_lm
from tests.oracle.hashlm import HashConfig
from tests.small import (
    CAPACITY,
    PROMPTS,
    ToyTokenizer,
    V,
    close,
    dictated,
    draft_source,
    oracle,
    position_lm,
    run,
    target,
)

FORBIDDEN = ("callback", "infeed", "outfeed")


class Compiled:
    """Counts programs compiled inside a ``with``."""

    def __enter__(self):
        self.before = Counter(loop.compiled_programs())
        return self

    def __exit__(self, *_):
        self.new = dict(Counter(loop.compiled_programs()) - self.before)


def test_a_stream_of_fifty_rounds_compiles_one_round():
    """Case 155: ends, budgets and a tail shorter than K change nothing."""
    run("ngram", prompts=[PROMPTS[0]], max_new_tokens=2)  # not the stream's programs, but its prefill
    with Compiled() as compiled:
        rounds = 0
        for budget, eos_ids in ((60, []), (61, [5]), (3, []), (1, []), (99, [])):
            stream = specjax.stream(
                target(), PROMPTS[0], drafter=draft_source("ngram", 3), max_new_tokens=budget, eos_ids=eos_ids
            )
            list(stream)
            rounds += stream.result.stats.rounds
    assert rounds >= 50 and set(compiled.new) <= {"step"} and compiled.new.get("step", 1) == 1


def test_rows_that_meet_stop_strings_compile_nothing_new():
    """Case 156: a state that was cut on the host is the same to the compiler."""
    text = [2, *([3, 4, 5, 6, 13] * 4)]
    lm = position_lm(dictated(text, V), ToyTokenizer())
    with Compiled() as compiled:
        prompts = [text[:length] for length in (1, 4, 6, 1, 9)]  # five rows: no other test has this shape
        out = specjax.generate(lm, prompts, stop="ab c", max_new_tokens=[9, 9, 2, 4, 9])
    assert out.finish_reasons == ["stop", "stop", "length", "stop", "stop"]
    assert out.stats.counts.rounds.tolist() == [4, 6, 2, 4, 6]
    assert compiled.new == {"prefill": 1, "step": 1, "cut": 1}


def test_prompts_of_one_bucket_share_programs():
    """Case 155: prompts of 1 .. 130 tokens, budgets from 0 to 100, one shape."""
    run("close", prompts=[[1]], rule="rejection")
    with Compiled() as compiled:
        for length, budget in ((5, 40), (6, 50), (7, 0), (64, 1), (65, 33), (130, 100)):
            prompt = (PROMPTS[0] * 20)[:length]
            run("close", prompts=[prompt], rule="rejection", max_new_tokens=budget)
    assert compiled.new == {}


VALUES = [
    {"temperature": value} for value in (0, 1, 1.0, np.float32(0.5), jnp.float32(1), np.float64(2), jnp.bfloat16(1),
                                         [1.0], np.array([0.3]), jnp.ones(1), np.int64(1))
] + [
    {"top_k": 1}, {"top_k": np.int64(5)}, {"top_k": 10**6}, {"top_k": 3.0}, {"top_p": 0.5}, {"top_p": jnp.float32(0.1)},
    {"min_p": 0.2}, {"repetition_penalty": 1.3}, {"presence_penalty": -1}, {"frequency_penalty": 1},
    {"logit_bias": {1: 2.0}}, {"logit_bias": [dict.fromkeys(range(8), 1.0)]}, {"banned_tokens": [1, 2, 3]},
    {"banned_tokens": [[5]]}, {"min_new_tokens": 4}, {"eos_ids": []}, {"eos_ids": 3}, {"eos_ids": [1, 2, 3, 4, 5]},
    {"max_new_tokens": 5}, {"max_new_tokens": [7]}, {"max_new_tokens": np.array([3])}, {"seed": 7},
    {"seed": [2**32 - 1]}, {"seed": np.uint32(3)}, {"stop": [[1, 2]]}, {"stop": [[1, 2, 3, 4]]},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.9},
]  # fmt: skip


def test_no_value_and_no_kind_of_number_compiles_again():
    """Case 156: Python, numpy and jax scalars, weak or strong, scalar or per row; every sampling value is traced."""
    run("close", prompts=[PROMPTS[0]], rule="rejection")
    with Compiled() as compiled:
        for options in VALUES:
            run("close", prompts=[PROMPTS[0]], rule="rejection", **{"max_new_tokens": 6, **options})
    assert compiled.new == {}


def test_freshly_built_equal_models_and_drafters_compile_once():
    """Functions are compared by value: what is built anew for every call is still the same program."""
    def fresh(seed):
        model, params = hash_lm(HashConfig(V), seed)
        return LanguageModel(model, params)

    def call(seed):
        lm = fresh(seed)
        specjax.generate(lm, [PROMPTS[0]], drafter=drafters.model(fresh(9), lm, 3), max_new_tokens=5)
        specjax.generate(lm, [PROMPTS[0]], drafter=drafters.ngram(3, max_ngram=3, min_ngram=1), max_new_tokens=5)

    call(1)
    with Compiled() as compiled:
        call(2)
        call(3)
    assert compiled.new == {}


def made(name: str, rule: str, **options):
    return request.make(target(), PROMPTS[:3], drafter=draft_source(name, 3), rule=rule, **options)


@pytest.mark.parametrize("name, rule", [("ngram", "match"), ("close", "rejection")])
def test_compiled_programs_stay_on_the_device_and_update_caches_in_place(name, rule):
    """Cases 150, 155, 162: no callback, infeed or outfeed in jaxpr or HLO of prefill and decode; every buffer of the
    state is donated to its successor."""
    r = made(name, rule, logprobs=True)
    start_args = (r.program.prefill(), r.weights, r.text, r.keys, r.limits)
    state = jax.eval_shape(lambda *args: loop.start(start_args[0], *args, chunk=64), *start_args[1:])
    decode_args = (r.program, r.weights, state, r.sampling, r.limits)
    for fn, args, options in ((loop.start, start_args, {"chunk": 64}), (loop.decode, decode_args, {})):
        traced = fn.trace(*args, **options)
        compiled = traced.lower().compile()
        assert not [word for word in FORBIDDEN for text in (str(traced.jaxpr), compiled.as_text()) if word in text]
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state._replace(keys=None)))
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    assert "input_output_alias" in compiled.as_text().splitlines()[0]


@pytest.mark.parametrize("name, rule", [("ngram", "match"), ("close", "rejection")])
def test_the_state_has_the_same_shapes_and_types_in_every_round(name, rule):
    """Case 155: nothing grows, nothing becomes weakly typed."""
    r = made(name, rule)
    state = loop.start(r.program.prefill(), r.weights, r.text, r.keys, r.limits, chunk=r.chunk)
    after, info = jax.eval_shape(lambda state: loop.step(r.program, r.weights, state, r.sampling, r.limits), state)

    def kinds(state):
        return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), state)

    assert kinds(after) == kinds(state)
    assert not any(getattr(x, "weak_type", False) for x in jax.tree.leaves(state))
    assert info.tokens.shape == (3, 4) and info.count.dtype == info.tokens.dtype == jnp.int32


def test_generate_reads_from_the_device_once_and_a_stream_once_a_round(monkeypatch):
    """Case 162."""
    calls, device_get = [], jax.device_get
    text = [2, *([3, 4, 5, 6, 13] * 4)]
    lm, drafter = position_lm(dictated(text, V)), oracle(np.pad(text, (0, CAPACITY - 21)), 4)
    stream = specjax.stream(target(), PROMPTS[0], drafter=draft_source("ngram", 3), max_new_tokens=20)
    monkeypatch.setattr(jax, "device_get", lambda tree: calls.append(1) or device_get(tree))
    specjax.generate(lm, [[2]], drafter=drafter, max_new_tokens=20)
    assert len(calls) == 1
    calls.clear()
    list(stream)
    assert len(calls) == stream.result.stats.rounds + 1  # and once before the first round


def test_a_deleted_model_leaves_no_weights_behind():
    """The jit cache keeps functions by value and no arrays."""
    lm = target()
    params = jax.tree.map(lambda x: x + 0, lm.params)
    alive = [weakref.ref(x) for x in jax.tree.leaves(params)]
    mine = lm._replace(params=params)
    specjax.generate(mine, [PROMPTS[0]], drafter=drafters.model(mine, mine, 3), rule="rejection", max_new_tokens=5)
    list(specjax.stream(mine, PROMPTS[0], drafter=draft_source("ngram", 3), max_new_tokens=5))
    del params, mine
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def plain_functions(size: int):
    """A user's model: two closures over a table the size of a vocabulary."""
    table = jnp.asarray(np.eye(size, dtype=np.float32))

    def init_cache(batch, capacity):
        return kv.init(num_layers=1, batch=batch, capacity=capacity, num_kv_heads=1, head_dim=1)

    def apply(params, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None):
        logits = 5 * params[(tokens + 1) % size] @ table
        if logits_at is not None:
            logits = jnp.take_along_axis(logits, logits_at[:, None, None], axis=1)
        return ModelOutput(logits, jnp.zeros((*tokens.shape, 0)), cache)

    return Model(init_cache, apply, size)


def test_a_users_closures_are_not_kept_alive():
    """A model of plain functions dies with its last user, weights included; another one is another model."""
    for repeat in range(2):
        model, params = plain_functions(4 + repeat), jnp.eye(4 + repeat)
        lm = LanguageModel(model, params)
        drafter = drafters.model(lm, lm, 2)
        for each in (None, drafter):
            out = specjax.generate(lm, [[0]], drafter=each, max_new_tokens=6)
            assert out.tokens == [[(1 + i) % (4 + repeat) for i in range(6)]]
        with Compiled() as compiled:
            specjax.generate(lm, [[1]], drafter=drafter, max_new_tokens=6)
        assert compiled.new == {}
        alive = [weakref.ref(model.apply), weakref.ref(model.init_cache), weakref.ref(params)]
        del lm, model, params, drafter, each, out
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3


def test_a_users_drafter_of_closures_is_not_kept_alive():
    """The same for a hand-written drafter."""
    inner = drafters.ngram(2)
    def draft(*args):
        return inner.draft(*args)
    drafter = inner._replace(draft=draft)
    specjax.generate(target(), [PROMPTS[0]], drafter=drafter, max_new_tokens=5)
    alive = weakref.ref(draft)
    del drafter, draft
    gc.collect()
    assert alive() is None


def test_the_rules_share_one_prefill():
    """Case 155: start does not depend on rule or log-probabilities."""
    run("close", prompts=[PROMPTS[0]], rule="rejection", max_new_tokens=2)
    with Compiled() as compiled:
        run("close", prompts=[PROMPTS[0]], rule="block", max_new_tokens=2)
    assert "prefill" not in compiled.new and close().model == target().model
