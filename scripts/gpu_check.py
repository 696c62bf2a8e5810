"""What speculation can give on this device: windows of a target and a draft model with random weights, timed.

    python scripts/gpu_check.py --batch 1 8 32 --json shapes.json                          # 8B and 1B: 54 GB
    python scripts/gpu_check.py --target qwen3-8b --draft qwen3-0.6b --alpha 0.6 0.8
    python scripts/gpu_check.py --target 64,16,32,2,4,2 --draft 64,16,32,1,4,2 --windows 1 2 4 --length 8 --capacity 16

NOT YET RUN ON A GPU. Times do not depend on the weights, so nothing is downloaded and no text is written: what a round
of K draft tokens takes is K - 1 steps of the draft model, a window of 1 + K of the target, and the same window of the
draft model, which reads what was committed (accepting and sampling are left out: bench.py measures them). Tokens per
round are those of `specjax.theory` at an assumed acceptance alpha. A plain step is held against a stream of reads in
the same turns: it must read every weight, and keys and values of the text.
"""

import argparse
import functools
import json
import math
import pathlib
import statistics
from typing import Any

import bench_parts
import jax
import jax.numpy as jnp
import model_shapes
import numpy as np
from bench_report import number, text_table
from flax import nnx
from script_tools import keep_programs, lost, machine, progress, run_script, write

from specjax import LanguageModel, from_nnx, theory
from specjax.models import llama
from specjax.models.config import LlamaConfig
from specjax.models.llama_params import abstract_params

