"""Checkpoints written in the Hugging Face layout, and the scripts that inspect and convert checkpoints."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax.models import directory, llama_params, save, save_safetensors
from specjax.models.load import load
from tests.models import tiny
from tests.models.llama_oracle import BASE, CONFIGS, random_weights
from tests.models.test_families import GGUF_CASES, gguf_entries, gguf_metadata

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = ["gemma3_text", "qwen2_bias", "mistral_sliding", "llama3_rope_scaled"]


@pytest.fixture(scope="module")
def scripts():
    names = ("inspect_checkpoint", "convert_checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield tuple(map(importlib.import_module, names))
    for name in names:
        sys.modules.pop(name)


def assert_same(lm, other):
    assert lm.config == other.config and lm.eos_ids == other.eos_ids and lm.chat_template == other.chat_template
    assert jax.tree.structure(lm.params) == jax.tree.structure(other.params)
    for a, b in zip(jax.tree.leaves(lm.params), jax.tree.leaves(other.params)):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_as_safetensors_comes_back_bit_for_bit(tmp_path, name, dtype):
    lm = load(tiny.TINY_MODELS / name, dtype=dtype)
    save_safetensors(tmp_path / "m", lm)
    assert_same(load(tmp_path / "m", dtype=dtype), lm)


def test_scanned_layers_are_written_unrolled(tmp_path):
    path = tiny.TINY_MODELS / "gemma3_text"
    save_safetensors(tmp_path / "m", load(path, scan_layers=True))
    assert_same(load(tmp_path / "m"), load(path))


def test_tokenizer_and_chat_template_come_along(tmp_path):
    lm = load(tiny.write_gguf(tmp_path / "m.gguf"))._replace(chat_template="{{ messages[0].content }}")
    save_safetensors(tmp_path / "m", lm)
    other = load(tmp_path / "m")
    assert_same(other, lm)
    assert other.tokenizer.fingerprint == lm.tokenizer.fingerprint
    assert (other.tokenizer.bos_id, other.tokenizer.eos_id) == (lm.tokenizer.bos_id, lm.tokenizer.eos_id)


def test_a_bound_of_the_vocabulary_that_would_be_lost_is_refused(tmp_path):
    lm = load(tiny.write_directory(tmp_path / "m"))
    bound = lm._replace(config=dataclasses.replace(lm.config, num_tokens=30))
    with pytest.raises(ValueError, match=r"num_tokens=30 without a tokenizer has no place.*specjax.models.save"):
        save_safetensors(tmp_path / "n", bound)
    save(tmp_path / "o", bound)
    assert load(tmp_path / "o").config.num_tokens == 30


def test_nothing_half_written_and_nothing_replaced_unasked(tmp_path):
    lm = load(tiny.TINY_MODELS / "qwen2_bias")
    (tmp_path / "m").mkdir()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_safetensors(tmp_path / "m", lm)
    broken = lm._replace(params={**lm.params, "final_norm": None})
    with pytest.raises(Exception):  # noqa: B017 (whatever numpy says)
        save_safetensors(tmp_path / "m", broken, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"] and not list((tmp_path / "m").iterdir())
    save_safetensors(tmp_path / "m", lm, overwrite=True)
    assert_same(load(tmp_path / "m"), lm)
    with pytest.raises(ValueError, match="path=''"):
        save_safetensors("", lm)
    with pytest.raises(ValueError, match="path is a language model"):
        save_safetensors(lm, tmp_path / "m")
    with pytest.raises(TypeError, match="LlamaConfig"):
        save_safetensors(tmp_path / "n", specjax.LanguageModel(lm.model, lm.params))


@pytest.mark.parametrize(("change", "said"), [
    (lambda path: path.write_text("mine"), "is a file"),
    (lambda path: (path / "src").mkdir(parents=True), r"holds no checkpoint but \['src'\]"),
    (lambda path: tiny.write_directory(path), "is the current directory or one above it"),
    (lambda path: path.symlink_to("nothing"), "m is a link to nothing; write elsewhere"),
])  # fmt: skip
def test_what_is_no_checkpoint_or_holds_the_current_directory_is_never_replaced(tmp_path, monkeypatch, change, said):
    path = tmp_path / "m"
    change(path)
    if (path / "config.json").exists():
        (path / "deep").mkdir()
        monkeypatch.chdir(path / "deep")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((FileExistsError, ValueError), match=said), directory.whole(path, True):
        pytest.fail("something was written")
    assert sorted(tmp_path.rglob("*")) == before


# --- scripts


def test_inspection_says_what_it_is_and_that_it_loads(scripts, capsys):
    assert scripts[0].main([str(tiny.TINY_MODELS / "gemma3_text"), "--tensors"]) == 0
    said = capsys.readouterr().out
    for words in ("Hugging Face layout", "family: gemma3_text", "windows = 5 x 16, 1 x 0", "80 F32", "would load",
                  "ropes = 5 x 10000.0, 1 x 1000000.0", "model.layers.5.self_attn.q_norm.weight (16,)"):
        assert words in said


def test_inspection_names_what_is_missing_or_left_over_or_wrong(scripts, tmp_path, capsys):
    weights = tiny.tensors()
    del weights["model.norm.weight"]
    weights["model.surplus"] = np.zeros(3, np.float32)
    assert scripts[0].main([str(tiny.write_directory(tmp_path / "m", weights))]) == 1
    said = capsys.readouterr().err
    assert "missing: model.norm.weight (20,)" in said and "not part of the model: model.surplus (3,)" in said
    assert scripts[0].main([str(tiny.write_directory(tmp_path / "n", clip_qkv=8.0))]) == 1
    assert "clip_qkv = 8.0 is not supported" in capsys.readouterr().err
    assert scripts[0].main([str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err


def inspected(scripts, capsys, path):
    """Exit status and last line."""
    status, said = scripts[0].main([str(path)]), capsys.readouterr()
    return status, (said.err or said.out).splitlines()[-1]


def test_inspection_of_our_own_checkpoints_says_what_load_does(scripts, tmp_path, capsys):
    lm = load(tiny.write_gguf(tmp_path / "m.gguf"))
    save(tmp_path / "own", lm)
    assert inspected(scripts, capsys, tmp_path / "own") == (0, "would load")
    manifest = json.loads((tmp_path / "own" / "specjax.json").read_text())
    config = {key: value for key, value in manifest["config"].items() if key != "hidden_size"}
    for changes in ({"format": 9}, {"config": config}, {"config": []}, {"files": {"_METADATA": 1}}, {"tokenizer": 3},
                    {"crc32": dict.fromkeys(manifest["crc32"], "9")}, {"crc32": {}}, "missing", "{}"):  # fmt: skip
        if isinstance(changes, str):
            (tmp_path / "own" / "tokenizer.json").unlink(missing_ok=True)
            if changes != "missing":
                (tmp_path / "own" / "tokenizer.json").write_text(changes)
            changes = {}
        (tmp_path / "own" / "specjax.json").write_text(json.dumps(manifest | changes))
        status, line = inspected(scripts, capsys, tmp_path / "own")
        with pytest.raises((ValueError, OSError)) as error:
            load(tmp_path / "own")
        assert status == 1 and line == f"would not load: {error.value}"


def test_inspection_says_what_is_missing_for_text_and_for_chat(scripts, tmp_path, capsys):
    for template, words in (
        (None, "tokens, no chat template: chat=True would be refused"),
        ("{{ messages[0].content }}", "a chat template"),
        ("{% if %}", "tokens; the checkpoint's chat template is not valid jinja2, line 1: "),
    ):
        more = {} if template is None else {"tokenizer.chat_template": template}
        tiny.write_gguf(tmp_path / "m.gguf", **more)
        assert scripts[0].main([str(tmp_path / "m.gguf")]) == 0 and words in capsys.readouterr().out
    assert scripts[0].main([str(tiny.TINY_MODELS / "qwen2_bias")]) == 0
    assert "tokenizer: none: it would load for token ids alone" in capsys.readouterr().out


def test_inspection_refuses_a_tokenizer_or_a_tied_head_that_load_refuses(scripts, tmp_path, capsys):
    path = tiny.write_directory(tmp_path / "m")
    for text in (b"{}", b"\xff"):
        (path / "tokenizer.json").write_bytes(text)
        status, line = inspected(scripts, capsys, path)
        assert status == 1 and line.startswith("would not load: ")
    (path / "tokenizer.json").unlink()
    weights = tiny.tensors()
    tied = tiny.write_directory(tmp_path / "t", weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1},
                                tie_word_embeddings=True)  # fmt: skip
    status, line = inspected(scripts, capsys, tied)
    assert status == 1 and "tie_word_embeddings is set, yet lm_head.weight differs" in line


def test_a_gguf_file_is_inspected_and_converted(scripts, tmp_path, capsys):
    name, more = GGUF_CASES["qwen2"]
    path = tiny.write_gguf(tmp_path / "m.gguf", gguf_entries(random_weights(CONFIGS[name]), "qwen2", "before"),
                           tokens_metadata(gguf_metadata("qwen2", CONFIGS[name], **more)))  # fmt: skip
    assert scripts[0].main([str(path)]) == 0
    assert "GGUF, architecture qwen2" in capsys.readouterr().out
    lm = load(path)
    for to in ("safetensors", "orbax"):
        assert scripts[1].main([str(path), str(tmp_path / to), "--to", to]) == 0
        assert_same(load(tmp_path / to), lm)
    assert scripts[1].main([str(tmp_path / "orbax"), str(tmp_path / "back"), "--to", "safetensors"]) == 0
    assert_same(load(tmp_path / "back"), lm)
    with pytest.raises(SystemExit):
        scripts[1].main([str(path), str(tmp_path / "orbax"), "--to", "orbax"])
    for target, said in ((tmp_path, "is the source or holds it"), (path, "is the source"), (SCRIPTS, "no checkpoint")):
        with pytest.raises(SystemExit):
            scripts[1].main([str(path), str(target), "--overwrite"])
        assert said in capsys.readouterr().err
    assert scripts[1].main([str(tmp_path), str(tmp_path / "new")]) == 1
    assert "neither config.json" in capsys.readouterr().err


def test_conversion_refuses_what_cannot_be_written_before_it_reads(scripts, tmp_path, capsys, monkeypatch):
    save(tmp_path / "q", load(tiny.TINY_MODELS / "qwen2_bias", quantize="int8"))
    assert scripts[1].main([str(tmp_path / "q"), str(tmp_path / "again"), "--to", "orbax"]) == 0
    assert capsys.readouterr().out.endswith(" parameters in float32/int8, as orbax\n")
    assert load(tmp_path / "again").config.quantization == "int8"
    monkeypatch.setattr(specjax, "load", lambda *args, **options: pytest.fail("it was read"))
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "there").mkdir()
    for source, target, words in (
        (tmp_path / "q", tmp_path / "new", "int8 weights have no place in safetensors: --to orbax keeps them"),
        (tiny.TINY_MODELS / "qwen2_bias", tmp_path / "file" / "new", f"{tmp_path / 'file'} is a file; write elsewhere"),
        (tmp_path / "q", tmp_path / "link", "link is a link to nothing; write elsewhere"),
        (tmp_path / "q", tmp_path / "link" / "new", "link is a link to nothing; write elsewhere"),
        (tmp_path / "q", tmp_path / (300 * "x"), "a name of 300 characters is longer than file systems take"),
        (tmp_path / "q", tmp_path / "there", "there exists; --overwrite replaces it"),
    ):
        with pytest.raises(SystemExit) as ended:
            scripts[1].main([str(source), str(target)])
        assert ended.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


def test_an_error_of_writing_is_one_line(scripts, tmp_path, capsys, monkeypatch):
    def full(*args, **options):
        raise OSError("no space left")

    monkeypatch.setitem(scripts[1].WRITERS, "orbax", full)
    assert scripts[1].main([str(tiny.TINY_MODELS / "qwen2_bias"), str(tmp_path / "new"), "--to", "orbax"]) == 1
    assert capsys.readouterr().err == "cannot convert: no space left\n"


def tokens_metadata(metadata):
    """A vocabulary of as many tokens as the model has."""
    words = [*tiny.WORDS, *(f"w{i}" for i in range(BASE.vocab_size - len(tiny.WORDS)))]
    text = {key: value for key, value in tiny.METADATA.items() if key.startswith("tokenizer.")}
    return metadata | text | {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": [1] * len(words)}


def test_a_family_survives_the_way_through_orbax(tmp_path):
    config = CONFIGS["gemma 3"]
    weights = random_weights(config)
    params = llama_params.params_from_tensors(config, lambda name, shape: weights[name])
    lm = specjax.LanguageModel(load(tiny.TINY_MODELS / "gemma3_text").model, params, None, config)
    save(tmp_path / "m", lm)
    assert_same(load(tmp_path / "m"), lm)
