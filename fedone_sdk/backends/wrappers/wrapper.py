"""Base class of wrappers, and one that observes requests, for metrics and traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fedone_sdk.backends.base import Answer, EmbeddingSpace, LLMBackend, Query
from fedone_sdk.budget import Usage
from fedone_sdk.task import Rendered


class Wrapper(LLMBackend):
    """Delegates all methods to the inner backend; subclasses override some.

    Args:
        inner: The inner backend, closed together with the wrapper.
    """

    def __init__(self, inner: LLMBackend) -> None:
        self.inner = inner
        self._describe()

    def _describe(self) -> None:
        """Copy the inner backend's attributes, which `check` may change."""
        self.bounds = self.inner.bounds
        self.answers = self.inner.answers
        self.max_inputs = self.inner.max_inputs
        self.metered = self.inner.metered
        self.censors = self.inner.censors
        self.takes = self.inner.takes
        self.local = self.inner.local

    @property
    def innermost(self) -> LLMBackend:
        """The adapter inside all wrappers."""
        backend = self.inner
        while isinstance(backend, Wrapper):
            backend = backend.inner
        return backend

    @property
    def fingerprint(self) -> str:
        """Return the inner backend's."""
        return self.inner.fingerprint

    async def score(self, query: Query) -> Answer:
        """Return the inner backend's answer."""
        return await self.inner.score(query)

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Check with the inner backend."""
        await self.inner.check(label_words, form)
        self._describe()

    async def embedding_space(self) -> EmbeddingSpace:
        """Return the inner backend's."""
        return await self.inner.embedding_space()

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """Return the inner backend's."""
        return self.inner.worst_case(batch_size, max_tokens)

    async def quote(self, query: Query) -> Usage:
        """Return the inner backend's."""
        return await self.inner.quote(query)

    async def shortened(self, query: Query) -> object | None:
        """Return the inner backend's."""
        return await self.inner.shortened(query)

    @property
    def trouble(self) -> str | None:
        """Return the inner backend's."""
        return self.inner.trouble

    def reset(self) -> None:
        """Reset the inner backend."""
        self.inner.reset()

    async def aclose(self) -> None:
        """Close the inner backend."""
        await self.inner.aclose()


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
        """Return the inner backend's answer."""
        with self._watch(self.inner, query):
            return await self.inner.score(query)
