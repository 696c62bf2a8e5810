"""The losses of students: heads, and draft models, that learn the laws of a target on texts.

A loss is a hashable function ``(params, target params, batch, key) -> (total, metrics)``, see `specjax.train.types`.
The total is summed over places, weighted, and not divided; ``metrics["loss"]`` is its mean before the division, by
whose weight the trainer divides, so batches of any size, cut in any way, add up to the same.

A place counts if the token that it is about does (``batch.counts``), is there, and belongs to the text the place has
read. What else it weighs is said in `specjax.train.losses`.

Metrics, each a mean over the places that count, whatever they weigh:
    loss            what is minimised, divided
    alpha           the chance that the first draft token would be accepted under "rejection" at temperature 1: sum of
                    min(p, q), of the whole target law also for a reduced vocabulary
    alpha_2, ..     the same for the second draft token after a first that was right, and so on
    confidence      the loss of a confidence head, already in ``loss``
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.language_model import LanguageModel, checked
from specjax.static import bind, show, whole
from specjax.train import heads, losses
from specjax.train.types import Batch, Loss, Mean
from specjax.types import Array, Model


class _Options(NamedTuple):
    """Of a head's loss, static."""

    how: losses.Divergence
    layers: tuple[int, ...]  # of the target, that the head reads
    depth: int
    decay: float
    anchors: int


def head_loss(
    config: heads.HeadConfig, target: LanguageModel, *, loss: str = "forward_kl", depth: int | None = None,
    decay: float = 0.8, anchors: int = 0, temperature: float = 1.0, eta: float = 3.0,
) -> Loss:  # fmt: skip
    """The loss of a head of any kind: its laws at every depth against the target's.

    EAGLE and MTP heads that are fed their own hidden states are unrolled, and see in each pass what a draft sees (the
    training-time test of EAGLE-3, Li et al., arXiv 2503.01840, 2025). EAGLE-1 learns laws too, and not the regression
    to hidden states of its paper. A DFlash drafter with a confidence head teaches it the chance that the draft token
    would be accepted, by cross-entropy; that head then cuts blocks, see `specjax.drafters.dflash`.

    Args:
      config: the head's.
      target: the model it drafts for.
      loss: one of `specjax.train.losses.NAMES`.
      depth: draft tokens ahead, see `specjax.train.heads.laws`.
      decay: depth d, from 0, weighs decay^d.
      anchors: how many blocks of a text DFlash trains on in a step, at random places; 0 is all places. Of others, 0.
      temperature, eta: see `specjax.train.losses.divergence`.

    Raises:
      ValueError: a target without ``config.num_layers``, anything that is out of range.
    """
    if not hasattr(target.config, "num_layers"):
        raise ValueError(f"target={show(target)}: its config does not say num_layers; give what specjax.load returns")
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise ValueError(f"decay={show(decay)}: must be a number above 0, up to 1")
    how = losses.divergence(loss, temperature=temperature, eta=eta)
    depth, anchors = heads.depth_of(config, depth), whole("anchors", anchors, 0)
    if anchors and not isinstance(config, heads.DFlashConfig):
        raise ValueError(f"anchors={anchors}: only DFlash learns blocks at random places; leave it at 0")
    layers = heads.feature_layers(config, target.config.num_layers)
    return bind(_head_loss, config, target.model, _Options(how, layers, depth, float(decay), anchors))


def draft_lm_loss(
    draft: LanguageModel, target: LanguageModel, *, loss: str = "forward_kl", temperature: float = 1.0,
    eta: float = 3.0,
) -> Loss:  # fmt: skip
    """The loss of a draft model: its law at every place against the target's, without a cache.

    On the target's texts this is teacher forcing; on the draft's own (`specjax.train.draft_lm.on_policy`) it is
    on-policy distillation: Zhou et al., DistillSpec, arXiv 2310.08461 (2023).

    Args:
      draft: the model that learns; its params are not used.
      target: of the same vocabulary.
      loss, temperature, eta: see `specjax.train.losses.divergence`.

    Raises:
      ValueError: another vocabulary; anything that is out of range.
    """
    draft, target = checked("draft", draft), checked("target", target)
    ours, theirs = draft.model.vocab_size, target.model.vocab_size
    if ours != theirs:
        raise ValueError(f"the draft model has {ours} tokens and the target {theirs}: both need the same vocabulary")
    how = losses.divergence(loss, temperature=temperature, eta=eta)
    return bind(_draft_lm_loss, draft.model, target.model, how)


