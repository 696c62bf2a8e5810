"""From times and counts to what the report says. Plain Python and numpy; a cell is what bench_runs.cell returns."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax import theory

RESAMPLED = 2000
BASELINES = "plain"
PARTS = ("draft", "verify", "accept", "commit")


def summary(cell: dict) -> list[dict[str, Any]]:
    """A row per way: rates, ratios to the fastest plain way, acceptance, the split of a round, prediction.

    Rates are all tokens over the sum of median times; "decode" leaves the prefill out. Quartiles are over single
    groups and repeats, paired with the baseline of the same group and repeat; the interval of 95% is by resampling
    groups.
    """
    ways, groups = cell["ways"], cell["groups"]
    count = min(len(way["runs"]) for way in ways.values())
    if not count:
        return []
    rows = {name: _rates(way["runs"][:count], cell["batch"]) for name, way in ways.items()}
    plain = [name for name, way in ways.items() if way["kind"] == BASELINES]
    best = {kind: max(plain, key=lambda name: rows[name][f"{kind}_rate"], default=None) for kind in ("wall", "decode")}
    for name, way in ways.items():
        row = rows[name]
        row |= {"name": name, **{key: way.get(key) for key in ("kind", "dtype", "drafter", "rule", "num_draft_tokens")}}
        row |= acceptance(way["runs"])
        for kind, reference in best.items():
            if reference is not None:
                row |= _ratio(way["runs"][:count], ways[reference]["runs"][:count], kind)
                row[f"{kind}_baseline"] = reference
        row["categories"] = _categories(way, ways.get(best["wall"]), groups[:count], cell["batch"])
        ratios = [found["wall_ratio"] for found in row["categories"].values() if "wall_ratio" in found]
        row["macro_wall_ratio"] = statistics.mean(ratios) if ratios else None
        row["equality"] = way.get("equality")
        row["split"] = way.get("split")
    _predict(rows, best["decode"])
    return list(rows.values())


def _rates(runs: Sequence[dict], batch: int) -> dict[str, Any]:
    tokens = sum(run["tokens"] for run in runs)
    found: dict[str, Any] = {"tokens": tokens}
    for kind in ("wall", "decode"):
        seconds = sum(statistics.median(run[kind]) for run in runs)
        singles = [run["tokens"] / second for run in runs for second in run[kind]]
        found[f"{kind}_rate"] = tokens / seconds if seconds else 0.0
        found[f"{kind}_quartiles"] = np.quantile(singles, (0.25, 0.5, 0.75)).tolist()
    found["prefill_ms"] = 1e3 * statistics.mean(statistics.median(run["prefill"]) for run in runs)
    if all("passes" in run for run in runs):
        passes = sum(run["passes"] for run in runs)
        found["tokens_per_pass"] = tokens / max(1, passes)  # of the whole batch
        found["round_ms"] = 1e3 * sum(statistics.median(run["decode"]) for run in runs) / max(1, passes)
    return found


def acceptance(runs: Sequence[dict]) -> dict[str, Any]:
    """tau, alpha and alpha by position of runs together."""
    if not all("rounds" in run for run in runs):
        return {"tau": None, "alpha": None, "per_position": []}
    judged, accepted = (np.sum([run[name] for run in runs], axis=0) for name in ("judged_at", "accepted_at"))
    rounds = sum(run["rounds"] for run in runs)
    return {
        "tau": sum(run["emitted"] for run in runs) / rounds if rounds else None,
        "alpha": float(accepted.sum() / judged.sum()) if judged.sum() else None,
        "per_position": [float(a / j) if j else None for a, j in zip(accepted, judged, strict=True)],
    }


def _ratio(runs: Sequence[dict], reference: Sequence[dict], kind: str) -> dict[str, Any]:
    """Tokens per second over those of the reference, which may have written other texts of other lengths."""

    def columns(found):
        return np.asarray([(run["tokens"], statistics.median(run[kind])) for run in found], float)

    ours, theirs = columns(runs), columns(reference)
    singles = [
        run["tokens"] / second / (other["tokens"] / wait)
        for run, other in zip(runs, reference, strict=True)
        for second, wait in zip(run[kind], other[kind], strict=True)
        if other["tokens"]
    ]

    def over(rows):
        a, b = ours[rows].sum(axis=-2), theirs[rows].sum(axis=-2)
        return (a[..., 0] / a[..., 1]) / (b[..., 0] / b[..., 1])

    drawn = np.random.default_rng(0).integers(0, len(runs), (RESAMPLED, len(runs)))
    return {
        f"{kind}_ratio": float(over(np.arange(len(runs)))),
        f"{kind}_ratio_quartiles": np.quantile(singles, (0.25, 0.5, 0.75)).tolist(),
        f"{kind}_ratio_interval": np.quantile(over(drawn), (0.025, 0.975)).tolist() if len(runs) > 1 else None,
    }


def _categories(way: dict, reference: dict | None, groups: Sequence[dict], batch: int) -> dict[str, dict]:
    names = list(dict.fromkeys(group["category"] for group in groups))
    if "" in names or len(names) < 2:
        return {}
    found = {}
    for name in names:
        at = [i for i, group in enumerate(groups) if group["category"] == name]
        runs = [way["runs"][i] for i in at]
        found[name] = {"prompts": len(at) * batch, "tau": acceptance(runs)["tau"]}
        if reference is not None:
            found[name] |= {
                kind: value for kind, value in _ratio(runs, [reference["runs"][i] for i in at], "wall").items()
                if not kind.endswith("interval")
            }  # fmt: skip
    return found


def _predict(rows: dict[str, dict], baseline: str | None) -> None:
    """The speed-up that the parts imply: tokens per pass, over all parts in plain steps; and what of a measured round
    they leave over."""
    plain = None if baseline is None else rows[baseline]
    for row in rows.values():
        part = row["split"]
        if not part or "round_ms" not in row:
            continue
        part |= {"round_ms": row["round_ms"], "rest_ms": row["round_ms"] - _known(part)}
        if plain is None or not plain["split"]:
            continue
        tokens = row["tokens_per_pass"] / plain["tokens_per_pass"]
        row["predicted_ratio"] = tokens * _known(plain["split"]) / _known(part)


def _known(part: dict) -> float:
    return sum(part[f"{name}_ms"] for name in PARTS)


# --- Leviathan et al., arXiv 2211.17192 (2023)


def textbook(cells: Sequence[dict]) -> dict[str, Any]:
    """Chains of every length beside the closed forms. Costs are in steps of the fastest plain way of their batch.

    Returns:
      "alpha", over all lengths of the smallest batch, and "lengths": per batch and K what was measured and what the
      forms say, with v = 1 and with the v that was measured.
    """
    tables = [(cell["batch"], summary(cell)) for cell in sorted(cells, key=lambda cell: cell["batch"])]
    chains = [run for name, way in min(cells, key=lambda cell: cell["batch"])["ways"].items()
              if way["kind"] == "speculative" for run in way["runs"]]  # fmt: skip
    widest = max((len(run["judged_at"]) for run in chains), default=0)
    padded = [{**run, **{name: run[name] + [0] * (widest - len(run[name])) for name in ("judged_at", "accepted_at")}}
              for run in chains]  # fmt: skip
    alpha = acceptance(padded)["alpha"] if padded else None
    if alpha is None:
        return {"alpha": None, "lengths": []}
    lengths = []
    for batch, rows in tables:
        plain = next(row for row in rows if row["name"] == rows[0]["decode_baseline"])
        step = _known(plain["split"])
        for row in rows:
            if row["kind"] != "speculative":
                continue
            part, count = row["split"], row["num_draft_tokens"]
            draft, verify = part["draft_ms"] / step, (_known(part) - part["draft_ms"]) / step
            lengths.append({
                "batch": batch, "num_draft_tokens": count, "dtype": row["dtype"], "draft_cost": draft / count,
                "verify_cost": verify, "tokens_per_round": row["tau"],
                "expected_tokens": theory.expected_tokens(alpha, count), "ratio": row["decode_ratio"],
                "expected_ratio": theory.speed_up(alpha, count, draft_cost=draft / count),
                "expected_ratio_measured_v": theory.speed_up(alpha, count, draft_cost=draft / count,
                                                             verify_cost=verify),
            })  # fmt: skip
    return {"alpha": alpha, "lengths": lengths}
