"""What a device keeps of an assignment until its update is accepted.

After ``kill -9`` at any point, no paid answer of an open assignment is paid twice, and no noise is
drawn twice.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import Base64Bytes, ConfigDict, FiniteFloat

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.client.rows import Declining
from fedone_sdk.client.state import DeviceState, Key, Precision
from fedone_sdk.messages import Message, Update, encode
from fedone_sdk.task import LogProbs

T = TypeVar("T")

Row = tuple[LogProbs | float | None, ...]
"""What the model answered to one prompt, per example of its mini-batch: label log-probabilities, or
the loss of a written text; None if the model failed."""

_ANSWERS: Any = tuple[tuple[tuple[FiniteFloat, ...] | FiniteFloat | None, ...], str]


def key_of(*parts: object) -> str:
    """Return the key of an entry that depends on these JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class Unsent(Message):
    """An update that the server has not accepted yet.

    Attributes:
        memory: The method's memory once the update is accepted; empty for none.
    """

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    run_id: str
    assignment_id: str
    round: int
    update: Update
    memory: bytes = b""


class Journal:
    """The entries of one assignment: answers, spending, noise, and the update until it is accepted.

    They have numbers and digests, and the text that a reflection wrote.
    """

    def __init__(self, state: DeviceState, assignment_id: str) -> None:
        self._state = state
        self.assignment_id = assignment_id

    def row(self, key: str) -> tuple[Row, str] | None:
        """Return a prompt's answers and the fingerprint of their model, if the journal has them."""
        return self._get(_ANSWERS, "answers", key)

    def keep(
        self, rows: Mapping[str, Row], model: str, spent: tuple[int, Usage] | None = None
    ) -> None:
        """Add answers of one model by their keys."""
        entries = {self._key("answers", key): json.dumps((row, model)) for key, row in rows.items()}
        if spent is not None:
            entries |= self._spent(*spent)
        self._state.write(entries)

    def spent(self, step: int) -> Usage:
        """Return what the device's own model has spent on a step."""
        return self._get(Usage, "spent", str(step)) or NOTHING

    def charge(self, step: int, spent: Usage) -> None:
        """Set what a step has cost so far, including the bound of queries in progress."""
        self._state.write(self._spent(step, spent))

    @property
    def usage(self) -> Usage:
        """What the device's own model has spent on the work."""
        if self.unsent is not None:
            return self.unsent.update.usage
        steps = self._state.keys(self.assignment_id, "spent")
        return sum((self.spent(int(step)) for *_, step in steps), NOTHING)

    @property
    def written(self) -> str | None:
        """What the reflection of the work wrote; a restart does not pay for it again."""
        return self._get(str, "written")

    @written.setter
    def written(self, text: str) -> None:
        self._state.write({self._key("written"): json.dumps(text)})

    @property
    def releases(self) -> int:
        """Number of releases that have their noise already."""
        return len(self._state.keys(self.assignment_id, "released"))

    def check(self) -> None:
        """Check that the noise of the work, if it was drawn, is known."""
        if self._noised in self._state.keys("", "noised") and not self.releases:
            raise Declining("the noise of this work was drawn before, and its update is gone")

    def release(
        self,
        keys: Sequence[str],
        draw: Callable[[], Sequence[float]],
        charge: Callable[[], Precision] | None = None,
    ) -> tuple[float, ...]:
        """Return numbers with noise: drawn once, the same after a restart.

        With new noise for the same numbers the server could average the noise away. The noise and
        its count are stored in one transaction: neither exists without the other.
        """
        name = key_of(*keys)
        released = self._get(tuple[FiniteFloat, ...], "released", name)
        if released is None:
            counted = None if charge is None else charge()
            released = tuple(draw())
            entries = {self._key("released", name): json.dumps(released), self._noised: "true"}
            if not self._state.write(entries, counted=counted, durable=True):
                raise Declining("the noise cannot be stored")
        return released

    @property
    def unsent(self) -> Unsent | None:
        """The update, once the work is done."""
        return self._get(Unsent, "unsent")

    def finish(self, unsent: Unsent) -> None:
        """Store the update in place of what it was computed from."""
        update = {self._key("unsent"): encode(unsent).decode()}
        self._state.write({**self._deleted("answers", "spent", "written"), **update})

    def delete(self, accepted: Unsent | None = None) -> None:
        """Delete all about work that is over, and keep the memory of an accepted update."""
        entries = self._deleted("answers", "spent", "written", "released", "unsent")
        entries[self._noised] = None
        if accepted is not None and accepted.memory:
            content = base64.b64encode(accepted.memory).decode()
            entries["", "memory", ""] = json.dumps((accepted.run_id, content))
        self._state.write(entries, erases=True)

    @property
    def _noised(self) -> Key:
        return "", "noised", self.assignment_id

    def _deleted(self, *kinds: str) -> dict[Key, str | None]:
        return dict.fromkeys(self._state.keys(self.assignment_id, *kinds))

    def _spent(self, step: int, spent: Usage) -> dict[Key, str]:
        return {self._key("spent", str(step)): json.dumps(spent.exact())}

    def _key(self, kind: str, name: str = "") -> Key:
        return self.assignment_id, kind, name

    def _get(self, form: type[T], kind: str, name: str = "") -> T | None:
        return self._state.get(form, self.assignment_id, kind, name)


def unsent_updates(state: DeviceState) -> list[Unsent]:
    """Return the updates that wait to be sent."""
    updates = [Journal(state, assignment_id).unsent for assignment_id in state.assignments]
    return list(filter(None, updates))


def memory_of(state: DeviceState, run_id: str) -> bytes:
    """Return the method's memory of a run, such as AdamW's moments; empty if there is none."""
    stored_run, content = state.get(tuple[str, Base64Bytes], "", "memory") or ("", b"")
    return content if stored_run == run_id else b""
