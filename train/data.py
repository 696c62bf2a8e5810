"""Text of the target's own with its laws, kept in shards: written once, continued after a stop, read by all training.

A directory holds ``manifest.json`` and ``shard-00000.npz``, ... Shard i holds conversations i * n to (i + 1) * n - 1
end to end and appears whole or not at all, always the next one. What a conversation says depends on the settings in the
manifest and its number alone, so a run that was stopped and continued gives what one run would have given. Several
processes with a target on a mesh of all their devices write it together, and the first of them the files.

    tokens       [P] conversations end to end
    lengths, starts, temperatures   [n] of each: tokens, first token of the answer, temperature of the answer
    top_ids, top_probs   [P, 8] the target's likeliest next tokens after each token, under its softmax
"""

import contextlib
import json
import os
import pathlib
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import processes
from specjax.models.identity import fingerprint
from specjax.models.language_model import LanguageModel, checked
from specjax.static import show, whole
from specjax.train import generate, sources
from specjax.train.generate import TOP, Conversation

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = ("tokens", "lengths", "starts", "temperatures", "top_ids", "top_probs")


class Corpus(NamedTuple):
    """Shards of one directory. Nothing is read before it is asked for."""

    directory: pathlib.Path
    manifest: dict[str, Any]
    shards: int

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def opening(self) -> int:
        """Tokens with which every conversation begins: the chat template's."""
        return self.manifest["opening"]

    def shard(self, index: int) -> dict[str, np.ndarray]:
        """The arrays of a shard.

        Raises:
          ValueError: a damaged file.
        """
        return _read_shard(_path(self.directory, index))

    def conversations(self) -> Iterator[Conversation]:
        """All of them, in the order of their numbers."""
        for index in range(self.shards):
            shard = self.shard(index)
            ends = np.cumsum(shard["lengths"], dtype=np.int64)
            for row, (end, size) in enumerate(zip(ends, shard["lengths"])):
                place = slice(end - size, end)
                yield Conversation(
                    index * self.manifest["shard_size"] + row, shard["tokens"][place], int(shard["starts"][row]),
                    float(shard["temperatures"][row]), shard["top_ids"][place], shard["top_probs"][place],
                )  # fmt: skip

    def laws(
        self, wanted: Callable[[int], bool] = lambda number: True
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """``(tokens, top_ids, top_probs)`` per conversation whose number is ``wanted``, as
        `specjax.drafters.build_tables` takes them; without the laws inside the opening, the same every time."""
        for text in self.conversations():
            if not wanted(text.number):
                continue
            probs = text.top_probs.copy()
            probs[: self.opening] = 0
            yield text.tokens, text.top_ids, probs


def write_corpus(
    target: LanguageModel, directory: str | os.PathLike, *, tokens: int = 1_000_000, source: Any = None,
    seed: int = 0, batch: int = 256, slots: int = 320, shard_size: int = 200, steps: int = generate.STEPS,
    progress: bool = True,
) -> Corpus:  # fmt: skip
    """Writes text of the target with its laws, or goes on writing.

    Args:
      target: the language model, on a mesh or not.
      directory: for the shards; a new one, or one with shards of the same settings, after which it goes on.
      tokens: how many are wanted, without the opening; whole shards are written until there are as many, or the source
        has ended.
      source: `SelfSynthesis` (the default), `Prompts` or `Text`.
      seed: of everything drawn.
      batch: conversations at a time. Changes speed and, in bfloat16, how matrix products are rounded: a run that is
        continued gives the very same text if it is continued with the same batch.
      slots: longest conversation.
      shard_size: conversations per shard.
      steps: tokens per slot between two looks from Python.
      progress: shows a bar.

    Raises:
      ValueError: a directory of other settings or another target (says which differ); too little disk; what
        `specjax.train.sources.ready` and `specjax.train.generate.converse` refuse.
    """
    target, directory = checked("target", target), pathlib.Path(directory)
    tokens, shard_size = whole("tokens", tokens, 1), whole("shard_size", shard_size, 1)
    seed = whole("seed", seed, 0)
    plan = sources.ready(sources.SelfSynthesis() if source is None else source, target, seed, slots)
    manifest = {
        "format": FORMAT, "target": fingerprint(target), "dtype": _dtype(target), "vocab_size": target.model.vocab_size,
        "seed": seed, "source": plan.facts, "slots": whole("slots", slots, 2), "shard_size": shard_size,
        "opening": len(plan.opening), "left_out": plan.left_out,
    }  # fmt: skip
    corpus = _same(directory, manifest)
    have = _count(corpus) if corpus.shards else 0
    processes.wait("the corpus was looked at")  # all have seen the same
    last = None if plan.count is None else -(-plan.count // shard_size)
    if have >= tokens or corpus.shards == last:
        return corpus
    _room(directory, tokens - have, plan.count, slots, manifest)
    directory.mkdir(parents=True, exist_ok=True)
    _note(corpus, have)
    last = (1 << 32) // shard_size if last is None else last

    def numbers() -> Iterator[range]:
        return (_numbers(index, shard_size, plan.count) for index in range(corpus.shards, last))

    running = generate.converse(
        target, (plan.make(number) for shard in numbers() for number in shard), opening=plan.opening,
        middle=plan.middle, answer=plan.answer, seed=seed, batch=batch, slots=slots, steps=steps,
    )  # fmt: skip
    with progress_bar(progress and processes.first(), have, tokens, "tok") as bar:
        shards = _full(running, numbers(), bar, corpus.opening)
        return _collect(corpus, shards, have, tokens, last)


def _numbers(index: int, size: int, count: int | None) -> range:
    """Conversations of a shard; ``count``: of all there are."""
    return range(index * size, (index + 1) * size if count is None else min((index + 1) * size, count))


def _full(
    running: Iterator[Conversation], shards: Iterable[range], bar: Any, opening: int
) -> Iterator[list[Conversation]]:
    """The conversations of each shard, from conversations that end in any order."""
    waiting: dict[int, Conversation] = {}
    for numbers in shards:
        while not all(number in waiting for number in numbers):
            text = next(running)
            waiting[text.number] = text
            bar.update(len(text.tokens) - opening)
        yield [waiting.pop(number) for number in numbers]


def _collect(corpus: Corpus, shards: Iterator[list[Conversation]], have: int, goal: int, last: int) -> Corpus:
    """Writes shards until there is enough."""
    while have < goal and corpus.shards < last:
        texts = next(shards)
        if processes.first():
            write_shard(_path(corpus.directory, corpus.shards), texts, corpus.vocab_size)
        have += sum(len(text.tokens) - corpus.opening for text in texts)
        corpus = corpus._replace(shards=corpus.shards + 1)
        _note(corpus, have)
    processes.wait("corpus")
    if _shards(corpus.directory) < corpus.shards:
        raise ValueError(f"{corpus.directory} lacks shards that the first process wrote: give one that all share")
    return corpus


def _note(corpus: Corpus, tokens: int) -> None:
    """The manifest, with how far it is."""
    if processes.first():
        complete = {"complete": {"shards": corpus.shards, "tokens": tokens}}
        write_json(corpus.directory / MANIFEST, corpus.manifest | complete)


def read_corpus(directory: str | os.PathLike) -> Corpus:
    """The shards that are complete, also while more are being written.

    Raises:
      FileNotFoundError: no corpus there.
      ValueError: a manifest of another kind; no complete shard.
    """
    directory = pathlib.Path(directory)
    path = directory / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"directory={show(str(directory), 300)} has no {MANIFEST}: write_corpus makes one")
    manifest = _manifest(path)
    shards = _shards(directory)
    if not shards:
        raise ValueError(f"{directory} has no complete shard yet: let write_corpus go on")
    return Corpus(directory, manifest, shards)


def _manifest(path: pathlib.Path) -> dict[str, Any]:
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} has format {show(manifest.get('format'))}, not {FORMAT}: write the corpus anew")
    return manifest


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """An object in a file.

    Raises:
      ValueError: something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): choose another directory") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged (it holds {show(value)}): choose another directory")
    return value


def _same(directory: pathlib.Path, manifest: dict[str, Any]) -> Corpus:
    """What is in the directory, if it is of these settings."""
    path = directory / MANIFEST
    if not path.exists():
        if _shards(directory):
            raise ValueError(f"{directory} has shards and no {MANIFEST}: choose another directory")
        return Corpus(directory, manifest, 0)
    old = _manifest(path)
    wrong = [name for name in manifest if old.get(name) != manifest[name]]
    if wrong and _shards(directory):  # nothing was written yet: nothing is lost
        pairs = [f"{name} {show(old.get(name), 200)} there, {show(manifest[name], 200)} now" for name in wrong]
        raise ValueError(f"{directory} was written with other settings: {'; '.join(pairs)}. Choose another directory")
    return Corpus(directory, manifest, _shards(directory))


def _path(directory: pathlib.Path, index: int) -> pathlib.Path:
    return directory / f"shard-{index:05d}.npz"


def _shards(directory: pathlib.Path) -> int:
    count = 0
    while _path(directory, count).exists():
        count += 1
    return count


def _count(corpus: Corpus) -> int:
    """Tokens of all shards, without the openings."""
    total = 0
    for index in range(corpus.shards):
        lengths = _read_shard(_path(corpus.directory, index), ("lengths",))["lengths"]
        total += int(lengths.sum()) - corpus.opening * len(lengths)
    return total


def write_shard(path: pathlib.Path, texts: list[Conversation], vocab_size: int) -> None:
    """Writes conversations as one file, which appears whole or not at all."""
    small = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    arrays = {
        "tokens": np.concatenate([text.tokens for text in texts]).astype(small),
        "lengths": np.asarray([len(text.tokens) for text in texts], np.int32),
        "starts": np.asarray([text.start for text in texts], np.int32),
        "temperatures": np.asarray([text.temperature for text in texts], np.float32),
        "top_ids": np.concatenate([text.top_ids for text in texts]).astype(small),
        "top_probs": np.concatenate([text.top_probs for text in texts]),
    }
    scratch = path.with_name(f".{path.name}.part")
    with open(scratch, "wb") as file:
        np.savez_compressed(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def _read_shard(path: pathlib.Path, names: tuple[str, ...] = ARRAYS) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as file:
            return {name: file[name] for name in names}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and those after it, and write them again") from error


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a file that appears whole or not at all."""
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(scratch, path)


