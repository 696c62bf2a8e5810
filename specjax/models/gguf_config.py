"""The configuration that a GGUF file's metadata describes.

Entries under the architecture's prefix that are unknown and switched on are refused: they may change the mathematics.
"""

from typing import Any

import numpy as np

from specjax.models import families
from specjax.models.config import LlamaConfig, Rope, RopeScaling, check_ends
from specjax.models.families import BY_GGUF
from specjax.models.gguf import ROPE_FREQS, GGUFFile

# Entries under the architecture's prefix that are read below, or that do not change what the model computes.
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length",
}
_GEMMA = {"attention.sliding_window", "attention.sliding_window_pattern", "attn_logit_softcapping",
          "final_logit_softcapping", "rope.freq_base_swa"}
_OF = {"gemma2": _GEMMA, "gemma3": _GEMMA}
_HARMLESS = {"rope.scaling.finetuned", "tensor_data_layout"}
_NEUTRAL = {"attention.causal": True, "rope.scaling.attn_factor": 1.0, "logit_scale": 1.0}


def config_of(file: GGUFFile) -> LlamaConfig:
    """The configuration of a file of a known architecture.

    Raises:
      ValueError: naming the architecture, or the entry that is missing or asks for something not implemented.
    """
    arch, metadata = file.architecture, file.metadata
    if arch not in BY_GGUF:
        supported = ", ".join(map(repr, BY_GGUF))
        raise ValueError(f"{file.path}: architecture {arch!r} is not supported; supported: {supported}")
    if metadata.get("general.type", "model") != "model":
        raise ValueError(f"{file.path}: general.type is {metadata['general.type']!r}, not a whole model")
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{file.path} is one of split.count = {metadata['split.count']} parts; merge them first")

    def entry(name, *default):
        key = f"{arch}.{name}"
        if key not in metadata and not default:
            raise ValueError(f"{file.path}: the entry {key} is missing")
        value = metadata.get(key, *default)
        if isinstance(value, list):
            raise ValueError(f"{file.path}: {key} differs between layers, which is not supported")
        return value

    _refuse_unknown_entries(file, arch)
    family, layers = BY_GGUF[arch], entry("block_count")
    heads, hidden = entry("attention.head_count"), entry("embedding_length")
    head_dim = entry("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if entry(name, head_dim) != head_dim:
            raise ValueError(f"{file.path}: {arch}.{name} is {entry(name)}, only the head size {head_dim} is supported")
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    config = LlamaConfig(
        vocab_size=entry("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        hidden_size=hidden,
        intermediate_size=entry("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=entry("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_eps=_shortest(entry("attention.layer_norm_rms_epsilon")),
        max_position_embeddings=entry("context_length"),
        tie_embeddings="output.weight" not in file.tensors,  # GGUF's way to say so
        attention_bias="blk.0.attn_q.bias" in file.tensors and not family.constants.get("qkv_bias"),
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        pad_id=metadata.get("tokenizer.ggml.padding_token_id"),
        **_per_layer(file, family, entry, head_dim, layers),
        **(_gemma(arch, entry, head_dim, hidden // heads, layers) if arch in _OF else {}),
        **families.fields(family, hidden),
    )
    check_ends(config.eos_ids, config.vocab_size, str(file.path))
    return config


def _per_layer(file: GGUFFile, family: families.Family, entry, head_dim: int, layers: int) -> dict[str, Any]:
    """Windows and ropes. What llama.cpp has in its source and not in the file: Gemma's pattern and its base for layers
    with a window, SmolLM3's layers without rope."""
    rope = Rope(_shortest(entry("rope.freq_base", 10000.0)), _rope_scaling(file, entry, head_dim))
    windows, ropes = (), ()
    if family.period:
        family = family._replace(period=entry("attention.sliding_window_pattern", family.period))
        windows = families.windows(family, layers, entry("attention.sliding_window"))
    if family.gguf == "gemma3":
        local = Rope(_shortest(entry("rope.freq_base_swa", 10000.0)))
        ropes = tuple(local if window else rope for window in windows)
    if family.no_rope:
        ropes = tuple(rope if (index + 1) % family.no_rope else None for index in range(layers))
    return {"windows": windows, "ropes": ropes, "rope_theta": rope.theta, "rope_scaling": rope.scaling}


_WHOLE_HEADS = {("gemma2", 46), ("gemma3", 62)}  # layers of the 27B models


def _gemma(arch: str, entry, head_dim: int, per_head: int, layers: int) -> dict[str, float]:
    """Soft caps, and the scale of the scores, which no file has: in the 27B models it is hidden_size / num_heads."""
    caps = (50.0, 30.0) if arch == "gemma2" else (0.0, 0.0)
    return {
        "query_scalar": float(per_head if (arch, layers) in _WHOLE_HEADS else head_dim),
        "attention_softcap": float(entry("attn_logit_softcapping", caps[0])),
        "logit_softcap": float(entry("final_logit_softcapping", caps[1])),
    }


def _refuse_unknown_entries(file: GGUFFile, arch: str) -> None:
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or not value or name in _READ | _HARMLESS | _OF.get(arch, set()) or _NEUTRAL.get(name) == value:
            continue
        raise ValueError(f"{file.path}: {key} = {value!r} is not supported")


def _rope_scaling(file: GGUFFile, entry, head_dim: int) -> RopeScaling:
    kind = entry("rope.scaling.type", "linear")  # a factor without a type is linear, as older files have it
    factor = _shortest(entry("rope.scaling.factor", entry("rope.scale_linear", 1.0)))
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{file.path}: rope scaling type {kind!r} is not supported; supported: none, linear, yarn")
    if ROPE_FREQS in file.tensors:
        if kind != "none" and factor != 1.0:
            raise ValueError(f"{file.path} has both {kind} rope scaling and the tensor {ROPE_FREQS!r}")
        return _llama3_scaling(file, _shortest(entry("rope.freq_base", 10000.0)), head_dim)
    if kind == "yarn":
        original = entry("rope.scaling.original_context_length", entry("context_length"))
        return RopeScaling("yarn", factor, original_max_position_embeddings=original)
    return RopeScaling("linear", factor) if kind == "linear" and factor not in (0.0, 1.0) else RopeScaling()


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling:
    """The parameters behind a tensor of per-frequency divisors, which must be those of Llama 3.1 to 3.3."""
    divisors = file.dequantized(ROPE_FREQS)
    scaling = RopeScaling("llama3", _shortest(divisors.max()), 1.0, 4.0, 8192)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    ratio = scaling.original_max_position_embeddings / wavelengths
    smooth = np.clip((ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    expected = 1 / ((1 - smooth) / scaling.factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            f"{file.path}: the tensor {ROPE_FREQS!r} holds other frequency factors than Llama 3's "
            f"(low 1, high 4, original length 8192), which is not supported"
        )
    return scaling


def _shortest(value: float) -> float:
    """A float32 of the header as the shortest decimal that means it: 1e-05 rather than 9.99999974e-06."""
    return float(str(np.float32(value)))
