"""Checkpoints of Medusa and DFlash: the published layouts, strictly by name, and what is refused.

The Medusa directory is built here, tensor by tensor, as its authors publish it: no third-party file was at hand. The
DFlash directory was made by the speculators library (its logits: test_dflash_reference.py).
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from specjax import sharding
from specjax.drafters import checkpoint
from specjax.drafters.dflash import DFlashConfig, fresh_params
from specjax.drafters.dflash_files import read_dflash, write_dflash
from specjax.drafters.medusa import MedusaConfig, medusa
from specjax.drafters.medusa import fresh_params as fresh_heads
from specjax.drafters.medusa_files import read_medusa, write_medusa
from specjax.models.config import LlamaConfig, RopeScaling
from tests.drafters import parallel_world as world
from tests.drafters.parallel_world import HIDDEN, proposal_of
from tests.drafters.test_dflash_reference import SOURCE
from tests.small import PROMPTS, V, begin

# --- Medusa


def published(folder, heads=3, blocks=2, prefix="", dtype=np.float32, **changes):
    """The authors' layout: a Sequential of residual blocks and a Linear per head, all [out, in]."""
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{prefix}{i}.{j}.linear.weight"] = rng.normal(size=(HIDDEN, HIDDEN)).astype(dtype)
            tensors[f"{prefix}{i}.{j}.linear.bias"] = rng.normal(size=HIDDEN).astype(dtype)
        tensors[f"{prefix}{i}.{blocks}.weight"] = rng.normal(size=(V, HIDDEN)).astype(dtype)
    tensors = {name: array for name, array in (tensors | changes).items() if array is not None}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    write_settings(folder, medusa_num_heads=heads, medusa_num_layers=blocks, base_model_name_or_path="tiny")
    return folder, tensors


def write_settings(folder, **settings):
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_heads_read_from_the_published_layout_draft_what_numpy_says(tmp_path, prefix):
    """Case 98, as far as it concerns Medusa: a forward in float64 from the file's own tensors."""
    folder, tensors = published(tmp_path / "m", prefix=prefix)
    assert checkpoint.read(folder)[0] == MedusaConfig(HIDDEN, V, 3, 2)
    lm = world.small_target()
    drafter = checkpoint.load_drafter(folder, lm)
    state = begin(lm, PROMPTS, drafter)
    expected = []
    for i in range(3):
        x = np.asarray(state.drafter, np.float64)
        for j in range(2):
            y = x @ tensors[f"{prefix}{i}.{j}.linear.weight"].T + tensors[f"{prefix}{i}.{j}.linear.bias"]
            x = x + y / (1 + np.exp(-y))
        expected.append((x @ tensors[f"{prefix}{i}.2.weight"].T).argmax(-1))
    known = np.abs(np.asarray(state.drafter)).sum(-1) > 0  # a prompt of one token has nothing to read
    np.testing.assert_array_equal(proposal_of(drafter, state).tokens[known], np.stack(expected, axis=1)[known])


def test_medusa_heads_in_8_bit_floats_are_refused_by_name_and_type(tmp_path):
    folder, _ = published(tmp_path / "m", **{"0.0.linear.weight": np.ones((HIDDEN, HIDDEN), ml_dtypes.float8_e4m3fn)})
    with pytest.raises(ValueError, match=r"tensor '0.0.linear.weight' has the unsupported type F8_E4M3; convert it to"):
        read_medusa(folder)


def test_medusa_files_that_hold_more_heads_than_they_say_are_read_whole(tmp_path):
    """As some published ones do."""
    folder, _ = published(tmp_path / "m", heads=4)
    write_settings(folder, medusa_num_heads=2, medusa_num_layers=2)
    assert read_medusa(folder)[0].num_heads == 4


@pytest.mark.parametrize(("changes", "message"), [
    ({"1.0.linear.weight": None}, r"missing: 1.0.linear.weight \(8, 8\)"),
    ({"2.2.weight": None}, r"missing: 2.2.weight \(16, 8\)"),
    ({"0.1.linear.bias": None}, r"missing: 0.1.linear.bias \(8,\)"),
    ({"lm_head.weight": np.zeros((2, 2), np.float32)}, r"not part of the drafter: lm_head.weight \(2, 2\)"),
    ({"1.2.weight": np.zeros((V, 9), np.float32)}, r"1.2.weight has shape \(16, 9\), the configuration needs"),
    ({"1.2.weight": np.zeros((V, 8), np.int32)}, r"safetensors: tensor '\S*1.2.weight' has the type I32; weights must"),
])  # fmt: skip
def test_medusa_tensors_are_read_strictly_by_name(tmp_path, changes, message):
    """Case 112."""
    folder, _ = published(tmp_path / "m", **changes)
    with pytest.raises(ValueError, match=message):
        read_medusa(folder)


