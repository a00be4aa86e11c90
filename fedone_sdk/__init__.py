"""FedOne: tune a short prompt on private data, for a language model that can only be queried.

A run with one device and the embedded model; it needs the extras ``server`` and ``local``:

.. code-block:: python

    import asyncio
    from fedone_sdk import Aggregator, EdgeClient, OnnxBackend, RunSpec

    async def main():
        rows = [{"sentence": "a great film", "label": 1}, {"sentence": "a dull plot", "label": 0}]
        task = {"template": "{sentence}{prompt} {mask}.", "labels": {0: " bad", 1: " good"}}
        words = {"kind": "list", "candidates": [" film", " opinion", " very", " it", " was"]}
        spec = RunSpec(name="demo", task=task, rounds=5, method={"name": "thompson"},
                       prompt={"length": 2, "vocabulary": words})
        async with Aggregator(backend=OnnxBackend(), enrolment_tokens=["secret"]) as server:
            run = await server.add_run(spec)
            async with EdgeClient(await server.listen(), token="secret", data=rows) as device:
                await device.run_forever()
            print(await run.wait())

    asyncio.run(main())

`EdgeClient` is a device, and `Aggregator` is a server inside a program. `AdminClient` manages a
server over HTTP. The command ``fedone`` runs devices and servers from configuration files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.imports import lazy

if TYPE_CHECKING:
    from fedone_sdk.aggregator import Aggregator
    from fedone_sdk.backends import LLMBackend, ModelClient, OnnxBackend
    from fedone_sdk.budget import Budget, BudgetGuard, SqliteLedger, Usage
    from fedone_sdk.client import AdminClient, EdgeClient, Hooks, Network, WorkPolicy
    from fedone_sdk.errors import FedOneError
    from fedone_sdk.spec import RunSpec
    from fedone_sdk.task import Score, TaskSpec
    from fedone_sdk.vocabulary import Vocabulary
else:
    # Imported on first use: a device needs no server, and a server may need no local model.
    __getattr__, __dir__ = lazy(
        globals(), "errors vocabulary task budget client spec backends aggregator"
    )

__version__ = "0.1.0"

__all__ = [
    "AdminClient",
    "Aggregator",
    "Budget",
    "BudgetGuard",
    "EdgeClient",
    "FedOneError",
    "Hooks",
    "LLMBackend",
    "ModelClient",
    "Network",
    "OnnxBackend",
    "RunSpec",
    "Score",
    "SqliteLedger",
    "TaskSpec",
    "Usage",
    "Vocabulary",
    "WorkPolicy",
]
