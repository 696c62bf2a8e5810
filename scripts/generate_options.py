"""Command line of generate.py: options, what they refuse, where prompts come from."""

import argparse
import json
import os
import pathlib
import sys

import devices
import draft_sources

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
    parser = argparse.ArgumentParser(prog="generate.py", description="Generate text with and without speculation.")
    parser.add_argument("prompt", nargs="*", help="prompts; '-' reads one from stdin, without its last newline")
    parser.add_argument(
        "--file", type=pathlib.Path,
        help="a text file with one prompt, or a .jsonl file with 'prompt' in each line; they follow the arguments",
    )  # fmt: skip
    parser.add_argument("--demo", action="store_true", help="built-in prompts for an instruct model (implies --chat)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"],
        help="default float32; for --demo the one that reads a window of several tokens faster here",
    )  # fmt: skip
    devices.add_arguments(parser)
    draft_sources.add_arguments(parser)
    parser.add_argument(
        "--adaptive", action="store_true",
        help="choose the number of draft tokens before every round, none where drafts do not pay",
    )  # fmt: skip
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
        *draft_sources.refusals(args), *devices.refusals(args),
        (args.compare and args.drafter == "none", "--compare needs a drafter to compare with plain decoding"),
        (args.adaptive and args.drafter == "none", "--adaptive needs a drafter"),
        (args.adaptive and args.drafter == "retokenize", "--adaptive needs a drafter that does not run Python"),
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
    args.dtype = args.dtype or (None if args.demo else "float32")
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
    draft_sources.parse_tree(args.tree)


def check_tokenizer(args: argparse.Namespace) -> None:
    """Prompts are text: a checkpoint without tokenizer is refused before its weights are read."""
    path = pathlib.Path(args.model).expanduser()
    known = any(os.path.isfile(path / name) for name in ("config.json", "specjax.json"))
    if known and not os.path.isfile(path / "tokenizer.json"):
        raise ValueError(f"--model {args.model} has no tokenizer.json, and prompts are text: put the model's there, or "
                         "give token ids to specjax.generate")  # fmt: skip


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


def options(args: argparse.Namespace, prompt: int = 0, sample: int = 0) -> dict:
    """Keywords for specjax.generate; the seed is that of one sample of one prompt."""
    chosen = {name: getattr(args, name) for name in (*SAMPLING, "max_new_tokens", "rule", "on_capacity")}
    return chosen | {
        "seed": args.seed + prompt * args.n + sample, "chat": args.chat or args.demo, "stop": args.stop,
        "eos_ids": [] if args.ignore_eos else None, "adaptive": args.adaptive,
    }  # fmt: skip
