"""Federations in one process, over loopback HTTP or in memory."""

from fedone_sdk.simulation.federation import (
    Ask,
    Federation,
    First,
    load_measure,
    load_score,
    simulate,
)
from fedone_sdk.simulation.memory_transport import MemoryTransport
from fedone_sdk.simulation.plan import RunPlan, plan_run

__all__ = [
    "Ask",
    "Federation",
    "First",
    "MemoryTransport",
    "RunPlan",
    "load_measure",
    "load_score",
    "plan_run",
    "simulate",
]
