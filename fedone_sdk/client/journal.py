"""The work of a device: paid answers, spending and noise, and the update until it is sent.

After ``kill -9`` at any point, no paid answer of an open assignment is paid twice, and no noise is
drawn twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.client.examples import Declining
from fedone_sdk.client.state import Change, DeviceState, change, deleted, stored
from fedone_sdk.messages import UPDATE, AlphaUpdate, LossesUpdate
from fedone_sdk.task import LogProbs

_log = structlog.get_logger(__name__)

Row = tuple[LogProbs | float | None, ...]
"""What the model answered to one prompt, per example of its mini-batch: label log-probabilities, or
the loss of a written text; None if the model failed."""

_MOST_JOURNALS = 8
"""Journals that are kept. There are several if a run pauses, and the device works for another.
Without a bound a server could fill the disk with assignments that it never ends."""

_MOST_NOISED = 1000
"""Assignments that are remembered to have noise."""


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _answer(value: Any) -> LogProbs | float:
    return tuple(map(float, value)) if isinstance(value, list) else float(value)


def prompt_key(step: int, position: int, prompt: Sequence[float], batch_sha256: str) -> str:
    """Return a prompt's key in the journal of its work.

    The digest of the mini-batch is part of it, so that answers on other examples never mix.
    """
    text = json.dumps([step, position, list(prompt), batch_sha256])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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


class Journal:
    """One assignment's answers, spending and noise, read again after a restart.

    It has numbers and digests, and the text that a reflection wrote. A damaged row is dropped.
    """

    def __init__(self, state: DeviceState, assignment_id: str) -> None:
        self._state = state
        self.assignment_id = assignment_id
        self._rows: dict[str, tuple[Row, str]] = {}
        self._spent: dict[int, Usage] = {}
        self._released: dict[str, tuple[float, ...]] = {}
        self.written: str | None = None
        query = (
            "SELECT kind, key, value FROM journal "
            "WHERE server = :server AND assignment_id = :assignment_id"
        )
        found = state.read(query, assignment_id=assignment_id)
        self._is_new = not found
        for kind, key, value in found:
            try:
                self._take(kind, key, json.loads(value, parse_constant=_refused))
            except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as exc:
                _log.warning("damaged journal row dropped", error=type(exc).__name__)

    def _take(self, kind: str, key: str, value: Any) -> None:
        if kind == "answers":
            row, model = value
            self._rows[key] = tuple(one if one is None else _answer(one) for one in row), str(model)
        elif kind == "noised":
            self._released[key] = tuple(map(float, value))
        elif kind == "written":
            self.written = str(value)
        else:
            self._spent[int(key)] = Usage.model_validate(value)

    def row(self, key: str) -> tuple[Row, str] | None:
        """Return a prompt's answers and the fingerprint of their model, if the journal has them."""
        return self._rows.get(key)

    def spent(self, step: int) -> Usage:
        """Return what the device's own model has spent on a step."""
        return self._spent.get(step, NOTHING)

    @property
    def total(self) -> Usage:
        """What the device's own model has spent on the work."""
        return sum(self._spent.values(), NOTHING)

    def keep(
        self, rows: Mapping[str, Row], model: str, spent: tuple[int, Usage] | None = None
    ) -> None:
        """Add answers of one model by their keys."""
        self._rows.update((key, (row, model)) for key, row in rows.items())
        changes = [self._entry("answers", key, (row, model)) for key, row in rows.items()]
        if spent is not None:
            changes.append(self._charge(*spent))
        self._write(*changes)

    def keep_written(self, text: str) -> None:
        """Keep what the reflection of the work wrote, so that a restart does not pay for it."""
        self.written = text
        self._write(self._entry("written", "", text))

    def charge(self, step: int, spent: Usage) -> None:
        """Set what a step has cost so far, including the bound of queries in progress."""
        self._write(self._charge(step, spent))

    def release(
        self,
        keys: Sequence[str],
        noised: Callable[[], tuple[float, ...]],
        charge: Callable[[], Sequence[Change]] = tuple,
    ) -> tuple[float, ...]:
        """Return a step's losses with noise: drawn once, the same after a restart.

        With new noise for the same losses the server could average the noise away. The noise and
        its count are stored in one transaction: neither exists without the other.

        Raises:
            OSError: The noise cannot be stored.
        """
        step = hashlib.sha256("".join(keys).encode()).hexdigest()[:32]
        if step not in self._released:
            counted, released = charge(), noised()
            entry = self._entry("noised", step, released)
            if not self._write(entry, *mark_noised(self.assignment_id), *counted):
                raise OSError("the noised losses cannot be stored")
            self._released[step] = released
        return self._released[step]

    @property
    def releases(self) -> int:
        """Number of steps whose losses have their noise already."""
        return len(self._released)

    def _charge(self, step: int, spent: Usage) -> Change:
        self._spent[step] = spent
        return self._entry("charge", str(step), spent.exact())

    def _entry(self, kind: str, key: str, value: Any) -> Change:
        identity = {"assignment_id": self.assignment_id, "kind": kind, "key": key}
        return stored("journal", **identity, value=json.dumps(value))

    def _write(self, *changes: Change) -> bool:
        oldest = change(
            "DELETE FROM journal WHERE server = :server AND assignment_id NOT IN "
            "(SELECT assignment_id FROM journal WHERE server = :server "
            "GROUP BY assignment_id ORDER BY max(rowid) DESC LIMIT :most)",
            most=_MOST_JOURNALS,
        )
        evictions = (oldest,) if self._is_new else ()
        self._is_new = False
        return self._state.write(*changes, *evictions)


