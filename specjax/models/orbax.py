"""Checkpoints of our own: an orbax tree of weights with configuration, tokenizer and chat template beside it.

    PATH/specjax.json     configuration, chat template, end tokens, special tokens; sizes and checksums of weight files
    PATH/tokenizer.json   the tokenizer, if the model has one
    PATH/params/          orbax; one array per weight, named by its place in the unrolled tree, e.g. layers.10.qkv

On disk layers are always unrolled and every array is addressed by its name, so neither key order, nor the number of
devices, nor how layers were run when it was saved matters to who reads it.
"""

import contextlib
import dataclasses
import json
import pathlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax import processes
from specjax.models import directory, huggingface, llama, llama_params, tokenizer
from specjax.models.config import LlamaConfig, check_ends, for_tokens, from_json
from specjax.models.language_model import LanguageModel, checked
from specjax.models.progress import told
from specjax.sharding import on_mesh, putting, refuse
from specjax.static import show
from specjax.types import PyTree

MANIFEST = "specjax.json"
_FORMAT = 3
_FORMATS = (1, 2, 3)  # that are read; in the first the tensors of qkv and gate_up are side by side and not in turns
_CHUNK = 2**22  # bytes of an array that are written, and read, at a time
_BLOCK = 2**22  # bytes of a file that are summed at a time
_THREADS = 4  # that sum files
_WHY = "is the file damaged, or written by a newer version of specjax?"
T = TypeVar("T")


def save(path: str | pathlib.Path, lm: LanguageModel, *, overwrite: bool = False) -> None:
    """Writes a loaded model so that `specjax.load` gives it back bit for bit.

    The directory appears whole or not at all: everything is written next to it and renamed at the end. Of several
    processes all come here, each gets the whole of the weights into host memory, and the first writes.

    Raises:
      FileExistsError: if there is something at the path, unless ``overwrite`` and it is a checkpoint or empty.
      TypeError: if the model's configuration is not one of ours, so that `load` could not rebuild the model.
      ValueError: if path is no path or lm no language model, as when the two are swapped; if an id that ends a text is
        outside the vocabulary.
    """
    directory.by_first(path, overwrite, writer(lm))


def writer(lm: LanguageModel) -> Callable[[pathlib.Path], None]:
    """What writes a model into a directory. Of several processes all come here: each gets the whole of the weights."""
    params = processes.local(lm.params) if isinstance(lm, LanguageModel) else None
    return lambda folder: _save(folder, checked("lm", lm)._replace(params=params))


def _save(folder: pathlib.Path, lm: LanguageModel) -> None:
    if not isinstance(lm.config, LlamaConfig):
        raise TypeError(f"only models with a LlamaConfig can be saved, not one with {type(lm.config).__name__}")
    check_ends(lm.eos_ids, lm.config.vocab_size, "lm")
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
    _write(folder / "params", _named(params))
    manifest |= _facts(folder / "params")
    if text is not None:
        (folder / "tokenizer.json").write_text(text.to_json(), encoding="utf-8")
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def load(
    path: pathlib.Path, *, dtype="float32", scan_layers: bool = False, quantization: str = "", mesh=None,
    progress: bool = False,
) -> LanguageModel:
    """What `save` wrote, int8 weights as int8. Called by `specjax.load`, whose arguments these are.

    Raises:
      ValueError: naming the path, if it is incomplete or damaged, or the weight that is missing or of another shape.
    """
    manifest, config = read_manifest(path)
    stored = llama_params.abstract_params(config, dtype=dtype)
    quantise = bool(quantization) and not config.quantization
    config = dataclasses.replace(config, quantization=config.quantization or quantization)
    if mesh is not None:
        refuse(mesh, config)
    with checked_files(path / "params", manifest):
        params = _restore(path / "params", stored, manifest["format"], config, scan_layers=scan_layers,
                          quantise=quantise, put=putting(mesh), progress=progress)  # fmt: skip
    text = read_tokenizer(path, manifest)
    config = for_tokens(config, text)
    model = llama.model(config, dtype=dtype, scan_layers=scan_layers)
    return LanguageModel(
        model=model if mesh is None else on_mesh(mesh, model),
        params=params,
        tokenizer=text,
        config=config,
        chat_template=manifest["chat_template"],
        eos_ids=tuple(manifest["eos_ids"]),
    )


