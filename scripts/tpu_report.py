"""What the TPU's own compiler makes of decoding, on a machine without a TPU: memory, collectives, modelled time.

    make libtpu                    # the compiler, 140 MB, into .cache; nothing else in the environment sees it
    python scripts/tpu_report.py --topology v5e:2x4 --target llama3-8b --drafter llama3-1b --batch 1,32
    python scripts/tpu_report.py --topology v5e:2x4 --target llama3-8b --drafter eagle3 --tree 3,2,2 --engine
    python scripts/tpu_report.py --topology v5e:1x1 --target smollm2-135m --drafter lookup -K 4 --quantize int8

Programs are compiled ahead of time from shapes alone, in bfloat16. Nothing is measured. The modelled time of a pass is
the largest of three: FLOPs of the compiled program, bytes that must be read (weights and the whole cache, once) and
bytes of collectives, each over the chip's published ceiling. The compiler counts a loop's body once, so one and two
unrolled layers are compiled and the line between them is extended to all layers.
Verification is charged as a round behind a lookup of as many nodes; a draft model costs K of its own plain steps, an
EAGLE-3 head K of its steps (of a tree a step for each level), a DFlash drafter one pass. Heads are of the usual size,
one and five layers of the target's width, in parts like the target. A child is taken to be right with probability alpha
if its earlier siblings are wrong.
Collectives are charged by size, an all-reduce twice (a ring adds up and hands out), without the latency of each: with
small batches on many chips real steps are slower than modelled.
"""

import argparse
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import tpu_programs as tpu
from script_tools import run_script
from tpu_programs import CONFIGS, HEADS, SLOTS, Cost, Programs, cost_of

from specjax import theory
from specjax import tree as trees


class Chip(NamedTuple):
    """Published ceilings of one chip (cloud.google.com/tpu/docs: v5e and v6e pages)."""

    flops: float  # bf16, per second
    bytes: float  # memory bandwidth, per second
    links: float  # inter-chip bandwidth, bytes per second, all links together
    memory: float  # bytes

    def parts(self, cost: Cost) -> tuple[float, float, float]:
        """Seconds of FLOPs, of reading and of the links."""
        links = sum((1 + (kind == "all-reduce")) * size for kind, size in cost.collectives.items())
        return cost.flops / self.flops, cost.bytes / self.bytes, links / self.links

    def seconds(self, cost: Cost) -> float:
        return max(self.parts(cost))


CHIPS = {"v5e": Chip(197e12, 819e9, 200e9, 16 * 2**30), "v6e": Chip(918e12, 1640e9, 448e9, 32 * 2**30)}
RULES = ("rejection", "match", "block")
Tree = tuple[int, ...] | trees.Dynamic | None  # children of each node by level, or EAGLE-2's
MOST = 4096  # rows, in the search for the batch at which speculation stops paying


def line(one: Cost, two: Cost, at: float) -> Cost:
    """The line through two costs, at 0 and at 1, at another place. Temporaries beside what is read stay the larger."""
    def along(a, b):
        return max(a + (b - a) * at, 0.0)

    kinds = {kind: along(one.collectives.get(kind, 0), two.collectives.get(kind, 0))
             for kind in one.collectives.keys() | two.collectives.keys()}  # fmt: skip
    read = along(one.bytes, two.bytes)
    beside = max(one.memory - one.bytes, two.memory - two.bytes)
    return Cost(along(one.flops, two.flops), read, kinds, read + beside, along(one.aliased, two.aliased))


