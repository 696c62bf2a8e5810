"""What a drafter is trained for, place by place, and the acceptance it implies.

A draft token from q survives the rejection rule with probability alpha = sum_x min(p, q) = 1 - TV(p, q), where p is the
target's law: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv 2211.17192 (2023).

    forward_kl       KL(p || q), infinite where q cannot say what p can; bounds the rejections, TV <= sqrt(KL / 2)
    reverse_kl       KL(q || p): q leaves out what it cannot say well
    js               (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2; at most log 2
    tv               1 - alpha. Its gradient is small where p and q hardly overlap
    nla              -log alpha: the gradient of tv, divided by alpha
    hybrid           w KL(p || q) + (1 - w) TV(p, q), w = exp(-eta alpha) without a gradient: KL while little is
                     accepted, then acceptance itself
    cross_entropy    -log q(the token that stands in the text)

The first four: Zhou et al., DistillSpec, arXiv 2310.08461 (2023). nla and hybrid: Samarin et al., LK Losses: Direct
Acceptance Rate Optimization for Speculative Decoding, arXiv 2602.23881 (2026), with its eta = 3; w is the place's own.

A reduced draft vocabulary (columns ``ids`` of the target's): p is renormalised on it for forward_kl, reverse_kl and
js, and the place weighs what p has there, so that a place about which the drafter can say nothing moves nothing; for
forward_kl this is the cross-entropy to the whole law less what no q could change. tv, nla and the TV of hybrid compare
q with the whole law: what lies outside is rejected, and adds a constant. cross_entropy weighs places whose token lies
outside with 0. alpha is always that of the whole law.

Temperature T: both laws are those of logits / T. KL and JS are multiplied by T^2, which keeps the size of their
gradients (Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531, 2015); TV and nla are not:
they are about what is accepted when sampling at T. The alpha that is reported is that at temperature 1.

Logits of -inf (bans, padding of the vocabulary) are allowed on either side: they have no gradient, and where the other
side has mass they count as log-probability `FLOOR`, so that every value is finite.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.static import show
from specjax.train.types import Mean
from specjax.types import Array

NAMES = ("forward_kl", "reverse_kl", "js", "tv", "nla", "hybrid", "cross_entropy")
FLOOR = -100.0  # log-probability of what cannot be said; exp of it is 0 in float32
NONE = -1e30  # logits down to this are bans; finite, so that differences are
LEAST = 1e-30  # acceptance under the logarithm


class Divergence(NamedTuple):
    """Which loss, hashable; `divergence` makes a checked one."""

    name: str = "forward_kl"
    temperature: float = 1.0
    eta: float = 3.0  # of hybrid


class Law(NamedTuple):
    """What the target says of the draft's columns: log-probabilities of its whole law, so they need not sum to 1."""

    whole: Array  # [..., M] at temperature 1
    soft: Array  # [..., M] at the temperature of the loss


class Compared(NamedTuple):
    """A loss before it is summed."""

    values: Array  # [...]
    weight: Array  # [...] from 0 to 1: what the place counts, see the module's docstring
    alpha: Array  # [...] acceptance at temperature 1, without a gradient


def divergence(name: str = "forward_kl", *, temperature: float = 1.0, eta: float = 3.0) -> Divergence:
    """A loss by name.

    Args:
      name: one of `NAMES`.
      temperature: of both laws.
      eta: of "hybrid"; 0 is forward KL, large is TV.

    Raises:
      ValueError: an unknown name; a number that is none or out of range; a temperature for "cross_entropy".
    """
    if name not in NAMES:
        raise ValueError(f"loss={show(name)}: choose one of {', '.join(map(repr, NAMES))}")
    for what, value, least in (("temperature", temperature, 1e-3), ("eta", eta, 0.0)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
            raise ValueError(f"{what}={show(value)}: must be a number of {least:g} or more")
    if name == "cross_entropy" and temperature != 1:
        raise ValueError(f"temperature={temperature}: cross_entropy is about tokens, not laws; leave it at 1")
    return Divergence(name, float(temperature), float(eta))


def law(logits: Array, ids: Array | None = None, how: Divergence = Divergence()) -> Law:  # noqa: B008
    """The target's law from its logits [..., V]; ids [M]: the columns that can be drafted, None is all."""

    def at(temperature):
        return log_law(logits if temperature == 1 else logits / temperature, ids)

    whole = at(1.0)
    return Law(whole, whole if how.temperature == 1 else at(how.temperature))


def law_of_probs(probs: Array, ids: Array | None = None, how: Divergence = Divergence()) -> Law:  # noqa: B008
    """The target's law from probabilities [..., V] that sum to 1; ids as in `law`."""
    probs = _wide(probs)
    logits = jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1.0)), -jnp.inf)
    return law(logits, ids, how)


