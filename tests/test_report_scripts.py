"""scripts/scaling.py, tpu_report.py and loading_report.py: what they refuse before minutes of work."""

import json
import os
from unittest import mock

import pytest

from tests.scripts import imported, refusal


@pytest.fixture(scope="module")
def modules():
    with mock.patch.dict(os.environ), imported("scaling", "tpu_report", "loading_report") as found:
        yield dict(zip(("scaling", "tpu_report", "loading_report"), found, strict=True))


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("scaling", "--counts nowhere/x.json", "--counts nowhere/x.json: there is no folder nowhere; make it"),
        ("scaling", "--counts .", "--counts . is a folder: name a file in it"),
        ("tpu_report", "--batch x", "--batch x: give numbers of rows"),
        ("tpu_report", "--batch 0,8", "--batch 0,8: give numbers of rows"),
        ("tpu_report", "--batch 1,3 --data 2", "--data 2 must divide all but 1"),
        ("tpu_report", "--alpha 2", "--alpha 2: an acceptance is from 0 to 1"),
        ("tpu_report", "-K -1", "-K -1: give 1 or more draft tokens"),
        ("tpu_report", "--data 0", "--data 0: must divide the chips of v5e:2x4"),
        ("tpu_report", "--data 3", "--data 3: must divide the chips of v5e:2x4"),
        ("tpu_report", "--topology v5e", "give a chip and its rows and columns"),
        ("tpu_report", "--topology v4:2x2", "published ceilings are known for v5e, v6e"),
        ("tpu_report", "--drafter eagle3 --tree 3,2 -K 4", "--tree 3,2 has its own number of nodes: leave out -K"),
        ("tpu_report", "--drafter eagle3 --tree 3,x", "--tree 3,x: give children per level"),
        ("tpu_report", "--drafter lookup --tree 3,2", "trees are drafted by eagle3 or dflash, not by lookup"),
        ("tpu_report", "--write-text 0", "--write-text 0: give the number of texts, 1 or more"),
        ("tpu_report", "--write-text 3 --data 2", "--write-text 3: --data 2 must divide it"),
        ("tpu_report", "--drafter eagle3 --train 0", "--train 0: give the number of texts, 1 or more"),
        ("loading_report", "--checkpoint x --stored orbax-float32", "--stored is of what is written"),
        ("loading_report", "--checkpoint x --gigabytes 1", "--gigabytes is of what is written"),
        ("loading_report", "--checkpoint=", "--checkpoint is empty"),
    ],
)
def test_the_parsers_refuse(modules, capsys, name, line, words):
    assert words in refusal(modules[name].arguments, line.split(), capsys)


def test_counts_are_read_as_they_were_written_and_nothing_else_is(modules, tmp_path):
    scaling, path = modules["scaling"], tmp_path / "counts.json"
    cost = scaling.tpu.Cost(1.5, 2.0, {"all-reduce": 3.0}, 4.0, 0.1)
    counts = {"a": scaling.Counts(scaling.Pair(cost, cost, 5), {"eagle3": scaling.Pair(cost, cost, 1)})}
    assert scaling.stored(path) == {}
    path.write_text(json.dumps(counts))
    assert scaling.stored(path) == counts
    for text in ('{"a": [[', "[1]", '{"a": 1}', json.dumps({"a": [["x", "y", 5], {}]})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"^--counts .*counts.json does not hold .*: delete it, or name another"):
            scaling.stored(path)


def test_a_default_stays_beside_a_tree(modules):
    arguments = modules["tpu_report"].arguments
    assert (arguments([]).num_draft_tokens, arguments([]).batch, arguments([]).tree) == (4, [1, 32], None)
    assert arguments(["--drafter", "eagle3", "--tree", "3,2"]).tree == (3, 2)


def test_a_checkpoint_that_does_not_load_is_said_in_the_words_of_load(modules, tmp_path):
    report = modules["loading_report"]
    small = report.written(tmp_path / "small", "safetensors-float32", report.settings_of(0, 4))
    (tmp_path / "bad").mkdir()
    with pytest.raises(ValueError, match=r"^the directory \S+bad has neither config.json .*\(ours\)$"):
        report.loading(small, tmp_path / "bad", {})
