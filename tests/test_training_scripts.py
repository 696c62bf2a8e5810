"""scripts/training_speed.py and scripts/draft_size.py: what they refuse, what they work out, tiny runs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import specjax
from specjax.train import draft_lm
from tests.scripts import TINY, imported, refusal


@pytest.fixture(scope="module")
def scripts():
    names = ("training_speed", "draft_size")
    with imported(*names) as modules:
        yield dict(zip(names, modules, strict=True))


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("training_speed", "--student tables", "invalid choice"),
        ("training_speed", "--batch 0", "--batch must be 1 or more, not 0"),
        ("training_speed", "--rows -1", "--rows must be 0 or more"),
        ("draft_size", "nowhere", "nowhere holds no draft model: train one"),
        ("draft_size", "nowhere --per-category 0", "holds no draft model"),
        ("draft_size", "nowhere --json nowhere/a.json", "--json nowhere/a.json: there is no folder nowhere; make it"),
        ("draft_size", "nowhere --plot .", "--plot . is a folder: name a file in it"),
    ],
)
def test_the_parsers_refuse(scripts, capsys, name, line, words):
    assert words in refusal(scripts[name].parse, line.split(), capsys)


def test_a_step_is_split_into_what_each_part_adds(scripts):
    part = scripts["training_speed"].Part
    parts = {"target": part(1.0, 0), "forward": part(1.5, 0), "gradient": part(3.5, 0), "step": part(4.0, 8e9)}
    cells = [cell.strip() for cell in scripts["training_speed"].line("eagle3", parts, 1000, 4e9).strip("|").split("|")]
    assert cells == ["eagle3", "4 s", "250", "50%", "25%", "12%", "50%", "12%"]


def test_a_size_that_does_not_pay_is_called_plain(scripts):
    size = scripts["draft_size"].Size
    slow, fast = size("a", 10**6, 0.2, 0.9, 0, 1.0, 1, 0.7, None), size("b", 5 * 10**6, 0.8, 0.1, 4, 2.1, 4, 1.9, 2.0)
    lines = scripts["draft_size"].table([slow, fast]).splitlines()
    assert [len(line.split("|")) for line in lines] == [10] * 4
    assert "1.00x (plain)" in lines[2] and "0.70x (K=1)" in lines[2] and "| 5.0M |" in lines[3] and "2.10x" in lines[3]


@pytest.mark.full
def test_training_speed_measures_a_tiny_target(scripts, capsys, monkeypatch):
    line = f"training_speed.py --target {TINY} --dtype float32 --student eagle3 --draft-vocab 40 --width 16 --rows 4"
    monkeypatch.setattr(sys, "argv", [*line.split(), "--slots", "24", "--repeats", "1", "--batch", "2"])
    scripts["training_speed"].main()
    said = capsys.readouterr().out
    assert "GFLOP/s" in said and "text: " in said and said.splitlines()[-1].startswith("| eagle3 | ")


@pytest.mark.full
def test_draft_sizes_are_put_in_order(scripts, capsys, monkeypatch, tmp_path):
    target = specjax.load(TINY)
    for layers in (4, 1):
        specjax.models.save(tmp_path / str(layers) / "drafter", draft_lm.prune(target, layers))
    prompts = tmp_path / "prompts.jsonl"
    rows = np.random.default_rng(0).integers(3, target.model.vocab_size, (2, 6)).tolist()
    prompts.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    seconds = {name: 0.3 if "target" not in name else 1.0 for name in ("target", f"{tmp_path}/1", f"{tmp_path}/4")}
    monkeypatch.setattr(scripts["draft_size"], "pass_seconds", lambda models: {
        (f"{name} {dtype}", width): time * slower for name, time in seconds.items()
        for dtype, slower in (("float32", 1), ("bfloat16", 2)) for width in (1, 2, 3, 5, 8)
    })  # fmt: skip
    line = f"draft_size.py {tmp_path}/4 {tmp_path}/1 --target {TINY} --prompts {prompts} --max-new-tokens 6"
    outputs = ["--json", f"{tmp_path}/a.json", "--plot", f"{tmp_path}/a.png"]
    monkeypatch.setattr(sys, "argv", [*line.split(), "--repeats", "0", *outputs])
    scripts["draft_size"].main()
    sizes = json.loads((tmp_path / "a.json").read_text())["sizes"]
    assert [Path(size["name"]).name for size in sizes] == ["1", "4"] and sizes[0]["weights"] < sizes[1]["weights"]
    assert sizes[1]["alpha"] == pytest.approx(1.0, abs=1e-5)  # all layers there are: the target itself
    assert sizes[1]["cost"] == 0.3 and sizes[1]["best"] == 7, "8 tokens in 3.1 plain steps"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "best by prediction" in capsys.readouterr().out
