"""A drafter of looked-up laws as a directory: ``recycling.json`` has its settings, ``tables.npz`` its tables."""

import json
import pathlib
from typing import Any, NamedTuple

from specjax.drafters.recycling import COPY_WEIGHTS, recycling
from specjax.drafters.tables import Tables, load_tables
from specjax.models.huggingface import read_json
from specjax.models.language_model import LanguageModel
from specjax.types import Drafter

SETTINGS, TABLES = "recycling.json", "tables.npz"


class RecyclingConfig(NamedTuple):
    """Settings of `specjax.drafters.recycling` that go with its tables."""

    num_draft_tokens: int = 7
    candidates: int = 4
    copy_weights: tuple[float, ...] = COPY_WEIGHTS
    min_prob: float = 0.0


def recognises(path: pathlib.Path) -> bool:
    """Whether the directory holds one."""
    return (path / SETTINGS).exists()


def write(folder: pathlib.Path, config: RecyclingConfig, tables: Tables) -> None:
    """Writes into the directory ``folder``."""
    tables.save(folder / TABLES)
    (folder / SETTINGS).write_text(json.dumps({"format": 1, **config._asdict()}, indent=1), encoding="utf-8")


def load(path: pathlib.Path, target: LanguageModel, **options: Any) -> Drafter:
    """The drafter of a directory; ``options`` of `specjax.drafters.recycling` go before what is written there.

    Raises:
      FileNotFoundError, ValueError: files that are missing, damaged or of another version; tables of another
        vocabulary.
    """
    settings = read_json(path / SETTINGS)
    version, unknown = settings.pop("format", None), set(settings) - set(RecyclingConfig._fields)
    if version != 1 or unknown:
        raise ValueError(
            f"{path / SETTINGS} has format {version!r} and settings {sorted(settings)}: this version of specjax reads "
            f"format 1 with {', '.join(RecyclingConfig._fields)}"
        )
    return recycling(target, **{**settings, "tables": load_tables(path / TABLES), **options})
