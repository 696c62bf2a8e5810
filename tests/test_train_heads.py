"""Heads in training are heads in decoding: the same pairing, positions and sight, alone in a row or packed into one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters.dflash import DFlashConfig
from specjax.drafters.eagle import EagleConfig
from specjax.drafters.medusa import MedusaConfig
from specjax.drafters.mtp import MTPConfig
from specjax.models.config import LlamaConfig
from specjax.train import heads, initial
from tests.drafters.parallel_world import proposal_of
from tests.small import advance, begin
from tests.train_world import drawn, language_model

V, E, K, WIDTH = 24, 16, 3, 16
SIZES = LlamaConfig(V, E, 32, 1, 2, 1, tie_embeddings=False, max_position_embeddings=128)
ONE = LlamaConfig(V, E, 32, 1, 2, 1, max_position_embeddings=128)
IDS = np.asarray([i for i in range(V) if i % 6])
CONFIGS = {
    "medusa": MedusaConfig(E, V, K),
    "medusa, shared": MedusaConfig(E, V, K, shared=True),
    "eagle 1": EagleConfig(ONE, (2,), version=1),
    "eagle 3": EagleConfig(ONE, (0, 2, 1), draft_vocab_size=len(IDS)),
    "eagle 3, fc_norm": EagleConfig(ONE, (0, 1, 2), draft_vocab_size=len(IDS), fc_norm=True),
    "eagle 3, two layers": EagleConfig(LlamaConfig(V, E, 32, 2, 2, 1), (1, 2), norm_output=True),
    "mtp, one module": MTPConfig(ONE, (2,)),
    "mtp, three modules": MTPConfig(ONE, (1,), num_modules=K),
    "dflash": DFlashConfig(ONE, (2, 1), 0, K + 1, draft_vocab_size=len(IDS)),
    "dflash, markov": DFlashConfig(LlamaConfig(V, E, 32, 2, 2, 1), (1,), 1, K, sample_from_anchor=True, markov_rank=4),
    "dflash, confidence": DFlashConfig(
        ONE, (2, 1), 0, K + 1, draft_vocab_size=len(IDS), markov_rank=4, confidence=True, confidence_with_markov=True
    ),
}
QUICK = ("medusa, shared", "eagle 3", "mtp, three modules", "dflash, confidence")
SLOW = ("medusa", "eagle 1", "mtp, one module", "dflash, markov")  # packed, in the full run only
CUT = 0.3  # drafts end where the confidence head gives less
PROMPTS = [[i % V, (5 * i + 3) % V, *[7] * (i % 4)] for i in range(8)]


@functools.cache
def target() -> specjax.LanguageModel:
    return language_model(SIZES)


@functools.cache
def random_head(name: str):
    """Weights far from anything special, so that every path through the head shows."""
    config, lm = CONFIGS[name], target()
    params = drawn(jax.eval_shape(lambda: initial.params_for(config, lm, ids=IDS)), 10, 0.3)
    return config, {**params, "ids": jnp.asarray(IDS, jnp.int32)} if "ids" in params else params


def drafter_of(config, params):
    depth = min(K, getattr(config, "num_laws", K), getattr(config, "num_heads", K))
    cut = {"min_confidence": CUT} if getattr(config, "confidence", False) else {}
    return heads.drafter(config, params, target(), num_draft_tokens=depth, **cut)


@functools.partial(jax.jit, static_argnums=0)
def read(model, weights, tokens, documents):
    """The target's streams 0, 1, 2, which is all there are."""
    return heads.read(specjax.LanguageModel(model, weights), tokens, (0, 1, 2), documents).features


@functools.partial(jax.jit, static_argnums=(0, 1))
def _say(config, depth, params, weights, tokens, documents, features):
    features = jnp.split(features, 3, axis=-1)
    features = jnp.concatenate([features[k] for k in heads.feature_layers(config, SIZES.num_layers)], axis=-1)
    said = heads.laws(config, params, weights, tokens, features, depth=depth, documents=documents)
    # By the row of the target that a place is compared with; rows that no place is compared with are not valid.
    dense = []
    for logits, rows, valid, odds in said:
        odds = jnp.zeros(valid.shape) if odds is None else odds
        probs = jnp.zeros((*tokens.shape, logits.shape[-1])).at[:, rows].set(jax.nn.softmax(logits), mode="drop")
        odds, valid = (jnp.zeros(tokens.shape, x.dtype).at[:, rows].set(x, mode="drop") for x in (odds, valid))
        dense.append((probs, odds, valid))
    return [jnp.stack(parts) for parts in zip(*dense)]


