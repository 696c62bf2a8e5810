"""Checkpoints of our own."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import types
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from specjax import sharding
from specjax.models import orbax
from specjax.models.load import load
from tests.models import tiny
from tests.models.test_load import assert_equal, logits


@pytest.fixture
def lm(tmp_path):
    """Twelve layers, so that as strings "10" would come before "2"."""
    path = tiny.write_gguf(
        tmp_path / "m.gguf", tiny.gguf_tensors(tiny.tensors(layers=12)),
        **{"llama.block_count": 12, "tokenizer.chat_template": "{{ messages[0].content }}!"},
    )
    return load(path)


def test_everything_comes_back_bit_for_bit(tmp_path, lm):
    orbax.save(tmp_path / "saved", lm)
    again = load(tmp_path / "saved")
    assert_equal(again.params, lm.params)
    assert again.config == lm.config
    assert (again.chat_template, again.eos_ids) == (lm.chat_template, lm.eos_ids)
    assert again.tokenizer.fingerprint == lm.tokenizer.fingerprint
    assert (again.tokenizer.bos_id, again.tokenizer.eos_id) == (1, 2)
    assert again.tokenizer.encode("ab a<|stop|>12") == lm.tokenizer.encode("ab a<|stop|>12")
    assert again.model == lm.model  # equal functions: nothing compiles twice
    np.testing.assert_array_equal(logits(again), logits(lm))


def test_layer_ten_is_not_layer_two(tmp_path, lm):
    orbax.save(tmp_path / "saved", lm)
    again = load(tmp_path / "saved", scan_layers=True)
    for index in range(12):
        np.testing.assert_array_equal(again.params["layers"]["qkv"][index], lm.params["layers"][index]["qkv"])


def test_scanned_and_unrolled_models_save_the_same_checkpoint(tmp_path, lm):
    scanned = load(tmp_path / "m.gguf", scan_layers=True)
    orbax.save(tmp_path / "saved", scanned)
    assert_equal(load(tmp_path / "saved").params, lm.params)
    assert_equal(load(tmp_path / "saved", scan_layers=True).params, scanned.params)


def test_bfloat16_comes_back_and_float32_is_rounded_as_at_any_load(tmp_path, lm):
    narrow = load(tmp_path / "m.gguf", dtype="bfloat16")
    orbax.save(tmp_path / "narrow", narrow)
    assert_equal(load(tmp_path / "narrow", dtype="bfloat16").params, narrow.params)
    widened = load(tmp_path / "narrow").params["embedding"]
    np.testing.assert_array_equal(widened, np.asarray(narrow.params["embedding"]).astype(np.float32))
    orbax.save(tmp_path / "wide", lm)
    rounded = load(tmp_path / "wide", dtype="bfloat16").params["embedding"]
    np.testing.assert_array_equal(rounded, np.asarray(lm.params["embedding"]).astype(ml_dtypes.bfloat16))


def test_a_model_saved_from_many_devices_is_restored_on_one(tmp_path, lm):
    """The other process has a single device: a sharding that was saved with the arrays would not exist there."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    orbax.save(tmp_path / "saved", lm._replace(params=jax.device_put(lm.params, split)))
    here = load(tmp_path / "saved")
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(here.params)} == {1}
    assert_equal(here.params, lm.params)
    program = textwrap.dedent(f"""
        import jax, numpy as np
        from specjax.models.load import load
        assert len(jax.devices()) == 1
        params = load({str(tmp_path / "saved")!r}).params
        np.save({str(tmp_path / "ten.npy")!r}, params["layers"][10]["qkv"])
    """)
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(Path(orbax.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "ten.npy"), lm.params["layers"][10]["qkv"])


