"""DFlash: block drafts, their Markov term and confidence cut, the draft cache. Numbers: test_dflash_reference.py."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import loop
from specjax.drafters.dflash import DFlash, DFlashConfig, dflash, fresh_params
from specjax.models.config import LlamaConfig
from tests.drafters import parallel_world as world
from tests.drafters.parallel_world import DYNAMIC, HIDDEN, TREE, proposal_of
from tests.small import PROMPTS, V, advance, begin, dictated

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 12, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "qk_norm": True,
    "max_position_embeddings": 512,
}  # fmt: skip
TINY = DFlashConfig(LlamaConfig(3, **SIZES), (1, 3), mask_token_id=2, block_size=4)
SMALL = DFlashConfig(LlamaConfig(V, **SIZES), (0, 2), mask_token_id=V - 1, block_size=5)
MARKOV = {"markov_rank": 2, "confidence": True, "confidence_with_markov": True}
IDS = (1, 4, 5, 8, 12, 15)


def config(base, **changes):
    return dataclasses.replace(base, **changes)


def blocks(base=TINY, lm=None, seed=0, ids=None, **how):
    """A drafter with random weights, livelier than fresh ones."""
    lm = world.target() if lm is None else lm
    params = fresh_params(base, ids=ids, rngs=nnx.Rngs(seed))
    params |= {name: 2.0 * params[name] for name in ("head", "above", "out", "confidence") if name in params}
    return dflash(base, params, lm, **how)


# --- laws

SPARK = config(TINY, **MARKOV)
TWO = config(TINY, draft_vocab_size=2, **MARKOV)
LAWS = {
    "chain with Markov term and confidence cut": lambda: blocks(SPARK, seed=1, min_confidence=0.45),
    "dynamic tree": lambda: blocks(tree=DYNAMIC),
    "plain chain": blocks,
    "chain from the anchor": lambda: blocks(config(SPARK, sample_from_anchor=True)),
    "reduced vocabulary": lambda: blocks(TWO, ids=(0, 2)),
    "static tree": lambda: blocks(tree=TREE),
    "static tree with Markov term and confidence cut": lambda: blocks(SPARK, seed=1, tree=TREE, min_confidence=0.45),
    "dynamic tree with Markov term": lambda: blocks(SPARK, seed=1, tree=DYNAMIC, min_confidence=0.45),
    "coupled chain, reduced vocabulary": lambda: blocks(TWO, ids=(0, 2), coupled=True),
}
QUICK = [("chain with Markov term and confidence cut", "rejection")]
MORE = [
    ("plain chain", "match"), ("chain from the anchor", "rejection"), ("reduced vocabulary", "rejection"),
    ("reduced vocabulary", "block"), ("static tree", "match"), ("dynamic tree", "match"),
    ("static tree with Markov term and confidence cut", "rejection"), ("dynamic tree with Markov term", "rejection"),
    ("coupled chain, reduced vocabulary", "match"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rule"), [*QUICK, *[pytest.param(*item, marks=pytest.mark.full) for item in MORE]])
def test_random_blocks_leave_the_law_alone(name, rule):
    """Case 108, one half: blocks that know nothing. Greedy, T = 1 and T = 0.7 with top-p 0.9 side by side."""
    world.check_law(LAWS[name](), rule)


@pytest.mark.full
def test_a_cut_that_looks_at_the_drawn_token_is_caught():
    """The confidence cut may see the context and the tokens above; one that sees the token itself is biased."""
    world.assert_caught(world.own_probability(blocks(SPARK)))


# --- what is proposed


def laws_of(drafter, base, state, lm, least=-np.inf):
    """Laws of the block, by the module itself (whose numbers the reference test checks)."""
    net = DFlash(base, drafter.params.net)
    slots = np.arange(base.block_size)[None]
    pending = np.take_along_axis(np.asarray(state.text.tokens), np.asarray(state.text.lengths)[:, None] - 1, axis=1)
    tokens = jnp.asarray(np.where(slots == 0, pending, base.mask_token_id))
    positions = jnp.asarray(np.asarray(state.text.lengths)[:, None] - 1 + slots)
    hidden = net(tokens, positions, state.drafter, lm.params["embedding"]).hidden
    hidden = hidden[:, 0 if base.sample_from_anchor else 1 :]
    return net.laws(hidden, lm.params["head"], least), pending[:, 0]


def begun(drafter):
    return begin(world.small_target(), PROMPTS, drafter)


@pytest.mark.parametrize("anchor", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_greedy_chain_is_the_top_token_of_each_row_of_the_block(anchor):
    """Row j is about the token at pending + j, or + j + 1 when the anchor row is sampled from too."""
    base, lm = config(SMALL, sample_from_anchor=anchor), world.small_target()
    drafter = blocks(base, lm)
    assert drafter.num_draft_tokens == (5 if anchor else 4) == base.num_laws
    state = begun(drafter)
    logits = np.asarray(laws_of(drafter, base, state, lm)[0].logits)
    np.testing.assert_array_equal(proposal_of(drafter, state).tokens, logits.argmax(-1))


def test_fewer_draft_tokens_are_the_first_of_the_same_block():
    """The block is filled whole: its rows see each other."""
    lm = world.small_target()
    whole, part = blocks(SMALL, lm), blocks(SMALL, lm, num_draft_tokens=2)
    state = begun(whole)
    np.testing.assert_array_equal(proposal_of(part, state).tokens, proposal_of(whole, state).tokens[:, :2])
    np.testing.assert_array_equal(proposal_of(whole, state, n=2).tokens, proposal_of(whole, state).tokens[:, :2])


def spark():
    base, lm = config(SMALL, draft_vocab_size=len(IDS), **MARKOV), world.small_target()
    return base, lm, blocks(base, lm, ids=IDS)


def test_a_drawn_chain_with_a_markov_term_carries_the_true_conditionals():
    """Case 1: the law of token j given token j - 1, over the reduced vocabulary, under the request's own options."""
    base, lm, drafter = spark()
    state = begun(drafter)
    got = proposal_of(drafter, state, specjax.make_sampling(len(PROMPTS), V, temperature=0.8))
    assert isinstance(got.probs, specjax.Sparse) and got.probs.ids.tolist() == list(IDS)
    laws, pending = laws_of(drafter, base, state, lm)
    above = np.concatenate([pending[:, None], got.tokens[:, :-1]], axis=1)
    net = drafter.params.net
    logits = np.asarray(laws.logits, np.float64) + np.asarray(net["above"])[above] @ np.asarray(net["out"]).T
    expected = np.exp(logits / 0.8)
    np.testing.assert_allclose(got.probs.probs, expected / expected.sum(-1, keepdims=True), atol=1e-5)
    assert np.isin(got.tokens, IDS).all()


