"""The package's public names, and the imports of a device."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import fedone_sdk
from fedone_sdk.errors import MissingExtraError

HEAVY = ("numpy", "torch", "openai", "vllm", "onnxruntime", "sqlalchemy", "tokenizers", "yaml")

NOT_A_DEVICES = (
    *("aiohttp.web", "sqlite3", "tomllib"),
    *(f"fedone_sdk.{name}" for name in ("aggregator", "algorithms", "candidates", "stores")),
    *(
        "fedone_sdk.backends.wrappers",
        "fedone_sdk.budget.ledger",
        "fedone_sdk.client.admin",
        "fedone_sdk.client.backend_oracle",
    ),
    *("fedone_sdk.messages.run", "fedone_sdk.messages.schema"),
    *("fedone_sdk.spec.backends", "fedone_sdk.spec.prompt", "fedone_sdk.spec.run"),
)
"""What servers, people's commands and devices with a model of their own need."""

API_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.rst"
MODULES = ["fedone_sdk", *re.findall(r"^   (fedone_sdk\.[\w.]+)$", API_PAGE.read_text(), re.M)]
"""Public packages and modules."""


@pytest.mark.parametrize(
    "statement",
    [
        "import fedone_sdk",
        "from fedone_sdk import EdgeClient",
        "from fedone_sdk import Budget, BudgetGuard, RunSpec, SqliteLedger, TaskSpec, Usage",
        "from fedone_sdk import EdgeClient; EdgeClient('http://x', token='t', data=[{'a': 'b'}])",
        "import fedone_sdk.messages",
    ],
)
def test_an_edge_device_loads_nothing_heavy(statement: str) -> None:
    assert loaded(statement, HEAVY) == []


def test_a_device_with_the_gateway_loads_no_server_modules() -> None:
    statement = (
        "from fedone_sdk import EdgeClient; EdgeClient('http://x', token='t', data=[{'a': 'b'}])"
    )
    assert loaded(statement, NOT_A_DEVICES) == []


def loaded(statement: str, names: tuple[str, ...]) -> list[str]:
    """Which of these modules a fresh interpreter loads."""
    code = f"{statement}\nimport sys; print(*(name for name in {names} if name in sys.modules))"
    run = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()


def test_the_example_of_help_runs() -> None:
    _, block, rest = str(fedone_sdk.__doc__).partition(".. code-block:: python\n")
    code = textwrap.dedent(block and rest.split("\n\n`EdgeClient`")[0])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "status='completed'" in ran.stdout
    assert len([line for line in code.splitlines() if line]) <= 14


def test_an_edge_client_has_at_most_eight_arguments() -> None:
    assert len(inspect.signature(fedone_sdk.EdgeClient).parameters) <= 8


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_true(name: str) -> None:
    module = importlib.import_module(name)
    names = module.__all__
    assert list(names) == sorted(set(names))
    assert [missing for missing in names if not _is_there(module, missing)] == []
    # A module that is loaded must not take the place of a name that its package loads later.
    for clash in [part for part in names if f"{name}.{part}" in MODULES]:
        importlib.import_module(f"{name}.{clash}")
        assert not isinstance(getattr(module, clash), ModuleType)


def test_the_api_page_lists_all_packages() -> None:
    packages = {info.name for info in pkgutil.iter_modules(fedone_sdk.__path__) if info.ispkg}
    assert {f"fedone_sdk.{name}" for name in packages - {"assets", "cli"}} <= set(MODULES)


def _is_there(module: object, name: str) -> bool:
    try:
        return hasattr(module, name)
    except MissingExtraError as exc:  # It needs an extra that conflicts with `all`.
        return exc.extra == "flwr"


def test_names_that_are_not_loaded_yet_are_listed() -> None:
    code = "import fedone_sdk as f; print(set(f.__all__) <= set(dir(f)), 'Aggregator' in vars(f))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'fedone_sdk' has no attribute 'Nothing'"):
        _ = fedone_sdk.Nothing
