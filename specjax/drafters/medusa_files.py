"""Medusa heads on disk, in the layout their authors publish: ``config.json`` and ``medusa_lm_head.safetensors``.

    ours                     theirs, [out, in]                (an optional prefix ``medusa_head.`` before each)
    heads/i/blocks/j/weight  i.j.linear.weight
    heads/i/blocks/j/bias    i.j.linear.bias
    heads/i/projection       i.N.weight, N = number of blocks; no head has one where the target's is shared

``config.json`` has ``medusa_num_heads`` and ``medusa_num_layers``. Sizes come from the tensors; heads without a
projection, which are ours, have ``vocab_size`` there too. Some published files hold more heads than their config says;
all of them are read.
"""

import json
import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.drafters.medusa import MedusaConfig
from specjax.drafters.tensors import Shapes, check_names, one_file, write_file
from specjax.models.huggingface import read_json
from specjax.models.llama_params import weight_dtype
from specjax.static import show, whole
from specjax.types import PyTree

FILE = "medusa_lm_head.safetensors"
_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def recognises(path: pathlib.Path) -> bool:
    """Whether a directory holds Medusa heads."""
    file = path / "config.json"
    return file.exists() and "medusa_num_heads" in read_json(file)


def read_medusa(path: str | pathlib.Path, *, dtype: Any = jnp.float32) -> tuple[MedusaConfig, PyTree]:
    """Reads heads, strictly by name.

    Args:
      path: a directory.
      dtype: float32 or bfloat16, of the weights.

    Raises:
      FileNotFoundError: no config.json or no safetensors file (a ``.pt`` file has to be converted first).
      ValueError: tensors that are missing, surplus or of another shape than the others call for; a config that says
        nothing about Medusa.
    """
    path, dtype = pathlib.Path(path), weight_dtype(dtype)
    source, settings = str(path / "config.json"), read_json(path / "config.json")
    for key in ("medusa_num_heads", "medusa_num_layers"):
        if key not in settings:
            raise ValueError(f"{source}: {key} is missing, so these are no Medusa heads")
        whole(f"{source}: {key}", settings[key], 0)
    name = FILE if (path / FILE).exists() or not (path / "model.safetensors").exists() else "model.safetensors"
    found, read = one_file(path / name)
    config, names = _config(found, settings, str(path / name))
    sources = {ours: names.get(theirs, theirs) for ours, theirs in _layout(config).items()}
    shapes = {sources[ours]: shape for ours, shape in _shapes(config).items()}
    check_names(found, shapes, str(path / name))

    def tensor(*ours):
        return jnp.asarray(read(sources[ours]).astype(dtype))

    heads = {}
    for i in range(config.num_heads):
        heads[i] = {} if config.shared else {"projection": tensor(i, "projection")}
        blocks = {j: {kind: tensor(i, j, kind) for kind in ("weight", "bias")} for j in range(config.num_layers)}
        heads[i] |= {"blocks": blocks} if blocks else {}
    return config, {"heads": heads}


def _layout(config: MedusaConfig) -> dict[tuple, str]:
    """Our weights and their published names."""
    layout: dict[tuple, str] = {}
    for i in range(config.num_heads):
        for j in range(config.num_layers):
            layout[i, j, "weight"], layout[i, j, "bias"] = f"{i}.{j}.linear.weight", f"{i}.{j}.linear.bias"
        if not config.shared:
            layout[i, "projection"] = f"{i}.{config.num_layers}.weight"
    return layout


def _shapes(config: MedusaConfig) -> dict[tuple, tuple[int, ...]]:
    size = config.hidden_size
    kinds = {"weight": (size, size), "bias": (size,), "projection": (config.vocab_size, size)}
    return {ours: kinds[ours[-1]] for ours in _layout(config)}


def _config(found: Shapes, settings: dict[str, Any], source: str) -> tuple[MedusaConfig, dict[str, str]]:
    """Sizes from the tensors, and the full name of each short one."""
    names = {}
    for name in found:
        if match := _NAME.fullmatch(name):
            names[f"{match[1]}.{match[2]}.{match[3]}"] = name
    if not names:
        raise ValueError(f"{source}: no tensor is named like a Medusa head, 0.0.linear.weight; it has {show([*found])}")
    projections = [found[name] for short, name in names.items() if "linear" not in short]
    sizes = {"hidden_size": found[next(iter(names.values()))][-1]}
    if projections:
        sizes["vocab_size"] = projections[0][0]
    elif "vocab_size" not in settings:
        raise ValueError(f"{source} has no projections and config.json no vocab_size: give the target's there")
    for key, size in sizes.items():
        if settings.get(key, size) != size:
            raise ValueError(f"{source}: the tensors have {key} {size} and config.json says {settings[key]}")
    sizes = {key: settings[key] for key in ("vocab_size",) if key in settings} | sizes
    heads = max(settings["medusa_num_heads"], *(int(short.split(".")[0]) + 1 for short in names))
    return MedusaConfig(**sizes, num_heads=heads, num_layers=settings["medusa_num_layers"],
                        shared=not projections), names


def write_medusa(path: str | pathlib.Path, config: MedusaConfig, params: PyTree, *, target: str = "") -> None:
    """Writes ``config.json`` and ``medusa_lm_head.safetensors`` into a directory, which is made if need be.

    Args:
      target: what the published layout calls base_model_name_or_path.
    """
    path = pathlib.Path(path)
    tensors = {}
    for ours, theirs in _layout(config).items():
        head = params["heads"][ours[0]]
        leaf = head["projection"] if ours[-1] == "projection" else head["blocks"][ours[1]][ours[2]]
        tensors[theirs] = np.asarray(leaf)
    settings = {
        "medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, "base_model_name_or_path": target,
        "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    write_file(path / FILE, tensors)
