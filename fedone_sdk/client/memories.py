"""What a method remembers of each run on this device: such as AdamW's moments."""

from __future__ import annotations

from fedone_sdk.client.shelf import StateDir

__all__ = ["Memories"]

_MOST = 32
"""Runs that are remembered; the one that was worked for least lately makes room."""


class Memories:
    """Bytes by run.

    Args:
        shelf: Keeps them.
    """

    def __init__(self, shelf: StateDir) -> None:
        self._shelf = shelf

    def of(self, run_id: str) -> bytes | None:
        """What is remembered of a run."""
        return self._shelf.read(f"{run_id}.memory")

    def keep(self, run_id: str, memory: bytes) -> None:
        """Remembers it, after an accepted update."""
        self._shelf.write(f"{run_id}.memory", memory)
        self._shelf.keep_newest("*.memory", _MOST)

    def forget(self) -> None:
        """Forgets all runs."""
        for name in self._shelf.names("*.memory"):
            self._shelf.remove(name)
