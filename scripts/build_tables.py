"""Tables of next-token laws for the recycling drafter, from text the target writes itself.

    python scripts/build_tables.py tables.npz --conversations 2048
    python scripts/build_tables.py tables.npz --prompts questions.jsonl --conversations 500

The target writes user turns (temperature 1, behind its own chat template's opening) or takes them from a file, answers
them at temperatures 0, 0.7 and 1 in turn, and reads each conversation once more; its eight likeliest next tokens at
every position are kept in shards beside the output. A run that was stopped goes on where it stopped. More text gives
better tables, slowly: each doubling adds a few hundredths to the tokens per pass. Text of the kind that will be asked
for helps most: give --prompts.
"""

import argparse
import functools
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TEMPERATURES = (0.0, 0.7, 1.0)
TOP = 8  # likeliest next tokens that are kept of every law
AT_ONCE = 4  # conversations per pass when laws are read: [AT_ONCE, length, V] logits are held


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path, help="the tables, .npz; shards go to OUTPUT.shards/")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, GGUF file or directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=pathlib.Path, help="user turns: .jsonl with 'prompt', or one a line")
    parser.add_argument("--conversations", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32, help="conversations per shard")
    parser.add_argument("--max-user-tokens", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=192, help="of an answer")
    parser.add_argument("--candidates", type=int, default=4, help="next tokens kept per context")
    parser.add_argument("--max-contexts", type=int, default=1 << 20, help="contexts of two tokens kept")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    numbers = ("conversations", "batch", "max_user_tokens", "max_new_tokens", "candidates", "max_contexts")
    if min(getattr(args, name) for name in numbers) < 1:
        parser.error("--" + ", --".join(name.replace("_", "-") for name in numbers) + " are 1 or more")
    if args.candidates > TOP:
        parser.error(f"--candidates is at most {TOP}")
    return args


def read_turns(path: pathlib.Path) -> list[str]:
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    try:
        turns = [json.loads(line)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"prompts={path}: every line needs an object with a 'prompt'") from None
    if not turns:
        sys.exit(f"{path} has no prompt in it")
    return turns


def opening(lm) -> list[int]:
    """The ids every conversation begins with, up to the words of the user."""
    one, other = lm.encode_chat("1 apple"), lm.encode_chat("Do it")
    return one[: next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)]


def user_turns(lm, args: argparse.Namespace, shard: int) -> list[str]:
    """``batch`` user turns of a shard."""
    import specjax

    first = shard * args.batch
    if args.prompts:
        turns = read_turns(args.prompts)
        return [turns[i % len(turns)] for i in range(first, first + args.batch)]
    out = specjax.generate(
        lm, [opening(lm)] * args.batch, temperature=1.0, top_p=0.95, max_new_tokens=args.max_user_tokens,
        seed=[args.seed + i for i in range(first, first + args.batch)],
    )  # fmt: skip
    return [text.strip() or "Hello" for text in out.texts or []]


def conversations(lm, args: argparse.Namespace, shard: int) -> list[list[int]]:
    """Token ids of whole conversations, the template's included."""
    import specjax

    turns = user_turns(lm, args, shard)
    numbers = range(shard * args.batch, (shard + 1) * args.batch)
    out = specjax.generate(
        lm, turns, chat=True, max_new_tokens=args.max_new_tokens, seed=[args.seed + i for i in numbers],
        temperature=[TEMPERATURES[i % len(TEMPERATURES)] for i in numbers], on_capacity="truncate",
    )  # fmt: skip
    return [lm.encode_chat(turn) + list(answer) for turn, answer in zip(turns, out.tokens, strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def top_laws(model, params, tokens):
    """(ids, probs) [B, L, TOP] of the laws after every position of tokens [B, L]."""
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], tokens.shape)
    logits = model.apply(params, tokens, positions, None, model.init_cache(batch, length)).logits
    top, ids = jax.lax.top_k(logits, TOP)
    return ids, jnp.exp(top - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True))


