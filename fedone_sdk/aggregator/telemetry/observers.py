"""Who looks on: metrics and traces, as one thing to hand around."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fedone_sdk.aggregator.telemetry.metrics import Metrics
    from fedone_sdk.aggregator.telemetry.tracing import Tracing
    from fedone_sdk.backends import LLMBackend, Query

__all__ = ["NOBODY", "Observers", "RequestLevel"]

RequestLevel = Literal["off", "debug", "info"]
"""Level of the log line that each request gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """Who is told of requests, commits and requests to the model.

    Attributes:
        metrics: Counts them; None keeps no figures.
        tracing: Makes spans of them; None makes none.
        request_level: Level of the log line of each request.
    """

    metrics: Metrics | None = None
    tracing: Tracing | None = None
    request_level: RequestLevel = "off"

    @contextmanager
    def commit(self, run_id: str) -> Iterator[None]:
        """What is around a transaction of a run."""
        with ExitStack() as stack:
            if self.tracing is not None:
                stack.enter_context(self.tracing.commit(run_id))
            if self.metrics is not None:
                stack.enter_context(self.metrics.commit())
            yield

    @contextmanager
    def model_request(self, backend: LLMBackend, query: Query) -> Iterator[None]:
        """What is around a request to the model."""
        with ExitStack() as stack:
            if self.tracing is not None:
                stack.enter_context(self.tracing.model_request(backend, query))
            if self.metrics is not None:
                stack.enter_context(self.metrics.model_request())
            yield


NOBODY = Observers()
