"""Every worked example in a docstring is true."""

import doctest
import importlib
import pkgutil

import pytest

import specjax

MODULES = sorted(module.name for module in pkgutil.walk_packages(specjax.__path__, "specjax."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples_to_run():
    examples = [test for name in MODULES for test in doctest.DocTestFinder().find(importlib.import_module(name))]
    assert sum(bool(test.examples) for test in examples) >= 2
