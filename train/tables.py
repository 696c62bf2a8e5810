"""The student that needs no gradient: tables of the target's successor laws, summed over a corpus."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from specjax import drafters
from specjax.drafters.tables import Tables
from specjax.static import show, whole
from specjax.train.data import Corpus
from specjax.train.packing import is_held_out

TRIES = 8


def build_tables(
    *corpora: Corpus, candidates: int = 4, max_contexts: int = 1 << 20, megabytes: float | None = None, every: int = 50
) -> Tables:
    """Tables for `specjax.drafters.recycling` from all that is not held out.

    Takes about 0.7 GB of memory per million tokens while they are built.

    Args:
      corpora: of one target.
      candidates: next tokens kept per context.
      max_contexts: contexts of two tokens kept, the most frequent ones.
      megabytes: largest file; as many of the rarest contexts are left out as it takes. None: no limit.
      every: see `specjax.train.packing.texts_of`.

    Raises:
      ValueError: no corpus, or corpora of several targets; a file size that not even one context fits in.
    """
    if not corpora or len({corpus.manifest["target"] for corpus in corpora}) > 1:
        raise ValueError(f"corpora={show([str(c.directory) for c in corpora])}: give one or more, all of one target")
    if megabytes is not None and not megabytes > 0:
        raise ValueError(f"megabytes={show(megabytes)}: must be above 0, or None")
    most = whole("max_contexts", max_contexts, 1)
    for _ in range(TRIES):
        tables = drafters.build_tables(
            laws_of(*corpora, every=every), corpora[0].vocab_size, candidates=candidates, max_contexts=most
        )
        size = file_size(tables)
        if megabytes is None or size <= megabytes * 1e6:
            return tables
        # What is not bigrams stays; they take room by number, and a little less than that when there are fewer.
        rest = file_size(tables._replace(bigram=tables.bigram[:1] * 0))
        held = num_contexts(tables)[1]
        fitting = int(held * 0.97 * (megabytes * 1e6 - rest) / max(1, size - rest))
        most = min(max(1, fitting), held - 1)
        if most < 1:
            break
    raise ValueError(f"megabytes={megabytes}: tables with a single context of two tokens take {size / 1e6:.2f} MB")


def laws_of(*corpora: Corpus, every: int = 50) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The laws of every conversation that is not held out, see `Corpus.laws`."""
    for corpus in corpora:
        yield from corpus.laws(lambda number: not is_held_out(number, every))


def num_contexts(tables: Tables) -> tuple[int, int]:
    """How many contexts of one and of two tokens are held."""
    def held(table: Any, order: int) -> int:
        return int((table[..., order + (table.shape[-1] - order) // 2] > 0).sum())

    return held(tables.unigram, 1), held(tables.bigram, 2)


def file_size(tables: Tables) -> int:
    """Bytes of what `Tables.save` writes, within a few."""
    file = io.BytesIO()
    np.savez_compressed(file, **tables._asdict())
    return file.tell()


def report(tables: Tables) -> str:
    """One line for the terminal."""
    (one, two), size = num_contexts(tables), (tables.unigram.nbytes + tables.bigram.nbytes) / 1e6
    return (
        f"{tables.num_laws:,} laws; {one:,} contexts of one token, {two:,} of two; "
        f"{size:.1f} MB in memory, {file_size(tables) / 1e6:.2f} MB as a file"
    )
