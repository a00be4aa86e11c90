"""Imports load what they need and no more: devices are small, and commands start at once."""

from __future__ import annotations

import pytest

from tests.interpreter import loaded_by

DEVICE = "from fedone_sdk import EdgeClient; EdgeClient('http://x', token='t', data=[{'a': 'b'}])"

HEAVY = ("numpy", "torch", "vllm", "onnxruntime", "sqlalchemy", "tokenizers", "yaml")

NOT_A_DEVICES = (
    *("aiohttp.web", "tomllib"),
    *(f"fedone_sdk.{name}" for name in ("aggregator", "algorithms", "candidates", "stores")),
    *(
        "fedone_sdk.backends.model_client",
        "fedone_sdk.budget.ledger",
        "fedone_sdk.client.admin",
        "fedone_sdk.client.own_model",
    ),
    "fedone_sdk.messages.run",
    *("fedone_sdk.spec.backends", "fedone_sdk.spec.prompt", "fedone_sdk.spec.run"),
)
"""What servers, people's commands and devices with a model of their own need."""


@pytest.mark.parametrize(
    "statement",
    [
        "import fedone_sdk",
        "from fedone_sdk import EdgeClient",
        "from fedone_sdk import Budget, BudgetGuard, RunSpec, SqliteLedger, TaskSpec, Usage",
        DEVICE,
        "import fedone_sdk.messages",
    ],
)
def test_an_edge_device_loads_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement, *HEAVY) == []


def test_a_device_with_the_gateway_loads_no_server_modules() -> None:
    assert loaded_by(DEVICE, *NOT_A_DEVICES) == []


@pytest.mark.parametrize(
    "statement",
    [
        "import fedone_sdk.backends",
        "from fedone_sdk.backends import LLMBackend, ModelClient",
        # Not even a constructed backend has loaded anything: that is left to its worker.
        "from fedone_sdk.backends import OnnxBackend; OnnxBackend()",
    ],
)
def test_backends_load_their_libraries_late(statement: str) -> None:
    assert loaded_by(statement, "numpy", "onnxruntime", "tokenizers") == []


@pytest.mark.parametrize(
    "statement",
    [
        "from fedone_sdk.losses import class_means, loss_terms\n"
        "from fedone_sdk.messages import Tensor\n"
        "from fedone_sdk.task import TaskSpec\n"
        "task = TaskSpec(template='{prompt} {a}', labels={0: ' x', 1: ' y'})\n"
        "means = class_means([loss_terms(task, (-1.0, -2.0), 0)], [0], 2)\n"
        "Tensor.pack([each for row in means for each in row], (2, 4), 'float32').values()",
        "from fedone_sdk.client.noise import private_losses\n"
        "from fedone_sdk.spec.sections import PrivacySpec\n"
        "private_losses([[0.1, 0.2]], PrivacySpec(clip=1, noise_multiplier=1))",
    ],
    ids=["calibration", "noise"],
)
def test_a_device_needs_no_numpy(statement: str) -> None:
    assert loaded_by(statement, "numpy") == []


def test_data_loads_no_heavy_library() -> None:
    statement = "import fedone_sdk.data, fedone_sdk.vocabulary, fedone_sdk.metrics"
    assert loaded_by(statement, "numpy", "pyarrow", "datasets", "torch") == []


def test_algorithms_import_nothing_but_numpy() -> None:
    others = ("asyncio", "aiohttp", "torch", "structlog", "pydantic")
    assert loaded_by("import fedone_sdk.algorithms", *others) == []


def test_stores_load_sqlalchemy_late() -> None:
    assert loaded_by("import fedone_sdk.stores", "sqlalchemy") == []


def test_a_server_without_observers_loads_none() -> None:
    statement = "import fedone_sdk.aggregator, fedone_sdk.cli.serve"
    assert loaded_by(statement, "opentelemetry", "prometheus_client") == []
