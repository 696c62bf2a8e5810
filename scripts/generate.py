"""Generate text with and without speculation.

    python scripts/generate.py "Why is the sky blue?" --chat --drafter ngram
    python scripts/generate.py --demo --compare
    echo "Once upon a time" | python scripts/generate.py - --temperature 0.8 --seed 7

On a terminal the text appears as rounds commit it, accepted draft tokens in green. --compare times plain decoding and
speculation in turn on the same prompts, warm, and says whether the texts are equal. Sample j of prompt i has the seed
seed + i * n + j, as in specjax.generate; prompts are counted in the order arguments, --file, --demo.
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
    "Repeat this list, one tree a line: alder, ash, aspen, beech, birch, cedar, elm, fir, hazel, juniper, larch, "
    "maple, oak, pine, rowan, willow, yew.",
]
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "min_new_tokens")  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("prompt", nargs="*", help="prompts; '-' reads one from stdin, without its last newline")
    parser.add_argument(
        "--file", type=pathlib.Path,
        help="a text file with one prompt, or a .jsonl file with 'prompt' in each line; they follow the arguments",
    )  # fmt: skip
    parser.add_argument("--demo", action="store_true", help="built-in prompts for an instruct model (implies --chat)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="weights")
    parser.add_argument("--drafter", default="ngram", choices=["ngram", "model", "none"])
    parser.add_argument("--draft-model", help="for --drafter model: name, GGUF file or directory")
    parser.add_argument("--coupled", action="store_true", help="for --drafter model: draft with the target's noise")
    parser.add_argument("--num-draft-tokens", type=int, default=None, help="draft tokens per round")
    parser.add_argument("--rule", choices=["rejection", "block", "match"], help="default: what suits the drafter")
    parser.add_argument("--chat", action="store_true", help="apply the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--on-capacity", default="error", choices=["error", "truncate"],
        help="where prompt and new tokens exceed the model's context: refuse, or generate what fits",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the first sample; the next ones count up from it")
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
    parser.add_argument("--repeats", type=int, help="with --compare; default 5")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--no-color", action="store_true", help="also: the NO_COLOR environment variable")
    args = parser.parse_args(arguments)
    refusals = [
        ((args.drafter == "model") != (args.draft_model is not None), "--drafter model and --draft-model go together"),
        (args.coupled and args.drafter != "model", "--coupled needs --drafter model"),
        (args.drafter == "none" and args.num_draft_tokens is not None, "--num-draft-tokens needs a drafter"),
        (args.compare and args.drafter == "none", "--compare needs a drafter to compare with plain decoding"),
        (args.compare and args.max_new_tokens < 1, "--compare needs --max-new-tokens 1 or more"),
        (args.n < 1, "-n must be 1 or more"),
        (args.compare and args.n != 1, "--compare takes one sample per prompt, not -n"),
        (args.logprobs and (args.compare or not args.json), "--logprobs needs --json, without --compare"),
        (args.repeats is not None and not args.compare, "--repeats needs --compare"),
        (args.repeats is not None and args.repeats < 1, "--repeats must be 1 or more"),
        (args.prompt.count("-") > 1, "'-' may be given once: stdin holds one prompt"),
        (not (args.prompt or args.file or args.demo), "no prompt: give one, '-' for stdin, --file or --demo"),
    ]
    for refused, words in refusals:
        if refused:
            parser.error(words)
    args.repeats = args.repeats or 5
    return args


def check_ranges(args: argparse.Namespace) -> None:
    """The library's own complaints about numbers, before a model is loaded."""
    import specjax
    from specjax.options import rows

    specjax.make_sampling(1, 2, **{name: getattr(args, name) for name in SAMPLING})
    rows("max_new_tokens", args.max_new_tokens, 1)
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"seed={args.seed}: seeds are 0..2**32 - 1")
    if args.num_draft_tokens is not None:
        specjax.drafters.ngram(args.num_draft_tokens)  # all drafters have this range


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Prompts from arguments, --file and --demo, in this order. Exits with one line if a source cannot be read."""
    prompts = [read_stdin() if prompt == "-" else prompt for prompt in args.prompt]
    if args.file:
        prompts += read_file(args.file)
    if args.demo:
        prompts += DEMO_PROMPTS
    if not prompts:
        sys.exit(f"{args.file} has no prompt in it")
    return prompts


def read_stdin() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError:
        sys.exit("stdin is not UTF-8 text")


def read_file(path: pathlib.Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"cannot read {path}: {error.strerror}")
    except UnicodeDecodeError:
        sys.exit(f"{path} is not UTF-8 text")
    if path.suffix != ".jsonl":
        return [text.removesuffix("\n")]
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            sys.exit(f"{path}, line {number}: not JSON ({error.msg})")
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            sys.exit(f"{path}, line {number}: needs an object with a string 'prompt'")
        prompts.append(entry["prompt"])
    return prompts


def build_drafter(args: argparse.Namespace, lm):
    import specjax

    number = {} if args.num_draft_tokens is None else {"num_draft_tokens": args.num_draft_tokens}
    if args.drafter == "ngram":
        return specjax.drafters.ngram(**number)
    if args.drafter == "model":
        small = specjax.load(args.draft_model, dtype="float32")  # one-row steps: see docs/decisions.md
        return specjax.drafters.model(small, lm, coupled=args.coupled, **number)
    return None


def options(args: argparse.Namespace, prompt: int = 0, sample: int = 0) -> dict:
    """Keywords for specjax.generate; the seed is that of one sample of one prompt."""
    chosen = {name: getattr(args, name) for name in (*SAMPLING, "max_new_tokens", "rule", "on_capacity")}
    return chosen | {
        "seed": args.seed + prompt * args.n + sample, "chat": args.chat or args.demo, "stop": args.stop,
        "eos_ids": [] if args.ignore_eos else None,
    }  # fmt: skip


def report(tau: float | None, acceptance_rate: float | None, alpha: float | None) -> str:
    rate, judged = ("-" if value is None else f"{value:.2f}" for value in (acceptance_rate, alpha))
    return f"tau {tau or 0:.2f}, accepted/proposed {rate}, accepted/judged {judged}"


def use_color(args: argparse.Namespace) -> bool:
    return sys.stdout.isatty() and not args.no_color and not os.environ.get("NO_COLOR")


def legend(args: argparse.Namespace) -> str:
    green = "\x1b[32mgreen\x1b[0m = accepted draft tokens; " if use_color(args) else ""
    return (
        f"{green}tau = tokens per pass of the target; accepted/proposed = share of all draft tokens that were kept;\n"
        "accepted/judged = the same without those behind a rejected one"
    )


def show(lm, prompt: str, drafter, args: argparse.Namespace, index: int, sample: int = 0):
    """Streams one answer, accepted draft tokens in green. Returns it and whether Ctrl-C cut it short."""
    import specjax

    color, interrupted = use_color(args), False
    text = specjax.stream(lm, prompt, drafter=drafter, **options(args, index, sample))
    try:
        for piece in text:
            print(f"\x1b[32m{piece}\x1b[0m" if color and text.drafted else piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [interrupted]", end="")
        interrupted = True
    print(flush=True)
    return text.result, interrupted


def show_all(lm, prompts: list[str], drafter, args: argparse.Namespace) -> None:
    if drafter:
        print(legend(args), file=sys.stderr)
    for index, prompt in enumerate(prompts):
        for sample in range(args.n):
            if len(prompts) > 1 or args.n > 1:
                print(f"\n> {prompt}", flush=True)
            start = time.perf_counter()
            result, interrupted = show(lm, prompt, drafter, args, index, sample)
            stats, seconds = result.stats, time.perf_counter() - start
            drafted = f", {report(stats.tau, stats.acceptance_rate, stats.alpha)}" if drafter else ""
            print(f"[{stats.emitted} tokens in {seconds:.1f} s with compilation{drafted}]", file=sys.stderr, flush=True)
            if interrupted:
                sys.exit(130)


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(lm, prompts: list[str], drafter, args: argparse.Namespace) -> dict:
    """Plain and speculative decoding in turn, one prompt at a time; wall clock of whole calls, prefill included.

    Plain decoding is timed with both weight types and the faster one is the baseline. Without --json every answer
    and its numbers are printed at once. Ctrl-C ends it after the prompts finished so far.
    """
    import specjax

    rule = args.rule or drafter.default_rule
    rows: list[dict] = []
    interrupted = False
    try:
        other = "bfloat16" if args.dtype == "float32" else "float32"
        models = {args.dtype: lm, other: specjax.load(args.model, dtype=other)}
        if not args.json:
            print(legend(args), flush=True)
        for index, prompt in enumerate(prompts):
            where = f"prompt {index + 1}/{len(prompts)}"
            if args.json:
                progress(f"{where}: compiling and timing", line=True)
            else:
                print(f"\n> {prompt}", flush=True)
                if show(lm, prompt, drafter, args, index)[1]:
                    raise KeyboardInterrupt
                progress(f"{where}: timing", line=True)
            row = measure(models, prompt, index, drafter, args, where)
            rows.append(row)
            if not args.json:
                print_row(row, rule, args)
    except KeyboardInterrupt:
        interrupted = True
    progress("")
    return {"prompts": rows, "total": total(rows) if rows else None, "interrupted": interrupted}


def measure(models: dict, prompt: str, index: int, drafter, args: argparse.Namespace, where: str) -> dict:
    import specjax

    lm = models[args.dtype]
    run = functools.partial(specjax.generate, prompts=prompt, **options(args, index))
    calls = {f"plain {dtype}": functools.partial(run, model) for dtype, model in models.items()}
    calls["speculative"] = functools.partial(run, lm, drafter=drafter)
    results = {}
    for name, call in calls.items():
        progress(f"{where}: compiling {name}")
        results[name] = call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(args.repeats):
        progress(f"{where}: repeat {repeat + 1}/{args.repeats}")
        for name, call in calls.items():
            seconds[name].append(timed(call))
    progress("")
    return summarise(lm, prompt, results, seconds, args)


def progress(text: str, line: bool = False) -> None:
    """A status that overwrites itself on a terminal; elsewhere only what deserves a line of its own."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif line:
        print(text, file=sys.stderr, flush=True)


