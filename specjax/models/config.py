"""What a Llama-family checkpoint says about itself, as one hashable value.

>>> config = LlamaConfig(320, hidden_size=20, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
>>> config.head_dim, dataclasses.replace(config, head_dim=8).head_dim  # an explicit head_dim wins over hidden / heads
(5, 8)
"""

import dataclasses

ROPE_KINDS = ("default", "linear", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    ``default`` leaves them alone, ``linear`` divides them all by ``factor``, ``llama3`` divides only those whose
    wavelength is long against ``original_max_position_embeddings`` and blends in between (Llama 3.1).

    Raises:
      ValueError: naming an unknown kind, or the field that does not fit the kind.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if self.kind != "default" and not self.factor > 0:
            raise ValueError(f"rope factor must be positive, got {self.factor}")
        if self.kind == "llama3":
            if not 0 < self.low_freq_factor < self.high_freq_factor:
                raise ValueError(
                    "llama3 rope needs 0 < low_freq_factor < high_freq_factor, got "
                    f"{self.low_freq_factor} and {self.high_freq_factor}"
                )
            if self.original_max_position_embeddings <= 0:
                raise ValueError(
                    f"original_max_position_embeddings must be positive, got {self.original_max_position_embeddings}"
                )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one Llama-family model.

    Raises:
      ValueError: naming the field that is not positive, does not divide, or is odd where a pair is needed.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0  # 0: hidden_size / num_heads
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int = 2048
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMS norm over every head's query and key, before rope (Qwen 3)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "max_position_embeddings", "rms_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})")
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"head_dim is not given and hidden_size ({self.hidden_size}) is not a multiple of "
                    f"num_heads ({self.num_heads})"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.head_dim < 0:
            raise ValueError(f"head_dim must be positive, got {self.head_dim}")
        object.__setattr__(self, "eos_ids", tuple(self.eos_ids))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
