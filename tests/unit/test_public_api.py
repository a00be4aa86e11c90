"""The package's public names."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import fedone_sdk
from tests.interpreter import printed_by

API_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.rst"
MODULES = ["fedone_sdk", *re.findall(r"^   (fedone_sdk\.[\w.]+)$", API_PAGE.read_text(), re.M)]
"""Public packages and modules."""


def test_the_example_of_help_runs() -> None:
    _, block, rest = str(fedone_sdk.__doc__).partition(".. code-block:: python\n")
    code = textwrap.dedent(block and rest.split("\n\n`EdgeClient`")[0])
    assert "status='completed'" in printed_by(code)
    assert len([line for line in code.splitlines() if line]) <= 14


def test_an_edge_client_has_at_most_ten_arguments() -> None:
    assert len(inspect.signature(fedone_sdk.EdgeClient).parameters) <= 10


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_true(name: str) -> None:
    module = importlib.import_module(name)
    names = module.__all__
    assert list(names) == sorted(set(names))
    assert [missing for missing in names if not hasattr(module, missing)] == []
    # A module that is loaded must not take the place of a name that its package loads later.
    for clash in [part for part in names if f"{name}.{part}" in MODULES]:
        importlib.import_module(f"{name}.{clash}")
        assert not isinstance(getattr(module, clash), ModuleType)


def test_the_api_page_lists_all_packages() -> None:
    packages = {info.name for info in pkgutil.iter_modules(fedone_sdk.__path__) if info.ispkg}
    assert {f"fedone_sdk.{name}" for name in packages - {"assets", "cli"}} <= set(MODULES)


def test_examples_use_public_names_only() -> None:
    inside = []
    for file in sorted((API_PAGE.parents[2] / "examples").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            place = str(getattr(node, "module", ""))
            if isinstance(node, ast.ImportFrom) and place.startswith("fedone_sdk"):
                public = importlib.import_module(place).__all__ if place in MODULES else ()
                inside += [
                    f"{file.name}: {place}.{one.name}"
                    for one in node.names
                    if one.name not in public and f"{place}.{one.name}" not in MODULES
                ]
    assert inside == []


def test_names_that_are_not_loaded_yet_are_listed() -> None:
    code = "import fedone_sdk as f; print(set(f.__all__) <= set(dir(f)), 'Aggregator' in vars(f))"
    assert printed_by(code) == "True False"


@pytest.mark.parametrize("name", ["fedone_sdk", "fedone_sdk.backends", "fedone_sdk.stores"])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Nothing'"):
        _ = importlib.import_module(name).Nothing
