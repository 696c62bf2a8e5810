"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864, 2021) in the half-split layout of Hugging Face."""

import math

import jax.numpy as jnp
import numpy as np

from specjax.models.config import LlamaConfig, Rope, RopeScaling
from specjax.types import Array


def inverse_frequencies(config: LlamaConfig, rope: Rope | None) -> np.ndarray:
    """[D / 2] float64, radians per position, after scaling; zeros for a layer without positions.

    Raises ValueError if D is odd.
    """
    if config.head_dim % 2:
        raise ValueError(f"rope turns pairs: head_dim must be even, got {config.head_dim}")
    if rope is None:
        return np.zeros(config.head_dim // 2)
    scaling = rope.scaling
    inverse = rope.theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "llama3":
        # Frequencies that turn more than high_freq_factor times in the original context stay, those that turn fewer
        # than low_freq_factor times are divided by the factor, and those between are blended (Llama 3.1).
        turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return keep * inverse + (1 - keep) * inverse / scaling.factor
    if scaling.kind == "yarn":
        keep = _yarn_keep(config.head_dim, rope.theta, scaling)
        return keep * inverse + (1 - keep) * inverse / scaling.factor
    return inverse


def _yarn_keep(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """[D / 2] how much of each frequency stays: a ramp between two indices, where a frequency turns beta_fast and
    beta_slow times in the original context (Peng et al., arXiv 2309.00071, 2023, section 3.2)."""

    def index(turns: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return 1 - np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)


def amplitude(rope: Rope | None) -> float:
    """What cos and sin are multiplied by, which makes scores larger: 1 except for yarn."""
    if rope is None or rope.scaling.kind != "yarn":
        return 1.0
    return rope.scaling.attention_factor or 0.1 * math.log(max(rope.scaling.factor, 1.0)) + 1.0


def angles(config: LlamaConfig, positions: Array) -> tuple[Array, Array]:
    """cos and sin [B, T, 1, D / 2] at positions [B, T]: made once per forward pass, shared by all layers."""
    return layer_angles(config, config.rope, positions)


def layer_angles(config: LlamaConfig, rope: Rope | None, positions: Array) -> tuple[Array, Array]:
    """`angles` of layers with this rope."""
    inverse = jnp.asarray(inverse_frequencies(config, rope), jnp.float32)
    turns = positions[:, :, None, None].astype(jnp.float32) * inverse[None, None, None]
    cos, sin, scale = jnp.cos(turns), jnp.sin(turns), amplitude(rope)
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Turns x [B, T, H, D] float32 by the `angles` of its positions."""
    cos, sin = cos_sin
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
