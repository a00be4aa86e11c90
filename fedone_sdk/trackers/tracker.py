"""The tracker protocol, and the lookup of trackers by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Protocol

from fedone_sdk.errors import ArgumentError, MissingExtraError
from fedone_sdk.messages import RoundReport, RunResult
from fedone_sdk.spec import RunSpec

GROUP = "fedone.trackers"
"""The entry point group of trackers."""

_PACKAGES = {"mlflow": "mlflow", "tensorboard": "tensorboardX", "wandb": "wandb"}
"""The packages that built-in trackers need; each has an extra of its name."""

_MOST_CHARS = 500
"""Longest text of a parameter: the smallest limit of the trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The description of a run for trackers.

    Attributes:
        params: Its spec, flat: ``method.name`` and so on. Contains no secrets.
    """

    run_id: str
    name: str
    params: Mapping[str, str | int | float | bool] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives events of one run, on one thread. Its exceptions end the tracking, not the run."""

    def round(self, report: RoundReport, queries: int) -> None:
        """Record a finished round.

        Args:
            report: The round, without its metric, which `metric` reports.
            queries: Training queries spent by its end: the step of the curves.
        """
        ...

    def metric(self, name: str, value: float, queries: int) -> None:
        """Record an evaluation of the deployable prompt on the dev split."""
        ...

    def end(self, result: RunResult | None) -> None:
        """Record the end of the run; the last call.

        Args:
            result: The result; None if unknown, for example after an interruption.
        """
        ...


TrackerFactory = Callable[[TrackedRun], Tracker]
"""Creates the tracker of a run: the object that an entry point names."""


def find_tracker(name: str) -> TrackerFactory:
    """Load a tracker by the name of its entry point."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ArgumentError(f"--tracker: {name!r} is not one of {known}")
    if name in _PACKAGES and find_spec(_PACKAGES[name]) is None:
        raise MissingExtraError(f"--tracker {name}", extra=name)
    try:
        factory: TrackerFactory = found[name].load()
    except Exception as exc:  # A third-party module can raise anything.
        reason = f"{type(exc).__name__}: {exc}"
        raise ArgumentError(f"--tracker: {name} cannot be loaded: {reason}") from exc
    return factory


def summary_of(result: RunResult) -> dict[str, float]:
    """Return metric, cost and time by name, without those that are not measured or priced."""
    metric, spent = result.metric, result.spent
    numbers = {
        f"{metric.name}_no_prompt": metric.no_prompt,
        f"{metric.name}_before": metric.before,
        f"{metric.name}_after": metric.after,
        "rounds": result.rounds,
        "spent_queries": spent.queries,
        "evaluation_queries": result.evaluation.queries,
        "spent_requests": spent.requests,
        "spent_prompt_tokens": spent.prompt_tokens,
        "spent_completion_tokens": spent.completion_tokens,
        "spent_usd": float(spent.usd) if result.priced else None,
        "cache_hits": result.cache.hits,
        "wall_s": result.wall_s,
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}


def params_of(spec: RunSpec) -> dict[str, str | int | float | bool]:
    """Return a run's spec, flat and with short values; null and empty values are omitted.

    >>> from fedone_sdk.glue import glue_task
    >>> spec = RunSpec.model_validate({"task": glue_task("sst2"), "prompt":
    ...     {"vocabulary": {"kind": "pmi"}}})
    >>> params_of(spec)["prompt.vocabulary.kind"]
    'pmi'
    """
    return dict(_flat("", spec.model_dump(mode="json", exclude={"name"})))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (int, float, bool)):
        yield prefix, value
    elif value:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield prefix, text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."