def test_the_confidence_cut_sees_the_context_and_the_token_above():
    base, lm, whole = spark()
    state, warm = begun(whole), specjax.make_sampling(len(PROMPTS), V, temperature=2.0)
    uncut = proposal_of(whole, state, warm)
    assert uncut.valid.all()
    laws, pending = laws_of(whole, base, state, lm, 0.0)
    above = np.concatenate([pending[:, None], uncut.tokens[:, :-1]], axis=1)
    net = whole.params.net
    odds = np.asarray(laws.confidence.odds) + np.asarray(net["above"])[above] @ np.asarray(net["confidence"])[HIDDEN:]
    least = float(np.quantile(odds, 0.3)) + 1e-3
    got = proposal_of(blocks(base, lm, ids=IDS, min_confidence=1 / (1 + np.exp(-least))), state, warm)
    np.testing.assert_array_equal(got.valid, np.cumprod(odds >= least, axis=1).astype(bool))
    np.testing.assert_array_equal(got.tokens, uncut.tokens)
    assert 0 < got.valid.mean() < 1


def test_trees_with_a_markov_term_know_the_token_above():
    """Static: children by rank given the token above. Dynamic: the likeliest paths of the corrected laws."""
    base, lm = config(SMALL, markov_rank=2), world.small_target()
    static, dynamic = blocks(base, lm, tree=TREE), blocks(base, lm, tree=specjax.tree.Dynamic(6, width=3, depth=3))
    state = begun(static)
    laws, pending = laws_of(static, base, state, lm)
    logits = np.asarray(laws.logits, np.float64)
    bonus = np.asarray(static.params.net["above"], np.float64) @ np.asarray(static.params.net["out"]).T
    got, grown = proposal_of(static, state), proposal_of(dynamic, state)
    for row in range(len(PROMPTS)):
        tokens = []
        for node, (parent, rank) in enumerate(zip(TREE, specjax.tree.ranks(TREE), strict=True)):
            above = pending[row] if parent < 0 else tokens[parent]
            depth = len(world.paths(got, row)[node]) - 1
            tokens.append(int(np.argsort(-(logits[row, depth] + bonus[above]), kind="stable")[rank]))
        assert got.tokens[row].tolist() == tokens
        assert world.paths(grown, row) == world.likeliest(logits[row], 3, 3, 6, pending[row], bonus)


