"""How long one forward pass takes, beside what reading the weights once would take.

    python scripts/bench_forward.py --capacity 512 --length 300

Shapes are those of SmolLM2-135M with random weights, batch 1. Each pass reads a window of T tokens behind `--length`
committed ones, inside a compiled loop as decoding does. All cases take turns, so that a disturbance hits them alike;
timings still only count when nothing else runs, and the minimum beside the median tells. The floor is reading every
weight once at the memory bandwidth measured in the same turns: 4 bytes a weight, as float32 with T = 1 must.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp

from specjax.models import LlamaConfig, llama, llama_params

SMOLLM2_135M = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
    max_position_embeddings=8192, tie_embeddings=True,
)  # fmt: skip
STEPS = 4  # passes per call: the cost of a call is no part of a pass


def passes(model, width: int):
    """A compiled function that reads a window of `width` tokens STEPS times."""

    @functools.partial(jax.jit, donate_argnames="cache")
    def run(params, cache, tokens):
        def step(index, carry):
            cache, _ = carry
            window = (tokens + index) % model.vocab_size  # another window each time: nothing to hoist out of the loop
            positions = cache.lengths[:, None] + jnp.arange(width)[None]
            out = model.apply(params, window, positions, None, cache)
            return out.cache, out.logits

        logits = jnp.zeros((1, width, model.vocab_size))
        return jax.lax.fori_loop(0, STEPS, step, (cache, logits))

    return run


def cases(config: LlamaConfig, capacity: int, length: int) -> dict:
    """Name -> a function without arguments that runs one call; "read" reads 0.6 GB of float32."""
    numbers = jnp.ones(150_000_000, jnp.float32)
    read = jax.jit(jnp.sum)
    made: dict = {"read": lambda: read(numbers)}
    for dtype, widths in (("float32", (1, 2, 4, 8, 16)), ("bfloat16", (1, 2, 4, 8, 16))):
        model = llama.model(config, dtype=dtype)
        keys = iter(jax.random.split(jax.random.key(0), 1000))
        params = jax.tree.map(
            lambda x: (0.02 * jax.random.normal(next(keys), x.shape)).astype(x.dtype),  # noqa: B023
            llama_params.abstract_params(config, dtype=dtype),
        )
        for width in widths:
            cache = model.init_cache(1, capacity)._replace(lengths=jnp.array([length]))
            tokens = jnp.arange(width, dtype=jnp.int32)[None]
            run = passes(model, width).lower(params, cache, tokens).compile()
            made[dtype, width] = Case(run, params, cache, tokens)
    return made


class Case:
    """A compiled loop and its arguments; the cache goes in and comes out without a copy, as in decoding."""

    def __init__(self, run, params, cache, tokens):
        self.run, self.params, self.cache, self.tokens = run, params, cache, tokens

    def __call__(self):
        self.cache, logits = self.run(self.params, self.cache, self.tokens)
        return logits


def timed(made: dict, repeats: int) -> dict:
    """Name -> milliseconds of each call, the calls of all cases interleaved."""
    times = {name: [] for name in made}
    for repeat in range(repeats + 1):
        for name, call in made.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if repeat:  # the first turn warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def report(times: dict, config: LlamaConfig) -> dict:
    """Minimum and median of each case, against the floor and against the fastest plain step."""
    weights = sum(x.size for x in jax.tree.leaves(llama_params.abstract_params(config)))
    rows = {}
    for kind, pick in (("min", min), ("median", statistics.median)):
        bandwidth = 0.6 / pick(times["read"]) * 1e3
        floor = 4e-9 * weights / bandwidth * 1e3
        step = {name: pick(values) / STEPS for name, values in times.items() if name != "read"}
        plain = min(ms for (_, width), ms in step.items() if width == 1)
        rows[kind] = {"bandwidth_gb_s": bandwidth, "floor_ms": floor, "plain_ms": plain, "passes": [
            {"dtype": dtype, "window": width, "ms": ms, "of_floor": floor / ms, "plain_steps": ms / plain}
            for (dtype, width), ms in step.items()
        ]}  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=512, help="cache slots")
    parser.add_argument("--length", type=int, default=300, help="committed tokens")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if not 0 <= args.length <= args.capacity - 16:
        parser.error("the longest window, 16 tokens, must fit behind --length within --capacity")
    result = report(timed(cases(SMOLLM2_135M, args.capacity, args.length), args.repeats), SMOLLM2_135M)
    result = {"capacity": args.capacity, "length": args.length, "repeats": args.repeats, **result}
    if args.json:
        print(json.dumps(result, indent=2))
        return
    low, mid = result["min"], result["median"]
    print(f"capacity {args.capacity}, {args.length} tokens of text; minimum / median of {args.repeats} calls")
    print(f"memory bandwidth {low['bandwidth_gb_s']:.1f} / {mid['bandwidth_gb_s']:.1f} GB/s; "
          f"floor (every float32 weight read once) {low['floor_ms']:.1f} / {mid['floor_ms']:.1f} ms")  # fmt: skip
    print(f"{'weights':10}{'window':>7}{'ms':>16}{'floor / ms':>16}{'plain steps':>16}")
    for a, b in zip(low["passes"], mid["passes"]):
        print(f"{a['dtype']:10}{a['window']:>7}{a['ms']:>8.1f}{b['ms']:>8.1f}{a['of_floor']:>8.2f}{b['of_floor']:>8.2f}"
              f"{a['plain_steps']:>8.2f}{b['plain_steps']:>8.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
