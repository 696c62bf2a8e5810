"""GGUF files: header, and tensors under Hugging Face names. Their configuration: `specjax.models.gguf_config`.

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

from specjax.models.families import BY_GGUF, Family
from specjax.models.llama_params import NORMS, Rows

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORM_NAMES = {"attn_norm": "input_norm", "post_attention_norm": "attention_norm", "ffn_norm": "post_norm",
               "post_ffw_norm": "mlp_norm"}  # theirs: ours
ROPE_FREQS = "rope_freqs.weight"  # Llama 3.1's frequency scaling, stored as a tensor


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
        self._family = BY_GGUF.get(self.architecture, BY_GGUF["llama"])  # another one is refused with its metadata
        names = {_hugging_face_name(name, self._family): name for name in self.tensors if name != ROPE_FREQS}
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

    def dequantized(self, name: str, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """A tensor under the file's own name as float32, in the file's row order, or some of its rows."""
        from gguf import GGMLQuantizationType, dequantize

        info = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.start)
        if len(info.shape) < 2:
            return dequantize(raw, GGMLQuantizationType[info.type])[rows]
        raw = raw.reshape(info.shape[0], -1)[rows]
        shape = (len(raw), *info.shape[1:])
        return dequantize(raw.reshape(math.prod(shape[:-1]), -1), GGMLQuantizationType[info.type]).reshape(shape)

    def rows(self, name: str) -> Rows:
        """A tensor under its Hugging Face name as float32, in Hugging Face order, to be read a few rows at a time."""
        theirs = self._names[name]
        order = np.arange(self.shapes[name][0])
        if self._family.permuted and re.search(r"\.self_attn\.[qk]_proj\.", name):
            heads = self.metadata[f"{self.architecture}.attention.head_count"]
            if ".k_proj." in name:
                heads = self.metadata.get(f"{self.architecture}.attention.head_count_kv", heads)
            order = unpermute(order, heads)
        # The converter has added the offset, e.g. the 1 of Gemma's 1 + w.
        added = self._family.constants.get("norm_offset", 0.0) if name.endswith("norm.weight") else 0.0

        def take(start: int, stop: int) -> np.ndarray:
            few = self.dequantized(theirs, order[start:stop])
            return few - np.float32(added) if added else few

        return Rows(self.shapes[name], take)

    def read(self, name: str) -> np.ndarray:
        """A tensor under its Hugging Face name as float32, rows in Hugging Face order."""
        return self.rows(name)[:]


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the converter's interleaving of rows [heads * D, ...]: within a head, pairs (i, i + D/2) lie side by side.

    >>> unpermute(np.array([0, 2, 1, 3]), 1).tolist()
    [0, 1, 2, 3]
    """
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str, family: Family) -> str:
    """The Hugging Face name of a tensor; one without a counterpart keeps its own and is refused as surplus later."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if not match:
        return _TOP_NAMES.get(name, name)
    norms = NORMS[family.constants.get("norms", "before")]
    theirs = _LAYER_NAMES.get(match[2]) or norms.get(_NORM_NAMES.get(match[2], ""))
    return f"model.layers.{match[1]}.{theirs}.{match[3]}" if theirs else name


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
