"""int8 weights: what rounding loses, where the numbers come from, and that such a target is one like any other."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import LanguageModel, drafters, sharding
from specjax.models import hf_config, int8, llama, llama_params, orbax, save_safetensors
from specjax.models.identity import fingerprint
from specjax.models.load import load, strict_params
from specjax.train import draft_lm, initial
from tests.models import tiny
from tests.models.llama_oracle import apply, oracle, random_weights, sequences
from tests.models.test_families import FAMILY_CONFIGS, Arrays
from tests.models.test_load import assert_equal, logits

MATRIX = re.compile(r"(q|k|v|o|gate|up|down)_proj\.weight$")
PROMPTS = [[4, 7, 4, 7, 9], [3], [11, 2, 11]]


def reread(weights):
    """The oracle's weights after the rounding of int8, in float64: per output channel, which is a row here."""
    def channelwise(x):
        x = x.astype(np.float64)
        scale = np.abs(x).max(axis=1, keepdims=True) / 127
        return np.round(x / scale) * scale

    return {name: channelwise(x) if MATRIX.search(name) else x for name, x in weights.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.write_directory(tmp_path_factory.mktemp("int8") / "tiny")


def test_a_weight_moves_by_half_a_step_at_most_and_the_largest_of_its_channel_not_at_all():
    rows = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32) * np.logspace(-6, 3, 6)[:, None]
    rows[2] = 0
    values, scale = int8.rounded(rows, "t")
    assert values.dtype == np.int8 and scale.dtype == np.float32 and np.abs(values).max() == 127
    back = values.astype(np.float64) * scale[:, None]
    assert (np.abs(back - rows) <= 0.5001 * scale[:, None]).all() and not back[2].any()
    top = np.abs(rows).argmax(axis=1)
    np.testing.assert_allclose(back[range(6), top], rows[range(6), top], rtol=1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_with_its_tensor(tmp_path, directory, wrong):
    weights = tiny.tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] = wrong
    config = dataclasses.replace(hf_config.parse_config(tiny.CONFIG), quantization="int8")
    with pytest.raises(ValueError, match=f"{name}.*not finite"):
        strict_params(Arrays(weights), config, source="here")
    lm = load(directory)
    lm.params["layers"][1]["down"] = lm.params["layers"][1]["down"].at[2, 3].set(wrong)
    orbax.save(tmp_path / "saved", lm)
    with pytest.raises(ValueError, match=r"layers\.1\.down.*not finite"):
        load(tmp_path / "saved", quantize="int8")


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_logits_of_any_family_are_those_of_the_rounded_weights(name):
    config = dataclasses.replace(FAMILY_CONFIGS[name], quantization="int8")
    weights, tokens = random_weights(config), sequences(1, 12)
    params = strict_params(Arrays(weights), config, source="here", scan_layers=True)
    model = llama.model(config, scan_layers=True)
    out = apply(model, params, tokens, model.init_cache(1, 64)).logits[0]
    np.testing.assert_allclose(out, oracle(reread(weights), config, tokens[0])[0], rtol=2e-4, atol=2e-4)
    assert np.abs(out - oracle(weights, config, tokens[0])[0]).max() > 2e-3  # the test would see it


def test_whole_numbers_are_exact_operands_in_bfloat16():
    """Only the activations are rounded: for activations of few bits both types say the same."""
    values = jnp.arange(-127, 128, dtype=jnp.int8)[None]
    scale, x = jnp.ones(1, jnp.float32), jnp.eye(255)[None]
    for dtype in (jnp.float32, jnp.bfloat16):
        out = llama.linear(x, llama.nnx.Param(values), None, llama.nnx.Param(scale), dtype)
        assert out[0, :, 0].tolist() == list(range(-127, 128))


def test_every_source_gives_the_same_numbers(tmp_path, directory):
    lm = load(directory, quantize="int8")
    assert lm.params["layers"][0]["qkv"].dtype == jnp.int8 and lm.params["embedding"].dtype == jnp.float32
    assert lm.params["layers"][0]["gate_up_scale"].shape == (2 * tiny.FFN,)
    abstract = llama_params.abstract_params(lm.config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), lm.params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    gguf = tiny.write_gguf(tmp_path / "m.gguf", tiny.gguf_tensors(tiny.tensors()))
    assert_equal(load(gguf, quantize="int8").params, lm.params)
    orbax.save(tmp_path / "floats", load(directory))
    assert_equal(load(tmp_path / "floats", quantize="int8").params, lm.params)
    stacked = load(directory, quantize="int8", scan_layers=True)
    assert_equal(llama_params.unstack_layers(stacked.params), lm.params)
    half = load(directory, quantize="int8", dtype="bfloat16")
    np.testing.assert_array_equal(half.params["layers"][1]["down"], lm.params["layers"][1]["down"])
    assert half.params["final_norm"].dtype == half.params["embedding"].dtype == jnp.bfloat16
    assert half.model.init_cache(1, 8).k[0].dtype == jnp.uint16