class Compiler:
    """Costs of whole models on one mesh; each program is compiled with one and with two layers."""

    def __init__(self, mesh: Any, config: Any, rule: str | None = None):
        self.mesh, self.config, self.rule = mesh, config, rule

    @functools.cache  # noqa: B019 (one compiler a report)
    def cost(self, what: str, k: int, batch: int, kind: str = "lookup", tree: Tree = None) -> Cost:
        """Of ``what``: round, prefill, engine, write_text or train."""
        found = []
        for layers in (1, 2):
            config = dataclasses.replace(self.config, num_layers=layers, windows=self.config.windows[-layers:])
            if what == "train":
                found.append(cost_of(tpu.train_step(self.mesh, config, kind, rows=batch, width=SLOTS)))
                continue
            made = Programs(self.mesh, config, k=k, batch=batch, kind=kind, rule=self.rule, tree=shape_of(tree),
                            one_window=True)  # fmt: skip
            found.append(cost_of(getattr(made, what)(), made.unread()))
        return line(found[0], found[1], self.config.num_layers - 1)

    @functools.cache  # noqa: B019
    def draft(self, kind: str, k: int, batch: int, tree: Tree = None) -> Cost | None:
        """Of all of a round's drafting; None for a lookup, which costs nothing here."""
        if kind == "lookup":
            return None
        if kind in CONFIGS:
            step = Compiler(self.mesh, CONFIGS[kind]).cost("round", 0, batch)
            return _times(step, k)
        config = dataclasses.replace(self.config, num_layers=2, windows=self.config.windows[-2:])

        def drafted(n: int, tree: Tree = None) -> Cost:
            made = Programs(self.mesh, config, k=k if kind == "dflash" else n, batch=batch, kind=kind,
                            tree=shape_of(tree))  # fmt: skip
            return cost_of(made.draft(n), made.unread())

        if kind == "dflash":
            return drafted(k, tree)
        one, two = drafted(1), drafted(2)  # the loop of a chain holds one step
        step = two._replace(flops=max(two.flops - one.flops, 0.0))
        if tree is None:
            return _times(step, k)
        levels = tree.depth if isinstance(tree, trees.Dynamic) else len(tree)
        every = drafted(k, tree)  # all levels but the first, which the step that reads what was committed prepares
        kinds = {name: every.collectives.get(name, 0) + size for name, size in step.collectives.items()}
        return every._replace(flops=every.flops + step.flops, bytes=levels * step.bytes, collectives=kinds)


def shape_of(tree: Tree) -> Any:
    """As drafters take it."""
    return tree if tree is None or isinstance(tree, trees.Dynamic) else trees.kary(*tree)


def _times(cost: Cost, count: int) -> Cost:
    kinds = {kind: count * size for kind, size in cost.collectives.items()}
    return cost._replace(flops=count * cost.flops, bytes=count * cost.bytes, collectives=kinds)


def gain(chip: Chip, plain: Cost, verify: Cost, draft: Cost | None, tokens: float) -> float:
    """Speed-up over plain decoding with ``tokens`` a round."""
    return tokens * chip.seconds(plain) / (chip.seconds(verify) + (chip.seconds(draft) if draft else 0.0))


def tokens_of(alpha: float, k: int, tree: Tree) -> float:
    """Expected tokens of a round."""
    if tree is None:
        return theory.expected_tokens(alpha, k)
    if not isinstance(tree, trees.Dynamic):
        return theory.expected_tokens([1 - (1 - alpha) ** children for children in tree])
    level, found = [1.0], []
    for _ in range(tree.depth):
        level = sorted((p * alpha * (1 - alpha) ** rank for p in level for rank in range(tree.width)), reverse=True)
        found, level = found + level, level[: tree.width]
    return 1 + sum(sorted(found, reverse=True)[: tree.num_nodes])


def stops(chip: Chip, small: dict, large: dict, sizes: tuple[int, int], tokens: float) -> int | None:
    """The smallest batch at which speculation no longer pays, on the lines through the costs of two batches."""
    for batch in range(1, MOST + 1):
        at = (batch - sizes[0]) / (sizes[1] - sizes[0])
        costs: dict[str, Any] = {
            name: None if cost is None else line(cost, large[name], at) for name, cost in small.items()
        }
        if gain(chip, costs["plain"], costs["verify"], costs["draft"], tokens) <= 1:
            return batch
    return None


