"""Somebody else's NNX model, written without a thought of specjax, and what its user adds to serve it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import cache as kv
from specjax import tree
from specjax.models import from_nnx
from specjax.models.attention import attend, reach
from specjax.types import ModelOutput

# --- theirs: a GPT-2 in the usual NNX style


class Attention(nnx.Module):
    def __init__(self, width, heads, *, rngs):
        self.heads = heads
        self.c_attn = nnx.Linear(width, 3 * width, rngs=rngs)
        self.c_proj = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        q, k, v = (y.reshape(*x.shape[:2], self.heads, -1) for y in jnp.split(self.c_attn(x), 3, axis=-1))
        y = nnx.dot_product_attention(q, k, v, mask=nnx.make_causal_mask(x[..., 0]))
        return self.c_proj(y.reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, width, heads, *, rngs):
        self.ln_1, self.ln_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attn = Attention(width, heads, rngs=rngs)
        self.fc, self.proj = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def mlp(self, x):
        return self.proj(nnx.gelu(self.fc(x)))

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nnx.Module):
    def __init__(self, vocab_size, block_size, layers, heads, width, *, rngs):
        self.vocab_size, self.block_size, self.width = vocab_size, block_size, width
        self.wte, self.wpe = nnx.Embed(vocab_size, width, rngs=rngs), nnx.Embed(block_size, width, rngs=rngs)
        self.h = nnx.List([Block(width, heads, rngs=rngs) for _ in range(layers)])
        self.ln_f = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1])[None])
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


# --- their user's: the same weights, with a cache


class Served(nnx.Module):
    """Borrows the modules of a GPT: only attention has to know of the cache."""

    def __init__(self, gpt: GPT):
        self.gpt = gpt
        self.vocab_size, self.context_length = gpt.vocab_size, gpt.block_size

    def init_cache(self, batch, capacity):
        heads = self.gpt.h[0].attn.heads
        return kv.init(num_layers=len(self.gpt.h), batch=batch, capacity=capacity, num_kv_heads=heads,
                       head_dim=self.gpt.width // heads)  # fmt: skip

    def __call__(self, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None):
        gpt, keys, values = self.gpt, [], []
        slots = reach(window_mask, cache.lengths, tokens.shape[1], cache.k[0].shape[2])
        x = gpt.wte(tokens) + gpt.wpe(positions)
        for block, k, v in zip(gpt.h, cache.k, cache.v):
            new = jnp.split(block.attn.c_attn(block.ln_1(x)), 3, axis=-1)
            q, k_new, v_new = (y.reshape(*tokens.shape, block.attn.heads, -1) for y in new)
            keys.append(kv.write(k, k_new, cache.lengths))
            values.append(kv.write(v, v_new, cache.lengths))
            x = x + block.attn.c_proj(attend(q, keys[-1], values[-1], slots).reshape(x.shape))
            x = x + block.mlp(block.ln_2(x))
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        features = jnp.zeros((*tokens.shape, 0))
        cache = cache._replace(k=tuple(keys), v=tuple(values))
        return ModelOutput(gpt.wte.attend(gpt.ln_f(x)), features, cache)


@pytest.fixture(scope="module")
def gpt():
    return GPT(23, 48, 2, 2, 8, rngs=nnx.Rngs(3))


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, tokens, positions, mask, cache):
    return model.apply(params, tokens, positions, mask, cache)


TEXT = np.random.default_rng(0).integers(0, 23, 24)
PARENTS = np.array([-1, 0, 0, 2, -1])  # paths of two, three and one nodes
MASK, DEPTHS = np.asarray(tree.window_mask(PARENTS, 5)), np.asarray(tree.depths(PARENTS, 5))


def test_windows_of_trees_and_dropped_drafts_say_what_their_own_call_says(gpt):
    model, params = from_nnx(Served(gpt))
    theirs = jax.jit(lambda module, tokens: module(tokens))
    cache, known = model.init_cache(1, 40), 0
    for path in ([0, 1, 3, 4], [0], [0, 5], [0, 1, 2], [0, 1, 3, 4], [0, 1]):  # window rows that turn out right
        window = (TEXT[known] + 1 + np.arange(6)) % 23
        window[path] = TEXT[known : known + len(path)]
        positions = jnp.asarray(known + DEPTHS)[None]
        out = apply(model, params, jnp.asarray(window[None]), positions, jnp.asarray(MASK), cache)
        for row in range(6):
            said = np.concatenate([TEXT[:known], window[np.flatnonzero(MASK[row])]])
            padded = np.zeros(40, int)
            padded[: len(said)] = said
            wanted = theirs(gpt, jnp.asarray(padded[None]))[0, len(said) - 1]
            np.testing.assert_allclose(out.logits[0, row], wanted, atol=1e-5)
        kept = jnp.asarray([path + [path[-1]] * (6 - len(path))])
        cache, known = kv.commit(out.cache, kept, jnp.array([len(path)])), known + len(path)


@pytest.mark.full
def test_it_is_served_with_and_without_drafts(gpt):
    lm = specjax.LanguageModel(*from_nnx(Served(gpt)))
    plain = specjax.generate(lm, [[5, 9, 7]], max_new_tokens=30)
    drafted = specjax.generate(lm, [[5, 9, 7]], drafter=specjax.drafters.ngram(4), max_new_tokens=30)
    assert drafted.tokens == plain.tokens and drafted.stats.tau > 1
