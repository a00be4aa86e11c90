"""Trackers: the protocol, their lookup by name, and the delivery of a run's events to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, Self

import structlog

from fedone_sdk.errors import ArgumentError, MissingExtraError
from fedone_sdk.messages import RoundReport, RunResult
from fedone_sdk.spec import RunSpec

if TYPE_CHECKING:
    from fedone_sdk.aggregator import Change, ServedRun

GROUP = "fedone.trackers"
"""The entry point group of trackers."""

_PACKAGES = {"mlflow": "mlflow", "tensorboard": "tensorboardX", "wandb": "wandb"}
"""Package of each built-in tracker. The extra with the tracker's name installs the package."""

_MAX_CHARS = 500
"""Maximum length of a parameter: MLflow's limit, the lowest of the built-in trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The description of a run for trackers."""

    run_id: str
    name: str
    params: Mapping[str, str | int | float | bool] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives the events of one run, on one thread. An exception ends only this tracker."""

    def round(self, report: RoundReport, queries: int) -> None:
        """Record a finished round; `queries` are the training queries up to its end."""

    def metric(self, name: str, value: float, queries: int) -> None:
        """Record the deployable prompt's metric on the dev split."""

    def end(self, result: RunResult | None) -> None:
        """Record the end of the run, as the last call; None means that the run was aborted."""


TrackerFactory = Callable[[TrackedRun], Tracker]
"""Creates the tracker of a run. An entry point of `GROUP` names a factory."""


def find_tracker(name: str) -> TrackerFactory:
    """Load a tracker by the name of its entry point."""
    trackers = {point.name: point for point in entry_points(group=GROUP)}
    if name not in trackers:
        raise ArgumentError(f"--tracker: {name!r} is not one of {', '.join(sorted(trackers))}")
    if name in _PACKAGES and find_spec(_PACKAGES[name]) is None:
        raise MissingExtraError(f"--tracker {name}", extra=name)
    try:
        factory: TrackerFactory = trackers[name].load()
    except Exception as exc:  # A third-party module can raise anything.
        reason = f"{type(exc).__name__}: {exc}"
        raise ArgumentError(f"--tracker: {name} cannot be loaded: {reason}") from exc
    return factory


def summary_of(result: RunResult) -> dict[str, float]:
    """Return metric, cost and time by name; unknown numbers are omitted."""
    metric = result.metric
    numbers = {
        **{f"{metric.name}_{at}": getattr(metric, at) for at in ("no_prompt", "before", "after")},
        **{f"spent_{unit}": amount for unit, amount in result.spent},
        "rounds": result.rounds,
        "evaluation_queries": result.evaluation.queries,
        "cache_hits": result.cache.hits,
        "wall_s": result.wall_s,
    }
    if not result.priced:
        del numbers["spent_usd"]
    return {name: float(value) for name, value in numbers.items() if value is not None}


def params_of(spec: RunSpec) -> dict[str, str | int | float | bool]:
    """Return a run's spec with flat keys and short values; null and empty values are omitted."""
    return dict(_flat("", spec.model_dump(mode="json", exclude={"name"})))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (int, float, bool)):
        yield prefix, value
    elif value:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield prefix, text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."


_log = structlog.get_logger(__name__)

_PATIENCE_S = 60.0
"""Longest wait for a tracker to finish writing after a run, seconds."""

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


class Tracking:
    """Sends the events of one run to trackers.

    Each tracker has a thread, so that a slow tracker delays nothing else. If a tracker raises, the
    error is logged, and the tracker gets no more events. Leaving the ``with`` block waits until all
    events are written. Pass an instance to `simulate` as `watch`, or call `begin`, `add` and `end`.
    """

    def __init__(self, trackers: Mapping[str, TrackerFactory]) -> None:
        self._trackers = trackers
        self._workers: list[_Worker] = []
        self._metric = "metric"
        self._spent = 0
        # For each round that was sent, the training queries up to its end.
        self._queries: dict[int, int] = {}
        self._measured: set[int] = set()
        self._result: RunResult | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        result = self._result
        self._send(lambda tracker: tracker.end(result))
        for worker in self._workers:
            worker.send(None)
        for worker in self._workers:
            worker.wait()

    def __call__(self, run: ServedRun, change: Change | None) -> None:
        """Send new events of a run."""
        if not self._workers:
            params = params_of(run.spec)
            tracked = TrackedRun(run_id=run.run_id, name=run.spec.name, params=params)
            self.begin(tracked, metric=run.spec.task.metric)
        if change is not None and change.back_to is not None:  # After a rollback.
            self._queries = {n: q for n, q in self._queries.items() if n < change.back_to}
            self._measured = {n for n in self._measured if n < change.back_to}
        elif change is None or change.finished is not None:
            start = 0 if run.spec.evaluation.every else len(self._queries)
            for report in run.history[start:]:
                self.add(report)

    @property
    def active(self) -> bool:
        """Whether there are any trackers."""
        return bool(self._trackers)

    def begin(self, run: TrackedRun, *, metric: str = "metric") -> None:
        """Create the trackers."""
        self._metric = metric
        self._workers = [_Worker(name, make, run) for name, make in self._trackers.items()]
        for worker in self._workers:
            worker.start()

    def add(self, report: RoundReport) -> None:
        """Send a round and its metric, unless they were sent before."""
        if report.round not in self._queries:
            self._spent += report.queries
            self._queries[report.round] = spent = self._spent
            self._send(lambda tracker: tracker.round(report, spent))
        if report.metric is not None and report.round not in self._measured:
            self._measured.add(report.round)
            value, queries = report.metric, self._queries[report.round]
            self._send(lambda tracker: tracker.metric(self._metric, value, queries))

    def end(self, result: RunResult) -> None:
        """Set the run's result, which is sent on exit."""
        for report in result.history:
            self.add(report)
        self._result = result

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            worker.send(call)


class _Worker(Thread):
    def __init__(self, tracker: str, factory: TrackerFactory, run: TrackedRun) -> None:
        # A daemon thread, because a tracker that blocks must not keep the process alive.
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self._tracker, self._factory, self._tracked = tracker, factory, run
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._failed = False

    def send(self, call: Callable[[Tracker], None] | None) -> None:
        """Queue a call; None ends the thread."""
        if not self._failed:  # A failed worker does not read its queue.
            self._calls.put(call)

    def wait(self) -> None:
        self.join(_PATIENCE_S)
        if self.is_alive():
            _log.warning("a tracker has not finished", tracker=self._tracker, waited_s=_PATIENCE_S)

    def run(self) -> None:
        try:
            tracker = self._factory(self._tracked)
            while (call := self._calls.get()) is not None:
                call(tracker)
        except Exception as exc:
            self._failed = True
            reason = _CREDENTIALS.sub("***@", " ".join(f"{type(exc).__name__}: {exc}".split()))
            _log.warning(
                "a tracker failed; the run continues without it",
                tracker=self._tracker,
                reason=reason[:300],
            )
