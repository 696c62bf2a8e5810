"""GGUF files: header, tensors under Hugging Face names, configuration.

The header is read here rather than by ``gguf.GGUFReader``: that takes two seconds on a vocabulary of 49,152, and of a
truncated file it can only say that an array would not reshape. Dequantisation is the ``gguf`` package's.
"""

import math
import mmap
import pathlib
import re
import struct
from typing import Any, NamedTuple

import numpy as np

from specjax.models.config import LlamaConfig, RopeScaling

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
# llama.cpp's converter interleaves the two halves of every q and k head for these architectures and no others.
PERMUTED_ARCHITECTURES = frozenset({"llama"})

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"  # Llama 3.1's frequency scaling, stored as a tensor


class TensorInfo(NamedTuple):
    """One tensor as the header describes it."""

    type: str
    shape: tuple[int, ...]  # row-major: the reverse of the order in the file
    start: int  # absolute byte offset
    nbytes: int


class GGUFFile:
    """An open GGUF file: ``metadata`` (key -> value), ``tensors`` (name in the file -> TensorInfo).

    ``shapes`` and ``read`` speak Hugging Face names. The file is memory mapped: opening it reads the header only.

    Raises:
      ValueError: naming the file, and the tensor where there is one: not GGUF, truncated, a type that is not
        supported, a row length that is no multiple of the type's block.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        with open(self.path, "rb") as file:
            size = file.seek(0, 2)
            self._data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        cursor = _Cursor(self._data, self.path)
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError(f"{self.path} is not a GGUF file: it does not begin with the bytes 'GGUF'")
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version} is not supported (little-endian 2 and 3 are)")
        tensor_count, entry_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors = self._tensor_infos(cursor, tensor_count)
        names = {_hugging_face_name(name): name for name in self.tensors if name != _ROPE_FREQS}
        self._names = names
        self.shapes = {name: self.tensors[theirs].shape for name, theirs in names.items()}

    def _tensor_infos(self, cursor: "_Cursor", count: int) -> dict[str, TensorInfo]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        headers = []
        for _ in range(count):
            name = cursor.string()
            dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            headers.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        data_start = -(-cursor.position // alignment) * alignment

        infos = {}
        for name, shape, type_id, offset in headers:
            try:
                kind = GGMLQuantizationType(type_id)
            except ValueError:
                raise ValueError(f"{self.path}: tensor {name!r} has the unknown type number {type_id}") from None
            if kind.name not in SUPPORTED_TYPES:
                supported = ", ".join(SUPPORTED_TYPES)
                raise ValueError(
                    f"{self.path}: tensor {name!r} has type {kind.name}, which is not supported; supported: {supported}"
                )
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block:
                raise ValueError(
                    f"{self.path}: tensor {name!r} of type {kind.name} has shape {shape}, whose rows are no multiple "
                    f"of the type's block of {block}"
                )
            if name in infos:
                raise ValueError(f"{self.path}: tensor {name!r} is listed twice")
            infos[name] = TensorInfo(kind.name, shape, data_start + offset, math.prod(shape) // block * block_bytes)
        for name, info in sorted(infos.items(), key=lambda item: item[1].start):
            if info.start + info.nbytes > len(self._data):
                raise ValueError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {info.start + info.nbytes}, the file at "
                    f"{len(self._data)}"
                )
        return infos

    @property
    def architecture(self) -> str:
        """``general.architecture``, e.g. "llama"."""
        return self.metadata.get("general.architecture", "")

    def dequantized(self, name: str) -> np.ndarray:
        """A tensor under the file's own name as float32, in the file's row order."""
        from gguf import GGMLQuantizationType, dequantize

        info = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.start).reshape(*info.shape[:-1], -1)
        return dequantize(raw, GGMLQuantizationType[info.type]).reshape(info.shape)

    def read(self, name: str) -> np.ndarray:
        """A tensor under its Hugging Face name as float32, rows in Hugging Face order."""
        tensor = self.dequantized(self._names[name])
        if self.architecture in PERMUTED_ARCHITECTURES and re.search(r"\.self_attn\.[qk]_proj\.", name):
            heads = self.metadata[f"{self.architecture}.attention.head_count"]
            if ".k_proj." in name:
                heads = self.metadata.get(f"{self.architecture}.attention.head_count_kv", heads)
            tensor = unpermute(tensor, heads)
        return tensor


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the converter's interleaving of rows [heads * D, ...]: within a head, pairs (i, i + D/2) lie side by side.

    >>> unpermute(np.array([0, 2, 1, 3]), 1).tolist()
    [0, 1, 2, 3]
    """
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name of a tensor; one without a counterpart keeps its own and is refused as surplus later."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name, name)


