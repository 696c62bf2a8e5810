"""`load`: a model, its weights and its tokenizer, from a name, a file or a directory."""

import difflib
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import fetch, huggingface, llama, llama_params, orbax, tokenizer
from specjax.models.config import LlamaConfig
from specjax.models.gguf import GGUFFile
from specjax.models.gguf_config import config_of
from specjax.models.language_model import LanguageModel
from specjax.sharding import check, on_mesh, place, refuse, weight_sharding
from specjax.static import show
from specjax.types import PyTree

# Buffers that some checkpoints store and every model computes for itself.
_IGNORABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TensorSource(Protocol):
    """A checkpoint under Hugging Face names. Shapes are known before anything is read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray: ...


def load(name_or_path: str | pathlib.Path, *, dtype="float32", scan_layers: bool = False, mesh=None) -> LanguageModel:
    """Loads a language model.

    Args:
      name_or_path: one of
        - a name in `specjax.models.fetch.NAMED`, e.g. ``smollm2-135m-instruct``: fetched once, then offline
          (write ``./name`` for a directory of the same name);
        - a GGUF file;
        - a directory in the Hugging Face layout, or one that `specjax.models.save` wrote;
        - ``organisation/name`` on the Hugging Face hub, if ``huggingface_hub`` is installed.
      dtype: of the weights, "float32" or "bfloat16".
      scan_layers: one traced layer scanned over stacked weights, instead of unrolled layers.
      mesh: devices it is shared out over, see `specjax.sharding.make_mesh`; each matrix goes to them as it is read.

    Raises:
      FileNotFoundError: if there is nothing at the path, or a part of it is missing; the message says what.
      ValueError: for anything in the files that is not understood: the message names the tensor, key or type.
    """
    dtype = _dtype_name(dtype)
    check(mesh)
    if not isinstance(name_or_path, (str, os.PathLike)) or not os.fspath(name_or_path):
        raise ValueError(
            f"name_or_path={show(name_or_path)}: give a known name ({', '.join(fetch.NAMED)}), "
            "a GGUF file or a directory"
        )
    if isinstance(name_or_path, str) and name_or_path in fetch.NAMED:
        return _load_gguf(fetch.fetch(name_or_path), dtype, scan_layers, mesh)

    path = pathlib.Path(name_or_path).expanduser()
    if path.is_dir():
        if (path / orbax.MANIFEST).exists():
            lm = orbax.load(path, dtype=dtype, scan_layers=scan_layers)
            return lm if mesh is None else place(mesh, lm)
        if (path / "config.json").exists():
            return _load_directory(path, dtype, scan_layers, mesh)
        raise FileNotFoundError(
            f"the directory {path} has neither config.json (Hugging Face layout) nor {orbax.MANIFEST} (ours)"
        )
    if path.is_file():
        with open(path, "rb") as file:
            magic = file.read(4)
        if magic == b"GGUF" or path.suffix == ".gguf":
            return _load_gguf(path, dtype, scan_layers, mesh)
        raise ValueError(f"{path} is not a GGUF file; apart from those, `load` reads directories with a config.json")
    if isinstance(name_or_path, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name_or_path):
        return _load_directory(huggingface.download(name_or_path), dtype, scan_layers, mesh)
    near = difflib.get_close_matches(path.name.lower(), fetch.NAMED, n=1)
    raise FileNotFoundError(
        f"{name_or_path} is neither a file nor a directory nor a known name ({', '.join(fetch.NAMED)})"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )


def _dtype_name(dtype: Any) -> str:
    try:
        name = dtype if isinstance(dtype, str) or dtype is None else jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {show(dtype)}; weights are loaded as 'float32' or 'bfloat16'")
    return name


def _load_gguf(path: pathlib.Path, dtype: str, scan_layers: bool, mesh: Any) -> LanguageModel:
    file = GGUFFile(path)
    config = config_of(file)
    text = tokenizer.from_gguf(file.metadata, str(path))
    model, params = _placed(file, config, str(path), dtype, scan_layers, mesh)
    return LanguageModel(model, params, text, config, file.metadata.get("tokenizer.chat_template"), config.eos_ids)


def _load_directory(path: pathlib.Path, dtype: str, scan_layers: bool, mesh: Any) -> LanguageModel:
    config = huggingface.config_of_directory(path)
    tensors = huggingface.SafetensorsFiles(path)
    eos_id = config.eos_ids[0] if config.eos_ids else None
    text = tokenizer.from_directory(path, bos_id=config.bos_id, eos_id=eos_id)
    template = huggingface.chat_template_of(path)
    model, params = _placed(tensors, config, str(path), dtype, scan_layers, mesh)
    return LanguageModel(model, params, text, config, template, config.eos_ids)


def _placed(tensors: TensorSource, config: LlamaConfig, source: str, dtype: str, scan_layers: bool, mesh: Any):
    """Model and parameters, on a mesh if there is one; a matrix lies whole only in host memory, one at a time."""
    model = llama.model(config, dtype=dtype, scan_layers=scan_layers)
    if mesh is None:
        return model, strict_params(tensors, config, source=source, dtype=dtype, scan_layers=scan_layers)
    refuse(mesh, config)

    def put(path, weight):
        return jax.device_put(weight, weight_sharding(mesh, path, weight.shape))

    params = strict_params(tensors, config, source=source, dtype=dtype, scan_layers=scan_layers, put=put)
    params = jax.tree_util.tree_map_with_path(put, params)  # of stacked layers; the others are there already
    return on_mesh(mesh, model), params


def strict_params(
    tensors: TensorSource, config: LlamaConfig, *, source: str, dtype="float32", scan_layers: bool = False, put=None
) -> PyTree:
    """Parameters from exactly the tensors that the configuration calls for: the only way weights come in.

    ``put`` is that of `llama_params.fill`.
    Names and shapes are compared before anything is allocated; then one tensor after the other is read and converted.
    A tied model may come with a head of its own only if it is the embedding, bit for bit.

    Raises:
      ValueError: listing tensors that are missing, surplus or of another shape.
    """
    needed = llama_params.tensor_shapes(config)
    if found := complaints(tensors.shapes, config):
        shown = found[:20] + ([f"... and {len(found) - 20} more"] if len(found) > 20 else [])
        matching = sum(tuple(tensors.shapes.get(name, ())) == shape for name, shape in needed.items())
        lines = "\n  ".join(shown)
        raise ValueError(f"{source}: {matching} of {len(needed)} tensors fit the configuration\n  {lines}")
    tied_head = config.tie_embeddings and _HEAD in tensors.shapes
    if tied_head and not np.array_equal(_bits(tensors.read(_HEAD)), _bits(tensors.read(_EMBEDDING))):
        raise ValueError(f"{source}: tie_word_embeddings is set, yet {_HEAD} differs from {_EMBEDDING}")
    return llama_params.params_from_tensors(
        config, lambda name, shape: tensors.read(name), dtype=jnp.dtype(dtype), scan_layers=scan_layers,
        put=put,
    )  # fmt: skip


def complaints(shapes: Mapping[str, tuple[int, ...]], config: LlamaConfig) -> list[str]:
    """What keeps tensors of these shapes from being the model of a configuration, a line each; nothing is read."""
    needed = llama_params.tensor_shapes(config)
    found = {name: tuple(shape) for name, shape in shapes.items() if not _IGNORABLE.fullmatch(name)}
    if config.tie_embeddings and found.get(_HEAD) == needed[_EMBEDDING]:
        del found[_HEAD]  # it may be repeated
    return [
        *(f"missing: {name} {shape}" for name, shape in needed.items() if name not in found),
        *(f"not part of the model: {name} {shape}" for name, shape in found.items() if name not in needed),
        *(f"{name} has shape {found[name]}, the configuration needs {shape}"
          for name, shape in needed.items() if found.get(name, shape) != shape),
    ]


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)
