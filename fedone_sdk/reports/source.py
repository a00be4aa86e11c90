"""A run to report on: an export, with its log, or a result file, without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedone_sdk.errors import ResultError, SpecError
from fedone_sdk.evaluation.outcomes import Outcomes, Which, newest_outcomes
from fedone_sdk.messages import PromptReport, RunResult, first_error
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import LogEntry
from fedone_sdk.vocabulary import Vocabulary

_MAX_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """The available data of a run.

    Attributes:
        spec: Its spec; None for a result file without one.
        vocabulary: Its candidates; None for a result file.
        created_at: Seconds since the epoch; None for a result file.
        outcomes: The measurements of whole dev splits, example by example.
    """

    result: RunResult
    spec: RunSpec | None = None
    vocabulary: Vocabulary | None = None
    created_at: float | None = None
    untrained: PromptReport | None = None
    outcomes: Mapping[Which, Outcomes] = field(default_factory=dict)

    @cached_property
    def queries(self) -> list[int]:
        """Training queries spent by the end of each round of the history."""
        total, spent = 0, []
        for entry in self.result.history:
            total += entry.queries
            spent.append(total)
        return spent


def read_export(data: bytes) -> ReportedRun:
    """Return a run from its export.

    Raises:
        ResultError: They are damaged, cut, or no export.
    """
    try:
        run, *log, result = [json.loads(line) for line in data.splitlines()]
        if (run.pop("kind"), result.pop("kind")) != ("run", "result"):
            raise ResultError("its first line must be a run, and its last line a result")
        found = _result(result)
        # The newest measurement of each prompt, if it agrees with the result.
        outcomes = newest_outcomes(
            LogEntry(kind=one.pop("kind"), body=json.dumps(one)) for one in log
        )
        return ReportedRun(
            result=found,
            spec=RunSpec.model_validate_json(json.dumps(run["spec"])),
            vocabulary=Vocabulary.parse(json.dumps(run["candidates"])),
            created_at=run["created_at"],
            untrained=PromptReport.model_validate(run["untrained"]),
            outcomes={
                which: one
                for which, one in outcomes.items()
                if getattr(found.metric, which) is not None
            },
        )
    except ValidationError as exc:
        raise ResultError(f"it is no export of a run: {first_error(exc)}") from exc
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise ResultError("it is no export of a run") from exc


def read_run(path: Path, spec: RunSpec | None = None) -> ReportedRun:
    """Return a run from a file: an export, or a result that `--json` wrote."""
    data = _read(path)
    try:
        document = _json(data)
        if document is None:
            return read_export(data)
        result = _result(document)
    except (ResultError, ValidationError) as exc:
        wanted = "must be an export (fedone runs export) or a result (--json)"
        reason = first_error(exc) if isinstance(exc, ValidationError) else str(exc)
        raise ResultError(f"{path}: {wanted}; {reason}") from exc
    if spec is not None and spec.name != result.name:
        raise SpecError(f"name: is {spec.name!r}, the result is of {result.name!r}")
    return ReportedRun(result=result, spec=spec)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise ResultError(f"{path}: {exc.strerror or exc}") from exc
    if len(data) > _MAX_BYTES:
        raise ResultError(f"{path}: is larger than {_MAX_BYTES} bytes")
    return data


def _json(data: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _result(document: dict[str, Any]) -> RunResult:
    return RunResult.model_validate_json(json.dumps(document))
