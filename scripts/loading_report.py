"""How fast a checkpoint loads beside how fast its bytes can be read, and how much host memory that takes.

    python scripts/loading_report.py
    python scripts/loading_report.py --stored orbax-float32 --dtype bfloat16 --quantize int8 --gigabytes 4
    python scripts/loading_report.py --checkpoint path/to/model

Writes a model of random weights in each layout (or takes what is there), drops its pages from the kernel's cache where
the system lets it, reads the plain bytes, drops them again and loads the model in a process of its own. There a tiny
model of the same layout was loaded before, so that imports and start-up count in neither time nor memory. "fill" is the
rate at which that process then writes to memory it did not have before: the weights need that too, and where a system
hands out memory slowly no loader is faster. "again" is the better of two more loads after that, when pages and memory
are at hand: what loading itself takes. Memory is the peak of what is resident over what was before, without the
pages of a mapped file, which the kernel takes back when it needs them: next to it stands what that is in MB beyond the
weights. Times mean something only when nothing else runs.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from script_tools import run_script

import specjax
from specjax.models import fetch, hf_config, llama, llama_params, save

STORED = ("safetensors-float32", "safetensors-bfloat16", "orbax-float32", "orbax-bfloat16")
BLOCK = 2**24  # bytes read at a time
LAYERS = 12
PROGRAM = """
import json, sys, time
import jax, numpy
from specjax.models.load import load

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

small, big, options = json.loads(sys.argv[1])
jax.block_until_ready(load(small, **options).params)
before, began = memory("VmRSS"), time.perf_counter()
try:
    params = jax.block_until_ready(load(big, **options).params)
except (ValueError, OSError) as error:
    print(error, file=sys.stderr)
    sys.exit(3)
took, peak = time.perf_counter() - began, memory("VmHWM") - before
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
room, began = numpy.empty(min(size, 2**30), numpy.uint8), time.perf_counter()
room.fill(1)
filling, again = (time.perf_counter() - began) * size / room.size, []
for _ in range(2):
    del params, room
    began = time.perf_counter()
    params = jax.block_until_ready(load(big, **options).params)
    again.append(time.perf_counter() - began)
    room = None
print(json.dumps([took, filling, min(again), peak, size]))
"""


class Measured(NamedTuple):
    """One load, in seconds and bytes."""

    seconds: float
    filling: float  # seconds to write to as much fresh memory as the weights take
    again: float  # seconds of a later load
    peak: int  # over what was resident before, mapped files aside
    size: int  # of the weights as they were loaded


class Case(NamedTuple):
    """A checkpoint to load, and a tiny one of the same layout."""

    name: str
    path: pathlib.Path
    small: pathlib.Path
    dtype: str  # to load as


def settings_of(gigabytes: float, itemsize: int) -> dict[str, Any]:
    """config.json of a Llama of about that many bytes, a quarter of them the embedding."""
    hidden = max(64, round((gigabytes * 1e9 / itemsize / (64 + 16 * LAYERS)) ** 0.5 / 64) * 64)
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": hidden,
        "num_attention_heads": hidden // 64, "head_dim": 64, "intermediate_size": 4 * hidden, "rms_norm_eps": 1e-5,
        "vocab_size": 64 * hidden, "num_hidden_layers": LAYERS, "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }  # fmt: skip


def written(path: pathlib.Path, stored: str, settings: dict[str, Any]) -> pathlib.Path:
    """A checkpoint of random weights in one of the layouts `STORED`."""
    layout, dtype = stored.split("-")
    config, rng = hf_config.parse_config(settings), np.random.default_rng(0)

    def random(name: str, shape: tuple[int, ...]) -> np.ndarray:
        made = rng.standard_normal(shape, np.float32)
        return made if dtype == "float32" else made.astype(ml_dtypes.bfloat16)

    if layout == "orbax":
        params = llama_params.params_from_tensors(config, random, dtype=dtype)
        save(path, specjax.LanguageModel(llama.model(config), params, config=config))
        return path
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    shapes = llama_params.tensor_shapes(config)
    save_file({name: random(name, shape) for name, shape in shapes.items()}, path / "model.safetensors")
    return path


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold the weights."""
    if path.is_file():
        return [path]
    own = path / "params"
    return sorted(file for file in own.rglob("*") if file.is_file()) if own.is_dir() else [*path.glob("*.safetensors")]


