"""Two processes of two devices each say, learn and write what one process with four devices does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.models import tiny
from tests.test_train_data import TEMPLATE

ROOT = Path(__file__).resolve().parent.parent


def run(directory, count):
    """Starts the processes, waits for all; what was found, and the lines that each has printed."""
    directory.mkdir()
    weights = {name: 0.3 * array for name, array in tiny.tensors().items()}
    tiny.write_gguf(directory / "m.gguf", tiny.gguf_tensors(weights), **{"tokenizer.chat_template": TEMPLATE})
    lines = [{"prompt": [row, 9, row], "category": ["even", "odd"][row % 2]} for row in range(3)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    started = []
    for number in range(count):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "SPECJAX_CACHE": str(ROOT / ".cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
            "XLA_FLAGS": " ".join([*others, f"--xla_force_host_platform_device_count={4 // count}"]),
        }  # fmt: skip
        if count > 1:
            env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count),
                    "JAX_PROCESS_ID": str(number)}  # fmt: skip
        command = [sys.executable, "-m", "tests.several_processes", str(directory)]
        started.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        said = [process.communicate(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors.decode()[-3000:]
    lines = [[line for line in out.decode().splitlines() if "[Gloo]" not in line] for out, _ in said]
    return json.loads((directory / "found.json").read_text()), lines


@pytest.mark.full
def test_two_processes_say_learn_and_write_what_one_does(tmp_path):
    """Cases 139, 141 and 145: what `scripts/eval_drafter.py` measures; whether a weight in parts is equal to a copy;
    text greedy and sampled, and in slots; losses and weights of a run with checkpoints; the shards of a corpus."""
    (one, _), (two, said) = (run(tmp_path / str(count), count) for count in (1, 2))
    assert one["equal"] == [[1], [0], [0]] and two["equal"] == [[1, 1], [0, 0], [0, 0]]
    worth = [json.loads((tmp_path / count / "worth.json").read_text()) for count in ("1", "2")]
    assert worth[0]["results"] == worth[1]["results"] and worth[1]["prompts"] == 3
    for name in ("greedy", "slots", "match"):
        assert one[name] == two[name], name
    for name in ("loss", "w"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-6, atol=1e-7, err_msg=name)
    assert len(two["evaluations"]) == 2
    assert said[0][-1] == "2 processes" and said[1] == []  # only the first speaks
    assert one["shards"] == two["shards"] > 1
    for index in range(one["shards"]):
        ours, theirs = (np.load(tmp_path / count / "corpus" / f"shard-{index:05d}.npz") for count in ("1", "2"))
        for name in ours.files:
            np.testing.assert_array_equal(ours[name], theirs[name])
    lines = [(tmp_path / count / "run" / "metrics.jsonl").read_text().count("\n") for count in ("1", "2")]
    assert lines[0] == lines[1] == 6  # four steps, two evaluations: not written twice
