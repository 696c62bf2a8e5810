"""Hugging Face directories: config.json, safetensors, the hub."""

import fnmatch
import json
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from specjax.models import hf_config, huggingface
from specjax.models.config import RopeScaling
from specjax.models.huggingface import SafetensorsFiles, parse_config
from specjax.models.load import load
from tests.models import tiny

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def config(**changes):
    settings = tiny.CONFIG | changes
    return parse_config({key: value for key, value in settings.items() if value != "absent"})


# --- rope -----------------------------------------------------------------------------------------------------------

OLD = {"rope_parameters": "absent"}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10000.0, RopeScaling()),
        (OLD, 10000.0, RopeScaling()),
        (OLD | {"rope_theta": 5e5}, 5e5, RopeScaling()),
        (OLD | {"rope_theta": 5e5, "rope_scaling": None}, 5e5, RopeScaling()),
        (OLD | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, 5e5, RopeScaling()),
        (OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, RopeScaling("linear", 2.0)),
        (OLD | {"rope_scaling": {"rope_type": "linear", "factor": 2}}, 10000.0, RopeScaling("linear", 2)),
        (OLD | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA3}}, 5e5,
         RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, 5e5,
         RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7.0}, 7.0,
         RopeScaling("linear", 2.0)),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5, RopeScaling()),
        ({"rope_parameters": {"rope_type": "yarn", **YARN}}, 10000.0,
         RopeScaling("yarn", 4.0, original_max_position_embeddings=64)),
        ({"rope_parameters": {"rope_type": "yarn", "beta_fast": 9, "attention_factor": 1.5, "truncate": False, **YARN}},
         10000.0, RopeScaling("yarn", 4.0, original_max_position_embeddings=64, beta_fast=9, attention_factor=1.5,
                              truncate=False)),
    ],
    ids=range(13),
)
def test_old_and_new_spelling_of_rope_are_read(changes, theta, scaling):
    got = config(**changes)
    assert (got.rope_theta, got.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "lacks original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn", **YARN, "mscale": 0.7}}, r"mscale = 0\.7"),
        ({"rope_parameters": {"rope_type": "yarn", **YARN, "truncate": 1}}, "truncate = 1"),
        ({"rope_parameters": {"rope_type": "yarn", **YARN, "beta_slow": 64}}, "beta_slow < beta_fast"),
        (OLD | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        (OLD | {"rope_scaling": {"factor": 4.0}}, "rope type None"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope type None"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks high_freq_factor, low_freq_factor, orig"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor = 2.0"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "contradict"),
        ({"rope_theta": 7.0}, "rope_theta is 7.0 and"),
        (OLD | {"rope_scaling": {"rope_type": "linear", "type": "llama3", **LLAMA3}}, "two rope types"),
    ],
)
def test_rope_that_is_not_understood_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        config(**changes)


# --- the rest of config.json ----------------------------------------------------------------------------------------


def test_an_explicit_head_dim_wins_and_a_missing_one_is_derived():
    assert config(head_dim=8).head_dim == 8
    assert config(head_dim=None).head_dim == config(head_dim="absent").head_dim == 5
    assert config(hidden_size=21, head_dim=8).head_dim == 8
    with pytest.raises(ValueError, match=r"hidden_size \(21\)"):
        config(hidden_size=21, head_dim=None)


def test_defaults_are_those_of_transformers():
    bare = config(num_key_value_heads="absent", rms_norm_eps="absent", max_position_embeddings="absent",
                  tie_word_embeddings="absent")
    assert (bare.num_kv_heads, bare.rms_eps, bare.max_position_embeddings) == (4, 1e-6, 2048)
    assert not bare.tie_embeddings


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                 "num_attention_heads"])
def test_a_missing_size_is_named(key):
    with pytest.raises(ValueError, match=f"{key} is missing"):
        config(**{key: "absent"})


def test_end_tokens_may_be_one_many_or_none():
    assert config(eos_token_id=2).eos_ids == (2,)
    assert config(eos_token_id=[2, 3]).eos_ids == (2, 3)
    assert config(eos_token_id=None).eos_ids == ()