def size_of(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def forgotten(path: pathlib.Path) -> None:
    """Asks the kernel to drop what it keeps of the files in memory."""
    for file in files_of(path) if hasattr(os, "posix_fadvise") else []:
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reading(path: pathlib.Path) -> float:
    """Seconds to read the plain bytes."""
    forgotten(path)
    room, began = bytearray(BLOCK), time.perf_counter()
    for file in files_of(path):
        with open(file, "rb", buffering=0) as handle:
            while handle.readinto(room):
                pass
    return time.perf_counter() - began


def loading(small: pathlib.Path, path: pathlib.Path, options: dict[str, Any]) -> Measured:
    """Loads in a process of its own, where ``small`` was loaded before.

    Raises:
      ValueError: what was loaded is no checkpoint, with what `specjax.load` says.
      RuntimeError: with what that process said, if it failed otherwise.
    """
    root = str(pathlib.Path(specjax.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    words = [sys.executable, "-c", PROGRAM, json.dumps([str(small), str(path), options])]
    forgotten(path)
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 3:
        raise ValueError(done.stderr.strip())
    if done.returncode:
        raise RuntimeError(f"loading {path} failed:\n{done.stderr}")
    seconds, filling, again, peak, size = json.loads(done.stdout)
    mapped = 0 if (path / "params").is_dir() else size_of(path)
    return Measured(seconds, filling, again, peak - mapped, size)


def line(case: Case, options: dict[str, Any]) -> str:
    stored, read = size_of(case.path), reading(case.path)
    found = loading(case.small, case.path, options | {"dtype": case.dtype})
    return (
        f"{case.name:22} {stored / 1e9:6.2f} {stored / 1e9 / read:8.2f} {found.size / 1e9 / found.filling:8.2f} "
        f"{stored / 1e9 / found.seconds:8.2f} {stored / 1e9 / found.again:8.2f} {found.size / 1e9:9.2f} "
        f"{found.peak / found.size:10.2f} {(found.peak - found.size) / 1e6:10.0f}"
    )


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a directory, GGUF file or known name to load; nothing is written")
    parser.add_argument("--stored", nargs="+", choices=STORED, help="layouts to write; default all")
    parser.add_argument("--gigabytes", type=float, help="of what is written, about; default 1")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="to load as; default as written, float32 for --checkpoint"
    )
    parser.add_argument("--quantize", choices=["int8"])
    parser.add_argument("--scan-layers", action="store_true")
    parser.add_argument("--scratch", type=pathlib.Path, help="directory on the disk to measure (default: the system's)")
    args = parser.parse_args(argv)
    if args.checkpoint == "":
        parser.error("--checkpoint is empty: give a directory, GGUF file or known name")
    for name in ("stored", "gigabytes"):
        if args.checkpoint is not None and getattr(args, name) is not None:
            parser.error(f"--{name} is of what is written: leave it out beside --checkpoint")
    args.stored, args.gigabytes = args.stored or list(STORED), 1.0 if args.gigabytes is None else args.gigabytes
    if not 0 < args.gigabytes < 1e4:
        parser.error(f"--gigabytes {args.gigabytes}: give a positive number")
    if args.scratch is not None and not args.scratch.is_dir():
        parser.error(f"--scratch {args.scratch}: no such directory")
    return args


def given(args: argparse.Namespace, scratch: pathlib.Path) -> Iterator[Case]:
    named = args.checkpoint in fetch.NAMED
    path = fetch.fetch(args.checkpoint) if named else pathlib.Path(args.checkpoint).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"--checkpoint {path} does not exist; known names: {', '.join(fetch.NAMED)}")
    stored = "orbax-float32" if (path / "params").is_dir() else "safetensors-float32"
    yield Case(path.name[:22], path, written(scratch / "small", stored, settings_of(0, 4)), args.dtype or "float32")


def made(args: argparse.Namespace, scratch: pathlib.Path) -> Iterator[Case]:
    for stored in args.stored:
        dtype = stored.split("-")[1]
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            settings = settings_of(args.gigabytes, 4 if dtype == "float32" else 2)
            path = written(pathlib.Path(folder) / "big", stored, settings)
            small = written(pathlib.Path(folder) / "small", stored, settings_of(0, 4))
            yield Case(stored, path, small, args.dtype or dtype)


def work(args: argparse.Namespace) -> None:
    if not pathlib.Path("/proc/self/status").exists():
        sys.exit("peaks of memory are read from /proc/self/status, which this system does not have")
    names, units = ("read", "fill", "load", "again"), ("GB/s",) * 4
    for first, size, rates, weights, peak, beyond in (
        ("stored as", "GB", names, "weights", "peak", "beyond"), ("", "", units, "GB", "of weights", "MB"),
    ):  # fmt: skip
        print(f"{first:22} {size:>6} {' '.join(f'{rate:>8}' for rate in rates)} {weights:>9} {peak:>10} {beyond:>10}")
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        for case in (given if args.checkpoint else made)(args, pathlib.Path(scratch)):
            options = {"quantize": args.quantize, "scan_layers": args.scan_layers}
            print(line(case, options), flush=True)


def main(argv: list[str] | None = None) -> None:
    run_script(work, arguments(argv))


if __name__ == "__main__":
    main()
