"""FedOne: tune a short prompt for a language model that can only be asked, on private data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedone_sdk.aggregator import Aggregator
    from fedone_sdk.backends import CachedBackend, LLMBackend, OnnxBackend
    from fedone_sdk.budget import Budget, BudgetGuard, SqliteLedger, Usage
    from fedone_sdk.client import EdgeClient
    from fedone_sdk.errors import FedOneError
    from fedone_sdk.glue import glue_task
    from fedone_sdk.spec import RunSpec
    from fedone_sdk.task import TaskSpec
    from fedone_sdk.vocabulary import Vocabulary

__version__ = "0.1.0"

# Loaded when first used: an edge device never pays for the server's half, nor a server for a
# local model.
_HOMES = {
    "Aggregator": "aggregator",
    "Budget": "budget",
    "BudgetGuard": "budget",
    "CachedBackend": "backends",
    "EdgeClient": "client",
    "FedOneError": "errors",
    "LLMBackend": "backends",
    "OnnxBackend": "backends",
    "RunSpec": "spec",
    "SqliteLedger": "budget",
    "TaskSpec": "task",
    "Usage": "budget",
    "Vocabulary": "vocabulary",
    "glue_task": "glue",
}

__all__ = [
    "Aggregator",
    "Budget",
    "BudgetGuard",
    "CachedBackend",
    "EdgeClient",
    "FedOneError",
    "LLMBackend",
    "OnnxBackend",
    "RunSpec",
    "SqliteLedger",
    "TaskSpec",
    "Usage",
    "Vocabulary",
    "glue_task",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
