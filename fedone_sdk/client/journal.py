"""Paid losses of an assignment, kept until its update is written."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.client.device_state import Change, DeviceState, change
from fedone_sdk.task import LogProbs

_log = structlog.get_logger(__name__)

Row = tuple[float | None, ...]
"""One prompt's loss on each example of its mini-batch; None if the model failed."""

Answers = tuple[LogProbs | None, ...]
"""The label log-probabilities of those losses; None if the model failed."""

MOST_WITH_LOSSES = 4
"""Journals whose losses are kept: one assignment is in progress, others wait for a paused run."""
MOST_ROWS = 1000
"""Stored charges and noised losses of all journals. They are few numbers, kept longer."""
_MOST_CHARS = 8 * 1024 * 1024
"""Losses of one journal that are stored, as JSON."""

_EVICTIONS = (
    change(
        "DELETE FROM journal WHERE server = :server AND kind = 'losses' AND assignment_id NOT IN "
        "(SELECT assignment_id FROM journal WHERE server = :server GROUP BY assignment_id "
        "ORDER BY max(rowid) DESC LIMIT :most)",
        most=MOST_WITH_LOSSES,
    ),
    change(
        "DELETE FROM journal WHERE kind != 'losses' AND rowid NOT IN "
        "(SELECT rowid FROM journal WHERE kind != 'losses' ORDER BY rowid DESC LIMIT :most)",
        most=MOST_ROWS,
    ),
)


def prompt_key(step: int, position: int, prompt: Sequence[float], batch_sha256: str) -> str:
    """Return the key of one prompt of one local step on one mini-batch.

    The digest of the mini-batch is part of it, so that losses on other examples never mix.
    """
    text = json.dumps([step, position, list(prompt), batch_sha256])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Journal:
    """One assignment's losses, spending and noise, read again after a restart.

    It has numbers and digests, no text. Its size is bounded: losses beyond the bound are scored
    again after a restart. A damaged row is dropped.
    """

    def __init__(self, state: DeviceState, assignment_id: str) -> None:
        self._state = state
        self._assignment_id = assignment_id
        self._rows: dict[str, tuple[Row, str]] = {}
        self._answers: dict[str, Answers] = {}
        self._spent: dict[int, Usage] = {}
        self._released: dict[str, tuple[float, ...]] = {}
        self._size = 0
        query = (
            "SELECT kind, key, value FROM journal "
            "WHERE server = :server AND assignment_id = :assignment_id"
        )
        found = state.read(query, assignment_id=assignment_id)
        self._is_new = not found
        for kind, key, value in found:
            try:
                self._take(kind, key, json.loads(value))
            except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as exc:
                _log.warning("damaged journal row dropped", error=type(exc).__name__)
            self._size += len(value)

    def _take(self, kind: str, key: str, value: Any) -> None:
        if kind == "losses":
            row = tuple(None if loss is None else float(loss) for loss in value["row"])
            if not all(loss is None or math.isfinite(loss) for loss in row):
                raise ValueError("a loss is not a number")
            # Absent unless the run calibrates by labels.
            if (kept := value.get("log_probs")) is not None:
                self._answers[key] = tuple(
                    None if found is None else tuple(map(float, found)) for found in kept
                )
            self._rows[key] = row, str(value["model"])
        elif kind == "noised":
            self._released[key] = tuple(map(float, value))
        else:
            self._spent[int(key)] = Usage.model_validate(value)

    def row(self, key: str) -> tuple[Row, str] | None:
        """Return a prompt's losses and the fingerprint of their model, if the journal has them."""
        return self._rows.get(key)

    def answers(self, key: str) -> Answers | None:
        """Return the label log-probabilities of a prompt's losses, if the journal has them."""
        return self._answers.get(key)

    def spent(self, step: int) -> Usage:
        """Return what the device's own model has spent on a step, without queries."""
        return self._spent.get(step, NOTHING)

    @property
    def total(self) -> Usage:
        """What the device's own model has spent on the work, without queries."""
        return sum(self._spent.values(), NOTHING)

    def keep(
        self,
        rows: Mapping[str, Row],
        model: str,
        spent: tuple[int, Usage] | None = None,
        answers: Mapping[str, Answers] | None = None,
    ) -> None:
        """Add losses of one model by their keys.

        Args:
            rows: The losses.
            model: The model's fingerprint.
            spent: A step, and its cost so far (see `charge`).
            answers: The label log-probabilities of the losses, if they are needed later.
        """
        self._rows.update((key, (row, model)) for key, row in rows.items())
        self._answers.update(answers or {})
        changes = []
        for key, row in rows.items():
            more = {"log_probs": self._answers[key]} if key in self._answers else {}
            value = json.dumps({"row": row, "model": model, **more})
            if self._size + len(value) <= _MOST_CHARS:
                self._size += len(value)
                changes.append(self._entry("losses", key, value))
        if spent is not None:
            changes.append(self._charge(*spent))
        self._write(*changes)

    def charge(self, step: int, spent: Usage) -> None:
        """Set what a step has cost so far, including the bound of queries in progress.

        Not subject to the size bound: after a restart nothing may count as unspent.
        """
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

        Args:
            keys: The prompts' keys.
            noised: Draws the noise.
            charge: Checks that the release is allowed, and returns what counts it.

        Raises:
            OSError: The noise cannot be stored.
        """
        step = hashlib.sha256("".join(keys).encode()).hexdigest()[:32]
        if step not in self._released:
            counted, released = charge(), noised()
            entry = self._entry("noised", step, json.dumps(released))
            stored = self._write(entry, *counted)
            if not stored:
                raise OSError("the noised losses cannot be stored")
            self._released[step] = released
        return self._released[step]

    @property
    def releases(self) -> int:
        """Number of steps whose losses have their noise already."""
        return len(self._released)

    def forget_losses(self) -> None:
        """Drop the losses from memory; the charges and the noise stay."""
        self._rows.clear()
        self._answers.clear()
        self._size = 0

    def _charge(self, step: int, spent: Usage) -> Change:
        self._spent[step] = spent
        return self._entry("charge", str(step), json.dumps(spent.exact()))

    def _entry(self, kind: str, key: str, value: str) -> Change:
        return change(
            "INSERT OR REPLACE INTO journal VALUES (:server, :assignment_id, :kind, :key, :value)",
            assignment_id=self._assignment_id,
            kind=kind,
            key=key,
            value=value,
        )

    def _write(self, *changes: Change) -> bool:
        evictions = _EVICTIONS if self._is_new else ()
        self._is_new = False
        return self._state.write(*changes, *evictions)
