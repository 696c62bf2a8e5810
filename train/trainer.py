"""The trainer: one jitted step for every loss, on one device or a mesh, and the loop around it.

A loss gives totals (`specjax.train.types.Loss`). A step adds the gradients of the totals of its micro-batches, on all
devices, and divides once, by how much was learnt: the mean over the whole batch however it was cut. Numbers stay on
the device until ``log_every`` steps have run.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import processes
from specjax.static import show, weak
from specjax.train import mesh as meshes
from specjax.train.monitor import Journal, Monitor
from specjax.train.saving import Run, digest
from specjax.train.settings import LOOP, Settings, checked, rate, transform
from specjax.train.types import Loss, Mean
from specjax.types import Array, PyTree


class Training(NamedTuple):
    """Everything the next step needs."""

    step: Array  # [] int32 steps done, those that moved nothing too
    trained: PyTree  # float32
    frozen: PyTree
    slots: PyTree  # the optimiser's, of what is trained only
    ema: PyTree | None


class Fitted(NamedTuple):
    """A finished run."""

    params: PyTree
    ema: PyTree | None  # averaged weights, if the settings ask for them
    history: dict[str, np.ndarray]  # [steps] each: "step", "loss", "alpha", .., those before a resume too
    evaluations: list[dict[str, Any]]  # {"step": .., "evaluation": what evaluate returned}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["sums"], meta_fields=["names"])
@dataclasses.dataclass(frozen=True)
class Row:
    """The numbers of a step as one small array, fetched in one piece."""

    names: tuple[str, ...]
    sums: Array  # [M, 2] total and weight

    def means(self) -> dict[str, Mean]:
        """By name, after the array was fetched."""
        pairs = np.asarray(self.sums, np.float64)
        return {name: Mean(*pair) for name, pair in zip(self.names, pairs, strict=True)}


# --- one step


def start(params: PyTree, settings: Settings, frozen: tuple[str, ...] = ("ids",)) -> Training:
    """Before the first step: float32 masters, copied.

    Args:
      params: a dict of weights.
      frozen: top-level names that stay as they are; those that are not there are no matter.

    Raises:
      ValueError: params that are no dict, have nothing to train, or hold whole numbers that are not frozen.
    """
    if not isinstance(params, dict):
        raise ValueError(f"params={show(params)}: give a dict of weights")
    trained = {name: leaf for name, leaf in params.items() if name not in frozen}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name = jax.tree_util.keystr(path)
            raise ValueError(f"params{name} holds {jnp.result_type(leaf)}: name it in frozen={frozen}")
    if not jax.tree.leaves(trained):
        raise ValueError(f"params has nothing to train besides frozen={frozen}")
    trained = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), trained)
    rest = jax.tree.map(jnp.array, {name: leaf for name, leaf in params.items() if name in frozen})
    ema = jax.tree.map(jnp.copy, trained) if settings.ema else None
    return Training(jnp.int32(0), trained, rest, transform(settings).init(trained), ema)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def update(
    loss: Loss, settings: Settings, mesh: Mesh | None, training: Training, given: PyTree, batch: Any
) -> tuple[Training, Row]:
    """One step. Where nothing is learnt (weight 0) only ``training.step`` moves.

    Args:
      loss: hashable, static.
      settings: static; `fit` gives them without what its loop alone needs.
      mesh: static; None is one device.
      given: what the loss needs besides params, untouched: the target's weights.
      batch: leaves [accumulate * b, ...]; row r is in micro-batch r % accumulate.

    Returns:
      The next state, and the sums of all that was measured.
    """
    import optax

    key = jax.random.fold_in(jax.random.key(settings.seed), training.step)
    gradient, sums = _summed(loss, settings, mesh, training, given, batch, key)
    weight = sums["loss"].weight
    gradient = jax.tree.map(lambda leaf: leaf / jnp.where(weight > 0, weight, 1.0), gradient)
    done = optax.tree.get(training.slots, "ScaleByScheduleState").count
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies integer counts with floats
        change, slots = transform(settings).update(gradient, training.slots, training.trained)
        lr = rate(settings)(done)
        decay = jnp.minimum(settings.ema, (1.0 + done) / (10.0 + done))
    trained = optax.apply_updates(training.trained, change)
    ema = None if training.ema is None else optax.incremental_update(trained, training.ema, 1.0 - decay)
    old = training.trained, training.slots, training.ema
    trained, slots, ema = optax.tree.where(weight > 0, (trained, slots, ema), old)
    one = jnp.float32(1)
    sums |= {"gradient_norm": Mean(optax.tree.norm(gradient), one), "learning_rate": Mean(lr, one)}
    names = tuple(sorted(sums))
    row = Row(names, jnp.stack([jnp.stack([jnp.float32(part) for part in sums[name]]) for name in names]))
    after = Training(training.step + 1, trained, training.frozen, slots, ema)
    return meshes.constrained(mesh, (after, row))


def _summed(
    loss: Loss, settings: Settings, mesh: Mesh | None, training: Training, given: PyTree, batch: Any, key: Array
) -> tuple[PyTree, dict[str, Mean]]:
    """Gradient of the total, and what was measured, both summed over micro-batches."""
    dtype = jnp.dtype(settings.dtype)

    def total(trained, part, key):
        params = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
                              {**trained, **training.frozen})  # fmt: skip
        value, measured = loss(params, given, part, key)
        if not isinstance(measured.get("loss"), Mean):
            raise ValueError("the loss's metrics have no Mean called 'loss': its weight divides the gradient")
        return value, jax.tree.map(jnp.float32, jax.lax.stop_gradient(measured))

    if settings.remat:
        total = jax.checkpoint(total, policy=jax.checkpoint_policies.dots_saveable)
    slope = jax.grad(total, has_aux=True)
    if settings.accumulate == 1:
        return slope(training.trained, batch, jax.random.fold_in(key, 0))

    def add(gradient, numbered):
        index, part = numbered
        more, measured = slope(training.trained, part, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, gradient, more), measured

    parts = jax.tree.map(functools.partial(_cut, mesh, settings.accumulate), batch)
    zero = jax.tree.map(jnp.zeros_like, training.trained)
    gradient, measured = jax.lax.scan(add, zero, (jnp.arange(settings.accumulate), parts))
    return gradient, jax.tree.map(lambda values: values.sum(0), measured)


def _cut(mesh: Mesh | None, parts: int, leaf: Array) -> Array:
    """[parts * b, ...] -> [parts, b, ...]. Rows are dealt out, so that every device keeps the rows it has."""
    rows = leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:])
    return _constrained(mesh, PartitionSpec(None, "data"), jnp.moveaxis(rows, 1, 0))


def _constrained(mesh: Mesh | None, spec: PartitionSpec, leaf: Array) -> Array:
    return leaf if mesh is None else jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))


# --- the loop


def fit(
    loss: Loss, params: PyTree, batches: Callable[[int], Any] | Iterable[Any], settings: Settings, *,
    given: PyTree = None, frozen: tuple[str, ...] = ("ids",), directory: str | os.PathLike | None = None,
    identity: Mapping[str, Any] | None = None, mesh: Mesh | None = None,
    rewrite: Callable[[int, Any, PyTree], Any] | None = None, evaluate: Callable[[int, PyTree], Any] | None = None,
    progress: bool = True, tensorboard: bool = False,
) -> Fitted:  # fmt: skip
    """Trains, and goes on where a run in the same directory was stopped, whatever stopped it.

    Args:
      loss: hashable (`specjax.static.bind`), see `specjax.train.types.Loss`.
      params: weights to start from; they are not changed.
      batches: `specjax.train.packing.Batches`, or any ``batches(step)``, step from 0, that gives the same batch
        whenever it is asked for the same step; or an iterable, of which a resumed run skips what was used. Leaves
        [rows, ...].
      settings: see `specjax.train.settings.Settings`.
      given: what the loss needs besides, e.g. the target's params. On a mesh it stays where the caller has put it
        (`specjax.load(.., mesh=)`); what is not on the mesh is copied to every device.
      frozen: top-level names of params that stay as they are and have no slots in the optimiser.
      directory: of checkpoints and ``metrics.jsonl``; None keeps nothing.
      identity: what makes this run what it is besides settings and weights: ``{"target": fingerprint, "student":
        repr(config), "data": ..}``. A run with another one is not resumed.
      mesh: axes "data" and "model", see `specjax.train.mesh.make_mesh`. Weights that are trained, their gradients and
        the optimiser's slots lie in parts by the table of `specjax.sharding`, as the target's do.
      rewrite: ``(step, batch, params) -> batch`` with the weights as they are at that step, for text that a student
        writes itself; a run that is resumed exactly needs the same batch for the same three.
      evaluate: ``(step, params) -> anything JSON can say``, called before the first step, every ``eval_every`` steps
        and after the last, with averaged weights where there are some. Like ``rewrite`` it is given weights where they
        lie, on a mesh in parts.
      progress: show a bar (needs tqdm).
      tensorboard: also write event files to ``directory/tensorboard`` (needs tensorboardX).

    Raises:
      ValueError: what `checked` and `start` refuse; a directory of another run, naming what differs; batches that
        end early or cannot be shared out; a loss or gradient that is not finite, naming the step.
    """
    settings = checked(settings)
    meshes.check(mesh)
    training = start(meshes.placed(mesh, params), settings, frozen)
    training, given = meshes.placed(mesh, training), meshes.spread(mesh, given)
    run = None
    if directory is not None:
        run = Run(directory, _identity(settings, training, identity), settings.keep)
    try:
        training = training if run is None else run.restore(training)
        journal = Journal(None if run is None else run.path / "metrics.jsonl", int(training.step))
        folder = run.path / "tensorboard" if tensorboard and run is not None and processes.first() else None
        with Monitor(journal, settings.steps, bar=progress and processes.first(), tensorboard=folder) as monitor:
            source = _source(batches, int(training.step), settings.steps)
            training = _loop(loss, settings, mesh, training, given, source, run, rewrite, evaluate, monitor)
    finally:
        if run is not None:
            run.close()
    return Fitted(
        processes.local({**training.trained, **training.frozen}),
        None if training.ema is None else processes.local({**training.ema, **training.frozen}),
        journal.history(), journal.evaluations(),
    )  # fmt: skip


def _identity(settings: Settings, training: Training, given: Mapping[str, Any] | None) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(training.trained)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="."): list(leaf.shape) for path, leaf in leaves}
    numbers = {name: value for name, value in settings._asdict().items() if name not in LOOP}
    return {"settings": numbers, "weights": shapes, "frozen": digest(training.frozen), **(given or {})}


def _loop(
    loss: Loss, settings: Settings, mesh: Mesh | None, training: Training, given: PyTree, source: Iterator[Any],
    run: Run | None, rewrite: Any, evaluate: Any, monitor: Monitor,
) -> Training:  # fmt: skip
    done, static = int(training.step), settings._replace(**dict.fromkeys(LOOP, 0))
    if evaluate is not None and done == 0:
        _evaluate(evaluate, 0, training, monitor)
    rows: list[Row] = []
    monitor.clock()
    while done < settings.steps:
        batch = next(source)
        if rewrite is not None:
            batch = rewrite(done, batch, {**training.trained, **training.frozen})
        batch = meshes.share(mesh, batch, settings.accumulate)
        training, row = update(weak(loss), static, mesh, training, given, batch)
        rows.append(row)
        done += 1
        last = done == settings.steps
        look = last or (_due(done, settings.eval_every) and evaluate is not None)
        save = run is not None and (last or _due(done, settings.save_every))
        if look or save or _due(done, settings.log_every):
            # The numbers first: what is saved or measured afterwards is known to be finite.
            _take(rows, done, monitor, run)
            rows = []
        if look and evaluate is not None:
            _evaluate(evaluate, done, training, monitor)
        if save and run is not None:
            run.save(done, training)
        if not rows:
            monitor.clock()
    return training


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _source(batches: Any, done: int, steps: int) -> Iterator[Any]:
    """Batches from step ``done`` on."""
    batches = getattr(batches, "at", batches)
    if callable(batches):
        yield from map(batches, range(done, steps))
        return
    source = iter(batches)
    for number in range(steps):
        try:
            batch = next(source)
        except StopIteration:
            raise ValueError(f"batches ended after {number} of {steps} steps: give more, or repeat them") from None
        if number >= done:
            yield batch


def _take(rows: list[Row], done: int, monitor: Monitor, run: Run | None) -> None:
    """Fetches the numbers of the last steps, writes them down and stops at the first that is not finite."""
    fetched: list[Row] = jax.device_get(rows)
    means = [row.means() for row in fetched]
    first = done - len(means) + 1
    for number, row in enumerate(means):
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(row[name].total):
                monitor.write(first, means[:number])
                kept = "no checkpoint was kept" if run is None else run.last()
                raise ValueError(
                    f"the {name.replace('_', ' ')} is {row[name].value()} at step {first + number}: lower "
                    f"learning_rate, or look at the batch of this step; {kept}"
                )
    monitor.write(first, means)


def _evaluate(evaluate: Any, step: int, training: Training, monitor: Monitor) -> None:
    best = training.trained if training.ema is None else training.ema
    params = jax.tree.map(jnp.copy, {**best, **training.frozen})  # the next step donates its own
    monitor.evaluation(step, evaluate(step, params))