@pytest.mark.parametrize("options", [{}, {"scan_layers": True}, {"quantize": "int8"}], ids=str)
@pytest.mark.parametrize("saved", [None, "int8"])
def test_on_a_mesh_no_weight_lies_on_one_device_first(tmp_path, monkeypatch, options, saved):
    path = tiny.write_directory(tmp_path / "m")
    orbax.save(tmp_path / "saved", load(path, quantize=saved))
    mesh, alone, put, seen = sharding.make_mesh(1, 2), load(path, **{"quantize": saved} | options), jax.device_put, []
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", lambda x, where=None: (seen.append((type(x), where)), put(x, where))[1])
        lm = load(tmp_path / "saved", mesh=mesh, **options)
    assert seen and all(kind is np.ndarray and where.mesh == mesh for kind, where in seen)
    assert lm.model == sharding.place(mesh, alone).model and lm.config == alone.config
    assert jax.tree.map(lambda x: x.sharding, lm.params) == jax.tree.map(
        lambda x: x.sharding, sharding.place_params(mesh, alone.params))
    assert_equal(lm.params, alone.params)
    monkeypatch.setattr(orbax, "_check_shapes", lambda *args: pytest.fail("weights were looked at"))
    with pytest.raises(ValueError, match=r"mesh=1,8: num_heads=4 cannot be shared out over model=8.*be 1 or 2 or 4"):
        load(tmp_path / "saved", mesh=sharding.make_mesh(1, 8), **options)


def test_a_model_without_tokenizer_is_saved_without_one(tmp_path):
    orbax.save(tmp_path / "saved", load(tiny.write_directory(tmp_path / "m")))
    assert load(tmp_path / "saved").tokenizer is None


def test_an_existing_path_is_replaced_only_on_request(tmp_path, lm):
    orbax.save(tmp_path / "saved", lm)
    other = lm._replace(chat_template="other")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        orbax.save(tmp_path / "saved", other)
    orbax.save(tmp_path / "saved", other, overwrite=True)
    assert load(tmp_path / "saved").chat_template == "other"


@pytest.mark.parametrize("name", ["thesis.txt", ".git", "runs"])
def test_what_lies_beside_a_checkpoint_is_never_deleted(tmp_path, lm, name):
    orbax.save(tmp_path / "saved", lm)
    (tmp_path / "saved" / name).mkdir()
    with pytest.raises(FileExistsError, match=rf"saved holds \['{name}'\] beside a checkpoint.*move it away"):
        orbax.save(tmp_path / "saved", lm, overwrite=True)
    assert (tmp_path / "saved" / name).exists() and load(tmp_path / "saved").tokenizer is not None


