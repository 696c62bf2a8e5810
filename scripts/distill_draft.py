"""Train a draft head for a target and see what it is worth: tau and acceptance in real decoding, before and after.

    python scripts/distill_draft.py --student eagle --data own.npz --steps 300 --out heads/eagle
    python scripts/distill_draft.py --student medusa --data own.npz

From top to bottom: the target writes text of its own (once: --data keeps it), a head that starts from the target's
weights learns the target's laws on it, the head is saved, and held-out prompts are decoded with the untrained and the
trained head. Needs the extra `train`: pip install 'specjax[train]'.
"""

import json
import sys
import time

import jax
import numpy as np
from distill_options import HELD_OUT, parse

WAIT = "\u241e"  # stands for the user's words while the chat template is taken apart


def main() -> None:
    args = parse()
    try:
        work(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def work(args) -> None:
    import specjax
    from specjax.models.fetch import cache_dir
    from specjax.train import Optimiser, config_for, fit, head_loss, params_for, texts

    progress_bar()  # is it installed? Better now than after an hour.
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "jax"))
    target = specjax.load(args.target)

    # Text: the target's own is what it will be asked to continue, so the head learns from that.
    data, prompts = hold_out(read(args, target), target)
    every = texts.windows(data, args.window)
    learnt = int(every.counts.sum())
    say(f"{len(data.lengths)} texts, {every.tokens.shape[0]} windows of {args.window}, {learnt} tokens to learn; "
        f"{args.steps} steps read {args.steps * args.batch / every.tokens.shape[0]:.1f} times the text")  # fmt: skip

    # A head that begins with what the target knows.
    config = config_for(
        args.student, target, draft_vocab_size=args.draft_vocab, num_draft_tokens=args.num_draft_tokens
    )
    ids = texts.frequent(data, args.draft_vocab, target.model.vocab_size) if args.draft_vocab else None
    untrained = params_for(config, target, ids=ids, seed=args.seed)

    # Training.
    loss = head_loss(config, target, depth=args.depth, anchors=args.anchors if args.student == "dflash" else 0)
    settings = Optimiser(steps=args.steps, learning_rate=args.learning_rate)
    bar, began = progress_bar()(total=args.steps, unit="step", desc=args.student), time.perf_counter()

    def progress(number, metrics):
        bar.update()
        bar.set_postfix({name: f"{metrics[name]:.3f}" for name in ("loss", "alpha")})

    trained, history = fit(
        loss, untrained, texts.batches(every, args.batch, args.seed), settings, given=target.params, seed=args.seed,
        progress=progress,
    )  # fmt: skip
    bar.close()
    seconds = time.perf_counter() - began
    if args.out:
        save_head(args, config, trained)

    # What it is worth.
    results = compare(args, target, prompts, config, {"untrained": untrained, "trained": trained})
    ends = {name: [float(column[:10].mean()), float(column[-10:].mean())] for name, column in history.items()}
    say(f"\n{args.student}, {args.steps} steps of {args.batch} x {args.window} tokens in {seconds:.0f} s; "
        + ", ".join(f"{name} {first:.3f} -> {last:.3f}" for name, (first, last) in ends.items()))  # fmt: skip
    say(table(results))
    if args.json:
        settings = {name: str(value) if hasattr(value, "parts") else value for name, value in vars(args).items()}
        facts = {"settings": settings, "tokens": learnt, "seconds": seconds, "history": ends, "results": results}
        args.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def progress_bar():
    try:
        from tqdm import tqdm
    except ImportError:
        raise ValueError("tqdm is missing: pip install 'specjax[train]'") from None
    return tqdm


def say(text: str) -> None:
    print(text, flush=True)


# --- text


def read(args, target):
    """The text to learn from: a text file, a file of tokens, or what the target writes now."""
    from specjax.train import texts

    if args.text:
        if target.tokenizer is None:
            raise ValueError("this target has no tokenizer: give token ids with --data")
        return texts.join([target.tokenizer.encode(args.text.read_text(encoding="utf-8"))])
    if args.data and args.data.exists():
        return texts.load(args.data)
    began = time.perf_counter()
    made = write(args, target)
    say(f"the target wrote {int((made.lengths - made.starts).sum())} tokens in {time.perf_counter() - began:.0f} s")
    if args.data:
        texts.save(args.data, made)
    return made


