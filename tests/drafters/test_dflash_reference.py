"""DFlash against the speculators library: a checkpoint it made, and the logits it gave.

The target is a tiny Qwen 3; what is compared went the whole way: prefill, features, draft cache, block.
"""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters.checkpoint import load_drafter
from specjax.drafters.dflash import DFlash, dflash
from specjax.drafters.dflash_files import read_dflash
from tests.models.tiny import DATA, TINY_MODELS
from tests.small import begin

SOURCE = DATA / "tiny_drafters" / "dflash_qwen3"
EXPECTED = json.loads((SOURCE / "expected.json").read_text())


@functools.cache
def target():
    return specjax.load(TINY_MODELS / "qwen3_qknorm")


@functools.cache
def checkpoint():
    return read_dflash(SOURCE)


def block_logits(config, params, anchor):
    """Logits [block, V] of the block whose pending token is at ``anchor``, the context read by the public prefill."""
    ids, lm = EXPECTED["input_ids"], target()
    drafter = dflash(config, params, lm)
    state = begin(lm, [ids[: anchor + 1]], drafter)
    assert state.drafter.lengths.tolist() == [anchor]
    net, slots = DFlash(config, params), jnp.arange(config.block_size)[None]
    tokens = jnp.where(slots == 0, ids[anchor], config.mask_token_id)
    block = net(tokens, anchor + slots, state.drafter, lm.params["embedding"])
    return np.asarray(net.laws(block.hidden, lm.params["embedding"], -np.inf).logits[0])


@pytest.mark.parametrize("index", [0, 1])
def test_logits_of_a_block_are_those_of_the_library(index):
    """Cases 98, 101 and 103, as far as they concern blocks: streams, pairing, norms and layers, end to end."""
    got = block_logits(*checkpoint(), EXPECTED["anchors"][index])
    np.testing.assert_allclose(got, EXPECTED["logits"][index], atol=1e-4)


def test_streams_that_are_off_by_one_give_other_logits():
    """Case 101: the control. Layer ids count layers that have been applied."""
    config, params = checkpoint()
    assert config.feature_layers == tuple(EXPECTED["layer_ids"]) == (1, 3)
    wrong = block_logits(dataclasses.replace(config, feature_layers=(0, 2)), params, EXPECTED["anchors"][0])
    assert np.abs(wrong - EXPECTED["logits"][0]).max() > 0.05


def test_greedy_text_with_the_librarys_drafter_is_that_of_plain_decoding():
    lm, ids = target(), EXPECTED["input_ids"]
    drafter = load_drafter(SOURCE, lm)
    assert drafter.num_draft_tokens == 5 and drafter.feature_layers == (1, 3)
    prompts = [ids[:12], ids[3:4], ids[5:10]]
    plain = specjax.generate(lm, prompts, max_new_tokens=16, eos_ids=[])
    assert specjax.generate(lm, prompts, drafter=drafter, max_new_tokens=16, eos_ids=[]).tokens == plain.tokens
