"""Modules become pure models: by value, with weights as arguments, and only if they hold nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import cache as kv
from specjax.models import Llama, LlamaConfig, from_nnx, llama, llama_params
from specjax.types import KVCache, ModelOutput

CONFIG = LlamaConfig(vocab_size=31, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1)


class Bag(nnx.Module):
    """A user's model: the logits are the mean of the embeddings seen so far. One "layer" of cache keeps them."""

    def __init__(self, vocab_size, width, *, names=(), rngs):
        self.width, self.names = width, names
        self.vocab_size = vocab_size
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.head = nnx.Linear(width, vocab_size, rngs=rngs)

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        return kv.init(num_layers=1, batch=batch, capacity=capacity, num_kv_heads=1, head_dim=self.width)

    def __call__(self, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None):
        width, capacity = tokens.shape[1], cache.k[0].shape[2]
        k = kv.write(cache.k[0], self.embed(tokens)[:, :, None], cache.lengths)
        column = jnp.arange(capacity)[None] - cache.lengths[:, None]
        visible = (column[:, None] <= jnp.arange(width)[None, :, None]).astype(jnp.float32)
        x = jnp.einsum("bts,bsd->btd", visible / visible.sum(-1, keepdims=True), k[:, 0])
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        return ModelOutput(self.head(x), x[..., :0], cache._replace(k=(k,)))


def bag(vocab_size=5, width=3, seed=0, **settings):
    return Bag(vocab_size, width, rngs=nnx.Rngs(seed), **settings)


def test_a_users_module_becomes_a_model():
    module = bag()
    model, params = from_nnx(module, context_length=16)
    tokens = jnp.array([[1, 4, 2]])
    cache = model.init_cache(1, 8)
    out = jax.jit(model.apply)(params, tokens, jnp.arange(3)[None], None, cache)
    embedding, head = np.asarray(module.embed.embedding[...]), np.asarray(module.head.kernel[...])
    expected = np.cumsum(embedding[[1, 4, 2]], axis=0) / np.arange(1, 4)[:, None] @ head
    np.testing.assert_allclose(out.logits[0], expected, atol=1e-6)
    last = model.apply(params, tokens, jnp.arange(3)[None], None, cache, logits_at=jnp.array([2]))
    np.testing.assert_allclose(last.logits[0, 0], expected[2], atol=1e-6)
    assert (model.vocab_size, model.context_length) == (5, 16)


def test_weights_are_arguments_not_constants():
    model, params = from_nnx(bag())
    args = jnp.array([[1]]), jnp.array([[0]]), None, model.init_cache(1, 4)
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert (model.apply(zeros, *args).logits == 0).all()
    jaxpr = jax.make_jaxpr(lambda p, *args: model.apply(p, *args).logits)(params, *args)
    assert all(np.size(const) < 5 for const in jaxpr.consts)


def test_params_are_a_plain_tree_of_arrays():
    _, params = from_nnx(bag())
    assert type(params) is dict and {type(leaf) for leaf in jax.tree.leaves(params)} == {type(jnp.zeros(1))}


@pytest.mark.parametrize("make", [bag, lambda seed: Llama(CONFIG, rngs=nnx.Rngs(seed))])
def test_equal_modules_give_equal_models_and_compile_once(make):
    (one, params), (two, others) = from_nnx(make(seed=0)), from_nnx(make(seed=1))
    assert one == two and hash(one) == hash(two)
    traces = []

    def run(model, params, tokens, cache):
        traces.append(1)
        return model.apply(params, tokens, tokens, None, cache).logits

    run = jax.jit(run, static_argnums=0)
    results = [run(m, p, jnp.array([[1]]), m.init_cache(1, 4)) for m, p in ((one, params), (two, others))]
    assert len(traces) == 1
    assert (results[0] != results[1]).any()


def test_other_modules_give_other_models():
    models = [
        from_nnx(module)[0]
        for module in (bag(), bag(vocab_size=6), bag(width=4), bag(names=("a",)), Llama(CONFIG),
                       Llama(CONFIG, scan_layers=True), Llama(CONFIG, dtype=jnp.bfloat16))
    ]  # fmt: skip
    assert len(set(models)) == len(models)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_module_and_the_model_of_its_configuration_are_one(dtype, scan_layers):
    model, params = from_nnx(Llama(CONFIG, dtype=dtype, scan_layers=scan_layers))
    assert model == llama.model(CONFIG, dtype=dtype, scan_layers=scan_layers)
    abstract = llama_params.abstract_params(CONFIG, dtype=dtype, scan_layers=scan_layers)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)


def test_a_module_says_what_the_pure_model_says():
    module = Llama(CONFIG, rngs=nnx.Rngs(3))
    model, params = from_nnx(module)
    tokens, cache = jnp.array([[3, 1, 2]]), model.init_cache(1, 8)
    positions = jnp.arange(3)[None]
    out = jax.jit(lambda: module(tokens, positions, None, cache))()
    pure = jax.jit(model.apply)(params, tokens, positions, None, cache)
    np.testing.assert_allclose(out.logits, pure.logits, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_gradients_flow_without_a_cache(dtype, scan_layers):
    model, params = from_nnx(Llama(CONFIG, dtype=dtype, scan_layers=scan_layers))
    tokens, positions = jnp.array([[3, 1, 2, 5]]), jnp.arange(4)[None]
    logits = [jax.jit(model.apply)(params, tokens, positions, None, c).logits for c in (None, model.init_cache(1, 4))]
    np.testing.assert_allclose(*logits, atol=1e-6)

    @jax.jit
    def loss(params):
        logits = model.apply(params, tokens, positions, None, None).logits
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradient))
    assert loss(jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, gradient)) < value


@pytest.mark.parametrize("dtype, message", [(jnp.float32, "while_loop"), (jnp.bfloat16, "bfloat16 cache")])
def test_gradients_through_a_cache_are_refused(dtype, message):
    model, params = from_nnx(Llama(CONFIG, dtype=dtype))
    tokens, cache = jnp.array([[3, 1, 2, 5]]), model.init_cache(1, 4)
    with pytest.raises((ValueError, TypeError), match=message):
        jax.jit(jax.grad(lambda p: model.apply(p, tokens, tokens, None, cache).logits.sum()))(params)


def test_what_is_missing_or_does_not_belong_is_named():
    class NoCache(nnx.Module):
        vocab_size = 3

    class Noisy(Bag):
        def __init__(self):
            super().__init__(5, 3, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(1))

    with pytest.raises(TypeError, match=r"NoCache needs a method init_cache"):
        from_nnx(NoCache())
    module = bag()
    del module.vocab_size
    with pytest.raises(ValueError, match="Bag has no attribute vocab_size"):
        from_nnx(module)
    assert from_nnx(module, vocab_size=5)[0].vocab_size == 5
    with pytest.raises(ValueError, match=r"dropout\.rngs.* is Rng.*weights only"):
        from_nnx(Noisy())
    with pytest.raises(TypeError, match="Bag must be hashable"):
        from_nnx(bag(names={1, 2}))
