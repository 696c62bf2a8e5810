"""What the tests of Medusa and of block drafters share: hash targets with the weights heads refer to, laws, oracles."""

import functools

import jax
import numpy as np

import specjax
from specjax import LanguageModel
from tests.doubles import hash_lm
from tests.exactness.harness import assert_law, emit, histogram, target_laws
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options
from tests.small import V

CONFIG, LENGTH, ROWS = HashConfig(3), 4, 4000
OPTIONS = [Options(temperature=0.0), Options(), Options(temperature=0.7, top_p=0.9)]
TREE = (-1, -1, 0, 0, 1, 2)  # three levels
DYNAMIC = specjax.tree.Dynamic(5, width=2, depth=3)
HIDDEN, LAYERS = CONFIG.width, CONFIG.num_layers


@functools.cache
def target(vocab_size: int = 3, seed: int = 0) -> LanguageModel:
    """A hash model that also says how many layers it has and where its embedding is."""
    config = HashConfig(vocab_size)
    model, params = hash_lm(config, seed)
    return LanguageModel(model, {**params, "embedding": params["embed"].T}, config=config)


def small_target() -> LanguageModel:
    """The target of `tests.small`, with what heads refer to."""
    return target(V, 1)


@functools.cache
def laws():
    return target_laws(CONFIG, 0, OPTIONS, LENGTH)


def counts(drafter, rule, seed, rows=ROWS):
    lm = target()
    tokens, rounds = emit(lm.model, lm.params, drafter, rule, OPTIONS, LENGTH, rows, seed)
    return np.stack([histogram(row, 3) for row in tokens]), rounds


def check_law(drafter, rule, several_rounds=0.1):
    """The joint law of the next tokens is plain decoding's, in texts that took more than one round."""
    rounds = []

    def sample(seed):
        got, taken = counts(drafter, rule, seed)
        rounds.append(taken)
        return got

    assert_law(sample, laws(), OPTIONS)
    assert (rounds[0] >= 2).mean() > several_rounds


@functools.partial(jax.jit, static_argnums=(0, 1))
def draft(fn, n, params, keys, state, text, sampling):
    return fn(params, keys, state, text, sampling, n)


def proposal_of(drafter, state, sampling, n=None):
    """What the drafter proposes in a `specjax.State`."""
    n = drafter.num_draft_tokens if n is None else n
    return draft(drafter.draft, n, drafter.params, state.keys, state.drafter, state.text, sampling)[0]
