"""Converts a checkpoint: GGUF, the Hugging Face layout or specjax's own, to either of the last two.

    python scripts/convert_checkpoint.py model.gguf converted --to safetensors --dtype bfloat16
    python scripts/convert_checkpoint.py path/to/directory converted --to orbax

What is written loads with `specjax.load` to the same numbers, bit for bit in the type it was converted to. GGUF is read
and not written: its quantised types would not come back as they were.
"""

import argparse
import pathlib
import sys

import jax

import specjax
from specjax.models import directory, fetch, save, save_safetensors

WRITERS = {"safetensors": save_safetensors, "orbax": save}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="what specjax.load takes: a GGUF file, a directory, or a known name")
    parser.add_argument("target", type=pathlib.Path, help="directory to write")
    parser.add_argument("--to", choices=sorted(WRITERS), default="safetensors")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")
    options = parser.parse_args(arguments)
    source, target = (pathlib.Path(path).expanduser().resolve() for path in (options.source, options.target))
    if target.exists() and not options.overwrite:  # before minutes of reading
        parser.error(f"{options.target} exists; --overwrite replaces it")
    if options.source not in fetch.NAMED and source.is_relative_to(target):
        parser.error(f"{options.target} is the source or holds it: write elsewhere")
    try:
        directory.free(options.target, options.overwrite)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        lm = specjax.load(options.source, dtype=options.dtype)
    except (ValueError, OSError) as error:
        print(f"cannot convert: {error}", file=sys.stderr)
        return 1
    WRITERS[options.to](options.target, lm, overwrite=options.overwrite)
    count = sum(leaf.size for leaf in jax.tree.leaves(lm.params))
    print(f"{options.target}: {count:,} parameters in {options.dtype}, as {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
