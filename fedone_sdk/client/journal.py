"""Losses that were paid for, until the work that they are for is finished."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.client.shelf import StateDir
from fedone_sdk.task import LogProbs

__all__ = ["Answers", "Journal", "Row", "prompt_key"]

_log = structlog.get_logger(__name__)

Row = tuple[float | None, ...]
"""One prompt's loss on each example of its mini-batch; None where the model failed."""

Answers = tuple[LogProbs | None, ...]
"""The label log-probabilities that those losses are of; None where the model failed."""

_MOST_JOURNALS = 4
"""Works that may be half done: one is under way, others wait while their run is paused."""
_MOST_BYTES = 8 * 1024 * 1024


def prompt_key(step: int, position: int, prompt: Sequence[float], batch_sha256: str) -> str:
    """Names one prompt of one local step on one mini-batch.

    Args:
        step: The local step, from 0.
        position: The prompt's place in the step.
        prompt: Its numbers.
        batch_sha256: Digest of the mini-batch, so that losses on other examples never mix.
    """
    text = json.dumps([step, position, list(prompt), batch_sha256])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Journal:
    """One assignment's losses and spending: a file of JSON lines, read again after a restart.

    It holds numbers and digests, no text. What does not fit a bound on its size is scored again
    after a restart, and a damaged line ends what is read of it.

    Args:
        shelf: Keeps it.
        assignment_id: The work.
    """

    def __init__(self, shelf: StateDir, assignment_id: str) -> None:
        self._shelf = shelf
        self._name = f"journal-{assignment_id}.jsonl"
        self._rows: dict[str, tuple[Row, str]] = {}
        self._answers: dict[str, Answers] = {}
        self._spent: dict[int, Usage] = {}
        self._released: dict[str, tuple[float, ...]] = {}
        kept = shelf.read(self._name) or b""
        self._size = len(kept)
        if not kept:
            shelf.keep_newest("journal-*.jsonl", _MOST_JOURNALS - 1)
        for line in kept.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("cut off")
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as exc:
                _log.warning("damaged journal line dropped", error=type(exc).__name__)
                # What is added after a line that was cut off must not be lost with it.
                shelf.write(self._name, b"".join(self._lines()))
                break

    def _take(self, entry: dict[str, Any]) -> None:
        if "row" in entry:
            row = tuple(None if loss is None else float(loss) for loss in entry["row"])
            if not all(loss is None or math.isfinite(loss) for loss in row):
                raise ValueError("a loss is no number")
            # Only runs that calibrate by labels keep it; so do no journals of older versions.
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
        """A prompt's losses and the model that they are of, if they are known already."""
        return self._rows.get(key)

    def answers(self, key: str) -> Answers | None:
        """The label log-probabilities that a prompt's losses are of, if they were kept."""
        return self._answers.get(key)

    def spent(self, step: int) -> Usage:
        """What this device's own model has spent on a step, queries apart."""
        return self._spent.get(step, NOTHING)

    @property
    def total(self) -> Usage:
        """What this device's own model has spent on the work, queries apart."""
        return sum(self._spent.values(), NOTHING)

    def keep(
        self,
        rows: Mapping[str, Row],
        model: str,
        spent: tuple[int, Usage] | None = None,
        answers: Mapping[str, Answers] | None = None,
    ) -> None:
        """Keeps losses by their keys.

        Args:
            rows: The losses.
            model: Fingerprint of the model that they are of.
            spent: A step, and what it has cost by now (see `charge`).
            answers: The label log-probabilities that the losses are of, where more than the losses
                is made of them.
        """
        self._rows.update((key, (row, model)) for key, row in rows.items())
        self._answers.update(answers or {})
        lines = [_row_line(key, row, model, self._answers.get(key)) for key, row in rows.items()]
        if spent is not None:
            self._spent[spent[0]] = spent[1]
            lines.append(_spent_line(*spent))
        self._add(b"".join(lines))

    def charge(self, step: int, spent: Usage) -> None:
        """Keeps what a step has cost so far, and may cost by what is under way.

        Whatever the journal's size: after a restart nothing must count as not spent.
        """
        self._spent[step] = spent
        self._shelf.append(self._name, _spent_line(step, spent))

    def release(
        self, keys: Sequence[str], noised: Callable[[], tuple[float, ...]]
    ) -> tuple[float, ...]:
        """A step's losses with noise: drawn once, and the same after a restart.

        Noise drawn anew for the same losses would let the server average it away.

        Args:
            keys: The prompts' names.
            noised: Draws the noise.

        Raises:
            OSError: The noise cannot be kept.
        """
        step = hashlib.sha256("".join(keys).encode()).hexdigest()[:32]
        if step not in self._released:
            released = noised()
            # Whatever the journal's size: a few numbers that must not be drawn twice.
            if not self._shelf.append(self._name, _released_line(step, released)):
                raise OSError("the noised losses cannot be kept")
            self._released[step] = released
        return self._released[step]

    @property
    def releases(self) -> int:
        """How many steps' losses have their noise already."""
        return len(self._released)

    def drop(self) -> None:
        """Forgets the work: it is finished, or gone."""
        self._shelf.remove(self._name)

    def _add(self, lines: bytes) -> None:
        if self._size + len(lines) <= _MOST_BYTES:
            self._size += len(lines)
            self._shelf.append(self._name, lines)


def _row_line(key: str, row: Row, model: str, answers: Answers | None) -> bytes:
    more = {} if answers is None else {"log_probs": answers}
    return json.dumps({"key": key, "row": row, "model": model, **more}).encode() + b"\n"


def _released_line(step: str, released: tuple[float, ...]) -> bytes:
    return json.dumps({"step": step, "released": released}).encode() + b"\n"


def _spent_line(step: int, spent: Usage) -> bytes:
    return json.dumps({"step": step, "spent": spent.exact()}).encode() + b"\n"
