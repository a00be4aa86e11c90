"""A method's memory of each run on this device, such as AdamW's moments."""

from __future__ import annotations

from fedone_sdk.client.state_dir import StateDir

_MOST = 32
"""Runs with a memory; the least recently updated one is evicted."""


class MethodMemory:
    """Serialised memory by run."""

    def __init__(self, state: StateDir) -> None:
        self._state = state

    def of(self, run_id: str) -> bytes | None:
        """Return a run's memory; None if there is none."""
        return self._state.read(f"{run_id}.memory")

    def keep(self, run_id: str, memory: bytes) -> None:
        """Store a run's memory, after an accepted update."""
        self._state.write(f"{run_id}.memory", memory)
        self._state.keep_newest("*.memory", _MOST)

    def forget(self) -> None:
        """Delete the memory of all runs."""
        for name in self._state.names("*.memory"):
            self._state.remove(name)
