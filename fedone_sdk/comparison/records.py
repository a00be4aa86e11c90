"""Trial records, one JSON line each; a line is written atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedone_sdk.budget import Usage
from fedone_sdk.errors import SpecError
from fedone_sdk.files import sync_path


class Point(BaseModel):
    """A deployable prompt during training.

    Attributes:
        queries: Training queries so far.
        metric: On the dev split, or the part of it that ``evaluation.examples`` selects.
        loss: The task's mean loss there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    queries: int
    metric: float
    loss: float


class TrialRecord(BaseModel):
    """One entrant with one seed. It contains no text of examples.

    Attributes:
        entrant: The method or baseline.
        seed: Of the run.
        identity: Digest of the run's description and data.
        model: Fingerprint of the model.
        version: Of the SDK.
        status: How the run ended; ``measured`` for a baseline.
        rounds: Rounds that ran.
        queries: Training queries.
        example_calls: Training queries times the examples of a query.
        evaluation_queries: Queries on the dev split.
        spent: Usage of the trial; cached answers cost nothing.
        prompt: The deployable prompt.
        bias: Its label bias.
        metric: On the dev split.
        loss: The task's mean loss there, with the bias.
        predicted: Index of the predicted label per example of the dev split: -1 for no label,
            null where the model failed. Empty for tasks without labels.
        targets: Index of the true label per example. Empty for tasks without labels.
        losses: The task's loss per example, null where the model failed.
        curve: The untrained prompt, points during training, and the final prompt.
        wall_s: Seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    entrant: str
    seed: int
    identity: str
    model: str
    version: str
    status: str
    rounds: int = 0
    queries: int = 0
    example_calls: int = 0
    evaluation_queries: int
    spent: Usage
    prompt: str = ""
    bias: tuple[float, ...] | None = None
    metric: float
    loss: float
    predicted: tuple[int | None, ...] = ()
    targets: tuple[int, ...] = ()
    losses: tuple[float | None, ...]
    curve: tuple[Point, ...] = Field(min_length=1)
    wall_s: float


class TrialFile:
    """The file of a comparison's trials; append-only.

    Args:
        path: The file. Its folder must exist before an append.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[TrialRecord]:
        """Return all records. A last line truncated by a killed process is skipped.

        Raises:
            SpecError: The file cannot be read, or another line is invalid.
        """
        try:
            *lines, rest = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise SpecError(f"cannot be read: {exc.strerror}", source=str(self._path)) from exc
        del rest  # an incomplete last line
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(TrialRecord.model_validate_json(line))
            except ValidationError as exc:
                raise SpecError(
                    f"line {number} is not a trial of this version; move the file away",
                    source=str(self._path),
                ) from exc
        return records

    def append(self, record: TrialRecord) -> None:
        """Write a record; it is on disk when this returns."""
        document = record.model_dump(mode="json")
        document["spent"] = record.spent.exact()
        line = json.dumps(document, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with open(
            self._path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o600)
        ) as file:
            data = file.read()
            whole = data.rfind(b"\n") + 1
            file.seek(whole)
            file.truncate()  # an incomplete last line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if not data:
            sync_path(self._path.parent)