def describe(name: str, cost: Cost, chip: Chip, timed: bool = True) -> None:
    """A line for people; no time for what holds a loop over draft steps, which the compiler counts once."""
    peak, spare = cost.memory / 2**30, (chip.memory - cost.memory) / 2**30
    fits = "fits, spare" if spare >= 0 else "DOES NOT FIT, over by"
    kinds = ", ".join(f"{kind} {size / 2**20:.2f}" for kind, size in sorted(cost.collectives.items())) or "none"
    time = f"{1e3 * chip.seconds(cost):8.3f} ms" if timed else "loops once "
    print(
        f"  {name:14} {time}  {cost.flops / 1e9:9.1f} GFLOP  {cost.bytes / 2**30:6.2f} GiB"
        f" read  peak {peak:6.2f} GiB ({fits} {abs(spare):.1f})  collectives, MiB: {kinds}", flush=True,
    )  # fmt: skip


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x4", help="v5e:1x1, v5e:2x4, v6e:2x4 ...")
    parser.add_argument("--target", choices=sorted(CONFIGS), default="llama3-8b")
    parser.add_argument("--drafter", choices=["lookup", *HEADS, *sorted(CONFIGS)], default="lookup")
    parser.add_argument("--data", type=int, default=1, help="parts of the batch; the other chips share the weights")
    parser.add_argument("-K", "--num-draft-tokens", type=int, help="default 4; a tree has its own number")
    parser.add_argument("--tree", help="of a head: children by level as in 3,2,2, or dynamic:NODES,WIDTH,DEPTH")
    parser.add_argument("--rule", choices=RULES, help="default: the drafter's own")
    parser.add_argument("--batch", default="1,32", help="batches, comma-separated")
    parser.add_argument("--alpha", type=float, default=0.7, help="assumed acceptance of a judged draft token")
    parser.add_argument("--quantize", choices=["int8"], help="the target's matrices")
    parser.add_argument("--prefill", action="store_true", help="also a chunk of the prompt")
    parser.add_argument("--engine", action="store_true", help="also a step of Engine")
    parser.add_argument("--train", type=int, metavar="ROWS", help=f"also a training step on ROWS texts of {SLOTS}")
    parser.add_argument("--write-text", type=int, metavar="ROWS",
                        help=f"also a token of each of ROWS texts of {SLOTS} that are written to train on")
    args = parser.parse_args(argv)
    for refused, words in refusals(args):
        if refused:
            parser.error(words)
    try:
        args.tree = tree_of(args.tree)
    except ValueError as error:
        parser.error(str(error))
    if args.num_draft_tokens is None:
        args.num_draft_tokens = 4
    args.batch = sorted(set(map(int, args.batch.split(","))))
    return args


