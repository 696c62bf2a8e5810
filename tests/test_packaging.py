"""What a wheel, an sdist and an editable install contain."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "specjax", "train"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the files a build reads, the link kept, because setuptools writes into its source directory."""
    root = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, root / name)
    assert (root / "specjax" / "train").is_symlink()
    made = root / "specjax" / "drafters" / "data" / "some-model"  # beside those that are shipped, if any are
    made.mkdir(parents=True)
    for name in ("recycling.json", "tables.npz", "README.md"):
        (made / name).touch()
    return root


def build(source, out, *options):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def expected_modules(source):
    found = {str(path.relative_to(source)) for top in ("specjax", "train") for path in (source / top).rglob("*.py")}
    found = {f"specjax/{name}" if name.startswith("train/") else name for name in found}
    assert {"specjax/train/losses.py", "specjax/cache.py"} <= found
    return found


def expected_data(source):
    """Files of the drafters that come with the library; they lie one directory deep."""
    data = source / "specjax" / "drafters" / "data"
    found = {str(path.relative_to(source)) for path in data.rglob("*") if path.is_file()}
    assert {"specjax/drafters/data/some-model/tables.npz"} <= found
    return found


def check_wheel(path, source):
    names = set(zipfile.ZipFile(path).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"specjax"}
    assert {name for name in names if name.endswith(".py")} == expected_modules(source)
    assert "specjax/py.typed" in names
    assert {name for name in names if name.startswith("specjax/drafters/data/")} == expected_data(source)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_of_the_tree_holds_specjax_with_train_inside_and_nothing_else(source, tmp_path):
    (wheel,) = build(source, tmp_path, "--wheel").glob("*.whl")
    check_wheel(wheel, source)


def test_sdist_holds_the_package_and_builds_the_same_wheel(source, tmp_path):
    build(source, tmp_path)  # the default: an sdist, then a wheel from that sdist
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert expected_modules(source) | expected_data(source) <= names
    assert {"pyproject.toml", "LICENSE", "README.md", "specjax/py.typed"} <= names
    assert not any(name.startswith("train/") for name in names)
    (wheel,) = tmp_path.glob("*.whl")
    check_wheel(wheel, source)


def test_editable_install_reaches_train_through_the_link_only(source, tmp_path):
    make = "from setuptools import build_meta; import sys; print(build_meta.build_editable(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # -S: no .pth file of this interpreter is read, so a specjax installed for the tests is out of sight.
    # Its libraries come last: an editable finder of the same name may lie among them.
    program = (
        "import sys, site, importlib.util\n"
        f"libraries, folder = {sysconfig.get_path('purelib')!r}, {str(tmp_path / 'site')!r}\n"
        "sys.path = [p for p in sys.path if p != ''] + [folder, libraries]\n"
        f"site.addsitedir({str(tmp_path / 'site')!r})\n"
        "import specjax.train, specjax\n"
        "print(specjax.__file__); print(specjax.train.__file__); print(importlib.util.find_spec('train'))\n"
    )
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    package, train, top_level = done.stdout.split()
    assert Path(package) == source / "specjax" / "__init__.py"
    assert Path(train) == source / "specjax" / "train" / "__init__.py"
    assert top_level == "None"


def test_version_has_one_source(source, tmp_path):
    import specjax

    (wheel,) = build(source, tmp_path, "--wheel").glob("*.whl")
    assert wheel.name.split("-")[1] == specjax.__version__
    assert specjax.__version__ in (ROOT / "CHANGELOG.md").read_text()
