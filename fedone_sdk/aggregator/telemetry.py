"""Metrics and OpenTelemetry traces; `Observers` has both.

Prometheus and OpenTelemetry are imported only if they are enabled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from structlog.contextvars import bind_contextvars, get_contextvars

from fedone_sdk import __version__
from fedone_sdk.errors import needs_extra

if TYPE_CHECKING:
    from aiohttp import web
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from fedone_sdk.aggregator.prometheus import Metrics
    from fedone_sdk.backends import LLMBackend, Query

RequestLevel = Literal["off", "debug", "info"]
"""Level of the log line that each request gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """Observers of HTTP requests, commits and requests to the model."""

    metrics: Metrics | None = None
    tracing: Tracing | None = None
    request_level: RequestLevel = "off"

    @classmethod
    def create(
        cls,
        *,
        metrics: bool,
        traces: bool,
        endpoint: str | None,
        request_level: RequestLevel,
    ) -> Self:
        """Return the observers of a server; the caller closes them when the server has stopped.

        Args:
            metrics: Whether Prometheus metrics are collected.
            traces: Whether OpenTelemetry traces are exported.
            endpoint: URL of the traces' collector, such as ``http://127.0.0.1:4318/v1/traces``;
                None uses OpenTelemetry's environment variables.
            request_level: Level of the log line that each request gets.

        Raises:
            MissingExtraError: Prometheus' or OpenTelemetry's packages are not installed.
        """
        collected = None
        if metrics:
            from fedone_sdk.aggregator.prometheus import Metrics

            collected = Metrics()
        tracing = Tracing.otlp(endpoint) if traces else None
        return cls(metrics=collected, tracing=tracing, request_level=request_level)

    def close(self) -> None:
        """Export the remaining spans, which may take a few seconds."""
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
        with (
            nullcontext() if self.tracing is None else self.tracing.model_request(backend, query),
            nullcontext() if self.metrics is None else self.metrics.model_request(),
        ):
            yield


NO_OBSERVERS = Observers()


class Tracing:
    """Creates one span per HTTP request, commit and request to the model."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("fedone_sdk", __version__)

    @classmethod
    def otlp(cls, endpoint: str | None = None) -> Self:
        """Return tracing that exports over OTLP/HTTP; `endpoint` as in `Observers.create`."""
        with needs_extra("tracing", "tracing"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "fedone"}
        resource = Resource.create({**named, SERVICE_VERSION: __version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def close(self) -> None:
        """Export the remaining spans, which may take a few seconds."""
        self._provider.shutdown()

    @contextmanager
    def _span(
        self, name: str, attributes: Mapping[str, str | int], request: web.Request | None = None
    ) -> Iterator[Span]:
        """Open a span, as a child of a request's W3C ``traceparent`` if a request is given."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        with self._tracer.start_as_current_span(
            name,
            context=None if request is None else extract(request.headers),
            kind=SpanKind.CLIENT if request is None else SpanKind.SERVER,
            attributes=attributes,
            # Error texts may contain private data.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as exc:
                span.set_attribute("error.type", type(exc).__name__)
                span.set_status(StatusCode.ERROR)
                raise

    @contextmanager
    def request(
        self, request: web.Request, facts: Callable[[], Mapping[str, str | int]]
    ) -> Iterator[None]:
        """Open the span of a request; `facts` returns its attributes after the response."""
        from opentelemetry.trace import StatusCode

        known = {"http.request.method": request.method, "url.path": request.path}
        with self._span(request.method, known, request) as span:
            bind_contextvars(trace_id=format(span.get_span_context().trace_id, "032x"))
            try:
                yield
            finally:
                attributes = facts()
                span.set_attributes(attributes)
                if "http.route" in attributes:
                    span.update_name(f"{request.method} {attributes['http.route']}")
                if int(attributes.get("http.response.status_code", 0)) >= 500:
                    span.set_status(StatusCode.ERROR)

    @contextmanager
    def commit(self, run_id: str) -> Iterator[None]:
        """Open the span of a transaction."""
        with self._span("store commit", {"fedone.run_id": run_id}):
            yield

    @contextmanager
    def model_request(self, backend: LLMBackend, query: Query) -> Iterator[None]:
        """Open the span of a request to the model."""
        known: dict[str, str | int] = {
            "fedone.model": backend.fingerprint,
            "fedone.inputs": len(query.inputs),
        }
        if query.payer is not None:
            known["fedone.run_id"] = query.payer.name
        number = get_contextvars().get("round")  # Set while a device's request is answered.
        if number is not None:
            known["fedone.round"] = number
        with self._span("model request", known):
            yield
