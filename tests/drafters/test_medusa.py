"""Medusa heads: what each head speaks about, the forms of proposal, and that bad heads cost time, never text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import loop
from specjax.drafters.medusa import (
    MEDUSA_CHOICES,
    Medusa,
    MedusaConfig,
    abstract_params,
    blockwise,
    fresh_params,
    medusa,
)
from tests.drafters import parallel_world as world
from tests.drafters.parallel_world import DYNAMIC, HIDDEN, LAYERS, TREE, proposal_of
from tests.small import PROMPTS, V, begin, dictated, padded

HEADS = MedusaConfig(HIDDEN, 3, num_heads=3)
SMALL = MedusaConfig(HIDDEN, V, num_heads=3, num_layers=2)
FORMS = {"chain": {}, "tree": {"tree": TREE}, "dynamic": {"tree": DYNAMIC}, "coupled": {"coupled": True}}


def heads(config=HEADS, lm=None, seed=0, **how):
    lm = world.target() if lm is None else lm
    return medusa(config, fresh_params(config, rngs=nnx.Rngs(seed)), lm, **how)


# --- laws


MORE = [("chain", "match"), ("chain", "block"), ("tree", "rejection"), ("tree", "match"), ("dynamic", "rejection"),
        ("coupled", "match")]


@pytest.mark.parametrize(("shape", "rule"), [
    ("chain", "rejection"), ("dynamic", "match"), *[pytest.param(*item, marks=pytest.mark.full) for item in MORE],
])  # fmt: skip
def test_random_heads_leave_the_law_alone(shape, rule):
    """Case 108, one half: heads that know nothing. Greedy, T = 1 and T = 0.7 with top-p 0.9 side by side."""
    world.check_law(heads(**FORMS[shape]), rule)


def test_a_cut_that_looks_at_the_drawn_token_is_caught():
    """The law test fails where it must: valid may depend on strict ancestors, never on the token itself."""
    world.assert_caught(world.own_probability(heads()))


@pytest.mark.full
def test_a_choice_among_drawn_tokens_by_their_own_probability_is_caught():
    """Dynamic trees are for functions of the context: the better of two draws is not drawn from q."""
    world.assert_caught(world.better_of_two(heads(num_draft_tokens=1)))


# --- which position a head speaks about


def oracle_heads(text, size, shift=0, num_heads=3):
    """Heads that know the text: the hidden state at position p says where it is, head i says token p + 2 + i."""
    config = MedusaConfig(size, V, num_heads=num_heads, num_layers=0)
    text = np.asarray([*text, *[0] * size])
    params = {"heads": {}}
    for i in range(num_heads):
        projection = np.zeros((V, size), np.float32)
        projection[text[np.arange(size) + 2 + i + shift], np.arange(size)] = 50.0
        params["heads"][i] = {"projection": jnp.asarray(projection)}
    return config, params


TEXT = [2, 9, 4, 13, 7, 3, 3, 11, 6, 15, 2, 8, 5, 5, 12, 14, 10, 4, 9, 6, 7, 13, 2, 3, 8, 11, 12, 15, 6, 4, 10, 9]


def told(heads, **how):
    """A dictated text in a ragged batch; every token as dictated."""
    lm = world.telling_target(dictated(TEXT, V, 32, sharpness=50.0), 32)
    prompts = [TEXT[:3], TEXT[:1], TEXT[:7]]
    out = specjax.generate(lm, prompts, drafter=medusa(*heads, lm, **how), max_new_tokens=18, eos_ids=[])
    assert out.tokens == [TEXT[len(prompt) : len(prompt) + 18] for prompt in prompts]
    return out


@pytest.mark.parametrize("how", [{}, {"tree": (-1, 0, 1, -1)}, {"tree": specjax.tree.Dynamic(4, 2, 3)}])
def test_oracle_heads_accept_everything(how):
    """Cases 103 and 108: head 0, on the hidden state that predicted the pending token, speaks about the token behind
    it. Ragged prompts; 18 tokens take as few rounds as three accepted drafts and a bonus token allow."""
    out = told(oracle_heads(TEXT, 32), **how)
    # A prompt of one token has no hidden state before it: its first round may draft anything.
    assert out.stats.rounds <= 3 * 5 + 1


def test_heads_that_are_off_by_one_accept_nothing():
    """Case 103: the control. The text stays."""
    for shift in (-1, 1):
        assert told(oracle_heads(TEXT, 32, shift)).stats.acceptance_rate < 0.2


def test_the_heads_read_what_the_target_head_reads():
    """Case 101: stream L + 1, of the position before the pending token, whatever was accepted."""
    lm = world.telling_target(dictated(TEXT, V, 64), HIDDEN, "tag")
    drafter = medusa(SMALL, fresh_params(SMALL), lm)
    assert drafter.feature_layers == (5,)
    state = begin(lm, PROMPTS, drafter)
    for row, prompt in enumerate(PROMPTS):
        expected = 500 + len(prompt) - 2 if len(prompt) > 1 else 0  # nothing predicted the first token
        np.testing.assert_array_equal(state.drafter[row], np.full(HIDDEN, expected))
    assert world.target().config.num_layers == LAYERS and heads().feature_layers == (LAYERS + 1,)


# --- what is proposed


def numpy_logits(params, hidden, shared=None):
    """The heads in float64, written apart: [K, B, V]."""
    result = []
    for head in params["heads"].values():
        x = np.asarray(hidden, np.float64)
        for block in head.get("blocks", {}).values():
            y = x @ np.asarray(block["weight"], np.float64).T + np.asarray(block["bias"], np.float64)
            x = x + y / (1 + np.exp(-y))
        result.append(x @ np.asarray(head.get("projection", shared), np.float64).T)
    return np.stack(result)


def begun(drafter, lm=None):
    lm = world.small_target() if lm is None else lm
    return begin(lm, PROMPTS, drafter)


def test_logits_are_those_of_residual_blocks_and_a_projection():
    """Case 98, as far as it concerns Medusa: x + silu(linear(x)), then the projection, head by head."""
    params = fresh_params(SMALL, rngs=nnx.Rngs(3))
    params = jax.tree.map(lambda x: x + 0.1, params)  # biases that are not 0
    hidden = np.random.default_rng(0).normal(size=(2, 3, HIDDEN)).astype(np.float32)
    module = Medusa(SMALL)
    nnx.update(module, jax.tree.map(lambda x: x, params))
    got = module(jnp.asarray(hidden))
    assert got.shape == (2, 3, 3, V)
    np.testing.assert_allclose(np.moveaxis(got, 2, 0), numpy_logits(params, hidden), atol=1e-4)
    assert module(jnp.asarray(hidden), count=2).shape == (2, 3, 2, V)


def test_a_greedy_chain_is_the_top_token_of_each_head_and_so_is_blockwise():
    chain = heads(SMALL, world.small_target())
    state = begun(chain)
    logits = numpy_logits(chain.params.heads, state.drafter)
    got = proposal_of(chain, state)
    np.testing.assert_array_equal(got.tokens, logits.argmax(-1).T)
    line = blockwise(SMALL, chain.params.heads, world.small_target())
    assert line.default_rule == "match" and line.num_draft_tokens == 3
    other = proposal_of(line, state)
    assert other.probs is None and other.parents is None
    np.testing.assert_array_equal(other.tokens, got.tokens)


def test_a_drawn_chain_carries_the_laws_it_was_drawn_from():
    """Case 1: head i's law under the request's own options."""
    chain = heads(SMALL, world.small_target())
    state = begun(chain)
    got = proposal_of(chain, state, specjax.make_sampling(len(PROMPTS), V, temperature=0.8))
    logits = np.moveaxis(numpy_logits(chain.params.heads, state.drafter), 0, 1) / 0.8
    expected = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(got.probs, expected / expected.sum(-1, keepdims=True), atol=1e-5)


def test_nodes_of_a_static_tree_are_the_top_tokens_of_their_head_by_rank():
    drafter = heads(SMALL, world.small_target(), tree=TREE)
    state = begun(drafter)
    order = np.argsort(-numpy_logits(drafter.params.heads, state.drafter), axis=-1, kind="stable")
    got = proposal_of(drafter, state)
    assert got.probs is None and got.parents.tolist() == list(TREE)
    for node, (depth, rank) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (2, 0)]):
        np.testing.assert_array_equal(got.tokens[:, node], order[depth, :, rank])
    np.testing.assert_array_equal(proposal_of(drafter, state, n=3).tokens, got.tokens[:, :3])


def test_a_dynamic_tree_is_the_likeliest_paths():
    drafter = heads(SMALL, world.small_target(), tree=specjax.tree.Dynamic(6, width=3, depth=3))
    state = begun(drafter)
    logits = numpy_logits(drafter.params.heads, state.drafter)
    got = proposal_of(drafter, state)
    assert got.valid.all()
    for row in np.flatnonzero(np.abs(state.drafter).sum(-1)):  # a prompt of one token has a hidden state of zeros: ties
        assert world.paths(got, row) == world.likeliest(logits[:, row], 3, 3, 6)


def test_the_published_tree_fits_four_heads():
    """The 63 nodes for Vicuna-7B reach depth 4 and rank 9."""
    parents = specjax.tree.choices(MEDUSA_CHOICES)
    config = MedusaConfig(HIDDEN, V, num_heads=4)
    drafter = heads(config, world.small_target(), tree=parents)
    assert drafter.num_draft_tokens == 63 and specjax.tree.ranks(parents).max() == 9
    with pytest.raises(ValueError, match=r"tree is 4 levels deep, but there are 3 heads"):
        heads(SMALL, world.small_target(), tree=parents)


def test_a_large_tree_builds_no_law_per_node():
    """63 nodes over 49,152 tokens: the laws of four heads, not [B, N, V]."""
    vocab, batch = 49_152, 1
    config = MedusaConfig(HIDDEN, vocab, num_heads=4)
    model = world.target().model._replace(vocab_size=vocab)
    embedding = jax.ShapeDtypeStruct((vocab, HIDDEN), jnp.float32)
    lm = world.target()._replace(model=model, params={"embedding": embedding})
    drafter = medusa(config, abstract_params(config), lm, tree=specjax.tree.choices(MEDUSA_CHOICES))
    text = padded([[1, 2]])
    args = drafter.params, specjax.row_keys([0]), jnp.zeros((batch, HIDDEN)), text, specjax.make_sampling(1, vocab)
    memory = world.draft.lower(drafter.draft, 63, *args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 63 * vocab * 4 / 3


def test_fresh_heads_with_a_target_repeat_its_own_prediction():
    """As in the paper: blocks that do nothing, the target's projection, copied or shared."""
    lm = world.small_target()
    state = begun(heads(SMALL, lm))
    own = np.asarray(state.drafter) @ np.asarray(lm.params["head"]).T
    for config in (SMALL, MedusaConfig(HIDDEN, V, num_heads=2, shared=True)):
        drafter = medusa(config, fresh_params(config, lm), lm, tree=specjax.tree.chain(2))
        got = proposal_of(drafter, state)
        np.testing.assert_array_equal(got.tokens, np.stack([own.argmax(-1)] * 2, axis=1))
    assert drafter.params.shared is lm.params["head"] and "projection" not in drafter.params.heads["heads"][0]


