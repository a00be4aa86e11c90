"""Cache of the tasks and vocabularies of the runs that a device works for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from fedone_sdk.messages import RunTask
from fedone_sdk.vocabulary import Vocabulary

_MOST = 8
"""Runs in the cache; the least recently used one is evicted."""

T = TypeVar("T")


class _FetchVocabulary(Protocol):
    def __call__(
        self, run: RunTask, run_id: str, known: tuple[int, Vocabulary] | None
    ) -> Awaitable[Vocabulary]:
        """Fetch a run's candidates, or those added since a version."""
        ...


class KnownRuns:
    """Tasks and vocabularies by run, each with its version: a run's candidates can grow."""

    def __init__(
        self, task: Callable[[str], Awaitable[RunTask]], vocabulary: _FetchVocabulary
    ) -> None:
        self._fetch_task = task
        self._fetch_vocabulary = vocabulary
        self._tasks = _Recent[RunTask]()
        self._vocabularies = _Recent[tuple[int, Vocabulary]]()

    async def task(self, run_id: str, version: int = 0) -> RunTask:
        """Return a run's task, with at least this version of its candidates."""
        known = self._tasks.get(run_id)
        if known is None or known.vocabulary_version < version:
            known = self._tasks.keep(run_id, await self._fetch_task(run_id))
        return known

    async def vocabulary(self, run_id: str, version: int = 0) -> Vocabulary:
        """Return a run's candidates, in at least this version."""
        known = self._vocabularies.get(run_id)
        if known is None or known[0] < version:
            run = await self.task(run_id, version)
            found = await self._fetch_vocabulary(run, run_id, known)
            known = self._vocabularies.keep(run_id, (run.vocabulary_version, found))
        return known[1]

    def forget(self) -> None:
        """Clear the cache: another server may have other runs of the same names."""
        self._tasks.clear()
        self._vocabularies.clear()


class _Recent(Generic[T]):
    def __init__(self) -> None:
        self._known: OrderedDict[str, T] = OrderedDict()

    def get(self, run_id: str) -> T | None:
        if run_id in self._known:
            self._known.move_to_end(run_id)
        return self._known.get(run_id)

    def keep(self, run_id: str, value: T) -> T:
        self._known[run_id] = value
        self._known.move_to_end(run_id)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        return value

    def clear(self) -> None:
        self._known.clear()
