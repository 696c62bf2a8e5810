"""A tiny transformer whose logits depend on every (token, position) pair before them, in float64 numpy.

The library's double of the same model reads its keys and values through the cache; this one never had a cache.
"""

from typing import NamedTuple

import numpy as np


class HashConfig(NamedTuple):
    """Sizes; hashable, so that models built from equal ones compare equal."""

    vocab_size: int
    width: int = 8
    num_heads: int = 2
    num_layers: int = 2
    sharpness: float = 1.5  # standard deviation of the logits, about


def hash_params(config: HashConfig, seed: int) -> dict[str, np.ndarray]:
    """Fixed random float32 weights, [in, out]; the head is [V, D]."""
    rng = np.random.default_rng(seed)
    v, d, n = config.vocab_size, config.width, config.num_layers

    def normal(*shape, scale=1.0):
        return (rng.normal(size=shape) * scale).astype(np.float32)

    return {
        "embed": normal(v, d),
        "query": normal(n, d, d, scale=d**-0.5),
        "key": normal(n, d, d, scale=d**-0.5),
        "value": normal(n, d, d, scale=d**-0.5),
        "out": normal(n, d, d, scale=3 * d**-0.5),
        "head": normal(d, v, scale=config.sharpness * d**-0.5).T,
    }


def angles(positions: np.ndarray, size: int) -> np.ndarray:
    """[.., size // 2] rotation angles, fast enough that neighbouring positions differ a lot."""
    return positions[..., None] / 3.0 ** np.arange(size // 2)


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary embedding of x [T, H, D]."""
    theta = angles(positions, x.shape[-1])[:, None, :]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(theta) - b * np.sin(theta), b * np.cos(theta) + a * np.sin(theta)], axis=-1)


def normed(x: np.ndarray) -> np.ndarray:
    """x / rms(x)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def hash_logits(config: HashConfig, params: dict[str, np.ndarray], tokens) -> np.ndarray:
    """Logits [T, V] of every position of one text."""
    weights = {name: value.astype(np.float64) for name, value in params.items()}
    tokens = np.asarray(tokens)
    positions = np.arange(len(tokens))
    theta = angles(positions, config.width)
    x = weights["embed"][tokens] + np.concatenate([np.sin(theta), np.cos(theta)], axis=-1)
    heads = (len(tokens), config.num_heads, config.width // config.num_heads)
    for layer in range(config.num_layers):
        y = normed(x)
        q, k, v = (np.reshape(y @ weights[name][layer], heads) for name in ("query", "key", "value"))
        scores = np.einsum("thd,shd->hts", rotate(q, positions), rotate(k, positions)) * heads[-1] ** -0.5
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", share, v).reshape(x.shape) @ weights["out"][layer]
    return normed(x) @ weights["head"].T
