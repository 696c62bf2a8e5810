"""Heads on disk: EAGLE-3 against the speculators library, strict reading, round trips of every kind and layout.

The reference is a checkpoint that the library made for a tiny Llama, with the logits it gave in three steps: what is
compared went the whole way, features, draft cache, steps.
"""

import dataclasses
import functools
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import specjax
from specjax import sharding
from specjax.drafters import checkpoint, eagle_files, recurrent
from specjax.drafters.checkpoint import FORMATS, MANIFEST, load_drafter, read, save_drafter
from specjax.drafters.dflash import DFlashConfig
from specjax.drafters.dflash import fresh_params as dflash_params
from specjax.drafters.eagle import EagleConfig, abstract_params, eagle, fresh_params, head_of
from specjax.drafters.medusa import MedusaConfig
from specjax.drafters.medusa import fresh_params as medusa_params
from specjax.drafters.mtp import MTPConfig
from specjax.drafters.mtp import fresh_params as mtp_params
from specjax.models import LlamaConfig, orbax
from specjax.types import Committed
from tests.drafters.parallel_world import small_target
from tests.models.test_orbax import flip
from tests.models.tiny import DATA, TINY_MODELS

SOURCE = DATA / "tiny_drafters" / "eagle3_llama_tied"
EXPECTED = json.loads((SOURCE / "expected.json").read_text())
IDS = np.asarray(EXPECTED["input_ids"])


@functools.cache
def target():
    return specjax.load(TINY_MODELS / "llama_tied_sharded")


@functools.cache
def features(layers):
    lm, count = target(), len(IDS)
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    run = jax.jit(lambda params: lm.model.apply(
        params, jnp.asarray(IDS)[None], positions, None, lm.model.init_cache(1, count), feature_layers=layers
    ).features)  # fmt: skip
    return np.asarray(run(lm.params)[0])


def three_steps(config, params, lm=None):
    """Logits [3, 19, 96] as the library gives them: row t has read t + 2 tokens, then two more are fed as drafts."""
    drafter, head, rows = eagle(config, params, target() if lm is None else lm), head_of(config), len(IDS) - 1
    true = features(drafter.feature_layers)
    shifted = np.concatenate([np.zeros_like(true[:1]), true[:-1]])
    texts = jnp.asarray(np.tile(IDS, (rows, 1)), jnp.int32)
    committed = Committed(
        texts, jnp.asarray(np.tile(shifted, (rows, 1, 1))), jnp.arange(2, rows + 2), jnp.zeros(rows, jnp.int32)
    )
    following = np.concatenate([IDS, [0, 0]])
    return np.asarray(_steps(drafter.init, drafter.observe, head, drafter.params, committed, jnp.asarray(
        np.stack([following[np.arange(rows) + 2 + step] for step in range(2)])
    )))  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _steps(init, observe, head, params, committed, drafted):
    batch, width = committed.tokens.shape
    state = observe(params, init(params, batch, width + 2), committed)
    fed, result = recurrent._root(state), [state.logits]
    for step in (1, 2):
        parent = jnp.full((batch, 1), step - 2, jnp.int32)
        fed, logits = recurrent._feed(head, params, state, fed, step, drafted[step - 1][:, None], parent)
        result.append(logits[:, 0])
    return jnp.stack(result)


def difference(config, params):
    return np.abs(three_steps(config, params) - np.asarray(EXPECTED["logits"])).max()


# --- numbers


def test_three_steps_are_those_of_the_library():
    """Cases 98, 100, 101, 103 and 104, end to end."""
    config, params = read(SOURCE)
    assert config.feature_layers == tuple(EXPECTED["layer_ids"]) and config.draft_vocab_size == 96
    np.testing.assert_allclose(features(config.feature_layers)[0], EXPECTED["aux_first_row"], atol=1e-5)
    assert difference(config, params) < 2e-5


WRONG = {
    "swapped halves": lambda c, p: (c, swapped(p)),
    "layer ids off by one": lambda c, p: (dataclasses.replace(c, feature_layers=(1, 2, 4)), p),
    "norm_before_residual": lambda c, p: (dataclasses.replace(c, norm_before_residual=True), p),
    "norm_output": lambda c, p: (dataclasses.replace(c, norm_output=True), p),
}


