"""Every draft source on SmolLM2-135M-Instruct: the greedy text is plain decoding's, in a ragged batch and alone.

Heads have random weights here: what they propose is hardly ever right, and must never matter.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import drafters, parity, tree
from specjax.drafters.dflash import fresh_params as fresh_dflash
from specjax.drafters.eagle import fresh_params as fresh_eagle
from specjax.drafters.medusa import fresh_params as fresh_medusa
from specjax.drafters.mtp import fresh_params as fresh_mtp
from tests.test_smollm2 import prompts

NEW_TOKENS, BATCH = 64, 4
STATIC = tree.kary(2, 1, 1)
DYNAMIC = tree.Dynamic(num_nodes=5, width=2, depth=3)
REDUCED = 1024  # tokens that heads draft from


def reduced_ids(lm):
    return jnp.asarray(np.linspace(0, lm.model.vocab_size - 1, REDUCED), jnp.int32)


def eagle(lm, version, form):
    one = dataclasses.replace(lm.config, num_layers=1)
    if version == 3:
        config = drafters.EagleConfig(one, feature_layers=(2, 15, 30), draft_vocab_size=REDUCED)
        params = fresh_eagle(config) | {"ids": reduced_ids(lm)}
    else:
        config = drafters.EagleConfig(one, feature_layers=(lm.config.num_layers + 1,), version=1)
        params = fresh_eagle(config)
    return drafters.eagle(config, params, lm, num_draft_tokens=3 if form is None else None, tree=form)


def mtp(lm, form, modules=1):
    one = dataclasses.replace(lm.config, num_layers=1)
    config = drafters.MTPConfig(one, feature_layers=(lm.config.num_layers + 1,), num_modules=modules)
    return drafters.mtp(config, fresh_mtp(config), lm, num_draft_tokens=2 if form is None else None, tree=form)


def medusa(lm, form):
    config = drafters.MedusaConfig(lm.config.hidden_size, lm.model.vocab_size, num_heads=3, shared=True)
    return drafters.medusa(config, fresh_medusa(config, rngs=nnx.Rngs(1)), lm, tree=form)


def dflash(lm, form):
    layers = dataclasses.replace(lm.config, num_layers=1)
    config = drafters.DFlashConfig(
        layers, feature_layers=(2, 15), mask_token_id=0, block_size=4, draft_vocab_size=REDUCED, markov_rank=8
    )
    return drafters.dflash(config, fresh_dflash(config, ids=reduced_ids(lm)), lm, tree=form)


@functools.cache
def learnt_tables(lm_id):
    """A few laws that are no law of the target's: a table may say anything."""
    rng = np.random.default_rng(0)
    texts = [(rng.integers(0, 49_152, 50), rng.integers(0, 49_152, (50, 4)), np.full((50, 4), 0.2, np.float32))]
    return drafters.build_tables(texts, 49_152)


SOURCES = {
    "suffix, chain": lambda lm: drafters.suffix(7),
    "suffix, branching": lambda lm: drafters.suffix(7, branching=True),
    "recycling": lambda lm: drafters.recycling(lm, 7),
    "recycling, tables": lambda lm: drafters.recycling(lm, 7, learnt_tables(0)),
    "lookahead": lambda lm: drafters.lookahead(),
    "cascade of lookup and recycling": lambda lm: drafters.cascade(drafters.ngram(7), drafters.recycling(lm, 7)),
    "merged lookup and recycling": lambda lm: drafters.cascade(
        drafters.ngram(4), drafters.recycling(lm, 4), merged=True
    ),
    "cascade of lookup and head": lambda lm: drafters.cascade(drafters.ngram(3), medusa(lm, None)),
    "eagle 1, chain": lambda lm: eagle(lm, 1, None),
    "eagle 1, dynamic": lambda lm: eagle(lm, 1, DYNAMIC),
    "eagle 3, chain": lambda lm: eagle(lm, 3, None),
    "eagle 3, tree": lambda lm: eagle(lm, 3, STATIC),
    "eagle 3, dynamic": lambda lm: eagle(lm, 3, DYNAMIC),
    "mtp, chain": lambda lm: mtp(lm, None),
    "mtp, two modules, tree": lambda lm: mtp(lm, tree.kary(2, 1), 2),
    "medusa, chain": lambda lm: medusa(lm, None),
    "medusa, tree": lambda lm: medusa(lm, STATIC),
    "medusa, dynamic": lambda lm: medusa(lm, DYNAMIC),
    "dflash, chain": lambda lm: dflash(lm, None),
    "dflash, tree": lambda lm: dflash(lm, STATIC),
    "dflash, dynamic": lambda lm: dflash(lm, DYNAMIC),
}
QUICK = {"recycling"}
ALONE = {"recycling, tables", "eagle 3, dynamic", "medusa, tree", "dflash, chain", "lookahead", "suffix, branching"}


def cases(names, quick=()):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.fixture(scope="module")
def plain(smollm2):
    return specjax.generate(smollm2, prompts(BATCH), chat=True, max_new_tokens=NEW_TOKENS).tokens


def assert_same(lm, row, wanted, got):
    found = parity.divergence(lm, lm.encode_chat(prompts(BATCH)[row]), wanted, got)
    if found is not None:
        print(f"row {row} parts at token {found.index}, margin {found.margin:.2e}")
        assert found.margin < 1e-4, f"row {row}: {found}\n{wanted}\n{got}"


@pytest.mark.parametrize("name", cases(SOURCES, QUICK))
def test_a_ragged_batch_says_what_plain_decoding_says(smollm2, plain, name):
    drafter = SOURCES[name](smollm2)
    out = specjax.generate(smollm2, prompts(BATCH), chat=True, max_new_tokens=NEW_TOKENS, drafter=drafter)
    for row in range(BATCH):
        assert_same(smollm2, row, plain[row], out.tokens[row])
    assert out.lossless and out.stats.proposed > 0


@pytest.mark.parametrize("name", cases(name for name in SOURCES if name in ALONE))
def test_a_prompt_alone_says_what_plain_decoding_says(smollm2, plain, name):
    drafter = SOURCES[name](smollm2)
    row = sorted(ALONE).index(name) % BATCH  # all prompts have their turn; each has its own length, hence programs
    out = specjax.generate(smollm2, prompts(BATCH)[row], chat=True, max_new_tokens=NEW_TOKENS, drafter=drafter)
    assert_same(smollm2, row, plain[row], out.tokens[0])


@pytest.mark.full
def test_learning_from_rejected_nodes_pays_on_ordinary_text(smollm2):
    """Without a single stored table: above what copying alone reaches on these prompts."""
    options = {"chat": True, "max_new_tokens": NEW_TOKENS}
    taus = [
        specjax.generate(smollm2, prompts(BATCH), drafter=drafter, **options).stats.tau
        for drafter in (drafters.recycling(smollm2, 7), drafters.ngram(7))
    ]
    assert taus[0] > taus[1] > 1
