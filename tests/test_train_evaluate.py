"""What a drafter is worth is measured by decoding with it, compiles once, and ends up in the picture of the run."""

import json
import sys

import jax
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.train import evaluate as evaluation
from specjax.train import monitor
from specjax.train.evaluate import Prompt, Times, decode, evaluate, part, read_prompts, speeds, table, timed
from specjax.train.report import _running, report
from tests.small import PROMPTS, close, draft_source, target

PROMPT_SET = [Prompt(PROMPTS[0], "x"), Prompt(PROMPTS[2], "y"), Prompt("ab c", "x")]
HOW = {"max_new_tokens": 10, "batch": 2, "compare": True}
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: COMPILED.append(name) if "backend_compile" in name else None
)


@pytest.fixture(scope="module")
def first():
    return evaluate(target(), draft_source("close", 3), PROMPT_SET, **HOW)


def test_the_numbers_are_those_of_each_prompt_decoded_alone(first):
    """Tau is all tokens over all rounds, of a category too; macro is the mean over categories."""
    (row,) = first
    alone = [
        specjax.generate(target(), [text], drafter=draft_source("close", 3), max_new_tokens=10, seed=[number])
        for number, text in enumerate([PROMPTS[0], PROMPTS[2], target().tokenizer.encode("ab c")])
    ]
    emitted, rounds = ([getattr(out.stats, name) for out in alone] for name in ("emitted", "rounds"))
    assert (row.emitted, row.rounds, row.temperature) == (sum(emitted), sum(rounds), 0.0)
    assert row.tau == sum(emitted) / sum(rounds) and row.categories["x"]["prompts"] == 2
    x, y = (emitted[0] + emitted[2]) / (rounds[0] + rounds[2]), emitted[1] / rounds[1]
    assert [row.categories[name]["tau"] for name in ("x", "y")] == [x, y] and row.macro == (x + y) / 2
    counts = [out.stats.counts for out in alone]
    accepted, judged = sum(c.accepted_at[0, 1] for c in counts), sum(c.judged_at[0, 1] for c in counts)
    assert row.per_position[1] == accepted / judged and len(row.per_position) == 3
    assert row.same == 3  # greedy, float32


def test_texts_that_part_from_the_plain_ones_are_counted(monkeypatch):
    """Only where equality is promised: greedy, or "match"."""
    def lying(lm, texts, seeds, batch, drafter=None, **options):
        said, counts = decode(lm, texts, seeds, batch, drafter=draft_source("close", 3), **options)
        return [[0] if drafter is None and i == 1 else text for i, text in enumerate(said)], counts

    monkeypatch.setattr(evaluation, "decode", lying)
    found = evaluate(target(), draft_source("close", 3), PROMPT_SET, temperatures=(0.0, 1.0), **HOW)
    assert [row.same for row in found] == [2, None]


def test_evaluations_after_the_first_compile_nothing():
    """Weights are arguments: another step of training is another drafter of the same program."""
    other = close()._replace(params={name: -leaf for name, leaf in close().params.items()})
    trained = drafters.model(other, target(), 3)
    first = evaluate(target(), draft_source("close", 3), PROMPT_SET, **HOW)  # here: programs are dropped between tests
    COMPILED.clear()
    (row,) = evaluate(target(), trained, PROMPT_SET, **HOW)
    assert not COMPILED and row.same == 3 and row.tau != first[0].tau


def test_ways_take_turns_and_the_ratio_is_against_the_fastest_plain_one(monkeypatch):
    now, order = [0.0], []
    costs = {"float32": (4.0, 1.0, 2.0), "bfloat16": (9.0, 3.0, 3.0), "speculative": (9.0, 1.0, 1.0)}

    def call(name, number):
        order.append(name)
        now[0] += costs[name][order.count(name) % 3 - 1]
        return [0] * 6

    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: now[0])
    calls = {name: lambda number, name=name: call(name, number) for name in costs}
    found = timed(calls, 1, 2)
    assert order == [*costs] * 3
    assert speeds(found) == {"rates": {"float32": 4.0, "bfloat16": 2.0, "speculative": 6.0}, "ratio": 1.5}


def test_the_rate_behind_the_first_token_leaves_out_the_prompt(monkeypatch):
    """Medians of both; each way's own tokens; a category against the plain way that is the fastest there."""
    now = [0.0]
    costs = {("a", 8): 10.0, ("b", 8): 12.0, ("speculative", 8): 6.0,
             ("a", 1): 3.0, ("b", 1): 8.5, ("speculative", 1): 4.0}  # fmt: skip

    def call(name, count, number):
        now[0] += costs[name, count]
        return [0] * count

    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: now[0])
    every, one = ({name: lambda number, name=name, n=n: call(name, n, number) for name in ("a", "b", "speculative")}
                  for n in (8, 1))  # fmt: skip
    found = timed(every, 1, 3, None, one)
    assert found.first == {"a": [3.0], "b": [8.5], "speculative": [4.0]}
    measured = speeds(found)
    assert measured["rates"] == {"a": 0.8, "b": 8 / 12, "speculative": 8 / 6} and measured["ratio"] == (8 / 6) / 0.8
    assert measured["decode_rates"] == {"a": 1.0, "b": 2.0, "speculative": 3.5} and measured["decode_ratio"] == 1.75
    two = Times({"a": [4, 8], "speculative": [8, 4]}, {"a": [2.0, 2.0], "speculative": [1.0, 2.0]}, {})
    assert [speeds(two, rows)["ratio"] for rows in ([0], [1], None)] == [4.0, 0.5, 4 / 3]
    times = {"a": [2.0], "speculative": [2.0]}
    short = Times({"a": [1], "speculative": [1]}, times, times)
    assert speeds(short)["decode_ratio"] is None  # a text of one token


