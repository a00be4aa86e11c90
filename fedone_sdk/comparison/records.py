"""What trials found, one JSON line each: a trial is in the file as a whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedone_sdk.budget import Usage
from fedone_sdk.errors import SpecError
from fedone_sdk.files import sync_folder

__all__ = ["Point", "TrialFile", "TrialRecord"]


class Point(BaseModel):
    """A deployable prompt along the way.

    Attributes:
        queries: Training queries by then.
        metric: On the dev split, or on the part of it that ``evaluation.examples`` names.
        loss: The task's mean loss there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    queries: int
    metric: float
    loss: float


class TrialRecord(BaseModel):
    """One entrant under one seed. No text of an example stands in it.

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
        spent: What was sent for all of it; answers that were known cost nothing.
        prompt: The deployable prompt; empty for vectors.
        bias: The label bias that belongs to it.
        metric: On the dev split.
        loss: The task's mean loss there, with the bias.
        predicted: Index of the predicted label per example of the dev split: -1 for none of them,
            null where the model failed. Empty for tasks without labels.
        targets: Index of the true label per example. Empty for tasks without labels.
        losses: The task's loss per example, null where the model failed.
        curve: The untrained prompt, points along the way, and the end.
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
    """The file of all trials of a comparison; lines are appended and never changed.

    Args:
        path: The file. Its folder exists where anything is appended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[TrialRecord]:
        """All records. A last line that a killed process cut short is none.

        Raises:
            SpecError: The file cannot be read, or another line is no record.
        """
        try:
            *lines, rest = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise SpecError(f"cannot be read: {exc.strerror}", source=str(self._path)) from exc
        del rest  # what follows the last end of a line is cut short
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(TrialRecord.model_validate_json(line))
            except ValidationError as exc:
                raise SpecError(
                    f"line {number} is no trial of this version; move the file away",
                    source=str(self._path),
                ) from exc
        return records

    def append(self, record: TrialRecord) -> None:
        """Writes a record; on return it is on the disk."""
        document = record.model_dump(mode="json")
        document["spent"] = record.spent.exact()
        line = json.dumps(document, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with open(
            self._path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o600)
        ) as file:
            data = file.read()
            whole = data.rfind(b"\n") + 1
            file.seek(whole)
            file.truncate()  # what a killed process cut short
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if not data:
            sync_folder(self._path.parent)
