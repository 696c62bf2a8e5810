"""scripts/bench.py: whole runs with a tiny model, and its peer."""

import functools
import json
import re
import sys
from types import SimpleNamespace

import pytest

from tests import scripts
from tests.small import target


@pytest.fixture(scope="module")
def bench():
    with scripts.bench() as modules:
        yield modules


def program(bench, monkeypatch, path, line):
    """The program with a tiny model and two prompts; its status."""
    monkeypatch.setattr("specjax.load", lambda name, dtype: target())
    monkeypatch.setattr("jax.config.update", lambda *_: None)  # the cache of compiled programs stays where it is
    small = {"read": 1000, "side": 16}
    for name in ("add_ceilings", "ceilings"):
        monkeypatch.setattr(bench.parts, name, functools.partial(getattr(bench.parts, name), **small))
    (path / "p.jsonl").write_text('{"prompt": "ab c", "category": "x"}\n{"prompt": "c ab c ab", "category": "y"}\n')
    argv = f"bench.py {path / 'p.jsonl'} --max-new-tokens 8 --dtype float32 {line}"
    monkeypatch.setattr(sys, "argv", argv.split())
    try:
        bench.main.main()
    except SystemExit as ended:
        return ended.code
    return 0


def test_a_run_measures_compares_and_draws_in_one_file(bench, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    line = "--drafter ngram --num-draft-tokens 2 --batch 1 2 --textbook --per-category 1 --max-new-tokens 8"
    line += f" --repeats 1 --json {tmp_path / 'a.json'} --html {tmp_path / 'a.html'}"
    assert program(bench, monkeypatch, tmp_path, line) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "a.json").read_text())
    names = ["plain float32", "plain bfloat16", "ngram K=2 float32"]
    assert [(cell["batch"], cell["complete"], list(cell["ways"])) for cell in found["cells"]] == [
        (1, True, names), (2, True, names)]  # fmt: skip
    assert [len(cell["groups"]) for cell in found["cells"]] == [2, 1]
    for cell, rows in zip(found["cells"], found["summary"], strict=True):
        for name, row in zip(names, rows, strict=True):
            way = cell["ways"][name]
            assert sum(run["emitted"] for run in way["runs"]) == row["tokens"] == 16, "two texts of eight tokens"
            assert all(len(run["decode"]) == 1 and run["wall"][0] >= run["decode"][0] > 0 for run in way["runs"])
            assert row["decode_rate"] > 0 and row["predicted_ratio"] > 0 and row["split"]["bytes"] > 0
            assert all(row["split"][f"{part}_ms"] > 0 for part in ("verify", "accept", "commit"))
            assert sum(row["split"]["windows"].values()) == pytest.approx(1)
            if way["kind"] == "speculative":
                assert row["equality"]["equal"] == row["equality"]["texts"] == 2 and row["tau"] >= 1
    assert found["unequal"] == [] and len(found["textbook"]["lengths"]) == 2
    assert "4 of 4 compared texts are those of plain decoding" in printed and "No text differs" in printed
    page = (tmp_path / "a.html").read_text()
    assert page.count("<svg") == 7 and "4 of 4 compared texts" in page and "Closed forms" in page
    assert not re.search(r"""(src|href)=["'](?!#)|<script|@import|url\((?!#)""", page), "something would be fetched"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json", "p.jsonl"]


@pytest.mark.full
def test_an_adaptive_way_stands_beside_the_fixed_one(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))  # costs are measured here
    line = f"--drafter ngram --num-draft-tokens 2 --repeats 1 --adaptive --json {tmp_path / 'a.json'}"
    assert program(bench, monkeypatch, tmp_path, line) == 0
    (cell,) = json.loads((tmp_path / "a.json").read_text())["cells"]
    fixed, adaptive = (cell["ways"][f"ngram K=2 float32{name}"] for name in ("", " adaptive"))
    assert "split" in fixed and "split" not in adaptive and adaptive["adaptive"] and not fixed["adaptive"]
    assert adaptive["equality"]["equal"] == adaptive["equality"]["texts"] == 2


