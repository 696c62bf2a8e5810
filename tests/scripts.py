"""Programs of scripts/ as modules, for tests of what they refuse and work out."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "scripts"
TINY = ROOT / "tests" / "data" / "tiny_models" / "llama3_rope_scaled"  # a target without a tokenizer


@contextlib.contextmanager
def imported(*names: str) -> Iterator[Any]:
    """One module, or a list of several; they and what they import of scripts/ are forgotten afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        found = [importlib.import_module(name) for name in names]
        yield found[0] if len(found) == 1 else found
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            sys.modules.pop(name)


def refusal(parse: Any, line: list[str], capsys: Any) -> str:
    """The last line that a parser writes before it ends the program."""
    with pytest.raises(SystemExit) as error:
        parse(line)
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


BENCH = ("bench", "bench_options", "bench_runs", "bench_parts", "bench_stats", "bench_report", "bench_plots",
         "bench_peer", "draft_sources", "script_tools", "generate_options")  # fmt: skip


@contextlib.contextmanager
def bench() -> Iterator[SimpleNamespace]:
    """The modules of bench.py by their name without "bench_"; itself is ``main``."""
    with imported(*BENCH) as modules:
        found = {name.removeprefix("bench_"): module for name, module in zip(BENCH, modules, strict=True)}
        yield SimpleNamespace(main=found.pop("bench"), **found)