# --- texts


@pytest.mark.parametrize("shape", ["chain", pytest.param("tree", marks=pytest.mark.full), "dynamic"])
def test_greedy_text_is_that_of_plain_decoding_in_a_ragged_batch(shape):
    lm = world.small_target()
    plain = specjax.generate(lm, PROMPTS, max_new_tokens=20, eos_ids=[])
    drafter = heads(SMALL, lm, **FORMS[shape])
    out = specjax.generate(lm, PROMPTS, drafter=drafter, max_new_tokens=20, eos_ids=[])
    assert out.tokens == plain.tokens and out.stats.proposed > 0 and out.lossless


def test_freshly_built_equal_drafters_compile_once():
    lm = world.small_target()

    def run(seed):
        drafter = heads(SMALL, lm, seed=seed, tree=DYNAMIC)
        specjax.generate(lm, PROMPTS, drafter=drafter, max_new_tokens=20, eos_ids=[])
        return loop.compiled_programs()

    assert run(1) == run(2)


# --- mistakes


def test_heads_of_another_target_are_refused_with_both_facts():
    """Cases 121 and 101, by kind: sizes that do not fit."""
    with pytest.raises(ValueError, match=r"Medusa head has hidden_size 9 and the target 8.*another target"):
        heads(MedusaConfig(9, 3))
    with pytest.raises(ValueError, match=r"Medusa head has vocab_size 5 and the target 3"):
        heads(MedusaConfig(HIDDEN, 5))
    with pytest.raises(ValueError, match=r"config.num_layers and params\['embedding'\]"):
        heads(lm=specjax.LanguageModel(world.target().model, world.target().params))


