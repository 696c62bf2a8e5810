"""What several scripts do alike: say where they run, how far they are, and write files."""

import os
import pathlib
import platform
import sys

import jax


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
