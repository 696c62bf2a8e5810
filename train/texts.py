"""Token texts for training: conversations in one file, cut into windows of one length, drawn in batches."""

import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.static import whole
from specjax.train.packing import most_frequent
from specjax.train.types import Batch


class Texts(NamedTuple):
    """Texts end to end."""

    tokens: np.ndarray  # [N] int32
    offsets: np.ndarray  # [C] where each begins
    lengths: np.ndarray  # [C]
    starts: np.ndarray  # [C] tokens of each, at its beginning, that are given and not learnt


def join(texts: Sequence[Sequence[int]], starts: Sequence[int] | None = None) -> Texts:
    """Texts from lists of token ids; ``starts`` defaults to 0."""
    lengths = np.asarray([len(text) for text in texts], np.int32)
    tokens = np.asarray([token for text in texts for token in text], np.int32)
    given = np.zeros(len(texts), np.int32) if starts is None else np.asarray(starts, np.int32)
    return Texts(tokens, (np.cumsum(lengths) - lengths).astype(np.int32), lengths, given)


def save(path: str | pathlib.Path, texts: Texts) -> None:
    """Writes an ``.npz`` file that `load` reads, under this very name. It appears whole or not at all; directories are
    made if need be."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez_compressed(
            file, tokens=texts.tokens.astype(np.uint32), offsets=texts.offsets, lengths=texts.lengths,
            answer_start=texts.starts,
        )  # fmt: skip
    part.replace(path)


def load(path: str | pathlib.Path) -> Texts:
    """Reads ``tokens``, ``offsets``, ``lengths`` and, if it is there, ``answer_start`` of an ``.npz`` file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: arrays that are missing or do not fit each other.
    """
    try:
        with open(path, "rb") as opened, np.load(opened) as file:
            found = {name: file[name] for name in ("tokens", "offsets", "lengths", "answer_start") if name in file}
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not an .npz file of arrays: {error}") from error
    missing = {"tokens", "offsets", "lengths"} - found.keys()
    if missing:
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}")
    tokens, offsets, lengths = (found[name].astype(np.int32) for name in ("tokens", "offsets", "lengths"))
    starts = found.get("answer_start", np.zeros(len(offsets))).astype(np.int32)
    fit = len(offsets) == len(lengths) == len(starts)
    if not fit or np.any(offsets + lengths > len(tokens)) or np.any(offsets < 0):
        raise ValueError(f"{path}: offsets and lengths do not describe its {len(tokens)} tokens")
    return Texts(tokens, offsets, lengths, starts)


def windows(texts: Texts, width: int, least: int = 8) -> Batch:
    """Every text cut into windows [N, width]; none holds parts of two texts.

    Args:
      least: windows with fewer tokens to learn are left out.

    Raises:
      ValueError: no window is left.
    """
    width = whole("width", width, 2)
    tokens, counts = [], []
    for offset, length, start in zip(texts.offsets, texts.lengths, texts.starts, strict=True):
        for begin in range(0, length, width):
            size = min(width, length - begin)
            learnt = (np.arange(width) < size) & (begin + np.arange(width) >= start)
            if learnt[1:].sum() >= min(least, width - 1):
                row = np.zeros(width, np.int32)
                row[:size] = texts.tokens[offset + begin : offset + begin + size]
                tokens.append(row)
                counts.append(learnt)
    if not tokens:
        raise ValueError(f"no text has {least} tokens to learn in a window of {width}: give longer ones")
    return Batch(jnp.asarray(np.stack(tokens)), jnp.asarray(np.stack(counts)))


def batches(every: Batch, size: int, seed: int = 0) -> Iterator[Batch]:
    """Batches of ``size`` windows without end: all windows in a new order, again and again.

    Raises:
      ValueError: fewer windows than ``size``.
    """
    count = every.tokens.shape[0]
    if count < whole("size", size, 1):
        raise ValueError(f"there are {count} windows, fewer than a batch of {size}: give more text")
    return _batches(every, size, seed)


def _batches(every: Batch, size: int, seed: int) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(every.tokens.shape[0])
        for begin in range(0, len(order) - size + 1, size):
            at = order[begin : begin + size]
            yield Batch(every.tokens[at], every.counts[at])


def frequent(texts: Texts, size: int, vocab_size: int) -> np.ndarray:
    """The ``size`` most frequent ids [size] int32 of the texts, ascending; among equals the lower id.

    Raises:
      ValueError: more than there are tokens.
    """
    return most_frequent(size, np.bincount(texts.tokens, minlength=vocab_size))
