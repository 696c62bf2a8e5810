"""What drafters are worth by decoding with them: tokens per pass (tau), acceptance by depth and category, speed-up.

    python scripts/eval_drafter.py prompts.jsonl --drafter ngram recycling runs/tables
    python scripts/eval_drafter.py prompts.jsonl --split report --temperature 0 0.7 1 --top-p 1 0.9 1 --wall \\
        --json worth.json --plot worth.png

A drafter is a source that needs no training, the directory of a drafter or of a training run, the name of a model that
a drafter is shipped for, or parts joined by "+": a cascade, in which each row takes the first that has something to say
(--merged: all of them in one tree).

Prompts are a JSONL file with "prompt" and, if there are kinds of them, "category" in each line; each is one user turn.
--split cuts every category in two halves, the same every time, so that what is chosen on one is reported on the other.
Tau of a category is all its tokens over all its passes; "macro" is the mean over categories. Sources that are a
function of the context keep the text of plain decoding (rule "match"), so they are compared on the same text. --wall
times plain decoding with both weight types and the drafter in turn, batch 1, on warm programs; "ratio" is against the
faster plain one, prefill included, all tokens over the sum of median times, and "decode ratio" the same behind the
first token of each text.
"""

import argparse
import json
import pathlib
import sys

import devices
import draft_sources
from draft_sources import make, sources
from script_tools import check_lengths, figure_class, keep_programs, lost, machine, progress, rival, run_script, write


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompts", type=pathlib.Path, nargs="?", help="JSONL file; default a few built-in prompts of everyday kind")
    add("--split", default="all", choices=["tune", "report", "all"], help="half of each category")
    add("--per-category", type=int, help="only the first so many prompts of each category of that half")
    add("--model", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights when drafting")
    add("--drafter", nargs="+", default=[draft_sources.AUTO], metavar="SOURCE|DIR|NAME",
        help=f"{', '.join(draft_sources.NAMED)}, a directory, the name of a model, A+B; default the one shipped for "
        "--model, else ngram")  # fmt: skip
    add("--merged", action="store_true", help="parts joined by + make one tree")
    add("--num-draft-tokens", type=int, nargs="+", metavar="N", help="default: each drafter's own")
    add("--tree", help="for heads: children per level as in 3,2,1, or dynamic:NODES,WIDTH,DEPTH; default a chain")
    add("--coupled", action="store_true", help="for heads and models: draft with the target's noise")
    add("--rule", choices=["rejection", "block", "match"], help="default: what suits the drafter")
    add("--batch", type=int, default=10, help="prompts at a time for tau")
    add("--max-new-tokens", type=int, default=64)
    add("--temperature", type=float, nargs="+", default=[0.0], metavar="T")
    add("--top-p", type=float, nargs="+", default=[1.0], metavar="P", help="where T is above 0: one, or one per T")
    add("--seed", type=int, default=0, help="of the first prompt; the next ones count up from it")
    add("--wall", action="store_true", help="also time it; only counts on a machine that is idle")
    add("--repeats", type=int, default=3, help="with --wall")
    add("--json", type=pathlib.Path, metavar="FILE", help="write everything that was measured, also while it goes on")
    add("--plot", type=pathlib.Path, metavar="FILE", help="draw tau, and the ratio with --wall, by category (.png)")
    devices.add_arguments(parser)
    args = parser.parse_args(arguments)
    numbers = (args.batch, args.repeats, args.max_new_tokens, args.per_category or 1, *(args.num_draft_tokens or [1]))
    refusals = [
        *devices.refusals(args),
        *lost(args, "json", "plot"),
        (min(numbers) < 1, "--batch, --repeats, --max-new-tokens, --per-category and --num-draft-tokens are 1 or more"),
        (args.per_category == 0, "--per-category is 1 or more"),
        (len(args.top_p) not in (1, len(args.temperature)), "--top-p: give one value, or one per --temperature"),
        (not all(0 < p <= 1 for p in args.top_p), "--top-p is above 0, up to 1"),
        (min(args.temperature) < 0, "--temperature is 0 or more"),
        (args.merged and not any("+" in name for name in args.drafter), "--merged needs drafters joined by +"),
        (args.tree and args.coupled, "--coupled draws a chain: leave out --tree"),
        (args.tree and args.num_draft_tokens, "--tree has its own number of nodes: leave out --num-draft-tokens"),
    ]
    for refused, words in refusals:
        if refused:
            parser.error(words)
    args.top_p = args.top_p * len(args.temperature) if len(args.top_p) == 1 else args.top_p
    return args


def label(parts: list[draft_sources.Source], drafter, args: argparse.Namespace) -> str:
    rule = args.rule or drafter.default_rule
    name = (" & " if args.merged else " + ").join(part.label for part in parts)
    shape = f" {args.tree}" if args.tree else " coupled" if args.coupled else ""
    return f"{name} N={drafter.num_draft_tokens}{shape}" + ("" if rule == "match" else f", {rule}")


# --- measuring


def measure(args: argparse.Namespace, lm, prompts, made: dict) -> dict:
    """Evaluations by label of drafter; written to --json after each."""
    import specjax
    from specjax.train.evaluate import evaluate

    plain = {f"plain {args.dtype}": lm}
    other = rival(args.dtype) if args.wall else None
    if other:
        plain[f"plain {other}"] = specjax.load(args.model, dtype=other, mesh=devices.mesh(args))
    rows: dict[str, list] = {}
    for name, drafter in made.items():
        for temperature, top_p in zip(args.temperature, args.top_p, strict=True):
            law = {"top_p": top_p} if temperature else {}
            (row,) = evaluate(
                lm, drafter, prompts, temperatures=(temperature,), batch=args.batch, plain=plain, seed=args.seed,
                max_new_tokens=args.max_new_tokens, repeats=args.repeats if args.wall else 0, first=args.wall,
                rule=args.rule or drafter.default_rule, progress=lambda text, name=name: progress(f"{name}: {text}"),
                **law,
            )  # fmt: skip
            rows.setdefault(name, []).append(row)
            progress("")
            print(f"{name} T={temperature:g}: {said(row, len(prompts))}", file=sys.stderr, flush=True)
            if args.json:
                write(args.json, json.dumps(facts(args, rows, len(prompts)), indent=1).encode())
    return rows


def said(row, count: int) -> str:
    parted = 0 if row.same is None else count - row.same
    ratio = "" if row.ratio is None else f", {row.ratio:.2f}x"
    note = f" ({parted} texts part from the plain ones, at near ties)" if parted else ""
    return f"tau {row.macro:.2f}{ratio}{note}"


# --- what is shown


def laws(args: argparse.Namespace) -> list[str]:
    """Temperatures, and top-p where it cuts."""
    pairs = zip(args.temperature, args.top_p, strict=True)
    return [f"T={t:g}" + (f" with top-p {p:g}" if t and p < 1 else "") for t, p in pairs]


def print_table(rows: dict, args: argparse.Namespace, count: int) -> None:
    from specjax.train.evaluate import table

    batches = f"batch {args.batch} for tau" + (", batch 1 for timings" if args.wall else "")
    half = "" if args.split == "all" else f" ({args.split} half)"
    how = f"{args.max_new_tokens} new tokens, {', '.join(laws(args))}, {batches}"
    print(f"\n{args.model}, {args.dtype}, {count} prompts{half}, {how}; {machine()}")
    print(table(rows))


def facts(args: argparse.Namespace, rows: dict, count: int) -> dict:
    options = {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(args).items()}
    results = {
        name: [row._asdict() | {"top_p": args.top_p[i]} for i, row in enumerate(found)] for name, found in rows.items()
    }
    return {"options": options, "prompts": count, "machine": machine(), "results": results}


def draw(rows: dict, args: argparse.Namespace) -> None:
    """Bars by category: a row per temperature, tau on the left and the ratio on the right."""
    import io

    every = [row for found in rows.values() for row in found]
    measures = ["tau"] + (["ratio"] if any(row.ratio is not None for row in every) else [])
    categories = list(dict.fromkeys(name for row in every for name in row.categories))
    height, width = len(args.temperature), len(measures)
    size = 2 + (1.2 * len(categories) + 3) * width, 3 * height + 0.5
    figure = figure_class("--plot")(figsize=size, layout="constrained")
    grid = figure.subplots(height, width, squeeze=False)
    for line, law in enumerate(laws(args)):
        for axes, measure in zip(grid[line], measures, strict=True):
            for number, (name, found) in enumerate(rows.items()):
                row, step = found[line], 0.8 / len(rows)
                overall = row.macro if measure == "tau" else row.ratio
                values = [*(row.categories[category].get(measure) for category in categories), overall]
                places = [place + (number + 0.5) * step - 0.4 for place in range(len(values))]
                axes.bar(places, [value or 0 for value in values], step, color=f"C{number}", label=name)
            axes.axhline(1, color="black", linewidth=0.8)
            names = [*categories, "macro" if measure == "tau" else "all"]
            axes.set_xticks(range(len(names)), names, rotation=20)
            axes.set(ylabel=f"{'tau' if measure == 'tau' else 'speed-up'}, {law}")
    grid[0][0].legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write(args.plot, buffer.getvalue())


def work(args: argparse.Namespace) -> None:
    devices.start(args)
    import specjax
    from specjax import sharding
    from specjax.train.evaluate import Prompt, encode, part, read_prompts

    if args.plot:
        figure_class("--plot")  # is it there? Better now than at the end.
    if args.prompts:
        prompts = read_prompts(args.prompts)
    else:
        from distill_options import HELD_OUT

        prompts = [Prompt(text) for text in HELD_OUT]
    prompts = part(prompts, args.split, args.per_category)
    chosen = {name: sources(name, args.model) for name in args.drafter}
    tree = draft_sources.parse_tree(args.tree)
    keep_programs()
    mesh = devices.mesh(args)
    lm = specjax.load(args.model, dtype=args.dtype, mesh=mesh)
    made = {}  # all of them before anything is measured
    for number in args.num_draft_tokens or [None]:
        for parts in chosen.values():
            drafter = make(parts, lm, number, tree=tree, coupled=args.coupled, merged=args.merged)
            placed = drafter if mesh is None else sharding.place_drafter(mesh, drafter)
            made.setdefault(label(parts, drafter, args), placed)
    check_lengths([encode(lm, prompt) for prompt in prompts], args.max_new_tokens, lm.model, *made.values())
    rows = measure(args, lm, prompts, made)
    print_table(rows, args, len(prompts))
    if args.plot:
        draw(rows, args)


def main() -> None:
    args = parse()
    run_script(work, args, kept=args.json)


if __name__ == "__main__":
    main()