def read_manifest(path: pathlib.Path) -> tuple[dict[str, Any], LlamaConfig]:
    """What `save` wrote beside the weights, and the configuration in it.

    Raises:
      ValueError: naming the file, and the entry that is missing or not understood.
    """
    file, none = path / MANIFEST, type(None)
    manifest = huggingface.read_json(file)
    if not known_format(manifest) or manifest.get("family") != "llama":
        raise ValueError(
            f"{file} has format {manifest.get('format')!r} and family {manifest.get('family')!r}; "
            f"this version of specjax reads formats {_FORMATS}, family 'llama'"
        )
    check_files(file, manifest)
    check_entries(file, manifest, config=dict, eos_ids=list, tokenizer=(dict, none), chat_template=(str, none))
    if (ids := manifest["tokenizer"]) is not None:
        check_entries(file, ids, bos_id=(int, none), eos_id=(int, none))
        manifest["tokenizer"] = {name: ids[name] for name in ("bos_id", "eos_id")}
    config = understood(file, lambda: from_json(manifest["config"]))
    check_ends(manifest["eos_ids"], config.vocab_size, str(file))
    return manifest, config


def read_tokenizer(path: pathlib.Path, manifest: Mapping[str, Any]) -> tokenizer.Tokenizer | None:
    """The tokenizer, None if the model was saved without one.

    Raises:
      FileNotFoundError, ValueError: naming the file that is missing or not understood.
    """
    if manifest["tokenizer"] is None:
        return None
    file = path / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(f"{path} is incomplete: {file.name} is missing")
    return tokenizer.from_json(huggingface.read_text(file), source=str(file), **manifest["tokenizer"])


def check_entries(file: pathlib.Path, manifest: Mapping[str, Any], **kinds: Any) -> None:
    """Refuses a manifest in which an entry is missing or of another type, naming both."""
    for key, kind in kinds.items():
        if key not in manifest or not isinstance(manifest[key], kind):
            what = f"= {show(manifest[key])} is not understood" if key in manifest else "is missing"
            raise ValueError(f"{file}: {key} {what}; {_WHY}")


def known_format(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest has a format that is read; True is not 1."""
    return type(manifest.get("format")) is int and manifest["format"] in _FORMATS


def check_files(file: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    """Refuses a manifest in which a weight file has a size, or a checksum, that is none; names entry and value."""
    kinds = {"files": 2**63}
    if "crc32" in manifest:  # older versions wrote none
        kinds["crc32"] = 2**32
    check_entries(file, manifest, **dict.fromkeys(kinds, dict))
    if not manifest["files"]:
        raise ValueError(f"{file}: files = {{}} names no file of weights; {_WHY}")
    for key, limit in kinds.items():
        for name in manifest["files"]:
            value = manifest[key].get(name)
            if type(value) is not int or not 0 <= value < limit:
                what = f"= {show(value)} is no {'number of bytes' if key == 'files' else 'CRC-32'}"
                raise ValueError(f"{file}: {key}[{name!r}] {what if name in manifest[key] else 'is missing'}; {_WHY}")


def understood(file: pathlib.Path, make: Callable[[], T]) -> T:
    """What ``make`` makes of a manifest's configuration; a ValueError that names the file if it cannot."""
    try:
        return make()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: config is not understood ({error}); {_WHY}") from error


def _facts(folder: pathlib.Path) -> dict[str, dict[str, int]]:
    """What a manifest says of the weight files, by name: how long they are, and their checksums."""
    sizes = _sizes(folder)
    return {"files": sizes, "crc32": _sums(folder, sizes)}


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _sums(folder: pathlib.Path, names: Collection[str]) -> dict[str, int]:
    """The CRC-32 of files; threads, since zlib lets others run meanwhile."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _crc32(folder / name), names)))


def _crc32(file: pathlib.Path) -> int:
    crc, block = 0, bytearray(_BLOCK)
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            crc = zlib.crc32(memoryview(block)[:count], crc)
    return crc


def check_sizes(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    """Compares the lengths of weight files with those that a manifest gives.

    Raises:
      FileNotFoundError, ValueError: naming the file that is missing or of another length.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder.parent} is incomplete: the directory {folder.name} is missing")
    found = _sizes(folder)
    for name, size in manifest["files"].items():
        if name not in found:
            raise FileNotFoundError(f"{folder} is incomplete: the file {name} is missing")
        if found[name] != size:
            raise ValueError(f"{folder} is damaged: {name} has {found[name]} bytes, {size} were written")


@contextlib.contextmanager
def checked_files(folder: pathlib.Path, manifest: Mapping[str, Any]) -> Iterator[None]:
    """Compares the weight files with what a manifest says of them: orbax would take changed bytes for weights.

    Their bytes are summed while the block reads them, so that the disk is read once; what the sums say goes before what
    the block raises.

    Raises:
      FileNotFoundError, ValueError: naming the file that is missing or has changed.
    """
    check_sizes(folder, manifest)
    sums = manifest.get("crc32", {})  # older versions wrote none
    pool, failed = ThreadPoolExecutor(_THREADS), None
    try:
        found = {name: pool.submit(_crc32, folder / name) for name in manifest["files"] if name in sums}
        try:
            yield
        except Exception as error:
            failed = error
        for name, crc in found.items():
            if crc.result() != sums[name]:
                raise ValueError(
                    f"{folder} is damaged: {name} has other bytes than were written (by their CRC-32)"
                ) from failed
        if failed is not None:
            raise failed
    finally:
        pool.shutdown(cancel_futures=True)


