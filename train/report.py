"""``train_report.png``: how a run went, from its ``metrics.jsonl``."""

import os
import pathlib
import re
from typing import Any

import numpy as np

from specjax.train.monitor import columns, read


def report(directory: str | os.PathLike, path: str | os.PathLike | None = None, smooth: float = 0.02) -> pathlib.Path:
    """Draws loss and alpha over steps and tokens, alpha by depth, and tau of every evaluation.

    Args:
      directory: of the run, or its ``metrics.jsonl``.
      path: of the picture; None is ``train_report.png`` beside the metrics.
      smooth: length of the running mean drawn over the numbers of single steps, as a share of the run.

    Returns:
      The path of the picture.

    Raises:
      ValueError: matplotlib is missing; no step in the metrics.
      FileNotFoundError: no metrics.
    """
    source = pathlib.Path(directory).expanduser()
    source = source / "metrics.jsonl" if source.is_dir() else source
    rows = read(source)
    found = columns(rows)
    if not found:
        raise ValueError(f"{source} has no step in it: train first")
    evaluations = [row for row in rows if "evaluation" in row]
    path = source.with_name("train_report.png") if path is None else pathlib.Path(path)
    figure = _figure(found, evaluations, max(1, round(smooth * len(found["step"]))))
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=120)
    os.replace(part, path)
    return path


def _figure(found: dict[str, np.ndarray], evaluations: list[dict[str, Any]], width: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a report needs matplotlib: pip install '.[plots]' in the clone") from None
    figure = Figure(figsize=(11, 7), layout="constrained")
    (loss, alpha), (depths, tau) = figure.subplots(2, 2)
    tokens = np.cumsum(np.nan_to_num(found["tokens"]))
    _lines(loss, found["step"], {"loss": found["loss"]}, width, "step", "loss")
    _lines(alpha, tokens, {"alpha": found["alpha"]} if "alpha" in found else {}, width, "tokens learnt", "alpha")
    by_depth = {name: found[name] for name in ["alpha", *sorted(_deeper(found), key=_depth)] if name in found}
    named = {f"depth {_depth(name)}": values for name, values in by_depth.items()}
    _lines(depths, found["step"], named, width, "step", "alpha by depth")
    _taus(tau, evaluations)
    return figure


def _deeper(found: dict[str, np.ndarray]) -> list[str]:
    return [name for name in found if re.fullmatch(r"alpha_\d+", name)]


def _depth(name: str) -> int:
    return int(name.partition("_")[2] or 1)


def _lines(axes: Any, x: np.ndarray, lines: dict[str, np.ndarray], width: int, across: str, up: str) -> None:
    for number, (name, values) in enumerate(lines.items()):
        if width > 1:
            axes.plot(x, values, color=f"C{number}", alpha=0.2, linewidth=0.8)
        axes.plot(x, _running(values, width), color=f"C{number}", label=name)
    axes.set(xlabel=across, ylabel=up)
    if len(lines) > 1:
        axes.legend()


def _running(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last ``width`` numbers that are numbers; of fewer at the beginning."""
    there = np.isfinite(values)
    sums, counts = (np.cumsum(part, dtype=float) for part in (np.where(there, values, 0.0), there))
    for part in (sums, counts):
        part[width:] -= part[:-width].copy()
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _taus(axes: Any, evaluations: list[dict[str, Any]]) -> None:
    """A line per temperature: over all tokens, and dashed the mean over categories."""
    points: dict[float, list[tuple[int, float, float]]] = {}
    for line in evaluations:
        said = line["evaluation"]
        for row in said if isinstance(said, list) else [said]:
            if isinstance(row, dict) and row.get("tau") is not None:
                point = line["step"], row["tau"], row.get("macro") or row["tau"]
                points.setdefault(float(row.get("temperature") or 0.0), []).append(point)
    for number, (temperature, line) in enumerate(sorted(points.items())):
        steps, all_tokens, macro = zip(*line, strict=True)
        axes.plot(steps, all_tokens, "o-", color=f"C{number}", label=f"temperature {temperature:g}")
        axes.plot(steps, macro, "--", color=f"C{number}", linewidth=0.8, label="mean over categories")
    axes.set(xlabel="step", ylabel="tau, held-out prompts")
    if points:
        axes.legend()
