"""A backend whose requests somebody watches: metrics, traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.wrapper import Wrapper

__all__ = ["Watch", "WatchedBackend"]

Watch = Callable[[LLMBackend, Query], AbstractContextManager[object]]
"""Makes what is around a request; it sees how the request ends."""


class WatchedBackend(Wrapper):
    """Does every request inside of what `watch` makes for it.

    Args:
        inner: The backend to ask.
        watch: Called once for each request.
    """

    def __init__(self, inner: LLMBackend, watch: Watch) -> None:
        super().__init__(inner)
        self._watch = watch

    async def score(self, query: Query) -> Answer:
        """The inner backend's answer."""
        with self._watch(self.inner, query):
            return await self.inner.score(query)
