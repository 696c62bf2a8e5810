"""EAGLE-3 heads on disk: the layout of the speculators library (read and written), and the older one of the authors
(read). ``config.json`` beside safetensors; names of tensors: `specjax.drafters.eagle`.

    speculators    config.json has ``speculators_config``; sizes of the layers under ``transformer_layer_config``
    older          config.json is that of a Llama with ``draft_vocab_size``; the first layer may be called ``midlayer``

In both, d2t [M] holds offsets: draft token i is target token i + d2t[i]. t2d [V], if there, marks the same tokens. A
file whose ids do not ascend gets the rows of its head reordered. Layer ids count the target's layers that have been
applied, as ``feature_layers`` does; older files often do not say them, and no default could be told from a wrong one.
"""

import dataclasses
import json
import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.drafters.eagle import VARIANTS, EagleConfig, sources
from specjax.drafters.tensors import check_names, write_file
from specjax.models import llama_params
from specjax.models.huggingface import SafetensorsFiles, parse_config, read_json, settings_of
from specjax.static import show
from specjax.types import PyTree

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_HEAD = "specjax_head"  # ours: "target" says that lm_head is not there, but rows of the target's
_READ = {
    "speculators_model_type", "transformer_layer_config", "draft_vocab_size", "target_hidden_size", _LAYERS, _HEAD,
    *VARIANTS,
}  # fmt: skip
_HARMLESS = {
    "architectures", "auto_map", "speculators_config", "speculators_version", "transformers_version", "dtype",
    "torch_dtype", "model_type", "tie_word_embeddings", "embed_requires_grad", "_name_or_path",
}  # fmt: skip
_IGNORABLE = re.compile(r"(midlayer|layers\.\d+)\.self_attn\.rotary_emb\.inv_freq")


def recognises(path: pathlib.Path) -> bool:
    """Whether a directory holds an EAGLE-3 head, in either layout."""
    file = path / "config.json"
    if not file.exists():
        return False
    settings = read_json(file)
    if "speculators_config" in settings or "speculators_model_type" in settings:
        return settings.get("speculators_model_type") == "eagle3"
    return "draft_vocab_size" in settings


def config_of(
    settings: dict[str, Any], source: str = "config.json", *, feature_layers: tuple[int, ...] | None = None
) -> EagleConfig:
    """A ``config.json`` as an EagleConfig.

    Args:
      settings: the file.
      source: what to call it in messages.
      feature_layers: for files that do not say which layers of the target they read; must agree with those that do.

    Raises:
      ValueError: naming the key that is missing, unknown and switched on, or contradicts ``feature_layers``.
    """
    if "transformer_layer_config" in settings or "speculators_config" in settings:
        layers, variants = _speculators(settings, source)
    else:
        layers, variants = _older(settings, source)
    said = settings.get(_LAYERS) or (settings.get("eagle_config") or {}).get(_LAYERS)
    layer_ids = feature_layers if said is None else tuple(said)
    if layer_ids is None:
        raise ValueError(
            f"{source}: {_LAYERS} is missing, so the file does not say which layers of the target it reads: pass "
            "feature_layers=(..), counting applied layers; the authors' code reads (2, L // 2, L - 3) of L layers"
        )
    if feature_layers is not None and layer_ids != tuple(feature_layers):
        raise ValueError(f"{source}: {_LAYERS} = {said} and feature_layers={feature_layers} contradict each other")
    reduced = settings.get("draft_vocab_size") or layers.vocab_size
    layers = dataclasses.replace(layers, bos_id=None, eos_ids=(), pad_id=None)  # the target's affair
    return EagleConfig(
        layers, layer_ids,
        draft_vocab_size=0 if reduced == layers.vocab_size else reduced,
        target_hidden_size=settings.get("target_hidden_size") or 0, **variants,
    )  # fmt: skip


def _speculators(settings: dict[str, Any], source: str):
    kind = settings.get("speculators_model_type")
    if kind != "eagle3":
        raise ValueError(f"{source}: speculators_model_type {kind!r} is not 'eagle3'")
    for key, value in settings.items():
        if key not in _READ and key not in _HARMLESS and value:
            raise ValueError(f"{source}: {key} = {show(value)} is not supported: unknown, it may change the model")
    for key in ("transformer_layer_config", "draft_vocab_size", "norm_before_residual"):
        if settings.get(key) is None:
            raise ValueError(f"{source}: {key} is missing")
    layers = parse_config(dict(settings["transformer_layer_config"]), source=f"{source}, transformer_layer_config")
    # The other variants are younger than the layout: a file without the key is of before, when there was none.
    return layers, {name: settings.get(name) or False for name in VARIANTS}


def _older(settings: dict[str, Any], source: str):
    own = {"draft_vocab_size", "target_hidden_size", "eagle_config", _LAYERS, *VARIANTS}
    if settings.get("draft_vocab_size") is None:
        raise ValueError(f"{source}: draft_vocab_size is missing")
    nested = settings.get("eagle_config") or {}
    for key, value in nested.items():
        if key != _LAYERS and not (key == "use_aux_hidden_state" and value is True):
            raise ValueError(f"{source}: eagle_config.{key} = {show(value)} is not supported")
    inner = {key: value for key, value in settings.items() if key not in own}
    if inner.get("architectures") == ["LlamaForCausalLMEagle3"]:
        inner["architectures"] = ["LlamaForCausalLM"]
    return parse_config(inner, source=source), {name: settings.get(name) or False for name in VARIANTS}


