"""What a drafter is trained for, and the acceptance it implies.

A draft token from q survives the rejection rule with probability sum_x min(p, q) = 1 - TV(p, q): total variation is
the acceptance, and forward KL is the smooth loss that bounds it (Pinsker: TV <= sqrt(KL / 2)).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from specjax.types import Array


def acceptance(target_probs: Array, draft_probs: Array) -> Array:
    """The probability that a draft token is accepted: sum over the last axis of min(p, q)."""
    return jnp.minimum(target_probs, draft_probs).sum(-1)


def distillation_loss(
    draft_logits: Array, target_probs: Array, mask: Array, *, loss: Literal["forward_kl", "tv"] = "forward_kl"
) -> tuple[Array, Array]:
    """The divergence of the draft law q = softmax(logits) from the target law p, averaged where the mask is true.

    KL(p || q) = sum_x p log(p / q), infinite where q cannot say what p can; TV = 1 - sum_x min(p, q). Ids with
    logit -inf and p = 0 (bans, vocabulary padding) add nothing to the value and nothing to its gradient.

    Args:
        draft_logits: [..., V], read as float32.
        target_probs: [..., V], non-negative, summing to 1.
        mask: [...] bool, the positions that count. None at all gives loss 0 and no gradient.
        loss: "forward_kl" or "tv".

    Returns:
        The mean loss and the mean acceptance, both float32 scalars.

    Raises:
        ValueError: an unknown loss.
    """
    log_q = jax.nn.log_softmax(draft_logits.astype(jnp.float32), axis=-1)
    p = target_probs.astype(jnp.float32)
    alpha = acceptance(p, jnp.exp(log_q))
    if loss == "forward_kl":
        # Guard the operands and not the product: 0 * -inf is NaN in the gradient as well as in the value.
        said = p > 0
        terms = jnp.where(said, p, 0.0) * (jnp.log(jnp.where(said, p, 1.0)) - jnp.where(said, log_q, 0.0))
        values = terms.sum(-1)
    elif loss == "tv":
        values = 1.0 - alpha
    else:
        raise ValueError(f"loss must be 'forward_kl' or 'tv', not {loss!r}")
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    return jnp.where(mask, values, 0.0).sum() / count, jnp.where(mask, alpha, 0.0).sum() / count