def hold_out(data, target):
    """Texts to learn from, and prompts that are not in them: without a tokenizer, how the last texts begin."""
    if target.tokenizer is not None:
        return data, HELD_OUT
    count = len(HELD_OUT)
    if len(data.lengths) <= count:
        raise ValueError(f"{len(data.lengths)} texts: {count} are held out as prompts, give more")
    ends = zip(data.offsets[-count:], data.lengths[-count:])
    prompts = [data.tokens[offset : offset + max(1, length // 2)].tolist() for offset, length in ends]
    return data._replace(**{name: getattr(data, name)[:-count] for name in ("offsets", "lengths", "starts")}), prompts


def write(args, target):
    """Conversations of the target with itself: it completes the user's turn, then answers."""
    import specjax
    from specjax.models import chat
    from specjax.train import texts

    if target.tokenizer is None or target.chat_template is None:
        raise ValueError("this target has no chat template to write conversations with: give --text or --data")
    words = target.tokenizer
    begin = {"bos_token": words.bos_token, "eos_token": words.eos_token}
    before, after = chat.render(target.chat_template, WAIT, **begin).split(WAIT)
    before, after = (words.encode(part, add_special_tokens=False) for part in (before, after))
    ends = set(target.eos_ids)
    pairs, size = [], 64
    bar = progress_bar()(total=args.conversations, unit="text", desc="writing")
    for first in range(0, args.conversations, size):
        count, seed = min(size, args.conversations - first), args.seed + 2 * first
        users = specjax.generate(
            target, [before] * count, max_new_tokens=args.user_tokens, temperature=1.0, seed=seed
        ).tokens
        users = [[token for token in user if token not in ends] for user in users]
        turns = [args.answer_temperature[i % len(args.answer_temperature)] for i in range(count)]
        prompts = [before + user + after for user in users]
        answers = specjax.generate(
            target, prompts, max_new_tokens=args.answer_tokens, temperature=turns, seed=seed + size
        ).tokens
        pairs += [prompt + answer for prompt, answer in zip(prompts, answers)]
        bar.update(count)
    bar.close()
    return texts.join(pairs, [len(before)] * len(pairs))


# --- the head


def save_head(args, config, params) -> None:
    from specjax.drafters.checkpoint import save_drafter

    save_drafter(args.out, config, params, target=args.target, overwrite=args.overwrite)
    say(f"saved to {args.out}")


def compare(args, target, prompts, config, weights) -> list[dict]:
    """Decodes the held-out prompts with every head, greedily and at temperature 1."""
    import specjax
    from specjax.train import heads

    rows = []
    for temperature in (0.0, 1.0):
        for name, params in weights.items():
            drafter = heads.drafter(config, params, target, num_draft_tokens=args.num_draft_tokens)
            stats = specjax.generate(
                target, prompts, drafter=drafter, chat=target.chat_template is not None, temperature=temperature,
                max_new_tokens=args.max_new_tokens, seed=args.seed,
            ).stats  # fmt: skip
            rows.append({
                "head": name, "temperature": temperature, "tau": stats.tau, "alpha": stats.alpha,
                "acceptance_rate": stats.acceptance_rate, "per_position": stats.per_position, "emitted": stats.emitted,
            })  # fmt: skip
    return rows


def table(rows: list[dict]) -> str:
    lines = ["temperature  head          tau  accepted/judged  accepted/proposed  per position"]
    for row in rows:
        depths = " ".join("-" if value is None else f"{value:.2f}" for value in row["per_position"])
        alpha, rate = (np.nan if row[key] is None else row[key] for key in ("alpha", "acceptance_rate"))
        lines.append(
            f"{row['temperature']:11.1f}  {row['head']:10}  {row['tau']:5.2f}  {alpha:15.2f}  {rate:17.2f}  {depths}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