def test_weights_that_are_not_the_configurations_are_refused_by_name():
    """Case 112."""
    lm, params = world.target(), fresh_params(HEADS)
    lost = {"heads": {k: v for k, v in params["heads"].items() if k != 1}}
    with pytest.raises(ValueError, match=r"weight heads/1/blocks/0/bias is missing, the configuration needs \(8,\)"):
        medusa(HEADS, lost, lm)
    wide = {"heads": params["heads"] | {2: params["heads"][2] | {"projection": jnp.zeros((4, 8))}}}
    with pytest.raises(ValueError, match=r"heads/2/projection has shape \(4, 8\), the configuration needs \(3, 8\)"):
        medusa(HEADS, wide, lm)
    more = {"heads": params["heads"] | {3: params["heads"][2]}}
    with pytest.raises(ValueError, match=r"heads/3/blocks/0/bias has shape \(8,\), the configuration knows no such"):
        medusa(HEADS, more, lm)


@pytest.mark.parametrize(("how", "message"), [
    ({"num_draft_tokens": 4}, r"num_draft_tokens=4, but there are 3 heads"),
    ({"num_draft_tokens": 0}, r"num_draft_tokens=0"),
    ({"tree": []}, r"tree=\[\] has no nodes"),
    ({"tree": [-1, 1]}, r"parents\[1\] = 1"),
    ({"tree": [-1] * 4}, r"up to 4 children below a node, but there are 3 draft tokens"),
    ({"tree": [-1, 0], "num_draft_tokens": 3}, r"num_draft_tokens=3, but the tree has 2 nodes"),
    ({"tree": [-1, 0], "coupled": True}, r"coupled=True draws a chain"),
    ({"tree": specjax.tree.Dynamic(0)}, r"tree.num_nodes=0"),
    ({"tree": specjax.tree.Dynamic(4, width=2, depth=9)}, r"tree is 9 levels deep, but there are 3 heads"),
    ({"coupled": "yes"}, r"coupled='yes'"),
])  # fmt: skip
def test_forms_that_make_no_sense_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        heads(**how)


def test_configurations_that_make_no_sense_are_refused():
    for wrong, message in (
        ({"num_heads": 0}, r"num_heads=0"), ({"num_layers": -1}, r"num_layers=-1"), ({"shared": 1}, r"shared=1"),
    ):
        with pytest.raises(ValueError, match=message):
            MedusaConfig(8, 3, **wrong)
    with pytest.raises(ValueError, match=r"config=3: give a MedusaConfig"):
        medusa(3, {}, world.target())
    with pytest.raises(ValueError, match=r"config=3: give a MedusaConfig"):
        blockwise(3, {}, world.target())
    with pytest.raises(ValueError, match=rf"num_draft_tokens=100000, but there are {HEADS.num_heads} heads"):
        blockwise(HEADS, fresh_params(HEADS), world.target(), 100_000)