def refusals(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """What cannot be compiled, with what to say; found before the compiler is loaded."""
    k, data, topology = args.num_draft_tokens, args.data, f"--topology {args.topology}"
    slice_ = re.fullmatch(r"(\w+):(\d+)x(\d+)", args.topology)
    yield slice_ is None, f"{topology}: give a chip and its rows and columns, as in v5e:2x4"
    kind, *sides = slice_.groups() if slice_ else ("", 1, 1)
    yield kind not in CHIPS, f"{topology}: published ceilings are known for {', '.join(CHIPS)}"
    yield not 0 <= args.alpha <= 1, f"--alpha {args.alpha:g}: an acceptance is from 0 to 1"
    yield k is not None and not 1 <= k < SLOTS, f"-K {k}: give 1 or more draft tokens, fewer than {SLOTS}"
    yield data < 1 or math.prod(map(int, sides)) % data > 0, f"--data {data}: must divide the chips of {args.topology}"
    batches = [int(part) if part.strip().isdecimal() else 0 for part in args.batch.split(",")]
    yield min(batches) < 1, f"--batch {args.batch}: give numbers of rows, 1 or more, comma-separated"
    yield any(b > 1 and b % data for b in batches), f"--batch {args.batch}: --data {data} must divide all but 1"
    yield args.train is not None and args.train < 1, f"--train {args.train}: give the number of texts, 1 or more"
    rows = args.write_text
    yield rows is not None and rows < 1, f"--write-text {rows}: give the number of texts, 1 or more"
    yield bool(rows) and rows > 1 and rows % data > 0, f"--write-text {rows}: --data {data} must divide it"
    yield bool(args.train) and args.drafter == "lookup", "--train: a lookup is not trained; choose another --drafter"
    if args.tree is not None:
        kinds = " or ".join(HEADS)
        yield args.drafter not in HEADS, f"--tree {args.tree}: trees are drafted by {kinds}, not by {args.drafter}"
        yield k is not None, f"--tree {args.tree} has its own number of nodes: leave out -K"
        yield args.rule == "block", "--rule block judges chains only"


def tree_of(text: str | None) -> Tree:
    """A tree from ``--tree``.

    Raises:
      ValueError: anything else.
    """
    if text is None:
        return None
    kind, _, numbers = text.rpartition(":")
    try:
        found = tuple(map(int, numbers.split(",")))
        if kind not in ("", "dynamic") or min(found) < 1 or (kind and len(found) != 3):
            raise ValueError
    except ValueError:
        raise ValueError(f"--tree {text}: give children per level as in 3,2,2, or dynamic:NODES,WIDTH,DEPTH") from None
    return trees.Dynamic(*found) if kind else found


def work(args: argparse.Namespace) -> None:
    chip, mesh = CHIPS[args.topology.split(":")[0]], tpu.mesh_of(args.topology, args.data)
    config = dataclasses.replace(CONFIGS[args.target], quantization=args.quantize or "")
    tree = args.tree
    k = args.num_draft_tokens
    if tree is not None:
        k = tree.num_nodes if isinstance(tree, trees.Dynamic) else len(trees.kary(*tree))
    compiler, tokens = Compiler(mesh, config, args.rule), tokens_of(args.alpha, args.num_draft_tokens, tree)
    print(f"{args.target}{' ' + args.quantize if args.quantize else ''} on {args.topology}, mesh {dict(mesh.shape)}, "
          f"{k} draft tokens, {SLOTS} slots a row; MODELLED, per chip")
    batches, costs = args.batch, dict[int, Any]()
    for batch in batches:
        print(f"batch {batch}", flush=True)
        found = costs[batch] = {
            "plain": compiler.cost("round", 0, batch), "verify": compiler.cost("round", k, batch),
            "draft": compiler.draft(args.drafter, k, batch, tree),
        }  # fmt: skip
        describe("plain step", found["plain"], chip)
        describe(f"verify {k} + 1", found["verify"], chip)
        if found["draft"]:
            describe("draft", found["draft"], chip)
            describe("whole round", compiler.cost("round", k, batch, args.drafter, tree), chip, timed=False)
        if args.prefill:
            describe("prefill", compiler.cost("prefill", 0, batch), chip)
        if args.engine:
            describe("engine step", compiler.cost("engine", k, batch, args.drafter, tree), chip,
                     timed=not found["draft"])
        v = chip.seconds(found["verify"]) / chip.seconds(found["plain"])
        d = chip.seconds(found["draft"]) / chip.seconds(found["plain"]) if found["draft"] else 0.0
        speed_up = gain(chip, found["plain"], found["verify"], found["draft"], tokens)
        print(f"  verify/plain {v:.2f}, draft/plain {d:.3f}: speed-up {speed_up:.2f} at alpha {args.alpha}")
    if args.write_text:
        describe("writing text", compiler.cost("write_text", 0, args.write_text), chip)
    if args.train:
        describe("training step", compiler.cost("train", 0, args.train, args.drafter), chip)
    if len(batches) > 1:
        low, high = batches[0], batches[-1]
        at = stops(chip, costs[low], costs[high], (low, high), tokens)
        print(f"speculation stops paying at {f'batch {at}' if at else f'no batch up to {MOST}'}, by the lines through "
              f"batches {low} and {high}, whether they fit or not")


def main(argv=None):
    run_script(work, arguments(argv))


if __name__ == "__main__":
    main()
