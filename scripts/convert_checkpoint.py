"""Converts a checkpoint: GGUF, the Hugging Face layout or specjax's own, to either of the last two.

    python scripts/convert_checkpoint.py model.gguf converted --to safetensors --dtype bfloat16
    python scripts/convert_checkpoint.py path/to/directory converted --to orbax

What is written loads with `specjax.load` to the same numbers, bit for bit in the type it was converted to. GGUF is read
and not written: its quantised types would not come back as they were.
"""

import argparse
import contextlib
import os
import pathlib
import sys

import jax

import specjax
from specjax.models import directory, fetch, huggingface, orbax, save, save_safetensors

WRITERS = {"safetensors": save_safetensors, "orbax": save}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="what specjax.load takes: a GGUF file, a directory, or a known name")
    parser.add_argument("target", type=pathlib.Path, help="directory to write")
    parser.add_argument("--to", choices=sorted(WRITERS), default="safetensors")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")
    options = parser.parse_args(arguments)
    for refused, words in refusals(options):  # before minutes of reading
        if refused:
            parser.error(words)
    return options


def refusals(options: argparse.Namespace) -> list[tuple[bool, str]]:
    """What could not be written in the end, with what to say."""
    source, target = (pathlib.Path(path).expanduser().absolute() for path in (options.source, options.target))
    inside = options.source not in fetch.NAMED and source.resolve().is_relative_to(target.resolve())
    above = next(folder for folder in target.parents if os.path.exists(folder))
    quantization = ""
    with contextlib.suppress(ValueError, OSError, LookupError, TypeError, AttributeError):  # loading says what is wrong
        quantization = huggingface.read_json(source / orbax.MANIFEST)["config"].get("quantization")
    try:
        directory.free(options.target, True)
        lost = ""
    except (ValueError, OSError) as error:
        lost = str(error)
    return [
        (inside, f"{options.target} is the source or holds it: write elsewhere"),
        (bool(lost), lost),
        (not lost and target.exists() and not options.overwrite, f"{options.target} exists; --overwrite replaces it"),
        (not os.access(above, os.W_OK), f"{options.target}: nothing can be written to {above}; name another place"),
        (bool(quantization) and options.to == "safetensors", f"{quantization} weights have no place in safetensors: "
         "--to orbax keeps them, or convert the checkpoint that they were made from"),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        lm = specjax.load(options.source, dtype=options.dtype)
        WRITERS[options.to](options.target, lm, overwrite=options.overwrite)
    except (ValueError, OSError, ImportError) as error:  # ImportError: of what fetches from a hub
        print(f"cannot convert: {error}", file=sys.stderr)
        return 1
    leaves = jax.tree.leaves(lm.params)
    types = "/".join(sorted({str(leaf.dtype) for leaf in leaves}))
    print(f"{options.target}: {sum(leaf.size for leaf in leaves):,} parameters in {types}, as {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