def test_a_save_that_fails_leaves_nothing_behind_and_keeps_the_old(tmp_path, lm, monkeypatch):
    orbax.save(tmp_path / "saved", lm)
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(orbax, "json", types.SimpleNamespace(dumps=lambda *args, **kwargs: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        orbax.save(tmp_path / "saved", lm, overwrite=True)
    with pytest.raises(ZeroDivisionError):
        orbax.save(tmp_path / "new", lm)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_equal(load(tmp_path / "saved").params, lm.params)


def test_a_model_whose_configuration_is_not_ours_is_refused(tmp_path, lm):
    with pytest.raises(TypeError, match="LlamaConfig"):
        orbax.save(tmp_path / "saved", lm._replace(config=None))
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("path, said", [("swapped", "path first, then the model"), (5, "path=5"), (None, "path=None")])
def test_a_path_and_a_model_are_needed_in_this_order(tmp_path, lm, path, said):
    with pytest.raises(ValueError, match=said):
        orbax.save(lm if path == "swapped" else path, tmp_path if path == "swapped" else lm)
    with pytest.raises(ValueError, match=r"lm=5 is not a language model"):
        orbax.save(tmp_path / "saved", 5)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def edit(path, change):
    manifest = json.loads((path / "specjax.json").read_text())
    change(manifest)
    (path / "specjax.json").write_text(json.dumps(manifest))


def reweigh(path, dtype):
    """A checkpoint with weights of another type, and a manifest that agrees."""
    weights = orbax._named(load(path).params)
    shutil.rmtree(path / "params")
    orbax._write(path / "params", {name: np.asarray(leaf).astype(dtype) for name, leaf in weights.items()})
    edit(path, lambda m: m.update(orbax._facts(path / "params")))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: shutil.rmtree(path / "params"), "params is missing"),
        (lambda path: shutil.rmtree(path / "params" / "d"), r"params is incomplete: the file d/\w+ is missing"),
        (lambda path: (path / "params" / "_METADATA").unlink(), "the file _METADATA is missing"),
        (lambda path: cut(path / "params" / "manifest.ocdbt"), r"params is damaged: manifest\.ocdbt has \d+ bytes"),
        (lambda path: (path / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda path: (path / "specjax.json").write_text("{"), r"specjax\.json is not valid JSON"),
        (lambda path: edit(path, lambda m: m.update(format=4)), "format 4"),
        (lambda path: edit(path, lambda m: m.update(family="rnn")), "family 'rnn'"),
        (lambda path: edit(path, lambda m: m["config"].update(num_layers=13)), r"layers\.12\.down is missing"),
        (lambda path: edit(path, lambda m: m["config"].update(num_layers=11)), r"layers\.11\.\w+ is .*no such weight"),
        (lambda path: edit(path, lambda m: m["config"].update(vocab_size=41)), r"weight embedding is \(40, 20\)"),
        (lambda path: edit(path, lambda m: m.pop("files")), r"specjax\.json: files is missing; .* newer version"),
        (lambda path: edit(path, lambda m: m.update(files=["d"])), r"specjax\.json: files = \['d'\] is not understood"),
        (lambda path: edit(path, lambda m: m.update(files={})), r"json: files = {} names no file of weights"),
        (lambda path: edit(path, lambda m: m["files"].update(_METADATA="9")), r"files\['_METADATA'\] = '9' is no"),
        (lambda path: edit(path, lambda m: m.update(crc32=[])), r"json: crc32 = \[\] is not understood"),
        (lambda path: edit(path, lambda m: m["crc32"].update(_METADATA=True)), r"crc32\['_METADATA'\] = True is no"),
        (lambda path: edit(path, lambda m: m["crc32"].update(_METADATA="9")), r"crc32\['_METADATA'\] = '9' is no"),
        (lambda path: edit(path, lambda m: m["crc32"].pop("_METADATA")), r"json: crc32\['_METADATA'\] is missing"),
        (lambda path: edit(path, lambda m: m.update(format=True)), "has format True"),
        (lambda path: edit(path, lambda m: m.pop("config")), r"specjax\.json: config is missing"),
        (lambda path: edit(path, lambda m: m.pop("tokenizer")), r"specjax\.json: tokenizer is missing"),
        (lambda path: edit(path, lambda m: m.pop("eos_ids")), r"specjax\.json: eos_ids is missing"),
        (lambda path: edit(path, lambda m: m["tokenizer"].pop("bos_id")), r"specjax\.json: bos_id is missing"),
        (lambda path: edit(path, lambda m: m["config"].update(wings=2)), r"json: config .*'wings'.* newer version"),
        (lambda path: edit(path, lambda m: m["config"].pop("rope_scaling")), r"json: config is not .*'rope_scaling'"),
        (lambda path: edit(path, lambda m: m["config"].update(vocab_size="40")), r"json: config is not understood"),
        (lambda path: reweigh(path, np.int32), r"params: weight embedding has the type int32, the model needs float32"),
    ],
    ids=["no weights", "no data", "no index", "cut", "no tokenizer", "manifest cut", "format", "family", "more layers",
         "fewer layers", "other shape", "no files", "files a list",
         "files none", "size a text", "sums a list", "sum a truth", "sum a text", "sum missing", "format a truth",
         "no config", "no entry of tokenizer", "no ends",
         "no begin", "unknown key", "no rope", "text for a size", "whole numbers"],
)
def test_a_damaged_checkpoint_is_an_error_that_says_what_is_wrong(tmp_path, lm, damage, said):
    orbax.save(tmp_path / "saved", lm)
    damage(tmp_path / "saved")
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        load(tmp_path / "saved")


