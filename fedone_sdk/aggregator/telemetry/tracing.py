"""OpenTelemetry traces: one span per request, commit and model request.

No other module imports this one, so that OpenTelemetry is loaded only if tracing is enabled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import structlog

from fedone_sdk import __version__
from fedone_sdk.errors import needs_extra

with needs_extra("tracing", "tracing"):
    from opentelemetry.context import Context
    from opentelemetry.propagate import extract
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode

if TYPE_CHECKING:
    from aiohttp import web

    from fedone_sdk.backends import LLMBackend, Query


class Tracing:
    """Creates spans, with the parent from the request's W3C ``traceparent``."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("fedone_sdk", __version__)

    @classmethod
    def otlp(cls, endpoint: str | None = None) -> Self:
        """Return tracing that exports over OTLP/HTTP.

        Args:
            endpoint: URL of the collector, such as ``http://127.0.0.1:4318/v1/traces``; None uses
                OpenTelemetry's environment variables.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "fedone"}
        resource = Resource.create({**named, SERVICE_VERSION: __version__})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def close(self) -> None:
        """Export the remaining spans; waits a few seconds."""
        self._provider.shutdown()

    @contextmanager
    def _span(self, name: str, kind: SpanKind, parent: Context | None = None) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            name,
            context=parent,
            kind=kind,
            # Error texts may contain private data.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as exc:
                span.set_attribute("error.type", type(exc).__name__)
                span.set_status(Status(StatusCode.ERROR))
                raise

    @contextmanager
    def request(
        self, request: web.Request, facts: Callable[[], Mapping[str, str | int]]
    ) -> Iterator[None]:
        """Span of a request to this server; `facts` returns its attributes once it is answered."""
        parent = extract(request.headers)
        with self._span(request.method, SpanKind.SERVER, parent) as span:
            trace_id = format(span.get_span_context().trace_id, "032x")
            structlog.contextvars.bind_contextvars(trace_id=trace_id)
            span.set_attribute("http.request.method", request.method)
            span.set_attribute("url.path", request.path)
            try:
                yield
            finally:
                attributes = facts()
                span.set_attributes(attributes)
                if "http.route" in attributes:
                    span.update_name(f"{request.method} {attributes['http.route']}")
                if int(attributes.get("http.response.status_code", 0)) >= 500:
                    span.set_status(Status(StatusCode.ERROR))

    @contextmanager
    def commit(self, run_id: str) -> Iterator[None]:
        """Span of a transaction."""
        with self._span("store commit", SpanKind.CLIENT) as span:
            span.set_attribute("fedone.run_id", run_id)
            yield

    @contextmanager
    def model_request(
        self, backend: LLMBackend, query: Query, run_id: str | None, round_number: int | None
    ) -> Iterator[None]:
        """Span of a request to the model."""
        with self._span("model request", SpanKind.CLIENT) as span:
            span.set_attribute("fedone.model", backend.fingerprint)
            span.set_attribute("fedone.inputs", len(query.inputs))
            if run_id is not None:
                span.set_attribute("fedone.run_id", run_id)
            if round_number is not None:
                span.set_attribute("fedone.round", round_number)
            yield
