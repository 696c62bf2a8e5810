"""The law stays the target's while the number of draft tokens is chosen from the past, and not by a rule that peeks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import specjax
from specjax import Adaptive, loop
from specjax.round import RUNNING
from specjax.theory import CostModel
from tests.doubles import hash_lm, sampled
from tests.exactness.harness import PROMPT, THRESHOLD, assert_law, histogram, p_value, target_laws
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options

CONFIG, LENGTH, ROWS = HashConfig(3), 4, 5000
MODEL, PARAMS = hash_lm(CONFIG, seed=0)
Q = np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.25, 0.35, 0.4]])
LAW_OPTIONS = [Options(), Options(temperature=0.6)]
# Restless: no margin and hardly a memory, so that a row's own last round decides.
RESTLESS = Adaptive(tiers=(0, 2), costs=CostModel((0, 2), (1.0, 1.5), (0.0, 0.0)), decay=0.3, margin=0.0, allowance=9.0)


@functools.partial(jax.jit, static_argnums=0)
def alone(drafter, params, pace, keys, temperature, peeks):
    """Tokens of every row, each a batch of its own: its own past alone decides whether it drafts next. And how often
    each tier was used. If it ``peeks``, the draft is made first, as the round will make it, and a round whose draft
    begins with 0 is a plain one."""
    policy = dataclasses.replace(RESTLESS, costs=None)
    drafter = drafter._replace(params=params)
    program, weights = loop.split(MODEL, PARAMS, drafter, "rejection", False, policy)
    limits, base = specjax.no_limits(LENGTH, 1), specjax.make_sampling(1, 3)

    def one(key, temperature):
        tokens = jnp.zeros((1, 12), jnp.int32).at[0, : len(PROMPT)].set(jnp.asarray(PROMPT))
        start = jnp.full(1, len(PROMPT), jnp.int32)
        text, sampling = specjax.Text(tokens, start, start), base._replace(temperature=temperature[None])
        state = loop.start(program.prefill(), weights, text, key[None], limits, chunk=4)

        def body(carry):
            state, used = carry
            proposal, _ = drafter.draft(params, state.keys, state.drafter, state.text, sampling, 2)
            spoilt = jnp.where(proposal.tokens[0, 0] == 0, 0, 1)
            tier = jnp.where(peeks, spoilt, state.pace.tier)
            state = state._replace(pace=state.pace._replace(tier=tier))
            return loop.step(program, weights, state, sampling, limits)[0], used.at[tier].add(1)

        carry = state._replace(pace=pace), jnp.zeros(2, jnp.int32)
        state, used = lax.while_loop(lambda carry: carry[0].finish[0] == RUNNING, body, carry)
        return state.text.tokens[0, len(PROMPT) : len(PROMPT) + LENGTH], used

    return jax.vmap(one)(keys, temperature)


def sample_alone(seed, peeks=False):
    """Histograms of both laws, and rounds by tier [2 * ROWS, 2]."""
    drafter = sampled(Q, num_draft_tokens=2)
    keys = specjax.row_keys(seed * 2 * ROWS + np.arange(2 * ROWS))
    temperature = jnp.repeat(jnp.asarray([o.temperature for o in LAW_OPTIONS], jnp.float32), ROWS)
    tokens, used = alone(drafter._replace(params=()), drafter.params, RESTLESS.init(), keys, temperature, peeks)
    return np.stack([histogram(row, 3) for row in np.asarray(tokens).reshape(2, ROWS, LENGTH)]), np.asarray(used)


def test_the_joint_law_is_the_targets_while_rows_switch_by_their_past_and_not_if_they_peek():
    """And a policy that decides by the drawn token is caught: negative control."""
    laws, used = target_laws(CONFIG, 0, LAW_OPTIONS, LENGTH), []

    def sample(seed):
        counts, tiers = sample_alone(seed)
        used.append(tiers)
        return counts

    assert_law(sample, laws, LAW_OPTIONS)
    assert (used[0] > 0).mean(0).min() > 0.2, "both tiers must be used"
    assert (used[0] > 0).all(1).mean() > 0.2, "and rows must switch"
    counts, _ = sample_alone(0, peeks=True)
    assert max(p_value(c, law) for c, law in zip(counts, laws, strict=True)) < THRESHOLD / 1000
