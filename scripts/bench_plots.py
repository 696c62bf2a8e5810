"""Plots of bench.py as SVG text, from what it measured."""

import io
from collections.abc import Callable
from typing import Any

import bench_report
import bench_stats
from bench_runs import Law
from script_tools import figure_class

Rows = list[tuple[dict, list[dict]]]  # cells and their summaries


def figures(result: dict) -> list[tuple[str, str]]:
    """Captions and SVG of every plot that there is something to put in."""
    rows: Rows = [(cell, found) for cell in result["cells"] if (found := bench_stats.summary(cell))]
    made = [
        ("Tokens per second by batch. Where a dashed line (plain) lies above, speculation does not pay.", by_batch),
        ("Tokens per round by number of draft tokens.", tau_by_k),
        ("Ratio to the fastest plain decoding, whole calls, by kind of prompt.", by_category),
        ("The speed-up that the parts of a round imply, beside the one that was measured.", predicted),
        ("What the target's passes reach, below what this machine reads and multiplies at best.", roofline),
        ("Where the time of a round goes.", time_split),
    ]
    found = [(caption, svg) for caption, plot in made if (svg := drawn(plot, rows, result))]
    if result.get("textbook", {}).get("lengths"):
        found = [*textbook(result["textbook"]), *found]
    return found


def drawn(plot: Callable[..., bool], rows: Rows, result: dict, size=(8.0, 4.5)) -> str:
    figure = figure_class("--html")(figsize=size, layout="constrained")
    axes = figure.subplots()
    return svg(figure) if plot(axes, rows, result) else ""


def svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # the declaration before it names a file on the network


def law(cell: dict) -> str:
    return str(Law(cell["temperature"], cell["top_p"]))


def by_batch(axes, rows: Rows, result: dict) -> bool:
    lines: dict[tuple[str, str, str], list] = {}
    for cell, found in rows:
        for row in found:
            q = row["decode_quartiles"]
            lines.setdefault((row["name"], law(cell), row["kind"]), []).append((cell["batch"], row["decode_rate"], q))
    for number, ((name, drawn_by, kind), points) in enumerate(lines.items()):
        batch, rate, quartiles = zip(*sorted(points), strict=True)
        low, high = ([max(0.0, sign * (q[i] - r)) for q, r in zip(quartiles, rate)] for i, sign in ((0, -1), (2, 1)))
        form = "--" if kind == "plain" else ":" if kind == "peer" else "-"
        axes.errorbar(batch, rate, (low, high), fmt="o" + form, color=f"C{number % 10}", capsize=2,
                      label=f"{name}, {drawn_by}")  # fmt: skip
    axes.set(xlabel="batch", ylabel="tokens per second, decoding", xscale="log")
    ticks = sorted({cell["batch"] for cell, _ in rows})
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    return finished(axes, bool(lines))


def tau_by_k(axes, rows: Rows, result: dict) -> bool:
    lines: dict[str, list] = {}
    for cell, found in rows:
        for row in found:
            if row["kind"] == "speculative" and row["tau"]:
                name = f"{row['drafter']} {row['rule']} {row['dtype']}, batch {cell['batch']}, {law(cell)}"
                lines.setdefault(name, []).append((row["num_draft_tokens"], row["tau"]))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
    ks = sorted({k for points in lines.values() for k, _ in points})
    axes.set_xticks(ks, list(map(str, ks)))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="draft tokens of a round, K", ylabel="tau")
    return finished(axes, bool(lines))


def by_category(axes, rows: Rows, result: dict) -> bool:
    bars = [(f"{row['name']}, {law(cell)}", row) for cell, found in rows for row in found
            if row["categories"] and row["kind"] != "plain"]  # fmt: skip
    names = list(dict.fromkeys(name for _, row in bars for name in row["categories"]))
    for number, (label, row) in enumerate(bars):
        step = 0.8 / len(bars)
        values = [row["categories"].get(name, {}).get("wall_ratio") or 0 for name in names]
        values.append(row["macro_wall_ratio"] or 0)
        places = [place + (number + 0.5) * step - 0.4 for place in range(len(values))]
        axes.bar(places, values, step, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names) + 1), [*names, "mean"], rotation=15)
    axes.set(ylabel="ratio")
    return finished(axes, bool(bars))


