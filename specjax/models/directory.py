"""Directories that appear whole or not at all."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

from specjax.models.language_model import LanguageModel
from specjax.static import show


@contextlib.contextmanager
def whole(path: str | pathlib.Path, overwrite: bool) -> Iterator[pathlib.Path]:
    """An empty directory to write to, which takes its place at ``path`` when the block ends without an exception.

    Raises:
      FileExistsError: if there is something at the path, unless ``overwrite``.
      ValueError: if path is no path.
    """
    if isinstance(path, LanguageModel):
        raise ValueError("path is a language model: save(path, lm) takes the path first, then the model")
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path={show(path)}: give a directory as a string or path")
    path = pathlib.Path(path).expanduser().absolute()
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        folder = pathlib.Path(scratch) / "new"
        folder.mkdir()
        yield folder
        if path.exists():
            os.replace(path, pathlib.Path(scratch) / "old")  # deleted with the scratch directory
        os.replace(folder, path)
