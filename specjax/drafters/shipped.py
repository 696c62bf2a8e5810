"""Drafters that come with specjax, by the name of the model they were made for."""

import importlib.resources
import pathlib

FOLDER = "data"  # beside this file; each directory is what `specjax.save_drafter` writes, with a model card


def names() -> list[str]:
    """Models that a drafter is shipped for."""
    folder = pathlib.Path(str(importlib.resources.files("specjax.drafters") / FOLDER))
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def directory(name: str) -> pathlib.Path | None:
    """Where the drafter shipped for a model is; None: there is none."""
    if name not in names():
        return None
    return pathlib.Path(str(importlib.resources.files("specjax.drafters") / FOLDER / name))
