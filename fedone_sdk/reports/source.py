"""A run to report on or to start from: an archive, with its log, or a result file, without it."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedone_sdk.aggregator.archives.reading import read_archive
from fedone_sdk.aggregator.rounds.replay import machine_of
from fedone_sdk.aggregator.serving.run_view import RunView
from fedone_sdk.clock import SystemClock
from fedone_sdk.errors import ArchiveError, SpecError
from fedone_sdk.evaluation.outcomes import Outcomes, Which, newest_outcomes
from fedone_sdk.messages import PromptReport, RunResult
from fedone_sdk.messages.forms import first_error
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import LogEntry, RunSnapshot
from fedone_sdk.vocabulary import Vocabulary

_GZIP = b"\x1f\x8b"
_MAX_RESULT_BYTES = 1 << 28

_START_SHARE = 0.8
"""Probability of a prompt's tokens in a warm start if the earlier alpha is not known."""

_START_TOKENS = 32
"""Maximum tokens of a position in a warm start."""


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """The available data of a run.

    Attributes:
        result: Its result so far, or its final result.
        spec: Its spec; None for a result file without one.
        vocabulary: Its candidates; None as above.
        snapshot: Its records in a store; None as above.
        alpha: Its state, shape (n, N), float32; None as above.
        untrained: Its initial prompt; None as above.
        outcomes: The measurements of whole dev splits, example by example.
    """

    result: RunResult
    spec: RunSpec | None = None
    vocabulary: Vocabulary | None = None
    snapshot: RunSnapshot | None = None
    alpha: NDArray[np.float32] | None = None
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


async def run_of_archive(data: bytes) -> ReportedRun:
    """Return a run from an archive, without replaying it.

    Args:
        data: An archive, written by `fedone runs export`.

    Raises:
        ArchiveError: It is damaged, or not an archive.
    """
    snapshot = read_archive(data, computes=False).snapshot
    run = await _view(snapshot)
    result = run.result()
    # The newest measurement of each prompt, if it agrees with the result.
    outcomes = {
        which: one
        for which, one in newest_outcomes(snapshot.log).items()
        if getattr(result.metric, which) is not None
    }
    if result.verdict is None and "after" in outcomes:  # From an earlier version.
        result = result.model_copy(update={"verdict": run.compute_verdict(outcomes)})
    return ReportedRun(
        result=result,
        spec=run.spec,
        vocabulary=run.vocabulary,
        snapshot=snapshot,
        alpha=run.state.method.alpha,
        untrained=run.prompt(run.machine.initial_state()),
        outcomes=outcomes,
    )


async def read_run(path: Path, spec: RunSpec | None = None) -> ReportedRun:
    """Return a run from a file: an archive, or a result that `--json` wrote.

    Args:
        path: The file.
        spec: The run's spec, for a result file, which does not contain it.

    Raises:
        ArchiveError: The file cannot be used.
        SpecError: The spec is that of another run.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_RESULT_BYTES + 1)
    except OSError as exc:
        raise ArchiveError(f"{path}: {exc.strerror or exc}") from exc
    if len(data) > _MAX_RESULT_BYTES:
        raise ArchiveError(f"{path}: is larger than {_MAX_RESULT_BYTES} bytes")
    if data.startswith(_GZIP):
        try:
            return await run_of_archive(data)
        except ArchiveError as exc:
            raise ArchiveError(f"{path}: {exc}") from exc
    result = _result(path, data)
    if spec is not None and spec.name != result.name:
        raise SpecError(f"name: is {spec.name!r}, the result is of {result.name!r}")
    return ReportedRun(result=result, spec=spec)


def start_of(run: ReportedRun) -> tuple[dict[str, float], ...]:
    """Return a run's alpha as a `PromptSpec.start`; for a result file, its prompt's tokens.

    Each position has its most likely tokens, as far as they are more likely than the average one,
    because the new run may have other candidates.

    Args:
        run: The earlier run.
    """
    if run.alpha is None or run.vocabulary is None:
        return tuple({token: _START_SHARE} for token in run.result.prompt.tokens)
    weights = run.alpha.astype(np.float64)
    start = []
    for position, row in enumerate(weights / weights.sum(axis=1, keepdims=True)):
        candidates = run.vocabulary.of_position(position)
        row = row[: len(candidates)]
        likeliest = [
            at for at in np.argsort(-row, kind="stable")[:_START_TOKENS] if row[at] > row.mean()
        ]
        # Rounded down, so that they do not sum to more than 1.
        shares = {at: math.floor(row[at] * 1e6) / 1e6 for at in likeliest}
        start.append({candidates[at]: share for at, share in shares.items() if share})
    return tuple(start)


def _result(path: Path, data: bytes) -> RunResult:
    wanted = "must be an archive (fedone runs export) or a result (--json)"
    try:
        document = json.loads(data)
        if isinstance(document, dict):
            document.pop("losses_exchange", None)  # Keys that `fedone quickstart` adds.
        return RunResult.model_validate_json(json.dumps(document))
    except ValidationError as exc:
        raise ArchiveError(f"{path}: {wanted}; {first_error(exc)}") from exc
    except (ValueError, RecursionError) as exc:
        raise ArchiveError(f"{path}: {wanted}") from exc


async def _view(snapshot: RunSnapshot) -> RunView:
    vocabulary = Vocabulary.parse(snapshot.record.candidates)
    view = RunView(machine_of(snapshot), vocabulary, SystemClock())
    await view.read(snapshot.record, _one_page(snapshot.log))
    return view


async def _one_page(log: Sequence[LogEntry]) -> AsyncIterator[Sequence[LogEntry]]:
    yield log
