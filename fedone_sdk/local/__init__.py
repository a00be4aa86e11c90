"""Runs of a federation in one process: aggregator and clients, without sockets."""

from typing import TYPE_CHECKING

from fedone_sdk.imports import lazy

if TYPE_CHECKING:
    from fedone_sdk.backends.judge import load_score
    from fedone_sdk.local.federation import Ask, Federation, First, load_measure, running, simulate
    from fedone_sdk.local.plan import RunPlan, plan_run
    from fedone_sdk.local.population import MemoryTransport
else:
    # Loaded on first use, so that the command's help does not load NumPy.
    __getattr__, __dir__ = lazy(globals(), "federation plan population")

__all__ = [
    "Ask",
    "Federation",
    "First",
    "MemoryTransport",
    "RunPlan",
    "load_measure",
    "load_score",
    "plan_run",
    "running",
    "simulate",
]
