"""Shapes of published models, for what is compiled or timed without their weights."""

from specjax.models.config import LlamaConfig, RopeScaling
from specjax.models.families import BY_NAME, fields, windows

# vocabulary, hidden, ffn, layers, heads, key heads: from each model's config.json
_LLAMA = {"rope_theta": 500000.0, "max_position_embeddings": 8192}
_QWEN3 = {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 40960, "qk_norm": True, "rms_eps": 1e-6}


def _gemma3(hidden: int, ffn: int, layers: int, heads: int, key_heads: int, head_dim: int, window: int) -> LlamaConfig:
    family = BY_NAME["gemma3_text"]
    return LlamaConfig(
        262144, hidden, ffn, layers, heads, key_heads, head_dim=head_dim, rope_theta=1e6, tie_embeddings=True,
        max_position_embeddings=32768, windows=windows(family, layers, window), **fields(family, hidden),
    )  # fmt: skip


CONFIGS = {
    "llama3-8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, **_LLAMA),
    "llama3-70b": LlamaConfig(128256, 8192, 28672, 80, 64, 8, **_LLAMA),
    "llama3-1b": LlamaConfig(
        128256, 2048, 8192, 16, 32, 8, **_LLAMA, tie_embeddings=True,
        rope_scaling=RopeScaling("llama3", 32.0, original_max_position_embeddings=8192),
    ),
    "qwen3-0.6b": LlamaConfig(151936, 1024, 3072, 28, 16, 8, tie_embeddings=True, **_QWEN3),
    "qwen3-8b": LlamaConfig(151936, 4096, 12288, 36, 32, 8, **_QWEN3),
    "qwen3-32b": LlamaConfig(151936, 5120, 25600, 64, 64, 8, **_QWEN3),
    "gemma3-270m": _gemma3(640, 2048, 18, 4, 1, 256, 512),
    "gemma3-1b": _gemma3(1152, 6912, 26, 4, 1, 256, 512),
    "gemma3-12b": _gemma3(3840, 15360, 48, 16, 8, 256, 1024),
    "smollm2-135m": LlamaConfig(49152, 576, 1536, 30, 9, 3, rope_theta=1e5, max_position_embeddings=8192,
                                tie_embeddings=True),
}  # fmt: skip


def shape(text: str) -> LlamaConfig:
    """A name of `CONFIGS`, or vocabulary,hidden,ffn,layers,heads,key heads.

    Raises:
      ValueError: neither; sizes that are no model. Names the text.
    """
    if text in CONFIGS:
        return CONFIGS[text]
    parts = text.split(",")
    if len(parts) != 6 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        names = ", ".join(sorted(CONFIGS))
        raise ValueError(f"{text}: give one of {names}, or vocabulary,hidden,ffn,layers,heads,key heads")
    vocab, hidden, ffn, layers, heads, key_heads = map(int, parts)
    try:
        return LlamaConfig(vocab, hidden, ffn, layers, heads, key_heads)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None
