"""scripts/simulate.py: the numbers it prints and the figures it writes."""

import struct
import sys
import zlib

import pytest

from tests import scripts

FIGURES = ("tokens_per_pass.png", "speed_up.png", "rule.png")


@pytest.fixture(scope="module")
def simulate():
    with scripts.imported("simulate") as module:
        yield module


def pixels(png):
    """(width, height, raw scan lines) of a PNG; fails on a file that is cut or corrupt."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + body)
        chunks[name] = chunks.get(name, b"") + body
        at += 12 + size
    assert b"IEND" in chunks
    return *struct.unpack(">II", chunks[b"IHDR"][:8]), zlib.decompress(chunks[b"IDAT"])


def test_figures_are_images_with_something_on_them(simulate, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    simulate.main(["--rounds", "400", "--out", str(tmp_path / "new" / "figures")])
    printed = capsys.readouterr().out
    for name in FIGURES:
        path = tmp_path / "new" / "figures" / name
        assert f"wrote {path}" in printed
        width, height, raw = pixels(path.read_bytes())
        assert width >= 1200 and height >= 700
        assert len(set(raw)) > 50, f"{name} is blank"


def test_numbers_stand_beside_their_closed_forms(simulate, capsys):
    simulate.main(["--rounds", "400", "--no-figures"])
    lines = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()}
    assert lines["alpha"][-1] == "0.8100"
    assert lines["tokens per round"][-1] == "3.4280"
    assert float(lines["tokens per round"][0]) == pytest.approx(3.428, abs=0.5)
    assert lines["p"] == ["0.3000", "0.2500", "0.1800", "0.1200", "0.1000", "0.0500"]
    assert [line for line in lines if line.startswith("a=")] == ["a=0.6   K=4    1.92x", "a=0.75  K=7    2.67x",
                                                                 "a=0.9   K=13   4.67x"]  # fmt: skip


@pytest.mark.parametrize("options", [["--rule", "block"], ["--rule", "match"], ["--rule", "match", "--coupled"]])
def test_every_rule_and_laws_of_ones_own(simulate, capsys, options):
    laws = ["--p", ".7,.2,.1,0,0,0", "--q", ".5,.2,.1,.1,.1,0"]
    simulate.main([*options, *laws, "--rounds", "200", "--no-figures"])
    assert "200 rounds" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--p", ".7,.2"], "p sums to 0.9"),
        (["--p", ".7,.3"], "p has 2 tokens and q 6"),
        (["-K", "-1"], "--num-draft-tokens -1: must"),
        (["--rounds", "0"], "--rounds 0: must"),
        (["--coupled"], "--coupled with --rule rejection: .* need --rule match"),
        (["--draft-cost", "-1", "--rounds", "50"], "--draft-cost -1.0: must"),
    ],
)
def test_a_wrong_option_is_one_line_not_a_traceback(simulate, options, message):
    with pytest.raises(SystemExit, match=message):
        simulate.main([*options, "--no-figures"])


def test_without_matplotlib_the_numbers_come_and_the_remedy_is_named(simulate, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[plots\]'"):
        simulate.main(["--rounds", "400", "--out", str(tmp_path)])
    assert "tokens per round" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