def _write(folder: pathlib.Path, weights: Mapping[str, Any]) -> None:
    """Named weights as orbax, in chunks: who reads them never holds more than a few beside what they become."""
    import orbax.checkpoint as ocp

    how = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK) for name in weights}
    alone = ocp.options.MultiprocessingOptions(active_processes={0} if jax.process_count() > 1 else None)
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        checkpointer.save(folder, weights, save_args=how)


def _restore(
    folder: pathlib.Path, expected: PyTree, form: int, layers: LlamaConfig | None, *, scan_layers: bool = False,
    quantise: bool = False, put=None, progress: bool = False,
) -> PyTree:  # fmt: skip
    """The saved weights in the shapes and types of ``expected``, wherever they were saved from.

    ``form``: the format they were saved in; those of older ones are put in order, for which ``layers`` is the
    configuration. ``scan_layers``, ``quantise`` and ``put`` are those of `llama_params`; ``expected`` is unrolled in
    any case.
    """
    named = _named(expected)
    _check_shapes(folder, named, form)
    leaves, where = jax.tree.flatten(expected)
    tree = jax.tree.unflatten(where, [
        llama_params.Source((name,), (leaf.shape,), leaf.dtype) for name, leaf in zip(named, leaves)
    ])  # fmt: skip
    tree = llama_params.stacked(tree) if scan_layers else tree
    with told(_reader(folder, form, layers), {name: leaf.shape for name, leaf in named.items()}, progress) as tensor:
        return llama_params.fill(tree, tensor, put=put, quantise=quantise)


def _turned(name: str, form: int) -> bool:
    """Before format 3 matrices were [in, out], all but DFlash's ``above``, which was [V, R] then too."""
    return form < 3 and not name.endswith("above")


def _check_shapes(folder: pathlib.Path, expected: Mapping[str, Any], form: int) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        try:
            saved = checkpointer.metadata(folder.absolute()).item_metadata
            shapes = {name: tuple(entry.shape) for name, entry in saved.items()}
            shapes = {name: shape[:: -1 if _turned(name, form) else 1] for name, shape in shapes.items()}
            types = {name: jnp.dtype(entry.dtype) for name, entry in saved.items()}
        except Exception as error:  # orbax raises many kinds for a damaged directory
            raise ValueError(f"{folder} is damaged or not an orbax checkpoint: {error}") from error
    for name in sorted(shapes.keys() | expected.keys()):
        if name not in shapes or name not in expected or shapes[name] != expected[name].shape:
            needed = expected[name].shape if name in expected else "no such weight"
            raise ValueError(f"{folder}: weight {name} is {shapes.get(name, 'missing')}, the model needs {needed}")
        wanted = expected[name].dtype
        if jnp.issubdtype(types[name], jnp.floating) != jnp.issubdtype(wanted, jnp.floating):
            raise ValueError(f"{folder}: weight {name} has the type {types[name]}, the model needs {wanted}")


def _reader(
    folder: pathlib.Path, form: int, layers: LlamaConfig | None
) -> Callable[[str, tuple[int, ...]], "np.ndarray | llama_params.Rows"]:
    """``(name, shape) -> array``. What orbax wrote is read by the library that it wrote it with: orbax itself
    has an array of the file's type beside the one that is asked for, and twice the largest array is a lot."""
    import tensorstore

    def read(view: Any) -> np.ndarray:
        try:
            return view.read().result()
        except Exception as error:  # tensorstore raises many kinds
            raise ValueError(f"{folder} is damaged: {error}") from error

    def tensor(name: str, shape: tuple[int, ...]) -> "np.ndarray | llama_params.Rows":
        kvstore = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/", "path": f"{name}/"}
        try:
            array = tensorstore.open({"driver": "auto", "kvstore": kvstore}, open=True, read=True).result()
        except Exception as error:
            raise ValueError(f"{folder} is damaged: {error}") from error
        chunk: Any = array.chunk_layout.read_chunk.shape
        order = None if form != 1 or layers is None else llama_params.side_by_side(layers, name)
        if order is not None:
            array = array[..., np.argsort(order)]
        if _turned(name, form) and len(shape) == 2:
            array, chunk = array.T, chunk[::-1]
        if len(shape) != 2 or chunk[0] >= shape[0]:
            return read(array)
        return llama_params.Rows(shape, lambda start, stop: read(array[start:stop]), chunk[0])

    return tensor


def _named(params: PyTree) -> dict[str, Any]:
    """The leaves by their path, e.g. layers.10.qkv, in the tree's own order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in paths}
