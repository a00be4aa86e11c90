"""Imports load what they need and no more: devices are small, and commands start at once."""

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
from tests.interpreter import loaded_by, printed_by

DEVICE = "from fedone_sdk import EdgeClient; EdgeClient('http://x', token='t', data=[{'a': 'b'}])"

HEAVY = ("numpy", "torch", "vllm", "onnxruntime", "sqlalchemy", "tokenizers", "yaml")

NOT_A_DEVICES = (
    *("aiohttp.web", "tomllib"),
    *(f"fedone_sdk.{name}" for name in ("aggregator", "algorithms", "candidates", "stores")),
    *(
        "fedone_sdk.backends.model_client",
        "fedone_sdk.budget.guard",
        "fedone_sdk.client.admin",
        "fedone_sdk.client.own_model",
    ),
    "fedone_sdk.messages.run",
    *("fedone_sdk.spec.backends", "fedone_sdk.spec.prompt", "fedone_sdk.spec.run"),
)
"""What servers, people's commands and devices with a model of their own need."""


NUMERIC = ("numpy", "onnxruntime", "tokenizers")


@pytest.mark.parametrize(
    ("statement", "others"),
    [
        ("import fedone_sdk.messages; from fedone_sdk import BudgetGuard, RunSpec", HEAVY),
        ("from fedone_sdk import Budget, SqliteLedger, TaskSpec, Usage", HEAVY),
        (DEVICE, (*HEAVY, *NOT_A_DEVICES)),
        # Not even a constructed backend has loaded anything: that is left to its worker.
        ("from fedone_sdk.backends import LLMBackend, ModelClient, OnnxBackend; OnnxBackend()",
         NUMERIC),
        (
            "from fedone_sdk.losses import class_means, loss_terms\n"
            "from fedone_sdk.messages import Tensor\n"
            "from fedone_sdk.task import TaskSpec\n"
            "task = TaskSpec(template='{prompt} {a}', labels={0: ' x', 1: ' y'})\n"
            "means = class_means([loss_terms(task, (-1.0, -2.0), 0)], [0], 2)\n"
            "Tensor.pack([each for row in means for each in row], (2, 4), 'float32').values()\n"
            "from fedone_sdk.client.noise import private_losses\n"
            "from fedone_sdk.spec.sections import PrivacySpec\n"
            "private_losses([[0.1, 0.2]], PrivacySpec(clip=1, noise_multiplier=1))",
            ("numpy",),
        ),
        ("import fedone_sdk.data, fedone_sdk.vocabulary, fedone_sdk.metrics",
         ("numpy", "pyarrow", "datasets", "torch")),
        ("import fedone_sdk.algorithms", ("asyncio", "aiohttp", "torch", "structlog", "pydantic")),
        ("import fedone_sdk.stores", ("sqlalchemy",)),
        ("import fedone_sdk.aggregator, fedone_sdk.cli.serve",
         ("opentelemetry", "prometheus_client")),
    ],
)  # fmt: skip
def test_what_is_not_loaded(statement: str, others: tuple[str, ...]) -> None:
    assert loaded_by(statement, *others) == []


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
