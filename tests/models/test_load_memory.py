"""Peak memory of loading, in a process of its own: the weights, and little that does not grow with them.

What does not grow: the tokenizer (some 75 MB for the 262,144 tokens of Gemma), what the C library keeps of blocks that
were freed (up to 70 MB after an orbax checkpoint), and a few rows of one matrix for each thread.
"""

import pathlib

import pytest

from specjax.models import fetch
from tests.scripts import imported

with imported("loading_report") as loading_report:
    pass

pytestmark = pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="peaks are read from /proc")
FIXED = 120e6  # bytes


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Checkpoints of each layout that take no memory to speak of."""
    folder, settings = tmp_path_factory.mktemp("small"), loading_report.settings_of(0, 4)
    return {layout: loading_report.written(folder / layout, f"{layout}-float32", settings)
            for layout in ("safetensors", "orbax")}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of our own, so large that a matrix held twice would show."""
    settings = loading_report.settings_of(0.75, 4)
    return loading_report.written(tmp_path_factory.mktemp("orbax") / "big", "orbax-float32", settings)


def assert_lean(small, path, options):
    found = loading_report.loading(small, path, options)
    assert found.peak < 1.05 * found.size + FIXED
    if found.size > 5e8:
        assert found.peak < 1.3 * found.size
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("gigabytes", "options"), [(1, {}), (0.3, {"scan_layers": True}), (0.3, {"dtype": "bfloat16", "quantize": "int8"})]
)
def test_up_to_a_gigabyte_of_safetensors(tmp_path, small, gigabytes, options):
    settings = loading_report.settings_of(gigabytes, 4)
    path = loading_report.written(tmp_path / "big", "safetensors-float32", settings)
    found = assert_lean(small["safetensors"], path, options)
    assert options or found.size > 9e8


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"scan_layers": True}, {"dtype": "bfloat16", "quantize": "int8"}], ids=str)
def test_a_checkpoint_of_our_own(small, saved, options):
    assert_lean(small["orbax"], saved, options)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_whose_embedding_is_two_thirds_of_it(small, dtype):
    assert_lean(small["safetensors"], fetch.fetch("gemma3-270m"), {"dtype": dtype})


# --- the script


def test_a_report_has_a_line_for_each_layout(tmp_path, capsys):
    words = ["--gigabytes", "0.001", "--scratch", str(tmp_path), "--stored", "orbax-bfloat16"]
    loading_report.main([*words, "--quantize", "int8"])
    head, units, line = capsys.readouterr().out.splitlines()
    name, *numbers = line.split()
    assert (name, len(numbers)) == ("orbax-bfloat16", 8) and all(float(number) >= 0 for number in numbers[:6])
    assert head.split()[-2:] == ["peak", "beyond"] and units.split()[-1] == "MB"
    assert not list(tmp_path.iterdir())


def test_rates_and_sizes_are_those_of_the_files(tmp_path, monkeypatch, small):
    path = small["orbax"]
    assert loading_report.size_of(path) == sum(x.stat().st_size for x in (path / "params").rglob("*") if x.is_file())
    assert loading_report.size_of(small["safetensors"]) == (small["safetensors"] / "model.safetensors").stat().st_size
    case = loading_report.Case("name", path, path, "float32")
    monkeypatch.setattr(loading_report, "size_of", lambda path: 4e9)
    monkeypatch.setattr(loading_report, "reading", lambda path: 2.0)
    measured = loading_report.Measured(8.0, 0.5, 4.0, 5 * 10**9, 4 * 10**9)
    monkeypatch.setattr(loading_report, "loading", lambda *args: measured)
    printed = "name 4.00 2.00 8.00 0.50 1.00 4.00 1.25 1000"
    assert loading_report.line(case, {}).split() == printed.split()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--gigabytes", "0"], "--gigabytes 0.0: give a positive number"), (["--scratch", "nowhere"], "no such directory"),
     (["--stored", "gguf"], "invalid choice"), (["--checkpoint", "nowhere"], "--checkpoint nowhere does not exist")],
)
def test_options_of_the_report_that_make_no_sense_are_refused(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        loading_report.main(words)
    assert said in f"{ended.value.code}{capsys.readouterr().err}"
