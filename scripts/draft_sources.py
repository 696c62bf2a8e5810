"""From the command line to a drafter: what generate.py, eval_drafter.py and bench.py know about draft sources."""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

HEADS = ("eagle", "medusa", "mtp", "dflash")
LOOKUPS = ("ngram", "suffix", "recycling", "lookahead")
MODELS = ("model", "translate", "retokenize")
SOURCES = (*LOOKUPS, "cascade", *MODELS, *HEADS, "none")
AUTO, STORED = "auto", "stored"
NAMED = (AUTO, *LOOKUPS, "cascade")  # that need nothing but a name


class Source(NamedTuple):
    """Where a drafter comes from."""

    kind: str  # one of SOURCES, or STORED
    label: str  # in what is printed
    path: str = ""  # of what is stored


def choose(name: str, model: str = "", offered: Sequence[str] = SOURCES) -> Source:
    """What ``--drafter`` means: a source, a directory, the name of a model that a drafter is shipped for; or "auto",
    what is shipped for ``model``, else ngram. ``offered`` are the sources that a message names.

    Raises:
      ValueError: none of them.
    """
    if not name:
        raise ValueError(f"--drafter is empty: give one of {', '.join(offered)}, or a drafter's directory")
    if name in SOURCES:
        return Source(name, name)
    from specjax.drafters import shipped

    own = shipped.directory(model if name == AUTO else name)
    if name == AUTO and own is None:
        return Source("ngram", "ngram")
    path = pathlib.Path(name).expanduser()
    if name != AUTO and path.is_dir():
        return Source(STORED, name, str(path))
    if own is not None:
        return Source(STORED, f"shipped {own.name}", str(own))
    what = "a file, not the directory of a drafter" if path.is_file() else "no draft source and no directory"
    raise ValueError(
        f"--drafter {name} is {what}: give a directory of scripts/distill_draft.py or specjax.save_drafter, one of "
        f"{', '.join(offered)}, or a model that a drafter is shipped for ({', '.join(shipped.names()) or 'none yet'})"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("draft source")
    group.add_argument(
        "--drafter", default=AUTO, metavar="SOURCE|DIR|NAME",
        help=f"{', '.join(SOURCES)}; the directory of a drafter or of a training run; the name of a model that a "
        "drafter is shipped for; default the one shipped for --model, else ngram",
    )  # fmt: skip
    group.add_argument("--num-draft-tokens", type=int, default=None, help="draft tokens (nodes of a tree) per round")
    group.add_argument("--draft-model", help=f"for {', '.join(MODELS)}: name, GGUF file or directory")
    group.add_argument("--coupled", action="store_true", help="for models and heads: draft with the target's noise")
    group.add_argument(
        "--draft-checkpoint", metavar="DIR",
        help=f"for {', '.join(HEADS)} and cascade: a directory, or 'random' for an untrained head (exact, and slow)",
    )  # fmt: skip
    group.add_argument("--tables", metavar="FILE", help="for recycling and cascade: a drafter's tables.npz")
    group.add_argument(
        "--tree", help="for heads, also those of a directory: children per level as in 3,2,1, or "
        "dynamic:NODES,WIDTH,DEPTH; default a chain",
    )  # fmt: skip


def refusals(args: argparse.Namespace) -> list[tuple[bool, str]]:
    """Options that contradict each other, with what to say."""
    kind = args.drafter if args.drafter in (*SOURCES, AUTO) else STORED
    heads = (*HEADS, "cascade")
    return [
        (not args.drafter, "--drafter is empty: give a source, a directory or a name"),
        ((kind in MODELS) != bool(args.draft_model), f"--draft-model and --drafter {', '.join(MODELS)} go together"),
        (kind in HEADS and not args.draft_checkpoint, f"--drafter {kind} needs --draft-checkpoint DIR, or random"),
        (bool(args.draft_checkpoint) and kind not in heads, f"--draft-checkpoint needs --drafter {', '.join(heads)}"),
        (kind == "cascade" and args.draft_checkpoint == "random", "--drafter cascade needs a trained head, or none"),
        (bool(args.tables) and kind not in ("recycling", "cascade"), "--tables needs --drafter recycling or cascade"),
        (bool(args.tables) and bool(args.draft_checkpoint), "--tables and --draft-checkpoint: give one of them"),
        (args.coupled and kind not in (*MODELS[:2], *HEADS, STORED), "--coupled needs a drafter that draws: a model or "
         "a head"),
        (args.coupled and bool(args.tree), "--coupled draws a chain: leave out --tree"),
        (bool(args.tree) and kind not in (*HEADS, STORED), f"--tree needs --drafter {', '.join(HEADS)} or a directory"),
        (bool(args.tree) and args.num_draft_tokens is not None, "--tree has its own number of nodes: leave out "
         "--num-draft-tokens"),
        (kind == "lookahead" and args.num_draft_tokens is not None, "--num-draft-tokens: lookahead has its own"),
        (kind == "none" and args.num_draft_tokens is not None, "--num-draft-tokens needs a drafter"),
    ]  # fmt: skip


def parse_tree(text: str | None):
    """A topology from ``--tree``.

    Raises:
      ValueError: anything else than numbers of 1 or more.
    """
    from specjax import tree

    if text is None:
        return None
    dynamic = text.startswith("dynamic:")
    try:
        numbers = [int(part) for part in text.removeprefix("dynamic:").split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or (dynamic and len(numbers) != 3):
        raise ValueError(f"--tree {text}: give children per level as in 3,2,1, or dynamic:NODES,WIDTH,DEPTH")
    return tree.Dynamic(*numbers) if dynamic else tree.kary(*numbers)


def build(args: argparse.Namespace, lm):
    """The drafter that was asked for, or None."""
    import specjax
    from specjax import drafters
    from specjax.drafters.checkpoint import read

    source = choose(args.drafter, args.model)
    number = {} if args.num_draft_tokens is None else {"num_draft_tokens": args.num_draft_tokens}
    if source.kind == STORED:
        return stored(source, lm, tree=parse_tree(args.tree), coupled=args.coupled, **number)
    if source.kind in MODELS:
        small = specjax.load(args.draft_model, dtype="float32")  # one-row steps: see docs/decisions.md
        if source.kind == "retokenize":
            return drafters.retokenize(small, lm, **number)
        return getattr(drafters, source.kind)(small, lm, coupled=args.coupled, **number)
    if source.kind not in HEADS:
        last = specjax.load_drafter(args.draft_checkpoint, target=lm, **number) if args.draft_checkpoint else None
        tables = None if args.tables is None else drafters.load_tables(args.tables)
        return lookup(source.kind, lm, tables=tables, last=last, **number)
    options = number | {"tree": parse_tree(args.tree), "coupled": args.coupled}
    if args.draft_checkpoint == "random":
        return untrained(source.kind, lm, **options)
    config, _ = read(args.draft_checkpoint, target=lm)
    if not type(config).__name__.lower().startswith(args.drafter):
        kind = type(config).__name__.removesuffix("Config")
        raise ValueError(f"--draft-checkpoint {args.draft_checkpoint} is a {kind} head, not --drafter {args.drafter}")
    return specjax.load_drafter(args.draft_checkpoint, target=lm, **options)


def lookup(kind: str, lm, *, tables=None, last=None, **number):
    """A source that needs no training, None for "none"; the last part of a cascade is ``last``, else `recycling`."""
    from specjax import drafters

    match kind:
        case "none":
            return None
        case "ngram" | "suffix":
            return getattr(drafters, kind)(**number)
        case "lookahead":
            return drafters.lookahead()  # a width of its own
    last = drafters.recycling(lm, tables=tables, **number) if last is None else last
    return last if kind == "recycling" else drafters.cascade(drafters.suffix(last.num_draft_tokens, min_match=3), last)


def stored(source: Source, lm, *, tree=None, coupled: bool = False, **number):
    """The drafter of a directory.

    Raises:
      ValueError: ``tree`` or ``coupled`` for a drafter that has no such choice.
    """
    import specjax

    form = ({} if tree is None else {"tree": tree}) | ({"coupled": True} if coupled else {})
    try:
        return specjax.load_drafter(source.path, target=lm, **form, **number)
    except TypeError as error:
        if not form:
            raise
        raise ValueError(f"--{' and --'.join(form)}: not for what {source.path} holds ({error})") from None


def sources(name: str, model: str, more: Sequence[str] = ()) -> list[Source]:
    """The parts of a drafter; messages name ``more`` besides.

    Raises:
      ValueError: one that is nothing, or needs more than a name.
    """
    whole = pathlib.Path(name).expanduser().is_dir()
    offered = (*NAMED, *more)
    found = [choose(part, model, offered) for part in ([name] if whole else name.split("+"))]
    for source in found:
        if source.kind not in (*NAMED, STORED):
            raise ValueError(f"--drafter {source.kind}: give one of {', '.join(offered)}, or a drafter's directory")
    return found


def make(
    parts: list[Source], lm, number: int | None = None, *, tree=None, coupled: bool = False,
    merged: bool = False,
):  # fmt: skip
    """The drafter of some parts."""
    from specjax import drafters

    given: dict = {} if number is None else {"num_draft_tokens": number}
    made: list = [
        stored(part, lm, tree=tree, coupled=coupled, **given) if part.kind == STORED
        else lookup(part.kind, lm, **given)
        for part in parts
    ]  # fmt: skip
    return made[0] if len(made) == 1 else drafters.cascade(*made, merged=merged)


def chain(lm, model: str, number: int | None = None):
    """The likeliest token after each context under the tables shipped for ``model``, and below it the next: a line,
    in which every depth is drafted alike, as the closed forms of speculation assume.

    Raises:
      ValueError: no tables are shipped for the model.
    """
    import specjax
    from specjax.drafters import Tables, recycling, shipped

    folder = shipped.directory(model)
    params = () if folder is None else specjax.load_drafter(folder, target=lm).params
    if not isinstance(params, tuple) or len(params) != 2:
        raise ValueError(f"--drafter chain: no tables are shipped for {model}; name another drafter")

    def best(table, order):  # context, ids, probabilities
        width = (table.shape[-1] - order) // 2
        return table[..., [*range(order), order, order + width]]

    tables = Tables(best(params[0], 1), best(params[1], 2), lm.model.vocab_size, 0)
    return recycling(lm, 7 if number is None else number, tables, candidates=1, copy_weights=(0.0,) * 5)


def untrained(kind: str, lm, **options):
    """A head with random weights: it shows that the text does not depend on the drafter, and drafts nothing useful."""
    from specjax.drafters import DFlashConfig, EagleConfig, MedusaConfig, MTPConfig, dflash, eagle, medusa, mtp
    from specjax.drafters.dflash import fresh_params as fresh_dflash
    from specjax.drafters.eagle import fresh_params as fresh_eagle
    from specjax.drafters.medusa import fresh_params as fresh_medusa
    from specjax.drafters.mtp import fresh_params as fresh_mtp

    count, one = lm.config.num_layers, dataclasses.replace(lm.config, num_layers=1)
    if kind == "eagle":
        config = EagleConfig(one, feature_layers=(min(2, count), count // 2, count))
        params = fresh_eagle(config)
        params.setdefault("head", lm.params.get("head", lm.params["embedding"]))
        return eagle(config, params, lm, **options)
    if kind == "medusa":
        config = MedusaConfig(lm.config.hidden_size, lm.model.vocab_size, shared=True)
        return medusa(config, fresh_medusa(config), lm, **options)
    if kind == "mtp":
        config = MTPConfig(one, feature_layers=(count + 1,))
        return mtp(config, fresh_mtp(config), lm, **options)
    config = DFlashConfig(one, feature_layers=(min(2, count), count // 2), mask_token_id=0)
    return dflash(config, fresh_dflash(config), lm, **options)
