"""Checkpoints of every family as directories: what is tied, cut, lost, turned or of another type; there and back."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import specjax
from specjax.models import LlamaConfig, RopeScaling, hf_config, llama, llama_params, orbax, save_safetensors
from specjax.models.config import Rope
from specjax.models.load import load
from tests.models import tiny
from tests.models.llama_oracle import oracle, random_weights
from tests.models.test_families import FAMILY_CONFIGS, WIDTH, assert_windows_with_misses_say
from tests.models.test_load import assert_equal

# Nothing is square: q is [32, 20], k and v [16, 20], o [20, 32]; and the head has columns of its own.
ODD = {"hidden_size": 20, "head_dim": 8, "tie_embeddings": False}
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def config_of(name, **changes):
    config = dataclasses.replace(FAMILY_CONFIGS[name], **ODD, **changes)
    if "gemma" in name:  # the scale follows from the hidden size, and files spell the other out
        config = dataclasses.replace(config, embedding_scale=20**0.5, query_scalar=config.query_scalar or 8.0)
    return config


def written(path, config, weights=None, *, shards=1, **settings):
    """A directory as others write it."""
    weights = random_weights(config) if weights is None else weights
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf_config.settings_of(config) | settings))
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    where = {name: SHARDS[index % 3] for index, name in enumerate(weights)}
    for shard in SHARDS:
        save_file({name: weights[name] for name in weights if where[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


families = pytest.mark.parametrize("name", FAMILY_CONFIGS)


@families
def test_without_a_head_the_embedding_is_one_where_the_file_says_so_and_an_error_elsewhere(tmp_path, name):
    weights = random_weights(config_of(name))
    head = weights.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight \(67, 20\)"):
        load(written(tmp_path / "lost", config_of(name), weights))
    tied = dataclasses.replace(config_of(name), tie_embeddings=True)
    alone = load(written(tmp_path / "tied", tied, weights))
    assert "head" not in alone.params and alone.config == tied
    repeated = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    assert_equal(load(written(tmp_path / "repeated", tied, repeated)).params, alone.params)
    with pytest.raises(ValueError, match=r"tie_word_embeddings is set, yet lm_head\.weight differs"):
        load(written(tmp_path / "both", tied, weights | {"lm_head.weight": head}))


@families
def test_each_matrix_is_kept_as_it_is_and_one_that_is_turned_in_the_file_is_named(tmp_path, name):
    config = config_of(name)
    weights = random_weights(config)
    params = load(written(tmp_path / "m", config, weights)).params
    at, layer = "model.layers.1.", params["layers"][1]

    def joined(part, names, *blocks):
        return tiny.in_turns([weights[f"{at}{part}.{x}_proj.weight"] for x in names], *blocks)

    assert layer["qkv"].shape == (64, 20) and layer["o"].shape == (20, 32)
    np.testing.assert_array_equal(layer["qkv"], joined("self_attn", "qkv", 16, 8, 8))
    np.testing.assert_array_equal(layer["o"], joined("self_attn", "o", 20))
    np.testing.assert_array_equal(layer["gate_up"], joined("mlp", ("gate", "up"), 5, 5))
    np.testing.assert_array_equal(layer["down"], joined("mlp", ("down",), 20))
    np.testing.assert_array_equal(params["head"], weights["lm_head.weight"])
    np.testing.assert_array_equal(params["embedding"], weights["model.embed_tokens.weight"])
    turned = {tensor: np.ascontiguousarray(x.T) for tensor, x in weights.items()}
    with pytest.raises(ValueError) as caught:
        load(written(tmp_path / "turned", config, turned))
    matrices = [tensor for tensor, x in weights.items() if x.ndim == 2]
    assert all(f"{x} has shape {turned[x].shape}" in str(caught.value) for x in matrices[:20])


@families
def test_a_tensor_in_no_shard_or_a_lost_or_cut_file_is_named(tmp_path, name):
    config = config_of(name)
    whole = load(written(tmp_path / "one", config))
    path = written(tmp_path / "m", config, shards=3)
    assert_equal(load(path).params, whole.params)
    data = (path / SHARDS[1]).read_bytes()
    (path / SHARDS[1]).write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"{SHARDS[1]} is truncated"):
        load(path)
    (path / SHARDS[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"missing: {SHARDS[1]}$"):
        load(path)
    (path / SHARDS[1]).write_bytes((path / SHARDS[2]).read_bytes())
    with pytest.raises(ValueError, match=f"is in {SHARDS[1]} and in {SHARDS[2]}"):
        load(path)


@families
def test_renamed_surplus_and_resized_tensors_of_a_directory_are_named_together(tmp_path, name):
    config = config_of(name)
    weights = random_weights(config)
    weights["model.layers.1.mlp.up.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    weights["model.layers.2.mlp.up_proj.weight"] = np.zeros((40, 20), np.float32)
    weights["model.norm.weight"] = np.ones(21, np.float32)
    with pytest.raises(ValueError) as caught:
        load(written(tmp_path / "m", config, weights))
    for said in ("missing: model.layers.1.mlp.up_proj.weight (40, 20)",
                 "not part of the model: model.layers.1.mlp.up.weight (40, 20)",
                 "not part of the model: model.layers.2.mlp.up_proj.weight (40, 20)",
                 "model.norm.weight has shape (21,), the configuration needs (20,)"):  # fmt: skip
        assert said in str(caught.value)


@families
def test_half_precision_is_read_bit_for_bit(tmp_path, name):
    config = config_of(name)
    for kind in (ml_dtypes.bfloat16, np.float16):
        weights = {tensor: x.astype(kind) for tensor, x in random_weights(config).items()}
        path = written(tmp_path / np.dtype(kind).name, config, weights)
        wide = load(path).params
        np.testing.assert_array_equal(wide["layers"][0]["down"],
                                      weights["model.layers.0.mlp.down_proj.weight"].astype(np.float32))
        narrow = load(path, dtype="bfloat16").params
        for leaf, same in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
            np.testing.assert_array_equal(leaf, same.astype(jnp.bfloat16))


@families
def test_an_explicit_head_dim_wins_and_a_null_one_is_derived_or_refused(tmp_path, name):
    settings = hf_config.settings_of(config_of(name))
    assert settings["head_dim"] == 8 and hf_config.parse_config(settings).head_dim == 8
    assert hf_config.parse_config(settings | {"hidden_size": 21}).head_dim == 8  # no multiple of the heads
    if "gemma" in name or name == "norms of queries and keys":  # whose own default is no quotient
        with pytest.raises(ValueError, match="head_dim is missing"):
            hf_config.parse_config(settings | {"head_dim": None})
    else:
        assert hf_config.parse_config(settings | {"head_dim": None}).head_dim == 5


@families
def test_a_family_comes_back_bit_for_bit_from_either_layout_with_layer_ten_behind_layer_nine(tmp_path, name):
    more = {"num_layers": 11}
    given = FAMILY_CONFIGS[name]
    for field in ("windows", "ropes"):
        if values := getattr(given, field):
            more[field] = (values * 6)[:11]
    if name == "gemma 3":  # in files the pattern of the bases is that of the windows
        more["ropes"] = tuple(Rope(100.0) if window else Rope(900.0, RopeScaling("linear", 2.0))
                              for window in more["windows"])
    config = config_of(name, **more)
    lm = load(written(tmp_path / "m", config))
    orbax.save(tmp_path / "orbax", lm)
    save_safetensors(tmp_path / "safetensors", lm)
    for layout in ("orbax", "safetensors"):
        again = load(tmp_path / layout)
        assert again.config == lm.config == LlamaConfig(**vars(config))
        assert_equal(again.params, lm.params)
    file = json.loads((tmp_path / "orbax" / "specjax.json").read_text())
    file["config"]["num_layers"] += 1
    for field in ("windows", "ropes"):
        file["config"][field] += file["config"][field][-1:]
    (tmp_path / "orbax" / "specjax.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=r"weight layers\.11\.\w+ is missing"):
        load(tmp_path / "orbax")


# --- what is decoded


def made(name):
    """A family's tiny model, a prompt, and how the float64 oracle goes on greedily: far past any window."""
    config = FAMILY_CONFIGS[name]
    weights, text = random_weights(config), [2, 7, 18, 28, 1]
    params = llama_params.params_from_tensors(config, lambda tensor, shape: weights[tensor], scan_layers=True)
    lm = specjax.LanguageModel(llama.model(config, scan_layers=True), params, config=config)
    for _ in range(20):
        logits = oracle(weights, config, text, last=1)[0][0]
        second, best = np.sort(logits)[-2:]
        assert best - second > 1e-3
        text.append(int(np.argmax(logits)))
    return lm, text[:5], text[5:]


@families
def test_windows_with_misses_at_every_slot_say_what_the_oracle_says_past_the_window(name):
    lm, prompt, wanted = made(name)
    for slot in range(WIDTH):
        assert_windows_with_misses_say(lm, prompt, wanted, slot)


@pytest.mark.full
@pytest.mark.parametrize("name", ["smollm 3", "olmo 2"])  # the others have reference checkpoints
def test_speculation_says_what_plain_decoding_and_the_oracle_say(name):
    lm, prompt, wanted = made(name)
    bent = lm._replace(params=lm.params | {"final_norm": lm.params["final_norm"].at[::2].add(2.0)})
    out = specjax.generate(lm, [prompt], max_new_tokens=20, drafter=specjax.drafters.model(bent, lm, 4), eos_ids=[])
    plain = specjax.generate(lm, [prompt], max_new_tokens=20, eos_ids=[])
    assert out.tokens[0] == plain.tokens[0] == wanted and 0 < out.stats.acceptance_rate < 1