def swapped(params):
    """Case 100: [hidden, embedding]."""
    first = params["layers"][0]
    qkv = jnp.concatenate(jnp.split(first["qkv"], 2)[::-1])
    return {**params, "layers": {0: {**first, "qkv": qkv}}}


@pytest.mark.parametrize("name", ["swapped halves", *[pytest.param(n, marks=pytest.mark.full) for n in [*WRONG][1:]]])
def test_the_reference_would_notice(name):
    """Negative controls: concatenation order (case 100), layer ids (case 101), norms (case 98)."""
    assert difference(*WRONG[name](*read(SOURCE))) > 1e-2


def test_an_embedding_that_is_the_target_s_is_not_kept_twice():
    lm = target()
    drafter = load_drafter(SOURCE, lm, tree=specjax.tree.Dynamic(6, 3, 3))
    assert drafter.params["weights"]["embedding"] is lm.params["embedding"]
    assert drafter.feature_layers == (0, 1, 3) and drafter.vocab_size == 320 and drafter.num_draft_tokens == 6


def test_an_embedding_in_parts_is_compared_in_every_part(tmp_path):
    """Case 145: a single number in the first or the last shard of the vocabulary decides for all of them."""
    lm = sharding.place(sharding.make_mesh(2, 2), target())
    assert {shard.data.shape for shard in lm.params["embedding"].addressable_shards} == {(160, 64)}
    assert load_drafter(SOURCE, lm).params["weights"]["embedding"] is lm.params["embedding"]
    config, params = read(SOURCE)
    for column in (0, 319):
        other = params | {"embedding": params["embedding"].at[column, 63].add(1)}
        save_drafter(tmp_path / "x", config, other, format="orbax", overwrite=True)
        kept = load_drafter(tmp_path / "x", lm).params["weights"]["embedding"]
        np.testing.assert_array_equal(kept, other["embedding"])


@pytest.mark.full
def test_a_loaded_head_drafts_for_its_target():
    lm = target()
    drafter = load_drafter(SOURCE, lm, tree=specjax.tree.Dynamic(6, 3, 3))
    prompts = [IDS[:7].tolist(), IDS[:1].tolist()]
    out = specjax.generate(lm, prompts, drafter=drafter, max_new_tokens=12)
    assert out.tokens == specjax.generate(lm, prompts, max_new_tokens=12).tokens


# --- reading


def copied(path, tensors=None, **settings):
    """The reference with other tensors (None: gone) and other settings."""
    shutil.copytree(SOURCE, path)
    changed = load_file(path / "model.safetensors") | (tensors or {})
    save_file({name: x for name, x in changed.items() if x is not None}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | settings
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))
    return path


def test_case_105_d2t_holds_offsets():
    marks = np.isin(np.arange(10), [2, 5, 6, 9])
    ids = eagle_files._ids(np.asarray([2, 4, 4, 6]), marks, 10, "file")
    assert ids.tolist() == [2, 5, 6, 9]
    assert eagle_files._ids(np.zeros(4, int), None, 10, "file").tolist() == [0, 1, 2, 3]  # identity: zeros, not arange
    with pytest.raises(ValueError, match=r"names the tokens \[2, 6, 8, 12\]|names token 12, of 10"):
        eagle_files._ids(np.asarray([2, 5, 6, 9]), marks, 10, "file")
    with pytest.raises(ValueError, match=r"names token 3 twice"):
        eagle_files._ids(np.asarray([3, 2, 0, 0]), None, 10, "file")
    with pytest.raises(ValueError, match=r"names token -1, of 10"):
        eagle_files._ids(np.asarray([-1, 0, 0, 0]), None, 10, "file")


def test_d2t_read_as_absolute_ids_would_be_noticed(tmp_path):
    """Case 105: ids where offsets are expected, with and without t2d to compare them with."""
    offsets = load_file(SOURCE / "model.safetensors")["d2t"]
    absolute = offsets + np.arange(96)
    with pytest.raises(ValueError, match="d2t, read as offsets, names"):
        read(copied(tmp_path / "a", {"d2t": absolute}))
    with pytest.raises(ValueError, match="d2t, read as offsets, names token"):
        read(copied(tmp_path / "b", {"d2t": absolute, "t2d": None}))


