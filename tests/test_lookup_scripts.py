"""scripts/build_tables.py and scripts/bench_drafters.py: refusals, files and arithmetic. No real model is loaded."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from specjax.drafters import build_tables
from specjax.train.evaluate import Evaluation
from tests.small import V, logits_of, target

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("build_tables"), importlib.import_module("bench_drafters")
    for name in ("build_tables", "bench_drafters"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    "which, line, words",
    [
        (0, "out.npz --conversations 0", "--conversations"),
        (0, "out.npz --candidates 9", "--candidates is at most 8"),
        (1, "prompts.jsonl --sources oracle", "invalid choice"),
        (1, "prompts.jsonl --sources recycling+tables", "--tables"),
        (1, "prompts.jsonl --num-draft-tokens 7 0", "--num-draft-tokens"),
        (1, "", "prompts"),
    ],
)
def test_the_parsers_refuse(scripts, capsys, which, line, words):
    with pytest.raises(SystemExit) as error:
        scripts[which].parse(line.split())
    assert error.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_laws_survive_a_shard_and_the_opening_has_none(scripts, tmp_path):
    """Tokens, ids and probabilities of every position are those of one pass over each text alone."""
    build, lm = scripts[0], target()
    texts = [[0, 5, 3, 7, 7, 2], [0, 5, 9], [0, 5, 4, 4, 11, 6, 8, 1], [0, 5, 2], [0, 5, 14]]
    shard = build.read_laws(lm, texts, skipped=1)
    with open(tmp_path / "00000.npz", "wb") as file:
        np.savez_compressed(file, **shard)
    stored = list(build.stored_texts([tmp_path / "00000.npz"]))
    for text, (tokens, ids, probs) in zip(texts, stored, strict=True):
        logits = np.asarray(logits_of(lm.model, lm.params, np.asarray([text], np.int32)))[0]
        law = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        assert tokens.tolist() == text
        np.testing.assert_array_equal(ids[1:, 0], np.argmax(law[1:], axis=-1))
        np.testing.assert_allclose(probs[1:], np.take_along_axis(law, ids.astype(int), axis=1)[1:], atol=1e-3)
        assert not probs[0].any()
    assert build_tables(stored, V).num_laws == sum(len(text) - 1 for text in texts)


def test_user_turns_are_read(scripts, tmp_path):
    build = scripts[0]
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n\n')
    assert build.read_turns(path) == ["a", "b"]
    (tmp_path / "turns.txt").write_text("one\n\ntwo\n")
    assert build.read_turns(tmp_path / "turns.txt") == ["one", "two"]


def test_the_table_says_what_was_measured_and_where(scripts, capsys):
    bench = scripts[1]
    row = Evaluation(0.0, 1.8, 1.75, None, None, [], {"x": {"tau": 1.5}, "y": {"tau": 2.0}}, 18, 10)
    bench.print_table({"ngram N=7": [row]}, bench.parse(["prompts.jsonl"]), 3)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "| ngram N=7 | 0 | 1.50 | 2.00 | **1.75** | - | - |"
    assert "smollm2-135m-instruct" in printed[1] and "batch 10" in printed[1] and "jax" in printed[1]


@pytest.mark.full
def test_sources_are_measured_side_by_side(scripts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("specjax.load", lambda name, dtype: target())
    monkeypatch.setattr("jax.config.update", lambda *_: None)  # the cache of compiled programs stays where it is
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab c", "category": "x"}\n{"prompt": "c ab", "category": "y"}\n')
    line = f"bench_drafters.py {tmp_path / 'p.jsonl'} --sources ngram suffix --num-draft-tokens 3 --wall --repeats 1"
    monkeypatch.setattr(sys, "argv", [*line.split(), "--max-new-tokens", "8", "--batch", "1"])
    scripts[1].main()
    printed = capsys.readouterr()
    head, rule, *rows = printed.out.splitlines()[-4:]
    assert head.startswith("| drafter | T | x | y | tau, macro |") and head.endswith(
        "| plain float32 tok/s | plain bfloat16 tok/s | speculative tok/s | ratio |"
    )
    assert [row.split(" | ")[0] for row in rows] == ["| ngram N=3", "| suffix N=3"]
    assert head.count("|") == rule.count("|") == rows[0].count("|")
    assert printed.err.count("tau") == 2 and "part from" not in printed.err


def test_a_broken_line_of_prompts_ends_the_program_in_one_line(scripts, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"text": "a"}')
    monkeypatch.setattr(sys, "argv", ["bench_drafters.py", str(tmp_path / "p.jsonl")])
    with pytest.raises(SystemExit, match=r"^ValueError: .*p.jsonl, line 1: needs an object with a 'prompt'"):
        scripts[1].main()


def test_sources_are_made_by_name(scripts):
    bench, lm = scripts[1], target()
    for name, nodes in (("ngram", 3), ("suffix", 3), ("recycling", 3), ("cascade", 3)):
        assert bench.make(name, lm, 3, None).num_draft_tokens == nodes
    assert bench.make("lookahead", lm, 3, None).num_draft_tokens > 3
    assert bench.make("recycling+tables", lm, 3, None) is None