def _head_loss(config, model: Model, options: _Options, params, weights, batch: Batch, key: Array):
    width, how = batch.tokens.shape[1], options.how
    reading = heads.read(LanguageModel(model, weights), batch.tokens, options.layers, batch.documents)
    said = heads.laws(
        config, params, weights, batch.tokens, reading.features, depth=options.depth,
        anchors=_places(options.anchors, batch, key), documents=batch.documents,
    )  # fmt: skip
    ids = heads.ids(params)
    target = losses.law(reading.logits, ids, how)
    parts, metrics = [], {}
    for d, place in enumerate(said):
        at, about = jnp.minimum(place.rows, width - 1), jnp.minimum(place.rows + 1, width - 1)
        here = losses.Law(target.whole[:, at], target.whole[:, at] if how.temperature == 1 else target.soft[:, at])
        made = losses.compare(how, place.logits, here, batch.tokens[:, about], ids)
        counts = (place.valid & batch.counts[:, about]).astype(jnp.float32)
        extra = None if place.odds is None else losses.mean(losses.binary(place.odds, made.alpha), counts)
        parts.append(_scaled(losses.mean(made.values, counts * made.weight), extra, options.decay**d))
        metrics["alpha" if d == 0 else f"alpha_{d + 1}"] = losses.mean(made.alpha, counts)
        if extra is not None:
            metrics["confidence"] = _sum(iter([extra, *([metrics["confidence"]] if d else [])]))
    loss = _sum(iter(parts))
    return loss.total, {"loss": loss, **metrics}


def _places(anchors: int, batch: Batch, key: Array) -> Array | None:
    """Random different places of pending tokens; first those after which a token counts in some row. The first token
    is none."""
    width = batch.tokens.shape[1]
    if not anchors:
        return None
    useful = jnp.pad(batch.counts[:, 2:].any(0), (0, 1)).astype(jnp.float32)  # of places 1 .. T - 1
    order = useful + jax.random.uniform(key, useful.shape)
    return 1 + jax.lax.top_k(order, min(anchors, width - 1))[1].astype(jnp.int32)


def _scaled(loss: Mean, extra: Mean | None, factor: float) -> Mean:
    total = loss.total if extra is None else loss.total + extra.total
    return Mean(factor * total, factor * loss.weight)


def _sum(means: Iterator[Mean]) -> Mean:
    first = next(means)
    for other in means:
        first = Mean(first.total + other.total, first.weight + other.weight)
    return first


def _draft_lm_loss(draft: Model, model: Model, how: losses.Divergence, params, weights, batch: Batch, key: Array):
    del key  # nothing here is random
    reading = heads.read(LanguageModel(model, weights), batch.tokens, (), batch.documents)
    lay, mask = heads.layout(batch.tokens, batch.documents), heads.window_mask(batch.documents)
    logits = draft.apply(params, batch.tokens, lay.positions, mask, None).logits
    rows = jnp.arange(batch.tokens.shape[1] - 1)
    valid = heads.about_one_text(lay, rows, rows) & batch.counts[:, 1:]
    target = jax.tree.map(lambda x: x[:, :-1], losses.law(reading.logits, None, how))
    made = losses.compare(how, logits[:, :-1], target, batch.tokens[:, 1:])
    counts = valid.astype(jnp.float32)
    loss = losses.mean(made.values, counts * made.weight)
    return loss.total, {"loss": loss, "alpha": losses.mean(made.alpha, counts)}


def loss_of(student: Any, target: LanguageModel, **options: Any) -> Loss:
    """`head_loss` of a head's configuration, `draft_lm_loss` of a language model."""
    if isinstance(student, LanguageModel):
        return draft_lm_loss(student, target, **options)
    return head_loss(student, target, **options)