def test_ids_come_out_ascending_whatever_their_order_in_the_file(tmp_path):
    """The head's columns move with them: the same law over the same tokens."""
    config, params = read(SOURCE)
    order = np.random.default_rng(0).permutation(96)
    tensors = load_file(SOURCE / "model.safetensors")
    ids = tensors["d2t"] + np.arange(96)
    shuffled = {"d2t": ids[order] - np.arange(96), "lm_head.weight": tensors["lm_head.weight"][order]}
    again, other = read(copied(tmp_path / "x", shuffled))
    assert again == config
    assert_same(params, other)


def test_tensors_are_read_strictly_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"missing: norm.weight \(64,\)\n.*not part of the drafter: extra.weight"):
        read(copied(tmp_path / "a", {"norm.weight": None, "extra.weight": np.zeros(3, np.float32)}))
    with pytest.raises(ValueError, match=r"fc.weight has shape \(64, 128\), the configuration needs \(64, 192\)"):
        read(copied(tmp_path / "b", {"fc.weight": np.zeros((64, 128), np.float32)}))
    with pytest.raises(ValueError, match=r"tensor 'norm.weight' has the type BOOL; weights must be floating"):
        read(copied(tmp_path / "g", {"norm.weight": np.ones(64, bool)}))
    with pytest.raises(ValueError, match=r"missing: d2t \(96,\)"):
        read(copied(tmp_path / "c", {"d2t": None}))
    with pytest.raises(ValueError, match=r"missing: input_norm.weight \(192,\)"):
        read(copied(tmp_path / "d", norm_before_fc=True))
    with pytest.raises(ValueError, match=r"missing: fc_norm.0.weight \(64,\)"):
        read(copied(tmp_path / "e", fc_norm=True))
    config, params = read(copied(tmp_path / "f", {"embed_tokens.weight": None, "t2d": None}))
    assert "embedding" not in params and config == read(SOURCE)[0]


@pytest.mark.parametrize(("settings", "message"), [
    ({"eagle_aux_hidden_state_layer_ids": None}, r"eagle_aux_hidden_state_layer_ids is missing.*pass feature_layers="),
    ({"norm_before_residual": "gone"}, "norm_before_residual is missing"),
    ({"draft_vocab_size": "gone"}, "draft_vocab_size is missing"),
    ({"transformer_layer_config": "gone"}, "transformer_layer_config is missing"),
    ({"new_norm": True}, "new_norm = True is not supported: unknown"),
    ({"speculators_model_type": "hydra"}, r"no head that is known \(eagle, mtp, dflash, medusa\).*hydra"),
])  # fmt: skip
def test_keys_that_are_missing_or_unknown_are_errors(tmp_path, settings, message):
    """Case 101: no default stands in for layer ids."""
    with pytest.raises(ValueError, match=message):
        read(copied(tmp_path / "x", **settings))


def test_layer_ids_may_be_given_where_the_file_has_none(tmp_path):
    config, _ = read(copied(tmp_path / "x", eagle_aux_hidden_state_layer_ids=None), feature_layers=(0, 1, 3))
    assert config == read(SOURCE)[0]
    with pytest.raises(ValueError, match=r"= \[0, 1, 3\] and feature_layers=\(0, 1, 2\) contradict"):
        read(SOURCE, feature_layers=(0, 1, 2))


