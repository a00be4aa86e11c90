"""Prometheus metrics: counters of events, and gauges that are read on each scrape."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.aggregator.service import Service
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendBlocked, BackendUnavailable, BudgetExhausted, needs_extra
from fedone_sdk.messages import RunDevices
from fedone_sdk.stores import VersionConflict

with needs_extra("metrics", "server"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

_FAST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_REQUEST_S = (*_FAST_S, 10, 30, 60)
_MODEL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_WAIT_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 20, 30, 60)

_AN_HOUR_S = 3600.0

Labels = tuple[str, ...]

_WAITING = ("/v1/assignments/claim", "/v1/runs/{run_id}/events")
"""Routes whose requests stay open while the server waits for work or events to send."""


class Metrics:
    """The metrics of one aggregator process, in a registry of their own.

    Labels contain routes, problem codes and runs, but no clients. An ended run has metrics for one
    hour, so that the number of label values stays small.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        histogram = partial(Histogram, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        self._requests = histogram(
            "fedone_http_request_duration_seconds",
            "Duration of requests, from the arrival of the head until the response is ready",
            ("method", "route", "status"),
            buckets=_REQUEST_S,
        )
        self._in_progress = Gauge(
            "fedone_requests_in_progress",
            "Requests in progress on this replica, except requests that wait for work or events",
            registry=self.registry,
        )
        self._refusals = counter(
            "fedone_http_problems", "Refused requests, by problem code", ("code",)
        )
        self._claims = histogram(
            "fedone_claim_wait_seconds",
            "How long a claim waited, by outcome: assigned, turned_away (204), or a problem code",
            ("outcome",),
            buckets=_WAIT_S,
        )
        self._bytes = counter(
            "fedone_http_body_bytes",
            "Size of request (up) and response (down) bodies of devices' routes",
            ("route", "direction"),
        )
        self._updates = counter(
            "fedone_updates",
            "Updates, by outcome: accepted, or a problem code",
            ("outcome",),
        )
        self._commits = histogram(
            "fedone_store_commit_duration_seconds",
            "Duration of a run's transaction, by outcome: ok, conflict (another replica was first, "
            "and the change is repeated) or error",
            ("outcome",),
            buckets=_FAST_S,
        )
        self._model_requests = histogram(
            "fedone_llm_request_duration_seconds",
            "Duration of a request to the language model, by outcome: ok, unavailable, blocked, "
            "refused or cancelled",
            ("outcome",),
            buckets=_MODEL_S,
        )

    def watch(self, service: Service) -> None:
        """Register the metrics of a service's runs and clients."""
        self.registry.register(_ServiceFigures(service))

    def exposition(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and its content type."""
        return exposition.generate_latest(self.registry), exposition.CONTENT_TYPE_LATEST

    @contextmanager
    def track_request(self, route: str) -> Iterator[None]:
        """Count a request while it is being answered."""
        if route in _WAITING:
            yield
            return
        with self._in_progress.track_inprogress():
            yield

    def count_response(
        self, method: str, route: str, status: int, problem: str | None, seconds: float
    ) -> None:
        """Count a response."""
        self._requests.labels(method if route else "", route, str(status)).observe(seconds)
        if problem is not None:
            self._refusals.labels(problem).inc()
        if route == "/v1/assignments/claim":
            outcome = problem or ("assigned" if status == 200 else "turned_away")
            self._claims.labels(outcome).observe(seconds)
        elif route == "/v1/assignments/{assignment_id}/update":
            self._updates.labels(problem or "accepted").inc()

    def count_bytes(self, route: str, upload: int, download: int) -> None:
        """Count the sizes of a request and a response body."""
        self._bytes.labels(route, "up").inc(upload)
        self._bytes.labels(route, "down").inc(download)

    def commit(self) -> AbstractContextManager[None]:
        """Measure the duration of a transaction."""
        return _measured(self._commits, {VersionConflict: "conflict"}, "error")

    def model_request(self) -> AbstractContextManager[None]:
        """Measure the duration of a request to the model."""
        return _measured(self._model_requests, _MODEL_OUTCOMES, "cancelled")


_MODEL_OUTCOMES = {
    BackendUnavailable: "unavailable",
    BackendBlocked: "blocked",
    BudgetExhausted: "blocked",
    Exception: "refused",
}


@contextmanager
def _measured(
    histogram: Histogram, outcomes: Mapping[type[Exception], str], otherwise: str
) -> Iterator[None]:
    """Measure the ``with`` block; an exception is labelled by `outcomes`, or by `otherwise`."""
    began, outcome = time.perf_counter(), otherwise
    try:
        yield
        outcome = "ok"
    except Exception as exc:
        names = (name for kind, name in outcomes.items() if isinstance(exc, kind))
        outcome = next(names, otherwise)
        raise
    finally:
        histogram.labels(outcome).observe(time.perf_counter() - began)


class _ServiceFigures(Collector):
    """Metrics of the service's state, which is read on each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registration does not call `collect`."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        service = self._service
        changes = CounterMetricFamily(
            "fedone_access_changes",
            "Changes of enrolment tokens, and revocations of devices, by this replica",
            labels=("change",),
        )
        for change, count in service.access.changes.items():
            changes.add_metric((change,), count)
        yield changes
        for name, text, value in self._gauges():
            yield GaugeMetricFamily(f"fedone_{name}", text, value)
        yield from self._run_metrics()

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        service, replicas = self._service, self._service.replicas
        dispatcher, access = service.dispatcher, service.access
        yield "clients_enrolled", "Enrolled devices known to this replica", access.num_clients
        yield "clients_waiting", "Devices that wait for work", len(dispatcher.pool)
        text = "Devices that got a Retry-After and have not returned"
        yield "clients_away", text, dispatcher.pool.num_away
        yield "long_polls", "Open long polls on this replica", dispatcher.num_polls
        yield "replicas", "Replicas on this store, including this one", replicas.num_alive
        yield "leader", "Whether this replica is the leader", replicas.is_leader
        text = "Whether the gateway's model is available (1) or not (0)"
        yield "model_available", text, service.trouble is None

    def _run_metrics(self) -> Iterator[Metric]:
        runs = list(self._service.runs.values())
        statuses = Tally("paused" if r.state.paused else r.state.status for r in runs)
        statuses.update(stored.summary.status for stored in self._service.registry.stored.values())
        by_status = GaugeMetricFamily("fedone_runs", "Runs, by status", labels=("status",))
        for status, count in sorted(statuses.items()):
            by_status.add_metric((status,), count)
        yield by_status
        families = {
            name: family(f"fedone_{name}", text, labels=("run", *labels))
            for name, family, text, labels in _RUN_FIGURES
        }
        recently = self._service.clock.now() - _AN_HOUR_S
        for run in runs:
            ended_at = run.state.ended_at
            if run.state.running or run.state.paused or ended_at is None or ended_at > recently:
                devices = self._service.dispatcher.count_devices(run, reasons=False)
                for name, labels, value in _figures_of(run, devices):
                    families[name].add_metric((run.run_id, *labels), value)
        yield from families.values()


_RUN_FIGURES: tuple[tuple[str, type[CounterMetricFamily | GaugeMetricFamily], str, Labels], ...] = (
    ("run_rounds", CounterMetricFamily, "Finished rounds", ()),
    ("run_spent", CounterMetricFamily, "Spending, without queries of the evaluation", ("unit",)),
    ("run_leased", GaugeMetricFamily, "Usage reserved for open work", ("unit",)),
    ("run_left", GaugeMetricFamily, "Remaining usage under the caps, by capped unit", ("unit",)),
    ("run_label_values", CounterMetricFamily, "Label log-probabilities from the model", ()),
    (
        "run_label_values_censored",
        CounterMetricFamily,
        "Label log-probabilities from the model that are only upper bounds",
        (),
    ),
    ("run_cache_hits", CounterMetricFamily, "Inputs answered from a cache", ()),
    ("run_mean_loss", GaugeMetricFamily, "Mean loss of the newest round", ()),
    ("run_spent_usd", GaugeMetricFamily, "Cost of training and evaluation, if it is known", ()),
    ("run_metric", GaugeMetricFamily, "Newest metric on the dev rows, by prompt", ("which",)),
    (
        "run_gain",
        GaugeMetricFamily,
        "Gain of the tuned prompt over its baseline, and the bounds of its 95 % interval; "
        "positive is better",
        ("bound",),
    ),
    ("clients_quarantined", GaugeMetricFamily, "Devices in quarantine", ()),
    ("run_devices_connected", GaugeMetricFamily, "Connected devices that may work for a run", ()),
    ("run_devices_fit", GaugeMetricFamily, "Connected devices that have not declined the run", ()),
)


def _figures_of(run: ServedRun, devices: RunDevices) -> Iterator[tuple[str, Labels, float]]:
    account, counters = run.state.account, run.counters
    yield "run_rounds", (), run.state.round
    for name, usage in (("run_spent", account.spent), ("run_leased", account.leased)):
        for unit in Usage.model_fields:
            yield name, (unit,), float(getattr(usage, unit))
        # `tokens` is the unit of a cap on prompt and completion tokens together.
        yield name, ("tokens",), float(usage.prompt_tokens + usage.completion_tokens)
    if account.cap is not None:
        for unit, cap, committed in account.cap.pairs(account.held):
            yield "run_left", (unit,), float(cap - committed)
    yield "run_label_values", (), counters.values
    yield "run_label_values_censored", (), counters.censored
    yield "run_cache_hits", (), counters.cache_hits
    if run.history:
        yield "run_mean_loss", (), run.history[-1].mean_loss
    if not counters.unpriced:
        yield "run_spent_usd", (), float(account.spent.usd)
    for standing in run.standings:
        if standing.value is not None:
            yield "run_metric", (standing.name,), standing.value
    verdict = run.state.verdict
    base = None if verdict is None or verdict.against is None else verdict.standing(verdict.against)
    if base is not None and base.gain is not None:
        for bound in ("value", "low", "high"):
            yield "run_gain", (bound,), getattr(base.gain, bound)
    yield "clients_quarantined", (), len(run.state.quarantined)
    yield "run_devices_connected", (), devices.connected
    yield "run_devices_fit", (), devices.fit
