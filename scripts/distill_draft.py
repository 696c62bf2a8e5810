"""From a target to a drafter that makes it faster.

    python scripts/distill_draft.py --student tables --tokens 1M --out runs/tables
    python scripts/distill_draft.py --student eagle3 --corpus runs/tables/corpus --out runs/eagle
    python scripts/distill_draft.py --config run.yaml

From top to bottom: the target writes text of its own, with its laws; a student learns from it; the drafter is saved;
held-out prompts are decoded plainly and with it, by turns. What is stopped goes on when the same command is given
again. `specjax.load_drafter(DIR, target)` and `scripts/generate.py --drafter DIR` take the result as it is. Needs the
extra `train`: pip install '.[train]' in the clone.
"""

import json
import math
import os
import signal
import sys
import time
from typing import Any, NamedTuple

import devices
import jax
import jax.numpy as jnp
from distill_options import HEADS, HELD_OUT, parse
from distill_plan import foresee, plan, size, source
from script_tools import keep_programs, rival, run_script
from script_tools import write as write_file

from specjax.models.directory import free
from specjax.models.huggingface import read_json
from specjax.models.identity import fingerprint


def main() -> None:
    args = parse()
    try:
        run_script(work, args)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sys.exit("out of memory: lower --batch or --width (--rows, while text is written), raise --accumulate, or give "
                 "--mesh more parts of the matrices")


def work(args) -> None:
    devices.start(args)
    import specjax
    from specjax import processes
    from specjax.train.settings import checked

    progress_bar()  # is it installed? Better now than after an hour.
    keep_programs()
    mesh = devices.mesh(args)
    target = specjax.load(args.target, dtype=args.dtype, mesh=mesh)
    more = [earlier(path, target) for path in args.more_corpora]
    if args.eval_prompts:
        held_out(args, target, more)  # a broken line is better found now
    if args.student != "tables":
        checked(settings(args, args.steps or 2))
    foresee(args, target)
    if args.dry_run:
        say(plan(args, target, more))
        return
    if processes.first():
        check_drafter(args)
    corpora = [write(args, target), *more]
    if processes.first():
        note_student(args)
    if args.student == "tables":
        save_tables(args, target, corpora)
    else:
        train(args, target, corpora, mesh)
    worth(args, target, corpora, mesh)
    processes.wait("the end")


def earlier(path, target):
    """The text of an earlier run. That of another target has another's laws."""
    from specjax.train.data import read_corpus

    try:
        corpus = read_corpus(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"--more-corpora {path}: {error}, or leave it out") from error
    if corpus.manifest.get("target") != fingerprint(target):
        raise ValueError(f"--more-corpora {path} was written by another target: leave it out")
    return corpus