def mark_noised(assignment_id: str) -> tuple[Change, ...]:
    """Return the changes that record that noise was drawn for an assignment."""
    return (
        stored("noised", assignment_id=assignment_id),
        change(
            "DELETE FROM noised WHERE rowid NOT IN "
            "(SELECT rowid FROM noised ORDER BY rowid DESC LIMIT :most)",
            most=_MOST_NOISED,
        ),
    )


class CurrentWork:
    """The journals of open assignments, the unsent update, and the memory of the method.

    Attributes:
        unsent: The update that waits to be sent, if any. The device claims other work only after
            the server has accepted or refused it.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._journals: dict[str, Journal] = {}
        self.unsent = self._stored()
        self._memory: tuple[str, bytes] | None = None
        for run_id, content in state.read(
            "SELECT run_id, content FROM memory WHERE server = :server"
        ):
            self._memory = run_id, content
        noised = state.read("SELECT assignment_id FROM noised WHERE server = :server")
        self._noised = {assignment_id for (assignment_id,) in noised}

    def journal(self, assignment_id: str) -> Journal:
        """Return an assignment's journal; the least recent one of too many is deleted.

        Raises:
            Declining: Noise was drawn for the assignment, and is not known any more.
        """
        journal = self._journals.pop(assignment_id, None) or Journal(self._state, assignment_id)
        self._journals[assignment_id] = journal
        if len(self._journals) > _MOST_JOURNALS:
            oldest = self._journals.pop(next(iter(self._journals)))
            if oldest.releases:
                self._noised.add(oldest.assignment_id)
        if assignment_id in self._noised and not journal.releases:
            raise Declining("the noise of this work was drawn before, and its update is gone")
        return journal

    def spent(self, assignment_id: str) -> Usage:
        """Return what the device's own model has spent on an assignment."""
        if self.unsent is not None and self.unsent.assignment_id == assignment_id:
            return self.unsent.update.usage
        journal = self._journals.get(assignment_id)
        return NOTHING if journal is None else journal.total

    def memory(self, run_id: str) -> bytes | None:
        """Return the method's memory of a run, such as AdamW's moments; None if there is none."""
        found, content = self._memory or (None, None)
        return content if found == run_id else None

    def put(self, unsent: Unsent, charge: Sequence[Change] = ()) -> bool:
        """Store an update in place of the one before and of its journal, in one transaction.

        Returns:
            Whether it is stored. Otherwise it is in memory only, or dropped if it has noise: after
            a restart the same work would get other noise.
        """
        is_stored = self._state.write(
            stored(
                "unsent",
                assignment_id=unsent.assignment_id,
                run_id=unsent.run_id,
                round=unsent.round,
                body=unsent.update.model_dump_json(),
                memory=unsent.memory,
            ),
            deleted("journal", assignment_id=unsent.assignment_id),
            *(mark_noised(unsent.assignment_id) if unsent.noised else ()),
            *charge,
        )
        if is_stored or not unsent.noised:
            self.unsent = unsent
        if unsent.noised:
            self._noised.add(unsent.assignment_id)
        if is_stored:
            self._journals.pop(unsent.assignment_id, None)
        return is_stored

    def accept(self, unsent: Unsent) -> None:
        """Drop an update that the server has accepted, and store the method's memory."""
        changes = []
        if unsent.memory:
            self._memory = unsent.run_id, unsent.memory
            changes = [stored("memory", run_id=unsent.run_id, content=unsent.memory)]
        self.drop(unsent.assignment_id, *changes)

    def drop(self, assignment_id: str, *changes: Change) -> None:
        """Delete all about work that is over."""
        if self.unsent is not None and self.unsent.assignment_id == assignment_id:
            self.unsent = None
        self._journals.pop(assignment_id, None)
        self._noised.discard(assignment_id)
        tables = ("unsent", "journal", "noised")
        over = [deleted(table, assignment_id=assignment_id) for table in tables]
        self._state.write(*over, *changes, erases=True)

    def forget(self) -> None:
        """Delete all that belongs to an identity that the server refuses."""
        self.unsent = self._memory = None
        self._journals.clear()
        self._noised.clear()
        tables = ("unsent", "journal", "noised", "memory")
        self._state.write(*map(deleted, tables), erases=True)

    def _stored(self) -> Unsent | None:
        query = (
            "SELECT assignment_id, run_id, round, body, memory FROM unsent WHERE server = :server"
        )
        for assignment_id, run_id, number, body, memory in self._state.read(query):
            try:
                return Unsent(
                    run_id=run_id,
                    assignment_id=assignment_id,
                    round=number,
                    update=UPDATE.validate_json(body),
                    memory=memory,
                )
            except (ValueError, TypeError, RecursionError) as exc:
                _log.warning("damaged update deleted", error=type(exc).__name__)
                self._state.write(deleted("unsent"))
        return None
