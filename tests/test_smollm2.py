"""SmolLM2-135M-Instruct end to end: speculation says what the target says."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache as kv
from specjax import parity
from specjax.models import llama
from specjax.static import bind

OWN_PROMPTS = json.loads((Path(__file__).parent / "data" / "smollm2_135m_instruct_own_prompts.json").read_text())
COPY = (
    "Print this text again: The harbour of Lindholm was built in 1874 by the fishermen of the village. The harbour of "
    "Lindholm was widened in 1921 by the fishermen of the village and their sons."
)
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.25}  # logits reach 30, where bfloat16 numbers are 0.125 apart
NEW_TOKENS = 24


def prompts(batch):
    """Ragged: from 40 to 90 tokens, one of them copy-heavy."""
    return [COPY, *(entry["prompt"] for entry in OWN_PROMPTS)][:batch]


def pruned(lm):
    """A draft model made of the target without six layers in the middle: right about one time in five."""
    kept = [*range(10), *range(16, 30)]
    layers = lm.params["layers"]
    params = {**lm.params, "layers": {new: layers[old] for new, old in enumerate(kept)}}
    config = dataclasses.replace(lm.config, num_layers=len(kept))
    return specjax.LanguageModel(llama.model(config), params, lm.tokenizer)


def hinted(lm, texts):
    """A draft model that knows the target's texts and gets every fourth position wrong; costs nothing."""
    width = max(map(len, texts))
    table = np.asarray([[*text, *[0] * (width - len(text))] for text in texts], np.int32)
    table[:, ::4] = 17
    model = specjax.Model(bind(_no_cache), bind(_look_up, lm.model.vocab_size), lm.model.vocab_size)
    return specjax.LanguageModel(model, jnp.asarray(table), lm.tokenizer)


def _no_cache(batch, capacity):
    return kv.init(num_layers=1, batch=batch, capacity=capacity, num_kv_heads=1, head_dim=1)


def _look_up(vocab, table, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None):
    known = jnp.take_along_axis(table[: tokens.shape[0]], jnp.minimum(positions + 1, table.shape[1] - 1), axis=1)
    if logits_at is not None:
        known = jnp.take_along_axis(known, logits_at[:, None], axis=1)
    return specjax.ModelOutput(20 * jax.nn.one_hot(known, vocab), jnp.zeros((*tokens.shape, 0)), cache)


@pytest.fixture(scope="module")
def drafters(smollm2, plain):
    texts = [[*smollm2.encode_chat(text), *tokens] for text, tokens in zip(prompts(8), plain.tokens, strict=True)]
    small = hinted(smollm2, texts)

    def build(kind, k):
        return specjax.drafters.ngram(k) if kind == "ngram" else specjax.drafters.model(small, smollm2, k)

    return build


@pytest.fixture(scope="module")
def plain(smollm2):
    """Plain greedy continuations of the eight prompts, from one batch."""
    return specjax.generate(smollm2, prompts(8), chat=True, max_new_tokens=NEW_TOKENS)


def assert_same_up_to_near_ties(lm, batch, got, wanted, dtype="float32"):
    for row, (a, b) in enumerate(zip(wanted, got, strict=True)):
        found = parity.divergence(lm, lm.encode_chat(prompts(batch)[row]), a, b)
        if found is not None:
            print(f"row {row} parts at token {found.index}, margin {found.margin:.2e}")
            assert found.margin < NEAR_TIE[dtype], f"row {row}: {found}\n{a}\n{b}"


# Every pair of values of two parameters occurs; in the first four every value does. A program is compiled for each.
CASES = [
    ("ngram", "match", 8, 4), ("model", "block", 3, 2), ("model", "rejection", 1, 7), ("ngram", "rejection", 3, 1),
    ("ngram", "block", 1, 1), ("model", "match", 8, 1), ("ngram", "match", 1, 2), ("ngram", "match", 3, 7),
    ("model", "rejection", 1, 4), ("ngram", "rejection", 8, 2), ("ngram", "block", 8, 7), ("ngram", "block", 3, 4),
]  # fmt: skip
MATRIX = [pytest.param(*case, marks=() if case in CASES[:4] else pytest.mark.full) for case in CASES]


def test_the_cases_cover_every_pair_of_values():
    values = [("ngram", "model"), ("rejection", "block", "match"), (1, 3, 8), (1, 2, 4, 7)]
    for (i, left), (j, right) in itertools.combinations(enumerate(values), 2):
        assert {(case[i], case[j]) for case in CASES} == set(itertools.product(left, right))


@pytest.mark.parametrize(("kind", "rule", "batch", "k"), MATRIX)
def test_greedy_speculation_is_plain_decoding(smollm2, drafters, plain, kind, rule, batch, k):
    out = specjax.generate(
        smollm2, prompts(batch), chat=True, max_new_tokens=NEW_TOKENS, drafter=drafters(kind, k), rule=rule
    )
    assert_same_up_to_near_ties(smollm2, batch, out.tokens, plain.tokens[:batch])
    assert out.stats.tau > 1


