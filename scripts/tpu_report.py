"""What the TPU's own compiler makes of decoding, on a machine without a TPU: memory, collectives, modelled time.

    python scripts/tpu_report.py --topology v5e:2x4 --target llama3-8b --drafter llama3-1b --batch 1,32
    python scripts/tpu_report.py --topology v5e:1x1 --target smollm2-135m --drafter lookup -K 4 --alpha 0.6

Programs are compiled ahead of time from shapes alone, in bfloat16. Needs libtpu: pip install '.[tpu]'. Nothing is
measured. The modelled time of a pass is the largest of three: FLOPs of the compiled program, bytes that must be read
(weights and the whole cache, once) and bytes of collectives, each over the chip's published ceiling. The compiler
counts a loop's body once, so one and two unrolled layers are compiled and the line between them is extended
to all layers.
A round is verified behind a lookup (n-gram) chain of K; a draft model costs K of its own plain steps. Collectives are
charged by size, without the latency of each: with small batches on many chips real steps are slower than modelled.
"""

import argparse
import dataclasses
import functools
import os
import re
from typing import NamedTuple

QUIET = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}  # fmt: skip
for name, value in QUIET.items():
    os.environ.setdefault(name, value)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402

import specjax  # noqa: E402
from specjax import LanguageModel, drafters, loop, sharding, theory  # noqa: E402
from specjax.models import llama  # noqa: E402
from specjax.models.config import LlamaConfig, RopeScaling  # noqa: E402
from specjax.models.llama_params import abstract_params  # noqa: E402
from specjax.round import no_limits  # noqa: E402
from specjax.types import Text  # noqa: E402

# hidden, ffn, layers, heads, key heads: from each model's config.json
_LLAMA = {"rope_theta": 500000.0, "max_position_embeddings": 8192}
CONFIGS = {
    "llama3-8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, **_LLAMA),
    "llama3-70b": LlamaConfig(128256, 8192, 28672, 80, 64, 8, **_LLAMA),
    "llama3-1b": LlamaConfig(
        128256, 2048, 8192, 16, 32, 8, **_LLAMA, tie_embeddings=True,
        rope_scaling=RopeScaling("llama3", 32.0, original_max_position_embeddings=8192),
    ),
    "qwen3-8b": LlamaConfig(
        151936, 4096, 12288, 36, 32, 8, head_dim=128, rope_theta=1e6, max_position_embeddings=40960, qk_norm=True,
        rms_eps=1e-6,
    ),
    "smollm2-135m": LlamaConfig(49152, 576, 1536, 30, 9, 3, rope_theta=1e5, max_position_embeddings=8192,
                                tie_embeddings=True),
}  # fmt: skip


class Chip(NamedTuple):
    """Published ceilings of one chip (cloud.google.com/tpu/docs: v5e and v6e pages)."""

    flops: float  # bf16, per second
    bytes: float  # memory bandwidth, per second
    links: float  # inter-chip bandwidth, bytes per second, all links together
    memory: float  # bytes


CHIPS = {"v5e": Chip(197e12, 819e9, 200e9, 16 * 2**30), "v6e": Chip(918e12, 1640e9, 448e9, 32 * 2**30)}
WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u16": 2, "s16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1, "s64": 8}
SLOTS = 512  # one block of attention: more are a loop, whose body the compiler would count once
KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


class Cost(NamedTuple):
    """Of one device in one run of a program."""

    flops: float
    bytes: float
    collectives: dict[str, float]  # bytes by kind
    memory: float  # peak
    aliased: float

    def seconds(self, chip: Chip) -> float:
        return max(self.flops / chip.flops, self.bytes / chip.bytes, sum(self.collectives.values()) / chip.links)


