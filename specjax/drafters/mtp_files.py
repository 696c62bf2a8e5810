"""Multi-token prediction modules on disk, in the layout of the speculators library: ``config.json`` with
``speculators_model_type`` "mtp", and safetensors; names of tensors: `specjax.drafters.mtp`.

The layout has one module, applied again and again, which feeds back what its final norm gives; embedding and head are
the target's and not in the file. The file does not say which hidden state of the target it reads: L + 1, the one after
the final norm, unless ``feature_layers`` is given. Several modules are written with further ``mtp_layers.i`` and
``num_nextn_predict_layers``, and raw feedback as ``norm_output`` false, which only this library reads.
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp

from specjax.drafters.mtp import MTPConfig, sources
from specjax.drafters.tensors import check_names, write_file
from specjax.models import llama_params
from specjax.models.huggingface import SafetensorsFiles, parse_config, read_json, settings_of
from specjax.static import show
from specjax.types import PyTree

_READ = {
    "speculators_model_type", "transformer_layer_config", "num_nextn_predict_layers", "norm_output", "feature_layers",
}  # fmt: skip
_HARMLESS = {
    "architectures", "auto_map", "speculators_config", "speculators_version", "transformers_version", "dtype",
    "torch_dtype", "model_type", "tie_word_embeddings", "_name_or_path",
}  # fmt: skip


def recognises(path: pathlib.Path) -> bool:
    """Whether a directory holds multi-token prediction modules."""
    file = path / "config.json"
    return file.exists() and read_json(file).get("speculators_model_type") == "mtp"


def config_of(
    settings: dict[str, Any], source: str = "config.json", *, feature_layers: tuple[int, ...] | None = None
) -> MTPConfig:
    """A ``config.json`` as an MTPConfig.

    Args:
      settings: the file.
      source: what to call it in messages.
      feature_layers: the hidden state of the target that is read; default L + 1, of the target's L layers that
        ``transformer_layer_config`` counts (it is the target's own).

    Raises:
      ValueError: naming the key that is missing, or unknown and switched on.
    """
    for key, value in settings.items():
        if key not in _READ and key not in _HARMLESS and value:
            raise ValueError(f"{source}: {key} = {show(value)} is not supported: unknown, it may change the model")
    if settings.get("transformer_layer_config") is None:
        raise ValueError(f"{source}: transformer_layer_config is missing")
    inner = dict(settings["transformer_layer_config"])
    depth = parse_config(inner, source=f"{source}, transformer_layer_config").num_layers
    layers = parse_config(inner | {"num_hidden_layers": 1, "layer_types": None})
    layers = dataclasses.replace(layers, bos_id=None, eos_ids=(), pad_id=None)  # the target's affair
    said = settings.get("feature_layers")
    return MTPConfig(
        layers, tuple(feature_layers or said or (depth + 1,)),
        num_modules=settings.get("num_nextn_predict_layers") or 1, norm_output=settings.get("norm_output", True),
    )  # fmt: skip


def read_mtp(
    path: str | pathlib.Path, *, feature_layers: tuple[int, ...] | None = None, dtype: Any = jnp.float32
) -> tuple[MTPConfig, PyTree]:
    """Reads modules, strictly by name.

    Args:
      path: a directory.
      feature_layers: see `config_of`.
      dtype: float32 or bfloat16, of the weights.

    Raises:
      FileNotFoundError: no config.json or no safetensors file.
      ValueError: tensors that are missing, surplus or of another shape; keys that are missing or not supported.
    """
    path = pathlib.Path(path)
    config = config_of(read_json(path / "config.json"), str(path / "config.json"), feature_layers=feature_layers)
    files, tree = SafetensorsFiles(path), sources(config)
    for name, tensor in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
        if tensor not in files.shapes:
            del tree[name]
    check_names(files.shapes, llama_params.shapes_of(tree), str(path))
    return config, llama_params.fill(tree, lambda name, shape: files.read(name), dtype)


def write_mtp(path: str | pathlib.Path, config: MTPConfig, params: PyTree, *, target: str = "") -> None:
    """Writes ``config.json`` and ``model.safetensors`` into a directory, which is made if need be.

    Args:
      target: name or path of the target, for the record.
    """
    path = pathlib.Path(path)
    tree = {name: leaf for name, leaf in sources(config).items() if name in params}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    settings = {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "tie_word_embeddings": False,
        "num_nextn_predict_layers": config.num_modules, "norm_output": config.norm_output,
        "feature_layers": list(config.feature_layers),
        "speculators_config": {
            "algorithm": "mtp", "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": settings_of(config.layers),
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    write_file(path / "model.safetensors", llama_params.spill(tree, {name: params[name] for name in tree}))
