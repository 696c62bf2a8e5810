"""scripts/gpu_check.sh and .py: refusals, arithmetic, and all but the tests stage with tiny models on a CPU."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import scripts
from tests.scripts import ROOT

TINY = "--target 64,16,32,2,4,2 --draft 64,16,32,1,4,2 --windows 1 4 --capacity 16 --length 8"


@pytest.fixture(scope="module")
def check():
    with scripts.imported("gpu_check") as module:
        yield module


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--target llama9", "llama9: give one of"),
        ("--target 64,16,32,2,4", "64,16,32,2,4: give one of"),
        ("--target 64,16,32,0,4,2", "give one of"),
        ("--target 64,16,32,2,4,3", "64,16,32,2,4,3: num_heads (4) is not a multiple"),
        ("--draft 48,16,32,1,4,2", "--draft 48,16,32,1,4,2 has 48 tokens and --target 64,16,32,2,4,2 64"),
        ("--batch 1 0", "--batch 0: 1 or more"),
        ("--repeats 0", "--repeats 0: 1 or more"),
        ("--windows 2 4", "--windows: 1, the plain step"),
        ("--windows 1 16", "--length 8: the longest window, 16 tokens"),
        ("--capacity 9999999", "the shapes have a context of"),
        ("--alpha 0.5 1.5", "--alpha is 0 to 1"),
        ("--alpha nan", "--alpha is 0 to 1"),
        ("--read-gb 9", "--read-gb is above 0"),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--json nowhere/a.json", "there is no folder nowhere; make it"),
        ("--json .", "--json . is a folder"),
    ],
)
def test_the_parser_refuses(check, capsys, line, words):
    assert words in scripts.refusal(check.parse, [*TINY.split(), *line.split()], capsys)


def test_what_does_not_fit_is_refused_before_anything_is_made(check):
    """Weights of both models, the stream, and for each of two windows a cache and three times its logits."""
    args = check.parse([*TINY.split(), "--batch", "3", "--dtype", "float32", "--read-gb", "8"])
    layer = 16 * (16 + 2 * 8) + 16 * 16 + 16 * 64 + 32 * 16 + 2 * 16  # qkv, o, gate and up, down, two norms
    weights = 3 * layer + 2 * (2 * 64 * 16 + 16)  # three layers; two embeddings, heads and last norms
    cache = 3 * 16 * 2 * 2 * 4  # rows, slots, keys and values, key heads, width
    total = 4 * (weights + 2 * (2 + 1) * cache + 2 * 3 * 3 * 64 * (1 + 4)) + 8 * 10**9
    lengths = 2 * 2 * 3 * 4  # of the caches' rows, int32
    assert total <= check.needed(args, 3) <= total + lengths
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10**9})
    with pytest.raises(ValueError, match=r"^8\.0 GB are needed and the device gives 1\.0: choose a smaller"):
        check.check_memory(args, device)
    for unknown in ({"bytes_limit": 10**10}, None):
        check.check_memory(args, SimpleNamespace(memory_stats=lambda said=unknown: said))


def test_rates_are_those_of_rounds_as_long_as_their_parts(check):
    """K = 3 at 0.5: 1 + 1/2 + 1/4 + 1/8 tokens in two draft steps of 1 ms, windows of 6 and 1.5 ms; batch 2."""
    found = check.rates([0.5], 2, {"target": {1: 4.0, 4: 6.0}, "draft": {1: 1.0, 4: 1.5}},
                        {"target": 8e9, "draft": 1e9}, 4000.0)  # fmt: skip
    plain, verify = found["windows"]
    assert plain["tokens_per_s"] == [500.0] and plain["speed_up"] == [1.0]
    assert verify["verify_plain"] == 1.5
    assert verify["tokens_per_s"] == pytest.approx([2e3 * 1.875 / (2 * 1.0 + 6.0 + 1.5)])
    assert found["of_bandwidth"] == {"target": 0.5, "draft": 0.25}
    assert "0.50 of that" in check.table(found)


# --- the shell script


def script(**own):
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *own.pop("arguments", [])], text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"arguments": ["--toy"]}, "--toy: no arguments"),
        ({"TOY": "yes"}, "TOY=yes: 0 or 1"),
        ({"STAGES": "tests speed"}, "STAGES=tests speed: any of tests, model, shapes"),
        ({"STAGES": " "}, "STAGES is empty"),
        ({"BATCH": "1 two"}, "BATCH=1 two: whole numbers from 1"),
        ({"LIMIT": "0"}, "LIMIT=0: whole numbers from 1"),
        ({"PYTHON": "false", "PLATFORM": "cuda,cpu"}, "PLATFORM=cuda,cpu: jax finds no such device"),
    ],
)
def test_the_script_refuses_before_it_makes_anything(tmp_path, own, words):
    done = script(OUT=str(tmp_path / "run"), **own)
    assert done.returncode == 2 and words in done.stdout and not (tmp_path / "run").exists()


def test_every_stage_has_its_turn_and_those_that_fail_are_named(tmp_path):
    python = tmp_path / "python"  # pytest fails, bench.py ends as if its time were over, the rest is done
    python.write_text('#!/bin/sh\ncase "$*" in "-m pytest"*) exit 3 ;; scripts/bench.py*) exit 124 ;; esac\n')
    python.chmod(0o755)
    done = script(OUT=str(tmp_path / "run"), PYTHON=str(python), LIMIT="99", TOY="1")
    assert done.returncode == 1, done.stdout
    assert "tests failed with status 3" in done.stdout and "model: its 99 s are used up" in done.stdout
    assert "shapes: done in" in done.stdout
    assert "FAILED: tests (status 3),model (time); see" in done.stdout.splitlines()[-1]


@pytest.mark.full
def test_tiny_models_go_through_the_script(tmp_path):
    out = tmp_path / "run"
    done = script(OUT=str(out), TOY="1", STAGES="model shapes", BATCH="2", SPECJAX_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout
    assert "all stages done" in done.stdout.splitlines()[-1]
    (cell,) = json.loads((out / "model.json").read_text())["cells"]
    assert cell["batch"] == 2 and {way["kind"] for way in cell["ways"].values()} == {"plain", "speculative"}
    (found,) = json.loads((out / "shapes.json").read_text())["batches"]
    assert [row["window"] for row in found["windows"]] == [1, 2, 4]
    assert all(row["target_ms"] > 0 and row["draft_ms"] > 0 for row in found["windows"])
    assert found["read_gb_s"] > 0 and set(found["of_bandwidth"]) == {"target", "draft"}
    assert "a plain step of the target reads at" in (out / "shapes.log").read_text()
