"""The numbers of a run: a JSONL file, a bar on the terminal, event files for TensorBoard.

A line of ``metrics.jsonl`` is a step,
``{"step": 3, "loss": .., "alpha": .., "tokens": .., "seconds": ..}`` (tokens: what was
learnt; seconds: the mean step time of its stretch), or an evaluation, ``{"step": 3, "evaluation": ..}``.
"""

import json
import math
import os
import pathlib
import time
from typing import Any

import numpy as np

from specjax import processes
from specjax.train.types import Mean


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; what a crash has cut off at its end is left out.

    Raises:
      ValueError: a broken line elsewhere; names it.
    """
    lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # no line feed: the writer was stopped in the middle
                break
            raise ValueError(
                f"{path}, line {number}: not a line of metrics ({error}); delete that line to go on without it"
            ) from error
        found.append(row)
    return found


class Journal:
    """The lines of a run, in memory and in a file, which the first of several processes writes.

    Args:
      path: of the file, or None.
      step: where the run goes on: later lines are from steps that will be done again, and are dropped.
    """

    def __init__(self, path: pathlib.Path | None, step: int):
        self.rows: list[dict[str, Any]] = []
        self._path = path
        if path is None:
            return
        if path.exists() and step:
            self.rows = [row for row in read(path) if row["step"] <= step]
        if not processes.first():
            self._path = None
            return
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        os.replace(part, path)

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Writes lines, all the way to the disk."""
        self.rows += rows
        if self._path is not None and rows:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())

    def history(self) -> dict[str, np.ndarray]:
        """Columns over steps, NaN where a step has no such number."""
        return columns(self.rows)

    def evaluations(self) -> list[dict[str, Any]]:
        """The lines that are evaluations."""
        return [row for row in self.rows if "evaluation" in row]


def columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The numbers of the lines that are steps, by name."""
    steps = [row for row in rows if "evaluation" not in row]
    names = dict.fromkeys(name for row in steps for name in row)
    found = {name: np.asarray([_number(row.get(name)) for row in steps]) for name in names}
    return found | ({"step": found["step"].astype(np.int64)} if steps else {})


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


class Monitor:
    """Writes down what happens and shows it.

    Args:
      journal: where it goes.
      steps: of the whole run.
      bar: show one.
      tensorboard: directory of event files, or None.

    Raises:
      ValueError: tqdm or tensorboardX is asked for and missing.
    """

    def __init__(self, journal: Journal, steps: int, *, bar: bool, tensorboard: pathlib.Path | None):
        self._journal, self._began = journal, time.perf_counter()
        done = max((row["step"] for row in journal.rows), default=0)
        self._events = None if tensorboard is None else _events(tensorboard, done)
        self._bar = _bar(steps, done) if bar else None

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: Any) -> None:
        for part in (self._bar, self._events):
            if part is not None:
                part.close()

    def clock(self) -> None:
        """A stretch of steps begins now."""
        self._began = time.perf_counter()

    def write(self, first: int, rows: list[dict[str, Mean]]) -> None:
        """The numbers of consecutive steps from ``first`` on, which have just ended."""
        if not rows:
            return
        seconds = (time.perf_counter() - self._began) / len(rows)
        lines = [
            {"step": first + i}
            | {name: _plain(mean.value()) for name, mean in row.items()}
            | {"tokens": float(_tokens(row)), "seconds": seconds}
            for i, row in enumerate(rows)
        ]
        self._journal.append(lines)
        if self._bar is not None:
            self._bar.set_postfix(_shown(rows, seconds), refresh=False)
            self._bar.update(len(rows))
        if self._events is not None:
            for line in lines:
                for name, value in line.items():
                    if name != "step" and value is not None:
                        self._events.add_scalar(name, value, line["step"])

    def evaluation(self, step: int, found: Any) -> None:
        """What an evaluation after ``step`` steps has found."""
        found = _json(found)
        self._journal.append([{"step": step, "evaluation": found}])
        if self._events is not None:
            for row in found if isinstance(found, list) else [found]:
                if isinstance(row, dict) and row.get("tau") is not None:
                    self._events.add_scalar(f"tau, temperature {row.get('temperature', 0):g}", row["tau"], step)


def _plain(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None  # JSON knows no NaN


def _tokens(row: dict[str, Mean]) -> Any:
    """Tokens learnt in a step; the loss may weigh them, alpha does not."""
    return row.get("alpha", row["loss"]).weight


def _json(value: Any) -> Any:
    """NamedTuples as objects, and no NaN."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(name): _json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(part) for part in value]
    return _plain(value) if isinstance(value, float) else value


def _shown(rows: list[dict[str, Mean]], seconds: float) -> dict[str, str]:
    """Over the whole stretch: sums of sums, so that long batches count for more."""
    def mean(name):
        return Mean(*(np.sum([getattr(row[name], part) for row in rows]) for part in Mean._fields)).value()

    shown = {name: f"{mean(name):.3f}" for name in ("loss", "alpha") if name in rows[0]}
    tokens = sum(map(_tokens, rows))
    return shown | {"tok/s": f"{tokens / max(seconds * len(rows), 1e-9):.0f}"}


def _bar(steps: int, done: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        raise ValueError("progress=True needs tqdm: pip install '.[train]' in the clone, or progress=False") from None
    return tqdm(total=steps, initial=done, unit="step")


def _events(folder: pathlib.Path, done: int) -> Any:
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("tensorboard=True needs tensorboardX: pip install tensorboardX") from None
    return SummaryWriter(str(folder), purge_step=done + 1)
