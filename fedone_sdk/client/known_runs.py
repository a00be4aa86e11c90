"""What a device knows of the runs that it works for, fetched once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from fedone_sdk.messages import RunTask
from fedone_sdk.vocabulary import Vocabulary

__all__ = ["KnownRuns"]

_MOST = 8
"""Runs that are kept at hand; the one that was asked for least lately makes room."""

T = TypeVar("T")


class KnownRuns:
    """Tasks and vocabularies by run.

    Args:
        task: Fetches a run's task.
        vocabulary: Fetches a run's candidates.
    """

    def __init__(
        self,
        task: Callable[[str], Awaitable[RunTask]],
        vocabulary: Callable[[str], Awaitable[Vocabulary]],
    ) -> None:
        self._tasks = _Recent(task)
        self._vocabularies = _Recent(vocabulary)

    async def task(self, run_id: str) -> RunTask:
        """What must be known of a run."""
        return await self._tasks.get(run_id)

    async def vocabulary(self, run_id: str) -> Vocabulary:
        """A run's candidates."""
        return await self._vocabularies.get(run_id)

    def forget(self) -> None:
        """Forgets all: another server may have other runs of the same names."""
        self._tasks.clear()
        self._vocabularies.clear()


class _Recent(Generic[T]):
    def __init__(self, fetch: Callable[[str], Awaitable[T]]) -> None:
        self._fetch = fetch
        self._known: OrderedDict[str, T] = OrderedDict()

    async def get(self, run_id: str) -> T:
        if run_id not in self._known:
            self._known[run_id] = await self._fetch(run_id)
        self._known.move_to_end(run_id)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        return self._known[run_id]

    def clear(self) -> None:
        self._known.clear()
