"""`specjax.load`: strictness, dispatch, and every source giving the same model."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer, models

import specjax
from specjax.models import fetch, huggingface
from specjax.models.config import for_tokens
from specjax.models.identity import fingerprint
from specjax.models.load import load, strict_params
from tests.models import tiny

CONFIG = huggingface.parse_config(tiny.CONFIG)
TIED = huggingface.parse_config(tiny.CONFIG | {"tie_word_embeddings": True})


class Arrays:
    """A checkpoint held in a dict; counts what is read."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.shapes = {name: x.shape for name, x in tensors.items()}
        self.reads = []

    def rows(self, name):
        self.reads.append(name)
        return self.tensors[name]


def params_of(tensors, config=CONFIG, **options):
    return strict_params(tensors if isinstance(tensors, Arrays) else Arrays(tensors), config, source="here", **options)


def assert_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for leaf, same in zip(jax.tree.leaves(tree), jax.tree.leaves(other)):
        assert leaf.dtype == same.dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(same))


# --- strictness -----------------------------------------------------------------------------------------------------


def test_every_tensor_is_needed_and_named_when_it_is_missing():
    for name in tiny.shapes():
        weights = tiny.tensors()
        del weights[name]
        with pytest.raises(ValueError, match=re.escape(f"missing: {name} {tiny.shapes()[name]}")) as caught:
            params_of(weights)
        assert f"{len(tiny.shapes()) - 1} of {len(tiny.shapes())} tensors fit" in str(caught.value)


def test_surplus_tensors_are_named():
    extra = {"model.layers.2.mlp.up_proj.weight": np.zeros((28, 20)),
             "model.layers.0.self_attn.q_norm.weight": np.ones(8)}
    with pytest.raises(ValueError) as caught:
        params_of(tiny.tensors() | extra)
    for name in extra:
        assert f"not part of the model: {name}" in str(caught.value)


def test_a_bias_that_the_configuration_does_not_have_is_surplus():
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    with pytest.raises(ValueError, match=r"not part of the model: model\.layers\.0\.self_attn\.q_proj\.bias"):
        params_of(tiny.tensors() | bias)


def test_every_wrong_shape_is_named_with_both_shapes_also_a_transposed_one():
    for name, shape in tiny.shapes().items():
        weights = tiny.tensors()
        weights[name] = np.zeros(shape[::-1] if len(shape) == 2 else (shape[0] + 1,), np.float32)
        message = f"{name} has shape {weights[name].shape}, the configuration needs {shape}"
        with pytest.raises(ValueError, match=re.escape(message)):
            params_of(weights)


def test_nothing_is_read_before_everything_fits():
    weights = tiny.tensors()
    del weights["model.norm.weight"]
    source = Arrays(weights)
    with pytest.raises(ValueError, match="missing"):
        params_of(source)
    assert not source.reads


def test_each_tensor_is_read_once():
    source = Arrays(tiny.tensors())
    params_of(source)
    assert sorted(source.reads) == sorted(tiny.shapes())


def test_a_long_list_of_complaints_is_cut():
    with pytest.raises(ValueError, match=r"missing: .*\n[^$]*\.\.\. and 1 more") as caught:
        params_of({})
    assert len(str(caught.value).splitlines()) == 22


def test_rotary_buffers_are_skipped():
    buffers = {"model.layers.1.self_attn.rotary_emb.inv_freq": np.zeros(4), "model.rotary_emb.inv_freq": np.zeros(4)}
    assert_equal(params_of(tiny.tensors() | buffers), params_of(tiny.tensors()))


def test_a_tied_model_needs_no_head_and_an_untied_one_does():
    weights = tiny.tensors(tied=True)
    assert "head" not in params_of(weights, TIED)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight \(40, 20\)"):
        params_of(weights, CONFIG)