def say(config, params, tokens, documents, depth=K):
    """probs [K, B, T, M], odds [K, B, T], valid [K, B, T]."""
    features = read(target().model, target().params, tokens, documents)
    return jax.device_get(_say(config, depth, params, target().params, tokens, documents, features))


def drafted_texts(name: str, rounds: int):
    """A head, texts it was fed with what it drafted behind them, their lengths without, and the proposal."""
    config, params = random_head(name)
    drafter = drafter_of(config, params)
    sampling = specjax.make_sampling(len(PROMPTS), V, temperature=1.0)
    state = begin(target(), PROMPTS, drafter)
    for _ in range(rounds):  # in later rounds the head's state has been through rejections
        state, _ = advance(target(), drafter, state, rule="rejection", sampling=sampling)
    proposal = proposal_of(drafter, state, sampling)
    text = jax.device_get(state.text)
    rows = [row[:size].tolist() for row, size in zip(text.tokens, text.lengths)]
    texts = [row + drafts.tolist() for row, drafts in zip(rows, proposal.tokens)]
    return config, params, texts, [len(row) for row in rows], proposal


def in_rows(rows):
    """Rows of texts as tokens and documents; what follows them must not matter."""
    tokens = np.random.default_rng(0).integers(0, V, (len(rows), WIDTH)).astype(np.int32)
    documents = np.full((len(rows), WIDTH), -1, np.int32)
    for row, texts in enumerate(rows):
        begins = np.cumsum([0, *map(len, texts)])
        for number, (text, at) in enumerate(zip(texts, begins)):
            tokens[row, at : at + len(text)], documents[row, at : at + len(text)] = text, number
    return tokens, documents


def assert_drafted(name: str, rounds: int, packed: bool):
    """Place ``pending + d`` of a text says what was drafted d tokens behind the pending one."""
    config, params, texts, lengths, proposal = drafted_texts(name, rounds)
    tokens, documents = in_rows([[text] for text in texts])
    drafted = proposal.probs.probs if isinstance(proposal.probs, specjax.Sparse) else proposal.probs
    depth = drafted.shape[1]
    probs, odds, valid = say(config, params, tokens, documents if packed else None, depth)
    for row, size in enumerate(lengths):
        at = [(d, row, size - 1 + d) for d in range(depth)]
        assert all(valid[place] for place in at)
        for d, place in enumerate(at):
            np.testing.assert_allclose(probs[place], drafted[row, d], atol=1e-4, err_msg=f"depth {d}, row {row}")
        sure = np.cumprod([odds[place] >= np.log(CUT / (1 - CUT)) for place in at])
        np.testing.assert_array_equal(proposal.valid[row], sure.astype(bool))  # all of them without a confidence head
    if odds.any():
        assert proposal.valid.any() and not proposal.valid.all()
    # A test of equal laws is worth something if laws differ from place to place.
    assert np.median(np.abs(probs[0, :, 2:6] - probs[0, :, 1:5]).max(-1)) > 1e-2


@pytest.mark.parametrize("name", ["eagle 3", "dflash, confidence"])
def test_laws_taught_are_the_laws_drafted(name):
    """Cases 103, 127, 138: pairing, positions and sight of the training pass are those of decoding."""
    assert_drafted(name, rounds=0, packed=True)


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_laws_taught_are_the_laws_drafted_after_rejections(name):
    """Case 138: also where the head's state has been through rounds, and where rows are not said to be packed."""
    assert_drafted(name, rounds=2, packed=False)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