def mesh_of(topology: str, data: int) -> Mesh:
    """A mesh ("data", "model") of the chips of a topology such as v5e:2x4."""
    one = {"chips_per_host_bounds": [1, 1, 1]} if topology.endswith(":1x1") else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **one)
    count = len(described.devices)
    if count % data:
        raise SystemExit(f"--data {data} does not divide the {count} chips of {topology}")
    return topologies.make_mesh(described, (data, count // data), sharding.AXES)


def language_model(mesh: Mesh, config: LlamaConfig) -> LanguageModel:
    """A target or draft model from shapes, in bfloat16, on the mesh."""
    params = abstract_params(config, dtype="bfloat16", scan_layers=False)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding.weight_sharding(mesh, path, x.shape)), params
    )  # fmt: skip
    model = sharding.on_mesh(mesh, llama.model(config, dtype="bfloat16", scan_layers=False))
    return LanguageModel(model, params, config=config)


class Programs:
    """The programs of one target and drafter on one mesh: abstract arguments, and what the compiler makes of them."""

    def __init__(self, mesh: Mesh, config: LlamaConfig, *, k: int, batch: int, slots: int = SLOTS):
        self.mesh, self.batch, self.chunk = mesh, batch, min(512, slots)
        lm = language_model(mesh, config)
        made = drafters.ngram(k) if k else specjax.plain()
        rule = made.default_rule
        self.program, self.weights = loop.split(lm.model, lm.params, made, rule, False)
        def arguments():
            lengths = jnp.ones(batch, jnp.int32)
            text = Text(jnp.zeros((batch, slots), jnp.int32), lengths, lengths)
            keys, laws = specjax.row_keys(range(batch)), specjax.make_sampling(batch, lm.model.vocab_size)
            return text, keys, laws, no_limits(64, batch)

        self.text, self.keys, self.sampling, self.limits = jax.tree.map(
            lambda x: self.placed(x, ("batch",), -1), jax.eval_shape(arguments)
        )
        self.lm, self.drafter = lm, made  # held: programs know a drafter's functions weakly

    def prefill(self):
        """Compiled `loop.start`; one chunk of the loop over a prompt is what is counted."""
        program = self.program.prefill()
        return loop.start.lower(program, self.weights, self.text, self.keys, self.limits, chunk=self.chunk).compile()

    def round(self):
        """Compiled `loop.step`, its state lying where `specjax.sharding` says."""
        start = functools.partial(loop.start, self.program.prefill(), chunk=self.chunk)
        shapes = jax.eval_shape(start, self.weights, self.text, self.keys, self.limits)
        cache = jax.tree.map(
            lambda x: self.placed(x, sharding.CACHE if x.ndim > 1 else ("batch",)), shapes.cache
        )
        state = jax.tree.map(lambda x: self.placed(x, ("batch",), -1), shapes._replace(cache=()))._replace(cache=cache)
        return loop.step.lower(self.program, self.weights, state, self.sampling, self.limits).compile()

    def placed(self, x, axes, front: int = 0):
        """The shape x on the mesh; with ``front`` -1 its first axis is named, if it counts the rows."""
        if front:
            axes = (*axes, *("slots",) * (x.ndim - 1)) if x.ndim and x.shape[0] == self.batch else ()
        own = NamedSharding(self.mesh, sharding.spec(self.mesh, axes, x.shape))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)


def collectives(text: str) -> dict[str, float]:
    """Bytes of the results of collectives in a compiled program, by kind; the body of a loop once."""
    found: dict[str, float] = {}
    for result, kind in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\(", text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result)[-1:]:
            size = functools.reduce(lambda a, b: a * int(b), [n for n in shape.split(",") if n], 1)
            found[kind] = found.get(kind, 0) + size * WIDTHS.get(dtype, 4)
    return found


def cost_of(compiled) -> Cost:
    """What one compiled program costs by the compiler's count."""
    count, memory = compiled.cost_analysis(), compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )  # fmt: skip
    read = memory.argument_size_in_bytes
    return Cost(count.get("flops", 0.0), read, collectives(compiled.as_text()), peak, memory.alias_size_in_bytes)


def extended(one: Cost, two: Cost, layers: int) -> Cost:
    """The line through the costs of one and two layers, at all layers."""
    def line(a, b):
        return a + max(b - a, 0) * (layers - 1)

    kinds = {kind: line(one.collectives.get(kind, 0), size) for kind, size in two.collectives.items()}
    flops, read = line(one.flops, two.flops), line(one.bytes, two.bytes)
    beside = max(one.memory - one.bytes, two.memory - two.bytes)  # temporaries do not grow with depth
    return Cost(flops, read, kinds, read + max(beside, 0), line(one.aliased, two.aliased))


