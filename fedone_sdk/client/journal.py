"""Paid losses of an assignment, kept until its update is written."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.client.state_dir import StateDir
from fedone_sdk.task import LogProbs

_log = structlog.get_logger(__name__)

Row = tuple[float | None, ...]
"""One prompt's loss on each example of its mini-batch; None if the model failed."""

Answers = tuple[LogProbs | None, ...]
"""The label log-probabilities of those losses; None if the model failed."""

_MOST_JOURNALS = 4
"""Journals that are kept: one assignment is in progress, others wait for a paused run."""
_MOST_BYTES = 8 * 1024 * 1024


def prompt_key(step: int, position: int, prompt: Sequence[float], batch_sha256: str) -> str:
    """Return the key of one prompt of one local step on one mini-batch.

    Args:
        step: The local step, from 0.
        position: The prompt's index in the step.
        prompt: Its numbers.
        batch_sha256: Digest of the mini-batch, so that losses on other examples never mix.
    """
    text = json.dumps([step, position, list(prompt), batch_sha256])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Journal:
    """One assignment's losses and spending: a file of JSON lines, read again after a restart.

    It has numbers and digests, no text. Its size is bounded: losses beyond the bound are scored
    again after a restart. Reading stops at a damaged line.
    """

    def __init__(self, state: StateDir, assignment_id: str) -> None:
        self._state = state
        self._name = f"journal-{assignment_id}.jsonl"
        self._rows: dict[str, tuple[Row, str]] = {}
        self._answers: dict[str, Answers] = {}
        self._spent: dict[int, Usage] = {}
        self._released: dict[str, tuple[float, ...]] = {}
        kept = state.read(self._name) or b""
        self._size = len(kept)
        if not kept:
            state.keep_newest("journal-*.jsonl", _MOST_JOURNALS - 1)
        for line in kept.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("cut off")
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as exc:
                _log.warning("damaged journal line dropped", error=type(exc).__name__)
                # Rewrites the file: a line appended to a cut-off line would be lost.
                state.write(self._name, b"".join(self._lines()))
                break

    def _take(self, entry: dict[str, Any]) -> None:
        if "row" in entry:
            row = tuple(None if loss is None else float(loss) for loss in entry["row"])
            if not all(loss is None or math.isfinite(loss) for loss in row):
                raise ValueError("a loss is not a number")
            # Absent unless the run calibrates by labels.
            if (kept := entry.get("log_probs")) is not None:
                self._answers[str(entry["key"])] = tuple(
                    None if found is None else tuple(map(float, found)) for found in kept
                )
            self._rows[str(entry["key"])] = row, str(entry["model"])
        elif "released" in entry:
            self._released[str(entry["step"])] = tuple(map(float, entry["released"]))
        else:
            self._spent[int(entry["step"])] = Usage.model_validate(entry["spent"])

    def _lines(self) -> list[bytes]:
        rows = [_row_line(key, *found, self._answers.get(key)) for key, found in self._rows.items()]
        released = [_released_line(*found) for found in self._released.items()]
        return rows + released + [_spent_line(step, usage) for step, usage in self._spent.items()]

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
        """Add losses by their keys.

        Args:
            rows: The losses.
            model: Fingerprint of their model.
            spent: A step, and its cost so far (see `charge`).
            answers: The label log-probabilities of the losses, if they are needed later.
        """
        self._rows.update((key, (row, model)) for key, row in rows.items())
        self._answers.update(answers or {})
        lines = [_row_line(key, row, model, self._answers.get(key)) for key, row in rows.items()]
        if spent is not None:
            self._spent[spent[0]] = spent[1]
            lines.append(_spent_line(*spent))
        self._add(b"".join(lines))

    def charge(self, step: int, spent: Usage) -> None:
        """Set what a step has cost so far, including the bound of queries in progress.

        Not subject to the size bound: after a restart nothing may count as unspent.
        """
        self._spent[step] = spent
        self._state.append(self._name, _spent_line(step, spent))

    def release(
        self, keys: Sequence[str], noised: Callable[[], tuple[float, ...]]
    ) -> tuple[float, ...]:
        """Return a step's losses with noise: drawn once, the same after a restart.

        With new noise for the same losses the server could average the noise away.

        Args:
            keys: The prompts' keys.
            noised: Draws the noise.

        Raises:
            OSError: The noise cannot be stored.
        """
        step = hashlib.sha256("".join(keys).encode()).hexdigest()[:32]
        if step not in self._released:
            released = noised()
            # Not subject to the size bound: these few numbers must not be drawn twice.
            if not self._state.append(self._name, _released_line(step, released)):
                raise OSError("the noised losses cannot be stored")
            self._released[step] = released
        return self._released[step]

    @property
    def releases(self) -> int:
        """Number of steps whose losses have their noise already."""
        return len(self._released)

    def drop(self) -> None:
        """Delete the journal."""
        self._state.remove(self._name)

    def _add(self, lines: bytes) -> None:
        if self._size + len(lines) <= _MOST_BYTES:
            self._size += len(lines)
            self._state.append(self._name, lines)


def _row_line(key: str, row: Row, model: str, answers: Answers | None) -> bytes:
    more = {} if answers is None else {"log_probs": answers}
    return json.dumps({"key": key, "row": row, "model": model, **more}).encode() + b"\n"


def _released_line(step: str, released: tuple[float, ...]) -> bytes:
    return json.dumps({"step": step, "released": released}).encode() + b"\n"


def _spent_line(step: int, spent: Usage) -> bytes:
    return json.dumps({"step": step, "spent": spent.exact()}).encode() + b"\n"
