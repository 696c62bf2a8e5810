"""How fast decoding is, plain and with drafts, and why: one report with its own evidence.

    python scripts/bench.py --quick --html report.html
    python scripts/bench.py prompts.jsonl --temperature 0 0.7 1 --top-p 1 0.9 1 --repeats 1 --json b.json --html b.html
    python scripts/bench.py --textbook --html textbook.html
    python scripts/bench.py --passes --capacity 4096 --length 300
    python scripts/bench.py prompts.jsonl --dtype float32 --peer transformers --peer-python torch/bin/python

Every configuration (drafter x rule x draft tokens x dtype) takes its turn on every prompt, after a run that compiles;
so do the parts of a round, and what the machine can read and multiply. Plain decoding is measured with both dtypes, and
a ratio is against the faster one at the same batch and temperature. Texts are compared as they come: greedy, and under
rule "match", they must be those of plain decoding with the same weights; where they part, the target must have been
undecided (a near tie), else the program ends with status 1. See docs/benchmark.md.
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
from typing import Any

import bench_options
import bench_parts
import bench_report
import bench_runs
import bench_stats
import draft_sources
from script_tools import check_lengths, keep_programs, machine, progress, run_script, write

TURNS = 9  # of parts of a round, at least, per cell


def prompts(args: argparse.Namespace):
    from generate_options import DEMO_PROMPTS

    from specjax.train.evaluate import Prompt, part, read_prompts

    if args.prompts:
        found = read_prompts(args.prompts)
    else:
        kinds = ("question", "tips", "edit", "list")
        found = [Prompt(text, kind) for text, kind in zip(DEMO_PROMPTS, kinds, strict=True)]
    return part(found, "all", args.per_category)


# --- configurations


def ways(args: argparse.Namespace, models: dict, how) -> list[bench_runs.Way]:
    """Plain decoding of every dtype, then all combinations."""
    found = [bench_runs.ours(f"plain {dtype}", dtype, lm, None, None, how) for dtype, lm in models.items()]
    for dtype in dict.fromkeys(args.dtype):
        for name in dict.fromkeys(args.drafter):
            for number in args.num_draft_tokens or [None]:
                label, drafter = build(name, args.model, models[dtype], number)
                for rule in args.rule or [drafter.default_rule]:
                    shown = f"{label} K={drafter.num_draft_tokens} {dtype}"
                    shown += "" if rule == drafter.default_rule else f" {rule}"
                    found.append(bench_runs.ours(shown, dtype, models[dtype], drafter, rule, how, label))
                    if args.adaptive:
                        shown += " adaptive"
                        found.append(bench_runs.ours(shown, dtype, models[dtype], drafter, rule, how, label, True))
    unique = {way.name: way for way in found}  # sources with a number of their own come but once
    return list(unique.values())


def build(name: str, model: str, lm, number: int | None):
    """Label and drafter."""
    if name == "chain":
        return "chain", draft_sources.chain(lm, model, number)
    parts = draft_sources.sources(name, model)
    return " + ".join(part.label for part in parts), draft_sources.make(parts, lm, number)


def of_batch(every: list[bench_runs.Way], batch: int, args: argparse.Namespace) -> list[bench_runs.Way]:
    """The ways to measure in a batch: peers assist one row at a time, and the textbook takes every other length."""
    kept = list(args.num_draft_tokens or [])
    if args.textbook and batch > min(args.batch) and len(kept) > 3:
        kept = kept[1::2]
        every = [way for way in every if way.facts.get("num_draft_tokens", kept[0]) in kept]
    return [way for way in every if way.kind != bench_runs.PEER or batch == 1 or way.facts.get("drafter") is None]


# --- measuring


class Bench:
    """A run: what has been measured so far, and where it is written."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        options = {name: str(value) if hasattr(value, "parent") else value for name, value in vars(args).items()}
        self.result: dict[str, Any] = {"machine": machine(), "options": options, "ceilings": None, "cells": []}
        self.timer = bench_parts.Timer()

    def measure(self, every: list, texts: list, categories: list, how, bar) -> None:
        bench_parts.add_ceilings(self.timer)
        laws = [bench_runs.Law(t, p) for t, p in zip(self.args.temperature, self.args.top_p, strict=True)]
        for batch in dict.fromkeys(self.args.batch):
            grouped = bench_runs.groups(texts, categories, batch)
            for law in dict.fromkeys(laws):
                self._cell(of_batch(every, batch, self.args), grouped, law, how, bar)

    def _cell(self, chosen: list, grouped: list, law, how, bar) -> None:
        progress(f"batch {len(grouped[0].ids)}, {law}: compiling", line=True)
        parts, named = bench_parts.Timer(), {}
        middle = sorted(grouped, key=lambda group: max(map(len, group.ids)))[len(grouped) // 2]
        if not self.args.no_split:
            named = {way.name: bench_parts.add_round(parts, way, middle, law, how)
                     for way in chosen if way.kind != bench_runs.PEER and not way.facts.get("adaptive")}  # fmt: skip
        models = {way.name: way.lm for way in chosen}
        at = len(self.result["cells"])

        def between():
            for _ in range(math.ceil(TURNS / len(grouped))):
                parts.turn()
                self.timer.turn()

        def saved(cell):
            for name, places in named.items():
                part = bench_parts.split(parts, places)
                part["flops"], part["bytes"] = bench_parts.work(
                    models[name], cell["batch"], part["width"], part["length"]
                )
                cell["ways"][name]["split"] = part
            self.result["ceilings"] = bench_parts.ceilings(self.timer)
            self.result["cells"][at:] = [cell]
            self.save()
            bar.update()

        bench_runs.cell(chosen, grouped, law, self.args.repeats, how, between, saved, bar.set_description)
        bar.write(bench_report.cell_table(self.result["cells"][at]))

    def save(self) -> None:
        if self.args.json:
            write(self.args.json, json.dumps(self.result, indent=1).encode())

    def finish(self) -> None:
        """What follows from all cells, and the report."""
        cells = self.result["cells"]
        if not cells:
            return
        self.result["summary"] = [bench_stats.summary(cell) for cell in cells]
        self.result["unequal"] = bench_runs.unequal(cells)
        if self.args.textbook:
            self.result["textbook"] = bench_stats.textbook(cells)
        self.save()
        print(bench_report.closing(self.result))
        if self.args.html:
            from bench_plots import figures

            write(self.args.html, bench_report.page(self.result, figures(self.result)).encode())


class Quiet:
    """A progress bar that is none: where tqdm is missing, or nobody watches."""

    def update(self) -> None: ...

    def set_description(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        print(text, flush=True)


@contextlib.contextmanager
def progress_bar(total: int):
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        yield Quiet()
        return
    with tqdm(total=total, unit="group") as bar:
        yield bar


# --- single passes


def passes(args: argparse.Namespace, models: dict) -> dict:
    """Windows of 1 .. 16 tokens in both dtypes, beside reading every float32 weight once."""
    timer = bench_parts.Timer()
    bench_parts.add_ceilings(timer)
    for dtype, lm in models.items():
        for batch in args.batch:
            for width in (1, 2, 4, 8, 16):
                timer.add((dtype, batch, width), lambda lm=lm, batch=batch, width=width: bench_parts.passes(
                    lm, batch, width, args.capacity, args.length))  # fmt: skip
    for _ in range(max(args.repeats, TURNS)):
        timer.turn()
    rows: list[dict] = [
        {"dtype": name[0], "batch": name[1], "window": name[2], "ms": statistics.median(times), "min_ms": min(times)}
        for name, times in timer.times.items()
        if name[0] in models
    ]
    found = {"machine": machine(), "ceilings": bench_parts.ceilings(timer), "passes": rows, "capacity": args.capacity,
             "length": args.length}  # fmt: skip
    weights = bench_parts.work(models["float32"], 1, 1, 0)[1]
    for row in rows:
        plain = min(other["ms"] for other in rows if other["window"] == 1 and other["batch"] == row["batch"])
        row |= {"plain_steps": row["ms"] / plain,
                "of_floor": 1e-6 * weights / found["ceilings"]["read_gb_s"] / row["ms"]}  # fmt: skip
    return found


def work(args: argparse.Namespace) -> int:
    import specjax
    from specjax.train.evaluate import encode

    chosen = [] if args.passes else prompts(args)
    for name in args.drafter:
        if name != "chain":
            draft_sources.sources(name, args.model, more=("chain",))  # before a model is loaded
    keep_programs()
    progress(f"loading {args.model}", line=True)
    models = {dtype: specjax.load(args.model, dtype=dtype) for dtype in bench_options.DTYPES}
    if args.passes:
        found = passes(args, models)
        print(bench_report.passes_table(found))
        if args.json:
            write(args.json, json.dumps(found, indent=1).encode())
        return 0
    args.dtype = args.dtype or [next(iter(bench_parts.quickest(models)))]
    how = bench_runs.How(args.max_new_tokens, args.seed, args.ignore_eos)
    texts = [encode(models["float32"], prompt) for prompt in chosen]
    bench = Bench(args)
    with contextlib.ExitStack() as stack:
        every = ways(args, models, how)
        if args.peer:
            import bench_peer

            peer = stack.enter_context(bench_peer.started(args, models["float32"]))
            every += bench_peer.ways(peer, args, how)
        drafters = [way.drafter for way in every if way.drafter is not None]
        check_lengths(texts, args.max_new_tokens, models["float32"].model, *drafters)
        total = sum(-(-len(texts) // batch) for batch in dict.fromkeys(args.batch)) * len(args.temperature)
        bar = stack.enter_context(progress_bar(total))
        try:
            bench.measure(every, texts, [prompt.category for prompt in chosen], how, bar)
        except KeyboardInterrupt:
            bench.finish()
            raise
        bench.finish()
    return 1 if bench.result["unequal"] else 0


def main() -> None:
    args = bench_options.parse(description=__doc__)
    run_script(work, args, kept=args.json)


if __name__ == "__main__":
    main()
