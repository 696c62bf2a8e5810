"""The target's hidden states of all rows, computed once and kept on disk: for training over the same rows many times.

A directory holds ``features.json`` and ``features.bin``: the bits of bfloat16 [N, T, F], row by row, in a file that is
mapped into memory and so may be larger than it. A run that was stopped goes on at the first row that is missing. Of
several processes all compute, and the first writes.
"""

import functools
import hashlib
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import processes
from specjax.models.language_model import LanguageModel, checked
from specjax.static import show, whole
from specjax.train import data, heads
from specjax.train.packing import Packed
from specjax.types import Array

FORMAT = 1
FACTS, BITS = "features.json", "features.bin"


class Features(NamedTuple):
    """Features of packed rows. Nothing is read before it is asked for."""

    directory: pathlib.Path
    bits: np.ndarray  # [N, T, F] uint16, mapped: bfloat16
    layers: tuple[int, ...]

    def of(self, rows: np.ndarray) -> Array:
        """[len(rows), T, F] bfloat16 of these rows, e.g. `specjax.train.packing.Batches.rows` of a step."""
        return jax.lax.bitcast_convert_type(jnp.asarray(self.bits[rows]), jnp.bfloat16)


def cache_features(
    target: LanguageModel, packed: Packed, layers: tuple[int, ...], directory: str | os.PathLike, *, batch: int = 8,
    progress: bool = True,
) -> Features:  # fmt: skip
    """Computes features, or what is missing of them.

    Args:
      target: a language model that can read without a cache, on a mesh or not.
      packed: the rows.
      layers: which hidden states, see `specjax.types.Model`; a head's are `specjax.train.heads.feature_layers`.
      directory: where they go; may hold those of an earlier call with the same arguments.
      batch: rows at a time.
      progress: shows a bar.

    Raises:
      ValueError: no layers; too little disk; a directory of other rows, layers or another target (says which differ).
    """
    target, directory, batch = checked("target", target), pathlib.Path(directory), whole("batch", batch, 1)
    layers = tuple(whole(f"layers[{i}]", layer, 0) for i, layer in enumerate(layers))
    if not layers:
        raise ValueError("layers=(): name at least one hidden state")
    count, width = packed.tokens.shape
    size = _size(target, layers)
    facts = {
        "format": FORMAT, "target": data.fingerprint(target), "rows": _digest(packed), "layers": list(layers),
        "shape": [count, width, size],
    }  # fmt: skip
    done = _done(directory, facts)
    processes.wait("the features were looked at")  # all have seen the same
    path = directory / BITS
    if done == 0:
        data.check_room(directory, f"features of {count:,} rows of {width}", 2 * count * width * size)
    kept = None
    if processes.first():
        directory.mkdir(parents=True, exist_ok=True)
        kept = np.memmap(path, np.uint16, "w+" if done == 0 else "r+", shape=(count, width, size))
    with data.progress_bar(progress and kept is not None, done, count, "row") as bar:
        for begin in range(done, count, batch):
            rows = np.arange(begin, min(begin + batch, count))
            found = _rows(target, packed, layers, np.pad(rows, (0, batch - len(rows)), mode="edge"))
            if kept is not None:
                kept[rows] = found[: len(rows)]
                if begin % (64 * batch) == 0 or rows[-1] == count - 1:
                    kept.flush()
                    data.write_json(directory / FACTS, facts | {"done": int(rows[-1]) + 1})
            bar.update(len(rows))
    processes.wait("features")
    return Features(directory, np.memmap(path, np.uint16, "r", shape=(count, width, size)), layers)


def _rows(target: LanguageModel, packed: Packed, layers: tuple[int, ...], rows: np.ndarray) -> np.ndarray:
    """[len(rows), T, F] uint16."""
    tokens, documents = jnp.asarray(packed.tokens[rows].astype(np.int32)), jnp.asarray(packed.documents[rows])
    return processes.fetch(_read(target.model, layers, target.params, tokens, documents))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(model, layers: tuple[int, ...], params, tokens: Array, documents: Array) -> Array:
    features = heads.read(LanguageModel(model, params), tokens, layers, documents).features
    return jax.lax.bitcast_convert_type(features.astype(jnp.bfloat16), jnp.uint16)


def _size(target: LanguageModel, layers: tuple[int, ...]) -> int:
    one = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(functools.partial(_read, target.model, layers), target.params, one, one).shape[-1]


def _digest(packed: Packed) -> str:
    made = hashlib.sha256(packed.tokens.astype(np.uint32).tobytes())
    made.update(packed.documents.astype(np.int32).tobytes())
    return made.hexdigest()


def _done(directory: pathlib.Path, facts: dict[str, Any]) -> int:
    """Rows that are there already."""
    path = directory / FACTS
    if not path.exists() or not (directory / BITS).exists():
        return 0
    old = data.read_json(path)
    wrong = [name for name in facts if old.get(name) != facts[name]]
    if wrong:
        pairs = [f"{name} {show(old.get(name))} there, {show(facts[name])} now" for name in wrong]
        raise ValueError(f"{directory} holds other features: {'; '.join(pairs)}. Choose another directory")
    expected = 2 * int(np.prod(facts["shape"]))
    if (directory / BITS).stat().st_size != expected:
        raise ValueError(f"{directory / BITS} is damaged: it has not {expected} bytes; remove it")
    return int(old.get("done", 0))
