"""Command line of distill_draft.py: options and what they refuse."""

import argparse
import pathlib

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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="distill_draft.py", description="Train a draft head on a target's own text and compare it with itself "
        "untrained, in real decoding.",
    )  # fmt: skip
    add = parser.add_argument
    add("--target", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    add("--student", required=True, choices=["medusa", "eagle", "mtp", "dflash"], help="kind of head")
    add("--out", type=pathlib.Path, help="directory for the trained head; specjax.load_drafter reads it")
    add("--overwrite", action="store_true", help="replace what is at --out")
    data = parser.add_argument_group("text")
    data.add_argument(
        "--data", type=pathlib.Path,
        help="an .npz file of token texts. If there is none yet, the target writes its own text and it is saved there",
    )  # fmt: skip
    data.add_argument("--text", type=pathlib.Path, help="a text file to learn from instead")
    data.add_argument("--conversations", type=int, default=256, help="how many the target writes")
    data.add_argument("--user-tokens", type=int, default=40, help="longest user turn it writes")
    data.add_argument("--answer-tokens", type=int, default=96, help="longest answer it writes")
    data.add_argument(
        "--answer-temperature", type=float, nargs="+", default=[1.0],
        help="of the answers; several take turns. User turns are always written at 1",
    )  # fmt: skip
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=int, default=300)
    train.add_argument("--batch", type=int, default=8, help="windows per step")
    train.add_argument("--window", type=int, default=64, help="tokens per window")
    train.add_argument("--learning-rate", type=float, default=1e-3)
    train.add_argument("--depth", type=int, default=None, help="draft tokens ahead to train; default all, or 3")
    train.add_argument("--anchors", type=int, default=32, help="dflash: blocks per window and step")
    train.add_argument(
        "--draft-vocab", type=int, default=None,
        help="most frequent tokens that can be drafted (eagle, dflash; default 8192), 0 for all",
    )  # fmt: skip
    train.add_argument("--seed", type=int, default=0)
    look = parser.add_argument_group("comparison")
    look.add_argument("--num-draft-tokens", type=int, default=None, help="K, default 4 (medusa: 3 heads)")
    look.add_argument("--max-new-tokens", type=int, default=64, help="per held-out prompt")
    look.add_argument("--json", type=pathlib.Path, help="write settings and results there")
    args = parser.parse_args(arguments)
    if args.num_draft_tokens is None:
        args.num_draft_tokens = 3 if args.student == "medusa" else 4
    if args.draft_vocab is None:
        args.draft_vocab = 8192 if args.student in ("eagle", "dflash") else 0
    refuse(parser, args)
    return args


def refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    ones = ("steps", "batch", "conversations", "user_tokens", "answer_tokens", "anchors", "num_draft_tokens",
            "max_new_tokens")  # fmt: skip
    least = dict.fromkeys(ones, 1) | {"window": 4, "seed": 0, "draft_vocab": 0}
    for name, value in least.items():
        if getattr(args, name) < value:
            parser.error(f"--{name.replace('_', '-')} must be {value} or more, not {getattr(args, name)}")
    words = [
        (args.data and args.text, "--data and --text exclude each other"),
        (args.depth is not None and args.depth < 1, f"--depth must be 1 or more, not {args.depth}"),
        (not 0 < args.learning_rate < 1, f"--learning-rate must be between 0 and 1, not {args.learning_rate}"),
        (min(args.answer_temperature) < 0, "--answer-temperature must not be negative"),
        (args.draft_vocab and args.student in ("medusa", "mtp"),
         f"--draft-vocab: a {args.student} head drafts from the target's whole vocabulary"),
        (args.text and not args.text.is_file(), f"--text: no file {args.text}"),
        (args.out and args.out.exists() and not args.overwrite, f"--out: {args.out} exists; --overwrite replaces it"),
    ]  # fmt: skip
    for wrong, why in words:
        if wrong:
            parser.error(why)
