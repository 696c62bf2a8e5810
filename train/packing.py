"""Texts as training rows of one width, several in a row, and batches of rows that follow from (seed, step) alone."""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.static import show, whole
from specjax.train.data import Corpus
from specjax.train.generate import Conversation
from specjax.train.types import Batch

OPEN = 256  # rows with room that are looked at for the next text


class Packed(NamedTuple):
    """Rows of several texts each; what `Batch` holds, of all rows."""

    tokens: np.ndarray  # [N, T] uint16 or uint32, 0 in padding
    counts: np.ndarray  # [N, T] bool: the token is to be learnt
    documents: np.ndarray  # [N, T] int32 which text of its row, from 0 on; -1: padding
    texts: int  # that are in it
    cut: int  # of those, longer than a row and therefore in several pieces
    empty: int  # texts without a token to learn, left out

    def report(self) -> str:
        """One line for the terminal."""
        learnt, real = int(self.counts.sum()), int((self.documents >= 0).sum())
        left_out = f"; {self.empty:,} texts have no token to learn and are left out" if self.empty else ""
        return (
            f"{self.texts:,} texts ({self.cut:,} cut) in {len(self.tokens):,} rows of {self.tokens.shape[1]}, "
            f"{real / max(1, self.tokens.size):.0%} full; {learnt:,} of {real:,} tokens to learn{left_out}"
        )


def texts_of(*corpora: Corpus, held_out: bool = False, every: int = 50) -> Iterator[Conversation]:
    """Conversations of corpora: those to train on, or those held out.

    Args:
      held_out: gives the others, every ``every``-th by number, which also stay out when the corpus grows.
      every: 2 or more.
    """
    whole("every", every, 2)
    for corpus in corpora:
        for text in corpus.conversations():
            if is_held_out(text.number, every) == held_out:
                yield text


def is_held_out(number: int, every: int = 50) -> bool:
    """Whether conversation ``number`` is never trained on, nor any choice made by it."""
    return number % every == every - 1


def pack(texts: Iterable[Conversation], width: int) -> Packed:
    """Whole texts into rows, each into the first row that has room; answers are to be learnt.

    A text that is longer than a row is cut into pieces, which do not see each other. The first token of a piece has
    nothing before it and is not learnt; a piece without a token to learn is left out.

    Args:
      texts: conversations; their ``start`` is the first token to learn.
      width: T, tokens of a row.

    Raises:
      ValueError: nothing to learn in any text.
    """
    width = whole("width", width, 2)
    placed: list[tuple[int, int, Conversation, int]] = []  # row, column, text, where the piece begins
    rows: list[int] = []  # row numbers with room
    room: list[int] = []  # how much
    count = number = cut = empty = 0
    for text in texts:
        number += 1
        size = len(text.tokens)
        begins = [begin for begin in range(0, size, width) if _learnt(text, begin, width).any()]
        cut += size > width
        empty += not begins
        for begin in begins:
            need = min(width, size - begin)
            at = next((i for i, left in enumerate(room) if left >= need), None)
            if at is None:
                rows.append(count)
                room.append(width)
                count, at = count + 1, len(rows) - 1
            placed.append((rows[at], width - room[at], text, begin))
            room[at] -= need
            if room[at] < 2 or len(rows) > OPEN:
                at = at if room[at] < 2 else int(np.argmin(room))
                del rows[at], room[at]
    if not placed:
        raise ValueError(f"none of {number} texts has a token to learn: give texts with answers")
    packed = _filled(placed, count, width)
    return Packed(*packed, texts=number - empty, cut=cut, empty=empty)


def _learnt(text: Conversation, begin: int, width: int) -> np.ndarray:
    """Which tokens of the piece from ``begin`` on are to be learnt."""
    places = np.arange(begin, min(begin + width, len(text.tokens)))
    return (places >= text.start) & (places > begin)


def _filled(placed: list, count: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kind = np.result_type(*{text.tokens.dtype for _, _, text, _ in placed})
    tokens, counts = np.zeros((count, width), kind), np.zeros((count, width), bool)
    documents, inside = np.full((count, width), -1, np.int32), np.zeros(count, np.int32)
    for row, column, text, begin in placed:
        learnt = _learnt(text, begin, width)
        place = slice(column, column + len(learnt))
        tokens[row, place], counts[row, place] = text.tokens[begin : begin + len(learnt)], learnt
        documents[row, place] = inside[row]
        inside[row] += 1
    return tokens, counts, documents


class Batches(NamedTuple):
    """An endless series of batches, every one a function of its number: to go on after a stop, go on counting.

    Rows come in a new order every epoch. An epoch need not be whole batches: the next one begins within a batch.
    """

    packed: Packed
    size: int  # rows of a batch
    seed: int = 0

    @property
    def steps_per_epoch(self) -> float:
        return len(self.packed.tokens) / self.size

    def rows(self, step: int) -> np.ndarray:
        """Which rows batch number ``step``, from 0 on, consists of: [size]."""
        count = len(self.packed.tokens)
        epochs, places = np.divmod(np.arange(step * self.size, (step + 1) * self.size), count)
        return np.asarray([_order(self.seed, int(e), count)[p] for e, p in zip(epochs, places, strict=True)])

    def at(self, step: int) -> Batch:
        """Batch number ``step``."""
        return self.of(self.rows(step))

    def of(self, rows: np.ndarray) -> Batch:
        """The batch of these rows."""
        tokens = jnp.asarray(self.packed.tokens[rows].astype(np.int32))
        return Batch(tokens, jnp.asarray(self.packed.counts[rows]), jnp.asarray(self.packed.documents[rows]))

    def since(self, step: int = 0) -> Iterator[Batch]:
        """Batches from number ``step`` on, without end."""
        while True:
            yield self.at(step)
            step += 1


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def batches(packed: Packed, size: int, seed: int = 0) -> Batches:
    """Batches of ``size`` rows.

    Raises:
      ValueError: a size below 1 or a negative seed.
    """
    return Batches(packed, whole("size", size, 1), whole("seed", seed, 0))


def vocabulary(texts: Iterable[Conversation], size: int, vocab_size: int) -> np.ndarray:
    """The ids [size] int32, ascending, that are most frequent in answers; then in whole texts; then the lowest.

    Give it what is trained on, see `texts_of`, not what is held out.

    Raises:
      ValueError: more than there are tokens.
    """
    answers, whole_texts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for text in texts:
        answers += np.bincount(text.tokens[text.start :], minlength=vocab_size)
        whole_texts += np.bincount(text.tokens, minlength=vocab_size)
    return most_frequent(size, answers, whole_texts)


def most_frequent(size: int, *counts: np.ndarray) -> np.ndarray:
    """The ``size`` ids with the largest counts [V], ascending; ties by the next counts, then the lower id."""
    vocab_size = len(counts[0])
    if whole("size", size, 1) > vocab_size:
        raise ValueError(f"size={show(size)}: the target has {vocab_size} tokens")
    order = np.lexsort((np.arange(vocab_size), *(-count for count in reversed(counts))))
    return np.sort(order[:size]).astype(np.int32)
