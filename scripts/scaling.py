"""Tokens per second of an 8B and a 70B target on slices of TPUs, with and without drafts: all of it modelled.

    make libtpu
    python scripts/scaling.py --counts counts.json     # compiles for about ten minutes, then computes
    python scripts/scaling.py --counts counts.json --alpha eagle3=0.8

A target is compiled by `tpu_report.py`'s rules at two points: a plain step at `SMALL` rows and a verification of
`WIDTH` tokens at `LARGE` rows. FLOPs and collectives are taken to be on a line in tokens (rows times window), bytes
read in rows; `--check` compiles a third point, a verification at `SMALL` rows, to see how far from the line it is. The
same is done for a step of each drafter. A pass takes as long as the slowest of FLOPs, bytes and collectives at the
published ceilings of the chip; latencies of collectives, and what the host does, are not in it.
"""

import argparse
import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

import tpu_programs as tpu
from model_shapes import CONFIGS
from script_tools import lost, run_script, write
from tpu_report import CHIPS, MOST, Chip, Compiler, line

from specjax import theory

SMALL, LARGE, WIDTH = 8, 64, 5
BATCHES = (1, 8, 32, 64, 128, 256)
ALPHA = {"eagle3": 0.7, "llama3-1b": 0.8, "lookup": 0.4}  # assumed, of a judged draft token
LONGEST = 16  # draft tokens


class Slice(NamedTuple):
    """A target on chips."""

    target: str
    topology: str
    data: int
    drafters: tuple[str, ...]  # besides lookups; the chips must divide their heads
    quantization: str = ""
    counts_of: str = ""  # topology that is compiled for, if the counts are the same

    @property
    def name(self) -> str:
        return f"{self.target}{' ' + self.quantization if self.quantization else ''} on {self.topology}"

    @property
    def chips(self) -> int:
        rows, columns = map(int, self.topology.split(":")[1].split("x"))
        return rows * columns


SLICES = (
    Slice("llama3-8b", "v5e:2x4", 1, ("eagle3", "llama3-1b")),
    Slice("llama3-8b", "v6e:2x4", 1, ("eagle3", "llama3-1b"), counts_of="v5e:2x4"),
    Slice("llama3-70b", "v5e:8x8", 1, ("eagle3",)),
)


class Pair(NamedTuple):
    """Costs of a program at `SMALL` rows and at `LARGE` rows, and the width of the second's window."""

    small: tpu.Cost
    large: tpu.Cost
    width: int

    def at(self, rows: float, width: int) -> tpu.Cost:
        tokens = (rows * width - SMALL) / (LARGE * self.width - SMALL)
        cost = line(self.small, self.large, tokens)
        read = line(self.small, self.large, (rows - SMALL) / (LARGE - SMALL)).bytes
        few, many = (each.memory - each.bytes for each in (self.small, self.large))
        return cost._replace(bytes=read, memory=read + few + max(tokens, 0) * (many - few))


class Counts(NamedTuple):
    """What was compiled for a slice: the target's passes and a step of each drafter."""

    target: Pair
    drafters: dict[str, Pair]


def compiler_of(where: Slice) -> Compiler:
    config = dataclasses.replace(CONFIGS[where.target], quantization=where.quantization)
    return Compiler(tpu.mesh_of(where.counts_of or where.topology, where.data), config)


def compiled(where: Slice) -> Counts:
    compiler = compiler_of(where)
    target = Pair(compiler.cost("round", 0, SMALL), compiler.cost("round", WIDTH - 1, LARGE), WIDTH)
    steps = {}
    for kind in where.drafters:
        small, large = (compiler.draft(kind, 1, rows) for rows in (SMALL, LARGE))
        if small and large:
            steps[kind] = Pair(small, large, 1)
    return Counts(target, steps)


def stored(path: pathlib.Path | None) -> dict[str, Counts]:
    """What a file has, if there is one.

    Raises:
      ValueError: it holds something else.
    """
    def cost(found: Any) -> tpu.Cost:
        flops, read, links, memory, aliased = found
        kinds = {kind: float(size) for kind, size in links.items()}
        return tpu.Cost(float(flops), float(read), kinds, float(memory), float(aliased))

    def pair(found: Any) -> Pair:
        small, large, width = found
        return Pair(cost(small), cost(large), int(width))

    if path is None or not path.exists():
        return {}
    try:
        return {
            key: Counts(pair(target), {kind: pair(found) for kind, found in drafters.items()})
            for key, (target, drafters) in json.loads(path.read_text(encoding="utf-8")).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--counts {path} does not hold what this script compiled: delete it, or name another file ({error})"
        ) from None


def counted(wanted: Slice, path: pathlib.Path | None) -> Counts:
    """From the file if it has them; else compiled, and added to it."""
    known = stored(path)
    key = f"{wanted.target} {wanted.counts_of or wanted.topology} {wanted.data} {wanted.quantization}"
    if key not in known:
        known[key] = compiled(wanted)
        if path:
            write(path, json.dumps(known).encode())
    return known[key]


