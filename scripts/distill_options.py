"""Command line of distill_draft.py: options, a file of them, and what they refuse."""

import argparse
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import devices

from specjax.models.directory import obstacle

# Prompts of everyday kind that nothing is trained on.
HELD_OUT = [
    "Why is the sky blue? Answer in three sentences.",
    "Give me three tips for learning to play the piano.",
    "Write a short letter to a friend who has moved to another town.",
    "What is the difference between a frog and a toad?",
    "Explain what a bank does with the money people save there.",
    "A train leaves at 9:40 and arrives at 11:15. How long is the journey? Think step by step.",
    "Summarize the story of Little Red Riding Hood.",
    "List five things to pack for a day at the sea.",
]
HEADS = {"medusa": "medusa", "eagle1": "eagle1", "eagle3": "eagle", "mtp": "mtp", "dflash": "dflash"}
STUDENTS = ("tables", "draft-lm", *HEADS)
LOSSES = ("forward_kl", "reverse_kl", "js", "tv", "nla", "hybrid", "cross_entropy")
REDUCED = ("eagle3", "dflash")  # that can draft from a part of the vocabulary


def amount(text: str) -> int:
    """A number of tokens: 200000, 200k, 1.5M.

    >>> amount("1.5M"), amount("200k"), amount("7")
    (1500000, 200000, 7)
    """
    units = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}
    factor = units.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: write 200000, 200k or 1.5M")
    return int(number)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="distill_draft.py", description="From a target to a drafter: text of the target's own, training, a "
        "drafter directory, and what it is worth in decoding. A run that is stopped goes on when it is started again.",
    )  # fmt: skip
    add = made.add_argument
    add("--config", type=pathlib.Path, help="a .json or .yaml file of these options by name; the command line wins")
    add("--target", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="weights of the target")
    add("--student", choices=STUDENTS, help="what to make")
    add("--out", type=pathlib.Path, help="directory of the run; the drafter is in DIR/drafter, and DIR means it too")
    add("--dry-run", action="store_true", help="say what would be done, how large it is and about how long it takes")
    add("--seed", type=int, default=0)
    devices.add_arguments(made)
    text = made.add_argument_group("text")
    text.add_argument("--tokens", type=amount, default=1_000_000, help="how many the target writes: 200k, 1.5M")
    text.add_argument("--prompts", type=pathlib.Path, help="the target answers these instead of prompts of its own")
    text.add_argument("--text", type=pathlib.Path, help="existing text instead; the target only reads it")
    text.add_argument("--corpus", type=pathlib.Path, help="where the text is, or goes; default DIR/corpus")
    text.add_argument("--more-corpora", type=pathlib.Path, nargs="+", default=[], help="text of earlier runs, too")
    text.add_argument("--rows", type=int, default=256, help="conversations written at a time")
    text.add_argument("--slots", type=int, default=320, help="longest conversation")
    tables = made.add_argument_group("student tables")
    tables.add_argument("--candidates", type=int, default=4, help="next tokens kept per context")
    tables.add_argument("--megabytes", type=float, default=12.0, help="largest file")
    train = made.add_argument_group("training")
    train.add_argument("--epochs", type=float, default=1.0, help="how often the text is read")
    train.add_argument("--steps", type=int, help="instead of --epochs")
    train.add_argument("--batch", type=int, default=8, help="rows per step")
    train.add_argument("--width", type=int, default=256, help="tokens per row, several texts in each")
    train.add_argument("--accumulate", type=int, default=1, help="parts a batch is cut into")
    train.add_argument("--learning-rate", type=float, default=1e-3)
    train.add_argument("--schedule", default="cosine", choices=["cosine", "linear"])
    train.add_argument("--weight-decay", type=float, default=0.0)
    train.add_argument("--ema", type=float, default=0.0, help="decay of averaged weights, 0: none")
    train.add_argument("--compute", default="float32", choices=["float32", "bfloat16"], help="the student's products")
    train.add_argument("--remat", action="store_true", help="keep fewer activations, compute them again")
    train.add_argument("--loss", default="forward_kl", choices=LOSSES, help="see specjax.train.losses")
    train.add_argument("--depth", type=int, help="draft tokens ahead that are trained; default all, or 3")
    train.add_argument("--decay", type=float, default=0.8, help="weight of each further depth")
    train.add_argument("--anchors", type=int, default=32, help="dflash: blocks per row and step")
    train.add_argument("--draft-vocab", type=int, help=f"tokens that can be drafted ({', '.join(REDUCED)}; 0: all)")
    train.add_argument("--target-head", action="store_true", help="eagle3: the output head is the target's own rows")
    train.add_argument("--layers", type=int, default=3, help="draft-lm: layers kept of the target")
    train.add_argument("--on-policy", type=int, default=0, help="draft-lm: every so many steps its own text; 0: never")
    train.add_argument("--tensorboard", action="store_true", help="event files too (needs tensorboardX)")
    train.add_argument("--log-every", type=int, default=10)
    train.add_argument("--eval-every", type=int, default=0, help="steps between evaluations by decoding; 0: the ends")
    train.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    look = made.add_argument_group("evaluation")
    look.add_argument("--eval-prompts", type=pathlib.Path, help="a JSONL file; default eight built-in prompts")
    look.add_argument("--num-draft-tokens", type=int, help="N; default 7 for tables, 3 for the others")
    look.add_argument("--max-new-tokens", type=int, default=64, help="per prompt")
    look.add_argument("--repeats", type=int, default=3, help="of each timing at the end; 0: nothing is timed")
    return made


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options: defaults, then the file, then the command line."""
    made = parser()
    given = made.parse_args(arguments)
    if given.config:
        try:
            made.set_defaults(**read_config(given.config, made))
        except ValueError as error:
            made.error(str(error))
        given = made.parse_args(arguments)
    if given.num_draft_tokens is None:
        given.num_draft_tokens = 7 if given.student == "tables" else 3
    if given.draft_vocab is None:
        given.draft_vocab = 8192 if given.student in REDUCED else 0
    for wrong, why in refusals(given):
        if wrong:
            made.error(why)
    given.corpus = given.corpus or given.out / "corpus"
    return given


def read_config(path: pathlib.Path, made: argparse.ArgumentParser) -> dict[str, Any]:
    """Options of a file, as the command line would have read them.

    Raises:
      ValueError: no such file, not to be read, an unknown option, a value that does not fit.
    """
    if not os.path.isfile(path):
        raise ValueError(f"--config {path}: {no_file(path)}")
    said = path.read_text(encoding="utf-8")
    try:
        found = json.loads(said) if path.suffix == ".json" else _yaml(said)
    except Exception as error:
        raise ValueError(f"--config {path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {path}: must hold options by name, not a {type(found).__name__}")
    actions = {action.dest: action for action in made._actions if action.dest not in ("help", "config")}
    values = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in actions:
            raise ValueError(f"--config {path}: unknown option {key!r}; there are {', '.join(sorted(actions))}")
        values[name] = _value(f"--config {path}: {key}", actions[name], value)
    return values


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("a .yaml file needs PyYAML (pip install '.[train]' in the clone); or write .json") from None
    return yaml.safe_load(text)


def _value(what: str, action: argparse.Action, value: Any) -> Any:
    if value is None:
        return action.default
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise ValueError(f"{what}={value!r}: must be true or false")
        return value
    if isinstance(value, list) and action.dest == "mesh":
        value = ",".join(map(str, value))
    if isinstance(value, (bool, dict)) or (isinstance(value, list) and action.nargs != "+"):
        raise ValueError(f"{what}={value!r}: must be one value")
    kind: Any = action.type or str
    try:
        items = [kind(str(item)) for item in (value if isinstance(value, list) else [value])]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{what}={value!r}: {error}") from None
    if action.choices and items[0] not in action.choices:
        raise ValueError(f"{what}={value!r}: choose one of {', '.join(map(str, action.choices))}")
    return items if action.nargs == "+" else items[0]


def no_file(path: pathlib.Path) -> str:
    return "a directory; name a file in it" if os.path.isdir(path) else "no such file"


def misplaced(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Files and directories that are not there, or are something else."""
    for name in ("prompts", "text", "eval_prompts"):
        if (path := getattr(args, name)) and not os.path.isfile(path):
            yield True, f"--{name.replace('_', '-')} {path}: {no_file(path)}"
    for name in ("out", "corpus"):
        if (path := getattr(args, name)) and (words := obstacle(path)):
            yield True, f"--{name} {path}: {words}; name a directory"
    for path in args.more_corpora:
        if not os.path.isfile(path / "manifest.json"):
            yield True, (f"--more-corpora {path}: no text of an earlier run, which has a manifest.json; give a run's "
                         "corpus, as in runs/tables/corpus")  # fmt: skip


