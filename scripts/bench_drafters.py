"""Tokens per pass (tau) of draft sources that need no training, by category of prompt; with --wall also the speed-up.

    python scripts/bench_drafters.py prompts.jsonl --tables tables.npz
    python scripts/bench_drafters.py prompts.jsonl --sources ngram recycling --wall --per-category 2

Prompts are a JSONL file with "prompt" and, if there are kinds of them, "category" in each line; each is one user turn.
Tau of a category is all its tokens over all its passes; "macro" is the mean over categories. The text is the same for
every source (rule "match"), so sources are compared on the same passes of the same text. --wall times plain decoding
with both weight types and each source in turn, batch 1, prefill included, on warm programs; the ratio is against the
faster plain one, all tokens over the sum of median times.
"""

import argparse
import functools
import importlib
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections import defaultdict

import jax

SOURCES = ("ngram", "suffix", "lookahead", "recycling", "recycling+tables", "cascade")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=pathlib.Path, help="JSONL file")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights when drafting")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, help="default: all there are")
    parser.add_argument("--tables", type=pathlib.Path, help="what build_tables.py wrote, for recycling+tables, cascade")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[7], metavar="N")
    parser.add_argument("--batch", type=int, default=10, help="prompts at a time for tau")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--top-p", type=float, default=0.9, help="where temperature is not 0")
    parser.add_argument("--per-category", type=int, help="only the first so many prompts of each category")
    parser.add_argument("--wall", action="store_true", help="also time it; only counts on a machine that is idle")
    parser.add_argument("--repeats", type=int, default=3, help="with --wall")
    args = parser.parse_args(arguments)
    if min(args.batch, args.repeats, args.max_new_tokens, args.per_category or 1, *args.num_draft_tokens) < 1:
        parser.error("--batch, --repeats, --max-new-tokens, --per-category and --num-draft-tokens are 1 or more")
    if args.sources and "recycling+tables" in args.sources and not args.tables:
        parser.error("recycling+tables needs --tables")
    return args


def read_prompts(path: pathlib.Path, per_category: int | None) -> list[tuple[str, str]]:
    """(category, prompt) of every line."""
    found, kept = [], defaultdict(int)
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            sys.exit(f"{path}, line {number}: not JSON ({error.msg})")
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            sys.exit(f"{path}, line {number}: needs an object with a string 'prompt'")
        category = str(entry.get("category", "all"))
        kept[category] += 1
        if per_category is None or kept[category] <= per_category:
            found.append((category, entry["prompt"]))
    if not found:
        sys.exit(f"{path} has no prompt in it")
    return found


def make(name: str, lm, nodes: int, tables):
    """The drafter called ``name``, or None where this build or call has no such source."""
    kind, *with_tables = name.split("+")
    try:
        factory = getattr(importlib.import_module(f"specjax.drafters.{kind}"), kind)
    except ModuleNotFoundError:
        return None
    if with_tables and tables is None:
        return None
    if kind == "recycling":
        return factory(lm, nodes, tables if with_tables else None)
    if kind == "cascade":
        from specjax import drafters

        return factory(drafters.ngram(nodes), drafters.recycling(lm, nodes, tables))
    return factory() if kind == "lookahead" else factory(num_draft_tokens=nodes)  # lookahead: a width of its own


def sampling(args: argparse.Namespace, temperature: float) -> dict:
    law = {"temperature": temperature} | ({"top_p": args.top_p} if temperature else {})
    return {"chat": True, "max_new_tokens": args.max_new_tokens, "rule": "match"} | law


def tau_by_category(
    lm, prompts: list[tuple[str, str]], drafter, batch: int, label: str, **options
) -> tuple[dict, list]:
    """Category -> tau, and the tokens of every prompt. Prompts of similar length share a batch."""
    import specjax

    lengths = [len(lm.encode_chat(prompt)) for _, prompt in prompts]
    order = sorted(range(len(prompts)), key=lengths.__getitem__)
    counts, texts = defaultdict(lambda: [0, 0]), [[] for _ in prompts]
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        progress(f"{label}: prompt {start + 1}/{len(order)}")
        padded = chosen + chosen[:1] * (batch - len(chosen))  # the same shapes for the last batch
        out = specjax.generate(lm, [prompts[i][1] for i in padded], drafter=drafter, seed=padded, **options)
        for row, i in enumerate(chosen):
            texts[i] = out.tokens[row]
            for k, value in enumerate((out.stats.counts.emitted[row], out.stats.counts.rounds[row])):
                counts[prompts[i][0]][k] += int(value)
    progress("")
    return {category: emitted / rounds for category, (emitted, rounds) in counts.items()}, texts


