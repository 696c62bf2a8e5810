"""`scripts/quantize_report.py`."""

import numpy as np
import pytest

from tests import scripts
from tests.models import tiny


@pytest.fixture(scope="module")
def script():
    with scripts.imported("quantize_report") as module:
        yield module


def test_differences_of_laws_are_those_of_their_definitions(script):
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    logits, other = np.log([p, p]), np.log([p, q])
    found = script.compared(logits + 3, other + 3)  # laws do not see a shift of both
    assert found["greedy agrees"] == 0.5
    assert found["KL max"] == pytest.approx(0.25 * np.log(2)) and found["KL mean"] == pytest.approx(found["KL max"] / 2)
    assert found["max abs"] == pytest.approx(np.log(2)) and found["mean abs"] == pytest.approx(np.log(2) / 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--prompts nowhere.txt", "--prompts nowhere.txt: no such file"),
        ("--repeats 0", "--repeats 0: 1 or more"),
        ("--windows 1 0", "--windows 0: 1 or more"),
        ("--windows 1,a", "invalid int value"),
    ],
)
def test_options_that_make_no_sense_are_refused(script, capsys, words, said):
    assert said in scripts.refusal(script.main, words.split(), capsys)


def test_models_and_prompts_that_cannot_be_compared_are_refused_in_one_line(script, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    bare = "tests/data/tiny_models/llama3_rope_scaled"
    for words, said in (
        (f"--prompts {tmp_path / 'empty'}", "has no prompt in it"), (f"--model {bare}", "has no tokenizer"),
        ("--model nowhere", "nowhere"), (f"--model {tiny.write_gguf(tmp_path / 'm.gguf')} --new-tokens 99999", "need"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=said):
            script.main([*words.split(), "--no-speed"])


@pytest.mark.full
def test_a_report_of_a_tiny_model(script, tmp_path, capsys):
    path = tiny.write_gguf(tmp_path / "m.gguf")
    (tmp_path / "prompts").write_text("ab a\nc a b")
    words = ["--model", str(path), "--prompts", str(tmp_path / "prompts"), "--new-tokens", "8", "--repeats", "1"]
    script.main([*words, "--no-speed"])
    said = capsys.readouterr().out
    assert "int8 layers" in said and "KL mean" in said and "MiB of weights" in said
