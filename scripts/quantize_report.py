"""What int8 weights do to a model's logits and to the time of a forward pass.

    python scripts/quantize_report.py
    python scripts/quantize_report.py --model path/to/directory --prompts prompts.txt --no-speed

Logits: the model answers the prompts greedily as it was loaded; its logits along these texts are then compared with
those of int8 matrices (specjax.load(..., quantize="int8")) and, to show what that choice costs, with those of an
embedding and head rounded likewise. KL is that of the quantised law against the original one, at temperature 1.
Speed: passes over a window of T tokens behind 128 committed ones, inside a compiled loop as decoding does, the weights
taking turns; the minimum counts. Timings mean something only when nothing else runs.
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from script_tools import run_script

import specjax
from specjax.models import int8

PROMPTS = (
    "Explain why the sky is blue to a child.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 12 apples, gives a third of them to Ann and buys 5 more. How many has he now?",
    "Summarise the story of Romeo and Juliet in three sentences.",
    "Translate into French: Where is the railway station?",
    "Give three tips for sleeping better.",
)
COMMITTED, STEPS, DRAFTED = 128, 4, 4


def texts_of(lm: specjax.LanguageModel, prompts: Sequence[str], new_tokens: int) -> list[list[int]]:
    """Prompts as ids, and behind each the model's own greedy answer."""
    chat = lm.chat_template is not None
    assert lm.tokenizer is not None
    ids = [lm.encode_chat(prompt) if chat else lm.tokenizer.encode(prompt) for prompt in prompts]
    limit, longest = lm.model.context_length, max(map(len, ids)) + new_tokens + DRAFTED + 1
    if limit is not None and longest > limit:
        raise ValueError(f"a prompt and --new-tokens {new_tokens} need {longest} tokens, the model reads {limit}")
    answers = specjax.generate(lm, ids, max_new_tokens=new_tokens, drafter=specjax.drafters.ngram(DRAFTED)).tokens
    return [prompt + answer for prompt, answer in zip(ids, answers)]


@functools.partial(jax.jit, static_argnums=0)
def _read(model, params, tokens):
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return model.apply(params, tokens, positions, None, model.init_cache(1, tokens.shape[1])).logits[0]


def laws(lm: specjax.LanguageModel, texts: list[list[int]]) -> np.ndarray:
    """Log-probabilities [tokens of all texts, V] in float64; texts are padded to one length, so one program serves."""
    width, rows = max(map(len, texts)), []
    tokens = getattr(lm.config, "num_tokens", 0) or None  # a padded vocabulary ends in -inf
    for text in texts:
        logits = _read(lm.model, lm.params, jnp.asarray([text + [0] * (width - len(text))], jnp.int32))
        rows.append(np.asarray(logits[: len(text), :tokens], np.float64))
    return np.concatenate(rows)