def test_texts_packed_into_a_row_say_what_they_say_alone(name):
    """Wherever a text lies in its row; pairs across texts are not valid."""
    config, params = random_head(name)
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, V, size).tolist() for size in (8, 5, 8, 6, 3, 8, 7, 4)]
    depth = min(K, heads.depth_of(config))
    alone = say(config, params, *in_rows([[text] for text in texts]), depth)
    packed = say(config, params, *in_rows([list(two) for two in zip(texts, texts[1:] + texts[:1])]), depth)
    expected = np.zeros_like(packed[2])
    for first, text in enumerate(texts):
        before = (first - 1) % len(texts)
        for row, offset in ((first, 0), (before, len(texts[before]))):  # it is the first of one row, last of another
            here = slice(offset, offset + len(text))
            expected[:, row, here] = valid = alone[2][:, first, : len(text)]
            for ours, theirs in zip(packed[:2], alone[:2]):
                np.testing.assert_allclose(ours[:, row, here][valid], theirs[:, first, : len(text)][valid], atol=1e-5)
    np.testing.assert_array_equal(packed[2], expected)
    # With the first token given, token 2 + d is the first that can be drafted at depth d; the last one is the text's.
    assert alone[2].sum((1, 2)).tolist() == [sum(max(0, len(text) - 2 - d) for text in texts) for d in range(depth)]


# --- sight


DOCUMENTS = np.array([[0, 0, 0, 0, 1, 1, 1, -1]])


@pytest.mark.parametrize("packed", [False, True])
def test_each_pass_sees_the_text_up_to_its_pending_token_and_its_own_ancestors(packed):
    """Case 135: what a three-step unroll may look at, written down slot by slot."""
    @jax.jit
    def everything(documents):
        lay = heads.layout(jnp.zeros((1, 8), jnp.int32), documents)
        return lay.positions[0], [heads._pass_reach(lay, d, 3)[0].reshape(8, 3, 8) for d in range(3)]

    document = DOCUMENTS[0] if packed else np.zeros(8)
    position, passes = jax.device_get(everything(jnp.asarray(DOCUMENTS) if packed else None))
    assert position.tolist() == ([0, 1, 2, 3, 0, 1, 2, 0] if packed else list(range(8)))
    for d, seen in enumerate(passes):
        for token, earlier, slot in itertools.product(range(8), range(3), range(8)):
            pending = token - d
            if earlier == 0:
                sees = slot <= pending  # true tokens, the pending one included
            else:
                sees = earlier <= d and slot == pending + earlier  # the node of that depth above, or itself
            sees = sees and document[slot] == document[token] and position[slot] >= 1
            assert seen[token, earlier, slot] == sees, (d, token, earlier, slot)


def test_one_text_a_row_is_a_packing_of_one():
    @jax.jit
    def everything(documents):
        lay, anchors, rows = heads.layout(jnp.zeros((2, 8), jnp.int32), documents), jnp.array([1, 4]), jnp.arange(8)
        mask = jnp.tril(jnp.ones((8, 8), bool)) if documents is None else heads.window_mask(documents)
        reach = heads._module_reach(lay, 1), heads._block_reach(lay, anchors, 3), jnp.broadcast_to(mask, (2, 8, 8))
        return lay.positions, *reach, heads.about_one_text(lay, rows, rows, 2)

    for ours, theirs in zip(everything(None), everything(jnp.zeros((2, 8), jnp.int32))):
        np.testing.assert_array_equal(ours, theirs)


# --- bfloat16


@pytest.mark.full
@pytest.mark.parametrize("name", QUICK)
def test_gradients_flow_through_bfloat16_weights(name):
    """Keys and values are no bits: what they are made with learns as it does in float32."""
    config, params = random_head(name)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, V, (2, 8)).astype(np.int32)
    features = rng.normal(size=(2, 8, E * len(heads.feature_layers(config, 1)))).astype(np.float32)

    @jax.jit
    def gradient(trained):
        def total(trained):
            made = {**trained, **{k: params[k] for k in params if k == "ids"}}
            said = heads.laws(config, made, target().params, tokens, features, depth=1)
            return sum((jax.nn.log_softmax(s.logits)[..., 0] * s.valid.astype(jnp.float32)).sum() for s in said)

        return jax.grad(total)(trained)

    trained = {name: leaf for name, leaf in params.items() if name != "ids"}
    pair = gradient(jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), trained)), gradient(trained)
    assert {leaf.dtype for leaf in jax.tree.leaves(pair[0])} == {jnp.dtype(jnp.bfloat16)}
    ours, theirs = (
        np.concatenate([np.ravel(x).astype(np.float32) for x in jax.tree.leaves(tree)]) for tree in pair
    )
    assert np.isfinite(ours).all()
    assert ours @ theirs > 0.98 * np.linalg.norm(ours) * np.linalg.norm(theirs)