def ratio(lm, other, prompts: list[tuple[str, str]], drafter, args: argparse.Namespace, **options) -> dict:
    """Tokens per second of both plain builds and of speculation, taking turns prompt by prompt, and their ratio."""
    import specjax

    tokens, seconds = defaultdict(int), defaultdict(float)
    for number, (_, prompt) in enumerate(prompts, start=1):
        progress(f"timing prompt {number}/{len(prompts)}")
        run = functools.partial(specjax.generate, prompts=[prompt], seed=number, **options)
        calls = {"plain float32": functools.partial(run, lm), "plain bfloat16": functools.partial(run, other)}
        if args.dtype == "bfloat16":
            calls = dict(zip(calls, reversed(calls.values())))
        calls["speculative"] = functools.partial(run, lm, drafter=drafter)
        results = {name: call() for name, call in calls.items()}
        times = defaultdict(list)
        for _ in range(args.repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        for name, result in results.items():
            tokens[name] += len(result.tokens[0])
            seconds[name] += statistics.median(times[name])
    progress("")
    rates = {name: tokens[name] / seconds[name] for name in tokens}
    baseline = max((name for name in rates if name != "speculative"), key=rates.__getitem__)
    return {"rates": rates, "baseline": baseline, "ratio": rates["speculative"] / rates[baseline]}


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def machine() -> str:
    name = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    device = jax.devices()[0]
    what = f"{os.cpu_count()} cores of {name}" if device.platform == "cpu" else device.device_kind
    return f"{what}, jax {jax.__version__}, load {os.getloadavg()[0]:.1f}"


def print_table(rows: list[dict], categories: list[str], args: argparse.Namespace, count: int) -> None:
    batches = f"batch {args.batch} for tau" + (", 1 for the ratio" if args.wall else "")
    print(f"\n{args.model}, {args.dtype}, {count} prompts, {args.max_new_tokens} new tokens, {batches}; {machine()}")
    wall = ["plain f32 tok/s", "plain bf16 tok/s", "tok/s", "ratio"] if args.wall else []
    heads = ["source", "T", "N", *categories, "macro", *wall]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for row in rows:
        cells = [row["source"], f"{row['temperature']:g}", str(row["nodes"])]
        cells += [f"{row['tau'][category]:.2f}" for category in categories]
        cells.append(f"**{statistics.mean(row['tau'].values()):.2f}**")
        if args.wall:
            rates = row["wall"]["rates"]
            cells += [f"{rates[k]:.1f}" for k in ("plain float32", "plain bfloat16", "speculative")]
            cells.append(f"**{row['wall']['ratio']:.2f}**")
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    args = parse()
    try:
        work(args)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def work(args: argparse.Namespace) -> None:
    import specjax
    from specjax.models.fetch import cache_dir

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "jax"))
    prompts = read_prompts(args.prompts, args.per_category)
    categories = list(dict.fromkeys(category for category, _ in prompts))
    tables = specjax.drafters.load_tables(args.tables) if args.tables else None
    lm = specjax.load(args.model, dtype=args.dtype)
    other = specjax.load(args.model, dtype="bfloat16" if args.dtype == "float32" else "float32") if args.wall else None
    rows, texts = [], {}
    for temperature in args.temperature:
        for nodes in args.num_draft_tokens:
            for name in args.sources or SOURCES:
                drafter = make(name, lm, nodes, tables)
                if drafter is None:
                    print(f"{name}: not there, left out", file=sys.stderr)
                    continue
                options = sampling(args, temperature)
                tau, said = tau_by_category(lm, prompts, drafter, args.batch, f"{name} N={nodes}", **options)
                differing = sum(a != b for a, b in zip(said, texts.setdefault(temperature, said)))
                row = {"source": name, "temperature": temperature, "nodes": drafter.num_draft_tokens, "tau": tau}
                if args.wall:
                    row["wall"] = ratio(lm, other, prompts, drafter, args, **options)
                rows.append(row)
                note = f" ({differing} texts part from those of the first source, at near ties)" if differing else ""
                each = ", ".join(f"{category} {value:.2f}" for category, value in tau.items())
                print(
                    f"{name} T={temperature:g} N={nodes}: tau {statistics.mean(tau.values()):.2f} ({each}){note}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    print_table(rows, categories, args, len(prompts))


if __name__ == "__main__":
    main()
