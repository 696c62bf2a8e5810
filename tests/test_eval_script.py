"""scripts/eval_drafter.py: refusals, files and arithmetic. No real model is loaded."""

import json
import sys

import numpy as np
import pytest

import specjax
from specjax.drafters import RecyclingConfig, build_tables
from specjax.train.evaluate import Evaluation
from tests import scripts
from tests.small import V, target


@pytest.fixture(scope="module")
def script():
    with scripts.imported("eval_drafter") as module:
        yield module


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A training run whose drafter is tables."""
    path, rng = tmp_path_factory.mktemp("run"), np.random.default_rng(0)
    laws = rng.integers(2, V, 30), np.argsort(rng.random((30, V)))[:, :4], np.full((30, 4), 0.2)
    specjax.save_drafter(path / "drafter", RecyclingConfig(5), build_tables([laws], V))
    return path


@pytest.mark.parametrize(
    "line, words",
    [
        ("p --split half", "invalid choice"),
        ("p --num-draft-tokens 7 0", "--num-draft-tokens"),
        ("p --per-category 0", "--per-category"),
        ("p --temperature 0 1 2 --top-p 0.9 1", "one per --temperature"),
        ("p --temperature -1", "--temperature"),
        ("p --top-p 0", "--top-p"),
        ("p --merged", "joined by +"),
        ("p --tree 2,1 --num-draft-tokens 3", "--tree"),
    ],
)
def test_the_parser_refuses(script, capsys, line, words):
    assert words in scripts.refusal(script.parse, line.split(), capsys)


def test_one_top_p_is_for_every_temperature(script):
    args = script.parse(["p", "--temperature", "0", "0.7", "1", "--top-p", "0.9"])
    assert args.top_p == [0.9] * 3 and script.laws(args) == ["T=0", "T=0.7 with top-p 0.9", "T=1 with top-p 0.9"]
    args = script.parse(["p", "--temperature", "0.7", "1", "--top-p", "0.9", "1"])
    assert script.laws(args) == ["T=0.7 with top-p 0.9", "T=1"]


def test_drafters_are_made_by_name(script, directory):
    lm = target()

    def made(name, *rest, **form):
        return script.make(script.sources(name, "none"), lm, *rest, **form)

    for name in ("ngram", "suffix", "recycling", "cascade"):
        assert made(name, 3).num_draft_tokens == 3
    assert made("lookahead", 3).num_draft_tokens > 3
    assert made(str(directory)).num_draft_tokens == 5 and made(str(directory), 3).num_draft_tokens == 3
    assert made(f"suffix+{directory}", 3).num_draft_tokens == 3
    assert made(f"suffix+{directory}", 3, merged=True).num_draft_tokens == 6  # merged: the nodes of both
    for name, words in (("eagle", "--drafter eagle: give one of"), ("model", "or a drafter's directory"),
                        ("ngram+nowhere", "--drafter nowhere is no draft.*recycling, lookahead, cascade, or a model")):
        with pytest.raises(ValueError, match=words):
            made(name)


def test_the_table_says_what_was_measured_and_where(script, capsys):
    row = Evaluation(0.0, 1.8, 1.75, None, None, [], {"x": {"tau": 1.5}, "y": {"tau": 2.0}}, 18, 10)
    script.print_table({"ngram N=7": [row]}, script.parse(["prompts.jsonl", "--split", "report"]), 3)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "| ngram N=7 | 0 | 1.50 | 2.00 | **1.75** | - | - |"
    assert "smollm2-135m-instruct" in printed[1] and "batch 10" in printed[1] and "jax" in printed[1]
    assert "3 prompts (report half)" in printed[1] and "T=0" in printed[1]


def run(script, monkeypatch, path, line):
    """The program on two prompts of different kind, with a tiny model."""
    monkeypatch.setattr("specjax.load", lambda name, dtype, mesh=None: target())
    monkeypatch.setattr("jax.config.update", lambda *_: None)  # the cache of compiled programs stays where it is
    (path / "p.jsonl").write_text('{"prompt": "ab c", "category": "x"}\n{"prompt": "c ab", "category": "y"}\n')
    line = f"eval_drafter.py {path / 'p.jsonl'} --max-new-tokens 8 --batch 1 --num-draft-tokens 3 {line}"
    monkeypatch.setattr(sys, "argv", line.split())
    script.main()


@pytest.mark.full
def test_drafters_are_measured_side_by_side(script, directory, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    line = f"--drafter ngram {directory} suffix+{directory} --temperature 0 1 --wall --repeats 1 --split report"
    run(script, monkeypatch, tmp_path, f"{line} --json {tmp_path / 'a.json'} --plot {tmp_path / 'a.png'}")
    printed = capsys.readouterr()
    head, rule, *rows = printed.out.splitlines()[-8:]
    assert head.startswith("| drafter | T | x | y | tau, macro |") and head.endswith(
        "| plain float32 tok/s | plain bfloat16 tok/s | speculative tok/s | ratio | decode ratio |"
    )
    names = ["ngram N=3", f"{directory} N=3", f"suffix + {directory} N=3"]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in names for _ in range(2)]
    assert head.count("|") == rule.count("|") == rows[0].count("|")
    assert printed.err.count("tau") == 6 and "part from" not in printed.err
    found = json.loads((tmp_path / "a.json").read_text())
    assert list(found["results"]) == names and found["prompts"] == 2 and found["options"]["split"] == "report"
    greedy, drawn = found["results"]["ngram N=3"]
    assert (greedy["temperature"], drawn["temperature"], drawn["top_p"]) == (0.0, 1.0, 1.0)
    assert greedy["same"] == drawn["same"] == 2 and greedy["categories"]["x"]["ratio"] > 0
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png", "p.jsonl"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("--split tune", "^ValueError: --split tune: 2 prompts have none"),
        ("--drafter nowhere", "^ValueError: --drafter nowhere is no draft source and no directory"),
        ("--plot a.png", r"^ValueError: --plot needs matplotlib: pip install '\.\[plots\]'"),
    ],
)
def test_what_cannot_work_ends_the_program_in_one_line(script, tmp_path, monkeypatch, line, words):
    if "plot" in line:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=words):
        run(script, monkeypatch, tmp_path, line)


def test_a_broken_line_of_prompts_ends_the_program_in_one_line(script, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"text": "a"}')
    monkeypatch.setattr(sys, "argv", ["eval_drafter.py", str(tmp_path / "p.jsonl")])
    with pytest.raises(SystemExit, match=r"^ValueError: .*p.jsonl, line 1: needs an object with a 'prompt'"):
        script.main()