def test_an_interrupted_run_keeps_what_was_measured(bench, tmp_path, monkeypatch, capsys):
    decode, calls = bench.runs.decode, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 8:
            raise KeyboardInterrupt
        return decode(*args)

    monkeypatch.setattr(bench.runs, "decode", interrupted)
    line = f"--drafter ngram --repeats 1 --no-split --temperature 1 --rule rejection --json {tmp_path / 'a.json'}"
    assert program(bench, monkeypatch, tmp_path, line) == 130
    (cell,) = json.loads((tmp_path / "a.json").read_text())["cells"]
    assert not cell["complete"] and [len(way["runs"]) for way in cell["ways"].values()] == [1, 1, 1]
    said = capsys.readouterr()
    assert "interrupted; what was found is in" in said.err and "stopped" not in said.err
    assert "1 decodings under rules that promise the law and not the text were not compared" in said.out


def test_single_passes_are_measured_without_a_text(bench, tmp_path, monkeypatch, capsys):
    line = f"--passes --repeats 1 --capacity 32 --length 8 --batch 1 --json {tmp_path / 'a.json'}"
    monkeypatch.setattr(bench.main, "TURNS", 1)
    assert program(bench, monkeypatch, tmp_path, line) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["passes"]
    assert [row["window"] for row in rows] == [1, 2, 4, 8, 16] * 2 and min(row["plain_steps"] for row in rows) > 0
    assert "plain steps" in capsys.readouterr().out


# --- the peer

ANSWERS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("mode") == "prompt lookup":
        sys.exit(3)
    new = [[5] * asked["max_new_tokens"] for _ in asked["ids"]] if asked else None
    print(json.dumps({"tokens": new, "first": 0.5, "wall": 2.0} if asked else {"version": "peer 1"}), flush=True)
"""


def test_a_peer_is_a_process_that_answers(bench, tmp_path):
    (tmp_path / "peer.py").write_text(ANSWERS)
    peer = bench.peer.Peer([sys.executable, str(tmp_path / "peer.py")])
    try:
        args = SimpleNamespace(dtype=["float32"], peer_assistant=None)
        plainly, lookup = bench.peer.ways(peer, args, bench.runs.How(4, 0))
        assert (plainly.name, plainly.kind, plainly.facts) == (
            "transformers plain float32", "peer", {"library": "peer 1"})  # fmt: skip
        group = bench.runs.Group([0], [[1, 2]], "x")
        assert plainly.run(group, bench.runs.Law(0.0, 1.0)) == bench.runs.Run([[5] * 4], 0.5, 1.5, 2.0)
        with pytest.raises(ValueError, match="the peer ended with status 3"):
            lookup.run(group, bench.runs.Law(0.0, 1.0))
    finally:
        peer.close()


def test_a_peer_that_is_not_installed_is_refused_with_the_remedy(bench, tmp_path, monkeypatch):
    lacking = tmp_path / "python"
    lacking.write_text("#!/bin/sh\nexit 1\n")
    lacking.chmod(0o755)
    line = f"--drafter ngram --peer transformers --peer-python {lacking}"
    said = program(bench, monkeypatch, tmp_path, line)
    assert said.startswith("ValueError: --peer transformers needs torch") and "pip install '.[peers]' in" in said
    said = program(bench, monkeypatch, tmp_path, f"{line}-nowhere")
    assert "No such file" in said


def test_what_a_peer_wrote_ends_with_its_first_end_token(bench):
    assert bench.peer.cut([4, 5, 2, 0, 0], {2}, False) == [4, 5, 2]
    assert bench.peer.cut([4, 2, 5], {2}, True) == [4, 2, 5] and bench.peer.cut([4, 5], {2}, False) == [4, 5]