def refusals(args: argparse.Namespace) -> list[tuple[Any, str]]:
    """What is wrong, and what to say about it."""
    ones = ("rows", "candidates", "batch", "accumulate", "layers", "log_every", "num_draft_tokens", "max_new_tokens")
    least = dict.fromkeys(ones, 1) | {"slots": 8, "width": 8, "seed": 0, "draft_vocab": 0, "anchors": 1, "repeats": 0,
                                      "on_policy": 0, "eval_every": 0, "save_every": 0}  # fmt: skip
    numbers = [
        (getattr(args, name) < low, f"--{name.replace('_', '-')} must be {low} or more, not {getattr(args, name)}")
        for name, low in least.items()
    ]
    student, maximum = args.student, {"steps": args.steps, "depth": args.depth}
    return [
        (student is None, f"--student is missing: choose one of {', '.join(STUDENTS)}"),
        (args.out is None, "--out is missing: the directory of the run"),
        *numbers, *misplaced(args), *devices.refusals(args),
        *((value is not None and value < 1, f"--{name} must be 1 or more, not {value}") for name, value in
          maximum.items()),
        (args.prompts and args.text, "--prompts and --text exclude each other"),
        (not 0 < args.epochs < 1e6, f"--epochs must be above 0, below a million, not {args.epochs}"),
        (args.seed >= 2**31, f"--seed must be below 2**31, not {args.seed}"),
        (args.candidates > 8, f"--candidates is at most 8, what the text keeps, not {args.candidates}"),
        (args.num_draft_tokens > 256, f"--num-draft-tokens is at most 256, not {args.num_draft_tokens}"),
        (not args.megabytes > 0, f"--megabytes must be above 0, not {args.megabytes}"),
        (not 0 < args.learning_rate < 1, f"--learning-rate must be between 0 and 1, not {args.learning_rate}"),
        (not 0 < args.decay <= 1, f"--decay must be above 0, up to 1, not {args.decay}"),
        (args.batch % args.accumulate, f"--accumulate {args.accumulate} does not divide --batch {args.batch}"),
        (args.draft_vocab and student not in REDUCED, f"--draft-vocab: a {student} drafts from the whole vocabulary"),
        (args.target_head and student != "eagle3", "--target-head needs --student eagle3"),
        (args.on_policy and student != "draft-lm", "--on-policy needs --student draft-lm"),
        (args.depth and student not in HEADS, "--depth needs a head as --student"),
    ]  # fmt: skip