def check(where: Slice, counts: Counts) -> str:
    """How far a third compiled point is from the line."""
    third, said = compiler_of(where).cost("round", WIDTH - 1, SMALL), counts.target.at(SMALL, WIDTH)
    pairs = {"FLOPs": (said.flops, third.flops), "bytes": (said.bytes, third.bytes),
             "collectives": (sum(said.collectives.values()), sum(third.collectives.values()))}  # fmt: skip
    off = ", ".join(f"{name} {100 * (a / b - 1):+.1f}%" for name, (a, b) in pairs.items())
    return f"The line at {SMALL} rows and a window of {WIDTH}, against what is compiled: {off}."


class Best(NamedTuple):
    """A number of draft tokens, and what it makes of a request."""

    k: int
    seconds: float  # per token of a request


def best(counts: Counts, chip: Chip, kind: str, rows: int, alpha: float) -> Best:
    """The number of draft tokens with the shortest time per token, 0 included."""
    step = chip.seconds(counts.drafters[kind].at(rows, 1)) if kind in counts.drafters else 0.0

    def seconds(k: int) -> float:
        return (k * step + chip.seconds(counts.target.at(rows, k + 1))) / theory.expected_tokens(alpha, k)

    return min((Best(k, seconds(k)) for k in range(LONGEST + 1)), key=lambda found: found.seconds)


def table(where: Slice, counts: Counts, alphas: dict[str, float]) -> None:
    chip = CHIPS[where.topology.split(":")[0]]
    print(f"\n### {where.name}, mesh {where.data},{where.chips // where.data}\n")
    for what, cost in (
        (f"plain step of {SMALL} rows", counts.target.small),
        (f"verification of {WIDTH} tokens in {LARGE} rows", counts.target.large),
        *((f"{kind} step of {SMALL} rows", pair.small) for kind, pair in counts.drafters.items()),
    ):
        flops, read, links = (1e3 * part for part in chip.parts(cost))
        print(f"- {what}: {flops:.2f} ms of FLOPs, {read:.2f} of reading, {links:.2f} of links")
    print()
    names = " | ".join(f"{kind}: K | tokens/s | speed-up" for kind in alphas)
    print(f"| batch | plain tokens/s | a chip | verify 5/plain | {names} | most a chip |")
    print("|---" * (5 + 3 * len(alphas)) + "|")
    for batch in BATCHES:
        rows = max(batch, where.data)  # one row alone is on every part of the mesh
        plain = chip.seconds(counts.target.at(rows, 1))
        found = {kind: best(counts, chip, kind, rows, alpha) for kind, alpha in alphas.items()}
        peak = counts.target.at(rows, 1 + max(each.k for each in found.values())).memory
        over = peak + max(pair.at(rows, 1).bytes for pair in counts.drafters.values()) > chip.memory
        cells = [f"{each.k} | {1 / each.seconds:.0f} | {plain / each.seconds:.2f}" for each in found.values()]
        verify = chip.seconds(counts.target.at(rows, WIDTH)) / plain
        most = batch / min(each.seconds for each in found.values()) / where.chips
        print(f"| {batch}{' (does not fit)' if over else ''} | {1 / plain:.0f} | {batch / plain / where.chips:.0f} | "
              f"{verify:.2f} | {' | '.join(cells)} | {most:.0f} |")  # fmt: skip
    stops = {kind: pays(counts, chip, kind, alpha, where.data) for kind, alpha in alphas.items()}
    said = [f"{kind} at {batch}" if batch else f"{kind} at none up to {MOST}" for kind, batch in stops.items()]
    print(f"\nBatch at which drafts stop paying (best K is 0): {', '.join(said)}.")


def pays(counts: Counts, chip: Chip, kind: str, alpha: float, data: int) -> int | None:
    """The smallest batch at which no draft is worth its time."""
    for batch in range(data, MOST + 1, data):
        if best(counts, chip, kind, batch, alpha).k == 0:
            return batch
    return None


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=pathlib.Path, metavar="FILE", help="keep what was compiled here, and read it")
    parser.add_argument("--alpha", action="append", default=[], metavar="DRAFTER=ALPHA", help=f"default {ALPHA}")
    parser.add_argument("--target", choices=sorted({each.target for each in SLICES}), help="default both")
    parser.add_argument("--check", action="store_true", help="also how far the lines are from a third point")
    args = parser.parse_args(argv)
    try:
        given = {kind: float(alpha) for kind, alpha in (text.split("=") for text in args.alpha)}
    except ValueError:
        parser.error(f"--alpha {' '.join(args.alpha)}: give DRAFTER=ALPHA")
    if not given.keys() <= ALPHA.keys() or not all(0 <= alpha <= 1 for alpha in given.values()):
        parser.error(f"--alpha {' '.join(args.alpha)}: drafters are {', '.join(ALPHA)}, alphas from 0 to 1")
    for refused, words in lost(args, "counts"):  # before ten minutes of compiling
        if refused:
            parser.error(words)
    args.alpha = ALPHA | given
    return args


def work(args: argparse.Namespace) -> None:
    stored(args.counts)  # a file that is none is refused before anything is printed
    print("MODELLED, never measured; alpha assumed: " + ", ".join(f"{kind} {a:g}" for kind, a in args.alpha.items()))
    for where in SLICES:
        if args.target in (None, where.target):
            counts = counted(where, args.counts)
            table(where, counts, {kind: args.alpha[kind] for kind in (*where.drafters, "lookup")})
            if args.check and not where.counts_of:
                print("\n" + check(where, counts))


def main(argv=None):
    args = arguments(argv)
    run_script(work, args, args.counts)


if __name__ == "__main__":
    main()