def summarise(lm, prompt: str, results: dict, seconds: dict, args: argparse.Namespace) -> dict:
    from specjax import parity

    same_build, spec = results[f"plain {args.dtype}"], results["speculative"]
    row = {
        "prompt": prompt, "text": spec.texts[0], "plain_text": same_build.texts[0],
        "tokens": {name: len(result.tokens[0]) for name, result in results.items()}, "seconds": seconds,
        "tau": spec.stats.tau, "acceptance_rate": spec.stats.acceptance_rate, "alpha": spec.stats.alpha,
        "per_position": spec.stats.per_position, "equal": spec.tokens == same_build.tokens,
    }  # fmt: skip
    row |= total([row])
    if not row["equal"] and args.temperature == 0:
        ids = lm.encode_chat(prompt) if args.chat or args.demo else lm.tokenizer.encode(prompt)
        found = parity.divergence(lm, ids, same_build.tokens[0], spec.tokens[0])
        row["divergence"] = found and found._asdict()
    return row


def total(rows: list[dict]) -> dict:
    """Rates over rows together: all tokens of a configuration over the sum of its median times."""
    rates = {
        name: sum(row["tokens"][name] for row in rows) / sum(statistics.median(row["seconds"][name]) for row in rows)
        for name in rows[0]["seconds"]
    }
    fastest = max((name for name in rates if name != "speculative"), key=lambda name: rates[name])
    return {
        "tokens_per_second": rates, "baseline": fastest, "ratio": rates["speculative"] / rates[fastest],
        "equal": all(row["equal"] for row in rows),
    }  # fmt: skip


