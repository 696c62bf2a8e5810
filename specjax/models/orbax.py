"""Checkpoints of our own: an orbax tree of weights with configuration, tokenizer and chat template beside it.

    PATH/specjax.json     configuration, chat template, end tokens, special tokens; names and sizes of the weight files
    PATH/tokenizer.json   the tokenizer, if the model has one
    PATH/params/          orbax; one array per weight, named by its place in the unrolled tree, e.g. layers.10.qkv

On disk layers are always unrolled and every array is addressed by its name, so neither key order, nor the number of
devices, nor how layers were run when it was saved matters to who reads it.
"""

import dataclasses
import gc
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import directory, huggingface, int8, llama, llama_params, tokenizer
from specjax.models.config import LlamaConfig, from_json
from specjax.models.language_model import LanguageModel, checked
from specjax.types import PyTree

MANIFEST = "specjax.json"
_FORMAT = 1
_MUCH = 2**25  # bytes


def save(path: str | pathlib.Path, lm: LanguageModel, *, overwrite: bool = False) -> None:
    """Writes a loaded model so that `specjax.load` gives it back bit for bit.

    The directory appears whole or not at all: everything is written next to it and renamed at the end.

    Raises:
      FileExistsError: if there is something at the path, unless ``overwrite``.
      TypeError: if the model's configuration is not one of ours, so that `load` could not rebuild the model.
      ValueError: if path is no path or lm no language model, as when the two are swapped.
    """
    import orbax.checkpoint as ocp

    with directory.whole(path, overwrite) as folder:
        lm = checked("lm", lm)
        if not isinstance(lm.config, LlamaConfig):
            raise TypeError(f"only models with a LlamaConfig can be saved, not one with {type(lm.config).__name__}")
        text = lm.tokenizer
        manifest = {
            "format": _FORMAT,
            "family": "llama",
            "config": dataclasses.asdict(lm.config),
            "eos_ids": list(lm.eos_ids),
            "chat_template": lm.chat_template,
            "tokenizer": None if text is None else {"bos_id": text.bos_id, "eos_id": text.eos_id},
        }
        stacked = 0 not in lm.params["layers"]
        params = llama_params.unstack_layers(lm.params) if stacked else lm.params
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "params", _named(params))
        manifest["files"] = _sizes(folder / "params")
        if text is not None:
            (folder / "tokenizer.json").write_text(text.to_json(), encoding="utf-8")
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def load(
    path: pathlib.Path, *, dtype="float32", scan_layers: bool = False, quantization: str = ""
) -> LanguageModel:
    """What `save` wrote, int8 weights as int8. Called by `specjax.load`.

    Raises:
      ValueError: naming the path, if it is incomplete or damaged, or the weight that is missing or of another shape.
    """
    manifest = huggingface.read_json(path / MANIFEST)
    if manifest.get("format") != _FORMAT or manifest.get("family") != "llama":
        raise ValueError(
            f"{path / MANIFEST} has format {manifest.get('format')!r} and family {manifest.get('family')!r}; "
            f"this version of specjax reads format {_FORMAT}, family 'llama'"
        )
    _check_files(path / "params", manifest["files"])
    config = from_json(manifest["config"])
    quantise = bool(quantization) and not config.quantization
    params = _restore_model(path / "params", config, jnp.dtype(dtype), scan_layers, quantise)
    config = dataclasses.replace(config, quantization=config.quantization or quantization)
    text = None
    if manifest["tokenizer"] is not None:
        file = path / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(f"{path} is incomplete: {file.name} is missing")
        text = tokenizer.from_json(file.read_text(encoding="utf-8"), source=str(file), **manifest["tokenizer"])
    return LanguageModel(
        model=llama.model(config, dtype=dtype, scan_layers=scan_layers),
        params=params,
        tokenizer=text,
        config=config,
        chat_template=manifest["chat_template"],
        eos_ids=tuple(manifest["eos_ids"]),
    )


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _check_files(folder: pathlib.Path, expected: dict[str, int]) -> None:
    """Orbax notices bytes that changed, by their checksum; what was lost is clearer said before it starts."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder.parent} is incomplete: the directory {folder.name} is missing")
    found = _sizes(folder)
    for name, size in expected.items():
        if name not in found:
            raise FileNotFoundError(f"{folder} is incomplete: the file {name} is missing")
        if found[name] != size:
            raise ValueError(f"{folder} is damaged: {name} has {found[name]} bytes, {size} were written")


def _restore(folder: pathlib.Path, expected: PyTree) -> PyTree:
    """The saved weights in the shape of ``expected``, on the default device whatever they were saved from."""
    _check_shapes(folder, _named(expected))
    return _read(folder, expected)


def _restore_model(
    folder: pathlib.Path, config: LlamaConfig, dtype: np.dtype, scan_layers: bool, quantise: bool
) -> PyTree:
    """`_restore` a layer at a time, each straight to its place, so that the model is never in memory twice.

    ``quantise``: what was saved as floats becomes int8.
    """
    expected = llama_params.abstract_params(config, dtype=dtype)
    if quantise:  # rounded once, from what was saved
        floats = llama_params.abstract_params(config)["layers"]
        expected["layers"] = {
            index: layer | {name: floats[index][name] for name in int8.MATRICES}
            for index, layer in expected["layers"].items()
        }
    _check_shapes(folder, _named(expected))
    layers = expected.pop("layers")
    params, stacked = {**_read(folder, expected), "layers": {}}, {}
    for index, shapes in layers.items():
        layer = _read(folder, {"layers": {index: shapes}})["layers"][index]
        if quantise:
            layer = int8.quantised({"layers": {index: layer}})["layers"][index]
        if not scan_layers:
            params["layers"][index] = layer
            continue
        for name, leaf in layer.items():
            if name not in stacked:  # pages that are not written yet take no memory
                stacked[name] = llama_params.aligned((config.num_layers, *leaf.shape), np.dtype(leaf.dtype))
            stacked[name][index] = leaf
        del layer, leaf  # before the next one is read
    if scan_layers:
        params["layers"] = jax.tree.map(jax.device_put, stacked)
    return params


def _check_shapes(folder: pathlib.Path, expected: Mapping[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        try:
            saved = checkpointer.metadata(folder.absolute()).item_metadata
            shapes = {name: tuple(entry.shape) for name, entry in saved.items()}
        except Exception as error:  # orbax raises many kinds for a damaged directory
            raise ValueError(f"{folder} is damaged or not an orbax checkpoint: {error}") from error
    for name in sorted(shapes.keys() | expected.keys()):
        if name not in shapes or name not in expected or shapes[name] != expected[name].shape:
            needed = expected[name].shape if name in expected else "no such weight"
            raise ValueError(f"{folder}: weight {name} is {shapes.get(name, 'missing')}, the model needs {needed}")


def _read(folder: pathlib.Path, expected: PyTree) -> PyTree:
    """The weights that have a place in this part of the tree."""
    import orbax.checkpoint as ocp

    here = jnp.zeros(()).sharding
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here) for name, leaf in _named(expected).items()
    }
    options = ocp.args.PyTreeRestore(
        targets, ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=True
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            restored = checkpointer.restore(folder.absolute(), options)
        except Exception as error:
            raise ValueError(f"{folder} is damaged: {error}") from error
    if sum(leaf.nbytes for leaf in restored.values()) > _MUCH:
        gc.collect()  # what orbax read into hangs in cycles of references
    return jax.tree.unflatten(jax.tree.structure(expected), [restored[name] for name in _named(expected)])


def _named(params: PyTree) -> dict[str, jax.Array]:
    """The leaves by their path, e.g. layers.10.qkv, in the tree's own order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in paths}