@pytest.mark.parametrize("nested", [False, True])
def test_the_older_layout_gives_the_same_head(tmp_path, nested):
    """A Llama's config.json with draft_vocab_size, tensors under midlayer; layer ids nested, or nowhere."""
    settings = json.loads((SOURCE / "config.json").read_text())
    older = settings["transformer_layer_config"] | {"draft_vocab_size": 96, "architectures": ["LlamaForCausalLMEagle3"]}
    if nested:
        ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True}
        older["eagle_config"] = ids
    (tmp_path / "config.json").write_text(json.dumps(older))
    tensors = load_file(SOURCE / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    if not nested:
        with pytest.raises(ValueError, match=r"is missing, so the file does not say.*\(2, L // 2, L - 3\)"):
            read(tmp_path)
    config, params = read(tmp_path, feature_layers=None if nested else (0, 1, 3))
    assert config == read(SOURCE)[0]
    assert_same(params, read(SOURCE)[1])


def test_a_head_for_another_target_is_refused():
    with pytest.raises(ValueError, match=r"the EAGLE-3 head has a vocabulary of 320 tokens and the target one of 16"):
        load_drafter(SOURCE, small_target())


def test_nothing_there_and_a_whole_model_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no directory"):
        read(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=f"neither config.json .* nor {MANIFEST}"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*a whole model is loaded with specjax.load"):
        read(TINY_MODELS / "llama_tied_sharded")
    with pytest.raises(ValueError, match="path=3"):
        read(3)


# --- writing

LAYERS = LlamaConfig(40, 8, 12, 1, 2, 1, head_dim=6, max_position_embeddings=64, qk_norm=True, attention_bias=True)
TWO = dataclasses.replace(LAYERS, num_layers=2)
HEADS = {
    "EAGLE-3": EagleConfig(TWO, (1, 3), draft_vocab_size=5, fc_norm=True, norm_before_residual=True, norm_output=True),
    "EAGLE-3, whole vocabulary": EagleConfig(LAYERS, (2,), norm_before_fc=True, target_hidden_size=10),
    "EAGLE-1": EagleConfig(TWO, (4,), version=1, fc_bias=True),
    "MTP": MTPConfig(LAYERS, (4,), num_modules=2),
    "MTP, one module": MTPConfig(LAYERS, (4,), norm_output=True),
    "DFlash": DFlashConfig(TWO, (1, 2), 3, 4, draft_vocab_size=5),
    "DFlash, Markov and confidence": DFlashConfig(
        TWO, (1, 2), 3, 4, draft_vocab_size=5, markov_rank=3, confidence=True, confidence_with_markov=True
    ),
    "Medusa": MedusaConfig(8, 40, num_heads=2),
}


def fresh(config):
    makers = {EagleConfig: fresh_params, MTPConfig: mtp_params, DFlashConfig: dflash_params}
    params = makers.get(type(config), medusa_params)(config, rngs=nnx.Rngs(3))
    if isinstance(config, EagleConfig) and config.draft_vocab_size:
        params = params | {"ids": jnp.asarray([1, 4, 9, 30, 39], jnp.int32)}
    return params


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", HEADS)
def test_what_is_saved_is_read_back_bit_for_bit(tmp_path, name, format):
    config = HEADS[name]
    params = fresh(config)
    if name == "EAGLE-1" and format == "speculators":
        with pytest.raises(ValueError, match=r"EAGLE-1 head has no place.*format='orbax'"):
            save_drafter(tmp_path / "x", config, params, format=format)
        assert not (tmp_path / "x").exists()
        return
    save_drafter(tmp_path / "x", config, params, format=format, target="org/name")
    again, other = read(tmp_path / "x")
    assert again == config
    assert_same(params, other)


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_the_format_before_are_read_bit_for_bit(tmp_path, name):
    """Its matrices were [in, out], all but those whose rows are looked up without being multiplied."""
    config, folder = HEADS[name], tmp_path / "x"
    params = fresh(config)
    save_drafter(folder, config, params, format="orbax")
    shutil.rmtree(folder / "params")
    old = {name: np.asarray(leaf) if name == "above" else np.array(np.asarray(leaf).T)
           for name, leaf in orbax._named(params).items()}  # fmt: skip
    orbax._write(folder / "params", old)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **orbax._facts(folder / "params"), "format": 2}))
    again, other = read(folder)
    assert again == config
    assert_same(params, other)


@pytest.mark.parametrize("format", FORMATS)
def test_the_reference_survives_a_round_trip_with_its_embedding_in_bfloat16_too(tmp_path, format):
    for dtype in ("float32", "bfloat16"):
        config, params = read(SOURCE, dtype=dtype)
        assert params["embedding"].dtype == jnp.dtype(dtype) and params["ids"].dtype == jnp.int32
        save_drafter(tmp_path / dtype, config, params, format=format)
        again, other = read(tmp_path / dtype, dtype=dtype)
        assert again == config
        assert_same(params, other)


