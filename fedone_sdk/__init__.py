"""FedOne: federated tuning of a short prompt for a black-box language model, on private data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk._lazy import lazy

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
else:
    # An edge device never pays for the server's half, nor a server for a local model.
    __getattr__, __dir__ = lazy(
        globals(),
        {
            "aggregator": "Aggregator",
            "backends": "CachedBackend LLMBackend OnnxBackend",
            "budget": "Budget BudgetGuard SqliteLedger Usage",
            "client": "EdgeClient",
            "errors": "FedOneError",
            "glue": "glue_task",
            "spec": "RunSpec",
            "task": "TaskSpec",
            "vocabulary": "Vocabulary",
        },
    )

__version__ = "0.1.0"

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
