"""What several scripts do alike: end in words, keep what was compiled, say where they run and how far they are, and
write files."""

import argparse
import math
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

QUOTE = "'"


def run_script(work: Callable[[Any], int | None], args: argparse.Namespace, kept: pathlib.Path | None = None) -> None:
    """A script's work. What cannot be done ends it in one line, and Ctrl-C too, which names the file ``kept``."""
    try:
        status = work(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.flush()
        where = f"; what was found is in {kept}" if kept and kept.exists() else ""
        print(f"\ninterrupted{where}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader has gone; Python must not complain when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {in_options(str(error), args)}")
    if status:
        sys.exit(status)


def in_options(message: str, args: argparse.Namespace) -> str:
    """The library's words with its arguments as this script spells them: top_p=2 is --top-p 2."""
    def option(found: re.Match) -> str:
        name, value = found.groups()
        if value is None and "_" not in name:  # a word of everyday language
            return found[0]
        if name == "model" and value is not None and value.isdecimal():  # the axis of a mesh
            return found[0]
        dashed = f"--{name.replace('_', '-')}"
        return dashed if value in (None, "True") else f"{dashed} {value.strip(QUOTE)}"

    names = "|".join(map(re.escape, vars(args)))
    return re.sub(rf"(?<![\w./-])({names})(?:=('[^']*'|[^\s,:;()]+))?(?![\w./=])", option, message)


def check_lengths(texts: Sequence[Sequence[int]], max_new_tokens: int, *parts: Any) -> None:
    """Raises ValueError for prompts that the context of a model or drafter among ``parts`` cannot hold."""
    limit = min((part.context_length for part in parts if part.context_length is not None), default=math.inf)
    for number, text in enumerate(texts, start=1):
        if len(text) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {number} has {len(text)} tokens: with --max-new-tokens {max_new_tokens} it exceeds the "
                f"context of {limit}; lower --max-new-tokens or leave the prompt out"
            )


def measured(lm: Any, drafter: Any, batch: int) -> Any:
    """The policy of ``adaptive=True`` with the costs of this machine; says so when they are measured, which is once."""
    import specjax

    def tell(done: int, programs: int) -> None:
        words = "measuring what rounds cost here, once for this model, drafter and batch"
        progress(f"{words}: compiling {programs} programs, minutes on a CPU; {done} done", line=not done)

    costs = specjax.theory.cost_model(lm, drafter, batch=batch, progress=tell)
    progress("")
    return specjax.Adaptive(costs=costs)


def rival(dtype: str) -> str | None:
    """The other weight type, if plain decoding may be faster with it. On an accelerator float32 never is, and takes
    twice the memory."""
    other = "bfloat16" if dtype == "float32" else "float32"
    return None if other == "float32" and jax.default_backend() != "cpu" else other


def keep_programs() -> None:
    """What is compiled is found again by the next run."""
    from specjax.models.fetch import cache_dir

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "jax"))


def lost(args: argparse.Namespace, *names: str) -> list[tuple[bool, str]]:
    """Refusals of output files that could not be written in the end."""
    found = []
    for name, path in ((name, getattr(args, name)) for name in names):
        if path:
            found.append((not path.parent.is_dir(), f"--{name} {path}: there is no folder {path.parent}; make it"))
            found.append((path.is_dir(), f"--{name} {path} is a folder: name a file in it"))
    return found


def progress(text: str, line: bool = False) -> None:
    """A status that overwrites itself on a terminal; elsewhere only what deserves a line of its own."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif line:
        print(text, file=sys.stderr, flush=True)


def machine() -> str:
    name = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    device = jax.devices()[0]
    what = f"{os.cpu_count()} cores of {name}" if device.platform == "cpu" else device.device_kind
    return f"{what}, jax {jax.__version__}, load {os.getloadavg()[0]:.1f}"


def write(path: pathlib.Path, data: bytes) -> None:
    """A file that appears whole or not at all; of several processes the first writes it."""
    if jax.process_index():
        return
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def figure_class(option: str):
    """matplotlib's figure; ``option`` is what asked for it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"{option} needs matplotlib: pip install '.[plots]' in the clone") from None
    return Figure
