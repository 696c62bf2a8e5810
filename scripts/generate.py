"""Generate text with and without speculation.

    python scripts/generate.py "Why is the sky blue?" --chat --drafter ngram
    python scripts/generate.py --demo --compare
    echo "Once upon a time" | python scripts/generate.py - --temperature 0.8 --seed 7

On a terminal the text appears as rounds commit it, accepted draft tokens in colour. --compare times plain decoding and
speculation in turn on the same prompts, warm, and says whether the texts are equal.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import sys
import time

import jax

# Two prompts of everyday kind, two in which the answer repeats the prompt: there a lookup shines.
DEMO_PROMPTS = [
    "Why is the sky blue? Answer in three sentences.",
    "Give me three tips for learning to play the piano.",
    "Fix the typos and print the whole text again: The harbour of Lindholm was build in 1874 by the fishermen of the "
    "village. The harbour of Lindholm was widened in 1921 by the fishermen of the village and their sons. In 1956 the "
    "harbour of Lindholm lost its ferry to the new bridge.",
    "Add a comment to this program and print it again:\n\n```python\ndef price(items, tax):\n    total = 0\n"
    "    for item in items:\n        total = total + item.price\n    total = total + total * tax\n"
    "    return total\n```",
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("prompt", nargs="*", help="prompts; '-' reads one from stdin")
    parser.add_argument("--file", type=pathlib.Path, help="a text file with one prompt, or JSON lines with 'prompt'")
    parser.add_argument("--demo", action="store_true", help="built-in prompts for an instruct model (implies --chat)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights")
    parser.add_argument("--drafter", default="ngram", choices=["ngram", "model", "none"])
    parser.add_argument("--draft-model", help="for --drafter model: name, GGUF file or directory")
    parser.add_argument("--num-draft-tokens", type=int, default=None, help="draft tokens per round")
    parser.add_argument("--rule", choices=["rejection", "block", "match"], help="default: what suits the drafter")
    parser.add_argument("--chat", action="store_true", help="apply the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=1, help="samples per prompt")
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end tokens")
    parser.add_argument("--logprobs", action="store_true", help="report log-probabilities (with --json)")
    law = parser.add_argument_group("sampling (both with and without speculation)")
    law.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    law.add_argument("--top-k", type=int, default=0)
    law.add_argument("--top-p", type=float, default=1.0)
    law.add_argument("--min-p", type=float, default=0.0)
    law.add_argument("--repetition-penalty", type=float, default=1.0)
    law.add_argument("--presence-penalty", type=float, default=0.0)
    law.add_argument("--frequency-penalty", type=float, default=0.0)
    law.add_argument("--min-new-tokens", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="time plain and speculative decoding in turn")
    parser.add_argument("--repeats", type=int, default=5, help="with --compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--no-color", action="store_true", help="also: the NO_COLOR environment variable")
    args = parser.parse_args()
    if (args.drafter == "model") != (args.draft_model is not None):
        parser.error("--drafter model and --draft-model go together")
    if args.drafter == "none" and args.num_draft_tokens is not None:
        parser.error("--num-draft-tokens needs a drafter")
    if args.compare and args.drafter == "none":
        parser.error("--compare needs a drafter to compare with plain decoding")
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more")
    return args


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompt]
    if args.file:
        text = args.file.read_text()
        if args.file.suffix == ".jsonl":
            prompts += [json.loads(line)["prompt"] for line in text.splitlines() if line.strip()]
        else:
            prompts.append(text)
    if args.demo:
        prompts += DEMO_PROMPTS
    if not prompts:
        sys.exit("no prompt: give one as an argument, '-' for stdin, --file or --demo")
    return prompts


def build_drafter(args: argparse.Namespace, lm):
    import specjax

    if args.drafter == "ngram":
        return specjax.drafters.ngram(args.num_draft_tokens or 7)
    if args.drafter == "model":
        small = specjax.load(args.draft_model, dtype="float32")  # one-row steps: see docs/decisions.md
        return specjax.drafters.model(small, lm, args.num_draft_tokens or 4)
    return None


def options(args: argparse.Namespace) -> dict:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    chosen = {name: getattr(args, name) for name in (*names, "min_new_tokens", "max_new_tokens", "seed", "rule")}
    return chosen | {"chat": args.chat or args.demo, "stop": args.stop, "eos_ids": [] if args.ignore_eos else None}


def report(stats) -> str:
    rate = "-" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.2f}"
    alpha = "-" if stats.alpha is None else f"{stats.alpha:.2f}"
    return f"tau {stats.tau or 0:.2f} tokens/round, accepted/proposed {rate}, accepted/judged {alpha}"


def show(lm, prompt: str, drafter, args: argparse.Namespace) -> None:
    """Streams one answer; accepted draft tokens in colour."""
    import specjax

    color = sys.stdout.isatty() and not args.no_color and not os.environ.get("NO_COLOR")
    start = time.perf_counter()
    text = specjax.stream(lm, prompt, drafter=drafter, **options(args))
    try:
        for piece in text:
            print(f"\x1b[32m{piece}\x1b[0m" if color and text.drafted else piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [interrupted]", end="")
    print()
    stats = text.result.stats
    legend = " (green: accepted draft tokens)" if color and drafter else ""
    seconds = time.perf_counter() - start
    print(f"[{stats.emitted} tokens in {seconds:.1f} s with compilation, {report(stats)}{legend}]", file=sys.stderr)


def timed(call) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def compare(lm, prompts: list[str], drafter, args: argparse.Namespace) -> dict:
    """Plain and speculative decoding in turn, one prompt at a time; wall clock of whole calls, prefill included.

    Plain decoding is timed with both weight types and the faster one is the baseline.
    """
    import specjax

    other = "bfloat16" if args.dtype == "float32" else "float32"
    plains = {args.dtype: lm, other: specjax.load(args.model, dtype=other)}
    rows = []
    for index, prompt in enumerate(prompts):
        run = functools.partial(specjax.generate, prompts=prompt, **options(args) | {"seed": args.seed + index})
        calls = {f"plain {dtype}": functools.partial(run, model) for dtype, model in plains.items()}
        calls["speculative"] = functools.partial(run, lm, drafter=drafter)
        results = {name: call() for name, call in calls.items()}  # compiles
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(args.repeats):
            progress(f"prompt {index + 1}/{len(prompts)}, repeat {repeat + 1}/{args.repeats}")
            for name, call in calls.items():
                seconds[name].append(timed(call)[0])
        rows.append(summarise(lm, prompt, results, seconds, args))
    progress("")
    return {"prompts": rows, "total": total(rows)}


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def summarise(lm, prompt: str, results: dict, seconds: dict, args: argparse.Namespace) -> dict:
    from specjax import parity

    rates = {name: len(results[name].tokens[0]) / statistics.median(times) for name, times in seconds.items()}
    same_build, spec = results[f"plain {args.dtype}"], results["speculative"]
    row = {
        "prompt": prompt, "text": spec.texts[0], "tokens": len(spec.tokens[0]), "tokens_per_second": rates,
        "seconds": seconds, "tau": spec.stats.tau, "acceptance_rate": spec.stats.acceptance_rate,
        "per_position": spec.stats.per_position, "equal": spec.tokens == same_build.tokens,
    }  # fmt: skip
    if not row["equal"] and args.temperature == 0:
        ids = lm.encode_chat(prompt) if args.chat or args.demo else lm.tokenizer.encode(prompt)
        found = parity.divergence(lm, ids, same_build.tokens[0], spec.tokens[0])
        row["divergence"] = found and found._asdict()
    return row


def total(rows: list[dict]) -> dict:
    """Rates over all prompts together: all tokens over the sum of median times."""
    def rate(name):
        return sum(row["tokens"] for row in rows) / sum(row["tokens"] / row["tokens_per_second"][name] for row in rows)

    rates = {name: rate(name) for name in rows[0]["tokens_per_second"]}
    fastest = max((name for name in rates if name != "speculative"), key=lambda name: rates[name])
    return {
        "tokens_per_second": rates, "baseline": fastest, "ratio": rates["speculative"] / rates[fastest],
        "equal": all(row["equal"] for row in rows),
    }  # fmt: skip


def print_comparison(result: dict, args: argparse.Namespace) -> None:
    baseline = result["total"]["baseline"]
    for row in result["prompts"]:
        rates = row["tokens_per_second"]
        print(f"\n> {row['prompt']}\n{row['text'].strip()}")
        print(
            f"  [{row['tokens']} tokens: plain {rates[baseline]:.1f} tok/s, "
            f"speculative {rates['speculative']:.1f} tok/s, ratio {rates['speculative'] / rates[baseline]:.2f}, "
            f"tau {row['tau']:.2f}, {describe_equality(row, args)}]"
        )
    rates = result["total"]["tokens_per_second"]
    print(f"\n{args.model}, {args.dtype}, {args.drafter} drafter, batch 1, temperature {args.temperature}")
    for name, value in rates.items():
        mark = "  <- baseline, the fastest plain decoding" if name == baseline else ""
        print(f"  {name:16s} {value:7.1f} tok/s{mark}")
    texts = "equal" if result["total"]["equal"] else "not all equal"
    print(f"  speed-up {result['total']['ratio']:.2f}x, texts {texts}")


def describe_equality(row: dict, args: argparse.Namespace) -> str:
    if row["equal"]:
        return "same text"
    if "divergence" not in row:
        return "different draws of the same law" if args.rule != "match" else "DIFFERENT TEXT"
    where = row["divergence"]
    return f"texts part at token {where['index']}, where the target's two best logits are {where['margin']:.1e} apart"


def main() -> None:
    args = parse()
    prompts = read_prompts(args)
    cache = os.environ.get("SPECJAX_CACHE") or pathlib.Path.home() / ".cache" / "specjax"
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache) / "jax"))
    import specjax

    try:
        lm = specjax.load(args.model, dtype=args.dtype)
        drafter = build_drafter(args, lm)
        if args.compare:
            result = compare(lm, prompts, drafter, args)
            print(json.dumps(result)) if args.json else print_comparison(result, args)
        elif args.json:
            out = specjax.generate(lm, prompts, drafter=drafter, n=args.n, logprobs=args.logprobs, **options(args))
            print(json.dumps(as_json(out)))
        else:
            for prompt in prompts:
                for sample in range(args.n):
                    print(f"\n> {prompt}" if len(prompts) > 1 else "", end="\n" if len(prompts) > 1 else "")
                    show(lm, prompt, drafter, argparse.Namespace(**{**vars(args), "seed": args.seed + sample}))
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def as_json(out) -> dict:
    stats = out.stats
    fields = ("tau", "acceptance_rate", "alpha", "per_position", "rounds", "emitted", "proposed", "accepted")
    logprobs = None if out.logprobs is None else [row.tolist() for row in out.logprobs]
    return {
        "texts": out.texts, "tokens": out.tokens, "finish_reasons": out.finish_reasons, "logprobs": logprobs,
        "lossless": out.lossless, "stats": {name: getattr(stats, name) for name in fields},
    }  # fmt: skip


if __name__ == "__main__":
    main()
