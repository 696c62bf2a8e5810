"""DFlash and DSpark drafters on disk, in the layout of the speculators library: ``config.json``, ``model.safetensors``.

    ours               theirs, [out, in]
    fc, hidden_norm    fc.weight, hidden_norm.weight
    layers/i           layers.i.*, named as in a Qwen 3 or Llama checkpoint
    norm               norm.weight
    head               lm_head.weight                        of a reduced vocabulary
    ids                d2t [M] + 0, 1, 2, ..                 d2t holds offsets; t2d [V] marks the same tokens
    above, out         markov_head.markov_w1.weight [V, R], markov_head.markov_w2.weight [M, R]
    confidence         confidence_head.proj.weight [1, E + R], confidence_head.proj.bias [1]

``aux_hidden_state_layer_ids`` counts the target's layers that have been applied, as our ``feature_layers`` do. What a
file repeats of the target (embedding, final norm, a head over the whole vocabulary) is left out when it is the target's
own, and refused when it is not.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import parallel
from specjax.drafters.dflash import DFlashConfig
from specjax.drafters.tensors import check_names, write_file
from specjax.models import llama_params
from specjax.models.huggingface import SafetensorsFiles, parse_config, read_json, settings_of
from specjax.models.identity import equal
from specjax.models.language_model import LanguageModel
from specjax.models.llama_params import weight_dtype
from specjax.static import show
from specjax.types import PyTree

KINDS = ("dflash", "dspark")
_READ = {
    "speculators_model_type", "transformer_layer_config", "aux_hidden_state_layer_ids", "block_size", "mask_token_id",
    "sample_from_anchor", "draft_vocab_size", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "target_hidden_size",
}  # fmt: skip
_HARMLESS = {
    "architectures", "auto_map", "speculators_config", "speculators_version", "transformers_version", "dtype",
    "torch_dtype", "model_type", "tie_word_embeddings", "num_anchors", "max_anchors", "sliding_window_non_causal",
    "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma", "_name_or_path",
}  # fmt: skip
_NEUTRAL = {"projector_type": "dflash", "shift_label": False}


def recognises(path: pathlib.Path) -> bool:
    """Whether a directory holds a DFlash or DSpark drafter."""
    file = path / "config.json"
    return file.exists() and read_json(file).get("speculators_model_type") in KINDS


def config_of(settings: dict[str, Any], source: str = "config.json") -> DFlashConfig:
    """A ``config.json`` as a DFlashConfig; keys that are unknown and switched on are refused.

    Raises:
      ValueError: naming the key.
    """
    kind = settings.get("speculators_model_type")
    if kind not in KINDS:
        raise ValueError(f"{source}: speculators_model_type {kind!r} is not one of {', '.join(map(repr, KINDS))}")
    for key, value in settings.items():
        if key not in _READ and key not in _HARMLESS and value and _NEUTRAL.get(key) != value:
            raise ValueError(f"{source}: {key} = {show(value)} is not supported: unknown, it may change the model")
    needed = ("transformer_layer_config", "aux_hidden_state_layer_ids", "block_size", "mask_token_id")
    for key in needed:
        if settings.get(key) is None:
            raise ValueError(f"{source}: {key} is missing")
    layers = parse_config(dict(settings["transformer_layer_config"]), source=f"{source}, transformer_layer_config")
    width = settings.get("target_hidden_size") or layers.hidden_size
    if width != layers.hidden_size:
        raise ValueError(f"{source}: target_hidden_size = {width} and the draft layers have {layers.hidden_size}: a "
                         "drafter of another width than its target is not supported")
    reduced = settings.get("draft_vocab_size") or layers.vocab_size
    spark = kind == "dspark"
    rank = settings.get("markov_rank", 256 if spark else 0)
    confidence = settings.get("enable_confidence_head", spark)
    if rank and settings.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(f"{source}: markov_head_type = {settings['markov_head_type']!r} is not supported; supported: "
                         "'vanilla', the low-rank term of the token above")
    return DFlashConfig(
        layers, tuple(settings["aux_hidden_state_layer_ids"]), settings["mask_token_id"], settings["block_size"],
        sample_from_anchor=settings.get("sample_from_anchor", spark),
        draft_vocab_size=0 if reduced == layers.vocab_size else reduced, markov_rank=rank, confidence=confidence,
        confidence_with_markov=confidence and settings.get("confidence_head_with_markov", spark),
    )  # fmt: skip


def _sources(config: DFlashConfig) -> dict[str, Any]:
    """Our tree of weights with a `llama_params.Source` at every leaf; ``ids`` apart."""
    size, vocab, columns = config.layers.hidden_size, config.layers.vocab_size, config.num_columns

    def source(name, *shape):
        return llama_params.Source((name,), (shape,))

    tree: dict[str, Any] = {
        "fc": source("fc.weight", size, len(config.feature_layers) * size),
        "hidden_norm": source("hidden_norm.weight", size),
        "layers": jax.tree.map(
            lambda s: s._replace(names=tuple(name.removeprefix("model.") for name in s.names)),
            llama_params.sources(config.layers)["layers"], is_leaf=_is_source,
        ),
        "norm": source("norm.weight", size),
    }  # fmt: skip
    if config.draft_vocab_size:
        tree["head"] = source("lm_head.weight", columns, size)
    if config.markov_rank:
        tree["above"] = source("markov_head.markov_w1.weight", vocab, config.markov_rank)
        tree["out"] = source("markov_head.markov_w2.weight", columns, config.markov_rank)
    if config.confidence:
        width = size + (config.markov_rank if config.confidence_with_markov else 0)
        tree["confidence"] = source("confidence_head.proj.weight", 1, width)
        tree["confidence_bias"] = source("confidence_head.proj.bias", 1)
    return tree


def _is_source(node: Any) -> bool:
    return isinstance(node, llama_params.Source)


def _ours(name: str, array: np.ndarray) -> np.ndarray:
    """One published weight in our layout."""
    return array if name not in ("confidence", "confidence_bias") else array.reshape(array.shape[1:])


def _theirs(name: str, array: np.ndarray) -> np.ndarray:
    return array if name not in ("confidence", "confidence_bias") else array[None]


def read_dflash(
    path: str | pathlib.Path, *, target: LanguageModel | None = None, dtype: Any = jnp.float32
) -> tuple[DFlashConfig, PyTree]:
    """Reads a drafter, strictly by name.

    Args:
      path: a directory.
      target: the model it was made for; needed if the file repeats weights of it.
      dtype: float32 or bfloat16, of the weights.

    Raises:
      FileNotFoundError: no config.json or no safetensors file.
      ValueError: tensors that are missing, surplus or of another shape; settings that are not supported; a vocabulary
        map that contradicts itself; a copy of the target's weights that differs from them.
    """
    path, dtype = pathlib.Path(path), weight_dtype(dtype)
    config = config_of(read_json(path / "config.json"), str(path / "config.json"))
    files = SafetensorsFiles(path)
    sources, size, vocab = _sources(config), config.layers.hidden_size, config.layers.vocab_size
    needed = {name: shape for leaf in jax.tree.leaves(sources, is_leaf=_is_source)
              for name, shape in zip(leaf.names, leaf.shapes, strict=True)}
    copies = {"embed_tokens.weight": (vocab, size), "verifier_norm.weight": (size,)}
    if config.draft_vocab_size:
        needed |= {"d2t": (config.draft_vocab_size,), "t2d": (vocab,)}
        copies["verifier_lm_head.weight"] = (config.draft_vocab_size, size)
    else:
        copies |= {"lm_head.weight": (vocab, size), "verifier_lm_head.weight": (vocab, size)}
    needed |= {name: shape for name, shape in copies.items() if name in files.shapes}
    check_names(files.shapes, needed, str(path))
    ids = _ids(config, files, str(path))
    for name in copies.keys() & files.shapes.keys():
        _check_copy(name, files.read(name), target, ids, str(path))

    def leaf(where, source):
        name = where[-1].key
        joined = source.join([files.read(part) for part in source.names])
        return jnp.asarray(_ours(name, joined).astype(dtype, order="C"))  # a scalar stays one

    params = jax.tree_util.tree_map_with_path(leaf, sources, is_leaf=_is_source)
    return config, params if ids is None else params | {"ids": jnp.asarray(ids, jnp.int32)}


def _ids(config: DFlashConfig, files: SafetensorsFiles, source: str) -> np.ndarray | None:
    """Target ids of a reduced vocabulary from its offsets."""
    if not config.draft_vocab_size:
        return None
    offsets, marks = files.indices("d2t").astype(np.int64), files.indices("t2d").astype(bool)
    ids = offsets + np.arange(len(offsets))
    if not np.array_equal(np.flatnonzero(marks), ids):
        raise ValueError(
            f"{source}: d2t, read as offsets, names the tokens {show(ids.tolist())}, and t2d marks "
            f"{show(np.flatnonzero(marks).tolist())}: they must agree"
        )
    return ids


def _check_copy(
    name: str, array: np.ndarray, target: LanguageModel | None, ids: np.ndarray | None, source: str
) -> None:
    if target is None:
        raise ValueError(f"{source} has {name}, a copy of the target's: give target= so that it can be compared")
    theirs = {"embed_tokens.weight": target.params["embedding"], "verifier_norm.weight": target.params["final_norm"]}
    own = theirs[name] if name in theirs else parallel.projection(target)
    own = own if ids is None or own.ndim < 2 or name == "embed_tokens.weight" else own[ids]
    if not equal(own, array.astype(own.dtype)):
        raise ValueError(
            f"{source}: {name} {array.shape} is not the target's {own.shape}: the drafter was made for another "
            "target, or has weights of its own there, which is not supported"
        )


def write_dflash(path: str | pathlib.Path, config: DFlashConfig, params: PyTree, *, target: str = "") -> None:
    """Writes ``config.json`` and ``model.safetensors`` into a directory, which is made if need be.

    Args:
      target: name or path of the target, for the record.
    """
    path, tensors = pathlib.Path(path), {}

    def leaf(where, source, weight):
        array = _theirs(where[-1].key, np.asarray(weight))
        tensors.update(zip(source.names, source.part(array), strict=True))

    rest = {name: weight for name, weight in params.items() if name != "ids"}
    jax.tree_util.tree_map_with_path(leaf, _sources(config), rest, is_leaf=_is_source)
    if config.draft_vocab_size:
        ids = np.asarray(params["ids"], np.int64)
        tensors |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(config.layers.vocab_size), ids)}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_settings(config, target), indent=1), encoding="utf-8")
    write_file(path / "model.safetensors", tensors)


def _settings(config: DFlashConfig, target: str) -> dict[str, Any]:
    kind = "dspark" if config.markov_rank or config.confidence else "dflash"
    method = {"proposal_type": "greedy", "speculative_tokens": config.num_laws, "accept_tolerance": 0.0,
              "verifier_accept_k": 1}
    settings = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind, "aux_hidden_state_layer_ids": list(config.feature_layers),
        "block_size": config.block_size, "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor, "draft_vocab_size": config.num_columns,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": settings_of(config.layers),
    }  # fmt: skip
    if kind == "dspark":
        settings |= {"markov_rank": config.markov_rank, "markov_head_type": "vanilla",
                     "enable_confidence_head": config.confidence,
                     "confidence_head_with_markov": config.confidence_with_markov}
    return settings