def log_law(logits: Array, ids: Array | None = None) -> Array:
    """log softmax over the last axis, of columns ``ids``, finite: `FLOOR` without a gradient where a logit is -inf. NaN
    stays NaN."""
    logits = _wide(logits)
    banned = logits <= NONE
    safe = jnp.where(banned, NONE, logits)
    if ids is None:
        return jnp.where(banned, FLOOR, jax.nn.log_softmax(safe, axis=-1))
    columns = logits[..., ids]  # only these are kept: the vocabulary is wide
    return jnp.where(columns <= NONE, FLOOR, columns - jax.nn.logsumexp(safe, axis=-1, keepdims=True))


def _wide(x: Array) -> Array:
    """float32, or float64 if it is that."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def acceptance(target_probs: Array, draft_probs: Array) -> Array:
    """The probability that a draft token is accepted: sum over the last axis of min(p, q)."""
    return jnp.minimum(target_probs, draft_probs).sum(-1)


def compare(
    how: Divergence, draft_logits: Array, target: Law, tokens: Array | None = None, ids: Any = None
) -> Compared:
    """A loss at every place.

    Args:
      how: which.
      draft_logits: [..., M].
      target: see `law`; no gradient flows into it.
      tokens: [...] int32 the target's id that stands at the place; for "cross_entropy".
      ids: [M] target ids of the columns, ascending; None: column i is token i. For "cross_entropy".
    """
    target = jax.lax.stop_gradient(target)
    log_q = log_law(draft_logits)
    alpha = jax.lax.stop_gradient(acceptance(jnp.exp(target.whole), jnp.exp(log_q)))
    if how.name == "cross_entropy":
        assert tokens is not None
        return Compared(*_cross_entropy(log_q, tokens, ids), alpha)
    if how.temperature != 1:
        log_q = log_law(draft_logits / how.temperature)
    values, weight = _values(how, log_q, target.soft)
    return Compared(values, weight, alpha)


def _values(how: Divergence, log_q: Array, soft: Array) -> tuple[Array, Array]:
    q, square, one = jnp.exp(log_q), how.temperature**2, jnp.ones(log_q.shape[:-1], log_q.dtype)
    if how.name in ("tv", "nla", "hybrid"):
        overlap = acceptance(jnp.exp(soft), q)
        if how.name == "tv":
            return 1 - overlap, one
        if how.name == "nla":
            return -jnp.log(jnp.maximum(overlap, LEAST)), one
    share = jnp.minimum(jnp.exp(soft).sum(-1), 1.0)
    log_p = soft - jax.nn.logsumexp(soft, axis=-1, keepdims=True)
    p = jnp.exp(log_p)
    if how.name == "reverse_kl":
        return square * (q * (log_q - log_p)).sum(-1), share
    if how.name == "js":
        log_m = jnp.logaddexp(log_p, log_q) - jnp.log(jnp.asarray(2.0, log_q.dtype))
        return square * 0.5 * (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1), share
    forward = square * (p * (log_p - log_q)).sum(-1)
    if how.name == "forward_kl":
        return forward, share
    mix = jnp.exp(-how.eta * jax.lax.stop_gradient(overlap))
    return mix * share * forward + (1 - mix) * (1 - overlap), one


def _cross_entropy(log_q: Array, tokens: Array, ids: Any) -> tuple[Array, Array]:
    column, inside = tokens, jnp.ones(tokens.shape, bool)
    if ids is not None:
        ids = jnp.asarray(ids)
        column = jnp.minimum(jnp.searchsorted(ids, tokens), ids.shape[0] - 1)
        inside = ids[column] == tokens
    said = jnp.take_along_axis(log_q, column[..., None], axis=-1, mode="clip")[..., 0]
    return -said, inside.astype(log_q.dtype)


def binary(odds: Array, chance: Array) -> Array:
    """Cross-entropy of log-odds with the chance of an event: -c log s(odds) - (1 - c) log s(-odds), s the sigmoid."""
    odds = _wide(odds)
    return jax.nn.softplus(odds) - jax.lax.stop_gradient(chance) * odds


def mean(values: Array, weight: Array) -> Mean:
    """Sum of ``weight * values`` and of ``weight``. Places of weight 0 add nothing, whatever their value is."""
    weight = weight.astype(values.dtype)
    return Mean(jnp.where(weight > 0, weight * values, 0.0).sum(), weight.sum())


def distillation_loss(draft_logits: Array, target_probs: Array, mask: Array, *, loss: str = "forward_kl"):
    """The mean loss and the mean acceptance where the mask is true. Of before: use `compare` and `mean`."""
    how = divergence(loss)
    made = compare(how, draft_logits, law_of_probs(target_probs, how=how))
    weight = mask.astype(jnp.float32)
    return mean(made.values, weight * made.weight).value(), mean(made.alpha, weight).value()
