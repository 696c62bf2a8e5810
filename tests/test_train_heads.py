"""Heads in training are heads in decoding: the same pairing, positions and sight; and a little training shows there."""

import functools

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
from specjax.models.llama import Llama
from specjax.train import distill as training
from specjax.train import heads, initial, texts
from tests.drafters.parallel_world import proposal_of
from tests.small import advance, begin

V, E, K, WIDTH = 24, 16, 3, 24
SIZES = LlamaConfig(V, E, 32, 1, 2, 1, tie_embeddings=False, max_position_embeddings=128)
ONE = LlamaConfig(V, E, 32, 1, 2, 1, max_position_embeddings=128)
IDS = np.asarray([i for i in range(V) if i % 6])
CONFIGS = {
    "medusa": MedusaConfig(E, V, K),
    "medusa, shared": MedusaConfig(E, V, K, shared=True),
    "eagle 1": EagleConfig(ONE, (2,), version=1),
    "eagle 3": EagleConfig(ONE, (0, 2, 1), draft_vocab_size=len(IDS)),
    "eagle 3, two layers": EagleConfig(LlamaConfig(V, E, 32, 2, 2, 1), (1, 2), norm_output=True),
    "mtp, one module": MTPConfig(ONE, (2,)),
    "mtp, three modules": MTPConfig(ONE, (1,), num_modules=K),
    "dflash": DFlashConfig(ONE, (2, 1), 0, K + 1, draft_vocab_size=len(IDS)),
    "dflash, markov": DFlashConfig(LlamaConfig(V, E, 32, 2, 2, 1), (1,), 1, K, sample_from_anchor=True, markov_rank=4),
}
KINDS = {"medusa": "medusa, shared", "eagle": "eagle 3", "mtp": "mtp, one module", "dflash": "dflash"}
PROMPTS = [[i % V, (5 * i + 3) % V, *[7] * (i % 4)] for i in range(16)]



@functools.cache
def target() -> specjax.LanguageModel:
    from flax import nnx

    model, params = specjax.from_nnx(Llama(SIZES, rngs=nnx.Rngs(3)))
    params |= {name: 50.0 * params[name] for name in ("embedding", "head")}  # laws with something to say
    return specjax.LanguageModel(model, params, config=SIZES)


@functools.cache
def random_head(name: str):
    """Weights far from anything special, so that every path through the head shows."""
    config = CONFIGS[name]
    params = initial.params_for(config, target(), ids=IDS)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) if x.dtype == jnp.float32 else x for x, k in zip(leaves, keys)]
    return config, jax.tree.unflatten(tree, noisy)


def limit_of(config) -> int:
    return min(K, getattr(config, "num_laws", K), getattr(config, "num_heads", K))


def drafter_of(config, params):
    return heads.drafter(config, params, target(), num_draft_tokens=limit_of(config))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def say(config, model, depth, params, weights, tokens):
    layers = heads.feature_layers(config, SIZES.num_layers)
    reading = heads.read(specjax.LanguageModel(model, weights), tokens, layers)
    said = heads.laws(config, params, weights, tokens, reading.features, depth=depth)
    return [(jax.nn.softmax(logits), rows) for logits, rows in said]


def assert_taught_as_drafted(name: str, rounds: int):
    config, params = random_head(name)
    drafter = drafter_of(config, params)
    sampling = specjax.make_sampling(len(PROMPTS), V, temperature=1.0)
    state = begin(target(), PROMPTS, drafter)
    for _ in range(rounds):  # in later rounds the head's state has been through rejections
        state, _ = advance(target(), drafter, state, rule="rejection", sampling=sampling)
    proposal = proposal_of(drafter, state, sampling)
    text = jax.device_get(state.text)
    pending = text.lengths - 1
    tokens = np.random.default_rng(0).integers(0, V, (len(PROMPTS), WIDTH)).astype(np.int32)
    depth = drafter.num_draft_tokens
    for row, at in enumerate(pending):  # what follows the drafts must not matter
        tokens[row, : at + 1] = text.tokens[row, : at + 1]
        tokens[row, at + 1 : at + 1 + depth] = proposal.tokens[row]
    said = say(config, target().model, depth, params, target().params, tokens)
    drafted = proposal.probs.probs if isinstance(proposal.probs, specjax.Sparse) else proposal.probs
    assert len(said) == depth and proposal.valid.all()
    for d, (probs, rows) in enumerate(said):
        for row, at in enumerate(pending):
            (place,) = np.flatnonzero(np.asarray(rows) == at + d)  # about the token d + 1 after the pending one
            np.testing.assert_allclose(probs[row, place], drafted[row, d], atol=1e-4, err_msg=f"depth {d}, row {row}")
    # A test of equal laws is worth something if laws differ from place to place.
    first = np.asarray(said[0][0])
    assert np.median(np.abs(first[:, 1:] - first[:, :-1]).max(-1)) > 1e-2


@pytest.mark.parametrize("name", KINDS.values())
def test_laws_taught_are_the_laws_drafted(name):
    """Cases 103, 127, 138: pairing, positions and sight of the training pass are those of decoding."""
    assert_taught_as_drafted(name, rounds=0)


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_laws_taught_are_the_laws_drafted_after_rejections(name):
    """Case 138: also where the head's state has been through rounds."""
    assert_taught_as_drafted(name, rounds=2)


# --- training


@functools.cache
def own_text() -> training.Batch:
    """Texts the target has written: what stands between row and token must be what it says (Medusa, DFlash)."""
    starts = [[i % V, (7 * i) % V] for i in range(96)]
    made = specjax.generate(target(), starts, max_new_tokens=WIDTH - 2, temperature=1.0)
    rows = [begin + row for begin, row in zip(starts, made.tokens)]
    return texts.windows(texts.join(rows, [1] * len(rows)), WIDTH)


def accepted(config, params) -> float:
    """Accepted share of judged draft tokens in real decoding."""
    drafter = drafter_of(config, params)
    sampling = specjax.make_sampling(len(PROMPTS), V, temperature=1.0)
    state = begin(target(), PROMPTS, drafter, seeds=range(1000, 1000 + len(PROMPTS)))
    for _ in range(10):
        state, _ = advance(target(), drafter, state, rule="rejection", sampling=sampling)
    return specjax.Stats(jax.device_get(state.counts)).alpha or 0.0


@pytest.mark.parametrize("kind", ["eagle", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS if k != "eagle")])
def test_a_briefly_trained_head_is_accepted_more_often_than_an_untrained_one(kind):
    """Case 108, the half that losslessness hides."""
    config = CONFIGS[KINDS[kind]]
    params = initial.params_for(config, target(), ids=IDS)
    loss = training.head_loss(config, target(), depth=2)
    settings = training.Optimiser(steps=100, learning_rate=0.03 if kind == "dflash" else 0.01)
    before = jax.device_get((target().params, params))
    trained, history = training.fit(loss, params, texts.batches(own_text(), 16), settings, given=target().params)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((target().params, params)))
    assert history["loss"][-5:].mean() < 0.8 * history["loss"][:5].mean()
    untrained_alpha, alpha = accepted(config, params), accepted(config, trained)
    assert alpha > untrained_alpha + 0.1
