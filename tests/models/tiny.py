"""Tiny checkpoints with every size different, written byte by byte so that no reader is tested against itself."""

import json
import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).resolve().parent.parent / "data"
TINY_MODELS = DATA / "tiny_models"

# Nothing is square: q is [32, 20], k and v [16, 20], o [20, 32].
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 20, 4, 2, 8, 28, 40, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": FFN,
    "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def shapes(layers=LAYERS, tied=False):
    """Hugging Face names and shapes of the tiny model, spelled out."""
    result = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        result["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(layers):
        result |= {
            f"model.layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"model.layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"model.layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
            f"model.layers.{i}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return result


def tensors(seed=0, layers=LAYERS, tied=False):
    """Random float32 tensors under Hugging Face names."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes(layers, tied).items()}


def in_turns(tensors, *blocks):
    """Rows of matrices, so many of each in turn, as the rows of one."""
    return np.stack([
        x[turn * size + row]
        for turn in range(len(tensors[0]) // blocks[0]) for x, size in zip(tensors, blocks) for row in range(size)
    ])  # fmt: skip


def write_directory(path, weights=None, files=1, **overrides):
    """A Hugging Face directory, its tensors dealt out over ``files`` safetensors files."""
    weights = tensors() if weights is None else weights
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | overrides))
    if files == 1:
        save_file(weights, path / "model.safetensors")
        return path
    weight_map = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


# --- GGUF --------------------------------------------------------------------------------------------------------

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q2_K": 10, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
WORDS = ["<|end|>", "<|user|>", "<|stop|>", "a", "b", "c", "Ġ", "Ġa", "ab", *(chr(ord("d") + i) for i in range(22)),
         *"0123456789"[:9]]
METADATA = {
    "general.architecture": "llama", "llama.block_count": LAYERS, "llama.context_length": 64,
    "llama.embedding_length": HIDDEN, "llama.feed_forward_length": FFN, "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS, "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM, "llama.rope.dimension_count": HEAD_DIM,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0, "llama.vocab_size": VOCAB,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (VOCAB - 3), "tokenizer.ggml.merges": ["Ġ a", "a b"],
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
}
assert len(WORDS) == VOCAB


def gguf_name(name):
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def permuted(rows, heads):
    """What llama.cpp's converter does to q and k, one row at a time: row j of a head's half h goes to 2 j + h."""
    half = rows.shape[0] // heads // 2
    result = np.empty_like(rows)
    for head in range(heads):
        for h in range(2):
            for j in range(half):
                result[head * 2 * half + 2 * j + h] = rows[head * 2 * half + h * half + j]
    return result


def gguf_tensors(weights, permute=True):
    """Hugging Face tensors as the float32 entries of a GGUF file."""
    result = {}
    for name, array in weights.items():
        if permute and ".q_proj." in name:
            array = permuted(array, HEADS)
        if permute and ".k_proj." in name:
            array = permuted(array, KV_HEADS)
        result[gguf_name(name)] = ("F32", array.shape, array.astype("<f4").tobytes())
    return result


def _string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value):
    """(type number, bytes) of a metadata value."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    kind = _value(value[0])[0]
    return 9, struct.pack("<IQ", kind, len(value)) + b"".join(_value(item)[1] for item in value)


def write_gguf(path, entries=None, metadata=METADATA, **changes):
    """A GGUF file of (type name, row-major shape, bytes) entries; a change to None removes a metadata entry."""
    entries = gguf_tensors(tensors()) if entries is None else entries
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        header += _string(key) + struct.pack("<I", kind) + data
    data = b""
    for name, (kind, shape, raw) in entries.items():
        data += b"\0" * (-len(data) % 32)
        header += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", TYPE_IDS[kind], len(data))
        data += raw
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path
