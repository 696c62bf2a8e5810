"""Small parts of train_on_accelerator.sh: what its stages do that no other script does.

text        write the corpus and nothing else
steps       how many steps fit in the time, by those of a probe
small       a head with its weights in bfloat16
better      of two directories the one that an evaluation found better
toy         texts and prompts for a target without a tokenizer
"""

import argparse
import json
import pathlib
import shutil
import statistics
import sys

import script_tools


def text(args: argparse.Namespace) -> None:
    from distill_plan import source

    import specjax
    from specjax.train import write_corpus

    script_tools.keep_programs()
    target = specjax.load(args.target, dtype=args.dtype)
    write_corpus(
        target, args.corpus, tokens=args.tokens, source=source(args), seed=0, batch=args.rows, slots=args.slots
    )


def steps(args: argparse.Namespace) -> None:
    """A tenth of the time is left over; what the probe took besides its steps is taken off."""
    from specjax.train.monitor import read

    rows = [row for row in read(args.metrics) if "evaluation" not in row]
    manifest = json.loads((args.corpus / "manifest.json").read_text())
    step = statistics.median(row["seconds"] for row in rows[len(rows) // 2 :])
    besides = max(0.0, args.wall - step * len(rows))
    fitting = int((0.9 * args.seconds - besides) / step)
    enough = max(1, round(args.epochs * manifest["complete"]["tokens"] / (args.batch * args.width)))
    times = f"a step takes {step:.3f} s, the rest {besides:.0f} s"
    print(f"{times}: {fitting} steps fit, {enough} are {args.epochs:g} epochs", file=sys.stderr)
    if fitting < 1:
        raise ValueError(f"no step fits in {args.seconds:g} s beside the {besides:.0f} s of the rest: raise TRAIN_S")
    print(min(fitting, enough))


def small(args: argparse.Namespace) -> None:
    from specjax.drafters.checkpoint import INSIDE, MADE_FOR, read, save_drafter

    config, params = read(args.head, dtype="bfloat16")
    made_for = json.loads((args.head / INSIDE / MADE_FOR).read_text())
    part = args.out.with_name(args.out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    save_drafter(part / INSIDE, config, params, target=made_for["name"])
    shutil.copy(args.head / INSIDE / MADE_FOR, part / INSIDE)
    part.rename(args.out)


def better(args: argparse.Namespace) -> None:
    """By the speed-up at the lowest temperature if it was timed, else by tau; the first where nothing was measured."""
    results = json.loads(args.worth.read_text())["results"] if args.worth.exists() else {}

    def worth(path: str) -> float:
        rows = [row for name, found in results.items() if name.startswith(f"{path} N=") for row in found]
        first = min(rows, key=lambda row: row["temperature"], default=None)
        return 0.0 if first is None else first["ratio"] or first["macro"]

    for path in args.directories:
        print(f"{path}: {worth(path):.2f}", file=sys.stderr)
    print(max(args.directories, key=worth))


def toy(args: argparse.Namespace) -> None:
    import numpy as np

    from specjax.train import texts

    if args.text.exists() and args.prompts.exists():
        return
    size, rng = json.loads((args.target / "config.json").read_text())["vocab_size"], np.random.default_rng(0)
    texts.save(args.text, texts.join(rng.integers(3, size, (450, 16)).tolist()))
    lines = [json.dumps({"prompt": row, "category": "ab"[i % 2]}) for i, row in
             enumerate(rng.integers(3, size, (2, 6)).tolist())]  # fmt: skip
    args.prompts.write_text("\n".join(lines) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    from distill_options import amount

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)

    def add(run, *positional, **options):
        made = parts.add_parser(run.__name__)
        made.set_defaults(run=run, prompts=None)
        for name in positional:
            made.add_argument(name, type=pathlib.Path)
        for name, kind in options.items():
            made.add_argument(f"--{name}", type=kind)
        return made

    path = pathlib.Path
    add(text, target=str, dtype=str, corpus=path, rows=int, slots=int, text=path, tokens=amount)
    add(steps, "metrics", "corpus", wall=float, seconds=float, epochs=float, batch=int, width=int)
    add(small, "head", "out")
    add(better, "worth").add_argument("directories", nargs="+")
    add(toy, "target", "text", "prompts")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    script_tools.run_script(args.run, args)


if __name__ == "__main__":
    main()