def predicted(axes, rows: Rows, result: dict) -> bool:
    points = [
        (row["predicted_ratio"], row["decode_ratio"], f"{row['name']}, batch {cell['batch']}, {law(cell)}")
        for cell, found in rows
        for row in found
        if row.get("predicted_ratio") and row["kind"] != "plain"
    ]
    for number, (x, y, label) in enumerate(points):
        axes.plot(x, y, "osD^v"[number // 10 % 5], color=f"C{number % 10}", label=label)
    if points:
        ends = [0.9 * min(min(p[:2]) for p in points), 1.1 * max(max(p[:2]) for p in points)]
        axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xlabel="predicted: tokens per pass / (draft + verify + accept + commit)", ylabel="measured decode ratio")
    return finished(axes, bool(points))


def roofline(axes, rows: Rows, result: dict) -> bool:
    ceilings = result["ceilings"]
    points = [(*bench_report.roofline(row, ceilings)[:2], f"{row['name']}, batch {cell['batch']}", row)
              for cell, found in rows for row in found if row["split"]]  # fmt: skip
    if not points or not ceilings:
        return False
    widest = [0.5 * min(p[0] for p in points), 4 * max(p[0] for p in points)]
    for number, (dtype, top) in enumerate(ceilings["matmul_gflop_s"].items()):
        ridge = top / ceilings["read_gb_s"]
        xs = sorted({widest[0], min(max(ridge, widest[0]), widest[1]), widest[1]})
        axes.plot(xs, [min(top, x * ceilings["read_gb_s"]) for x in xs], color=f"C{number}", label=f"roof, {dtype}")
    seen: dict[str, tuple] = {}
    for x, y, label, row in points:
        seen.setdefault(label, (x, y, row))
    for number, (label, (x, y, row)) in enumerate(seen.items()):
        axes.plot(x, y, "s" if row["kind"] == "plain" else "o", color=f"C{(number + 2) % 10}", label=label)
    axes.set(xlabel="FLOPs per byte", ylabel="GFLOP/s", xscale="log", yscale="log")
    return finished(axes, True)


def time_split(axes, rows: Rows, result: dict) -> bool:
    names = [f"{name}_ms" for name in (*bench_stats.PARTS, "rest")]
    bars = [(f"{row['name']}, batch {cell['batch']}, {law(cell)}", row["split"]) for cell, found in rows
            for row in found if row["split"] and "rest_ms" in row["split"]][:24]  # fmt: skip
    left = [0.0] * len(bars)
    for name in names:
        widths = [max(0.0, part[name]) for _, part in bars]
        axes.barh(range(len(bars)), widths, left=left, label=name.removesuffix("_ms"))
        left = [a + b for a, b in zip(left, widths)]
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize="x-small")
    axes.invert_yaxis()
    axes.set(xlabel="ms per round")
    return finished(axes, bool(bars))


def textbook(found: dict) -> list[tuple[str, str]]:
    """Tokens a round and speed-up by K at the smallest batch; the ratio by batch."""
    least = min(row["batch"] for row in found["lengths"])
    lines = sorted((row for row in found["lengths"] if row["batch"] == least), key=lambda row: row["num_draft_tokens"])
    figure = figure_class("--html")(figsize=(11, 4), layout="constrained")
    tokens, speed, fade = figure.subplots(1, 3)
    ks = [row["num_draft_tokens"] for row in lines]
    for axes, names in ((tokens, ("tokens_per_round", "expected_tokens")),
                        (speed, ("ratio", "expected_ratio", "expected_ratio_measured_v"))):  # fmt: skip
        for name in names:
            form = "o-" if name in ("tokens_per_round", "ratio") else "--"
            label = {"ratio": "measured", "tokens_per_round": "measured", "expected_tokens": "(1-a^(K+1))/(1-a)",
                     "expected_ratio": "v = 1", "expected_ratio_measured_v": "measured v(K)"}[name]  # fmt: skip
            axes.plot(ks, [row[name] for row in lines], form, label=label)
        axes.set(xlabel="K", ylabel="tokens a round" if axes is tokens else f"speed-up, batch {least}")
        axes.legend(fontsize="small")
    for count in sorted({row["num_draft_tokens"] for row in found["lengths"] if row["batch"] > least}):
        points = [(row["batch"], row["ratio"], row["expected_ratio_measured_v"]) for row in found["lengths"]
                  if row["num_draft_tokens"] == count]  # fmt: skip
        batch, ratio, form = zip(*sorted(points), strict=True)
        (line,) = fade.plot(batch, ratio, "o-", label=f"K = {count}")
        fade.plot(batch, form, "--", color=line.get_color())
    fade.axhline(1, color="black", linewidth=0.8)
    fade.set(xlabel="batch", ylabel="speed-up; dashed: measured v(K)", xscale="log")
    fade.legend(fontsize="small")
    caption = f"A chain beside Leviathan et al. (2023), with alpha = {found['alpha']:.3f} of all lengths together."
    return [(caption, svg(figure))]


def finished(axes, there: bool) -> bool:
    if there:
        axes.legend(fontsize="x-small")
    return there
