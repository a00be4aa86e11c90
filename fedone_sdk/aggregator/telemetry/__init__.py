"""Metrics and traces, bundled as one argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from structlog.contextvars import get_contextvars

if TYPE_CHECKING:
    from fedone_sdk.aggregator.telemetry.prometheus import Metrics
    from fedone_sdk.aggregator.telemetry.tracing import Tracing
    from fedone_sdk.backends import LLMBackend, Query

RequestLevel = Literal["off", "debug", "info"]
"""Level of the log line that each request gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """Observers of requests, commits and model requests."""

    metrics: Metrics | None = None
    tracing: Tracing | None = None
    request_level: RequestLevel = "off"

    @classmethod
    def create(
        cls,
        *,
        metrics: bool = False,
        traces: bool = False,
        endpoint: str | None = None,
        request_level: RequestLevel = "off",
    ) -> Self:
        """Return the observers of a server; `close` them at its end.

        Args:
            metrics: Whether Prometheus metrics are collected.
            traces: Whether OpenTelemetry traces are exported.
            endpoint: URL of their collector; None uses OpenTelemetry's environment variables.
            request_level: As the attribute.

        Raises:
            MissingExtraError: A package of them is not installed.
        """
        tracing = counted = None
        if metrics:
            from fedone_sdk.aggregator.telemetry.prometheus import Metrics

            counted = Metrics()
        if traces:
            from fedone_sdk.aggregator.telemetry.tracing import Tracing

            tracing = Tracing.otlp(endpoint)
        return cls(metrics=counted, tracing=tracing, request_level=request_level)

    def close(self) -> None:
        """Export the remaining spans; waits a few seconds."""
        if self.tracing is not None:
            self.tracing.close()

    @contextmanager
    def commit(self, run_id: str) -> Iterator[None]:
        """Observe a transaction of a run."""
        with (
            nullcontext() if self.tracing is None else self.tracing.commit(run_id),
            nullcontext() if self.metrics is None else self.metrics.commit(),
        ):
            yield

    @contextmanager
    def model_request(self, backend: LLMBackend, query: Query) -> Iterator[None]:
        """Observe a request to the model."""
        run_id = None if query.payer is None else query.payer.name
        number = get_contextvars().get("round")  # Of the request that pays for it.
        trace = self.tracing and self.tracing.model_request(backend, query, run_id, number)
        with (
            trace or nullcontext(),
            nullcontext() if self.metrics is None else self.metrics.model_request(),
        ):
            yield


NO_OBSERVERS = Observers()