def side_by_side(layer, heads, key_heads, dim, blocks):
    """A layer with its rows as format 1 had its columns: all queries, keys, values; all of gate, all of up."""
    group = heads // key_heads + 2
    kinds = range(group - 2), [group - 2], [group - 1]
    head = [g * group + i for own in kinds for g in range(key_heads) for i in own]
    order = {
        "qkv": [dim * each + j for each in head for j in range(dim)],
        "gate_up": [2 * size * block + half * size + j for size in [layer["down"].shape[1] // blocks]
                    for half in (0, 1) for block in range(blocks) for j in range(size)],
    }  # fmt: skip
    return {name: np.asarray(x)[order.get(name.removesuffix("_scale"), slice(None))] for name, x in layer.items()}


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_weights_of_an_older_checkpoint_are_put_in_order(tmp_path, quantize, form):
    """Both had [in, out], the first besides all queries before all keys; large arrays are read in parts."""
    lm = load(tiny.write_directory(tmp_path / "tiny"), quantize=quantize)
    orbax.save(tmp_path / "saved", lm)
    shutil.rmtree(tmp_path / "saved" / "params")
    old = side_by_side if form == 1 else lambda layer, *sizes: layer
    params = {**lm.params, "layers": {i: old(layer, 4, 2, 8, 4) for i, layer in lm.params["layers"].items()}}
    params = jax.tree.map(lambda x: np.ascontiguousarray(np.asarray(x).T), params)
    orbax._write(tmp_path / "saved" / "params", orbax._named(params))
    edit(tmp_path / "saved", lambda m: m.update(orbax._facts(tmp_path / "saved" / "params"), format=form))
    assert_equal(load(tmp_path / "saved").params, lm.params)
    edit(tmp_path / "saved", lambda m: m.update(format=3 - form))
    assert not np.array_equal(load(tmp_path / "saved").params["layers"][0]["qkv"], lm.params["layers"][0]["qkv"])
    edit(tmp_path / "saved", lambda m: m.update(format=3))
    with pytest.raises(ValueError, match=r"weight embedding is \(20, 40\), the model needs \(40, 20\)"):
        load(tmp_path / "saved")


def flip(folder):
    """One bit of the largest file of weights."""
    file = max((folder / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file.name


@pytest.mark.parametrize("noticed", [False, True])
def test_one_flipped_bit_is_noticed_whether_or_not_orbax_notices_anything(tmp_path, lm, monkeypatch, noticed):
    orbax.save(tmp_path / "saved", lm)
    edit(tmp_path / "saved", lambda m: m.pop("crc32"))
    assert_equal(load(tmp_path / "saved").params, lm.params)  # what older versions wrote
    orbax.save(tmp_path / "saved", lm, overwrite=True)
    name = flip(tmp_path / "saved")
    if noticed:
        monkeypatch.setattr(orbax, "_check_shapes", lambda *args: {}["a name"])
    else:  # nor the library below it
        monkeypatch.setattr(orbax, "_restore", lambda *args, **kwargs: lm.params)
    with pytest.raises(ValueError, match=rf"saved/params is damaged: \S*{name} has other bytes"):
        load(tmp_path / "saved")


def test_a_checksum_is_that_of_the_whole_file(tmp_path):
    (tmp_path / "long").write_bytes(data := bytes(range(251)) * 20_000)  # longer than a block
    (tmp_path / "empty").touch()
    assert orbax._sums(tmp_path, ["long", "empty"]) == {"long": zlib.crc32(data), "empty": 0}