def test_medusa_directories_that_are_none_are_refused(tmp_path):
    folder, _ = published(tmp_path / "m")
    write_settings(folder, medusa_num_heads=5, medusa_num_layers=2)
    with pytest.raises(ValueError, match=r"missing: 3.0.linear.weight"):
        read_medusa(folder)
    write_settings(folder, medusa_num_heads=3)
    with pytest.raises(ValueError, match=r"medusa_num_layers is missing"):
        read_medusa(folder)
    write_settings(folder, medusa_num_heads=3, medusa_num_layers=2, vocab_size=99)
    with pytest.raises(ValueError, match=r"the tensors have vocab_size 16 and config.json says 99"):
        read_medusa(folder)
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")
    with pytest.raises(FileNotFoundError, match=r"missing; convert medusa_lm_head.pt to safetensors"):
        read_medusa(folder)
    save_file({"a": np.zeros(1, np.float32)}, folder / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=r"no tensor is named like a Medusa head"):
        read_medusa(folder)


def test_medusa_heads_of_another_target_are_refused_when_they_are_loaded(tmp_path):
    """Case 121, by kind: both sizes are named."""
    folder, _ = published(tmp_path / "m")
    with pytest.raises(ValueError, match=r"vocab_size 16 and the target 3"):
        checkpoint.load_drafter(folder, world.target())


# --- both: what is written is what is read


SIZES = LlamaConfig(
    V, hidden_size=HIDDEN, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=6, qk_norm=True,
    rope_scaling=RopeScaling("llama3", factor=8.0),
)  # fmt: skip
PLAIN = DFlashConfig(SIZES, (0, 2), mask_token_id=5, block_size=5)
SPARK = dataclasses.replace(
    PLAIN, draft_vocab_size=4, markov_rank=3, confidence=True, confidence_with_markov=True, sample_from_anchor=True
)
IDS = (2, 5, 6, 9)
HEADS = {
    "medusa": (MedusaConfig(HIDDEN, V, 2, 2), lambda c, r: fresh_heads(c, rngs=r)),
    "medusa without blocks": (MedusaConfig(HIDDEN, V, 2, 0), lambda c, r: fresh_heads(c, rngs=r)),
    "medusa on the target's projection": (
        MedusaConfig(HIDDEN, V, 2, 1, shared=True), lambda c, r: fresh_heads(c, rngs=r),
    ),
    "dflash": (PLAIN, lambda c, r: fresh_params(c, rngs=r)),
    "dflash with Llama layers": (
        dataclasses.replace(PLAIN, layers=dataclasses.replace(SIZES, qk_norm=False, rope_scaling=RopeScaling())),
        lambda c, r: fresh_params(c, rngs=r),
    ),
    "dspark": (SPARK, lambda c, r: fresh_params(c, ids=IDS, rngs=r)),
    "dspark without Markov term": (
        dataclasses.replace(PLAIN, confidence=True), lambda c, r: fresh_params(c, rngs=r),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_survive_the_published_layout(tmp_path, name, dtype):
    """Bit for bit, bfloat16 too (case 115)."""
    config, fresh = HEADS[name]
    kept = [leaf.dtype for leaf in jax.tree.leaves(fresh(config, nnx.Rngs(1)))]
    params = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, fresh(config, nnx.Rngs(1)))
    write = write_medusa if name.startswith("medusa") else write_dflash
    write(tmp_path / "a", config, params, target="t")
    got_config, got = checkpoint.read(tmp_path / "a", dtype=dtype)
    assert got_config == config and len(kept) == len(jax.tree.leaves(got))
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    checkpoint.load_drafter(tmp_path / "a", world.small_target(), dtype=dtype)  # checks every shape


@pytest.mark.parametrize("name", ["medusa", "dspark"])
def test_heads_survive_our_own_layout(tmp_path, name):
    config, fresh = HEADS[name]
    params = fresh(config, nnx.Rngs(1))
    checkpoint.save_drafter(tmp_path / "a", config, params, format="orbax")
    got_config, got = checkpoint.read(tmp_path / "a")
    assert got_config == config
    jax.tree.map(np.testing.assert_array_equal, got, params)
    lm = world.small_target()
    assert checkpoint.load_drafter(tmp_path / "a", lm).num_draft_tokens == (2 if name == "medusa" else 5)


# --- DFlash


@pytest.fixture
def folder(tmp_path):
    """A copy of the library's directory."""
    return shutil.copytree(SOURCE, tmp_path / "d")


def changed(folder, tensors=None, **settings):
    """Rewrites settings (None deletes one) and tensors (None deletes one)."""
    file = folder / "config.json"
    old = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: value for key, value in old.items() if value is not None}))
    if tensors:
        old = load_file(folder / "model.safetensors") | tensors
        save_file({k: v for k, v in old.items() if v is not None}, folder / "model.safetensors")
    return folder