def test_a_draft_model_appears_with_the_target_it_was_made_for_or_not_at_all(tmp_path, monkeypatch):
    lm = target()
    save_drafter(tmp_path / "x", lm._replace(params=()), lm.params, target="org/name", made_for=lm)
    assert_same(specjax.load(tmp_path / "x").params, lm.params)
    assert load_drafter(tmp_path / "x", lm).num_draft_tokens > 0
    with pytest.raises(ValueError, match="x was made for org/name with fingerprint"):
        load_drafter(tmp_path / "x", small_target())
    monkeypatch.setattr(checkpoint, "json", types.SimpleNamespace(dumps=lambda *args, **kwargs: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        save_drafter(tmp_path / "y", lm, lm.params, made_for=lm)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_saving_refuses_what_it_must(tmp_path):
    config, params = read(SOURCE)
    save_drafter(tmp_path / "x", config, params)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_drafter(tmp_path / "x", config, params)
    save_drafter(tmp_path / "x", config, params, format="orbax", overwrite=True)
    assert (tmp_path / "x" / MANIFEST).exists() and not (tmp_path / "x" / "config.json").exists()
    with pytest.raises(ValueError, match="format='gguf': choose one of 'speculators', 'orbax'"):
        save_drafter(tmp_path / "y", config, params, format="gguf")
    with pytest.raises(ValueError, match=r"config=1: give the configuration of a head \(EagleConfig, MTPConfig"):
        save_drafter(tmp_path / "y", 1, params)
    for weights, message in (
        (None, r"params=None: give the weights of the Eagle head as a dict"),
        ({}, r"Eagle weight fc is missing, the configuration needs"),
        ({name: leaf for name, leaf in params.items() if name != "ids"}, r"Eagle weight ids is missing"),
        (params | {"more": jnp.zeros(2)}, r"Eagle weight more has shape \(2,\), the configuration knows no such"),
    ):
        for format in ("speculators", "orbax"):
            with pytest.raises(ValueError, match=message):
                save_drafter(tmp_path / "x", config, weights, format=format, overwrite=True)
    for path in (None, ""):
        with pytest.raises(ValueError, match=rf"path={path!r}: give the directory to make"):
            save_drafter(path, config, params, overwrite=True)
    with pytest.raises(ValueError, match=r"target=3: give the name or path"):
        save_drafter(tmp_path / "y", config, params, target=3)
    with pytest.raises(ValueError, match=r"feature_layers=\(9,\): .* says its own"):
        read(tmp_path / "x", feature_layers=(9,))
    with pytest.raises(ValueError, match=r"feature_layers=9: give a tuple"):
        read(tmp_path / "x", feature_layers=9)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    name = flip(tmp_path / "x")
    with pytest.raises(ValueError, match=rf"x/params is damaged: \S*{name} has other bytes"):
        read(tmp_path / "x")
    manifest = json.loads((tmp_path / "x" / MANIFEST).read_text())
    (tmp_path / "x" / MANIFEST).write_text(json.dumps(manifest | {"kind": "hydra"}))
    with pytest.raises(ValueError, match="kind 'hydra'"):
        read(tmp_path / "x")
    for change, message in (
        ({"files": []}, r"specjax_drafter.json: files = \[\] is not understood"),
        ({"crc32": {}}, r"specjax_drafter.json: crc32\['\w+'\] is missing"),
        ({"format": True}, "has format True and kind 'eagle'"),
        ({"weights": None}, r"specjax_drafter.json: weights = None is not understood"),
        ({"config": {**manifest["config"], "wings": 2}}, r"drafter.json: config is not .*'wings'.* newer version"),
        ({"config": {**manifest["config"], "layers": {}}}, r"drafter.json: config is not .*'rope_scaling'"),
    ):
        (tmp_path / "x" / MANIFEST).write_text(json.dumps(manifest | change))
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "x")
    assert "ids" in abstract_params(config)
