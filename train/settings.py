"""Settings of a training run, and the optimiser they describe: AdamW behind a clipped gradient (optax)."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from specjax.static import show, whole
from specjax.types import PyTree

TINY = float(np.finfo(np.float32).tiny)  # more than 0
BELOW = float(np.nextafter(np.float32(1), np.float32(0)))  # less than 1


class Settings(NamedTuple):
    """Settings of a run. Only the last four may change when a run is taken up again."""

    steps: int  # updates in the whole run
    learning_rate: float = 1e-3  # the highest
    warmup: int = 0  # steps to it; 0 is 4% of all
    schedule: Literal["cosine", "linear"] = "cosine"  # how it falls afterwards
    floor: float = 0.0  # share of it that is left at the end
    b1: float = 0.9  # of Adam
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0  # of matrices; norms and biases never decay
    clip: float = 1.0  # largest global norm of a gradient
    accumulate: int = 1  # micro-batches a batch is cut into
    ema: float = 0.0  # decay of the averaged weights, 0: none. Young averages decay faster, (1 + n) / (10 + n)
    dtype: Literal["float32", "bfloat16"] = "float32"  # what a student's weights are in the loss; masters are float32
    remat: bool = False  # backward, compute anew what is no matrix product: softmaxes and activations are not kept
    seed: int = 0  # of the keys the loss gets
    log_every: int = 10  # steps between looks at the numbers
    eval_every: int = 0  # steps between evaluations, 0: none on the way
    save_every: int = 0  # steps between checkpoints, 0: only at the end
    keep: int = 2  # checkpoints


LOOP = ("log_every", "eval_every", "save_every", "keep")  # they change no number


def checked(settings: Settings) -> Settings:
    """The settings, with plain numbers.

    Raises:
      ValueError: one that makes no sense; names it, its value and what it must be.
    """
    if not isinstance(settings, Settings):
        raise ValueError(f"settings={show(settings)}: give specjax.train.Settings(steps=..)")
    ones = dict.fromkeys(("steps", "accumulate", "log_every", "keep"), 1)
    least = ones | dict.fromkeys(("warmup", "seed", "eval_every", "save_every"), 0)
    found: dict[str, Any] = {name: whole(name, getattr(settings, name), low) for name, low in least.items()}
    for name, (low, high) in {
        "learning_rate": (TINY, math.inf), "floor": (0.0, 1.0), "b1": (0.0, BELOW), "b2": (0.0, BELOW),
        "eps": (TINY, 1.0), "weight_decay": (0.0, math.inf), "clip": (TINY, math.inf), "ema": (0.0, BELOW),
    }.items():  # fmt: skip
        found[name] = _number(name, getattr(settings, name), low, high)
    for name, choices in (("schedule", ("cosine", "linear")), ("dtype", ("float32", "bfloat16"))):
        if getattr(settings, name) not in choices:
            raise ValueError(f"{name}={show(getattr(settings, name))}: choose {' or '.join(map(repr, choices))}")
    if found["warmup"] >= max(found["steps"], 2):
        raise ValueError(f"warmup={found['warmup']}: must be fewer than steps={found['steps']}")
    return settings._replace(**found, remat=bool(settings.remat))


def _number(name: str, value: Any, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high or (number == math.inf and name != "clip"):
        words = "more than 0" if low == TINY else "0 or more"
        below = {math.inf: "", BELOW: " and less than 1"}.get(high, f" and at most {high:g}")
        raise ValueError(f"{name}={show(value)}: must be {words}{below}")
    return number


def rate(settings: Settings) -> Callable[[Any], Any]:
    """Learning rate by number of updates done: up in a line, then down."""
    import optax

    warmup = settings.warmup or max(1, settings.steps * 4 // 100)
    rest, peak = max(settings.steps - warmup, 1), settings.learning_rate
    up = optax.linear_schedule(peak / warmup, peak, warmup)
    if settings.schedule == "cosine":
        down = optax.cosine_decay_schedule(peak, rest, alpha=settings.floor)
    else:
        down = optax.linear_schedule(peak, peak * settings.floor, rest)
    return optax.join_schedules([up, down], [warmup])


def transform(settings: Settings) -> Any:
    """The optax transformation."""
    import optax

    adamw = optax.adamw(
        rate(settings), settings.b1, settings.b2, settings.eps, weight_decay=settings.weight_decay, mask=_matrices
    )
    return optax.chain(optax.clip_by_global_norm(settings.clip), adamw)


def _matrices(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
