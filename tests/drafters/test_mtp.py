"""Multi-token prediction: one module again and again, or one per depth; numbers against an oracle, and the texts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import loop
from specjax.drafters.mtp import MTP, MTPConfig, fresh_params, head_of, mtp, sources
from specjax.models import llama_params
from specjax.models.attention import reach
from tests.drafters import parallel_world as world
from tests.drafters import recurrent_oracle as oracle
from tests.drafters.parallel_world import DYNAMIC, TREE, paths, proposal_of
from tests.drafters.recurrent_oracle import LAYERS, SMALL
from tests.small import PROMPTS, V, advance, begin

CONFIGS = {
    "one module": MTPConfig(LAYERS, (3,)),
    "one module, normed feedback": MTPConfig(LAYERS, (3,), norm_output=True),
    "four modules": MTPConfig(LAYERS, (3,), num_modules=4),
    "four modules, normed feedback": MTPConfig(LAYERS, (2,), num_modules=4, norm_output=True),
}
TEXTS = [PROMPTS[0], PROMPTS[4]]  # 7 and 5 tokens
FORMS = {"chain": {}, "tree": {"tree": TREE}, "dynamic": {"tree": DYNAMIC}, "coupled": {"coupled": True}}


def made(config, lm=None, seed=0, **how):
    """(drafter, tensors under their names in files): random weights, embedding and head its own."""
    lm = world.small_target() if lm is None else lm
    tensors = oracle.random_tensors(sources(config), seed)
    params = llama_params.fill(sources(config), lambda name, shape: tensors[name])
    return mtp(config, params, lm, **how), tensors


def after(config, tensors, lm, text):
    """path of drafted tokens -> the oracle's logits."""
    features = oracle.features_of(lm, [text], config.feature_layers)[0, :-1]
    logits = oracle.mtp_logits(config, tensors)
    return lambda path: logits(text, features, path)


# --- numbers


@pytest.mark.parametrize("name", [
    "one module", *[pytest.param(name, marks=pytest.mark.full) for name in [*CONFIGS][1:]],
])  # fmt: skip
def test_drawn_laws_are_those_of_the_oracle(name):
    """Cases 98, 100, 103 and 104: from the text through prefill and four steps of a chain."""
    config, lm = CONFIGS[name], world.small_target()
    drafter, tensors = made(config)
    proposal = proposal_of(drafter, begin(lm, TEXTS, drafter), specjax.make_sampling(2, V, temperature=1.0))
    for row, text in enumerate(TEXTS):
        logits = after(config, tensors, lm, text)
        for depth in range(4):
            expected = np.exp(oracle.log_softmax(logits(proposal.tokens[row, :depth])))
            np.testing.assert_allclose(proposal.probs[row, depth], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["four modules", pytest.param("one module", marks=pytest.mark.full)])
def test_nodes_of_a_tree_see_their_ancestors_only(name):
    """Cases 82 and 83: of several modules, one reads, beside the nodes of its own depth, all those above them."""
    config, lm = CONFIGS[name], world.small_target()
    drafter, tensors = made(config)
    logits = [after(config, tensors, lm, text) for text in TEXTS]
    oracle.assert_nodes_see_their_ancestors_only(head_of(config), drafter, begin(lm, TEXTS, drafter), logits)


@pytest.mark.full
def test_static_tree_of_several_modules_takes_the_top_tokens_below_each_path():
    config, lm, parents = CONFIGS["four modules"], world.small_target(), [-1, 0, 1, 0, -1, 4, 5, 2, 3]
    drafter, tensors = made(config, tree=parents)
    proposal = proposal_of(drafter, begin(lm, TEXTS, drafter))
    for row, text in enumerate(TEXTS):
        assert paths(proposal, row) == oracle.static_paths(after(config, tensors, lm, text), parents)


@pytest.mark.parametrize("name", ["four modules", "one module"])
@pytest.mark.full
def test_dynamic_tree_keeps_the_likeliest_nodes(name):
    config, lm = CONFIGS[name], world.small_target()
    drafter, tensors = made(config, tree=DYNAMIC)
    proposal = proposal_of(drafter, begin(lm, TEXTS, drafter))
    for row, text in enumerate(TEXTS):
        assert set(paths(proposal, row)) == oracle.dynamic_paths(after(config, tensors, lm, text), *DYNAMIC)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "shape"), [("four modules", "chain"), ("four modules", "tree"), ("one module", "dynamic")]
)
def test_case_44_the_draft_caches_hold_what_was_committed_after_every_round(name, shape):
    lm = world.small_target()
    drafter, _ = made(CONFIGS[name], **FORMS[shape])
    state = begin(lm, TEXTS, drafter)
    for _ in range(3):
        state, _ = advance(lm, drafter, state)
        oracle.assert_state_is_fresh(lm, drafter, state)


