"""The statistics of this folder can fail: each published bug, put into the real rounds, is caught by them.

The rules below are written apart from the library; the right ones pass, so it is the bug that is caught.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Drafter
from tests.doubles import hash_lm, sampled
from tests.exactness.harness import THRESHOLD, assert_law, emit, histogram, p_value, target_laws
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options

accept_module = importlib.import_module("specjax.accept")
round_module = importlib.import_module("specjax.round")
CONFIG, LENGTH, ROWS = HashConfig(3), 4, 20_000
MODEL, PARAMS = hash_lm(CONFIG, seed=0)
Q = np.array([[0.6, 0.3, 0.1], [0.15, 0.7, 0.15], [0.1, 0.2, 0.7]])
PLAIN = [Options(temperature=2.0)]  # flat laws against a peaked q: residuals of more than one token
FLAT = [Options(temperature=5.0)]


def uniforms(keys, role, at):
    """[*at.shape] uniforms of (row key, role, at)."""

    def one(key, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, 500 + role), position))

    return jax.vmap(one)(keys, at) if at.ndim == 1 else jax.vmap(jax.vmap(one, (None, 0)))(keys, at)


def draw(weights, u):
    cumulative = jnp.cumsum(weights, axis=-1)
    return jnp.sum((cumulative <= u[:, None] * cumulative[:, -1:]).astype(jnp.int32), axis=-1)


def chain_rule(rule="rejection", *, bug=None):
    """A chain rule for dense laws or point masses with one bug, or none."""

    def decide(keys, proposal, p, positions):
        batch, width, vocab = p.shape
        n, rows = width - 1, jnp.arange(batch)
        q = jax.nn.one_hot(proposal.tokens, vocab) if proposal.probs is None else proposal.probs
        qx = jnp.take_along_axis(q, proposal.tokens[..., None], -1)[..., 0]
        px = jnp.take_along_axis(p[:, :-1], proposal.tokens[..., None], -1)[..., 0]
        slots = jnp.arange(n)[None, :]
        at = positions[:, None] * 64 + slots
        if bug == "accept noise by own position":
            at = positions[:, None] + 1 + slots
        if bug == "accept noise the same in every round":
            at = jnp.broadcast_to(slots, (batch, n))
        u = uniforms(keys, 1, at)
        scale = jnp.ones(batch)
        if rule == "block":
            weight = jnp.ones((batch, 1))
            for ratio in jnp.split(px / qx, n, axis=1):
                weight = jnp.concatenate([weight, jnp.minimum(weight[:, -1:] * ratio, 1)], axis=1)
            rest = jnp.maximum(weight[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:], 0).sum(-1)
            below = rest + 1 - weight[:, 1:-1]
            h = jnp.where(below > 0, rest / jnp.where(below > 0, below, 1), 1)
            h = jnp.concatenate([h, weight[:, -1:]], 1)
            accepted = jnp.max(jnp.where(u < h, slots + 1, 0), axis=1)
            scale = weight[rows, accepted]
        else:
            keep = u * qx < px
            accepted = jnp.sum(jnp.cumprod(keep.astype(jnp.int32), axis=1), axis=1)
            if bug == "flags counted":
                accepted = jnp.sum(keep.astype(jnp.int32), axis=1)
        if bug == "lock-step":
            accepted = jnp.minimum(accepted, accepted[rows ^ 1])
        judged = jnp.minimum(accepted, n - 1)
        law = p[rows, accepted] * scale[:, None]
        rest = jnp.maximum(law - q[rows, judged], 0)
        if bug == "resampled from p":
            rest = law
        if bug == "epsilon":
            rest = jnp.maximum(law - q[rows, judged], 0.02)
        rejected = accepted < n
        law = jnp.where(rejected[:, None] & (rest.sum(-1, keepdims=True) > 0), rest, law)
        r = uniforms(keys, 2, positions)
        if bug == "shared uniform":
            r = jnp.where(rejected, u[rows, judged], r)
        path = jnp.minimum(jnp.arange(width)[None, :], accepted[:, None])
        return path, accepted, draw(law, r)

    return decide


def counts(drafter: Drafter, rule, options, seed, rows=ROWS):
    tokens, _ = emit(MODEL, PARAMS, drafter, rule, options, LENGTH, rows, seed)
    return np.stack([histogram(row, 3) for row in tokens])


def install(monkeypatch, name, rule):
    """Adds a rule under a name of its own: compiled programs are remembered by name."""
    monkeypatch.setitem(accept_module.RULES, name, rule)
    return name


def assert_caught(drafter, rule, options=PLAIN):
    laws = target_laws(CONFIG, 0, options, LENGTH)
    got = counts(drafter, rule, options, 0)
    worst = min(p_value(c, law) for c, law in zip(got, laws))
    assert worst < THRESHOLD * 1e-3, f"a known bug passed with p = {worst:.1e}"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_same_rules_without_a_bug_pass(rule, monkeypatch):
    name = install(monkeypatch, f"{rule} again", chain_rule(rule))
    laws = target_laws(CONFIG, 0, PLAIN, LENGTH)
    assert_law(lambda seed: counts(sampled(Q, num_draft_tokens=3), name, PLAIN, seed), laws, PLAIN)


@pytest.mark.parametrize(
    ("rule", "bug"),
    [
        ("rejection", "resampled from p"),
        ("rejection", "epsilon"),
        ("rejection", "shared uniform"),
        ("rejection", "flags counted"),
        ("rejection", "lock-step"),
        ("rejection", "accept noise the same in every round"),
        ("block", "accept noise by own position"),
    ],
)
def test_wrong_rule_is_caught(rule, bug, monkeypatch):
    assert_caught(sampled(Q, num_draft_tokens=3), install(monkeypatch, bug, chain_rule(rule, bug=bug)))


@pytest.mark.parametrize(
    "drafter",
    {
        "case 1: another law than the one drawn from": lambda: sampled(Q, num_draft_tokens=3, claim="sharp"),
        "case 4: softmax for top tokens": lambda: sampled(Q, num_draft_tokens=3, kind="top", claim="table"),
        "dropped because of its own probability": lambda: sampled(Q, num_draft_tokens=3, ragged="own"),
    }.items(),
    ids=lambda item: item[0],
)
def test_wrong_proposal_is_caught(drafter):
    assert_caught(drafter[1](), "rejection")


def test_case_85_a_sibling_law_that_is_not_renormalised_is_caught():
    assert_caught(sampled(Q, [-1, -1, 0], kind="distinct", claim="table"), "rejection", FLAT)


def test_case_85_siblings_against_the_first_law_are_caught(monkeypatch):
    monkeypatch.setattr(accept_module, "residual", lambda p, q: p)
    name = install(monkeypatch, "case 85", accept_module._rejection)
    assert_caught(sampled(Q, [-1, -1, 0, 1], kind="distinct"), name)


@pytest.mark.parametrize("case", ["case 3: target not warped", "case 77: penalties do not see the draft"])
def test_wrong_warp_is_caught(case, monkeypatch):
    right = round_module.warp

    def wrong(logits, sampling, text, drafted, seen):
        if "case 3" in case:
            return jax.nn.softmax(logits)
        return right(logits, sampling, text)

    monkeypatch.setattr(round_module, "warp", wrong)
    options = [Options(temperature=0.6), Options(frequency_penalty=0.9)]
    assert_caught(sampled(Q, num_draft_tokens=3), install(monkeypatch, case, accept_module._rejection), options)


@pytest.mark.full
@pytest.mark.parametrize("case", ["case 82: positions by index", "case 83: cousins visible", "case 88: path not moved"])
def test_wrong_tree_pass_is_caught(case, monkeypatch):
    if "82" in case:
        monkeypatch.setattr(round_module.tree, "depths", lambda parents, n: np.arange(n + 1, dtype=np.int32))
    if "83" in case:
        monkeypatch.setattr(round_module.tree, "window_mask", lambda parents, n: np.tri(n + 1, dtype=bool))
    if "88" in case:
        commit = round_module.kv.commit
        monkeypatch.setattr(round_module.kv, "commit", lambda cache, path, count: commit(cache, None, count))
    name = install(monkeypatch, case, accept_module._rejection)
    q = np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.25, 0.35, 0.4]])
    assert_caught(sampled(q, [-1, -1, 0, 1, 1], kind="distinct"), name, [Options()])