def test_end_tokens_of_the_generation_config_win(tmp_path):
    tiny.write_directory(tmp_path)
    assert huggingface.config_of_directory(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert huggingface.config_of_directory(tmp_path).eos_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1.0}))
    assert huggingface.config_of_directory(tmp_path).eos_ids == (2,)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("Qwen2MoeForCausalLM", "qwen2_moe"), ("Qwen3MoeForCausalLM", "qwen3_moe"), ("GemmaForCausalLM", "gemma"),
     ("Gemma3ForConditionalGeneration", "gemma3"), ("Phi3ForCausalLM", "phi3"), ("LlamaModel", "llama")],
)
def test_other_architectures_are_refused_by_name(architecture, model_type):
    with pytest.raises(ValueError, match=f"architecture '{architecture}'"):
        config(architectures=[architecture], model_type=model_type)


def test_qwen3_is_a_llama_with_norms_of_queries_and_keys():
    qwen = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert config(**qwen).qk_norm and not config().qk_norm
    assert config(**qwen, attention_bias=True).attention_bias and not config(**qwen).attention_bias
    assert config(**qwen, sliding_window=4096, use_sliding_window=False) == config(**qwen)
    with pytest.raises(ValueError, match="head_dim is missing"):
        config(**qwen, head_dim=None)
    with pytest.raises(ValueError, match="'qwen3' and architecture 'LlamaForCausalLM' contradict"):
        config(model_type="qwen3")


def test_a_config_without_architectures_goes_by_its_model_type():
    assert config(architectures="absent").num_layers == 2
    with pytest.raises(ValueError, match="'phi3'"):
        config(architectures="absent", model_type="phi3")
    with pytest.raises(ValueError, match="model_type 'phi3'"):
        config(model_type="phi3")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"), ("sliding_window", 16), ("quantization_config", {"quant_method": "gptq"}),
        ("partial_rotary_factor", 0.5), ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0),
        ("query_pre_attn_scalar", 256), ("logits_scaling", 8.0), ("embedding_multiplier", 12.0),
        ("num_local_experts", 8),
        ("layer_types", ["full_attention", "sliding_attention"]), ("rope_interleaved", True), ("use_qk_norm", True),
        ("no_rope_layers", [1, 0]), ("auto_map", {"AutoModelForCausalLM": "modeling_x.X"}), ("something_new", 3),
        ("is_encoder_decoder", True), ("clip_qkv", 8.0),
    ],
)
def test_a_key_that_may_change_the_mathematics_is_refused_with_its_value(key, value):
    with pytest.raises(ValueError, match=key) as caught:
        config(**{key: value})
    assert repr(value) in str(caught.value)


def test_keys_that_are_off_or_harmless_pass():
    plain = config()
    assert plain == config(
        sliding_window=None, use_sliding_window=False, something_new=False, other_new=None, attention_dropout=0.1,
        pretraining_tp=1, torch_dtype="bfloat16", transformers_version="4", _name_or_path="x", use_cache=True,
        initializer_range=0.02, layer_types=["full_attention"] * 2, rope_interleaved=False, is_llama_config=True,
        pad_token_id=None, partial_rotary_factor=1.0, hidden_act="swish", unsloth_version="1", temperature=0.7,
        **{"transformers.js_config": {"dtype": "q4"}},
    )
    assert config(sliding_window=4096, use_sliding_window=False) == plain


