"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864, 2021) in the half-split layout of Hugging Face."""

import math

import jax.numpy as jnp
import numpy as np

from specjax.models.config import LlamaConfig
from specjax.types import Array


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """[D / 2] float64, radians per position, after the configuration's scaling. Raises ValueError if D is odd."""
    if config.head_dim % 2:
        raise ValueError(f"rope turns pairs: head_dim must be even, got {config.head_dim}")
    scaling = config.rope_scaling
    inverse = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "llama3":
        # Frequencies that turn more than high_freq_factor times in the original context stay, those that turn fewer
        # than low_freq_factor times are divided by the factor, and those between are blended (Llama 3.1).
        turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return keep * inverse + (1 - keep) * inverse / scaling.factor
    return inverse


def angles(config: LlamaConfig, positions: Array) -> tuple[Array, Array]:
    """cos and sin [B, T, 1, D / 2] at positions [B, T]: made once per forward pass, shared by all layers."""
    inverse = jnp.asarray(inverse_frequencies(config), jnp.float32)
    turns = positions[:, :, None, None].astype(jnp.float32) * inverse[None, None, None]
    return jnp.cos(turns), jnp.sin(turns)


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Turns x [B, T, H, D] float32 by the `angles` of its positions."""
    cos, sin = cos_sin
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
