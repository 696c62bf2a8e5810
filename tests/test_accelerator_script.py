"""scripts/train_on_accelerator.sh: its arithmetic, and all of it with a tiny target on a CPU."""

import json
import os
import subprocess
import sys

import pytest

import specjax
from tests import scripts
from tests.scripts import ROOT, TINY


@pytest.fixture(scope="module")
def stages():
    with scripts.imported("accelerator_stages") as module:
        yield module


def call(stages, line):
    args = stages.parse([str(word) for word in line])
    args.run(args)


def test_as_many_steps_as_fit_and_no_more_than_the_text_is_worth(stages, tmp_path, capsys):
    """A probe of 4 steps of 0.5 s that took 12 s: 10 s for the rest; a tenth of the time is kept."""
    seconds = [6.0, 1.0, 0.5, 0.5]  # compiling at first
    lines = [{"step": 0, "evaluation": {}}, *({"step": i + 1, "seconds": s} for i, s in enumerate(seconds))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "manifest.json").write_text(json.dumps({"complete": {"tokens": 6400}}))

    def count(time, epochs):
        line = ["steps", tmp_path / "metrics.jsonl", tmp_path, "--wall", 12, "--seconds", time, "--epochs", epochs]
        call(stages, [*line, "--batch", 4, "--width", 16])
        return int(capsys.readouterr().out)

    assert count(100, 2) == 160  # (90 - 10) / 0.5
    assert count(100, 0.5) == 50  # 0.5 * 6400 / 64
    with pytest.raises(ValueError, match=r"no step fits in 11 s .* raise TRAIN_S"):
        count(11, 1)


@pytest.mark.parametrize(("ratio", "best"), [(None, "b"), (1.5, "a")])
def test_the_better_drafter_is_the_faster_one_or_the_one_with_more_tokens_per_pass(
    stages, tmp_path, capsys, ratio, best
):
    def rows(macro, ratio):
        return [{"temperature": t, "macro": macro / (1 + t), "ratio": ratio} for t in (1.0, 0.0)]

    slower = ratio and ratio - 1
    results = {"a N=7": rows(2.0, ratio), "b N=3, rejection": rows(3.0, slower), "a + b N=7": rows(9.0, 9.0)}
    (tmp_path / "worth.json").write_text(json.dumps({"results": results}))
    call(stages, ["better", tmp_path / "worth.json", "a", "b"])
    assert capsys.readouterr().out.strip() == best
    call(stages, ["better", tmp_path / "nothing.json", "a", "b"])
    assert capsys.readouterr().out.strip() == "a"


@pytest.mark.full
def test_a_tiny_target_gets_a_drafter_and_what_is_done_is_not_done_again(tmp_path):
    pytest.importorskip("tqdm")
    own = {"TOY": "1", "OUT": str(tmp_path / "run"), "PYTHON": sys.executable, "STEPS": "4",
           "SPECJAX_CACHE": str(tmp_path / "cache")}  # fmt: skip

    def run(**more):
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / "train_on_accelerator.sh")], env={**os.environ, **own, **more}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip

    slow = tmp_path / "slow"  # a text stage that gets nowhere
    slow.write_text(f'#!/bin/sh\n[ "$2" = text ] && exec sleep 60\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    early = run(TEXT_S="1", PYTHON=str(slow))
    assert early.returncode == 1 and "no text was complete after 1 s: raise TEXT_S" in early.stdout, early.stdout
    done = run()
    assert done.returncode == 0, done.stdout
    for name in ("text", "head", "worth"):
        assert f"{name}: done in" in done.stdout
    lm = specjax.load(TINY)
    for name in ("run", "run/tables", "run/head", "run/small"):
        specjax.load_drafter(tmp_path / name, lm)
    weights = [(tmp_path / "run" / name / "drafter" / "model.safetensors").stat().st_size for name in ("small", "head")]
    assert weights[0] < 0.6 * weights[1]
    results = json.loads((tmp_path / "run" / "worth.json").read_text())["results"]
    assert len(results) == 3 and all(row["tau"] >= 1 for rows in results.values() for row in rows)
    again = run(LIMIT="100")
    assert again.returncode == 1 and "more than 100 bytes" in again.stdout
    assert "done in" not in again.stdout
