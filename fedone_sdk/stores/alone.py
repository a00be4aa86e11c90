"""A process that nobody shares its store with."""

from __future__ import annotations

import uuid

from fedone_sdk.stores.base import Signals

__all__ = ["Alone"]


class Alone:
    """What a store says of the other processes on it where there are none."""

    def __init__(self) -> None:
        self._replica = uuid.uuid4().hex

    @property
    def shared(self) -> bool:
        """Never."""
        return False

    @property
    def replica(self) -> str:
        """Names this process; new at every `open`."""
        return self._replica

    async def alive(self) -> frozenset[str]:
        """This process alone."""
        return frozenset({self._replica})

    async def lead(self) -> bool:
        """Always: there is nobody else."""
        return True

    async def publish(self, signal: str) -> None:
        """Does nothing: nobody else listens."""

    def listen(self, signals: Signals) -> None:
        """Does nothing: nobody else publishes."""

    def _begin_anew(self) -> None:
        """Takes a new name: what bears the old one belongs to a life that is over."""
        self._replica = uuid.uuid4().hex