def compared(logits: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """How far the other logits [N, V] are from the first."""
    def normal(x):
        x = x - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    p, q = normal(logits), normal(other)
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    return {
        "max abs": np.abs(logits - other).max(), "mean abs": np.abs(logits - other).mean(),
        "greedy agrees": np.mean(p.argmax(-1) == q.argmax(-1)), "KL mean": kl.mean(), "KL max": kl.max(),
    }  # fmt: skip


def rounded_head(lm: specjax.LanguageModel) -> specjax.LanguageModel:
    """The model with embedding and head as int8 would hold them: a scale per token."""
    def channelwise(weight):  # [V, E]
        values, scale = int8.rounded(np.asarray(weight), "head")
        return jnp.asarray(values * scale[:, None], weight.dtype)

    changed = {name: channelwise(lm.params[name]) for name in ("embedding", "head") if name in lm.params}
    return lm._replace(params=lm.params | changed)


def pass_of(lm: specjax.LanguageModel, width: int) -> Any:
    """A function without arguments that reads a window of ``width`` tokens STEPS times."""
    model = lm.model

    @functools.partial(jax.jit, donate_argnames="cache")
    def run(params, cache, tokens):
        def step(index, carry):
            window = (tokens + index) % model.vocab_size  # another one each time: nothing to hoist out of the loop
            positions = COMMITTED + jnp.arange(width, dtype=jnp.int32)[None]
            out = model.apply(params, window, positions, None, carry[0])
            return out.cache, out.logits

        return jax.lax.fori_loop(0, STEPS, step, (cache, jnp.zeros((1, width, model.vocab_size))))

    held = [model.init_cache(1, 512)._replace(lengths=jnp.array([COMMITTED], jnp.int32))]
    tokens = jnp.arange(width, dtype=jnp.int32)[None]

    def call():
        held[0], logits = run(lm.params, held[0], tokens)
        return logits

    return call


def timed(calls: dict[Any, Any], repeats: int) -> dict[Any, float]:
    """Milliseconds of one pass, the smallest of all turns."""
    best = dict.fromkeys(calls, float("inf"))
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if repeat:  # the first turn compiles
                best[name] = min(best[name], 1e3 * (time.perf_counter() - start) / STEPS)
    return best


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what specjax.load takes")
    parser.add_argument("--prompts", type=pathlib.Path, help="a text file with a prompt on each line")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 8], metavar="T", help="of the passes timed")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-speed", action="store_true", help="logits only")
    args = parser.parse_args(argv)
    for name, value in (("new-tokens", args.new_tokens), ("repeats", args.repeats), ("windows", min(args.windows))):
        if value < 1:
            parser.error(f"--{name} {value}: 1 or more")
    if args.prompts is not None and not args.prompts.is_file():
        parser.error(f"--prompts {args.prompts}: no such file")
    return args


def read_prompts(path: pathlib.Path | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    found = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not found:
        raise ValueError(f"--prompts {path} has no prompt in it: write one on each line")
    return found


def load(args: argparse.Namespace) -> tuple[specjax.LanguageModel, specjax.LanguageModel]:
    """The model, and it with int8 layers.

    Raises:
      ValueError: one that cannot be compared with its int8 self.
    """
    model = specjax.load(args.model)
    if getattr(model.config, "quantization", ""):
        raise ValueError(f"--model {args.model} has int8 weights already: give the checkpoint they were made from")
    if model.tokenizer is None:
        raise ValueError(f"--model {args.model} has no tokenizer, so prompts cannot be read: give one that has")
    return model, specjax.load(args.model, quantize="int8")


def report(args: argparse.Namespace) -> None:
    prompts = read_prompts(args.prompts)
    whole, small = load(args)
    texts = texts_of(whole, prompts, args.new_tokens)
    logits = laws(whole, texts)
    print(f"{args.model}: {len(logits)} tokens of {len(texts)} texts, float32")
    for name, lm in {"int8 layers": small, "int8 layers, embedding and head": rounded_head(small)}.items():
        found = compared(logits, laws(lm, texts))
        print(f"{name:34}" + "  ".join(f"{key} {value:.4g}" for key, value in found.items()))
    sizes = {name: sum(x.nbytes for x in jax.tree.leaves(lm.params)) / 2**20 for name, lm in (
        ("float32", whole), ("float32 and int8", small))}
    print("MiB of weights: " + ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()))
    if args.no_speed:
        return
    models = {"float32": whole, "float32 and int8": small} | {
        name: specjax.load(args.model, dtype="bfloat16", quantize=kind)
        for name, kind in (("bfloat16", None), ("bfloat16 and int8", "int8"))
    }
    cases = {(name, width): pass_of(lm, width) for name, lm in models.items() for width in args.windows}
    times = timed(cases, args.repeats)
    print(f"ms a pass on {jax.devices()[0].device_kind}: " + ", ".join(f"T={width}" for width in args.windows))
    for name in models:
        print(f"  {name:20}" + "".join(f"{times[name, width]:10.1f}" for width in args.windows))


def main(argv: list[str] | None = None) -> None:
    run_script(report, arguments(argv))


if __name__ == "__main__":
    main()
