"""Medusa heads: what each head speaks about, the three forms of proposal, and that bad heads cost time, never text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters.medusa import MEDUSA_CHOICES, MedusaConfig, blockwise, fresh_params, medusa
from specjax.drafters.parallel import Laws, Markov, form, propose
from tests.drafters.parallel_world import (
    DYNAMIC, HIDDEN, LAYERS, TREE, check_law, proposal_of, small_target, target,
)  # fmt: skip
from tests.oracle.hashlm import hash_logits, hash_params, HashConfig
from tests.small import PROMPTS, V, advance, begin, emitted, logits_of

HEADS = MedusaConfig(HIDDEN, 3, num_heads=3)
SMALL = MedusaConfig(HIDDEN, V, num_heads=3, num_layers=2)


def heads(config=HEADS, lm=None, seed=0, **how):
    from flax import nnx

    lm = target() if lm is None else lm
    params = fresh_params(config, rngs=nnx.Rngs(seed))
    return medusa(config, params, lm, **how)


FORMS = {"chain": {}, "tree": {"tree": TREE}, "dynamic": {"tree": DYNAMIC}}


# --- laws


@pytest.mark.parametrize(("shape", "rule"), [
    ("chain", "rejection"), ("dynamic", "match"),
    *[pytest.param(shape, rule, marks=pytest.mark.full) for shape, rule in
      [("chain", "match"), ("chain", "block"), ("tree", "rejection"), ("tree", "match"), ("dynamic", "rejection")]],
])  # fmt: skip
def test_random_heads_leave_the_law_alone(shape, rule):
    """Case 108, one half: heads that know nothing. Greedy, T = 1 and T = 0.7 with top-p 0.9 side by side."""
    check_law(heads(**FORMS[shape]), rule)
