"""What a decoder checkpoint says about itself, as one hashable value.

>>> config = LlamaConfig(320, hidden_size=20, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
>>> config.head_dim, dataclasses.replace(config, head_dim=8).head_dim  # an explicit head_dim wins over hidden / heads
(5, 8)
>>> dataclasses.replace(config, windows=(0, 16)).layers[1].window  # the second layer sees 16 tokens
16
"""

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specjax.static import show

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
NORMS = ("before", "after", "both")
ACTIVATIONS = ("silu", "gelu_tanh")
QUANTIZATIONS = ("", "int8")
MOST_LAYERS = 10_000
_TYPES: dict[Any, tuple[Any, str]] = {  # of a field: what its value must be, in words
    int: (numbers.Integral, "a whole number"), int | None: ((numbers.Integral, type(None)), "a whole number or None"),
    float: (numbers.Real, "a number"), bool: (bool, "True or False"), str: (str, "a text"),
}  # fmt: skip


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, _TYPES[kind][0]) and isinstance(value, bool) == (kind is bool)


def _check_types(settings: Any) -> None:
    """Refuses numbers, names and truth values of another type, as a damaged file may have them."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.type in _TYPES and not _is(value, field.type):
            raise ValueError(f"{field.name} must be {_TYPES[field.type][1]}, got {show(value)}")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    ``default`` leaves them alone, ``linear`` divides them all by ``factor``, ``llama3`` divides only those whose
    wavelength is long against ``original_max_position_embeddings`` and blends in between (Llama 3.1), ``yarn`` blends
    along the index of the frequency and stretches cos and sin by ``attention_factor`` (Peng et al., YaRN,
    arXiv 2309.00071, 2023).

    Raises:
      ValueError: naming an unknown kind, or the field that does not fit the kind.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0  # yarn: frequencies that turn more often than this in the original context stay
    beta_slow: float = 1.0  # and those that turn less often are divided by the factor
    attention_factor: float = 0.0  # 0: 0.1 ln(factor) + 1, the paper's
    truncate: bool = True  # yarn: the ends of the blend are whole indices

    def __post_init__(self):
        _check_types(self)
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if self.kind != "default" and not self.factor > 0:
            raise ValueError(f"rope factor must be positive, got {self.factor}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "llama3 rope needs 0 < low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"yarn rope needs 0 < beta_slow < beta_fast, got {self.beta_slow} and {self.beta_fast}")
        if self.kind == "yarn" and not self.attention_factor >= 0:
            raise ValueError(f"attention_factor must be positive, or 0 for the paper's, got {self.attention_factor}")
        if self.kind in ("llama3", "yarn") and self.original_max_position_embeddings <= 0:
            raise ValueError(
                f"original_max_position_embeddings must be positive, got {self.original_max_position_embeddings}"
            )


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer."""

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling()

    def __post_init__(self):
        _check_types(self)