def test_biases_and_ties_are_read():
    got = config(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (got.attention_bias, got.mlp_bias, got.tie_embeddings) == (True, True, True)


WHOLE = [*hf_config._SIZES.values(), "num_key_value_heads", "head_dim", "max_position_embeddings"]
ODD = ["64", True, False, 0, -1, 2.5, [64], {}, 2**31, 10**400, float("nan")]
ODD_VALUES = [
    *((key, value) for key in WHOLE for value in ODD),
    *((key, value) for key in ("rms_norm_eps", "rope_theta") for value in
      ["1e-5", True, 0, -1.0, [1], {}, float("nan"), float("inf"), 10**400]),
    ("rms_norm_eps", None), ("max_position_embeddings", None), ("vocab_size", None),
    *((key, value) for key in ("tie_word_embeddings", "attention_bias", "mlp_bias") for value in ("false", 0, 1, [])),
    *((f"{key}_token_id", value) for key in ("bos", "eos", "pad") for value in
      ("2", True, -2, 2.0, [True], ["2"], [[2]], {})),
    ("architectures", "LlamaForCausalLM"), ("architectures", [5]), ("architectures", {"a": 1}), ("model_type", 5),
    ("model_type", ["llama"]), ("layer_types", 5), ("layer_types", [["full_attention"]]), ("layer_types", "full"),
    *(("rope_scaling", value) for value in ("linear", 2, [1], True, {"type": 5}, {"type": ["linear"]})),
    *(("rope_scaling", {"rope_type": "linear", "factor": value}) for value in ("2", True, 0, -1, [2], float("nan"))),
    *(("rope_scaling", {"rope_type": "llama3", **LLAMA3, key: value}) for key in LLAMA3 for value in ("2", True, 0)),
    ("num_attention_heads", 3), ("hidden_act", ["silu"]), ("hidden_act", 5),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), ODD_VALUES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(ODD_VALUES)])
def test_a_value_that_cannot_be_meant_is_refused_with_file_and_key(key, value):
    names = {"num_attention_heads": "num_(attention_)?heads", "architectures": "architectures?"}
    with pytest.raises(ValueError, match=rf"(?s)^a/config\.json: .*{names.get(key, key)}") as caught:
        parse_config(without_rope(key) | {key: value}, source="a/config.json")
    assert len(str(caught.value)) < 300


def without_rope(key):
    return {name: entry for name, entry in tiny.CONFIG.items() if not (key.startswith("rope") and "rope" in name)}


def test_end_tokens_of_a_generation_config_are_checked_under_its_own_name(tmp_path):
    tiny.write_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "2"}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id = '2'"):
        huggingface.config_of_directory(tmp_path)


def test_padding_written_as_minus_one_is_none():
    assert config(pad_token_id=-1).pad_id is None and config(pad_token_id=0).pad_id == 0


def test_broken_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        huggingface.config_of_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is not a JSON object"):
        huggingface.config_of_directory(tmp_path)


def test_the_chat_template_is_found_in_either_place(tmp_path):
    assert huggingface.chat_template_of(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config"}))
    assert huggingface.chat_template_of(tmp_path) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert huggingface.chat_template_of(tmp_path) == "from file"


# --- safetensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.int8], ids=lambda d: np.dtype(d).name)
def test_tensors_of_every_type_are_read_bit_for_bit(tmp_path, dtype):
    bits = np.random.default_rng(1).bytes(24 * np.dtype(dtype).itemsize)
    matrix = np.frombuffer(bits, dtype).reshape(4, 6)
    written = {"matrix": matrix, "scalar": matrix[0, 0].reshape(()), "empty": matrix[:0]}
    save_file({name: np.ascontiguousarray(x).reshape(x.shape) for name, x in written.items()},
              tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)
    assert files.shapes == {"matrix": (4, 6), "scalar": (), "empty": (0, 6)}
    for name, x in written.items():
        got = files.indices(name) if dtype == np.int8 else files.read(name)
        assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())


@pytest.mark.parametrize(("dtype", "kind"), [(np.int8, "I8"), (np.int32, "I32"), (np.bool_, "BOOL")])
def test_whole_numbers_and_truth_values_are_no_weights(tmp_path, dtype, kind):
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        weights = tiny.tensors() | {name: np.ones(tiny.shapes()[name], dtype)}
        path = tiny.write_directory(tmp_path / name, weights)
        with pytest.raises(ValueError, match=rf"model.safetensors: tensor '{name}' has the type {kind}; weights must"):
            load(path)


