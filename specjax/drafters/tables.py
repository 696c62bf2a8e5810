"""Hash tables of next-token laws: context of one or two tokens -> the likeliest next tokens and their probabilities.

One array a table, so that a lookup is one read of a bucket: ``[.., buckets, ways, order + 2 C]`` integers, an entry
being its context (the stored key), C token ids, C probabilities in units of 1 / 65535, most probable first. An entry
whose first probability is 0 is free. A bucket holds a few contexts whose hashes collide; another context is never
mistaken for the one that was asked for, because the key is compared.
"""

import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.static import show, whole
from specjax.types import Array

WAYS = 4  # entries of a bucket
UNIT = 65535
FORMAT = 1


class Law(NamedTuple):
    """The likeliest next tokens of each row, most probable first; all probabilities 0: no law is known."""

    ids: Array  # [B, C] int32
    probs: Array  # [B, C] float32


class Tables(NamedTuple):
    """Laws of one target, summed over text it wrote, see `build_tables`. Numpy arrays."""

    unigram: Any  # [buckets, ways, 1 + 2 C], contexts of the last token
    bigram: Any  # [buckets, ways, 2 + 2 C], contexts of the last two
    vocab_size: int
    num_laws: int  # how many positions were summed

    def save(self, path: str | os.PathLike) -> None:
        """Writes an ``.npz`` file, which appears whole or not at all.

        Raises:
          ValueError: path is no path.
          OSError: the place cannot be written to.
        """
        path = _path(path)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(scratch, "wb") as file:
                np.savez_compressed(file, format=FORMAT, **self._asdict())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def load_tables(path: str | os.PathLike) -> Tables:
    """Reads what `Tables.save` wrote.

    Raises:
      FileNotFoundError: nothing at the path.
      ValueError: the file holds something else, or is damaged.
    """
    path = _path(path)
    where = f"path={show(str(path), 300)}"
    if not path.exists():
        raise FileNotFoundError(f"{where}: no such file; `Tables.save` writes one")
    if path.is_dir():
        raise ValueError(f"{where} is a directory: give the file that `Tables.save` wrote")
    try:
        with path.open("rb") as file:
            found: Any = np.load(file)
            values = {name: found[name] for name in found.files} if hasattr(found, "files") else {}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{where}: damaged, or no tables of specjax ({error}); build them anew") from error
    missing = {"format", *Tables._fields} - set(values)
    if missing or values["format"].tolist() != FORMAT:
        what = f"lacks {sorted(missing)}" if missing else f"has format {values['format']}, not {FORMAT}"
        raise ValueError(f"{where}: no tables of specjax, the file {what}; build them anew")
    sizes = [whole(f"{where}: {name}", values[name], 1) for name in ("vocab_size", "num_laws")]
    tables = Tables(values["unigram"], values["bigram"], *sizes)
    for order, table in ((1, tables.unigram), (2, tables.bigram)):
        check_table(where, order, table, tables.vocab_size)
        largest = int(table[..., : (order + table.shape[-1]) // 2].max())  # of contexts and candidates
        if largest >= tables.vocab_size:
            raise ValueError(
                f"{where}: damaged, token {largest} of a vocabulary of {tables.vocab_size}; build them anew"
            )
    return tables


def check_table(what: str, order: int, table: Any, vocab_size: int) -> None:
    """Refuses what is no table of contexts of ``order`` tokens.

    Raises:
      ValueError: naming shape and type.
    """
    shape, kind = np.shape(table), getattr(table, "dtype", None)
    fits = len(shape) == 3 and shape[0] and not shape[0] & (shape[0] - 1) and shape[1] == WAYS
    if not fits or shape[2] <= order or (shape[2] - order) % 2 or kind != dtype_for(vocab_size):
        raise ValueError(
            f"{what}: the table of {order}-token contexts has shape {shape} and type {kind}, not [2**n, {WAYS}, "
            f"{order} + 2 C] of {np.dtype(dtype_for(vocab_size))}: build tables anew"
        )


def _path(path: Any) -> pathlib.Path:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"path={show(path)}: give the path of an .npz file")
    return pathlib.Path(path).expanduser()


def dtype_for(vocab_size: int) -> Any:
    """Integers wide enough for every token id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def num_buckets(entries: int) -> int:
    """A power of two, with room for ``entries`` at half of all slots or less."""
    return 1 << max(0, (2 * entries - 1) // WAYS).bit_length()


def empty(batch: int, buckets: int, order: int, candidates: int, vocab_size: int) -> Array:
    """A table per row, nothing in it."""
    return jnp.zeros((batch, buckets, WAYS, order + 2 * candidates), dtype_for(vocab_size))


def place(contexts: Any, buckets: int) -> tuple[Any, Any]:
    """Bucket and preferred way of contexts [.., order]; numpy in, numpy out. Bits as in multiplicative hashing."""
    words = contexts.astype(np.uint32)
    mixed = words[..., 0] * np.uint32(0x9E3779B1)
    for i in range(1, contexts.shape[-1]):
        mixed = ((mixed ^ (mixed >> np.uint32(15))) + words[..., i]) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> np.uint32(16))
    return (mixed & np.uint32(buckets - 1)).astype(np.int32), (mixed >> np.uint32(30)).astype(np.int32)


def look_up(table: Array, context: Array, rows: Array | None = None) -> Law:
    """The law of ``context [B, order]`` in a table shared by all rows, or in that of its row (``rows [B]``)."""
    order = context.shape[-1]
    bucket, _ = place(context, table.shape[-3])
    held = table[bucket] if rows is None else table[rows, bucket]  # [B, ways, order + 2 C]
    key = context.astype(table.dtype)
    same = jnp.all(held[:, :, :order] == key[:, None, :], axis=-1, keepdims=True)
    entry = jnp.max(jnp.where(same, held[:, :, order:], jnp.zeros((), table.dtype)), axis=1)  # a key is held once
    ids, units = jnp.split(entry, 2, axis=1)
    return Law(ids.astype(jnp.int32), units.astype(jnp.float32) * (1 / UNIT))


def write(table: Array, contexts: Array, ids: Array, probs: Array, valid: Array) -> Array:
    """Tables [B, ..] with the laws of ``contexts [B, T, order]`` written in; the latest of equal contexts wins.

    An entry goes where its context is, else to a free way of its bucket, else over another one. Of two new contexts
    that fall on the same slot in the same call the later one stays.

    Args:
      ids, probs: [B, T, C], most probable first.
      valid: [B, T]; the others are not written.
    """
    (batch, buckets, ways, _), order = table.shape, contexts.shape[-1]
    units = jnp.round(jnp.clip(probs, 0.0, 1.0) * UNIT)
    entries = jnp.concatenate([x.astype(table.dtype) for x in (contexts, ids, units)], axis=-1)
    bucket, home = place(contexts, buckets)
    rows = jnp.arange(batch)[:, None]
    held = table[rows, bucket]  # [B, T, ways, order + 2 C]
    free = held[..., order + ids.shape[-1]] == 0
    same = jnp.all(held[..., :order] == entries[:, :, None, :order], axis=-1) & ~free
    at_home = home[:, :, None] == jnp.arange(ways)[None, None]
    rank = jnp.where(same, 4, jnp.where(free, 2, 0)) + at_home.astype(jnp.int32)
    slot = bucket * ways + jnp.argmax(rank, axis=-1).astype(jnp.int32)
    valid = valid & (units[..., 0] > 0)
    after = np.triu(np.ones((slot.shape[1],) * 2, bool), 1)[None]
    overwritten = jnp.any((slot[:, :, None] == slot[:, None, :]) & valid[:, None, :] & after, axis=2)
    slot = jnp.where(valid & ~overwritten, slot, buckets * ways)
    flat = table.reshape(batch, buckets * ways, -1)
    return flat.at[rows, slot].set(entries, mode="drop").reshape(table.shape)


def build_tables(
    texts: Iterable[tuple[Any, Any, Any]], vocab_size: int, *, candidates: int = 4, max_contexts: int = 1 << 20
) -> Tables:
    """Sums a target's laws per context of one and two tokens and keeps the likeliest candidates of each.

    Args:
      texts: ``(tokens [L], top_ids [L, M], top_probs [L, M])`` per text, the M likeliest next tokens after each
        position under the target's softmax; probabilities of 0 where the law is not known. Contexts do not cross
        from one text to the next.
      vocab_size: of the target.
      candidates: how many next tokens to keep.
      max_contexts: the most frequent contexts of two tokens that are kept.

    Raises:
      ValueError: no law in the texts, shapes that do not fit, ids outside the vocabulary.
    """
    vocab_size, candidates = whole("vocab_size", vocab_size, 1), whole("candidates", candidates, 1)
    if vocab_size > 1 << 21:
        raise ValueError(f"vocab_size={vocab_size}: two tokens and a candidate must fit into 64 bits, at most 2**21")
    max_contexts = whole("max_contexts", max_contexts, 1)
    before, last, ids, probs = _gather(texts, vocab_size)
    known, paired = probs[:, 0] > 0, (probs[:, 0] > 0) & (before >= 0)
    if not known.any():
        raise ValueError("texts hold no law: give at least one position with top_probs above 0")
    one = _table(last[known], 1, ids[known], probs[known], vocab_size, candidates, vocab_size)
    pairs = before[paired] * vocab_size + last[paired]
    two = _table(pairs, 2, ids[paired], probs[paired], vocab_size, candidates, max_contexts)
    return Tables(one, two, vocab_size, int(known.sum()))


def _gather(texts: Iterable[tuple[Any, Any, Any]], vocab_size: int) -> tuple[np.ndarray, ...]:
    """(token before [P] or -1, token [P], ids [P, M], probs [P, M]) over all texts."""
    if not isinstance(texts, Iterable):
        raise ValueError(f"texts={show(texts)}: give (tokens, top_ids, top_probs) per text")
    parts = []
    for number, text in enumerate(texts):
        try:
            tokens, top_ids, top_probs = map(np.asarray, text)
        except (TypeError, ValueError):
            raise ValueError(f"texts[{number}] is {show(text)}: give arrays (tokens, top_ids, top_probs)") from None
        if tokens.ndim != 1 or top_ids.ndim != 2 or top_ids.shape != top_probs.shape or len(top_ids) != len(tokens):
            shapes = f"tokens {tokens.shape}, top_ids {top_ids.shape}, top_probs {top_probs.shape}"
            raise ValueError(f"texts[{number}] has {shapes}: must be [L], [L, M] and [L, M]")
        for name, array in (("tokens", tokens), ("top_ids", top_ids)):
            if array.size and array.dtype.kind not in "iu":
                raise ValueError(f"texts[{number}] has {name} of type {array.dtype}: give integers")
        tokens, top_ids, top_probs = tokens.astype(np.int64), top_ids.astype(np.int64), top_probs.astype(np.float32)
        if top_ids.shape[1] != (parts[0][2].shape[1] if parts else max(1, top_ids.shape[1])):
            raise ValueError(f"texts[{number}] has M = {top_ids.shape[1]} candidates: 1 or more, as many in every text")
        if top_probs.size and not 0 <= top_probs.min() <= top_probs.max() <= 1.001:
            raise ValueError(f"texts[{number}] has top_probs outside 0..1: give probabilities, no logits")
        for name, array in (("tokens", tokens), ("top_ids", top_ids)):
            if array.size and not 0 <= array.min() <= array.max() < vocab_size:
                raise ValueError(f"texts[{number}] has {name} outside 0..{vocab_size - 1}, the vocabulary")
        parts.append((np.concatenate([[-1], tokens])[:-1], tokens, top_ids, top_probs))
    if not parts:
        raise ValueError("texts is empty: give at least one text")
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def _table(
    contexts: np.ndarray, order: int, ids: np.ndarray, probs: np.ndarray, vocab_size: int, candidates: int, most: int
) -> np.ndarray:
    """One table from laws ids, probs [P, M] after contexts [P] (tokens as digits to the base of the vocabulary)."""
    names, inverse, counts = np.unique(contexts, return_inverse=True, return_counts=True)
    keys = np.repeat(inverse, ids.shape[1]) * vocab_size + ids.ravel()
    pairs, where = np.unique(keys, return_inverse=True)
    mass = np.bincount(where, probs.ravel().astype(np.float64))
    owner, token = pairs // vocab_size, pairs % vocab_size
    sort = np.lexsort((token, -mass, owner))
    owner, token, mass = owner[sort], token[sort], mass[sort]
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    best = rank < candidates
    units = np.zeros((len(names), 2, candidates), np.int64)
    units[owner[best], 0, rank[best]] = token[best]
    units[owner[best], 1, rank[best]] = np.round(np.minimum(mass / counts[owner], 1) * UNIT)[best]
    digits = names[:, None] // vocab_size ** np.arange(order - 1, -1, -1) % vocab_size
    entries = np.concatenate([digits, units[:, 0], units[:, 1]], axis=1)
    return _hashed(entries, counts, order, vocab_size, most)


def _hashed(entries: np.ndarray, counts: np.ndarray, order: int, vocab_size: int, most: int) -> np.ndarray:
    """Entries [E, ..] in buckets; the least frequent ones of a bucket that overflows are left out."""
    frequent = np.argsort(-counts, kind="stable")[:most]
    entries = entries[frequent]
    buckets = num_buckets(len(entries))
    bucket, _ = place(entries[:, :order], buckets)
    sort = np.argsort(bucket, kind="stable")  # frequent ones first within a bucket
    bucket, entries = bucket[sort], entries[sort]
    way = np.arange(len(bucket)) - np.searchsorted(bucket, bucket)
    table = np.zeros((buckets, WAYS, entries.shape[1]), dtype_for(vocab_size))
    fits = way < WAYS
    table[bucket[fits], way[fits]] = entries[fits]
    return table
