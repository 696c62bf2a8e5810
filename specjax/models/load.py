"""`load`: a model, its weights and its tokenizer, from a name, a file or a directory."""

import dataclasses
import difflib
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from specjax.models import fetch, huggingface, int8, llama, llama_params, orbax, tokenizer
from specjax.models.config import LlamaConfig, for_tokens
from specjax.models.gguf import GGUFFile
from specjax.models.gguf_config import config_of
from specjax.models.language_model import LanguageModel
from specjax.models.progress import told
from specjax.sharding import check, on_mesh, putting, refuse
from specjax.static import show
from specjax.types import Model, PyTree

# Buffers that some checkpoints store and every model computes for itself.
_IGNORABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_ROWS = 1024  # compared at a time
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TensorSource(Protocol):
    """A checkpoint under Hugging Face names. Shapes are known before anything is read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def rows(self, name: str) -> "np.ndarray | llama_params.Rows": ...


class _How(NamedTuple):
    """The arguments of `load` that say how."""

    dtype: str
    scan_layers: bool
    mesh: Any
    quantization: str
    progress: bool


def load(
    name_or_path: str | pathlib.Path, *, dtype="float32", scan_layers: bool = False, mesh=None,
    quantize: str | None = None, progress: bool = True,
) -> LanguageModel:  # fmt: skip
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
      quantize: "int8" rounds the matrices of every layer to int8 as they are read, see `specjax.models.int8`: a quarter
        of their memory in float32, half in bfloat16, and another target, to which speculation is as faithful as to
        any. None keeps them.
      progress: a bar on stderr, if that is a terminal and tqdm is installed.

    Raises:
      FileNotFoundError: if there is nothing at the path, or a part of it is missing; the message says what.
      ValueError: for anything in the files that is not understood: the message names the tensor, key or type; for an
        argument that is not one of those above.
    """
    for name, flag in (("scan_layers", scan_layers), ("progress", progress)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}={show(flag)}: must be True or False")
    how = _How(_dtype_name(dtype), scan_layers, mesh, int8.checked_kind(quantize), progress)
    check(mesh)
    if not isinstance(name_or_path, (str, os.PathLike)) or not os.fspath(name_or_path):
        raise ValueError(
            f"name_or_path={show(name_or_path)}: give a known name ({', '.join(fetch.NAMED)}), "
            "a GGUF file or a directory"
        )
    if isinstance(name_or_path, str) and name_or_path in fetch.NAMED:
        return _load_gguf(fetch.fetch(name_or_path), how)

    path = pathlib.Path(name_or_path).expanduser()
    if path.is_dir():
        if (path / orbax.MANIFEST).exists():
            return orbax.load(
                path, dtype=how.dtype, scan_layers=scan_layers, quantization=how.quantization, mesh=mesh,
                progress=progress,
            )  # fmt: skip
        if (path / "config.json").exists():
            return _load_directory(path, how)
        raise FileNotFoundError(
            f"the directory {path} has neither config.json (Hugging Face layout) nor {orbax.MANIFEST} (ours)"
        )
    if path.is_file():
        with open(path, "rb") as file:
            magic = file.read(4)
        if magic == b"GGUF" or path.suffix == ".gguf":
            return _load_gguf(path, how)
        raise ValueError(f"{path} is not a GGUF file; apart from those, `load` reads directories with a config.json")
    if isinstance(name_or_path, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name_or_path):
        return _load_directory(huggingface.download(name_or_path), how)
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


def _load_gguf(path: pathlib.Path, how: _How) -> LanguageModel:
    file = GGUFFile(path)
    config = dataclasses.replace(config_of(file), quantization=how.quantization)
    text = tokenizer.from_gguf(file.metadata, str(path))
    config = for_tokens(config, text)
    template = file.metadata.get("tokenizer.chat_template")
    for name in [name for name in file.metadata if name.startswith("tokenizer.")]:
        del file.metadata[name]  # 40 MB of Gemma's, which would lie beside the weights
    model, params = _placed(file, config, str(path), how)
    return LanguageModel(model, params, text, config, template, config.eos_ids)


def _load_directory(path: pathlib.Path, how: _How) -> LanguageModel:
    config = dataclasses.replace(huggingface.config_of_directory(path), quantization=how.quantization)
    tensors = huggingface.SafetensorsFiles(path)
    eos_id = config.eos_ids[0] if config.eos_ids else None
    text = tokenizer.from_directory(path, bos_id=config.bos_id, eos_id=eos_id)
    template = huggingface.chat_template_of(path)
    config = for_tokens(config, text)
    model, params = _placed(tensors, config, str(path), how)
    return LanguageModel(model, params, text, config, template, config.eos_ids)


def _placed(tensors: TensorSource, config: LlamaConfig, source: str, how: _How) -> tuple[Model, PyTree]:
    """Model and parameters, on a mesh if there is one; a weight lies whole only in host memory, one at a time."""
    if how.mesh is not None:
        refuse(how.mesh, config)
    params = strict_params(
        tensors, config, source=source, dtype=how.dtype, scan_layers=how.scan_layers, put=putting(how.mesh),
        progress=how.progress,
    )  # fmt: skip
    model = llama.model(config, dtype=how.dtype, scan_layers=how.scan_layers)
    return model if how.mesh is None else on_mesh(how.mesh, model), params


def strict_params(
    tensors: TensorSource, config: LlamaConfig, *, source: str, dtype="float32", scan_layers: bool = False, put=None,
    progress: bool = False,
) -> PyTree:  # fmt: skip
    """Parameters from exactly the tensors that the configuration calls for: the only way weights come in.

    ``put`` is that of `llama_params.fill`, ``progress`` that of `load`.
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
    check_tied(tensors, config, source)
    with told(lambda name, shape: tensors.rows(name), needed, progress) as tensor:
        return llama_params.params_from_tensors(
            config, tensor, dtype=jnp.dtype(dtype), scan_layers=scan_layers, put=put
        )


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


def check_tied(tensors: TensorSource, config: LlamaConfig, source: str) -> None:
    """Refuses a tied model with a head of its own that is not the embedding.

    Raises:
      ValueError: naming both tensors.
    """
    if config.tie_embeddings and _HEAD in tensors.shapes and not _same(tensors.rows(_HEAD), tensors.rows(_EMBEDDING)):
        raise ValueError(f"{source}: tie_word_embeddings is set, yet {_HEAD} differs from {_EMBEDDING}")


def _same(a, b) -> bool:
    """Whether two tensors are equal bit for bit, read a few rows at a time."""
    def bits(tensor, start):
        return np.ascontiguousarray(tensor[start : start + _ROWS]).view(np.uint8)

    return all(np.array_equal(bits(a, start), bits(b, start)) for start in range(0, a.shape[0], _ROWS))
