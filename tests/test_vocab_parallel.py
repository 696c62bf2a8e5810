"""Verification with a vocabulary in parts: the same decisions, and no law of a row is ever put together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from specjax import Proposal, Typical, accept, make_sampling, noise, row_keys, sharding
from specjax.tree import window_mask
from specjax.types import Sparse, Text
from specjax.warp import warp
from tests.test_sharding import collectives, parts

B, N, V = 8, 3, 640  # 640 is no multiple of 8 blocks of target noise
BRANCHED = np.asarray([-1, -1, 1])
CHAIN, TREE = (np.asarray(window_mask(p, N))[None, :, 1:] for p in (None, BRANCHED))
SHAPES = [*(pytest.param(*shape, marks=pytest.mark.full) for shape in ((8, 1), (1, 8))), (2, 4)]


def arrays(vocab=V):
    """Logits with something to say, drafts from them, and every option of `Sampling`."""
    rng = np.random.default_rng(5)
    logits = (3 * rng.normal(size=(B, 1 + N, vocab))).astype(np.float32)
    logits[:, :, 7] = logits[:, :, 600]  # a tie across shards
    q = np.exp(logits[:, :-1] + rng.normal(size=(B, N, vocab)).astype(np.float32))
    q /= q.sum(-1, keepdims=True)
    ids = np.sort(np.argsort(-q, axis=-1)[..., :24], axis=-1).astype(np.int32)
    top = np.take_along_axis(q, ids, axis=-1)
    tokens = np.take_along_axis(ids, np.argmax(top, axis=-1)[..., None], axis=-1)[..., 0]
    text = np.tile(np.arange(16, dtype=np.int32) * 37 % vocab, (B, 1))
    sampling = make_sampling(
        B, vocab, temperature=[0, 1, 0.7, 1, 1.3, 0.5, 1, 0], top_k=[0, 0, 40, 0, 9, 0, 300, 5],
        top_p=[1, 1, 0.9, 0.7, 1, 0.99, 0.5, 1], min_p=[0, 0.01, 0, 0, 0, 0.05, 0, 0],
        repetition_penalty=[1, 1, 1.2, 1, 1, 1, 1, 1.3], presence_penalty=0.1, frequency_penalty=0.2,
        logit_bias=[{int(tokens[row, 0]): 2.0, 639 % vocab: -np.inf} for row in range(B)], min_new_tokens=4,
        eos_ids=[3, 500],
    )  # fmt: skip
    lengths = jnp.full(B, 12, jnp.int32)
    given = Text(jnp.asarray(text), lengths, lengths - 2)
    return jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(q), Sparse(ids, top), sampling, given


def judge(layout, keys, logits, tokens, dense, sparse, sampling, text):
    """Every rule with every kind of law it takes, and the target's own draw."""
    valid, at = jnp.ones((B, N), bool), text.lengths - 1
    with sharding.on(layout):
        probs, branched = (warp(logits, sampling, text, tokens, seen) for seen in (CHAIN, TREE))
        chains = {"point": None, "dense": dense, "sparse": jax.tree.map(jnp.asarray, sparse)}
        out = {
            f"{rule} {name}": accept(rule, keys, Proposal(tokens, law, None, valid), probs, at)
            for rule in ("rejection", "block", "match", Typical()) for name, law in chains.items()
            if name == "point" or rule in ("rejection", "block")
        }  # fmt: skip
        out |= {
            f"{rule} tree": accept(rule, keys, Proposal(tokens, None, BRANCHED, valid), branched, at)
            for rule in ("rejection", "match", Typical())
        }
        return out, probs, noise.gumbel(keys, at, V)


@functools.cache
def alone():
    return jax.device_get(jax.jit(functools.partial(judge, None))(row_keys(range(B)), *arrays()))


def on(mesh):
    """The program and its arguments on a mesh: logits by rows and vocabulary, what a drafter made by rows."""
    logits, *rest = arrays()
    keys = row_keys(range(B))

    def put(axes, x):
        return jax.device_put(x, NamedSharding(mesh, sharding.spec(mesh, axes, x.shape)))

    def rows(x):
        return put(("batch", *["slots"] * (x.ndim - 1)) if x.shape[:1] == (B,) else (), x)

    return sharding.Layout(mesh, sharding.RULES), (rows(keys), put(sharding.LOGITS, logits), *jax.tree.map(rows, rest))


def too_large(program, data):
    """Collectives whose result is as large as one law of each of a device's rows."""
    return [found for found in collectives(program) if found[1] >= B // data * V]


@pytest.mark.parametrize("data, model", SHAPES)
def test_every_rule_decides_the_same_and_no_law_is_put_together(data, model):
    """Cases 139 and 141: greedy and `match` exactly; the others draw with the same noise from laws that are equal up to
    the rounding of a sum. Rows that are whole need of each other whether all are done."""
    mesh = sharding.make_mesh(data, model)
    layout, given = on(mesh)
    assert parts(given[1]) == {(B // data, 1 + N, V // model)}
    compiled = jax.jit(functools.partial(judge, layout)).lower(*given).compile()
    text = compiled.as_text()
    found = collectives(text)
    assert found and not too_large(text, data) and (model > 1 or max(size for _, size in found) <= B)
    decided, probs, target_noise = compiled(*given)
    assert parts(probs) == {(B // data, 1 + N, V // model)}
    assert parts(target_noise) == {(B // data, V // model)}
    expected, law, whole = alone()
    np.testing.assert_array_equal(target_noise, whole)
    np.testing.assert_allclose(probs, law, rtol=2e-6, atol=1e-9)
    for name, one in expected.items():
        for ours, theirs in zip(decided[name], one, strict=True):
            for shard in ours.addressable_shards:  # each device by itself: copies that differ would not show otherwise
                np.testing.assert_array_equal(shard.data, theirs[shard.index], err_msg=name)
        assert len(set(one.num_accepted.tolist())) > 1, name


def test_a_program_that_puts_laws_together_is_found_out():
    """What the assertion above is worth: filtering by sorting does move them."""
    mesh = sharding.make_mesh(2, 4)
    _, given = on(mesh)
    for function in (
        lambda logits: jnp.sort(logits, axis=-1)[:, :, -40],
        lambda logits: jnp.cumsum(jax.nn.softmax(logits[:, 0]), axis=-1)[:, ::7],
    ):
        assert too_large(jax.jit(function).lower(given[1]).compile().as_text(), 2)
