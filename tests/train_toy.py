"""A toy loss, its batches and short runs, shared by the tests of the trainer: all compile the same few programs."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.static import bind
from specjax.train import trainer
from specjax.train.settings import Settings
from specjax.train.types import Batch, Mean

V, ROWS, WIDTH = 7, 16, 5
BAD = 99  # a token that makes the loss infinite


def toy(params, given, batch, key):
    """Softmax regression on the token before, plus noise that a step must draw anew: sums, not divided."""
    del key
    assert params["w"].dtype == given["dtype"].dtype
    x = jax.nn.one_hot(batch.tokens[:, :-1], V, dtype=params["w"].dtype)
    said = jax.nn.log_softmax((x @ params["w"]).astype(jnp.float32) + params["bias"].astype(jnp.float32)[None, None])
    right = jnp.take_along_axis(said, batch.tokens[:, 1:, None] % V, axis=-1)[..., 0]
    counts = batch.counts[:, 1:].astype(jnp.float32)
    total = -(right * counts).sum() * jnp.where((batch.tokens == BAD).any(), jnp.inf, 1.0)
    measured = {"loss": Mean(total, counts.sum()), "alpha": Mean((jnp.exp(right) * counts).sum(), counts.sum())}
    return total, measured


LOSS = bind(toy)
GIVEN = {"dtype": jnp.zeros((), jnp.float32)}


def weights():
    rng = np.random.default_rng(3)
    return {"w": rng.normal(size=(V, V)).astype(np.float32), "bias": np.zeros(V, np.float32), "ids": np.arange(3)}


def batches(step):
    rng = np.random.default_rng([7, step])
    tokens = rng.integers(0, V, (ROWS, WIDTH)).astype(np.int32)
    return Batch(tokens, (rng.random((ROWS, WIDTH)) < rng.random((ROWS, 1))).astype(bool))


RUN = Settings(steps=12, learning_rate=0.1, log_every=3, save_every=4, eval_every=6, keep=2)


class Stopped(Exception):
    pass


def stopping(step, at=7):
    if step == at:
        raise Stopped
    return batches(step)


def fit(directory, settings=RUN, source=batches, params=None, **how):
    how = {"given": GIVEN, "progress": False, "evaluate": lambda step, params: {"tau": float(step)}, **how}
    return trainer.fit(LOSS, weights() if params is None else params, source, settings, directory=directory, **how)


def numbers(history):
    return {name: column for name, column in history.items() if name != "seconds"}
