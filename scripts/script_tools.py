"""What several scripts do alike: end in words, keep what was compiled, say where they run and how far they are, and
write files."""

import argparse
import os
import pathlib
import platform
import sys
from collections.abc import Callable
from typing import Any

import jax


def run_script(work: Callable[[Any], int | None], args: argparse.Namespace, kept: pathlib.Path | None = None) -> None:
    """A script's work. What cannot be done ends it in one line, and Ctrl-C too, which names the file ``kept``."""
    try:
        status = work(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.flush()
        where = f"; what was measured is in {kept}" if kept and kept.exists() else ""
        print(f"\ninterrupted{where}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader has gone; Python must not complain when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if status:
        sys.exit(status)


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
        raise ValueError(f"{option} needs matplotlib: pip install 'specjax[plots]'") from None
    return Figure