class LayerKind(NamedTuple):
    """In what the layers of one model differ."""

    window: int  # tokens a row sees, itself included; 0: all of them
    rope: Rope | None  # None: the layer knows no positions


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one decoder: a Llama, or one of the families that differ from it in what stands here.

    Which family sets what: `specjax.models.families`.

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
    qk_norm: bool = False  # an RMS norm over every head's query and key, before rope (Qwen 3, Gemma 3)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    qkv_bias: bool = False  # a bias of queries, keys and values alone (Qwen 2)
    wide_qk_norm: bool = False  # one norm over all heads' queries, one over all keys (OLMo 2)
    windows: tuple[int, ...] = ()  # sliding window of each layer, 0 for none; (): no layer has one
    ropes: tuple[Rope | None, ...] = ()  # of each layer; (): rope_theta and rope_scaling everywhere
    norms: str = "before"  # where attention and MLP are normed: their input, their output, or both
    norm_offset: float = 0.0  # added to the weights of every norm (Gemma stores w for a scale of 1 + w)
    activation: str = "silu"  # of the gate: silu or gelu_tanh
    embedding_scale: float = 1.0  # of the embeddings on their way into the stream
    query_scalar: float = 0.0  # scores are divided by its square root; 0: head_dim
    attention_softcap: float = 0.0  # scores become cap tanh(scores / cap); 0: they stay
    logit_softcap: float = 0.0  # likewise the logits
    quantization: str = ""  # "int8": the matrices of every layer, see specjax.models.int8
    num_tokens: int = 0  # ids from here on have no token (a padded vocabulary): their logits are -inf; 0: all have one

    def __post_init__(self):
        _check_types(self)
        if self.num_layers > MOST_LAYERS:
            raise ValueError(f"num_layers must be {MOST_LAYERS} at most, got {self.num_layers}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "max_position_embeddings", "rms_eps", "rope_theta", "embedding_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("query_scalar", "attention_softcap", "logit_softcap"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be positive, or 0 for none, got {getattr(self, name)}")
        if not 0 <= self.num_tokens <= self.vocab_size:
            raise ValueError(f"num_tokens must be 0 to vocab_size ({self.vocab_size}), got {self.num_tokens}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})")
        for name, known in (("norms", NORMS), ("activation", ACTIVATIONS), ("quantization", QUANTIZATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not supported; supported: {', '.join(known)}")
        if self.qk_norm and self.wide_qk_norm:
            raise ValueError("qk_norm and wide_qk_norm are both set: a model has one or the other")
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
        if not all(_is(end, int) for end in self.eos_ids):
            raise ValueError(f"eos_ids must be whole numbers, got {show(self.eos_ids)}")
        self._per_layer()

    def _per_layer(self):
        """Checks what is given per layer; equal models get equal values."""
        for name in ("windows", "ropes"):
            values = tuple(getattr(self, name))
            if values and len(values) != self.num_layers:
                raise ValueError(f"{name} has {len(values)} entries for num_layers={self.num_layers}")
            object.__setattr__(self, name, values)
        if any(window < 0 for window in self.windows):
            raise ValueError(f"windows must be 0 (none) or positive, got {self.windows}")
        if not any(self.windows):
            object.__setattr__(self, "windows", ())
        if self.ropes == (Rope(self.rope_theta, self.rope_scaling),) * self.num_layers:
            object.__setattr__(self, "ropes", ())

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rope(self) -> Rope:
        """Of every layer that has none of its own."""
        return Rope(self.rope_theta, self.rope_scaling)

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """What sets each layer apart."""
        windows, ropes = self.windows or (0,) * self.num_layers, self.ropes or (self.rope,) * self.num_layers
        return tuple(map(LayerKind, windows, ropes))


def for_tokens(config: LlamaConfig, tokenizer: Any) -> LlamaConfig:
    """The configuration of a model with this tokenizer (None: only ids): behind its last token, and behind the last id
    that ends a text, a vocabulary may be padded to a round number. An earlier bound does not count."""
    if tokenizer is None:
        return config
    used = max([tokenizer.vocab_size, *(1 + end for end in config.eos_ids if 0 <= end < config.vocab_size)])
    return dataclasses.replace(config, num_tokens=0 if used >= config.vocab_size else used)


def check_ends(ends: Iterable[Any], vocab_size: int, source: str) -> None:
    """Refuses ids of a checkpoint that are to end a text and that the model cannot say.

    Raises:
      ValueError: naming the file and the id.
    """
    for end in ends:
        if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < vocab_size:
            raise ValueError(f"{source}: no text could end with the id {show(end)}: the vocabulary has 0 to "
                             f"{vocab_size - 1}; correct it there")  # fmt: skip


def from_json(settings: Mapping[str, Any]) -> LlamaConfig:
    """The inverse of ``dataclasses.asdict`` after a way through JSON."""
    nested: dict[str, Any] = {"rope_scaling": RopeScaling(**settings["rope_scaling"])}
    if "ropes" in settings:  # files of older versions have none
        nested["ropes"] = tuple(
            rope and Rope(rope["theta"], RopeScaling(**rope["scaling"])) for rope in settings["ropes"]
        )
    return LlamaConfig(**{**settings, **nested})