@pytest.mark.parametrize("scan_layers", [False, True])
def test_saved_it_comes_back_bit_for_bit_and_other_layouts_are_refused(tmp_path, directory, scan_layers):
    lm = load(directory, quantize="int8", scan_layers=scan_layers)
    orbax.save(tmp_path / "saved", lm)
    for quantize in (None, "int8"):
        again = load(tmp_path / "saved", scan_layers=scan_layers, quantize=quantize)
        assert_equal(again.params, lm.params)
        assert again.config == lm.config and again.model == lm.model
    with pytest.raises(ValueError, match=r"int8 weights have no place.*specjax\.models\.save"):
        save_safetensors(tmp_path / "other", lm)
    assert not (tmp_path / "other").exists()


def test_it_is_another_target_and_no_start_for_a_student(directory):
    lm, whole = load(directory, quantize="int8"), load(directory)
    assert fingerprint(lm) != fingerprint(whole)
    for start in (lambda: draft_lm.prune(lm, 1), lambda: initial.last_layer(lm)):
        with pytest.raises(ValueError, match=r"int8 weights.*checkpoint that they were made from, without quantize="):
            start()


@pytest.mark.full
def test_a_fresh_student_of_a_quantised_target_has_floats(directory):
    student = draft_lm.fresh(load(directory, quantize="int8"), hidden_size=16, num_layers=1)
    assert {leaf.dtype for leaf in jax.tree.leaves(student.params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("kind", ["int4", "", 8, True])
def test_other_kinds_are_refused(directory, kind):
    with pytest.raises(ValueError, match=r"quantize=.*give 'int8', or None"):
        load(directory, quantize=kind)


def test_a_quantised_target_and_drafter_say_what_the_target_says_alone(directory):
    lm = load(directory, quantize="int8", scan_layers=True)
    config = dataclasses.replace(lm.config, num_layers=1)
    params = lm.params | {"layers": jax.tree.map(lambda x: x[:1], lm.params["layers"])}
    draft = LanguageModel(llama.model(config, scan_layers=True), params, config=config)
    plain = specjax.generate(lm, PROMPTS, max_new_tokens=16, eos_ids=[])
    out = specjax.generate(lm, PROMPTS, drafter=drafters.model(draft, lm, 3), max_new_tokens=16, eos_ids=[])
    assert out.tokens == plain.tokens and 0 < out.stats.acceptance_rate < 1


@pytest.mark.full
def test_random_weights_have_the_size_of_floats():
    config = dataclasses.replace(hf_config.parse_config(tiny.CONFIG), quantization="int8")
    layer = llama.Llama(config).layers[0]
    for name in int8.MATRICES:
        made = getattr(layer, name)[...].astype(jnp.float32) * getattr(layer, name + "_scale")[...][:, None]
        np.testing.assert_allclose(np.std(made), 0.02, rtol=0.1)


@pytest.mark.parametrize("place", ["loaded", "placed"])
def test_on_a_mesh_values_and_scales_lie_in_parts(tmp_path, place):
    path = tiny.write_directory(tmp_path / "tiny")  # 4 query heads, 2 key heads
    mesh, alone = sharding.make_mesh(1, 2), load(path, quantize="int8")
    lm = load(path, quantize="int8", mesh=mesh) if place == "loaded" else sharding.place(mesh, alone)
    layer, parts = lm.params["layers"][0], lambda x: {shard.data.shape for shard in x.addressable_shards}
    assert layer["qkv"].dtype == jnp.int8
    assert parts(layer["qkv"]) == {(32, 20)} and parts(layer["qkv_scale"]) == {(32,)}
    assert parts(layer["gate_up_scale"]) == {(tiny.FFN,)} and parts(layer["down"]) == {(20, tiny.FFN // 2)}
    assert parts(layer["down_scale"]) == {(20,)}
    if place == "loaded":
        np.testing.assert_allclose(logits(lm), logits(alone), rtol=2e-4, atol=2e-4)