def test_nothing_is_proposed_where_the_reduced_vocabulary_is_banned():
    """Every draft id has probability 0 under the request: there is no law to draw from, and the text goes on."""
    _, _, drafter = spark()
    state = begun(drafter)
    got = proposal_of(drafter, state, specjax.make_sampling(len(PROMPTS), V, temperature=1.0, banned_tokens=list(IDS)))
    assert not got.valid.any() and np.isfinite(got.probs.probs).all()


# --- the draft cache


def test_the_context_is_what_the_target_saw_whatever_was_rejected():
    """Cases 34 and 103: after rounds that accept and reject, the cache is that of a fresh prefill, a slot per position
    before the pending token, and drafting has touched none of them."""
    lm = world.small_target()
    drafter = blocks(SMALL, lm)
    state, kept = begun(drafter), []
    for _ in range(4):
        state, info = advance(lm, drafter, state)
        kept.append(np.asarray(info.num_accepted))
    text = jax.device_get(state.text)
    np.testing.assert_array_equal(state.drafter.lengths, text.lengths - 1)
    fresh = begin(lm, [row[:length].tolist() for row, length in zip(text.tokens, text.lengths, strict=True)], drafter)
    real = np.arange(state.drafter.k[0].shape[2])[None, None, :, None] < (text.lengths - 1)[:, None, None, None]
    for ours, theirs in zip(jax.tree.leaves(state.drafter[:2]), jax.tree.leaves(fresh.drafter[:2]), strict=True):
        np.testing.assert_allclose(np.where(real, ours, 0), np.where(real, theirs, 0), atol=1e-4)


def test_slot_p_holds_the_feature_of_position_p():
    """Case 103: features come with the token they predicted, one position later."""
    lm = world.telling_target(dictated(list(range(12)), V, 64), HIDDEN)
    base = config(SMALL, feature_layers=(3,))
    drafter = blocks(base, lm)
    state, _ = advance(lm, drafter, begin(lm, [[1, 2, 3], [4]], drafter))
    net, lengths = DFlash(base, drafter.params.net), np.asarray(state.drafter.lengths)
    slots = jnp.broadcast_to(jnp.arange(4)[None], (2, 4))
    cache = net.observe(jax.nn.one_hot(slots, HIDDEN), slots, net.init_cache(2, 4), jnp.full(2, 4))
    for row, length in enumerate(lengths):
        assert length >= (3, 1)[row]
        for ours, theirs in zip(state.drafter.k, cache.k, strict=True):
            seen = min(int(length), 4)
            np.testing.assert_allclose(ours[row, :, :seen], theirs[row, :, :seen], atol=1e-5)


# --- texts


@pytest.mark.parametrize("how", [
    {}, *(pytest.param({"tree": tree}, marks=pytest.mark.full) for tree in (DYNAMIC, TREE)),
])  # fmt: skip
def test_greedy_text_is_that_of_plain_decoding_in_a_ragged_batch(how):
    lm = world.small_target()
    plain = specjax.generate(lm, PROMPTS, max_new_tokens=20, eos_ids=[])
    out = specjax.generate(lm, PROMPTS, drafter=blocks(SMALL, lm, **how), max_new_tokens=20, eos_ids=[])
    assert out.tokens == plain.tokens and out.stats.proposed > 0 and out.lossless


def cycling(shift):
    """A text in which token t is followed by t + 3, and blocks that know: the Markov term alone speaks."""
    text = [(2 + 3 * i) % V for i in range(40)]
    lm = world.telling_target(dictated(text, V, 40, sharpness=50.0), HIDDEN)
    base = config(SMALL, feature_layers=(1,), markov_rank=V)
    params = fresh_params(base) | {"above": jnp.eye(V), "out": 50.0 * jnp.roll(jnp.eye(V), 3 + shift, axis=0)}
    return text, lm, dflash(base, params, lm)


def test_oracle_blocks_accept_everything():
    """Cases 103 and 108: draft 1 is a function of the pending token, each later one of the draft above it."""
    text, lm, drafter = cycling(0)
    out = specjax.generate(lm, [text[:3], text[:1]], drafter=drafter, max_new_tokens=20, eos_ids=[])
    assert out.tokens == [text[3:23], text[1:21]]
    assert out.stats.rounds == 2 * 4 and out.stats.alpha == 1.0
    text, lm, drafter = cycling(1)
    out = specjax.generate(lm, [text[:3], text[:1]], drafter=drafter, max_new_tokens=20, eos_ids=[])
    assert out.tokens == [text[3:23], text[1:21]] and out.stats.acceptance_rate == 0


