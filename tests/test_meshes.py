"""What the core decodes with, on meshes of every kind: one device, rows alone, parts of the target alone, both."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import LanguageModel, drafters, sharding, tree
from specjax.drafters.eagle import EagleConfig, eagle, fresh_params
from specjax.models import llama
from specjax.models.config import LlamaConfig
from specjax.models.nnx import from_nnx
from tests.test_sharding import PROMPTS, parts

pytestmark = pytest.mark.full
MESHES = [(1, 1), (8, 1), (1, 8), (2, 4)]
V = 64
CONFIG = LlamaConfig(V, 32, 64, 1, 8, 8, max_position_embeddings=256)
HEAD = EagleConfig(CONFIG, (0, 1))


@functools.cache
def alone() -> LanguageModel:
    model, params = from_nnx(llama.Llama(CONFIG, rngs=nnx.Rngs(3)))
    return LanguageModel(model, jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params), config=CONFIG)


def close(lm: LanguageModel) -> LanguageModel:
    """A draft model that often agrees, and lies where the target lies."""
    def noisy(x):
        noise = np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32)
        return x + jax.device_put(0.05 * noise * np.asarray(x).std(), x.sharding)

    return lm._replace(params=jax.tree.map(noisy, lm.params))


@functools.cache
def head():
    return fresh_params(HEAD, rngs=nnx.Rngs(5))


WAYS = {
    "draft model": lambda lm: {"temperature": 1.0, "drafter": drafters.model(close(lm), lm, 3)},
    "tree": lambda lm: {"temperature": 1.0, "drafter": eagle(HEAD, head(), lm, tree=tree.kary(2, 2))},
    "cascade": lambda lm: {"drafter": drafters.cascade(drafters.ngram(2, min_ngram=1), drafters.recycling(lm, 2))},
}


def decoded(lm, way):
    return specjax.generate(lm, PROMPTS, max_new_tokens=10, prefill_chunk=8, **WAYS[way](lm))


@functools.cache
def expected(way):
    return decoded(alone(), way)


CHOSEN = [*(("draft model", shape) for shape in MESHES), ("tree", (2, 4)), ("cascade", (2, 4))]


@pytest.mark.parametrize("way, shape", CHOSEN)
def test_a_mesh_decodes_the_same(way, shape):
    """Draft model and its cache in parts too, drawn chains; trees of a head that every device has; lookups."""
    lm = sharding.place(sharding.make_mesh(*shape), alone())
    assert parts(lm.params["layers"][0]["qkv"]) == {(32, 96 // shape[1])}
    out = decoded(lm, way)
    assert out.tokens == expected(way).tokens and out.stats.tau > 1
    jax.tree.map(np.testing.assert_array_equal, out.stats.counts, expected(way).stats.counts)