@pytest.fixture(scope="module")
def sampled(smollm2):
    """Plain texts of the eight prompts at temperature 1, from one batch."""
    return specjax.generate(smollm2, prompts(8), seed=list(range(20, 28)), **SAMPLED)


SAMPLED = {"chat": True, "max_new_tokens": NEW_TOKENS, "temperature": 1.0, "rule": "match"}
MATCH_DRAFTERS = {
    "plain": lambda lm: None,
    "ngram-3": lambda lm: specjax.drafters.ngram(3),
    "ngram-7": lambda lm: specjax.drafters.ngram(7),
    "itself": lambda lm: specjax.drafters.model(lm, lm, 3, coupled=True),
    "pruned": lambda lm: specjax.drafters.model(pruned(lm), lm, 3, coupled=True),
}


@pytest.mark.parametrize(
    "name", [name if name == "ngram-3" else pytest.param(name, marks=pytest.mark.full) for name in MATCH_DRAFTERS]
)
def test_match_says_alone_with_any_drafter_what_plain_decoding_says_in_a_batch(smollm2, sampled, name):
    drafter = MATCH_DRAFTERS[name](smollm2)
    alone = specjax.generate(smollm2, prompts(2)[1], seed=21, drafter=drafter, **SAMPLED)
    assert alone.tokens == sampled.tokens[1:2]
    if name == "itself":
        assert alone.stats.acceptance_rate == 1


@pytest.mark.full
def test_match_says_in_a_batch_with_drafts_what_it_says_without(smollm2, sampled):
    out = specjax.generate(
        smollm2, prompts(8), seed=list(range(20, 28)), drafter=specjax.drafters.ngram(4), **SAMPLED
    )
    assert out.tokens == sampled.tokens


@pytest.mark.full
def test_a_draft_model_of_the_target_s_own_layers_is_followed_where_it_is_right(smollm2, plain):
    drafter = specjax.drafters.model(pruned(smollm2), smollm2, 3)
    out = specjax.generate(smollm2, prompts(3), chat=True, max_new_tokens=NEW_TOKENS, drafter=drafter)
    assert_same_up_to_near_ties(smollm2, 3, out.tokens, plain.tokens[:3])
    assert 0.05 < out.stats.alpha < 0.9


def test_bfloat16_parts_only_at_near_ties(drafters):
    lm = specjax.load("smollm2-135m-instruct", dtype="bfloat16")
    options = {"chat": True, "max_new_tokens": NEW_TOKENS}
    wanted = specjax.generate(lm, prompts(3), **options)
    out = specjax.generate(lm, prompts(3), drafter=drafters("ngram", 7), **options)
    assert_same_up_to_near_ties(lm, 3, out.tokens, wanted.tokens, "bfloat16")


@pytest.mark.full
def test_long_prompts_neither_compile_per_length_nor_build_prompt_logits(smollm2):
    rng = np.random.default_rng(0)
    ids = rng.integers(100, 40_000, 1_700).tolist()
    before = specjax.loop.compiled_programs()
    outs = [specjax.generate(smollm2, ids[:length], max_new_tokens=2, eos_ids=[]) for length in (1_700, 1_650, 1_601)]
    after = specjax.loop.compiled_programs()
    assert all(len(out.tokens[0]) == 2 for out in outs)
    assert after["prefill"] - before["prefill"] <= 1 and after["decode"] - before["decode"] <= 1
    made = specjax.request.make(smollm2, ids, max_new_tokens=2, prefill_chunk=64)
    compiled = specjax.loop.start.lower(
        made.program, made.weights, made.text, made.keys, made.limits, chunk=made.chunk
    ).compile()
    vocab = smollm2.model.vocab_size
    assert f"[1,64,{vocab}]" not in compiled.as_text(), "the chunk's logits are built"
    assert compiled.memory_analysis().temp_size_in_bytes < 1_700 * vocab * 4 / 4


def test_lookup_shines_where_the_answer_repeats_the_prompt(smollm2, drafters):
    out = specjax.generate(smollm2, COPY, chat=True, max_new_tokens=48, drafter=drafters("ngram", 7))
    assert out.stats.tau > 2
    assert out.stats.alpha > 0.6


def test_logits_of_a_window_equal_those_of_single_steps(smollm2):
    ids = OWN_PROMPTS[0]["prompt_ids"][:24]
    tokens = jnp.asarray([ids])
    positions = jnp.arange(24)[None]
    cache = smollm2.model.init_cache(1, 256)
    apply = jax.jit(smollm2.model.apply)
    whole = apply(smollm2.params, tokens, positions, None, cache)
    cache = apply(smollm2.params, tokens[:, :16], positions[:, :16], None, cache).cache
    cache = cache._replace(lengths=cache.lengths + 16)
    window = apply(smollm2.params, tokens[:, 16:], positions[:, 16:], None, cache)
    np.testing.assert_allclose(window.logits, whole.logits[:, 16:], atol=2e-4)