def read_eagle(
    path: str | pathlib.Path, *, feature_layers: tuple[int, ...] | None = None, dtype: Any = jnp.float32
) -> tuple[EagleConfig, PyTree]:
    """Reads a head, strictly by name.

    Args:
      path: a directory.
      feature_layers: see `config_of`.
      dtype: float32 or bfloat16, of the weights.

    Raises:
      FileNotFoundError: no config.json or no safetensors file.
      ValueError: tensors that are missing, surplus or of another shape; keys that are missing or not supported; a
        vocabulary map that contradicts itself.
    """
    path = pathlib.Path(path)
    settings = read_json(path / "config.json")
    config = config_of(settings, str(path / "config.json"), feature_layers=feature_layers)
    files = SafetensorsFiles(path)
    names = {re.sub(r"^midlayer\.", "layers.0.", name): name for name in files.shapes if not _IGNORABLE.fullmatch(name)}
    found = {name: files.shapes[theirs] for name, theirs in names.items()}
    vocab = config.layers.vocab_size
    tree, columns = sources(config), config.num_columns
    if "embed_tokens.weight" not in found:
        del tree["embedding"]
    if settings.get(_HEAD) is not None:
        if settings[_HEAD] != "target":
            raise ValueError(f"{path / 'config.json'}: {_HEAD} = {show(settings[_HEAD])}: only 'target' is known")
        del tree["head"]
    needed = llama_params.shapes_of(tree)
    needed |= {"d2t": (columns,)} if config.draft_vocab_size or "d2t" in found else {}
    needed |= {"t2d": (vocab,)} if "t2d" in found else {}
    check_names(found, needed, str(path))
    params = llama_params.fill(tree, lambda name, shape: files.read(names[name]), dtype)
    if "d2t" not in found:
        return config, params
    marks = files.indices("t2d").astype(bool) if "t2d" in found else None
    ids = _ids(files.indices("d2t").astype(np.int64), marks, vocab, str(path))
    order = np.argsort(ids, kind="stable")
    if not np.array_equal(order, np.arange(columns)) and "head" in params:
        params["head"] = params["head"][order]
    if config.draft_vocab_size:
        params["ids"] = jnp.asarray(ids[order], jnp.int32)
    return config, params


def _ids(offsets: np.ndarray, marks: np.ndarray | None, vocab: int, source: str) -> np.ndarray:
    """Target ids of the draft tokens, in the file's order."""
    ids = offsets + np.arange(len(offsets))
    wrong = [f"{count} twice" for count in ids[np.bincount(np.maximum(ids, 0))[np.maximum(ids, 0)] > 1][:1]]
    wrong += [f"{token}, of {vocab}" for token in ids[(ids < 0) | (ids >= vocab)][:1]]
    if wrong:
        raise ValueError(f"{source}: d2t, read as offsets, names token {wrong[0]}: it must name different tokens")
    if marks is not None and not np.array_equal(np.flatnonzero(marks), np.sort(ids)):
        raise ValueError(
            f"{source}: d2t, read as offsets, names the tokens {show(np.sort(ids).tolist())}, and t2d marks "
            f"{show(np.flatnonzero(marks).tolist())}: they must agree"
        )
    return ids


def write_eagle(path: str | pathlib.Path, config: EagleConfig, params: PyTree, *, target: str = "") -> None:
    """Writes ``config.json`` and ``model.safetensors`` in the layout of the speculators library.

    Args:
      path: a directory, which is made if need be.
      config, params: the head; an embedding or head that params does not have is not written, and the target's is used
        where it is loaded.
      target: name or path of the target, for the record.

    Raises:
      ValueError: a head of EAGLE-1, which this layout has no place for.
    """
    if config.version != 3:
        raise ValueError(f"an EAGLE-{config.version} head has no place in this layout: save it with format='orbax'")
    path = pathlib.Path(path)
    tree = {name: leaf for name, leaf in sources(config).items() if name in params}
    tensors: dict[str, Any] = llama_params.spill(tree, {name: params[name] for name in tree})
    if config.draft_vocab_size:
        ids = np.asarray(params["ids"], np.int64)
        tensors |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(config.layers.vocab_size), ids)}
    method = {"proposal_type": "greedy", "speculative_tokens": 4, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    other = config.target_hidden_size != config.layers.hidden_size
    settings = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "tie_word_embeddings": False,
        _LAYERS: list(config.feature_layers), "draft_vocab_size": config.num_columns,
        "target_hidden_size": config.target_hidden_size if other else None,
        **{name: getattr(config, name) for name in VARIANTS},
        **({} if "head" in params else {_HEAD: "target"}),
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": settings_of(config.layers),
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    write_file(path / "model.safetensors", tensors)
