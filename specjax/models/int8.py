"""int8 weights: the matrices of every layer as whole numbers, with a float32 scale for each output channel.

    weight[o, i]  ~  values[o, i] * scale[o],    scale[o] = max_i |weight[o, i]| / 127

Only weights are rounded; what they are multiplied with stays in the model's own type. A product reads int8, turns it
to that type on its way into the matrix unit (all of -127..127 are exact in bfloat16) and scales the sums, so a scale
costs one multiplication per output and not one per weight. Round-to-nearest, symmetric, per channel: the weights of
LLM.int8() without its outliers (Dettmers et al., arXiv 2208.07339, 2022).

Embedding, head, norms and biases stay as they are: drafters share the target's embedding and head, and the head's
rounding goes straight into the logits. `scripts/quantize_report.py` measures what either choice does.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.static import show

KINDS = ("int8",)
MATRICES = ("qkv", "o", "gate_up", "down")
SCALE = "_scale"  # of matrix "qkv": "qkv_scale" beside it
TOP = 127


def checked_kind(quantize: str | None) -> str:
    """The kind of quantisation, "" for none. Raises ValueError for an unknown one."""
    if quantize is not None and quantize not in KINDS:
        kinds = ", ".join(map(repr, KINDS))
        raise ValueError(f"quantize={show(quantize)}: give {kinds}, or None to keep the weights as they are")
    return quantize or ""


def rounded(rows: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Output channels [N, in] as int8 [N, in] and their scales [N] float32.

    Raises:
      ValueError: if a weight is not finite, naming the tensor.
    """
    rows = rows.astype(np.float32)
    scale = np.abs(rows).max(axis=1, initial=0.0) / np.float32(TOP)
    if not np.isfinite(scale).all():
        raise ValueError(f"{name} holds weights that are not finite: it cannot be quantised")
    scale[scale == 0] = 1.0  # a channel of zeros
    return np.rint(rows / scale[:, None]).astype(np.int8), scale


def abstract(layer: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a layer, unrolled, as those of its int8 counterpart."""
    scales = {name + SCALE: jax.ShapeDtypeStruct(layer[name].shape[:1], jnp.float32) for name in MATRICES}
    values = {name: jax.ShapeDtypeStruct(layer[name].shape, jnp.int8) for name in MATRICES}
    return layer | values | scales


def floating(name: str, lm):
    """The language model if its weights can be read as numbers, as a student that starts from them must.

    Raises:
      ValueError: if they are quantised.
    """
    if getattr(lm.config, "quantization", ""):
        raise ValueError(f"{name} has {lm.config.quantization} weights, from which nothing can be trained: "
                         "load the checkpoint that they were made from, without quantize=")  # fmt: skip
    return lm
