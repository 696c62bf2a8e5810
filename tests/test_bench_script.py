"""scripts/bench.py: refusals, arithmetic, the check of texts, and whole runs with a tiny model."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import noise, parity
from specjax.models import LlamaConfig, llama, llama_params
from specjax.models.language_model import LanguageModel
from tests import scripts
from tests.small import position_lm


@pytest.fixture(scope="module")
def bench():
    with scripts.bench() as modules:
        yield modules


# --- the command line


@pytest.mark.parametrize(
    "line, words",
    [
        ("--num-draft-tokens 4 -1", "--num-draft-tokens -1: 1 or more"),
        ("--batch 1 0", "--batch 0: 1 or more"),
        ("--repeats 0", "--repeats 0"),
        ("--per-category 0", "--per-category 0"),
        ("--max-new-tokens 0", "--max-new-tokens 0"),
        ("--rule guess", "invalid choice: 'guess'"),
        ("--dtype float16", "invalid choice: 'float16'"),
        ("--temperature 0 1 2 --top-p 0.9 1", "one per --temperature"),
        ("--temperature nan", "--temperature"),
        ("--top-p 1.5", "--top-p"),
        ("--html nowhere/a.html", "there is no folder nowhere"),
        ("--json nowhere/a.json", "there is no folder nowhere"),
        ("--json .", "is a folder"),
        ("nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("--textbook --temperature 0 1", "--textbook takes one"),
        ("--textbook --no-split", "--no-split"),
        ("--textbook --drafter", "--textbook needs a drafter"),
        ("--passes --capacity 64 --length 60", "--capacity"),
        ("--peer-assistant .", "needs --peer"),
        ("--seed -1", "--seed"),
    ],
)
def test_the_parser_refuses(bench, capsys, line, words):
    assert words in scripts.refusal(bench.options.parse, line.split(), capsys)


def test_what_stands_on_the_line_goes_before_a_preset(bench):
    quick = bench.options.parse(["--quick", "--max-new-tokens", "128"])
    assert (quick.per_category, quick.max_new_tokens, quick.repeats) == (1, 128, 2)
    book = bench.options.parse(["--textbook", "--num-draft-tokens", "2", "--drafter", "ngram"])
    assert book.num_draft_tokens == [2] and book.drafter == ["ngram"] and book.batch[-1] == 32 and book.ignore_eos
    assert bench.options.parse([]).per_category is None


def test_one_top_p_is_for_every_temperature(bench):
    assert bench.options.parse(["--temperature", "0", "0.7", "--top-p", "0.9"]).top_p == [0.9, 0.9]


@pytest.mark.parametrize(
    "content, line, words",
    [
        ("", "", "has no prompt in it"),
        ('{"prompt": "a"}\n{"prompt": ', "", "line 2: not JSON"),
        ('{"prompt": "a"}\n[1]', "", "line 2: needs an object with a 'prompt'"),
        ('{"prompt": "a"}', "--drafter ngram nowhere", "--drafter nowhere is no draft source"),
        ('{"prompt": "a"}', "--drafter eagle", "--drafter eagle: give one of"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_loading(bench, tmp_path, monkeypatch, content, line, words):
    monkeypatch.setattr("specjax.load", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "p.jsonl").write_text(content)
    monkeypatch.setattr(sys, "argv", ["bench.py", str(tmp_path / "p.jsonl"), *line.split()])
    with pytest.raises(SystemExit, match=f"^ValueError: .*{re.escape(words)}"):
        bench.main.main()


def test_a_page_without_matplotlib_is_refused(bench, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.options.parse(["--html", "a.html"])
    assert "pip install '.[plots]' in the clone" in capsys.readouterr().err


def test_groups_hold_every_prompt_and_are_full(bench):
    texts = [[1] * n for n in (5, 1, 4, 2, 3)]
    made = bench.runs.groups(texts, ["x", "x", "y", "x", "y"], 2)
    assert [group.prompts for group in made] == [[1, 3], [4, 2], [0, 1]]
    assert [group.category for group in made] == ["x", "y", "x"]
    assert [len(row) for group in made for row in group.ids] == [1, 2, 3, 4, 5, 1]
    assert [group.prompts for group in bench.runs.groups(texts, "xxyxy", 1)] == [[i] for i in range(5)]
    assert bench.runs.groups(texts[:2], "xy", 8)[0].prompts == [1, 0] * 4


# --- arithmetic


def run(tokens, decode, prefill=0.5, **counts):
    return {"tokens": tokens, "decode": decode, "prefill": [prefill] * len(decode),
            "wall": [prefill + second for second in decode], **counts}  # fmt: skip


def counted(rounds, judged, accepted):
    return {"passes": rounds, "rounds": rounds, "emitted": rounds + sum(accepted), "proposed": rounds * len(judged),
            "judged_at": judged, "accepted_at": accepted}  # fmt: skip


def made_cell(ways, categories=("x", "y"), batch=1):
    groups = [{"prompts": [i], "category": name} for i, name in enumerate(categories)]
    return {"batch": batch, "temperature": 0.0, "top_p": 1.0, "complete": True, "groups": groups, "ways": ways}


def plain(dtype, *runs):
    return {"kind": "plain", "dtype": dtype, "runs": list(runs)}


def test_a_ratio_is_against_the_faster_plain_way(bench):
    drafted = {"kind": "speculative", "dtype": "bfloat16", "drafter": "d", "rule": "match", "num_draft_tokens": 2}
    ways = {
        "slow": plain("float32", run(10, [4.0, 6.0, 5.0]), run(30, [9.0, 9.0, 9.0])),
        "fast": plain("bfloat16", run(10, [2.0, 2.0, 9.0]), run(30, [6.0, 6.0, 6.0])),
        "new": drafted | {"runs": [run(10, [1.0, 1.0, 1.0], **counted(6, [6, 4], [3, 1])),
                                   run(20, [3.0, 5.0, 4.0], **counted(10, [10, 6], [6, 4]))]},
    }  # fmt: skip
    slow, fast, new = bench.stats.summary(made_cell(ways))
    assert new["decode_baseline"] == new["wall_baseline"] == "fast" and fast["decode_ratio"] == 1
    assert slow["decode_rate"] == 40 / 14 and fast["decode_rate"] == 40 / 8 and new["decode_rate"] == 30 / 5
    assert new["decode_ratio"] == pytest.approx(6 / 5) and new["wall_ratio"] == pytest.approx((30 / 6) / (40 / 9))
    pairs = [10 / 1 / (10 / 2), 10 / 1 / (10 / 2), 10 / 1 / (10 / 9), 20 / 3 / 5, 20 / 5 / 5, 20 / 4 / 5]
    assert new["decode_ratio_quartiles"] == pytest.approx(np.quantile(pairs, (0.25, 0.5, 0.75)))
    low, high = new["decode_ratio_interval"]
    assert low <= new["decode_ratio"] <= high and low == pytest.approx(1.0) and high == pytest.approx(2.0)
    assert new["tau"] == (10 + 20) / 16 and new["alpha"] == 14 / 26 and new["per_position"] == [9 / 16, 5 / 10]
    assert new["categories"]["x"]["wall_ratio"] == pytest.approx((10 / 1.5) / (10 / 2.5))
    assert new["macro_wall_ratio"] == pytest.approx((2.5 / 1.5 + (20 / 4.5) / (30 / 6.5)) / 2)
    assert slow["tau"] is None and new["round_ms"] == pytest.approx(5000 / 16)


def test_the_parts_of_a_round_predict_its_speed(bench):
    def split(*parts):
        return dict(zip(("draft_ms", "verify_ms", "accept_ms", "commit_ms"), parts, strict=True))

    ways = {
        "plain": plain("float32", run(100, [2.0], **counted(100, [], []))) | {"split": split(0.0, 17.0, 1.0, 1.0)},
        "new": {"kind": "speculative", "dtype": "float32", "split": split(2.0, 28.0, 3.0, 2.0),
                "runs": [run(100, [2.0], **counted(50, [50], [50]))]},
    }  # fmt: skip
    first, new = bench.stats.summary(made_cell(ways, ["x"]))
    assert new["predicted_ratio"] == pytest.approx(2 * 19 / 35) and first["predicted_ratio"] == 1
    assert new["split"]["round_ms"] == 40 and new["split"]["rest_ms"] == 5
    assert first["split"]["rest_ms"] == pytest.approx(1)


def test_the_closed_forms_are_those_of_the_paper(bench):
    a, c, v = 0.5, 0.1, 1.5
    cells = []
    for batch in (4, 1):
        ways = {"plain": plain("float32", run(10, [1.0], **counted(10, [], []))) | {
            "split": {"draft_ms": 0.0, "verify_ms": 8.0, "accept_ms": 1.0, "commit_ms": 1.0}}}  # fmt: skip
        for k in (1, 3):
            judged = [8 // 2**i for i in range(k)]
            ways[f"K={k}"] = {
                "kind": "speculative", "dtype": "float32", "num_draft_tokens": k,
                "runs": [run(9, [0.5], **counted(8, judged, [n // 2 for n in judged]))],
                "split": {"draft_ms": 10 * k * c, "verify_ms": 8 * v, "accept_ms": v, "commit_ms": v},
            }  # fmt: skip
        cells.append(made_cell(ways, ["x"], batch))
    found = bench.stats.textbook(cells)
    assert found["alpha"] == a and [(row["batch"], row["num_draft_tokens"]) for row in found["lengths"]] == [
        (1, 1), (1, 3), (4, 1), (4, 3)]  # fmt: skip
    for row in found["lengths"]:
        k = row["num_draft_tokens"]
        tokens = (1 - a ** (k + 1)) / (1 - a)
        assert row["draft_cost"] == pytest.approx(c) and row["verify_cost"] == pytest.approx(v)
        assert row["expected_tokens"] == pytest.approx(tokens) and row["ratio"] == pytest.approx(9 / 0.5 / 10)
        assert row["expected_ratio"] == pytest.approx(tokens / (k * c + 1))
        assert row["expected_ratio_measured_v"] == pytest.approx(tokens / (k * c + v))
    assert len(bench.report.textbook(found)) == 5


def test_work_counts_weights_once_and_the_text_for_every_row(bench):
    config = LlamaConfig(48, 16, 32, 2, 4, 2, tie_embeddings=True)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), llama_params.abstract_params(config))
    lm = LanguageModel(llama.model(config), params, config=config)
    one, bytes_one = bench.parts.work(lm, 1, 1, 10)
    leaves = jax.tree.leaves(lm.params)
    weights, matrices = sum(x.size for x in leaves), sum(x.size for x in leaves if x.ndim > 1)
    cached = 2 * 2 * 2 * 4  # layers, keys and values, key heads, width of a head
    assert bytes_one == 4 * (weights + cached * 11) and one == 2 * matrices + 2 * 2 * cached * 10.5
    many, bytes_many = bench.parts.work(lm, 3, 1, 10)
    assert many == 3 * one and bytes_many == bytes_one + 2 * 4 * cached * 11


def test_rates_of_a_peer_stand_beside_ours(bench):
    drafted = {"drafter": "d", "rule": "match", "num_draft_tokens": 2}
    ways = {
        "plain float32": plain("float32", run(10, [1.5])),
        "ours": {"kind": "speculative", "dtype": "float32", "runs": [run(10, [0.5])], **drafted},
        "theirs": {"kind": "peer", "dtype": "float32", "runs": [run(10, [4.5])]},
        "their lookup": {"kind": "peer", "dtype": "float32", "runs": [run(10, [3.5])], "drafter": "prompt lookup"},
    }
    first, second = bench.report.against_peer(made_cell(ways, ["x"]))
    assert first.startswith("plain float32 is 2.50 times theirs (5.0 and 2.0 tok/s")
    assert second.startswith("ours is 4.00 times their lookup")


# --- equal texts


def test_a_text_that_parts_without_a_near_tie_is_reported(bench):
    logits = np.zeros((16, 4), np.float32)
    logits[:, 1], logits[:, 2] = 5.0, 5.0 - 2.0**-16
    logits[3] = [0, 5, 1, 0]
    lm, how, law = position_lm(logits), bench.runs.How(4, 0), bench.runs.Law(0.0, 1.0)

    def way(name, kind, tokens, **options):
        made = bench.runs.Run([tokens], 0.1, 0.2, 0.3)
        return bench.runs.Way(name, kind, "float32", {}, lambda group, law, warm=False: made, lm=lm, **options)

    group = bench.runs.Group([7], [[0]], "x")
    ways = [way("plain", "plain", [1, 1, 1, 1]), way("same", "speculative", [1, 1, 1, 1]),
            way("tie", "speculative", [1, 2, 1, 1]), way("wrong", "speculative", [1, 1, 1, 2])]  # fmt: skip
    seen = []
    cell = bench.runs.cell(ways, [group], law, 2, how, saved=lambda cell: seen.append(cell["complete"]))
    assert seen == [True] and "equality" not in cell["ways"]["plain"]
    assert cell["ways"]["same"]["equality"] == {"texts": 1, "equal": 1, "parted": []}
    (place,) = cell["ways"]["tie"]["equality"]["parted"]
    assert place["near_tie"] and place["token"] == 1 and 0 < place["margin"] < 1e-4
    (words,) = bench.runs.unequal([cell])
    assert words.startswith("wrong, batch 1, T=0: prompt 7 parts from plain decoding at token 3") and "4.00" in words
    assert "1 DIFFER" in bench.report.texts(cell["ways"]["wrong"]["equality"])
    drawn = bench.runs.cell([ways[0], ways[3]._replace(rule="rejection")], [group], bench.runs.Law(1.0, 1.0), 1, how)
    assert "equality" not in drawn["ways"]["wrong"], "this rule promises the law, not the text"


def test_every_way_has_its_turn_at_the_front(bench):
    order = []

    def way(name):
        def made(group, law, warm=False):
            order.append(f"warm {name}" if warm else name)
            return bench.runs.Run([[1]], 0.1, 0.2, 0.3)

        return bench.runs.Way(name, "plain", name, {}, made)

    group = bench.runs.Group([0], [[0]], "x")
    bench.runs.cell([way("a"), way("b")], [group, group], bench.runs.Law(0.0, 1.0), 2, bench.runs.How(4, 0))
    assert order == ["warm a", "warm b", *"abba"] * 2


@pytest.mark.parametrize("top_p, a, b", [(1.0, 0, 1), (0.8, 0, 1), (0.8, 2, 3)])
def test_the_margin_of_a_drawn_token_is_that_of_noise_or_nucleus(top_p, a, b):
    probs = np.asarray([0.4, 0.3, 0.15, 0.1, 0.05])
    found = parity.divergence(position_lm(np.tile(np.log(probs) * 0.5, (8, 1))), [0, 1], [a], [b], temperature=0.5,
                              top_p=top_p, seed=3)  # fmt: skip
    before = np.asarray([0.0, 0.4, 0.7, 0.85, 0.95])
    drawn = np.asarray(noise.gumbel(noise.row_keys([3]), jnp.asarray([2]), 5)[0])
    scores = np.where(before < top_p, np.log(probs) + drawn, -np.inf)
    edges = [abs(before[token] - top_p) for token in (a, b)] if top_p < 1 else []
    best, second = np.sort(scores)[:-3:-1]
    assert found is not None and found.index == 0
    assert found.margin == pytest.approx(min(best - second, *edges, np.inf), abs=1e-5)


def test_the_type_that_reads_a_window_faster_comes_first(bench, monkeypatch):
    """A fake clock: nothing is timed."""
    times = {"float32": 3.0, "bfloat16": 2.0}
    monkeypatch.setattr(bench.parts, "passes", lambda lm, *sizes: bench.parts.Part(lambda: None))
    monkeypatch.setattr(bench.parts.Timer, "median", lambda self, name: times[name])
    models = dict.fromkeys(times)
    assert list(bench.parts.quickest(models, turns=1).items()) == [("bfloat16", 2.0), ("float32", 3.0)]
    times["bfloat16"] = 4.0
    assert list(bench.parts.quickest(models, turns=1)) == ["float32", "bfloat16"]
