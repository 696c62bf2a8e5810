"""Imports run one way, so each layer can be read and used without the ones above it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "specjax"
LAYERS = {  # module: the modules of specjax it may import
    "types": set(),
    "static": set(),
    "rows": {"types"},
    "sharding": {"types", "static"},
    "cache": {"types"},
    "noise": {"types", "static", "rows", "sharding"},
    "tree": {"types", "static"},
    "warp": {"types", "static", "rows", "sharding", "noise", "tree"},
    "proposal": {"types", "static", "tree"},
    "accept": {"types", "static", "rows", "noise", "tree", "warp", "cache", "proposal"},
    "round": {
        "types", "static", "rows", "sharding", "noise", "tree", "warp", "cache", "proposal", "accept", "stats"
    },
}
DRAFTERS = {"types", "static", "sharding", "noise", "warp", "tree", "cache", "models", "drafters"}
ABOVE = {"__init__.py"}  # besides scripts, only the front page may import generate


def imported(path):
    """The first component under specjax of everything a file imports, at any depth of nesting."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; the layers are read off absolute ones"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("specjax.")} | {
        "__init__" for name in names if name == "specjax"
    }


@pytest.mark.parametrize("module", LAYERS)
def test_layer_imports_only_layers_below(module):
    assert imported(PACKAGE / f"{module}.py") <= LAYERS[module]


def test_drafters_import_core_pieces_and_models_only():
    files = sorted((PACKAGE / "drafters").glob("*.py"))
    assert files, "no drafters found"
    for file in files:
        assert imported(file) <= DRAFTERS, file


def test_nothing_imports_generate_or_the_front_page():
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name not in ABOVE:
            assert not imported(file) & {"generate", "__init__"}, file


def test_imported_sees_every_spelling(tmp_path):
    file = tmp_path / "module.py"
    lines = ["from specjax import warp, tree", "import specjax.cache", "def f():", "    from specjax.accept import x"]
    file.write_text("\n".join(lines))
    assert imported(file) == {"warp", "tree", "cache", "accept"}
