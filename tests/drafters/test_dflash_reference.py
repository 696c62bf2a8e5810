"""DFlash against the speculators library: a checkpoint it made, and the logits it gave.

The target is a tiny Qwen 3; what is compared went the whole way: prefill, features, draft cache, block.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.drafters.dflash import DFlash, dflash
from specjax.drafters.dflash_files import read_dflash, recognises, write_dflash
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


def block_logits(config, params, lm, anchor):
    """Logits [block, V] of the block whose pending token is at ``anchor``, the context read by the public prefill."""
    ids = EXPECTED["input_ids"]
    drafter = dflash(config, params, lm)
    state = begin(lm, [ids[: anchor + 1]], drafter)
    assert state.drafter.lengths.tolist() == [anchor]
    net = DFlash(config, params)
    slots = jnp.arange(config.block_size)[None]
    tokens = jnp.where(slots == 0, ids[anchor], config.mask_token_id)
    block = net(tokens, anchor + slots, state.drafter, lm.params["embedding"])
    return np.asarray(net.laws(block.hidden, lm.params["embedding"], -np.inf).logits[0])


@pytest.mark.parametrize("index", [0, 1])
def test_logits_of_a_block_are_those_of_the_library(index):
    """Cases 98, 101 and 103, as far as they concern blocks: features, pairing, norms and layers, end to end."""
    got = block_logits(*checkpoint(), target(), EXPECTED["anchors"][index])
    np.testing.assert_allclose(got, EXPECTED["logits"][index], atol=1e-4)
