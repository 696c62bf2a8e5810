"""What distill_draft.py would do, before any of it is done: sizes, steps, memory and time."""

import importlib.util
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from distill_options import HEADS
from jax.sharding import NamedSharding

from specjax import sharding


def source(args):
    from specjax.train import sources

    if args.prompts:
        return sources.Prompts(str(args.prompts))
    return sources.Text(str(args.text)) if args.text else sources.SelfSynthesis()


def size(params) -> int:
    return sum(int(leaf.size) for leaf in jax.tree.leaves(params))


def rate() -> float:
    """Floating-point operations per second of this machine's matrix product, measured."""
    n = 2048
    x = jnp.ones((n, n), jnp.bfloat16)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    product(x, x).block_until_ready()
    times = []
    for _ in range(5):  # the best: others may be at work too
        began = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times)


def plan(args, target, more) -> str:
    """Sizes, steps, memory and time, without doing any of it."""
    layout = target.model.layout
    mesh = layout and layout.mesh
    speed, weights = rate(), size(target.params)
    have = sum(corpus.manifest.get("complete", {}).get("tokens", 0) for corpus in more)
    devices, place = "", "memory"
    if mesh is not None:
        speed *= mesh.size
        devices, place = f" on {mesh.size} devices, {gigabytes(held(target.params))} on each", "memory of a device"
    lines = [
        f"target: {args.target}, {weights:,} weights{devices}; bfloat16 products run at {speed / 1e9:.0f} GFLOP/s here",
        f"text: {args.tokens:,} tokens from {type(source(args)).__name__} into {args.corpus}, at most "
        f"{args.tokens * 34 / 1e6:.0f} MB, {clock(2 * weights * args.tokens / speed)} or more; "
        f"{have:,} tokens of earlier runs",
        f"{place} while text is written: about "
        f"{gigabytes(held(target.params) + writing(args, target, mesh))} (weights, cache, logits)",
    ]  # fmt: skip
    if args.student == "tables":
        return "\n".join([*lines, f"tables: up to {args.megabytes:g} MB, {args.candidates} candidates per context"])
    # Nothing is read for this: a vocabulary of the right size will do.
    shapes = jax.eval_shape(lambda: sketch(args, target))
    count = size(shapes)
    steps = args.steps or max(1, math.ceil(args.epochs * (args.tokens + have) / (args.batch * args.width)))
    tokens = args.batch * args.width
    needed = held(target.params) + learning(args, target, mesh, shapes)
    work = 2 * weights * tokens + 6 * count * tokens * (args.depth or 3)
    lines += [
        f"{args.student}: {count:,} weights, {steps:,} steps of {args.batch} x {args.width} tokens",
        f"{place} in training: about {gigabytes(needed)} (weights, gradients, "
        "optimiser, logits of one part)",
        f"training: {clock(steps * work / speed)} or more, at the speed of a large matrix product",
    ]
    return "\n".join(lines)


def held(tree) -> int:
    """Bytes of arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def portion(mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """Numbers of an array with these logical axes on one device."""
    if mesh is None:
        return math.prod(shape)
    return math.prod(NamedSharding(mesh, sharding.spec(mesh, axes, shape)).shard_shape(shape))


def writing(args, target, mesh) -> int:
    """Bytes on one device besides the target: cache, logits and two arrays made of them."""
    cache = jax.eval_shape(lambda: target.model.init_cache(args.rows, args.slots))
    kept = sum(portion(mesh, sharding.CACHE, x.shape) * x.dtype.itemsize for x in jax.tree.leaves((cache.k, cache.v)))
    return kept + 3 * 4 * portion(mesh, sharding.COUNTS, (args.rows, target.model.vocab_size))


def learning(args, target, mesh, shapes) -> int:
    """Bytes on one device besides the target: weights, gradients and two slots of the optimiser in float32, logits of
    target and student."""
    rows, vocab = args.batch // args.accumulate, args.draft_vocab or target.model.vocab_size
    laws = [(2, (rows, args.width, target.model.vocab_size)), (3, (rows, args.width, vocab))]
    logits = sum(times * 4 * portion(mesh, sharding.LOGITS, shape) for times, shape in laws)
    return logits + 16 * sum(
        math.prod(x.shape if mesh is None else sharding.weight_sharding(mesh, path, x.shape).shard_shape(x.shape))
        for path, x in jax.tree_util.tree_leaves_with_path(shapes)
    )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def sketch(args, target):
    from specjax.train import draft_lm
    from specjax.train.initial import config_for, params_for

    if args.student == "draft-lm":
        return draft_lm.prune(target, args.layers).params
    config = config_for(
        HEADS[args.student], target, draft_vocab_size=args.draft_vocab, num_draft_tokens=args.num_draft_tokens
    )
    return params_for(config, target, ids=np.arange(args.draft_vocab or 1), own_head=not args.target_head)


def foresee(args, target) -> None:
    """Refuses what would fail only after hours of writing text.

    Raises:
      ValueError: layers, a vocabulary, devices or a length that do not fit; a library that is missing.
    """
    context = target.model.context_length
    if context is not None:
        for name, value in (("slots", args.slots), ("max-new-tokens", args.max_new_tokens)):
            if value > context:
                raise ValueError(f"--{name} {value}: {args.target} reads {context} tokens at most")
    data = 1 if target.model.layout is None else target.model.layout.mesh.shape["data"]
    if args.rows % data:
        raise ValueError(f"--rows {args.rows} must be a multiple of {data}, the devices that --mesh {args.mesh} shares "
                         "it out over")
    if args.student == "tables":
        return
    if args.draft_vocab > target.model.vocab_size:
        raise ValueError(f"--draft-vocab {args.draft_vocab}: the target has {target.model.vocab_size} tokens; 0 is all")
    jax.eval_shape(lambda: sketch(args, target))
    if args.batch % (args.accumulate * data):
        raise ValueError(
            f"--batch {args.batch} must be a multiple of --accumulate {args.accumulate} times {data}, the devices "
            f"that --mesh {args.mesh} shares it out over"
        )
    if args.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise ValueError("--tensorboard needs tensorboardX: pip install tensorboardX")


def clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
