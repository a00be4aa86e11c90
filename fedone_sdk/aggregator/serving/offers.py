"""Offers of seats to clients."""

from __future__ import annotations

from collections.abc import Iterable


class Offers:
    """The runs that may have a seat for a client, and the clients of each run.

    An offer may outlive its seat; the state of the run decides.
    """

    def __init__(self) -> None:
        self._runs: dict[int, set[str]] = {}
        self._clients: dict[str, set[int]] = {}

    def add(self, client: int, run_id: str) -> None:
        """Record that a run may have a seat for a client."""
        self._runs.setdefault(client, set()).add(run_id)
        self._clients.setdefault(run_id, set()).add(client)

    def remove(self, run_id: str, clients: Iterable[int]) -> None:
        """Remove the offers of a run to some clients."""
        for client in tuple(clients):
            runs = self._runs.get(client, set())
            runs.discard(run_id)
            if not runs:
                self._runs.pop(client, None)
            self._clients.get(run_id, set()).discard(client)

    def runs_of(self, client: int) -> tuple[str, ...]:
        """Return the ids of the runs that may have a seat for a client."""
        return tuple(self._runs.get(client, ()))

    def clients_of(self, run_id: str) -> frozenset[int]:
        """Return the enrolment indices of the clients that a run may have a seat for."""
        return frozenset(self._clients.get(run_id, ()))
