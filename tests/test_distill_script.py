"""scripts/distill_draft.py: what it refuses, and one run from text to a head on disk with a tiny target."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield importlib.import_module("distill_draft")
    for name in ("distill_draft", "distill_options"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--student"),
        ("--student hydra", "invalid choice"),
        ("--student eagle --steps 0", "--steps must be 1 or more, not 0"),
        ("--student eagle --window 3", "--window must be 4 or more, not 3"),
        ("--student eagle --depth 0", "--depth"),
        ("--student eagle --learning-rate 0", "--learning-rate"),
        ("--student eagle --answer-temperature 1 -1", "--answer-temperature"),
        ("--student medusa --draft-vocab 100", "whole vocabulary"),
        ("--student eagle --data x.npz --text y.txt", "exclude each other"),
        ("--student eagle --text nowhere.txt", "no file nowhere.txt"),
        ("--student eagle --out scripts", "--overwrite"),
    ],
)
def test_the_parser_refuses(script, capsys, monkeypatch, line, words):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as error:
        script.parse(line.split())
    assert error.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_progress_bar_names_the_extra(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ValueError, match=r"specjax\[train\]"):
        script.progress_bar()


@pytest.mark.full
def test_a_head_goes_from_text_to_disk_to_decoding(script, tmp_path, monkeypatch, capsys):
    import numpy as np

    import specjax
    from specjax.drafters.checkpoint import load_drafter
    from specjax.train import texts

    pytest.importorskip("tqdm")
    folder = ROOT / "tests" / "data" / "tiny_models" / "llama3_rope_scaled"
    target = specjax.load(folder)
    rows = np.random.default_rng(0).integers(0, target.model.vocab_size, (12, 16)).tolist()
    texts.save(tmp_path / "own.npz", texts.join(rows))
    monkeypatch.setattr(script, "HELD_OUT", script.HELD_OUT[:2])  # how many texts are held out
    line = f"--student eagle --target {folder} --data {tmp_path / 'own.npz'} --out {tmp_path / 'head'} --json "
    line += f"{tmp_path / 'facts.json'} --steps 3 --batch 4 --window 16 --draft-vocab 40 --max-new-tokens 8 --depth 1"
    monkeypatch.setattr(sys, "argv", ["distill_draft.py", *line.split()])
    script.main()
    printed = capsys.readouterr().out
    assert "untrained" in printed and "per position" in printed
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert [(row["head"], row["temperature"]) for row in facts["results"]] == [
        ("untrained", 0.0), ("trained", 0.0), ("untrained", 1.0), ("trained", 1.0)
    ]  # fmt: skip
    assert load_drafter(tmp_path / "head", target, num_draft_tokens=2).num_draft_tokens == 2