def cost(mesh: Mesh, config: LlamaConfig, *, k: int, batch: int, prefill: bool = False) -> Cost:
    """Of a round of K lookup drafts (a plain step for 0), or of a chunk of the prompt, with all layers."""
    costs = []
    for layers in (1, 2):
        programs = Programs(mesh, dataclasses.replace(config, num_layers=layers), k=k, batch=batch)
        costs.append(cost_of(programs.prefill() if prefill else programs.round()))
    return extended(costs[0], costs[1], config.num_layers)


def describe(name: str, cost: Cost, chip: Chip) -> None:
    """A line for people."""
    peak, spare = cost.memory / 2**30, (chip.memory - cost.memory) / 2**30
    fits = "fits, spare" if spare >= 0 else "DOES NOT FIT, over by"
    kinds = ", ".join(f"{kind} {size / 2**20:.2f}" for kind, size in sorted(cost.collectives.items())) or "none"
    print(
        f"  {name:12} {1e3 * cost.seconds(chip):8.3f} ms  {cost.flops / 1e9:9.1f} GFLOP  {cost.bytes / 2**30:6.2f} GiB"
        f" read  peak {peak:6.2f} GiB ({fits} {abs(spare):.1f})  collectives, MiB: {kinds}"
    )  # fmt: skip


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x4", help="v5e:1x1, v5e:2x4, v6e:2x4 ...")
    parser.add_argument("--target", choices=sorted(CONFIGS), default="llama3-8b")
    parser.add_argument("--drafter", choices=["lookup", *sorted(CONFIGS)], default="lookup")
    parser.add_argument("--data", type=int, default=1, help="parts of the batch; the other chips share the weights")
    parser.add_argument("-K", "--num-draft-tokens", type=int, default=4)
    parser.add_argument("--batch", default="1,32", help="batches, comma-separated")
    parser.add_argument("--alpha", type=float, default=0.7, help="assumed acceptance of a judged draft token")
    parser.add_argument("--prefill", action="store_true", help="also a chunk of the prompt")
    args = parser.parse_args(argv)
    if args.topology.split(":")[0] not in CHIPS:
        parser.error(f"--topology {args.topology}: published ceilings are known for {', '.join(CHIPS)}")
    return args


def main(argv=None):
    args = arguments(argv)
    chip, mesh = CHIPS[args.topology.split(":")[0]], mesh_of(args.topology, args.data)
    config, k = CONFIGS[args.target], args.num_draft_tokens
    print(f"{args.target} on {args.topology}, mesh {dict(mesh.shape)}, K={k}, {SLOTS} slots a row; MODELLED, per chip")
    stops = None
    for batch in map(int, args.batch.split(",")):
        print(f"batch {batch}")
        plain, verify = (cost(mesh, config, k=n, batch=batch) for n in (0, k))
        draft = None if args.drafter == "lookup" else cost(mesh, CONFIGS[args.drafter], k=0, batch=batch)
        if args.prefill:
            describe("prefill", cost(mesh, config, k=0, batch=batch, prefill=True), chip)
        describe("plain step", plain, chip)
        describe(f"round of {k}", verify, chip)
        if draft is not None:
            describe("draft step", draft, chip)
        v = verify.seconds(chip) / plain.seconds(chip)
        c = 0.0 if draft is None else draft.seconds(chip) / plain.seconds(chip)
        gain = theory.speed_up(args.alpha, k, draft_cost=c, verify_cost=v)
        stops = batch if gain <= 1 and stops is None else stops
        print(f"  verify({k + 1})/plain {v:.2f}, draft/plain {c:.3f}: speed-up {gain:.2f} at alpha {args.alpha}")
    at = "stops paying at none of these batches" if stops is None else f"stops paying at batch {stops}"
    print(f"speculation {at}")


if __name__ == "__main__":
    main()
