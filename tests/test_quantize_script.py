"""`scripts/quantize_report.py`."""

import numpy as np
import pytest

from scripts import quantize_report
from tests.models import tiny


def test_differences_of_laws_are_those_of_their_definitions():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    logits, other = np.log([p, p]), np.log([p, q])
    found = quantize_report.compared(logits + 3, other + 3)  # laws do not see a shift of both
    assert found["greedy agrees"] == 0.5
    assert found["KL max"] == pytest.approx(0.25 * np.log(2)) and found["KL mean"] == pytest.approx(found["KL max"] / 2)
    assert found["max abs"] == pytest.approx(np.log(2)) and found["mean abs"] == pytest.approx(np.log(2) / 3)


@pytest.mark.full
def test_a_report_of_a_tiny_model(tmp_path, capsys):
    path = tiny.write_gguf(tmp_path / "m.gguf")
    (tmp_path / "prompts").write_text("ab a\nc a b")
    words = ["--model", str(path), "--prompts", str(tmp_path / "prompts"), "--new-tokens", "8", "--repeats", "1"]
    quantize_report.main([*words, "--no-speed"])
    said = capsys.readouterr().out
    assert "int8 layers" in said and "KL mean" in said and "MiB of weights" in said
