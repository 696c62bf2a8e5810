"""The right size of a draft model: alpha, its cost c, and the speed-up, over its number of weights.

    for n in 1 4 12; do python scripts/distill_draft.py --student draft-lm --layers $n --corpus runs/text --steps 500 \\
        --out runs/draft-$n; done
    python scripts/draft_size.py runs/draft-1 runs/draft-4 runs/draft-12 --plot draft_size.png

A larger draft model is accepted more often and costs more: between the two lies an optimum, or the smallest (or none)
is best. alpha is that of sampled drafts at temperature 1 under "rejection"; c is a draft step over a plain step of the
target, both with one token, batch 1, and v a window of 1 + K over the same plain step, each in its fastest type. The
predicted speed-up is the best over K of (1 + a + .. + a^K) / (K c + v(K)); the measured one is wall clock with that K
(at least 1), plain and speculative by turns, prompts one at a time. Only counts on a machine that is idle.
"""

import argparse
import functools
import io
import json
import pathlib
import statistics
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from script_tools import check_lengths, figure_class, keep_programs, lost, machine, progress, run_script, write

WINDOWS = (1, 2, 3, 5, 8)  # widths that are timed; K is one less
CAPACITY, LENGTH, STEPS = 512, 200, 4


class Size(NamedTuple):
    """What is known of one draft model."""

    name: str
    weights: int
    alpha: float
    cost: float  # c
    best: int  # K of the largest prediction, 0: plain decoding
    predicted: float  # at that K
    num_draft_tokens: int  # that was measured
    measured: float | None  # wall clock against the fastest plain decoding, temperature 1
    greedy: float | None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", type=pathlib.Path, nargs="+", help="directories of distill_draft.py --student draft-lm")
    add("--target", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    add("--prompts", type=pathlib.Path, help="JSONL file; default eight built-in prompts")
    add("--per-category", type=int, help="only the first so many prompts of each category")
    add("--max-new-tokens", type=int, default=64)
    add("--repeats", type=int, default=3, help="of each timing; 0: nothing is decoded for time")
    add("--json", type=pathlib.Path, metavar="FILE")
    add("--plot", type=pathlib.Path, metavar="FILE", help="a .png")
    args = parser.parse_args(arguments)
    for refused, words in lost(args, "json", "plot"):
        if refused:
            parser.error(words)
    for run in args.runs:
        if not (run / "drafter" / "specjax.json").is_file():
            parser.error(f"{run} holds no draft model: train one with distill_draft.py --student draft-lm --out {run}")
    if min(args.max_new_tokens, args.repeats + 1, args.per_category or 1) < 1 or args.per_category == 0:
        parser.error("--max-new-tokens and --per-category are 1 or more, --repeats 0 or more")
    return args


@functools.partial(jax.jit, static_argnums=(0, 1))
def _windows(model, width: int, params, cache, tokens):
    """Reads a window STEPS times."""
    def step(index, carry):
        cache, best = carry
        positions = cache.lengths[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        out = model.apply(params, (tokens + best[:, None]) % model.vocab_size, positions, None, cache)
        return out.cache, jnp.argmax(out.logits[:, -1], axis=-1).astype(jnp.int32)

    return jax.lax.fori_loop(0, STEPS, step, (cache, jnp.zeros(1, jnp.int32)))[1]


def pass_seconds(models: dict, repeats: int = 9) -> dict[tuple[str, int], float]:
    """Median seconds of a pass by model and width of the window; all take turns."""
    from specjax.static import weak

    def once(lm, width):
        cache = lm.model.init_cache(1, CAPACITY)._replace(lengths=jnp.full(1, LENGTH, jnp.int32))
        return _windows(weak(lm.model), width, lm.params, cache, jnp.ones((1, width), jnp.int32))

    cases = {(name, width): lm for name, lm in models.items() for width in (WINDOWS if "target" in name else (1,))}
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for turn in range(repeats + 1):  # the first compiles
        for (name, width), lm in cases.items():
            began = time.perf_counter()
            once(lm, width).block_until_ready()
            if turn:
                times[name, width].append((time.perf_counter() - began) / STEPS)
    return {case: statistics.median(values) for case, values in times.items()}


def measure(args: argparse.Namespace, target, other, prompts) -> list[Size]:
    """From the smallest to the largest."""
    import specjax
    from specjax import drafters, theory
    from specjax.train.evaluate import evaluate

    drafts = {str(run): {d: specjax.load(run / "drafter", dtype=d) for d in ("float32", "bfloat16")}
              for run in args.runs}  # fmt: skip
    flat = {f"{name} {dtype}": lm for name, both in drafts.items() for dtype, lm in both.items()}
    seconds = pass_seconds({"target float32": target, "target bfloat16": other, **flat})

    def fastest(name, width):
        return min((seconds[f"{name} {dtype}", width], dtype) for dtype in ("float32", "bfloat16"))

    plain, v_dtype = fastest("target", 1)[0], fastest("target", 5)[1]
    verify = {width: seconds[f"target {v_dtype}", width] / plain for width in WINDOWS}
    verifier = target if v_dtype == "float32" else other
    found = []
    for name, both in drafts.items():
        step, dtype = fastest(name, 1)
        draft, cost = both[dtype], step / plain
        how = {"max_new_tokens": args.max_new_tokens, "progress": progress}
        (sampled,) = evaluate(verifier, drafters.model(draft, verifier, 4), prompts, temperatures=(1.0,),
                              rule="rejection", **how)  # fmt: skip
        alpha = sampled.alpha or 0.0
        gains = {width - 1: theory.speed_up(alpha, width - 1, draft_cost=cost, verify_cost=verify[width])
                 for width in WINDOWS[1:]}  # fmt: skip
        best = max(gains, key=lambda k: gains[k])
        ratios = {}
        if args.repeats:
            drafter = drafters.model(draft, verifier, best)
            for temperature in (1.0, 0.0):
                (row,) = evaluate(verifier, drafter, prompts, temperatures=(temperature,), repeats=args.repeats,
                                  plain={"float32": target, "bfloat16": other}, rule="rejection", **how)  # fmt: skip
                ratios[temperature] = row.ratio
        progress("")
        weights = sum(int(leaf.size) for leaf in jax.tree.leaves(draft.params))
        best_prediction = max(1.0, gains[best])
        found.append(Size(name, weights, alpha, cost, best if gains[best] > 1 else 0, best_prediction, best,
                          ratios.get(1.0), ratios.get(0.0)))  # fmt: skip
        print(f"{name}: alpha {alpha:.2f}, c {cost:.2f}, best K {found[-1].best}, {best_prediction:.2f}x predicted",
              file=sys.stderr, flush=True)  # fmt: skip
    return sorted(found, key=lambda size: size.weights)


def table(sizes: list[Size]) -> str:
    heads = ["draft model", "weights", "alpha, T=1", "c", "best K", "predicted", "measured, T=1", "measured, greedy"]
    lines = [heads, ["---"] * len(heads)]
    for size in sizes:
        ratios = ["-" if value is None else f"{value:.2f}x" for value in (size.measured, size.greedy)]
        with_k = f"{size.predicted:.2f}x" if size.best else "1.00x (plain)"
        lines.append([size.name, f"{size.weights / 1e6:.1f}M", f"{size.alpha:.2f}", f"{size.cost:.2f}", str(size.best),
                      with_k, f"{ratios[0]} (K={size.num_draft_tokens})", ratios[1]])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(path: pathlib.Path, sizes: list[Size]) -> None:
    figure = figure_class("--plot")(figsize=(11, 3.4), layout="constrained")
    x = [size.weights / 1e6 for size in sizes]
    panels = {
        "alpha, temperature 1": {"": [size.alpha for size in sizes]},
        "c, a draft step in plain steps": {"": [size.cost for size in sizes]},
        "speed-up": {
            "predicted, best K": [size.predicted for size in sizes],
            "measured, temperature 1": [size.measured for size in sizes],
            "measured, greedy": [size.greedy for size in sizes],
        },
    }
    for axes, (title, lines) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for name, values in lines.items():
            if None not in values:
                axes.plot(x, values, marker="o", label=name or None)
        axes.set(title=title, xlabel="weights of the draft model, millions", ylim=(0, None))
        if len(lines) > 1:
            axes.axhline(1, color="black", linewidth=0.8)
            axes.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write(path, buffer.getvalue())


def work(args: argparse.Namespace) -> None:
    import specjax
    from specjax.train.evaluate import Prompt, encode, read_prompts

    if args.plot:
        figure_class("--plot")  # is it installed? Better now than at the end.
    if args.prompts:
        prompts = read_prompts(args.prompts, args.per_category)
    else:
        from distill_options import HELD_OUT

        prompts = [Prompt(text) for text in HELD_OUT]
    keep_programs()
    target, other = (specjax.load(args.target, dtype=dtype) for dtype in ("float32", "bfloat16"))
    check_lengths([encode(target, prompt) for prompt in prompts], args.max_new_tokens, target.model)
    sizes = measure(args, target, other, prompts)
    print(f"{args.target}, {len(prompts)} prompts, {args.max_new_tokens} new tokens, batch 1; {machine()}\n")
    print(table(sizes))
    best = max(sizes, key=lambda size: size.predicted)
    if best.best == 0:
        print("\nno size pays here: decode plainly, or draft by looking up")
    else:
        where = "an end of those tried" if best in (sizes[0], sizes[-1]) else "an interior optimum"
        print(f"\nbest by prediction: {best.name}, {where}")
    if args.json:
        write(args.json, json.dumps({"machine": machine(), "sizes": [s._asdict() for s in sizes]}, indent=1).encode())
    if args.plot:
        draw(args.plot, sizes)


def main() -> None:
    run_script(work, parse())


if __name__ == "__main__":
    main()
