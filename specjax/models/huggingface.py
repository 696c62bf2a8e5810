"""Directories in the Hugging Face layout: config.json, safetensors, tokenizer.json, chat template."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.models import chat
from specjax.models.config import LlamaConfig, check_ends
from specjax.models.hf_config import parse_config, settings_of, token_ids
from specjax.models.llama_params import Rows
from specjax.static import show

__all__ = ["SafetensorsFiles", "chat_template_of", "config_of_directory", "download", "parse_config", "read_json",
           "settings_of"]

HUB_FILES = [  # what `load` reads, and nothing else is downloaded
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors.index.json", "model.safetensors", "model-*.safetensors",
]


class SafetensorsFiles:
    """The tensors of a directory, in one or many files: ``shapes`` from the headers, ``read`` one at a time.

    Raises:
      FileNotFoundError: if there is no safetensors file, or listing those that the index names and that are missing.
      ValueError: naming the file that is truncated or not safetensors, a tensor found twice, or one that the index
        promises and no file has.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        index = path / "model.safetensors.index.json"
        promised: dict[str, str] = read_json(index).get("weight_map", {}) if index.exists() else {}
        if not isinstance(promised, dict):
            raise ValueError(f"{index}: weight_map is {show(promised)}, not an object of tensors and their files")
        for tensor, name in promised.items():
            if not isinstance(name, str) or not name or pathlib.PurePath(name).name != name:
                raise ValueError(f"{index}: weight_map[{tensor!r}] is {name!r}, not the name of a file beside it")
        names = sorted(set(promised.values())) if index.exists() else ["model.safetensors"]
        missing = [name for name in names if not (path / name).exists()]
        if missing and not index.exists():
            other = " (only PyTorch files are there; convert them to safetensors)" if [*path.glob("*.bin")] else ""
            raise FileNotFoundError(f"{path} has neither model.safetensors nor model.safetensors.index.json{other}")
        if missing:
            raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}")
        self._where: dict[str, Any] = {}  # tensor -> open file
        self._file_of: dict[str, pathlib.Path] = {}
        for name in names:
            self._open(path / name)
        if lost := [name for name in promised if name not in self._where]:
            raise ValueError(f"{index} names tensors that no file has: {', '.join(lost)}")
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._where.items()}

    def _open(self, file: pathlib.Path) -> None:
        import safetensors

        try:
            opened = safetensors.safe_open(str(file), framework="numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if name in self._where:
                raise ValueError(f"tensor {name!r} is in {self._file_of[name].name} and in {file.name} of {self.path}")
            self._where[name], self._file_of[name] = opened, file

    def type_of(self, name: str) -> str:
        """The type a tensor is stored in, e.g. "BF16"."""
        return self._where[name].get_slice(name).get_dtype()

    def rows(self, name: str) -> "np.ndarray | Rows":
        """One tensor of weights, as `read` gives it, to be read a few rows at a time."""
        shape, part = self.shapes[name], self._where[name].get_slice(name)
        if len(shape) < 2:
            return self.read(name)
        return Rows(shape, lambda start, stop: self._numbers(name, lambda: part[start:stop]))

    def read(self, name: str) -> np.ndarray:
        """One tensor of weights, bit for bit as stored (bfloat16 as ml_dtypes.bfloat16).

        Raises:
          ValueError: naming a tensor that is no floating point numbers, or of a type that numpy cannot hold.
        """
        return self._numbers(name, lambda: self._where[name].get_tensor(name))

    def indices(self, name: str) -> np.ndarray:
        """One tensor of whole numbers or truth values, such as a map between vocabularies."""
        return self._where[name].get_tensor(name)

    def _numbers(self, name: str, read: Callable[[], np.ndarray]) -> np.ndarray:
        return numbers_of(self.type_of(name), name, self._file_of[name], read)


def numbers_of(kind: str, name: str, file: pathlib.Path, read: Callable[[], np.ndarray]) -> np.ndarray:
    """What ``read`` reads of a tensor that is stored in a type.

    Raises:
      ValueError: naming file, tensor and type if they are no floating point numbers, or some that numpy cannot hold.
    """
    check_type(kind, name, file)
    try:
        return read()
    except (AttributeError, TypeError, KeyError) as error:  # what safetensors raises for 8-bit floats
        raise ValueError(
            f"{file}: tensor {name!r} has the unsupported type {kind}; convert it to BF16, F16 or F32"
        ) from error


def check_type(kind: str, name: str, file: pathlib.Path) -> None:
    """Refuses weights that are not stored as floating point numbers: whole ones need a scale, which nothing here has.

    Raises:
      ValueError: naming file, tensor and type.
    """
    if not kind.startswith(("F", "BF")):
        raise ValueError(f"{file}: tensor {name!r} has the type {kind}; weights must be floating point numbers")


def read_text(file: pathlib.Path) -> str:
    """A text. Raises ValueError naming the file if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}") from error


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file if it is not one."""
    try:
        value = json.loads(read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not a JSON object")
    return value


def chat_template_of(path: pathlib.Path) -> str | None:
    """``chat_template.jinja`` if there is one, else the one in ``tokenizer_config.json``, else None."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    settings = path / "tokenizer_config.json"
    return chat.pick(read_json(settings).get("chat_template"), str(settings)) if settings.exists() else None


def config_of_directory(path: pathlib.Path) -> LlamaConfig:
    """The configuration, with the end tokens of ``generation_config.json`` where it has any."""
    file = path / "config.json"
    settings = read_json(file)
    generation = path / "generation_config.json"
    defaults = read_json(generation) if generation.exists() else {}
    eos = list(token_ids(defaults, "eos_token_id", str(generation)))
    given = defaults.get("eos_token_id") is not None
    config = parse_config(settings | {"eos_token_id": eos} if given else settings, source=str(file))
    check_ends(config.eos_ids, config.vocab_size, str(generation if given else file))
    return config


# --- the hub -----------------------------------------------------------------------------------------------------


def download(repository: str) -> pathlib.Path:
    """Local directory of a hub repository ("org/name"), with the files `load` reads.

    Raises:
      ImportError: if ``huggingface_hub`` is not installed, saying how to install it.
      OSError: if the download fails.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(
            f"no file or directory {repository!r}; to load it from the hub, `pip install huggingface_hub`"
        ) from None
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:
        raise OSError(f"no file or directory {repository!r}, and fetching it from the hub failed: {error}") from error