def test_a_tied_model_may_repeat_its_embedding_as_head_but_not_bring_another():
    weights = tiny.tensors(tied=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    assert_equal(params_of(weights, TIED), params_of(tiny.tensors(tied=True), TIED))
    weights["lm_head.weight"][3, 5] += 1
    with pytest.raises(ValueError, match=r"tie_word_embeddings is set, yet lm_head\.weight differs"):
        params_of(weights, TIED)


def test_kernels_are_kept_as_they_are_and_joined_in_turns():
    """Two query heads, a key and a value for each key head; a quarter of gate and of up at a time."""
    weights = tiny.tensors()
    params = params_of(weights)
    layer, prefix = params["layers"][1], "model.layers.1."
    qkv = tiny.in_turns([weights[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"], 16, 8, 8)
    gate_up = tiny.in_turns([weights[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")], 7, 7)
    np.testing.assert_array_equal(layer["qkv"], qkv)
    np.testing.assert_array_equal(layer["gate_up"], gate_up)
    np.testing.assert_array_equal(layer["o"], weights[f"{prefix}self_attn.o_proj.weight"])
    np.testing.assert_array_equal(layer["down"], weights[f"{prefix}mlp.down_proj.weight"])
    np.testing.assert_array_equal(params["head"], weights["lm_head.weight"])


def test_what_was_made_for_a_model_whose_weights_lay_otherwise_still_knows_it():
    whole, rounded = (load(tiny.TINY_MODELS / "qwen2_bias", quantize=how) for how in (None, "int8"))  # biases, scales
    assert fingerprint(whole)[:16] == "4530c257930ff7d8" and fingerprint(rounded)[:16] == "783543d0823dea72"


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_types_are_converted_to_the_asked_one(tmp_path, stored, dtype):
    weights = {name: x.astype(stored) for name, x in tiny.tensors().items()}
    lm = load(tiny.write_directory(tmp_path / "m", weights), dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(lm.params)} == {jnp.dtype(dtype)}
    expected = weights["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    np.testing.assert_array_equal(lm.params["embedding"], expected)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64", jnp.float16, "nonsense"])
def test_other_dtypes_are_refused_by_name(tmp_path, dtype):
    with pytest.raises(ValueError, match=dtype if isinstance(dtype, str) else "float16"):
        load(tmp_path, dtype=dtype)


def test_dtypes_may_be_jax_types(tmp_path):
    lm = load(tiny.write_directory(tmp_path / "m"), dtype=jnp.bfloat16)
    assert lm.params["embedding"].dtype == jnp.bfloat16


def test_loaded_weights_do_not_depend_on_the_file_afterwards(tmp_path):
    path = tiny.write_directory(tmp_path / "m")
    lm = load(path)
    before = np.asarray(lm.params["embedding"]).copy()
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 20000)
    np.testing.assert_array_equal(lm.params["embedding"], before)


# --- every source, the same model -----------------------------------------------------------------------------------


def logits(lm, ids=(5, 9, 3, 33, 7)):
    tokens = jnp.array([ids])
    positions = jnp.arange(len(ids))[None]
    return jax.jit(lm.model.apply)(lm.params, tokens, positions, None, lm.model.init_cache(1, len(ids))).logits


def test_gguf_directory_and_shards_give_the_same_model(tmp_path):
    weights = tiny.tensors()
    single = load(tiny.write_directory(tmp_path / "one", weights))
    sharded = load(str(tiny.write_directory(tmp_path / "many", weights, files=3)))
    from_gguf = load(tiny.write_gguf(tmp_path / "m.gguf", tiny.gguf_tensors(weights)))
    assert single.config == sharded.config
    assert_equal(single.params, sharded.params)
    assert_equal(single.params, from_gguf.params)
    np.testing.assert_array_equal(logits(single), logits(from_gguf))
    assert single.eos_ids == from_gguf.eos_ids == (2,)
    assert single.model.vocab_size == tiny.VOCAB and single.model.context_length == 64


def test_scanned_layers_say_the_same(tmp_path):
    path = tiny.write_directory(tmp_path / "m")
    np.testing.assert_allclose(logits(load(path)), logits(load(path, scan_layers=True)), atol=1e-4)


def test_a_gguf_file_brings_tokenizer_and_template(tmp_path):
    template = "{{ messages[0].content }}"
    lm = load(tiny.write_gguf(tmp_path / "m.gguf", **{"tokenizer.chat_template": template}))
    assert lm.chat_template == template
    assert lm.encode_chat("ab") == lm.tokenizer.encode("ab") == [8]


def test_a_gguf_file_may_have_any_name(tmp_path):
    assert load(tiny.write_gguf(tmp_path / "blob")).config.num_layers == 2


def test_a_directory_without_tokenizer_loads_without_one(tmp_path):
    lm = load(tiny.write_directory(tmp_path / "m"))
    assert lm.tokenizer is None and lm.chat_template is None


def test_a_directory_brings_tokenizer_template_and_end_tokens(tmp_path):
    path = tiny.write_directory(tmp_path / "m")
    Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hi": 3}, "<unk>")).save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "chat_template": "{{ bos_token }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    lm = load(path)
    assert lm.tokenizer.encode("hi") == [3]
    assert (lm.tokenizer.bos_id, lm.tokenizer.eos_id) == (1, 2)
    assert (lm.chat_template, lm.eos_ids) == ("{{ bos_token }}", (2, 3))


def test_ids_of_a_padded_vocabulary_have_no_law(tmp_path):
    """40 rows for 9 tokens, the untrained ones 50 times as sure of themselves: never drafted, accepted or drawn."""
    weights = tiny.tensors()
    weights["lm_head.weight"][9:] *= 50
    path = tiny.write_directory(tmp_path / "m", weights)
    words = {f"w{i}": i for i in range(9)}
    Tokenizer(models.WordLevel(words, "w0")).save(str(path / "tokenizer.json"))
    lm = load(path)
    assert lm.config.num_tokens == 9 and lm.model.vocab_size == tiny.VOCAB
    law = np.asarray(jax.nn.softmax(logits(lm), axis=-1))
    assert not law[..., 9:].any()
    np.testing.assert_allclose(law.sum(-1), 1, atol=1e-5)
    drafter = specjax.drafters.model(lm, lm, 3)
    options = {"temperature": [0.0, 1.0, 5.0], "max_new_tokens": 12, "eos_ids": []}
    for rule in ("rejection", "match"):
        out = specjax.generate(lm, [[3], [4, 5], [6]], drafter=drafter, rule=rule, **options)
        assert max(map(max, out.tokens)) < 9 and out.stats.proposed > 0
    specjax.models.save(tmp_path / "saved", lm)
    assert load(tmp_path / "saved").config == lm.config


def test_an_end_token_that_the_tokenizer_lacks_can_still_be_said(tmp_path):
    path = tiny.write_directory(tmp_path / "m", eos_token_id=20)
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(path / "tokenizer.json"))
    assert load(path).config.num_tokens == 21


def test_an_end_id_outside_the_vocabulary_is_refused_by_the_file_that_has_it(tmp_path):
    path = tiny.write_directory(tmp_path / "m", eos_token_id=[2, 40])
    with pytest.raises(ValueError, match=r"m/config\.json: no text could end with the id 40: .* has 0 to 39"):
        load(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    lm = load(path)
    assert lm.eos_ids == (2,)  # that file wins
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 999]}))
    with pytest.raises(ValueError, match=r"generation_config\.json: no text could end with the id 999"):
        load(path)
    gguf = tiny.write_gguf(tmp_path / "m.gguf", **{"tokenizer.ggml.eot_token_id": 40})
    with pytest.raises(ValueError, match=r"m\.gguf: no text could end with the id 40"):
        load(gguf)
    specjax.models.save(tmp_path / "saved", lm)
    manifest = json.loads((tmp_path / "saved" / "specjax.json").read_text())
    for end in (40, -1, "2"):
        (tmp_path / "saved" / "specjax.json").write_text(json.dumps(manifest | {"eos_ids": [end]}))
        with pytest.raises(ValueError, match=rf"specjax\.json: no text could end with the id {end!r}"):
            load(tmp_path / "saved")
        for save in (specjax.models.save, specjax.models.save_safetensors):
            with pytest.raises(ValueError, match=rf"lm: no text could end with the id {end!r}"):
                save(tmp_path / "new", lm._replace(eos_ids=(end,)))


def test_ids_outside_the_vocabulary_do_not_switch_the_bound_off():
    text = types.SimpleNamespace(vocab_size=9)
    ends = dataclasses.replace(CONFIG, eos_ids=(999, -5, 12))
    assert for_tokens(ends, text).num_tokens == 13
    assert for_tokens(dataclasses.replace(CONFIG, num_tokens=5), types.SimpleNamespace(vocab_size=40)).num_tokens == 0
    assert for_tokens(dataclasses.replace(CONFIG, num_tokens=5), None).num_tokens == 5


# --- dispatch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/path", "/no/such/path"])
def test_a_path_to_nothing_says_what_was_tried(name):
    with pytest.raises(FileNotFoundError, match=r"neither a file nor a directory nor a known name \(smollm2"):
        load(name)


def test_an_empty_directory_says_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither config\.json .* nor specjax\.json"):
        load(tmp_path)


def test_a_file_of_unknown_kind_is_refused(tmp_path):
    path = tmp_path / "weights.bin"
    for content in (b"", b"PK\3\4"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"weights\.bin is not a GGUF file"):
            load(path)


def test_an_empty_gguf_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match=r"m\.gguf is not a GGUF file"):
        load(tmp_path / "m.gguf")


def test_a_name_with_one_slash_goes_to_the_hub_unless_it_is_a_path(tmp_path, monkeypatch):
    path = tiny.write_directory(tmp_path / "cache")
    hub = types.SimpleNamespace(snapshot_download=lambda repository, **_: str(path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert load("some-org/Some_Model-1.5").config == CONFIG
    monkeypatch.chdir(tmp_path)
    tiny.write_directory(tmp_path / "org" / "name", max_position_embeddings=33)
    assert load("org/name").config.max_position_embeddings == 33


def test_a_known_name_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setitem(fetch.NAMED, "toy", None)
    monkeypatch.setattr(fetch, "fetch", lambda name: tiny.write_gguf(tmp_path / f"{name}.gguf"))
    assert load("toy").config.num_layers == 2


@pytest.mark.parametrize("terminal, progress, shown", [(True, True, True), (True, False, False), (False, True, False)])
def test_progress_is_shown_on_terminals_unless_switched_off(tmp_path, monkeypatch, capsys, terminal, progress, shown):
    path = tiny.write_directory(tmp_path / "tiny")
    specjax.models.save(tmp_path / "own", load(path))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    for stored in (path, tmp_path / "own"):
        load(stored, progress=progress)
        err = capsys.readouterr().err
        assert ("100%" in err and "loading" in err) if shown else err == ""


def test_progress_is_true_or_false(tmp_path):
    with pytest.raises(ValueError, match="progress='no': must be True or False"):
        load(tmp_path, progress="no")


def test_without_tqdm_loading_is_silent(tmp_path, monkeypatch, capsys):
    path = tiny.write_directory(tmp_path / "tiny")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(path)
    assert capsys.readouterr().err == ""


def test_importing_specjax_imports_no_format_library():
    libraries = ["gguf", "safetensors", "tokenizers", "jinja2", "orbax.checkpoint", "huggingface_hub"]
    program = f"import sys, specjax; specjax.load; sys.exit(','.join(set({libraries}) & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": str(Path(fetch.__file__).parents[2])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.stderr.strip() == ""


def test_unknown_options_are_refused(tmp_path):
    with pytest.raises(TypeError, match="revison"):
        load(tmp_path, revison="main")


# --- the reference ---------------------------------------------------------------------------------------------------

REFERENCE_MODELS = ["llama3_rope_scaled", "llama_tied_sharded", "qwen3_qknorm"]


def greedy(lm, prompts, steps):
    """Logits [B, P, V] of right-padded prompts (causal, so padding is never seen) and continuations [B, steps]."""
    model, params = lm.model, lm.params
    lengths = np.array([len(prompt) for prompt in prompts])
    width = max(lengths)
    tokens = np.array([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts])
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    step = jax.jit(model.apply)
    out = step(params, jnp.asarray(tokens), positions, None, model.init_cache(len(prompts), width + steps))
    logits = np.asarray(out.logits)
    last = logits[np.arange(len(prompts)), lengths - 1]
    cache, result = out.cache._replace(lengths=jnp.asarray(lengths, jnp.int32)), []
    for _ in range(steps):
        token = jnp.asarray(last.argmax(-1))[:, None]
        result.append(np.asarray(token)[:, 0])
        out = step(params, token, cache.lengths[:, None], None, cache)
        cache = out.cache._replace(lengths=cache.lengths + 1)
        last = np.asarray(out.logits)[:, 0]
    return logits, np.stack(result, 1)


def assert_same_up_to_a_near_tie(got, expected, margins, below):
    for step, (token, reference, margin) in enumerate(zip(got, expected, margins)):
        if token != reference:
            assert margin < below, f"step {step}: {token} instead of {reference}, margin {margin}"
            return


@pytest.mark.parametrize("name", REFERENCE_MODELS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_tiny_models_equal_the_reference(name, scan_layers):
    lm = load(tiny.TINY_MODELS / name, scan_layers=scan_layers)
    expected = json.loads((tiny.TINY_MODELS / name / "expected.json").read_text())
    got = np.asarray(logits(lm, expected["input_ids"]))[0]
    np.testing.assert_allclose(got[-1], expected["logits_last"], atol=1e-4)
    np.testing.assert_allclose(got[0], expected["logits_pos0"], atol=1e-4)
    top2 = np.sort(got, -1)[:, -2:]
    ties = top2[:, 1] - top2[:, 0] < 1e-4
    assert ((got.argmax(-1) == expected["argmax"]) | ties).all()
    _, continuations = greedy(lm, [expected["prompt_ids"]], len(expected["greedy_ids"]))
    assert_same_up_to_a_near_tie(continuations[0], expected["greedy_ids"], expected["greedy_top2_margin"], 1e-3)


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_the_reference_would_notice_a_wrong_constant(tmp_path, key):
    path = tmp_path / "m"
    shutil.copytree(tiny.TINY_MODELS / "llama3_rope_scaled", path)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters" if key == "rope_theta" else key] = (
        config["rope_parameters"] | {"rope_type": "default"} if key == "rope_theta" else 1e-2
    )
    for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        config["rope_parameters"].pop(name, None) if key == "rope_theta" else None
    (path / "config.json").write_text(json.dumps(config))
    lm = load(path)
    expected = json.loads((path / "expected.json").read_text())
    got = np.asarray(logits(lm, expected["input_ids"]))[0, -1]
    assert np.abs(got - np.array(expected["logits_last"])).max() > 1e-2


OWN_PROMPTS = json.loads((tiny.DATA / "smollm2_135m_instruct_own_prompts.json").read_text())


@pytest.fixture(scope="module")
def smollm2_reading(smollm2):
    """Logits [8, P, V] at every position of the reference prompts and greedy continuations [8, steps]."""
    steps = max(len(case["greedy_ids"]) for case in OWN_PROMPTS)
    return greedy(smollm2, [case["prompt_ids"] for case in OWN_PROMPTS], steps)


@pytest.mark.parametrize("row", range(len(OWN_PROMPTS)))
def test_smollm2_logits_equal_the_reference(smollm2_reading, row):
    case = OWN_PROMPTS[row]
    got = smollm2_reading[0][row, : len(case["prompt_ids"])]
    ids, values = zip(*case["last_logits_top10"])
    np.testing.assert_array_equal(np.argsort(-got[-1])[:10], ids)
    np.testing.assert_allclose(got[-1, list(ids)], values, rtol=0, atol=1e-3)
    assert abs(got[-1].mean() - case["last_logits_mean"]) < 1e-3
    assert abs(got[-1].std() - case["last_logits_std"]) < 1e-3
    top2 = np.sort(got, -1)[:, -2:]
    ties = top2[:, 1] - top2[:, 0] < 1e-3
    assert ((got.argmax(-1) == case["prompt_argmax"]) | ties).all()


def test_smollm2_greedy_continuations_equal_the_reference(smollm2_reading):
    for row, case in zip(smollm2_reading[1], OWN_PROMPTS):
        assert_same_up_to_a_near_tie(row, case["greedy_ids"], case["greedy_top2_margin"], 0.02)
