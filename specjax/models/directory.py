"""Directories that appear whole or not at all."""

import contextlib
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator

from specjax import processes
from specjax.models.language_model import LanguageModel
from specjax.static import show

# What checkpoints and drafters consist of; whatever else lies beside them is somebody's, and never deleted.
_PARTS = re.compile(
    r".*\.(json|safetensors|jinja|npz|gguf)|README\.md|LICENSE.*|params|merges\.txt|vocab\.txt|tokenizer\.model|\.gitattributes"
)
_LONGEST = 255  # bytes of a file's name
_MANIFESTS = {"specjax.json", "specjax_drafter.json", "recycling.json"}


def obstacle(path: pathlib.Path) -> str:
    """What keeps a directory from being at a path, in words; "" for nothing."""
    path = path.absolute()
    if too_long := [part for part in path.parts if len(os.fsencode(part)) > _LONGEST]:
        return f"a name of {len(too_long[0])} characters is longer than file systems take ({_LONGEST} bytes)"
    below = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if below.is_dir():
        return ""
    return f"{below} is a {'link to nothing' if below.is_symlink() and not below.exists() else 'file'}"


@contextlib.contextmanager
def whole(path: str | pathlib.Path, overwrite: bool) -> Iterator[pathlib.Path]:
    """An empty directory to write to, which takes its place at ``path`` when the block ends without an exception.

    Raises:
      FileExistsError, ValueError: see `free`.
    """
    path = free(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name[:50]}.") as scratch:
        folder = pathlib.Path(scratch) / "new"
        folder.mkdir()
        yield folder
        if path.exists():
            os.replace(path, pathlib.Path(scratch) / "old")  # deleted with the scratch directory
        os.replace(folder, path)


def by_first(path: str | pathlib.Path, overwrite: bool, write: Callable[[pathlib.Path], None]) -> None:
    """What ``write`` writes into the directory of `whole`. Of several processes all come here, and the first writes.

    Raises:
      FileExistsError, ValueError: see `free`.
    """
    if processes.first():
        with whole(path, overwrite) as folder:
            write(folder)
    processes.wait("a directory was written")


def free(path: str | pathlib.Path, overwrite: bool) -> pathlib.Path:
    """The path, absolute, if a directory may be written there; nothing but a checkpoint is ever replaced.

    Raises:
      FileExistsError: if there is something at the path, unless ``overwrite`` and it is an empty directory or one that
        holds a checkpoint or a drafter and nothing else; see also `obstacle`.
      ValueError: if path is no path, or the current directory or one above it.
    """
    if isinstance(path, LanguageModel):
        raise ValueError("path is a language model: save(path, lm) takes the path first, then the model")
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"path={show(path)}: give a directory as a string or path")
    path = pathlib.Path(path).expanduser().absolute()
    if words := obstacle(path):
        raise FileExistsError(f"{path}: {words}; write elsewhere")
    if not os.path.lexists(path):
        return path
    if not overwrite:
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
    if pathlib.Path.cwd().is_relative_to(path.resolve()):
        raise ValueError(f"{path} is the current directory or one above it, which is not replaced")
    names = {entry.name for entry in path.iterdir()}
    published = "config.json" in names and any(name.endswith(".safetensors") for name in names)
    if names and not names & _MANIFESTS and not published:
        raise FileExistsError(
            f"{path} holds no checkpoint but {show(sorted(names))}, which is not replaced: delete it yourself, or "
            "write elsewhere"
        )
    if others := sorted(name for name in names if not _PARTS.fullmatch(name)):
        raise FileExistsError(
            f"{path} holds {show(others)} beside a checkpoint, which is not replaced: move it away, or write elsewhere"
        )
    return path
