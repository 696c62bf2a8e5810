"""Proposals by hand, what a rule decides about them, and the oracle's law of it."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Proposal, Sparse
from tests.exactness.harness import p_value

module = importlib.import_module("specjax.accept")
accept = jax.jit(specjax.accept, static_argnums=0)
JUST_BELOW_ONE = np.float32(1 - 2**-24)


def rows_of(tokens, probs, target, *, parents=None, valid=None, batch=1):
    """One proposal as ``batch`` equal rows."""
    tokens = jnp.asarray(tokens, jnp.int32)
    valid = jnp.ones(len(tokens), bool) if valid is None else jnp.asarray(valid)

    def tile(x):
        return jnp.broadcast_to(jnp.asarray(x), (batch, *np.shape(x)))

    if isinstance(probs, Sparse):
        probs = Sparse(tile(probs.ids), tile(probs.probs))
    elif probs is not None:
        probs = tile(jnp.asarray(probs, jnp.float32))
    parents = None if parents is None else np.asarray(parents, np.int32)
    return Proposal(tile(tokens), probs, parents, tile(valid)), tile(jnp.asarray(target, jnp.float32))


def decide(rule, proposal, target, seed=0):
    return accept(rule, specjax.row_keys(seed * 1_000_003 + np.arange(target.shape[0])), proposal, target)


def with_uniforms(monkeypatch, rule, proposal, target, accept_u, next_u):
    """The decision when the accept uniforms [B, N] and the two of the residual [B, 2] are given."""
    monkeypatch.setattr(module, "accept_uniforms", lambda keys, positions, n: jnp.asarray(accept_u, jnp.float32))
    monkeypatch.setattr(module, "uniform", lambda keys, shape: jnp.asarray(next_u, jnp.float32))
    run = jax.jit(lambda *arrays: specjax.accept(rule, *arrays))  # a new function: traced with the replacements
    return run(specjax.row_keys(np.zeros(target.shape[0], int)), proposal, target)


def random_case(seed, parents=None, n=3, vocab=4, concentration=0.7):
    """(tokens, probs, target) with tokens drawn from their laws; some mass exactly 0."""
    rng = np.random.default_rng(seed)
    n = len(parents) if parents is not None else n
    probs, target = rng.dirichlet(np.full(vocab, concentration), n), rng.dirichlet(np.full(vocab, concentration), n + 1)
    target[0, rng.integers(vocab)] = 0
    target /= target.sum(-1, keepdims=True)
    tokens = np.array([rng.choice(vocab, p=q) for q in probs])
    return tokens, probs, target


def assert_outcomes(rule, want, tokens, probs, target, *, parents=None, valid=None, rows=20_000):
    """The sampled (path, next token) follow the exact outcome law: one key, then 16 pooled ones."""
    vocab, cells = np.shape(target)[1], {outcome: i for i, outcome in enumerate(want)}
    law = np.array([*want.values(), 0.0])  # the last cell: whatever the oracle says cannot happen
    assert law.sum() == pytest.approx(1)

    def sample(seed):
        proposal, rows_target = rows_of(tokens, probs, target, parents=parents, valid=valid, batch=rows)
        out = decide(rule, proposal, rows_target, seed)
        counts = np.zeros(len(law))
        found, number = np.unique(
            np.column_stack([out.path, out.num_accepted, out.next_token]), axis=0, return_counts=True
        )
        for row, many in zip(found, number):
            path, count, token = row[:-2], row[-2], row[-1]
            assert path[0] == 0 and (path[count:] == path[count]).all() and 0 <= token < vocab
            counts[cells.get((tuple(map(int, path[1 : count + 1])), int(token)), -1)] += many
        return counts

    if p_value(sample(0), law) < 1e-3:
        assert p_value(sum(sample(seed) for seed in range(1, 17)), law) >= 1e-3
