"""Work of a device that is not finished: journals, unsent updates, and the memory of methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from fedone_sdk.client.device_state import Change, DeviceState, change
from fedone_sdk.client.journal import MOST_ROWS, MOST_WITH_LOSSES, Journal
from fedone_sdk.messages import UPDATE, AlphaUpdate, LossesUpdate

_log = structlog.get_logger(__name__)

_MOST_UNSENT = 16
_MOST_MEMORIES = 32
"""Runs with a memory; the least recently updated one is evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """An update that the server has not accepted yet.

    Attributes:
        memory: The method's memory once the update is accepted; empty for none.
        noised: Whether the update has noise, which must not be drawn twice.
    """

    run_id: str
    assignment_id: str
    round: int
    update: AlphaUpdate | LossesUpdate
    memory: bytes = b""
    noised: bool = False


class UnfinishedWork:
    """Journals and unsent updates by assignment, and the memory of methods by run."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._journals: dict[str, Journal] = {}
        self._unsent = {unsent.assignment_id: unsent for unsent in self._stored()}
        self._memories: dict[str, bytes] = {}

    def journal(self, assignment_id: str) -> Journal:
        """Return an assignment's journal; the oldest others lose their losses beyond a bound."""
        journal = self._journals.pop(assignment_id, None) or Journal(self._state, assignment_id)
        self._journals[assignment_id] = journal
        for other in [*self._journals.values()][:-MOST_WITH_LOSSES]:
            other.forget_losses()
        for other_id in [*self._journals][:-MOST_ROWS]:
            del self._journals[other_id]
        return journal

    def put(self, unsent: Unsent, charge: Sequence[Change] = ()) -> bool:
        """Store an update, and drop the losses and charges that it has, in one transaction.

        Beyond a bound an update is deleted: the oldest without noise, else the oldest.

        Args:
            unsent: The update.
            charge: Counts the noise that was drawn for it.

        Returns:
            Whether it is stored. Otherwise it is in memory only, or dropped if it has noise: after
            a restart the same work would get other noise.
        """
        self._unsent[unsent.assignment_id] = unsent
        changes = [
            change(
                "INSERT OR REPLACE INTO unsent VALUES (:server, :assignment_id, :run_id, :round, "
                ":noised, :body, :memory)",
                assignment_id=unsent.assignment_id,
                run_id=unsent.run_id,
                round=unsent.round,
                noised=unsent.noised,
                body=unsent.update.model_dump_json(),
                memory=unsent.memory,
            ),
            change(
                "DELETE FROM journal WHERE server = :server AND assignment_id = :assignment_id "
                "AND kind != 'noised'",
                assignment_id=unsent.assignment_id,
            ),
            *charge,
        ]
        while len(self._unsent) > _MOST_UNSENT:
            surplus = min(self._unsent.values(), key=lambda each: each.noised)
            _log.warning("unsent update deleted: too many are waiting", run_id=surplus.run_id)
            del self._unsent[surplus.assignment_id]
            changes.append(_deleted("unsent", surplus.assignment_id))
        stored = self._state.write(*changes)
        if stored and unsent.assignment_id in self._journals:
            self._journals[unsent.assignment_id].forget_losses()
        elif not stored and unsent.noised:
            self._unsent.pop(unsent.assignment_id, None)
        return stored

    def unsent(self) -> list[Unsent]:
        """Return the unsent updates, the oldest first."""
        return [*self._unsent.values()]

    def memory(self, run_id: str) -> bytes | None:
        """Return a method's memory of a run, such as AdamW's moments; None if there is none."""
        if run_id not in self._memories:
            query = "SELECT content FROM memory WHERE server = :server AND run_id = :run_id"
            for (content,) in self._state.read(query, run_id=run_id):
                self._memories[run_id] = content
        return self._memories.get(run_id)

    def accept(self, unsent: Unsent) -> None:
        """Drop an update that the server has accepted, and store the method's memory."""
        changes = []
        if unsent.memory:
            self._memories.pop(unsent.run_id, None)
            self._memories[unsent.run_id] = unsent.memory
            for run_id in [*self._memories][:-_MOST_MEMORIES]:
                del self._memories[run_id]
            changes = [
                change(
                    "INSERT OR REPLACE INTO memory VALUES (:server, :run_id, :content)",
                    run_id=unsent.run_id,
                    content=unsent.memory,
                ),
                change(
                    "DELETE FROM memory WHERE server = :server AND rowid < (SELECT rowid FROM "
                    "memory WHERE server = :server ORDER BY rowid DESC LIMIT 1 OFFSET :most - 1)",
                    most=_MOST_MEMORIES,
                ),
            ]
        self.drop(unsent.assignment_id, *changes)

    def drop(self, assignment_id: str, *changes: Change) -> None:
        """Delete all about work that is over."""
        self._unsent.pop(assignment_id, None)
        self._journals.pop(assignment_id, None)
        tables = (_deleted(name, assignment_id) for name in ("unsent", "journal"))
        self._state.write(*tables, *changes)

    def forget(self) -> None:
        """Delete all that belongs to an identity that the server refuses."""
        self._journals.clear()
        self._unsent.clear()
        self._memories.clear()
        tables = ("unsent", "journal", "memory")
        self._state.write(
            *(change(f"DELETE FROM {name} WHERE server = :server") for name in tables)
        )

    def _stored(self) -> list[Unsent]:
        found = []
        query = (
            "SELECT assignment_id, run_id, round, noised, body, memory FROM unsent "
            "WHERE server = :server ORDER BY rowid"
        )
        for assignment_id, run_id, number, noised, body, memory in self._state.read(query):
            try:
                unsent = Unsent(
                    run_id=run_id,
                    assignment_id=assignment_id,
                    round=number,
                    update=UPDATE.validate_json(body),
                    memory=memory,
                    noised=bool(noised),
                )
            except (ValueError, TypeError, RecursionError) as exc:
                _log.warning("damaged update deleted", error=type(exc).__name__)
                self._state.write(_deleted("unsent", assignment_id))
            else:
                found.append(unsent)
        return found


def _deleted(table: str, assignment_id: str) -> Change:
    where = "WHERE server = :server AND assignment_id = :assignment_id"
    return change(f"DELETE FROM {table} {where}", assignment_id=assignment_id)
