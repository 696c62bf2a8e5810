"""Command line of bench.py: options, what they refuse, the presets --quick and --textbook."""

import argparse
import importlib.util
import pathlib
import sys

import draft_sources
from script_tools import lost

DTYPES = ("float32", "bfloat16")
QUICK = {"per_category": 1, "max_new_tokens": 64, "repeats": 2}
# Every K alone; some of them in batches, where a window costs more.
TEXTBOOK = {
    "per_category": 1, "max_new_tokens": 64, "repeats": 2, "ignore_eos": True, "drafter": ["chain"],
    "num_draft_tokens": [1, 2, 3, 4, 6, 8, 12], "batch": [1, 2, 4, 8, 16, 32],
}  # fmt: skip


def parse(arguments: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _what(parser)
    _how(parser)
    arguments = sys.argv[1:] if arguments is None else arguments
    given, _ = parser.parse_known_args(arguments)
    preset = TEXTBOOK if given.textbook else QUICK if given.quick else {}
    parser.set_defaults(**preset)  # what stands on the command line goes before
    args = parser.parse_args(arguments)
    for refused, words in _refusals(args):
        if refused:
            parser.error(words)
    args.top_p = args.top_p * len(args.temperature) if len(args.top_p) == 1 else args.top_p
    return args


def _what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured; lists are combined with each other").add_argument
    add("prompts", type=pathlib.Path, nargs="?",
        help="JSONL file with 'prompt' and perhaps 'category' in each line; default a few built-in prompts")
    add("--per-category", type=int, metavar="N", help="only the first N prompts of each category")
    add("--model", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    add("--dtype", nargs="+", choices=DTYPES,
        help="of the weights when drafting; plain decoding is always measured with both (default: the "
        "one that reads a window of 8 tokens faster here)")
    add("--drafter", nargs="*", default=[draft_sources.AUTO], metavar="SOURCE|DIR|NAME",
        help=f"{', '.join(draft_sources.NAMED)}, a directory, the name of a model, A+B for a cascade, or 'chain': the "
        "first choices of the shipped tables in a line; default the one shipped for --model, else ngram; none at all "
        "after --drafter: plain decoding alone")
    add("--rule", nargs="+", choices=["rejection", "block", "match"], help="default: what suits the drafter")
    add("--num-draft-tokens", type=int, nargs="+", metavar="K", help="default: each drafter's own")
    add("--adaptive", action="store_true", help="besides, each drafter with the number of draft tokens chosen before "
        "every round")
    add("--batch", type=int, nargs="+", default=[1], metavar="B", help="prompts at a time")
    add("--temperature", type=float, nargs="+", default=[0.0], metavar="T")
    add("--top-p", type=float, nargs="+", default=[1.0], metavar="P", help="where T is above 0: one, or one per T")
    add("--max-new-tokens", type=int, default=128)
    add("--ignore-eos", action="store_true", help="every text has --max-new-tokens")
    add("--seed", type=int, default=0, help="of the first prompt; the next ones count up from it")
    add("--textbook", action="store_true", help="measure a chain of every length and batch beside the closed forms of "
        "Leviathan et al. (2023)")
    add("--passes", action="store_true", help="only the machine's ceilings and single forward passes, no text")


def _how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how, and where it goes").add_argument
    add("--quick", action="store_true", help="one prompt of each category, 64 new tokens, two repeats")
    add("--repeats", type=int, default=3, help="every configuration in turn on every prompt, so often (default 3)")
    add("--no-split", action="store_true", help="leave out the parts of a round, and what is computed from them")
    add("--capacity", type=int, default=512, help="with --passes: cache slots")
    add("--length", type=int, default=300, help="with --passes: committed tokens")
    add("--peer", choices=["transformers"], help="the same weights and prompts with this library, in the same turns")
    add("--peer-python", default=sys.executable, metavar="FILE",
        help="a Python that has torch and transformers; default this one (pip install '.[peers]' in the clone)")
    add("--peer-assistant", type=pathlib.Path, metavar="DIR", help="a draft model for the peer's assisted generation")
    add("--json", type=pathlib.Path, metavar="FILE", help="everything that was measured, also while it goes on")
    add("--html", type=pathlib.Path, metavar="FILE", help="a report with plots, in one file")


def _refusals(args: argparse.Namespace) -> list[tuple[bool, str]]:
    whole = {name: getattr(args, name) for name in ("max_new_tokens", "repeats", "capacity", "length", "per_category")}
    low = [f"--{name.replace('_', '-')} {value}: 1 or more" for name, value in whole.items()
           if value is not None and value < 1]  # fmt: skip
    low += [f"--batch {size}: 1 or more" for size in args.batch if size < 1]
    low += [f"--num-draft-tokens {count}: 1 or more; 0 is plain decoding, which is always there"
            for count in args.num_draft_tokens or [] if count < 1]  # fmt: skip
    return [
        *((True, words) for words in low),
        *lost(args, "json", "html"),
        (len(args.top_p) not in (1, len(args.temperature)), "--top-p: give one value, or one per --temperature"),
        (not all(0 < p <= 1 for p in args.top_p), "--top-p is above 0, up to 1"),
        (not all(0 <= t < float("inf") for t in args.temperature), "--temperature is 0 or more"),
        (not 0 <= args.seed < 2**31, "--seed is 0 to 2**31 - 1"),
        (args.prompts is not None and not args.prompts.is_file(), f"{args.prompts}: no such file"),
        (args.textbook and args.passes, "--textbook and --passes: give one of them"),
        (args.textbook and any(len(x or [1]) > 1 for x in (args.temperature, args.dtype, args.drafter, args.rule)),
         "--textbook takes one temperature, dtype, drafter and rule"),
        (args.textbook and args.adaptive, "--textbook has every length alone: leave out --adaptive"),
        (args.textbook and not args.drafter, "--textbook needs a drafter"),
        (args.textbook and args.no_split, "--textbook needs the parts of a round: leave out --no-split"),
        (args.passes and args.length > args.capacity - 16, "--length: the longest window, 16 tokens, must fit behind "
         "it within --capacity"),
        (bool(args.peer_assistant) and not args.peer, "--peer-assistant needs --peer"),
        (bool(args.peer_assistant) and not args.peer_assistant.is_dir(), f"--peer-assistant {args.peer_assistant}: "
         "no such directory"),
        (bool(args.html) and importlib.util.find_spec("matplotlib") is None, "--html needs matplotlib: pip install "
         "'.[plots]' in the clone"),
    ]  # fmt: skip
