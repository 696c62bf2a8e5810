"""A progress bar for loading, where somebody can see one."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def told(
    tensor: Callable[[str, tuple[int, ...]], Any], shapes: Mapping[str, tuple[int, ...]], wanted: bool
) -> Iterator[Callable[[str, tuple[int, ...]], Any]]:
    """``tensor``, a function of name and shape that gives one of the tensors of these ``shapes``, with a bar on stderr
    that every call moves; itself if none is ``wanted``, stderr is no terminal or tqdm is missing (extra ``train``)."""
    tqdm: Any = None
    if wanted and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm
    if tqdm is None:
        yield tensor
        return
    total = sum(map(math.prod, shapes.values()))
    with tqdm(total=total, desc="loading", unit=" weights", unit_scale=True) as bar:

        def telling(name: str, shape: tuple[int, ...]) -> Any:
            bar.update(math.prod(shape))
            return tensor(name, shape)

        yield telling
