"""The families: reference checkpoints, rollback beyond the window, and files that are wrong or written by others."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache as kv
from specjax.models import families, gguf_config, hf_config, huggingface, llama_params
from specjax.models.config import LlamaConfig, Rope, RopeScaling, from_json
from specjax.models.gguf import GGUFFile
from specjax.models.load import load, strict_params
from tests.models import tiny
from tests.models.llama_oracle import BASE, CONFIGS, random_weights

NAMES = sorted(path.name for path in tiny.TINY_MODELS.iterdir())
WINDOWED = ("gemma2_softcap", "gemma3_text", "mistral_sliding")
WIDTH = 5  # a pending token and four drafts


@functools.cache
def loaded(name, scan_layers=False):
    expected = json.loads((tiny.TINY_MODELS / name / "expected.json").read_text())
    return load(tiny.TINY_MODELS / name, scan_layers=scan_layers), expected


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, params, tokens, cache):
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    out = model.apply(params, tokens, positions, None, cache)
    return out.logits, out.cache


def read(lm, tokens, cache):
    """Logits [T, V] of one window, and the cache with it in scratch."""
    logits, cache = _apply(lm.model, lm.params, jnp.asarray([tokens], jnp.int32), cache)
    return np.asarray(logits[0]), cache


# --- the reference


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_reference_checkpoints(name):
    lm, expected = loaded(name)
    logits, _ = read(lm, expected["input_ids"], lm.model.init_cache(1, 64))
    np.testing.assert_allclose(logits[0], expected["logits_pos0"], atol=1e-4)
    np.testing.assert_allclose(logits[-1], expected["logits_last"], atol=1e-4)
    assert np.argmax(logits, -1).tolist() == expected["argmax"]


@pytest.mark.parametrize("name", NAMES)
def test_windows_with_misses_at_every_slot_say_the_reference_continuation(name):
    """The text passes the window of 16; every window but its accepted part is dropped by length alone."""
    lm, expected = loaded(name)
    prompt, wanted = expected["prompt_ids"], expected["greedy_ids"]
    assert min(expected["greedy_top2_margin"]) > 1e-3 and len(prompt) + len(wanted) > 32
    for slot in range(WIDTH):
        assert_windows_with_misses_say(lm, prompt, wanted, slot)


def assert_windows_with_misses_say(lm, prompt, wanted, slot):
    """``slot``: of the first wrong draft of each window; the last value is none."""
    text, vocab = [*prompt, *wanted], lm.model.vocab_size
    cache, known, rounds = lm.model.init_cache(1, 64), len(prompt), 0
    for start in range(0, len(prompt) - 1, WIDTH):
        chunk = (prompt[start : start + WIDTH] + [0] * WIDTH)[:WIDTH]
        _, cache = read(lm, chunk, cache)
        cache = kv.commit(cache, None, jnp.array([min(WIDTH, len(prompt) - 1 - start)]))
    while known < len(text):
        window = (text[known - 1 : known - 1 + WIDTH] + [0] * WIDTH)[:WIDTH]
        if slot < WIDTH - 1:
            window[slot + 1] = (window[slot + 1] + 1) % vocab
        logits, cache = read(lm, window, cache)
        said = np.argmax(logits, -1).tolist()
        accepted = next((i for i in range(WIDTH - 1) if said[i] != window[i + 1]), WIDTH - 1)
        emitted = said[: accepted + 1][: len(text) - known]
        assert emitted == text[known : known + len(emitted)]
        cache, known, rounds = kv.commit(cache, None, jnp.array([len(emitted)])), known + len(emitted), rounds + 1
    assert rounds == -(-len(wanted) // (slot + 1))


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind"), [*((name, "model") for name in WINDOWED), ("gemma3_text", "ngram")])
def test_speculation_says_the_reference_continuation_beyond_the_window(name, kind):
    lm, expected = loaded(name, scan_layers=True)  # compiles faster
    bent = {**lm.params, "final_norm": lm.params["final_norm"].at[::2].add(0.6)}
    for draft in (lm._replace(params=bent), lm)[: 2 if kind == "model" else 1]:
        drafter = specjax.drafters.ngram(4) if kind == "ngram" else specjax.drafters.model(draft, lm, 4)
        out = specjax.generate(lm, [expected["prompt_ids"]], max_new_tokens=24, drafter=drafter, eos_ids=[])
        assert out.tokens[0] == expected["greedy_ids"]
        assert out.stats.tau > 1
        if kind == "model":
            assert (out.stats.acceptance_rate == 1) == (draft is lm)


# --- files: every family


FAMILY_CONFIGS = {
    **{name: CONFIGS[name] for name in ("grouped", "mistral", "qwen 2", "norms of queries and keys", "gemma 2",
                                        "gemma 3", "smollm 3", "olmo 2")},
    "yarn": CONFIGS["yarn rope"],
}  # fmt: skip


class Arrays:
    """A checkpoint held in a dict."""

    def __init__(self, tensors):
        self.tensors, self.shapes = tensors, {name: x.shape for name, x in tensors.items()}

    def rows(self, name):
        return self.tensors[name]


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_a_missing_surplus_renamed_or_reshaped_tensor_of_any_family_is_named(name):
    config = FAMILY_CONFIGS[name]
    weights = random_weights(config)

    def complaint(tensors):
        with pytest.raises(ValueError) as caught:
            strict_params(Arrays(tensors), config, source="here")
        return str(caught.value)

    for tensor, value in weights.items():
        others = {other: x for other, x in weights.items() if other != tensor}
        assert f"missing: {tensor} {value.shape}" in complaint(others)
        renamed = complaint(others | {f"{tensor}_x": value})
        assert f"missing: {tensor}" in renamed and f"not part of the model: {tensor}_x" in renamed
        wrong = np.zeros((*value.shape[:-1], value.shape[-1] + 1), np.float32)
        assert f"{tensor} has shape {wrong.shape}" in complaint(others | {tensor: wrong})
    for surplus in ("self_attn.q_norm.weight", "pre_feedforward_layernorm.weight", "self_attn.q_proj.bias"):
        tensor = f"model.layers.1.{surplus}"
        if tensor not in weights:
            assert f"not part of the model: {tensor}" in complaint({**weights, tensor: np.ones(24, np.float32)})


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_config_json_gives_back_what_it_was_made_of(name):
    config = FAMILY_CONFIGS[name]
    if "gemma" in name:  # files spell the default out, and their embedding scale follows from the hidden size
        changes = {"query_scalar": config.query_scalar or float(config.head_dim), "embedding_scale": 24**0.5}
        config = LlamaConfig(**{**vars(config), **changes})
    assert hf_config.parse_config(json.loads(json.dumps(hf_config.settings_of(config)))) == config


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_a_configuration_comes_back_from_the_manifest_of_a_checkpoint(name):
    config = FAMILY_CONFIGS[name]
    assert from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_a_manifest_of_before_there_were_families_is_read():
    old = dataclasses.asdict(BASE)
    for field in dataclasses.fields(LlamaConfig)[18:]:  # all that came after pad_id
        del old[field.name]
    assert list(old)[-1] == "pad_id" and from_json(old) == BASE


def test_a_configuration_of_no_family_has_no_config_json():
    odd = LlamaConfig(**{**vars(BASE), "activation": "gelu_tanh"})
    with pytest.raises(ValueError, match="no family has activation = 'gelu_tanh'"):
        hf_config.settings_of(odd)


# --- config.json as others write it

GEMMA3 = {  # the spelling before Transformers 5
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 16, "sliding_window_pattern": 3, "num_hidden_layers": 4, "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid",
    "hidden_act": None, "rope_parameters": None, "tie_word_embeddings": None,
}  # fmt: skip
GEMMA2 = GEMMA3 | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rope_local_base_freq": None, "rope_scaling": None,
    "rope_theta": 10000.0, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "sliding_window_pattern": None, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 16, "max_window_layers": 1}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 5}


def parsed(changes, **more):
    settings = tiny.CONFIG | changes | more
    return hf_config.parse_config({key: value for key, value in settings.items() if value != "absent"})


def test_gemma_3_of_before_transformers_5_has_two_bases_and_a_pattern():
    config = parsed(GEMMA3)
    local, everywhere = Rope(10000.0), Rope(1e6, RopeScaling("linear", 8.0))
    assert config.windows == (16, 16, 0, 16) and config.ropes == (local, local, everywhere, local)
    assert config.tie_embeddings and config.qk_norm and config.query_scalar == 8.0
    assert parsed(GEMMA3, rope_local_base_freq="absent") == config
    assert parsed(GEMMA3, sliding_window_pattern=None, num_hidden_layers=7).windows == (16,) * 5 + (0, 16)


def test_gemma_2_alternates_and_caps():
    config = parsed(GEMMA2)
    assert config.windows == (16, 0, 16, 0) and config.ropes == () and not config.qk_norm
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)


def test_qwen_and_mistral_have_windows_only_where_the_file_says_so():
    assert parsed(QWEN2).windows == parsed(QWEN2, use_sliding_window=False).windows == ()
    assert parsed(QWEN2, use_sliding_window=True).windows == (0, 16)
    assert parsed(MISTRAL).windows == (16, 16) and parsed(MISTRAL, sliding_window=None).windows == ()


def test_smollm3_has_layers_without_rope_by_list_or_interval():
    bare = [rope is None for rope in parsed(SMOLLM3).ropes]
    assert bare == [False, False, False, True, False]
    assert parsed(SMOLLM3, no_rope_layers=[1, 1, 1, 0, 1]) == parsed(SMOLLM3)
    assert [rope is None for rope in parsed(SMOLLM3, no_rope_layer_interval=2).ropes] == [False, True] * 2 + [False]


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA3, {"layer_types": ["full_attention"] * 3}, "layer_types = .* each of 4 layers"),
        (GEMMA3, {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        (GEMMA3, {"query_pre_attn_scalar": "absent"}, "query_pre_attn_scalar is missing"),
        (GEMMA3, {"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar = '256'"),
        (GEMMA3, {"rope_theta": None}, "rope_theta is missing"),
        (GEMMA3, {"rope_local_base_freq": -1}, "rope_local_base_freq = -1"),
        (GEMMA3, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "must have full_attention"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        (GEMMA2, {"final_logit_softcapping": "absent"}, "final_logit_softcapping is missing"),
        (GEMMA2, {"attn_logit_softcapping": -50.0}, r"attn_logit_softcapping = -50\.0"),
        (GEMMA2, {"rope_local_base_freq": 10000}, "rope_local_base_freq = 10000 is not supported"),
        (QWEN2, {"num_key_value_heads": "absent"}, "num_key_value_heads is missing"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, "contradicts use_sliding_wi"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": "absent"}, "max_window_layers is missing"),
        (MISTRAL, {"sliding_window": "absent"}, "sliding_window is missing"),
        (MISTRAL, {"sliding_window": 2.5}, r"sliding_window = 2\.5"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\]"),
        (SMOLLM3, {"no_rope_layers": [1, 1, 1, 2, 1]}, "no_rope_layers"),
        (SMOLLM3, {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({}, {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\] is not supported"),
    ],
)  # fmt: skip
def test_keys_of_a_family_that_cannot_be_meant_are_refused(base, changes, said):
    with pytest.raises(ValueError, match=rf"config\.json: .*{said}"):
        parsed(base, **changes)


# --- GGUF: the same model, written the way llama.cpp's converter does

GGUF_NAMES = tiny.GGUF_NAMES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
AROUND = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
          "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip


def gguf_entries(weights, arch, norms):
    names, entries = GGUF_NAMES | (AROUND if norms != "before" else {}), {}
    for name, x in weights.items():
        stem, _, suffix = name.rpartition(".")
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", stem)
        theirs = f"blk.{layer[1]}.{names[layer[2]]}.{suffix}" if layer else f"{names[stem]}.{suffix}"
        if arch.startswith("gemma") and theirs.endswith("norm.weight"):
            x = x + np.float32(1)
        if arch in ("llama", "smollm3") and (".attn_q." in theirs or ".attn_k." in theirs):
            x = tiny.permuted(x, BASE.num_heads if ".attn_q." in theirs else BASE.num_kv_heads)
        entries[theirs] = ("F32", x.shape, x.astype("<f4").tobytes())
    return entries


def gguf_metadata(arch, config, **more):
    return {
        "general.architecture": arch, f"{arch}.block_count": config.num_layers, f"{arch}.context_length": 2048,
        f"{arch}.embedding_length": config.hidden_size, f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads, f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim, f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5, f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.vocab_size": config.vocab_size, **{f"{arch}.{key}": value for key, value in more.items()},
    }  # fmt: skip


GGUF_CASES = {
    "qwen2": ("qwen 2", {}),
    "qwen3": ("norms of queries and keys", {}),
    "gemma2": ("gemma 2", {"attention.sliding_window": 5, "attn_logit_softcapping": 2.0,
                           "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma 3", {"attention.sliding_window": 5, "attention.sliding_window_pattern": 2,
                           "rope.freq_base_swa": 100.0, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    "smollm3": ("smollm 3", {}),
    "olmo2": ("olmo 2", {}),
    "llama": ("yarn rope", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                            "rope.scaling.original_context_length": 128}),
}  # fmt: skip


@pytest.mark.parametrize("arch", GGUF_CASES)
def test_a_gguf_file_of_any_architecture_is_the_model_it_was_converted_from(tmp_path, arch):
    name, more = GGUF_CASES[arch]
    config = CONFIGS[name]
    changes = {"embedding_scale": 24**0.5, "query_scalar": float(config.head_dim)} if "gemma" in arch else {}
    if arch == "smollm3":  # its pattern stands in llama.cpp and not in the file: every fourth layer
        changes = {"num_layers": 4, "ropes": (Rope(), Rope(), Rope(), None)}
    config = LlamaConfig(**{**vars(config), **changes})
    weights = random_weights(config)
    path = tiny.write_gguf(tmp_path / "m.gguf", gguf_entries(weights, arch, config.norms),
                           gguf_metadata(arch, config, **more))
    file = GGUFFile(path)
    assert gguf_config.config_of(file) == config
    params = strict_params(file, config, source="m.gguf")
    wanted = llama_params.params_from_tensors(config, lambda tensor, shape: weights[tensor])
    for leaf, same in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, same, atol=1e-6 if "gemma" in arch else 0)  # w + 1 - 1


def test_a_norm_that_the_architecture_does_not_have_is_surplus(tmp_path):
    entries = gguf_entries(random_weights(BASE), "llama", "before")
    entries["blk.0.post_ffw_norm.weight"] = ("F32", (24,), np.ones(24, "<f4").tobytes())
    file = GGUFFile(tiny.write_gguf(tmp_path / "m.gguf", entries, gguf_metadata("llama", BASE)))
    with pytest.raises(ValueError, match=r"not part of the model: blk\.0\.post_ffw_norm\.weight"):
        strict_params(file, gguf_config.config_of(file), source="m.gguf")


def test_gemma_entries_mean_nothing_to_other_architectures(tmp_path):
    entries = gguf_entries(random_weights(BASE), "qwen2", "before")
    metadata = gguf_metadata("qwen2", BASE, **{"attention.sliding_window": 5})
    with pytest.raises(ValueError, match=r"qwen2\.attention\.sliding_window = 5 is not supported"):
        gguf_config.config_of(GGUFFile(tiny.write_gguf(tmp_path / "m.gguf", entries, metadata)))


def test_every_family_is_found_again_from_its_configuration():
    found = {families.family_of(LlamaConfig(**{**vars(config), "embedding_scale": scale})).name
             for config in FAMILY_CONFIGS.values() for scale in [24**0.5 if config.norms == "both" else 1.0]}
    assert found == set(families.BY_NAME)


def test_a_truncated_file_of_a_family_is_named(tmp_path):
    for name in WINDOWED:
        folder = tmp_path / name
        folder.mkdir()
        for file in (tiny.TINY_MODELS / name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
            huggingface.SafetensorsFiles(folder)
