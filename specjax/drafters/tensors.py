"""Weights of drafters in safetensors files: read strictly by name, written as contiguous arrays."""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.models.huggingface import numbers_of

Shapes = dict[str, tuple[int, ...]]


def one_file(file: pathlib.Path) -> tuple[Shapes, Callable[[str], np.ndarray]]:
    """Shapes by name, and a function that reads one tensor of weights.

    Raises:
      FileNotFoundError: no such file; names PyTorch files that would have to be converted.
      ValueError: not a safetensors file, or weights that are no floating point numbers that numpy has.
    """
    import safetensors

    if not file.exists():
        torch = ", ".join(sorted(other.name for other in file.parent.glob("*.[pb][ti]*") if other.suffix != ".json"))
        raise FileNotFoundError(f"{file} is missing" + (f"; convert {torch} to safetensors" if torch else ""))
    try:
        opened: Any = safetensors.safe_open(str(file), framework="numpy")
        names = list(opened.keys())
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error

    def read(name: str) -> np.ndarray:
        return numbers_of(opened.get_slice(name).get_dtype(), name, file, lambda: opened.get_tensor(name))

    return {name: tuple(opened.get_slice(name).get_shape()) for name in names}, read


def check_names(found: Shapes, needed: Shapes, source: str) -> None:
    """Refuses a file that has not exactly the tensors ``needed``.

    Raises:
      ValueError: listing tensors that are missing, surplus or of another shape.
    """
    complaints = [
        *(f"missing: {name} {shape}" for name, shape in needed.items() if name not in found),
        *(f"not part of the drafter: {name} {shape}" for name, shape in found.items() if name not in needed),
        *(f"{name} has shape {found[name]}, the configuration needs {shape}"
          for name, shape in needed.items() if found.get(name, shape) != shape),
    ]
    if complaints:
        shown = complaints[:20] + ([f"... and {len(complaints) - 20} more"] if len(complaints) > 20 else [])
        raise ValueError(f"{source} does not fit its configuration\n  " + "\n  ".join(shown))


def write_file(file: pathlib.Path, tensors: dict[str, Any]) -> None:
    """Writes arrays, bfloat16 included."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(np.asarray(array)) for name, array in tensors.items()}, file)
