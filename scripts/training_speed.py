"""How fast text is written and students are trained here, against the machine's own matrix products.

    python scripts/training_speed.py --student eagle3 draft-lm
    python scripts/training_speed.py --compute bfloat16 --batch 64 --width 512 --rows 512     # an accelerator

"share" is the floating-point operations that the compiler counts in the program over the time it takes, as a share of
the rate of one large matrix product of the same type on this machine. A step is split by timing parts of it: the
target reading the batch, what the student adds to that forward, the way back, and the optimiser. The target's weights
are --dtype, the student's products --compute. Only counts on a machine that is idle.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from distill_options import HEADS, STUDENTS
from script_tools import keep_programs, machine, run_script


class Part(NamedTuple):
    """A program, timed."""

    seconds: float
    flops: float  # as the compiler counts them; NaN where it does not say


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="weights of the target")
    add("--compute", default="float32", choices=["float32", "bfloat16"], help="the student's products")
    add("--student", nargs="+", default=["eagle3", "draft-lm"], choices=[s for s in STUDENTS if s != "tables"])
    add("--layers", type=int, default=3, help="draft-lm: layers kept of the target")
    add("--draft-vocab", type=int, default=8192, help="eagle3 and dflash")
    add("--batch", type=int, default=4, help="rows per step")
    add("--width", type=int, default=256, help="tokens per row")
    add("--rows", type=int, default=64, help="conversations written at a time; 0: none are written")
    add("--slots", type=int, default=128, help="longest conversation")
    add("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    least = {"layers": 1, "draft_vocab": 1, "batch": 1, "width": 8, "rows": 0, "slots": 16, "repeats": 1}
    for name, low in least.items():
        if getattr(args, name) < low:
            parser.error(f"--{name.replace('_', '-')} must be {low} or more, not {getattr(args, name)}")
    return args


# --- measuring


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def program(fn: Callable[..., Any], *arguments: Any, repeats: int) -> Part:
    compiled = jax.jit(fn).lower(*arguments).compile()
    found: Any = compiled.cost_analysis() or {}
    return Part(seconds(lambda: compiled(*arguments), repeats), float(found.get("flops", float("nan"))))


def product_rate(dtype: str, repeats: int, size: int = 2048) -> float:
    """Floating-point operations per second of one large matrix product."""
    x = jnp.ones((size, size), dtype)
    fn = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    return 2 * size**3 / seconds(lambda: fn(x, x), repeats)


def writing(target, rows: int, slots: int) -> float:
    """Tokens per second while conversations of random beginnings are written; compiles first."""
    from specjax.train.generate import Plan, converse

    rng = np.random.default_rng(0)

    def plans(number):
        starts = rng.integers(0, target.model.vocab_size, (number, 8)).tolist()
        return [Plan(i, start, slots, temperature=1.0) for i, start in enumerate(starts)]

    silent = target._replace(eos_ids=())
    list(itertools.islice(converse(silent, plans(rows), batch=rows, slots=slots), 1))
    began = time.perf_counter()
    said = sum(len(made.tokens) for made in converse(silent, plans(rows), batch=rows, slots=slots))
    return said / (time.perf_counter() - began)


def student(kind: str, target, args):
    """What is trained, its weights and its loss; a vocabulary of the right size will do."""
    from specjax.train import draft_lm, students
    from specjax.train.initial import config_for, params_for

    if kind == "draft-lm":
        draft = draft_lm.prune(target, min(args.layers, target.config.num_layers))
        return draft.params, students.draft_lm_loss(draft, target)
    size = min(args.draft_vocab, target.model.vocab_size) if kind in ("eagle3", "dflash") else 0
    config = config_for(HEADS[kind], target, draft_vocab_size=size, num_draft_tokens=3)
    return params_for(config, target, ids=np.arange(size) if size else None), students.head_loss(
        config, target, anchors=32 if kind == "dflash" else 0
    )


def step_parts(kind: str, target, args) -> dict[str, Part]:
    """The whole step, and programs that do less and less of it."""
    from specjax.train import heads
    from specjax.train.settings import Settings
    from specjax.train.trainer import start, update
    from specjax.train.types import Batch

    params, loss = student(kind, target, args)
    tokens = np.random.default_rng(0).integers(0, target.model.vocab_size, (args.batch, args.width), np.int32)
    batch = Batch(jnp.asarray(tokens), jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32))
    training, key = start(params, Settings(steps=1000)), jax.random.key(0)
    settings = Settings(steps=1000, dtype=args.compute)

    def forward(trained, given, batch):
        cast = jax.tree.map(lambda x: x.astype(args.compute), trained)
        return loss({**cast, **training.frozen}, given, batch, key)[0]

    def read(given, batch):
        reading = heads.read(target._replace(params=given), batch.tokens, (), batch.documents)
        return jnp.max(reading.logits, axis=-1)

    whole = update.lower(loss, settings, None, training, target.params, batch).compile()
    counted: Any = whole.cost_analysis() or {}
    copies = iter([jax.tree.map(jnp.copy, training) for _ in range(args.repeats + 1)])  # each is donated
    return {
        "target": program(read, target.params, batch, repeats=args.repeats),
        "forward": program(forward, training.trained, target.params, batch, repeats=args.repeats),
        "gradient": program(jax.grad(forward), training.trained, target.params, batch, repeats=args.repeats),
        "step": Part(seconds(lambda: whole(next(copies), target.params, batch), args.repeats),
                     float(counted.get("flops", float("nan")))),
    }  # fmt: skip


# --- what is shown


def line(kind: str, parts: dict[str, Part], tokens: int, rate: float) -> str:
    """A row of the table: tokens per second, the step's share of the product rate, and where its time goes."""
    step = parts["step"]
    marks = [0.0, *(parts[name].seconds for name in ("target", "forward", "gradient")), step.seconds]
    shares = [max(0.0, b - a) / step.seconds for a, b in itertools.pairwise(marks)]
    cells = [kind, f"{step.seconds:.3g} s", f"{tokens / step.seconds:.0f}", f"{step.flops / step.seconds / rate:.0%}"]
    return "| " + " | ".join(cells + [f"{share:.0%}" for share in shares]) + " |"


def work(args: argparse.Namespace) -> None:
    import specjax

    keep_programs()
    target = specjax.load(args.target, dtype=args.dtype)
    rates = {dtype: product_rate(dtype, args.repeats) for dtype in ("float32", "bfloat16")}
    print(f"{args.target}, weights {args.dtype}; {machine()}")
    print("matrix products: " + ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in rates.items()))
    if args.rows:
        speed = writing(target, args.rows, args.slots)
        weights = sum(int(leaf.size) for leaf in jax.tree.leaves(target.params))
        share = 2 * weights * speed / rates[args.dtype]
        print(f"text: {speed:.0f} tokens/s, {args.rows} rows of {args.slots}, {share:.0%} of {args.dtype} products")
    tokens = args.batch * args.width
    print(f"\nsteps of {args.batch} x {args.width} tokens, students in {args.compute}; share of its products\n")
    print("| student | step | tokens/s | share | target | student, forward | backward | optimiser |")
    print("|---" * 8 + "|")
    for kind in args.student:
        print(line(kind, step_parts(kind, target, args), tokens, rates[args.compute]), flush=True)


def main() -> None:
    run_script(work, parse())


if __name__ == "__main__":
    main()