def test_case_100_the_halves_of_the_projection_are_embedding_then_hidden():
    """A module whose projection reads the first half alone does not see the hidden state; the second, not the token."""
    config, e = CONFIGS["one module"], LAYERS.hidden_size
    tensors = oracle.random_tensors(sources(config))
    params = llama_params.fill(sources(config), lambda name, shape: tensors[name])
    head, projection = head_of(config), params["modules"][0]["projection"]
    cache = head.init_cache(params, 1, 4)

    @jax.jit
    def step(kept, token, hidden):
        module = params["modules"][0] | {"projection": kept}
        slots = reach(None, cache.lengths, 1, 4)
        weights, positions = {**params, "modules": {0: module}}, jnp.zeros((1, 1), jnp.int32)
        return head.step(weights, 0, token, hidden, positions, slots, cache)[0]

    def said(half, token, hidden):
        kept = jnp.zeros_like(projection).at[:, half].set(projection[:, half])
        return np.asarray(step(kept, jnp.asarray([[token]]), hidden))

    first, second = slice(0, e), slice(e, 2 * e)
    h, g = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 1, e)), jnp.float32)
    np.testing.assert_array_equal(said(first, 3, h), said(first, 3, g))
    np.testing.assert_array_equal(said(second, 3, h), said(second, 4, h))
    assert np.abs(said(first, 3, h) - said(first, 4, h)).max() > 0.1
    assert np.abs(said(second, 3, h) - said(second, 3, g)).max() > 0.1


# --- laws and texts

ONE, THREE = MTPConfig(SMALL, (3,)), MTPConfig(SMALL, (3,), num_modules=3)


def small(config, **how):
    params = jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, fresh_params(config, rngs=nnx.Rngs(1)))
    return mtp(config, params, world.target(), **how)


LAWS = [(THREE, "chain", "rejection"), (ONE, "chain", "rejection"), (THREE, "tree", "rejection"),
        (THREE, "dynamic", "match"), (ONE, "dynamic", "rejection"), (THREE, "coupled", "match")]


@pytest.mark.parametrize(("config", "shape", "rule"), [
    *LAWS[:1], *[pytest.param(*item, marks=pytest.mark.full) for item in LAWS[1:]],
])  # fmt: skip
def test_random_modules_leave_the_law_alone(config, shape, rule):
    """Case 108, one half: modules that know nothing. Greedy, T = 1 and T = 0.7 with top-p 0.9 side by side."""
    world.check_law(small(config, **FORMS[shape]), rule)


def test_greedy_text_is_plain_and_equal_drafters_compile_once():
    lm = world.small_target()
    plain = specjax.generate(lm, PROMPTS, max_new_tokens=20, eos_ids=[])

    def run(seed):
        drafter, _ = made(dataclasses.replace(CONFIGS["four modules"]), seed=seed)
        out = specjax.generate(lm, PROMPTS, drafter=drafter, max_new_tokens=20, eos_ids=[])
        assert out.tokens == plain.tokens and out.stats.proposed > 0 and out.lossless
        return loop.compiled_programs()

    assert run(0) == run(1)


# --- weights and refusals


def test_what_the_target_has_is_referenced_and_not_copied():
    lm, drafter = world.target(), small(ONE)
    assert drafter.params["embedding"] is lm.params["embedding"] and drafter.params["head"] is lm.params["head"]
    assert drafter.num_draft_tokens == 4 and small(THREE).num_draft_tokens == 3
    for config in CONFIGS.values():
        params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda c=config: MTP(c))))
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
        assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), llama_params.abstract(sources(config)))


def test_modules_of_another_target_are_refused_with_both_facts():
    """Cases 101, 107 and 121."""
    lm = world.small_target()

    def refuse(message, config, lm=lm, **how):
        with pytest.raises(ValueError, match=message):
            mtp(config, fresh_params(config), lm, **how)

    base = CONFIGS["four modules"]
    refuse("vocabulary of 16 tokens.*target one of 3", base, world.target())
    wide = dataclasses.replace(LAYERS, hidden_size=12)
    refuse(r"hidden size 12 and the target 8", dataclasses.replace(base, layers=wide))
    refuse(r"target layers \[4\], and the target has 2", dataclasses.replace(base, feature_layers=(4,)))
    refuse("num_draft_tokens=5, but there are 4 modules", base, num_draft_tokens=5)
    refuse("5 levels deep, but there are 4 modules", base, tree=[-1, 0, 1, 2, 3])
    refuse(r"texts of 64 tokens and they may have 65", base, max_length=65)
    with pytest.raises(ValueError, match=r"MTP weight modules/3/norm is missing"):
        params = fresh_params(base)
        del params["modules"][3]["norm"]
        mtp(base, params, lm)


@pytest.mark.parametrize(("change", "message"), [
    ({"feature_layers": (1, 2)}, "reads one layer"),
    ({"num_modules": 0}, "num_modules=0"),
    ({"layers": dataclasses.replace(LAYERS, num_layers=2)}, "one decoder layer"),
    ({"norm_output": 1}, "norm_output=1"),
])  # fmt: skip
def test_configurations_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS["one module"], **change)
