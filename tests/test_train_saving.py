"""Runs: what was stopped, or killed, goes on as if it had not been; a directory holds one run; numbers are kept."""

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.train import mesh, monitor
from specjax.train.types import Mean
from tests.train_toy import BAD, RUN, Stopped, batches, fit, numbers, stopping, weights


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9, "accumulate": 2}])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, changes):
    settings = RUN._replace(**changes)
    whole = fit(None, settings)
    with pytest.raises(Stopped):
        fit(tmp_path / "cut", settings, stopping)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    assert [row["step"] for row in monitor.read(metrics)] == [0, 1, 2, 3, 4, 5, 6, 6]  # two are ahead of checkpoint 4
    metrics.write_text(metrics.read_text() + '{"step": 7, "los')
    went_on = fit(tmp_path / "cut", settings._replace(log_every=5))
    for a, b in zip(jax.tree.leaves((whole.params, whole.ema)), jax.tree.leaves((went_on.params, went_on.ema))):
        np.testing.assert_array_equal(a, b)
    assert (whole.ema is None) == (not settings.ema)
    for name, column in numbers(whole.history).items():
        np.testing.assert_array_equal(went_on.history[name], column)
    lines = monitor.read(metrics)
    assert [row["step"] for row in lines if "evaluation" not in row] == list(range(1, 13))
    assert [row["evaluation"] for row in went_on.evaluations] == [{"tau": float(step)} for step in (0, 6, 12)]
    assert sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()) == ["12", "8"]
    again = fit(tmp_path / "cut", settings, stopping)  # a run that has ended is only read
    np.testing.assert_array_equal(again.params["w"], whole.params["w"])
    assert monitor.read(metrics) == lines


class Numbered(tuple):
    """As `specjax.train.packing.Batches`: a tuple that is not meant to be iterated."""

    at = staticmethod(batches)


def test_batches_are_numbered_or_taken_in_turn_and_may_be_rewritten():
    seen = []

    def rewrite(step, batch, params):
        seen.append((step, float(params["w"][0, 0]), params["ids"].tolist()))
        return batch._replace(counts=batch.counts & (step != 1))

    whole = fit(None, RUN._replace(steps=4), evaluate=None)
    for source in (Numbered(), map(batches, range(9))):
        np.testing.assert_array_equal(fit(None, RUN._replace(steps=4), source).params["w"], whole.params["w"])
    rewritten = fit(None, RUN._replace(steps=4), rewrite=rewrite)
    assert rewritten.history["tokens"][1] == 0 and whole.history["tokens"][1] > 0
    assert [step for step, _, _ in seen] == [0, 1, 2, 3] and seen[0][1:] == (float(weights()["w"][0, 0]), [0, 1, 2])
    assert seen[1][1] == seen[2][1] != seen[3][1]


def test_a_run_is_only_gone_on_with_as_itself(tmp_path):
    run = RUN._replace(steps=2, eval_every=0)
    fit(tmp_path, run, identity={"target": "abc", "student": "eagle"})
    for words, changes in {
        r"settings.learning_rate was 0.1 and is 0.2": {"settings": run._replace(learning_rate=0.2)},
        r"settings.ema was 0.0 and is 0.5; settings.seed was 0 and is 1": {"settings": run._replace(ema=0.5, seed=1)},
        r"target was 'abc' and is 'abd'": {"identity": {"target": "abd", "student": "eagle"}},
        r"student was 'eagle' and is None": {"identity": {"target": "abc"}},
        r"weights.more was None and is \[1\]": {"params": {**weights(), "more": np.zeros(1, np.float32)}},
        r"frozen was '\w+' and is '\w+'": {"params": {**weights(), "ids": np.arange(1, 4)}},
    }.items():
        with pytest.raises(ValueError, match=f"holds another run: .*{words}"):
            fit(tmp_path, **{"settings": run, "identity": {"target": "abc", "student": "eagle"}, **changes})


def test_a_damaged_directory_is_named(tmp_path):
    run = RUN._replace(steps=4, eval_every=0, save_every=2)
    whole = fit(tmp_path, run)
    (tmp_path / "checkpoints" / "4" / "default" / "_METADATA").write_text("x")
    with pytest.raises(ValueError, match=r"checkpoints.4 is damaged: .* Delete it to go on from the one before"):
        fit(tmp_path, run)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    np.testing.assert_array_equal(fit(tmp_path, run).params["w"], whole.params["w"])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run.json is damaged"):
        fit(tmp_path, run)
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"has checkpoints but no run.json .*: give another directory, or delete"):
        fit(tmp_path, run)
    assert not (tmp_path / "run.json").exists()