def print_row(row: dict, rule: str, args: argparse.Namespace) -> None:
    rates, baseline = row["tokens_per_second"], row["baseline"]
    if not row["equal"]:
        print(f"  [plain {args.dtype} wrote:]\n{row['plain_text']}")
    print(
        f"  [{row['tokens']['speculative']} tokens: {baseline} {rates[baseline]:.1f} tok/s, "
        f"speculative {rates['speculative']:.1f} tok/s, ratio {row['ratio']:.2f}; "
        f"{report(row['tau'], row['acceptance_rate'], row['alpha'])}; {describe_equality(row, rule)}]",
        flush=True,
    )


def print_total(result: dict, args: argparse.Namespace) -> None:
    rows, overall = result["prompts"], result["total"]
    print(f"\n{args.model}, {args.dtype}, {args.drafter} drafter, batch 1, temperature {args.temperature:g}")
    for name, value in overall["tokens_per_second"].items():
        mark = "  <- baseline, the fastest plain decoding" if name == overall["baseline"] else ""
        print(f"  {name:16s} {value:7.1f} tok/s{mark}")
    texts = "equal" if overall["equal"] else "NOT all equal"
    print(f"  speed-up {overall['ratio']:.2f}x over all prompts, texts {texts}")
    if len(rows) > 1:
        best = max(range(len(rows)), key=lambda i: rows[i]["ratio"])
        print(f"  Best on prompt {best + 1}: {rows[best]['ratio']:.2f}x, at {rows[best]['tau']:.2f} tokens per pass.")
        lookup = "a lookup drafts well where the answer repeats its context, and proposes little elsewhere"
        agree = "a draft model pays where it agrees with the target, and costs its own passes everywhere"
        print(f"  Ratios differ because {lookup if args.drafter == 'ngram' else agree}.")


def describe_equality(row: dict, rule: str) -> str:
    """Whether plain and speculative text are the same; ``rule`` is the one in effect."""
    if row["equal"]:
        return "same text as plain"
    if row.get("divergence") is None:
        return "DIFFERENT TEXT" if rule == "match" else "different draws of the same law"
    where = row["divergence"]
    return f"texts part at token {where['index']}, where the target's two best logits are {where['margin']:.1e} apart"


def work(args: argparse.Namespace) -> None:
    prompts = read_prompts(args)
    import specjax
    from specjax.models.fetch import cache_dir

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "jax"))
    check_ranges(args)
    print(f"loading {args.model} and compiling (about a minute the first time) ...", file=sys.stderr, flush=True)
    lm = specjax.load(args.model, dtype=args.dtype)
    drafter = build_drafter(args, lm)
    if args.compare:
        result = compare(lm, prompts, drafter, args)
        if args.json:
            print(json.dumps(result))
        elif result["total"]:
            print_total(result, args)
        if result["interrupted"]:
            raise KeyboardInterrupt
    elif args.json:
        out = specjax.generate(lm, prompts, drafter=drafter, n=args.n, logprobs=args.logprobs, **options(args))
        print(json.dumps(as_json(out)))
    else:
        show_all(lm, prompts, drafter, args)


def main() -> None:
    args = parse()
    try:
        work(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.flush()
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader has gone; Python must not complain when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
