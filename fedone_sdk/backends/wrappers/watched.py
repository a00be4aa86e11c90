"""Observation of requests, for metrics and traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.wrapper import Wrapper

Watch = Callable[[LLMBackend, Query], AbstractContextManager[object]]
"""Returns a context manager that wraps one request."""


class WatchedBackend(Wrapper):
    """Wraps every request in a context manager.

    Args:
        inner: The inner backend.
        watch: Called once per request.
    """

    def __init__(self, inner: LLMBackend, watch: Watch) -> None:
        super().__init__(inner)
        self._watch = watch

    async def score(self, query: Query) -> Answer:
        """The inner backend's answer."""
        with self._watch(self.inner, query):
            return await self.inner.score(query)