def test_every_dflash_tensor_is_needed_and_no_other_is_taken(folder):
    """Case 112: each in turn."""
    for name, array in load_file(folder / "model.safetensors").items():
        with pytest.raises(ValueError, match=rf"missing: {name} "):
            read_dflash(changed(folder, {name: None}))
        changed(folder, {name: array})
    with pytest.raises(ValueError, match=r"not part of the drafter: layers.2.mlp.up_proj.weight"):
        read_dflash(changed(folder, {"layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}))


@pytest.mark.parametrize(("settings", "message"), [
    ({"aux_hidden_state_layer_ids": None}, r"aux_hidden_state_layer_ids is missing"),
    ({"mask_token_id": None}, r"mask_token_id is missing"),
    ({"mask_token_id": 320}, r"mask_token_id=320: the vocabulary has 320 tokens"),
    ({"projector_type": "domino"}, r"projector_type = 'domino' is not supported"),
    ({"speculators_model_type": "eagle9"}, r"speculators_model_type 'eagle9'"),
    ({"target_hidden_size": 128}, r"target_hidden_size = 128 and the draft layers have 64"),
    ({"markov_rank": 4, "markov_head_type": "rnn"}, r"markov_head_type = 'rnn' is not supported"),
    ({"aux_hidden_state_layer_ids": [1, 2, 3]}, r"fc.weight has shape \(64, 128\), the configuration needs"),
])  # fmt: skip
def test_dflash_settings_are_read_not_guessed(folder, settings, message):
    """Case 101: a key that is missing is an error, not a default; one that is not understood is refused."""
    with pytest.raises(ValueError, match=message):
        read_dflash(changed(folder, **settings))


def test_d2t_holds_offsets(tmp_path):
    """Case 105: draft vocabulary 4, target ids [2, 5, 6, 9], offsets [2, 4, 4, 6]; draft id 1 is token 5."""
    write_dflash(tmp_path / "s", SPARK, fresh_params(SPARK, ids=IDS))
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    assert tensors["d2t"].tolist() == [2, 4, 4, 6]
    assert np.flatnonzero(tensors["t2d"]).tolist() == [2, 5, 6, 9] and tensors["t2d"].dtype == bool
    assert read_dflash(tmp_path / "s")[1]["ids"].tolist() == [2, 5, 6, 9]
    with pytest.raises(ValueError, match=r"d2t, read as offsets, names the tokens \[2, 6, 8, 12\], and t2d marks"):
        read_dflash(changed(tmp_path / "s", {"d2t": np.asarray(IDS)}))


def test_copies_of_the_targets_weights_are_compared(folder):
    """Older files repeat the embedding: left out if it is the target's, refused if it is another."""
    from tests.drafters.test_dflash_reference import target

    lm = target()
    own, norm = np.asarray(lm.params["embedding"]), np.asarray(lm.params["final_norm"])
    changed(folder, {"embed_tokens.weight": own, "lm_head.weight": own, "verifier_norm.weight": norm})
    with pytest.raises(ValueError, match=r"a copy of the target's: give target="):
        read_dflash(folder)
    assert "head" not in read_dflash(folder, target=lm)[1]
    placed = sharding.place_params(sharding.make_mesh(1, 8), lm.params)  # case 145: in parts, and compared whole
    assert "head" not in read_dflash(folder, target=lm._replace(params=placed))[1]
    with pytest.raises(ValueError, match=r"lm_head.weight .* is not the target's"):
        last = own + (np.arange(len(own)) == 319)[:, None]
        read_dflash(changed(folder, {"lm_head.weight": last}), target=lm._replace(params=placed))
    with pytest.raises(ValueError, match=r"lm_head.weight \(320, 64\) is not the target's \(320, 64\)"):
        read_dflash(changed(folder, {"lm_head.weight": own + 1}), target=lm)


def test_a_medusa_file_in_bfloat16_is_read_as_what_is_asked_for(tmp_path):
    folder, tensors = published(tmp_path / "m", dtype=ml_dtypes.bfloat16)
    params = read_medusa(folder)[1]
    assert params["heads"][0]["projection"].dtype == jnp.float32
    np.testing.assert_array_equal(params["heads"][0]["projection"], tensors["0.2.weight"].astype(np.float32))
    coarse = read_medusa(folder, dtype=jnp.bfloat16)[1]
    medusa(MedusaConfig(HIDDEN, V, 3, 2), coarse, world.small_target())
    assert coarse["heads"][0]["projection"].dtype == jnp.bfloat16