def read_laws(lm, texts: list[list[int]], skipped: int) -> dict[str, Any]:
    """A shard: texts end to end, with the law after every token; 0 for those of the opening, which never changes."""
    ids, probs = [], []
    width = -(-max(map(len, texts)) // 128) * 128
    for start in range(0, len(texts), AT_ONCE):
        some = texts[start : start + AT_ONCE]
        padded = np.zeros((AT_ONCE, width), np.int32)
        for row, text in zip(padded, some):
            row[: len(text)] = text
        got = jax.device_get(top_laws(lm.model, lm.params, jnp.asarray(padded)))
        for row, text in enumerate(some):
            ids.append(got[0][row, : len(text)])
            probs.append(got[1][row, : len(text)] * (np.arange(len(text)) >= skipped)[:, None])
    lengths = np.asarray([len(text) for text in texts])
    small = np.uint16 if lm.model.vocab_size <= 1 << 16 else np.uint32
    return {
        "tokens": np.concatenate(texts).astype(small), "lengths": lengths,
        "top_ids": np.concatenate(ids).astype(small), "top_probs": np.concatenate(probs).astype(np.float16),
    }  # fmt: skip


def stored_texts(paths: list[pathlib.Path]):
    """(tokens, top_ids, top_probs) of every text of every shard."""
    for path in paths:
        with np.load(path) as file:
            shard = {name: file[name] for name in file.files}
        ends = np.cumsum(shard["lengths"])
        for start, end in zip(ends - shard["lengths"], ends):
            yield tuple(shard[name][start:end] for name in ("tokens", "top_ids", "top_probs"))


def progress(numbers: list[int]):
    try:
        from tqdm import tqdm
    except ImportError:
        sys.exit("tqdm is missing: pip install 'specjax[train]'")
    return tqdm(numbers, unit="shard")


def main() -> None:
    args = parse()
    try:
        work(args)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def work(args: argparse.Namespace) -> None:
    import specjax
    from specjax.models.fetch import cache_dir

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "jax"))
    if args.output.is_dir():
        raise ValueError(f"output={args.output} is a directory: name the file to write")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"seed={args.seed}: must be a whole number from 0 to {2**31 - 1}")
    if args.prompts:
        read_turns(args.prompts)
    lm = specjax.load(args.model, dtype=args.dtype)
    folder = args.output.with_name(args.output.name + ".shards")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {k: str(v) for k, v in vars(args).items() if k not in ("output", "conversations", "candidates",
                                                                      "max_contexts")}  # fmt: skip
    noted = folder / "settings.json"
    if noted.exists() and json.loads(noted.read_text()) != settings:
        sys.exit(f"{folder} holds shards of other settings ({noted}): remove it, or choose another output")
    noted.write_text(json.dumps(settings, indent=2))
    paths = [folder / f"{i:05d}.npz" for i in range(-(-args.conversations // args.batch))]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    most = args.batch * (args.max_user_tokens + args.max_new_tokens)
    print(
        f"{len(paths)} shards of {args.batch} conversations, {len(missing)} to do; at most {most:,} new tokens and "
        f"{most * (2 + 4 * TOP) / 1e6:.1f} MB each, before compression, in {folder}"
    )
    for i in progress(missing):
        shard = read_laws(lm, conversations(lm, args, i), len(opening(lm)) - 1)
        part = paths[i].with_suffix(".part")
        with open(part, "wb") as file:
            np.savez_compressed(file, **shard)
        part.rename(paths[i])  # whole or not at all
    tables = specjax.drafters.build_tables(
        stored_texts(paths), lm.model.vocab_size, candidates=args.candidates, max_contexts=args.max_contexts
    )
    tables.save(args.output)
    both = ((1, tables.unigram), (2, tables.bigram))
    used = [(table[..., order + args.candidates] > 0).sum() for order, table in both]
    print(
        f"{tables.num_laws:,} laws; {used[0]:,} contexts of one token, {used[1]:,} of two; "
        f"{(tables.unigram.nbytes + tables.bigram.nbytes) / 1e6:.1f} MB in memory, "
        f"{args.output.stat().st_size / 1e6:.1f} MB in {args.output}"
    )


if __name__ == "__main__":
    main()
