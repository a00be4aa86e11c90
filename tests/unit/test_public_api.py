"""What the package shows: light imports, sorted and true `__all__`, private names kept private."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import fedone_sdk
from fedone_sdk.errors import MissingExtraError

HEAVY = ("numpy", "torch", "openai", "vllm", "onnxruntime", "sqlalchemy", "tokenizers", "yaml")

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(fedone_sdk.__path__, "fedone_sdk.")
    if not info.name.rpartition(".")[2].startswith("_")
)


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
    code = f"{statement}\nimport sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    run = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_true(name: str) -> None:
    module = importlib.import_module(name)
    names = module.__all__
    assert list(names) == sorted(set(names))
    assert [missing for missing in names if not _is_there(module, missing)] == []


def _is_there(module: object, name: str) -> bool:
    try:
        return hasattr(module, name)
    except MissingExtraError as exc:  # It is there with an extra that cannot stand beside `all`.
        return exc.extra == "flwr"


def test_the_top_level_says_where_its_names_live() -> None:
    assert list(fedone_sdk.__all__) == sorted(set(fedone_sdk.__all__))
    assert sorted(fedone_sdk._HOMES) == fedone_sdk.__all__
    for name, home in fedone_sdk._HOMES.items():
        owner = importlib.import_module(f"fedone_sdk.{home}")
        assert getattr(fedone_sdk, name) is getattr(owner, name)
        assert name in owner.__all__


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'fedone_sdk' has no attribute 'Nothing'"):
        _ = fedone_sdk.Nothing