@pytest.mark.parametrize(("change", "said"), [
    (lambda path: (path / "tokenizer.json").write_bytes(b"{\xff}"), r"m/tokenizer\.json is not a text in UTF-8"),
    (lambda path: (path / "tokenizer_config.json").write_text("["), r"m/tokenizer_config\.json is not valid JSON"),
    (lambda path: (path / "chat_template.jinja").write_bytes(b"\xff"), r"m/chat_template\.jinja is not a text in"),
    (lambda path: (path / "model.safetensors").unlink() or (path / "model.safetensors").mkdir(),
     r"m/model\.safetensors is truncated or not a safetensors file"),
    (lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}'),
     r"m/model\.safetensors\.index\.json: weight_map is \['a'\], not an object"),
])  # fmt: skip
def test_files_that_are_not_what_they_should_be_are_named(tmp_path, change, said):
    path = tiny.write_directory(tmp_path / "m")
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(path / "tokenizer.json"))
    change(path)
    with pytest.raises(ValueError, match=said):
        load(path)


def test_a_type_that_numpy_cannot_hold_is_named(tmp_path):
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1\2")
    with pytest.raises(ValueError, match="'w' has the unsupported type F8_E4M3"):
        SafetensorsFiles(tmp_path).read("w")


def test_sharded_and_single_files_hold_the_same_tensors(tmp_path):
    weights = tiny.tensors()
    single = SafetensorsFiles(tiny.write_directory(tmp_path / "one", weights))
    sharded = SafetensorsFiles(tiny.write_directory(tmp_path / "three", weights, files=3))
    assert single.shapes == sharded.shapes == tiny.shapes()
    for name, array in weights.items():
        np.testing.assert_array_equal(sharded.read(name), array)


def test_every_missing_shard_is_listed_before_any_file_is_opened(tmp_path, monkeypatch):
    tiny.write_directory(tmp_path, files=4)
    for number in (2, 4):
        (tmp_path / f"model-{number:05}-of-00004.safetensors").unlink()
    monkeypatch.setattr(SafetensorsFiles, "_open", lambda *args: pytest.fail("a file was opened"))
    with pytest.raises(FileNotFoundError, match=r"missing: model-00002-of-00004\.\w+, model-00004-of-00004") as caught:
        SafetensorsFiles(tmp_path)
    assert "model-00001" not in str(caught.value)


def test_a_tensor_that_the_index_promises_must_be_there(tmp_path):
    tiny.write_directory(tmp_path, files=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"no file has: model\.extra"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("name", [7, "../model-00001-of-00002.safetensors", ""])
def test_an_index_names_files_beside_it(tmp_path, name):
    tiny.write_directory(tmp_path, files=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"model\.extra.*not the name of a file beside it"):
        SafetensorsFiles(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    weights = tiny.tensors()
    tiny.write_directory(tmp_path, weights, files=2)
    save_file(weights, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"is in model-00001-of-00002\.safetensors and in model-00002"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    file = tiny.write_directory(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        SafetensorsFiles(tmp_path)


def test_a_directory_without_safetensors_says_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json$"):
        SafetensorsFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="only PyTorch files"):
        SafetensorsFiles(tmp_path)


# --- the hub --------------------------------------------------------------------------------------------------------


def test_a_hub_id_downloads_only_what_load_reads(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(repository, **options):
        asked.append((repository, options))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert huggingface.download("org/name") == tmp_path
    (repository, options), = asked
    wanted = {"config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json"}
    unwanted = {"pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.onnx"}
    asked_for = {name for name in wanted | unwanted for p in options["allow_patterns"] if fnmatch.fnmatch(name, p)}
    assert (repository, asked_for) == ("org/name", wanted)


def test_without_huggingface_hub_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"no file or directory 'org/name'.*pip install huggingface_hub"):
        huggingface.download("org/name")


def test_a_failing_hub_download_is_an_error_with_its_reason(monkeypatch):
    def snapshot_download(repository, **options):
        raise RuntimeError("no such repository")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(OSError, match=r"'org/name'.*no such repository"):
        huggingface.download("org/name")
