"""Functions as static arguments of jit: equal by value where they can be, weak where they cannot.

A jit cache compares static arguments with ``==`` and keeps them alive. Closures defeat both: two freshly built
equal drafters would compile twice, and a closure over a model would live as long as the process.
"""

import dataclasses
import math
import numbers
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bound:
    """``functools.partial`` over leading positional arguments, compared by value.

    >>> Bound(max, (1,)) == Bound(max, (1,)), Bound(max, (1,))(3)
    (True, 3)
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self, *args, **kwargs):
        return self.fn(*self.args, *args, **kwargs)


def bind(fn: Callable[..., Any], *args: Any) -> Bound:
    """Fixes the leading arguments of a module-level function; arguments must be hashable."""
    return Bound(fn, args)


def whole(name: str, value: Any, minimum: int, remedy: str = "") -> int:
    """A whole number as an int: Python's, numpy's, or an array without axes.

    Raises:
      ValueError: anything else (booleans too), or less than ``minimum``; names argument, value and ``remedy``.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
    elif getattr(value, "ndim", None) == 0 and getattr(getattr(value, "dtype", None), "kind", "") in ("i", "u"):
        number = int(np.asarray(value))
    else:
        number = None
    if number is None or number < minimum:
        raise ValueError(f"{name}={show(value)}: must be a whole number, {minimum} or more" + remedy)
    return number


def real(name: str, value: Any, low: float, high: float, words: str) -> float:
    """A finite number from ``low`` to ``high`` as a float: Python's, numpy's, or an array without axes.

    Raises:
      ValueError: anything else (booleans too); names argument and value and says that it must be ``words``.
    """
    if getattr(value, "ndim", None) == 0 and getattr(getattr(value, "dtype", None), "kind", "") in ("i", "u", "f"):
        value = np.asarray(value).item()
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer of over 300 digits
        number = math.inf
    if not low <= number <= high or math.isinf(number):
        raise ValueError(f"{name}={show(value)}: must be {words}")
    return number


def show(value: Any, length: int = 80) -> str:
    """``repr`` for messages: never long, never an error."""
    try:
        text = repr(value)
    except Exception:  # integers of more than 4300 digits, objects with a broken repr
        text = f"<{type(value).__name__}>"
    return text if len(text) <= length else text[: length - 4] + " ..."


class Weak:
    """A plain function held weakly. The caller of a jitted program keeps the function alive while it is traced."""

    def __init__(self, fn: Callable[..., Any]):
        self._ref = weakref.ref(fn)
        self._hash = hash(fn)

    def __call__(self, *args, **kwargs):
        fn = self._ref()
        if fn is None:
            raise ReferenceError("a function of a Model or Drafter was deleted before it was traced; keep it alive")
        return fn(*args, **kwargs)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, Weak) and self._ref == other._ref


def weak(tree: Any) -> Any:
    """Replaces every plain function in nested tuples and `Bound` values by a `Weak` reference to it."""
    if isinstance(tree, Bound):
        return Bound(tree.fn, weak(tree.args))
    if isinstance(tree, tuple):
        items = [weak(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if callable(tree) and type(tree).__hash__ is object.__hash__ and not isinstance(tree, type):
        return Weak(tree)
    return tree
