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
import importlib
import os
import pathlib
import platform
import sys

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
    law = {"top_p": args.top_p} if temperature else {}
    return {"max_new_tokens": args.max_new_tokens, "rule": "match"} | law


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


def print_table(rows: dict, args: argparse.Namespace, count: int) -> None:
    from specjax.train.evaluate import table

    batches = f"batch {args.batch} for tau" + (", batch 1 for timings" if args.wall else "")
    print(f"\n{args.model}, {args.dtype}, {count} prompts, {args.max_new_tokens} new tokens, {batches}; {machine()}")
    print(table(rows))


def main() -> None:
    args = parse()
    try:
        work(args)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def work(args: argparse.Namespace) -> None:
    import specjax
    from specjax.models.fetch import cache_dir
    from specjax.train.evaluate import evaluate, read_prompts

    prompts = read_prompts(args.prompts, args.per_category)
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "jax"))
    tables = specjax.drafters.load_tables(args.tables) if args.tables else None
    lm = specjax.load(args.model, dtype=args.dtype)
    plain = {f"plain {args.dtype}": lm}
    if args.wall:
        other = "bfloat16" if args.dtype == "float32" else "float32"
        plain[f"plain {other}"] = specjax.load(args.model, dtype=other)
    rows = {}
    for nodes in args.num_draft_tokens:
        for name in args.sources or SOURCES:
            drafter = make(name, lm, nodes, tables)
            if drafter is None:
                print(f"{name}: not there, left out", file=sys.stderr)
                continue
            label = f"{name} N={drafter.num_draft_tokens}"
            for temperature in args.temperature:
                rows.setdefault(label, []).extend(evaluate(
                    lm, drafter, prompts, temperatures=(temperature,), batch=args.batch, plain=plain,
                    repeats=args.repeats if args.wall else 0,
                    progress=lambda text, label=label: progress(f"{label}: {text}"), **sampling(args, temperature),
                ))  # fmt: skip
                said = rows[label][-1]
                parted = 0 if said.same is None else len(prompts) - said.same
                note = f" ({parted} texts part from the plain ones, at near ties)" if parted else ""
                progress("")
                print(f"{label} T={temperature:g}: tau {said.macro:.2f}{note}", file=sys.stderr, flush=True)
    print_table(rows, args, len(prompts))


if __name__ == "__main__":
    main()