def check_drafter(args) -> None:
    """A directory keeps to one kind of student."""
    try:
        free(args.out / "drafter", overwrite=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--out {args.out}: the drafter has no place there: {error}") from error
    noted = args.out / "student.json"
    before = read_json(noted).get("student", args.student) if noted.exists() else args.student
    if before != args.student:
        raise ValueError(f"--out {args.out} holds a run of --student {before}: choose another directory")


def note_student(args) -> None:
    """Only now: what was refused until here leaves the directory free."""
    args.out.mkdir(parents=True, exist_ok=True)
    write_file(args.out / "student.json", json.dumps({"student": args.student}).encode())


def interrupted(*_) -> None:
    """Ends at once, whatever other threads do: all that is on disk is whole."""
    print("\ninterrupted; the same command goes on from here", file=sys.stderr, flush=True)
    os._exit(130)


def say(text: str) -> None:
    print(text, flush=True)


def progress_bar() -> None:
    try:
        import tqdm  # noqa: F401
    except ImportError:
        raise ValueError("tqdm is missing: pip install '.[train]' in the clone") from None


# --- text


def write(args, target):
    """The target's text with its laws, as far as it is not there yet."""
    from specjax.train.data import write_corpus

    began = time.perf_counter()
    corpus = write_corpus(
        target, args.corpus, tokens=args.tokens, source=source(args), seed=args.seed, batch=args.rows, slots=args.slots
    )
    say(f"text: {corpus.shards} shards in {args.corpus} ({time.perf_counter() - began:.0f} s now)")
    return corpus


# --- students


def save_tables(args, target, corpora) -> None:
    from specjax.drafters import RecyclingConfig
    from specjax.drafters.checkpoint import save_drafter
    from specjax.train import tables

    made = tables.build_tables(*corpora, candidates=args.candidates, megabytes=args.megabytes)
    say(f"tables: {tables.report(made)}")
    config = RecyclingConfig(num_draft_tokens=args.num_draft_tokens, candidates=args.candidates)
    save_drafter(args.out / "drafter", config, made, target=args.target, made_for=target, overwrite=True)


class Student(NamedTuple):
    """What is trained."""

    config: Any  # of a head, or the draft model
    params: Any  # to start from
    loss: Any


def student(args, target, corpora) -> Student:
    from specjax.train import draft_lm, packing, students
    from specjax.train.initial import config_for, params_for

    if args.student == "draft-lm":
        draft = draft_lm.prune(target, args.layers)
        draft = draft._replace(params=jax.tree.map(lambda x: x.astype(jnp.float32), draft.params))
        return Student(draft, draft.params, students.draft_lm_loss(draft, target, loss=args.loss))
    config = config_for(
        HEADS[args.student], target, draft_vocab_size=args.draft_vocab, num_draft_tokens=args.num_draft_tokens
    )
    ids = None
    if args.draft_vocab:
        ids = packing.vocabulary(packing.texts_of(*corpora), args.draft_vocab, target.model.vocab_size)
    params = params_for(config, target, ids=ids, seed=args.seed, own_head=not args.target_head)
    loss = students.head_loss(
        config, target, loss=args.loss, depth=args.depth, decay=args.decay,
        anchors=args.anchors if args.student == "dflash" else 0,
    )  # fmt: skip
    return Student(config, params, loss)


def settings(args, steps: int):
    from specjax.train.settings import Settings

    return Settings(
        steps=steps, learning_rate=args.learning_rate, schedule=args.schedule, weight_decay=args.weight_decay,
        accumulate=args.accumulate, ema=args.ema, dtype=args.compute, remat=args.remat, seed=args.seed,
        log_every=args.log_every, eval_every=args.eval_every, save_every=args.save_every,
    )  # fmt: skip


def train(args, target, corpora, mesh) -> None:
    from specjax import processes
    from specjax.train import draft_lm, packing
    from specjax.train.trainer import fit

    packed = packing.pack(packing.texts_of(*corpora), args.width)
    say(f"rows: {packed.report()}")
    batches = packing.batches(packed, args.batch, args.seed)
    steps = args.steps or max(1, math.ceil(args.epochs * batches.steps_per_epoch))
    made = student(args, target, corpora)
    say(f"{args.student}: {size(made.params):,} weights, {steps} steps of {args.batch} x {args.width} tokens")
    rewrite = None
    if args.on_policy:
        rewrite = draft_lm.on_policy(made.config, every=args.on_policy, seed=args.seed)
    fitted = fit(
        made.loss, made.params, batches.at, settings(args, steps), given=target.params, directory=args.out / "training",
        identity={"target": fingerprint(target), "student": repr(named(made.config)), "texts": packed.texts,
                  "rows": [args.batch, args.width],
                  "loss": [args.loss, args.depth, args.decay, args.anchors], "on_policy": args.on_policy},
        mesh=mesh, rewrite=rewrite, evaluate=judge(args, target, corpora, made), tensorboard=args.tensorboard,
    )  # fmt: skip
    save_student(args, target, made, fitted.ema or fitted.params)
    if processes.first():
        draw(args)


def named(config: Any) -> Any:
    """A draft model by its configuration."""
    return getattr(config, "config", config)


def drafter_of(args, target, made: Student, params):
    from specjax import drafters, sharding
    from specjax.train import heads

    if args.student == "draft-lm":
        drafter = drafters.model(made.config._replace(params=params), target, args.num_draft_tokens)
    else:
        number = {} if args.student == "medusa" else {"num_draft_tokens": args.num_draft_tokens}
        drafter = heads.drafter(made.config, params, target, **number)
    layout = target.model.layout
    return drafter if layout is None else sharding.place_drafter(layout.mesh, drafter, layout.rules)


def judge(args, target, corpora, made: Student):
    """tau and alpha on held-out prompts by decoding, for `fit`."""
    from specjax.train.evaluate import evaluate

    prompts = held_out(args, target, corpora)

    def measure(step, params):
        found = evaluate(
            target, drafter_of(args, target, made, params), prompts, max_new_tokens=args.max_new_tokens,
            temperatures=(0.0, 1.0), seed=args.seed,
        )  # fmt: skip
        return [row._asdict() for row in found]

    return measure


def save_student(args, target, made: Student, params) -> None:
    from specjax.drafters.checkpoint import save_drafter

    own = "orbax" if args.student == "eagle1" else "speculators"
    save_drafter(
        args.out / "drafter", made.config, params, format=own, target=args.target, made_for=target, overwrite=True
    )


def draw(args) -> None:
    from specjax.train.report import report

    try:
        say(f"picture: {report(args.out / 'training', args.out / 'train_report.png')}")
    except ValueError as error:
        say(f"no picture: {error}")


# --- what it is worth


def held_out(args, target, corpora):
    """Prompts that nothing was trained on: of a file, built in, or, without a tokenizer, how held-out texts begin."""
    from specjax.train.evaluate import Prompt, read_prompts
    from specjax.train.packing import texts_of

    if args.eval_prompts:
        return read_prompts(args.eval_prompts)
    if target.tokenizer is not None:
        return [Prompt(text) for text in HELD_OUT]
    every = list(texts_of(*corpora, held_out=True))[: len(HELD_OUT)]
    if not every:
        raise ValueError("no text is held out (every 50th is) and there is no tokenizer: give --eval-prompts")
    return [Prompt([int(token) for token in text.tokens[: max(1, len(text.tokens) // 2)]]) for text in every]


def worth(args, target, corpora, mesh) -> None:
    """Plain and speculative decoding by turns, with the drafter as it lies on disk."""
    import specjax
    from specjax.train.evaluate import evaluate, table

    drafter = specjax.load_drafter(args.out, target)
    plain = {f"plain {args.dtype}": target}
    other = rival(args.dtype) if args.repeats else None
    if other:
        plain[f"plain {other}"] = specjax.load(args.target, dtype=other, mesh=mesh)
    rows = evaluate(
        target, drafter, held_out(args, target, corpora), max_new_tokens=args.max_new_tokens,
        temperatures=(0.0, 1.0), repeats=args.repeats, plain=plain, seed=args.seed, progress=progress,
    )  # fmt: skip
    progress("")
    say(table({args.student: rows}))
    greedy = rows[0]
    if greedy.rates is not None and greedy.ratio is not None:
        best = max(rate for name, rate in greedy.rates.items() if name != "speculative")
        say(f"greedy: plain {best:.1f} tok/s, with this drafter {greedy.rates['speculative']:.1f}: {greedy.ratio:.2f}x")
    say(f"drafter: {args.out / 'drafter'}  (specjax.load_drafter({str(args.out)!r}, target))")
    facts = {"options": {k: str(v) for k, v in vars(args).items()}, "results": [row._asdict() for row in rows]}
    write_file(args.out / "results.json", json.dumps(facts, indent=1).encode())


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupted)
    main()
