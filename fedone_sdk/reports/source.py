"""A run for reports, read from its export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from pydantic import ValidationError

from fedone_sdk.errors import ResultError, system_errors
from fedone_sdk.evaluation.outcomes import Outcomes, Which, newest_outcomes
from fedone_sdk.messages import PromptReport, RunResult, first_error
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import LogEntry
from fedone_sdk.vocabulary import Vocabulary

_MAX_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """The data of a run for reports.

    Attributes:
        created_at: Seconds since the epoch.
        untrained: The prompt before the first round.
        outcomes: The newest measurement of each prompt on the whole dev split.
    """

    result: RunResult
    spec: RunSpec
    vocabulary: Vocabulary
    created_at: float
    untrained: PromptReport
    outcomes: Mapping[Which, Outcomes] = field(default_factory=dict)

    @cached_property
    def queries(self) -> list[int]:
        """Training queries spent by the end of each round of the history."""
        return list(accumulate(entry.queries for entry in self.result.history))


def read_export(data: bytes) -> ReportedRun:
    """Return a run from its export.

    Raises:
        ResultError: The data is damaged, truncated, or not an export.
    """
    try:
        run, *log, result = [json.loads(line) for line in data.splitlines()]
        if (run.pop("kind"), result.pop("kind")) != ("run", "result"):
            raise ResultError(
                "the first line of an export must be a run, and its last line a result"
            )
        report = RunResult.model_validate_json(json.dumps(result))
        outcomes = newest_outcomes(
            LogEntry(kind=one.pop("kind"), body=json.dumps(one)) for one in log
        )
        return ReportedRun(
            result=report,
            spec=RunSpec.model_validate_json(json.dumps(run["spec"])),
            vocabulary=Vocabulary.parse(json.dumps(run["candidates"])),
            created_at=run["created_at"],
            untrained=PromptReport.model_validate(run["untrained"]),
            outcomes={  # Only for prompts whose metric is in the result.
                which: outcome
                for which, outcome in outcomes.items()
                if getattr(report.metric, "after" if which == "cheapest" else which) is not None
            },
        )
    except ValidationError as exc:
        raise ResultError(f"damaged, or not an export of a run: {first_error(exc)}") from exc
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise ResultError("damaged, or not an export of a run (fedone runs export)") from exc


def read_run(path: Path) -> ReportedRun:
    """Return a run from the file of its export."""
    with system_errors(ResultError, path), path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ResultError(f"{path}: is larger than {_MAX_BYTES} bytes")
    try:
        return read_export(data)
    except ResultError as exc:
        raise ResultError(f"{path}: {exc}") from exc
