"""Generate text with and without speculation.

    python scripts/generate.py "Why is the sky blue?" --chat --drafter ngram
    python scripts/generate.py "Why is the sky blue?" --chat --drafter runs/x
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
import statistics
import sys
import time

import devices
import draft_sources
from generate_options import check_ranges, check_tokenizer, options, parse, read_prompts
from script_tools import keep_programs, measured, progress, rival, run_script


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


def load(args: argparse.Namespace, mesh) -> dict:
    """The model, and with --compare its rival in plain decoding, by the type of their weights. --dtype that was left
    open becomes the type that reads windows faster."""
    import specjax

    undecided = args.dtype is None
    args.dtype = args.dtype or "bfloat16"
    other = rival(args.dtype) if undecided or args.compare else None
    models = {dtype: specjax.load(args.model, dtype=dtype, mesh=mesh) for dtype in (args.dtype, other) if dtype}
    if undecided and other:
        from bench_parts import quickest

        found = quickest(models)
        args.dtype = next(iter(found))
        times = ", ".join(f"{dtype} {ms:.0f} ms" for dtype, ms in found.items())
        print(f"a window of 8 tokens takes {times}: drafts are read in {args.dtype}", file=sys.stderr, flush=True)
    return models if args.compare else {args.dtype: models[args.dtype]}


def compare(models: dict, prompts: list[str], drafter, args: argparse.Namespace) -> dict:
    """Plain and speculative decoding in turn, one prompt at a time; wall clock of whole calls, prefill included.

    Plain decoding is timed with both weight types, on an accelerator not in float32 if --dtype is bfloat16, and the
    faster one is the baseline. Without --json every answer
    and its numbers are printed at once. Ctrl-C ends it after the prompts finished so far.
    """
    lm, rule = models[args.dtype], args.rule or drafter.default_rule
    rows: list[dict] = []
    interrupted = False
    try:
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
    name = draft_sources.choose(args.drafter, args.model).label
    return {"drafter": name, "prompts": rows, "total": total(rows) if rows else None, "interrupted": interrupted}


def measure(models: dict, prompt: str, index: int, drafter, args: argparse.Namespace, where: str) -> dict:
    import specjax

    lm = models[args.dtype]
    run = functools.partial(specjax.generate, prompts=prompt, **options(args, index))
    calls = {f"plain {dtype}": functools.partial(run, model, adaptive=False) for dtype, model in models.items()}
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
    print(f"\n{args.model}, {args.dtype}, {result['drafter']} drafter, batch 1, temperature {args.temperature:g}")
    for name, value in overall["tokens_per_second"].items():
        mark = "  <- baseline, the fastest plain decoding" if name == overall["baseline"] else ""
        print(f"  {name:16s} {value:7.1f} tok/s{mark}")
    texts = "equal" if overall["equal"] else "NOT all equal"
    print(f"  speed-up {overall['ratio']:.2f}x over all prompts, texts {texts}")
    if len(rows) > 1:
        best = max(range(len(rows)), key=lambda i: rows[i]["ratio"])
        print(f"  Best on prompt {best + 1}: {rows[best]['ratio']:.2f}x, at {rows[best]['tau']:.2f} tokens per pass.")
        lookup = "a lookup drafts well where the answer repeats its context, and proposes little elsewhere"
        agree = "a drafter pays where it agrees with the target, and costs a wider pass everywhere"
        print(f"  Ratios differ because {lookup if result['drafter'] in ('ngram', 'suffix') else agree}.")


def describe_equality(row: dict, rule: str) -> str:
    """Whether plain and speculative text are the same; ``rule`` is the one in effect."""
    if row["equal"]:
        return "same text as plain"
    if row.get("divergence") is None:
        return "DIFFERENT TEXT" if rule == "match" else "different draws of the same law"
    where = row["divergence"]
    return f"texts part at token {where['index']}, where the target's two best logits are {where['margin']:.1e} apart"


def work(args: argparse.Namespace) -> None:
    devices.start(args)
    prompts = read_prompts(args)
    import specjax
    from specjax import sharding

    keep_programs()
    check_ranges(args)
    check_tokenizer(args)
    if args.drafter != "none":
        print(f"drafter: {draft_sources.choose(args.drafter, args.model).label}", file=sys.stderr)
    print(f"loading {args.model} and compiling (about a minute the first time) ...", file=sys.stderr, flush=True)
    mesh = devices.mesh(args)
    models = load(args, mesh)
    lm = models[args.dtype]
    drafter = draft_sources.build(args, lm)
    if mesh is not None and drafter is not None:
        drafter = sharding.place_drafter(mesh, drafter)
    if args.adaptive and drafter is not None:
        alone = args.compare or not args.json  # a prompt at a time
        args.adaptive = measured(lm, drafter, 1 if alone else len(prompts) * args.n)
    if args.compare:
        result = compare(models, prompts, drafter, args)
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
    run_script(work, parse())


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
