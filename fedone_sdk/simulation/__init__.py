"""Whole federations in one process, over loopback HTTP or without sockets."""

from fedone_sdk.simulation.federation import Federation, simulate
from fedone_sdk.simulation.memory_transport import MemoryTransport

__all__ = ["Federation", "MemoryTransport", "simulate"]