def _dtype(target: LanguageModel) -> str:
    return "/".join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(target.params)}))


def _room(directory: pathlib.Path, tokens: int, count: int | None, slots: int, manifest: dict[str, Any]) -> None:
    tokens = tokens if count is None else min(tokens, count * slots)
    word = 2 if manifest["vocab_size"] <= 1 << 16 else 4
    check_room(directory, f"{tokens:,} tokens", tokens * (word + TOP * (word + 2)))


def check_room(directory: pathlib.Path, what: str, needed: int) -> None:
    """Says how many bytes of disk are needed at most.

    Raises:
      ValueError: fewer are free.
    """
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    print(f"{what} into {directory}: at most {needed / 1e6:,.1f} MB; {free / 1e6:,.0f} MB are free", flush=True)
    if free < needed:
        raise ValueError(
            f"directory={directory}: {needed / 1e6:,.1f} MB are needed and {free / 1e6:,.1f} MB are free: "
            "choose another disk, or less of it"
        )


class _Silent:
    def update(self, count: int) -> None:
        pass


def progress_bar(shown: bool, done: int, total: int, unit: str) -> Any:
    """A context whose ``update(n)`` counts.

    Raises:
      ValueError: a bar is wanted and tqdm is missing.
    """
    if not shown:
        return contextlib.nullcontext(_Silent())
    try:
        from tqdm import tqdm
    except ImportError:
        raise ValueError("tqdm is missing: pip install '.[train]' in the clone, or progress=False") from None
    return tqdm(total=total, initial=done, unit=unit, mininterval=1)
