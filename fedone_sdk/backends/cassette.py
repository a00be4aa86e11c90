"""Backend that replays recorded answers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

from fedone_sdk.backends._codec import load_answer, load_error, load_query, query_key
from fedone_sdk.backends.base import EVERY_UNIT, Answer, LLMBackend, Query, Want
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendError, SpecError


class CassetteBackend(LLMBackend):
    """Replays the file of a `RecordingBackend`, with its fingerprint, usage and errors.

    A query that was recorded several times gets its answers in order, then the last one. Cancelled
    requests are skipped. Rate limits are not recorded.

    Attributes:
        bounds: All units, because only recorded usage can occur.
        answers: The recorded kinds of queries.
        max_inputs: The most inputs of a recorded query, so that larger ones are split alike.

    Args:
        file: The cassette.

    Raises:
        SpecError: The file is missing or empty, a line is not one of a cassette, or it holds
            answers of two models.
    """

    bounds = EVERY_UNIT

    def __init__(self, file: Path) -> None:
        self._path = file
        self._outcomes: defaultdict[bytes, list[Answer | BackendError]] = defaultdict(list)
        self._worst: dict[int, Usage] = {}
        self._fingerprint = ""
        wants = set()
        for number, line in enumerate(_lines(file), 1):
            if not line:  # From a process that opened the file during a write.
                continue
            try:
                found = json.loads(line.decode("utf-8", "surrogatepass"))
                query, outcome = load_query(found), _outcome(found)
                if query.want not in get_args(Want):
                    raise ValueError(f"want is {query.want!r}")
                fingerprint = str(found["fingerprint"])
            except (
                ArithmeticError,
                AttributeError,
                KeyError,
                RecursionError,
                TypeError,
                ValueError,
            ) as exc:
                raise SpecError(
                    f"line {number}: is not a line of a cassette ({exc!r:.100}); "
                    "remove it where a crash has cut it short",
                    source=str(file),
                ) from exc
            if self._fingerprint not in ("", fingerprint):
                raise SpecError(
                    f"line {number}: is of the model {fingerprint!r}, "
                    f"those before of {self._fingerprint!r}",
                    source=str(file),
                )
            self._fingerprint = fingerprint
            if outcome is not None:
                self._outcomes[query_key(fingerprint, query)].append(outcome)
                self._note_worst(len(query.inputs), outcome)
                wants.add(query.want)
        if not self._outcomes:
            raise SpecError("holds no answers", source=str(file))
        self.answers = frozenset(wants)
        self.max_inputs = max(self._worst)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the recorded model."""
        return self._fingerprint

    async def score(self, query: Query) -> Answer:
        """Return the recorded answer.

        Raises:
            BackendError: The recorded error; or the cassette does not hold the query.
        """
        outcomes = self._outcomes.get(query_key(self._fingerprint, query))
        if outcomes is None:
            start = "".join(part.text for rendered in query.inputs[:1] for part in rendered)
            raise BackendError(
                f"{self._path}: the cassette does not hold this query "
                f"({query.want}, {len(query.inputs)} inputs, the first {start!r:.60}); record it",
                usage=NOTHING,
            )
        outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if isinstance(outcome, BackendError):
            raise outcome.with_traceback(None)
        return outcome

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """Return the largest usage of a recorded query of this size."""
        return self._worst.get(batch_size, Usage(queries=1))

    def _note_worst(self, batch_size: int, outcome: Answer | BackendError) -> None:
        known = self._worst.get(batch_size, Usage(queries=1))
        self._worst[batch_size] = known if outcome.usage is None else known.at_least(outcome.usage)


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines()
    except OSError as exc:
        raise SpecError(f"cannot be read: {exc.strerror}", source=str(file)) from exc


def _outcome(found: dict[str, Any]) -> Answer | BackendError | None:
    if "answer" in found:
        return load_answer(found["answer"])
    return load_error(found["error"])