def test_a_loss_that_is_not_finite_ends_the_run_at_its_step(tmp_path):
    """Looked at every 3 steps, saved every 4; the numbers before it are kept, no checkpoint after it is."""
    def poisoned(step):
        batch = batches(step)
        batch.tokens[0, 0] = BAD if step == 5 else batch.tokens[0, 0]
        return batch

    with pytest.raises(ValueError, match=r"loss is inf at step 6: .*last good checkpoint is that of step 4, .*/4$"):
        fit(tmp_path, source=poisoned)
    assert [row["step"] for row in monitor.read(tmp_path / "metrics.jsonl")][-1] == 5
    with pytest.raises(ValueError, match=r"loss is inf at step 6: .*no checkpoint was kept"):
        fit(None, source=poisoned)


KILLED = """
import sys, time
from pathlib import Path
from tests import train_toy as here
def slow(step):
    time.sleep(0.05)
    return here.batches(step)
here.fit(Path(sys.argv[1]), here.RUN._replace(steps=60), slow)
"""
LONG = RUN._replace(steps=60)


@pytest.mark.full
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path):
    root = Path(__file__).resolve().parent.parent
    line = [sys.executable, "-c", KILLED, str(tmp_path / "cut")]
    process = subprocess.Popen(line, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    until = time.monotonic() + 120
    while not (tmp_path / "cut" / "checkpoints" / "12").exists() and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    went_on, whole = fit(tmp_path / "cut", LONG), fit(None, LONG)
    np.testing.assert_array_equal(went_on.params["w"], whole.params["w"])
    for name, column in numbers(whole.history).items():
        np.testing.assert_array_equal(went_on.history[name], column)
    assert all(path.name.isdigit() for path in (tmp_path / "cut" / "checkpoints").iterdir())


# --- what is shown


def test_event_files_are_written_if_asked_for(tmp_path, monkeypatch):
    told = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            told.append((Path(folder).name, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, step))

        def close(self):
            told.append("closed")

    module = type(sys)("tensorboardX")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    fit(tmp_path, RUN._replace(steps=2), tensorboard=True, evaluate=lambda step, params: [{"tau": 2.0}])
    assert told[0] == ("tensorboard", 1) and told[-1] == "closed"
    assert {("loss", 1), ("loss", 2), ("alpha", 2), ("tau, temperature 0", 2)} <= set(told)


def test_the_bar_shows_the_mean_over_all_tokens_of_a_stretch():
    rows = [{"loss": Mean(np.float64(6), np.float64(2)), "alpha": Mean(np.float64(1), np.float64(2))},
            {"loss": Mean(np.float64(4), np.float64(8)), "alpha": Mean(np.float64(8), np.float64(8))}]  # fmt: skip
    assert monitor._shown(rows, 0.5) == {"loss": "1.000", "alpha": "0.900", "tok/s": "10"}


def test_numbers_that_json_does_not_know_come_back_as_nan(tmp_path):
    journal = monitor.Journal(tmp_path / "m.jsonl", 0)
    with monitor.Monitor(journal, 2, bar=False, tensorboard=None) as shown:
        shown.write(1, [{"loss": Mean(np.float64(1), np.float64(2)), "odd": Mean(np.float64(np.nan), np.float64(1))}])
        shown.evaluation(1, [math.nan, (1, {"a": math.inf})])
    rows = monitor.read(tmp_path / "m.jsonl")
    assert rows[1]["evaluation"] == [None, [1, {"a": None}]]
    assert math.isnan(monitor.columns(rows)["odd"][0]) and monitor.columns(rows)["loss"].tolist() == [0.5]
    (tmp_path / "m.jsonl").write_text('{"step": 1\n' + json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match="line 1: not a line of metrics"):
        monitor.read(tmp_path / "m.jsonl")


def test_a_run_goes_on_on_other_devices(tmp_path):
    """From one device to a mesh, and on to others: the steps are those of a run on one device."""
    run = RUN._replace(steps=8, eval_every=0, save_every=2)
    whole = fit(None, run)
    for at, shape in ((3, None), (5, (2, 4)), (7, (8, 1))):
        with pytest.raises(Stopped):
            there = None if shape is None else mesh.make_mesh(*shape)
            fit(tmp_path, run, functools.partial(stopping, at=at), mesh=there)
    made = fit(tmp_path, run, mesh=mesh.make_mesh(1, 8))
    assert len(made.params["w"].sharding.device_set) == 8
    np.testing.assert_allclose(made.params["w"], whole.params["w"], atol=1e-6)
    np.testing.assert_allclose(made.history["loss"], whole.history["loss"], rtol=1e-6)