MOST_READ = 8.5  # GB of float32: more numbers than an int32 counts


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    sizes = "a name of scripts/model_shapes.py, or vocabulary,hidden,ffn,layers,heads,key heads"
    add("--target", default="llama3-8b", metavar="SHAPE", help=f"{sizes}; default llama3-8b")
    add("--draft", default="llama3-1b", metavar="SHAPE", help="the draft model; default llama3-1b")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--scan-layers", action="store_true", help="compiles once for all layers, which may cost copies of weights")
    add("--batch", type=int, nargs="+", default=[1], metavar="B")
    add("--windows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="T", help="1 + K; 1 among them")
    add("--alpha", type=float, nargs="+", default=[0.8], metavar="A", help="assumed acceptance of a judged draft token")
    add("--capacity", type=int, default=512, help="cache slots")
    add("--length", type=int, default=300, help="committed tokens")
    add("--repeats", type=int, default=9, help="turns of every part; the median counts")
    add("--read-gb", type=float, default=4.0, help="size of the stream that is read (default 4)")
    add("--json", type=pathlib.Path, metavar="FILE", help="everything that was measured")
    args = parser.parse_args(arguments)
    try:
        args.shapes = {name: model_shapes.shape(getattr(args, name)) for name in ("target", "draft")}
    except ValueError as error:
        parser.error(str(error))
    for refused, words in _refusals(args):
        if refused:
            parser.error(words)
    args.windows = sorted(set(args.windows))
    return args


def _refusals(args: argparse.Namespace) -> list[tuple[bool, str]]:
    low = [(value < 1, f"--{name} {value}: 1 or more") for name in ("capacity", "length", "repeats", "batch", "windows")
           for value in np.atleast_1d(getattr(args, name)).tolist()]  # fmt: skip
    vocab = {name: config.vocab_size for name, config in args.shapes.items()}
    shortest = min(config.max_position_embeddings for config in args.shapes.values())
    return [
        *low,
        (1 not in args.windows, "--windows: 1, the plain step, must be among them"),
        (args.length + max(args.windows) > args.capacity, f"--length {args.length}: the longest window, "
         f"{max(args.windows)} tokens, must fit behind it within --capacity {args.capacity}"),
        (args.capacity > shortest, f"--capacity {args.capacity}: the shapes have a context of {shortest}"),
        (vocab["target"] != vocab["draft"], f"--draft {args.draft} has {vocab['draft']} tokens and --target "
         f"{args.target} {vocab['target']}: they must have the same"),
        (not all(0 <= a <= 1 for a in args.alpha), "--alpha is 0 to 1"),
        (not 0 < args.read_gb <= MOST_READ, f"--read-gb is above 0, up to {MOST_READ}"),
        *lost(args, "json"),
    ]  # fmt: skip


# --- what fits


def needed(args: argparse.Namespace, batch: int) -> int:
    """Bytes: weights, the stream, and of every window a cache and three times its logits."""
    total = 4 * _numbers(args.read_gb)
    for config in args.shapes.values():
        model = llama.model(config, dtype=args.dtype, scan_layers=args.scan_layers)
        cache = jax.eval_shape(functools.partial(model.init_cache, batch, args.capacity))
        logits = 3 * 4 * batch * config.vocab_size * sum(args.windows)
        total += _bytes(abstract_params(config, dtype=args.dtype)) + len(args.windows) * _bytes(cache) + logits
    return total


def check_memory(args: argparse.Namespace, device: Any) -> None:
    """Raises ValueError if the device says how much it gives, and that is too little."""
    limit = (device.memory_stats() or {}).get("bytes_limit", math.inf)
    most = max(needed(args, batch) for batch in args.batch)
    if most > limit:
        raise ValueError(
            f"{1e-9 * most:.1f} GB are needed and the device gives {1e-9 * limit:.1f}: choose a smaller --batch, "
            "--windows, --read-gb or shape, or raise XLA_PYTHON_CLIENT_MEM_FRACTION"
        )


def _bytes(shapes: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def _numbers(gigabytes: float) -> int:
    return max(1, int(gigabytes * 1e9) // 4)


# --- measuring


def random_model(config: LlamaConfig, dtype: str, scan_layers: bool) -> LanguageModel:
    module = llama.Llama(config, dtype=jnp.dtype(dtype), scan_layers=scan_layers, rngs=nnx.Rngs(0))
    return LanguageModel(*from_nnx(module), config=config)


def measure(args: argparse.Namespace, models: dict[str, LanguageModel], batch: int) -> dict:
    """Milliseconds of every window of both models, and GB/s of the stream, by turns."""
    timer = bench_parts.Timer()
    timer.add("read", functools.partial(bench_parts.stream, _numbers(args.read_gb)))
    for name, lm in models.items():
        for width in args.windows:
            progress(f"batch {batch}: compiling a window of {width}, {name}", line=True)
            timer.add((name, width), functools.partial(
                bench_parts.passes, lm, batch, width, args.capacity, args.length))  # fmt: skip
    for _ in range(args.repeats):
        timer.turn()
    times = {name: {width: statistics.median(timer.times[name, width]) for width in args.windows} for name in models}
    must = {name: bench_parts.work(lm, batch, 1, args.length)[1] for name, lm in models.items()}
    return rates(args.alpha, batch, times, must, 4e-6 * _numbers(args.read_gb) / timer.median("read"))


def rates(alphas: list[float], batch: int, times: dict, must: dict, read: float) -> dict:
    """What follows from the measured times.

    Args:
      alphas: assumed acceptances.
      batch: rows.
      times: milliseconds by model ("target", "draft") and width of window.
      must: bytes that a plain step of each model must read.
      read: GB/s of the stream.
    """
    plain, step = times["target"][1], times["draft"][1]
    reads = {name: 1e-6 * must[name] / times[name][1] for name in times}
    rows = []
    for width, ms in times["target"].items():
        costs = {"verify_cost": ms / plain}
        if width > 1:  # reading costs what a step does, and no less
            beyond = max(0.0, times["draft"][width] - step)
            costs |= {"draft_cost": step / plain, "draft_overhead": beyond / plain}
        gains = [theory.speed_up(alpha, width - 1, **costs) for alpha in alphas]
        rows.append({"window": width, "target_ms": ms, "draft_ms": times["draft"][width], "verify_plain": ms / plain,
                     "speed_up": gains, "tokens_per_s": [1e3 * batch / plain * gain for gain in gains]})  # fmt: skip
    return {"batch": batch, "read_gb_s": read, "plain_gb_s": reads, "alpha": alphas, "windows": rows,
            "of_bandwidth": {name: rate / read for name, rate in reads.items()}}  # fmt: skip


def table(found: dict) -> str:
    assumed = [words for a in found["alpha"] for words in (f"tokens/s at {a:g}", "speed-up")]
    lines = [["window", "target ms", "/ plain", "draft ms", *assumed]]
    for row in found["windows"]:
        pairs = zip(row["tokens_per_s"], row["speed_up"], strict=True)
        gains = [text for rate, gain in pairs for text in (number(rate, 0), number(gain))]
        lines.append([str(row["window"]), number(row["target_ms"], 3), number(row["verify_plain"]),
                      number(row["draft_ms"], 3), *gains])  # fmt: skip
    text = [f"batch {found['batch']}; a stream reads {found['read_gb_s']:.1f} GB/s"]
    for name, rate in found["plain_gb_s"].items():
        text.append(f"a plain step of the {name} reads at {rate:.1f} GB/s, {found['of_bandwidth'][name]:.2f} of that")
    return "\n".join([*text, text_table(lines)])


def work(args: argparse.Namespace) -> None:
    keep_programs()
    check_memory(args, jax.devices()[0])
    models = {name: random_model(config, args.dtype, args.scan_layers) for name, config in args.shapes.items()}
    print(f"{args.target} with {args.draft}, {args.dtype}, random weights, {args.length} of {args.capacity} slots in "
          f"use; windows of 1 are plain steps\n{machine()}", flush=True)  # fmt: skip
    result: dict[str, Any] = {
        "machine": machine(), "options": {k: str(v) if k in ("json", "shapes") else v for k, v in vars(args).items()},
        "batches": [],
    }  # fmt: skip
    for batch in dict.fromkeys(args.batch):
        found = measure(args, models, batch)
        print(f"\n{table(found)}", flush=True)
        result["batches"].append(found)
        if args.json:
            write(args.json, json.dumps(result, indent=1).encode())


def main() -> None:
    run_script(work, parse())


if __name__ == "__main__":
    main()