class _Cursor:
    """Reads the header's little-endian values one after the other."""

    def __init__(self, data: Any, path: pathlib.Path):
        self.data, self.path, self.position = data, path, 0

    def take(self, count: int) -> int:
        """Advances by ``count`` bytes; returns where they start."""
        start = self.position
        if start + count > len(self.data):
            raise ValueError(f"{self.path} is truncated: it ends inside its header, at byte {len(self.data)}")
        self.position += count
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        return str(self.data[start : start + length], "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"{self.path}: unknown metadata type {kind} in the header")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            return list(struct.unpack_from(f"<{count}{code}", self.data, self.take(count * struct.calcsize(code))))
        return [self.value(item) for _ in range(count)]


# --- configuration -----------------------------------------------------------------------------------------------

# Entries under the architecture's prefix that are read below, or that do not change what the model computes.
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
}
_HARMLESS = {"rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"}
_NEUTRAL = {"attention.causal": True, "rope.scaling.attn_factor": 1.0, "logit_scale": 1.0}


def config_of(file: GGUFFile) -> LlamaConfig:
    """The configuration of a Llama-architecture file.

    Raises:
      ValueError: naming the architecture, or the entry that is missing or asks for something not implemented.
    """
    arch, metadata = file.architecture, file.metadata
    if arch != "llama":
        raise ValueError(f"{file.path}: architecture {arch!r} is not supported; supported: 'llama'")
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
    heads, hidden = entry("attention.head_count"), entry("embedding_length")
    head_dim = entry("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if entry(name, head_dim) != head_dim:
            raise ValueError(f"{file.path}: {arch}.{name} is {entry(name)}, only the head size {head_dim} is supported")
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return LlamaConfig(
        vocab_size=entry("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        hidden_size=hidden,
        intermediate_size=entry("feed_forward_length"),
        num_layers=entry("block_count"),
        num_heads=heads,
        num_kv_heads=entry("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_eps=_shortest(entry("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(entry("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file, entry, head_dim),
        max_position_embeddings=entry("context_length"),
        tie_embeddings="output.weight" not in file.tensors,  # GGUF's way to say so
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        pad_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )


def _refuse_unknown_entries(file: GGUFFile, arch: str) -> None:
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or name in _READ or name in _HARMLESS or not value or _NEUTRAL.get(name) == value:
            continue
        raise ValueError(f"{file.path}: {key} = {value!r} is not supported")


def _rope_scaling(file: GGUFFile, entry, head_dim: int) -> RopeScaling:
    kind = entry("rope.scaling.type", "linear")  # a factor without a type is linear, as older files have it
    factor = _shortest(entry("rope.scaling.factor", entry("rope.scale_linear", 1.0)))
    if kind not in ("none", "linear"):
        raise ValueError(f"{file.path}: rope scaling type {kind!r} is not supported; supported: none, linear")
    if _ROPE_FREQS in file.tensors:
        if kind == "linear" and factor != 1.0:
            raise ValueError(f"{file.path} has both linear rope scaling and the tensor {_ROPE_FREQS!r}")
        return _llama3_scaling(file, _shortest(entry("rope.freq_base", 10000.0)), head_dim)
    return RopeScaling("linear", factor) if kind == "linear" and factor not in (0.0, 1.0) else RopeScaling()


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling:
    """The parameters behind a tensor of per-frequency divisors, which must be those of Llama 3.1 to 3.3."""
    divisors = file.dequantized(_ROPE_FREQS)
    scaling = RopeScaling("llama3", _shortest(divisors.max()), 1.0, 4.0, 8192)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    ratio = scaling.original_max_position_embeddings / wavelengths
    smooth = np.clip((ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    expected = 1 / ((1 - smooth) / scaling.factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            f"{file.path}: the tensor {_ROPE_FREQS!r} holds other frequency factors than Llama 3's "
            f"(low 1, high 4, original length 8192), which is not supported"
        )
    return scaling


def _shortest(value: float) -> float:
    """A float32 of the header as the shortest decimal that means it: 1e-05 rather than 9.99999974e-06."""
    return float(str(np.float32(value)))
