"""Replica methods of stores that are not shared."""

from __future__ import annotations

import uuid

from fedone_sdk.stores.base import Signals


class Alone:
    """Replica methods of a store for one process."""

    def __init__(self) -> None:
        self._replica = uuid.uuid4().hex

    @property
    def shared(self) -> bool:
        """Always False."""
        return False

    @property
    def replica(self) -> str:
        """Id of this process; new at every `open`."""
        return self._replica

    async def alive(self) -> frozenset[str]:
        """Return only this process."""
        return frozenset({self._replica})

    async def lead(self) -> bool:
        """Return True: there are no other replicas."""
        return True

    async def publish(self, signal: str) -> None:
        """Do nothing: there are no other replicas."""

    def listen(self, signals: Signals) -> None:
        """Do nothing: there are no other replicas."""

    def _new_replica(self) -> None:
        """Set a new id, so that reservations of an earlier process are recognised as lost."""
        self._replica = uuid.uuid4().hex