def test_speeds_are_measured_one_prompt_at_a_time():
    how = {"max_new_tokens": 10, "batch": 1, "repeats": 1, "first": True}
    (row,) = evaluate(target(), draft_source("close", 3), PROMPT_SET[:1], **how)
    assert row.rates is not None and set(row.rates) == {"plain", "speculative"} and row.same == 1
    assert row.ratio == row.rates["speculative"] / row.rates["plain"]
    assert row.categories["x"]["ratio"] == row.ratio and row.categories["x"]["decode_ratio"] == row.decode_ratio
    printed = table({"close": [row._replace(decode_ratio=None)]}).splitlines()
    assert printed[0] == ("| drafter | T | x | tau, macro | alpha | alpha by depth | plain tok/s | speculative tok/s | "
                          "ratio |")  # fmt: skip
    assert printed[2].startswith(f"| close | 0 | {row.tau:.2f} | **{row.macro:.2f}** |")


# --- prompts


def test_prompts_come_with_their_categories(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": 1, "category": "x", "prompt": "a\u2028b"}, {"prompt": [3, 4]}, {"category": "x", "prompt": "c"}]
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
    assert read_prompts(path) == [Prompt("a\u2028b", "x"), Prompt([3, 4], "all"), Prompt("c", "x")]
    assert read_prompts(path, 1) == [Prompt("a\u2028b", "x"), Prompt([3, 4], "all")]


def test_halves_of_every_category_share_nothing_and_are_the_same_every_time():
    """An odd prompt goes to the half that is reported."""
    every = [Prompt(str(i), "xyx"[i % 3]) for i in range(9)]  # x: 0 2 3 5 6 8, y: 1 4 7
    texts = {which: [prompt.text for prompt in part(every, which)] for which in ("all", "tune", "report")}
    assert texts == {"all": list("012345678"), "tune": list("0123"), "report": list("45678")}
    assert [prompt.text for prompt in part(every, "report", 1)] == ["4", "5"]
    for prompts, split, words in ((every, "test", "split='test'"), (every[:2], "tune", "none in that half")):
        with pytest.raises(ValueError, match=words):
            part(prompts, split)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"', "line 2: not JSON"), ('\n["a"]', "line 2: needs an object"),
        ('{"text": "a"}', "line 1: needs an object with a 'prompt'"), ('{"prompt": ""}', "line 1"),
        ('{"prompt": [1, "a"]}', "line 1"), ('{"prompt": [true]}', "line 1"),
        ('{"prompt": "a", "category": 3}', "line 1: category=3"), ("\n \n", "has no prompt in it"),
    ],
)  # fmt: skip
def test_a_broken_line_is_named(tmp_path, text, words):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=f"p.jsonl.*{words}"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"prompts": []}, "prompts=.*give Prompts"), ({"prompts": ["a"]}, "prompts=.*give Prompts"),
        ({"batch": 0}, "batch=0"), ({"repeats": -1}, "repeats=-1"), ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"target": target()._replace(tokenizer=None)}, "'ab c' is text, but the target has no tokenizer"),
        ({"target": "smollm2"}, "target='smollm2' is not a language model"),
    ],
)  # fmt: skip
def test_evaluations_that_make_no_sense_are_refused(how, words):
    with pytest.raises(ValueError, match=words):
        evaluate(**{"target": target(), "drafter": draft_source("close", 3), "prompts": PROMPT_SET, **how})


# --- the picture


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_becomes_a_picture(tmp_path, first):
    pytest.importorskip("matplotlib")
    steps = [{"step": i, "loss": 5 / i, "alpha": 0.1, "alpha_2": None, "alpha_10": 0.1, "tokens": 9.0, "seconds": 1.0}
             for i in range(1, 120)]  # fmt: skip
    found = monitor._json(first)
    write(tmp_path / "metrics.jsonl", [{"step": 0, "evaluation": found}, *steps, {"step": 119, "evaluation": found}])
    path = report(tmp_path)
    assert path == tmp_path / "train_report.png" and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "train_report.png"]
    write(tmp_path / "metrics.jsonl", steps[:1])  # a run without evaluations, and with one step
    assert report(tmp_path / "metrics.jsonl", tmp_path / "other.png").name == "other.png"


def test_a_running_mean_leaves_out_what_is_no_number():
    found = _running(np.asarray([np.nan, 2.0, 4.0, np.nan, np.nan, 1.0]), 2)
    np.testing.assert_array_equal(found, [np.nan, 2.0, 3.0, 4.0, np.nan, 1.0])


def test_no_picture_without_steps_or_matplotlib(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        report(tmp_path)
    write(tmp_path / "metrics.jsonl", [{"step": 0, "evaluation": {"tau": 1.0}}])
    with pytest.raises(ValueError, match="no step in it"):
        report(tmp_path)
    write(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0, "tokens": 2.0}])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[plots\]'"):
        report(tmp_path)