def test_freshly_built_equal_drafters_compile_once():
    lm = world.small_target()

    def run(seed):
        specjax.generate(lm, PROMPTS, drafter=blocks(SMALL, lm, seed, tree=DYNAMIC), max_new_tokens=20, eos_ids=[])
        return loop.compiled_programs()

    assert run(1) == run(2)


def test_bfloat16_weights_say_about_the_same():
    """The draft cache then keeps the bits of bfloat16."""
    lm = world.small_target()
    fine = blocks(SMALL, lm)
    coarse = dflash(SMALL, jax.tree.map(lambda x: x.astype(jnp.bfloat16), fine.params.net), lm)
    warm = specjax.make_sampling(len(PROMPTS), V, temperature=1.0)
    laws = [proposal_of(drafter, begun(drafter), warm).probs for drafter in (fine, coarse)]
    assert begun(coarse).drafter.k[0].dtype == jnp.uint16
    np.testing.assert_allclose(*laws, atol=0.05)


# --- mistakes


def test_a_drafter_of_another_target_is_refused_with_both_facts():
    """Cases 101 and 121, by kind."""
    lm = world.target()
    with pytest.raises(ValueError, match=r"DFlash drafter has hidden_size 16 and the target 8.*another target"):
        blocks(config(TINY, layers=LlamaConfig(3, **SIZES | {"hidden_size": 16})))
    with pytest.raises(ValueError, match=rf"DFlash drafter has vocab_size {V} and the target 3"):
        blocks(SMALL)
    with pytest.raises(ValueError, match=r"stream after layer 4 and the target has 2 layers"):
        blocks(config(TINY, feature_layers=(1, 4)))
    with pytest.raises(ValueError, match=r"weight layers/0/k_norm is missing"):
        params = fresh_params(TINY)
        params["layers"][0] = {k: v for k, v in params["layers"][0].items() if k != "k_norm"}
        dflash(TINY, params, lm)


def test_ids_outside_the_vocabulary_never_reach_an_embedding():
    """Cases 105 and 107: an index past a table would be clamped in JAX, silently."""
    with pytest.raises(ValueError, match=r"mask_token_id=3: the vocabulary has 3 tokens"):
        config(TINY, mask_token_id=3)
    reduced = config(SMALL, draft_vocab_size=4)
    for ids in ([2, 4, 4, 6], [5, 2, 6, 9], [0, 1, 2, V], [-1, 0, 1, 2]):  # the first: offsets, not ids
        with pytest.raises(ValueError, match=r"ids=.*ascending token ids of the target, below 16; offsets \(d2t\)"):
            blocks(reduced, world.small_target(), ids=ids)


@pytest.mark.parametrize(("change", "message"), [
    ({"feature_layers": ()}, r"feature_layers=\(\)"),
    ({"feature_layers": (1, -2)}, r"feature_layers=-2"),
    ({"block_size": 1}, r"block_size=1: must be a whole number, 2 or more"),
    ({"confidence_with_markov": True, "confidence": True}, r"needs confidence=True and markov_rank of 1 or more"),
])  # fmt: skip
def test_configurations_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config(TINY, **change)


def test_requests_that_make_no_sense_are_refused():
    for how, message in (
        ({"num_draft_tokens": 4}, r"num_draft_tokens=4, but there are 3 rows to draft from"),
        ({"min_confidence": 0.5}, r"min_confidence=0.5: this drafter has no confidence head"),
        ({"min_confidence": 1.0}, r"min_confidence=1.0: must be a number from 0 \(off\) to below 1"),
        ({"tree": specjax.tree.Dynamic(4, width=4, depth=2)}, r"up to 4 children below a node, but there are 3"),
    ):
        with pytest.raises(ValueError, match=message):
            blocks(**how)
    with pytest.raises(ValueError, match=r"layers=None: give a LlamaConfig"):
        config(TINY, layers=None)
    with pytest.raises(ValueError, match=r"draft_vocab_size=4, but the target has 3 tokens"):
        config(TINY, draft_vocab_size=4)
    with pytest.raises(ValueError, match=r"config=None: give a DFlashConfig"):
        dflash(None, {}, world.target())
