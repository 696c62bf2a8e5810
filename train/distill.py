"""The training loop in small: one jitted step, AdamW with warm-up and cosine decay, clipped gradients, float32."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.language_model import LanguageModel
from specjax.static import bind, whole
from specjax.train import students
from specjax.train.types import Batch as Batch
from specjax.types import Array, PyTree


class Optimiser(NamedTuple):
    """Settings of AdamW."""

    steps: int  # of the whole run
    learning_rate: float = 1e-3  # the highest
    warmup: int = 0  # steps to it; 0 is a twentieth of all
    weight_decay: float = 0.0
    clip: float = 1.0  # largest global norm of a gradient


Loss = Callable[..., tuple[Array, dict[str, Array]]]  # (params, given, batch, key) -> loss, metrics


class Training(NamedTuple):
    """Everything the next step needs."""

    trained: PyTree
    frozen: PyTree
    slots: PyTree  # the optimiser's, of what is trained only




def head_loss(config: Any, target: LanguageModel, **options: Any) -> Loss:
    """`specjax.train.students.head_loss`, divided, as `fit` takes it."""
    return bind(_divided, students.head_loss(config, target, **options))


def _divided(loss: Any, *arguments: Any) -> tuple[Array, dict[str, Array]]:
    total, metrics = loss(*arguments)
    weight = metrics.pop("loss").weight
    return total / (weight + (weight == 0).astype(weight.dtype)), {name: m.value() for name, m in metrics.items()}


def _transform(settings: Optimiser) -> Any:
    import optax

    warmup = settings.warmup or max(1, settings.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        settings.learning_rate / warmup, settings.learning_rate, warmup, max(settings.steps, warmup + 1)
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip), optax.adamw(schedule, weight_decay=settings.weight_decay)
    )


def start(params: PyTree, settings: Optimiser, frozen: tuple[str, ...] = ("ids",)) -> Training:
    """Before the first step.

    Args:
      params: a dict of weights, copied.
      frozen: top-level names that stay as they are.
    """
    copied = jax.tree.map(jnp.array, params)
    trained = {name: leaf for name, leaf in copied.items() if name not in frozen}
    rest = {name: leaf for name, leaf in copied.items() if name in frozen}
    return Training(trained, rest, _transform(settings).init(trained))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def step(
    loss: Loss, settings: Optimiser, training: Training, given: PyTree, batch: Any, key: Array
) -> tuple[Training, dict[str, Array]]:
    """One update.

    Args:
      loss: hashable, see `head_loss`; static.
      settings: static.
      given: what the loss needs besides params, untouched: the target's weights.
      batch, key: go to the loss.

    Returns:
      The next state and the metrics, "loss" among them.
    """

    def of(trained):
        return loss({**trained, **training.frozen}, given, batch, key)

    (value, metrics), gradient = jax.value_and_grad(of, has_aux=True)(training.trained)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies integer counts with floats
        update, slots = _transform(settings).update(gradient, training.slots, training.trained)
    trained = jax.tree.map(jnp.add, training.trained, update)
    return Training(trained, training.frozen, slots), {"loss": value, **metrics}


def fit(
    loss: Loss, params: PyTree, batches: Iterable[Any], settings: Optimiser, *, given: PyTree = None,
    frozen: tuple[str, ...] = ("ids",), seed: int = 0, progress: Callable[[int, dict[str, float]], None] | None = None,
) -> tuple[PyTree, dict[str, np.ndarray]]:  # fmt: skip
    """Trains.

    Args:
      loss: ``(params, given, batch, key) -> (loss, metrics)``, hashable; `head_loss` makes one.
      params: weights to start from; they are not changed.
      batches: one per step, of one shape; more than ``settings.steps`` are left alone.
      settings: see `Optimiser`.
      given: what the loss needs besides, e.g. the target's params.
      frozen: top-level names of params that stay as they are; they have no slots in the optimiser.
      seed: of the keys the loss gets.
      progress: called after every step with its number, from 1, and the metrics.

    Returns:
      The weights, and the metrics step by step.

    Raises:
      ValueError: fewer batches than steps; a loss that is not finite (names the step).
    """
    whole("steps", settings.steps, 1)
    training, history = start(params, settings, frozen), []
    key, source = jax.random.key(seed), iter(batches)
    for number in range(1, settings.steps + 1):
        batch = next(source, None)
        if batch is None:
            raise ValueError(f"batches ended after {number - 1} of {settings.steps} steps: give more, or repeat them")
        training, metrics = step(loss, settings, training, given, batch, jax.random.fold_in(key, number))
        metrics = {name: float(value) for name, value in metrics.items()}
        if not np.isfinite(metrics["loss"]):
            raise ValueError(f"the loss is {metrics['loss']} at step {number}: lower learning_rate")
        history.append(metrics)
        if progress is not None:
            progress(number, metrics)
    columns = {name: np.asarray([row[name] for row in history]) for name in history[0]}
    return {**training.trained, **training.frozen}, columns
