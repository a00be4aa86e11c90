"""A store whose commits somebody watches: metrics, traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from fedone_sdk.stores.base import Commit, Store

__all__ = ["Watch", "watched"]

Watch = Callable[[str], AbstractContextManager[object]]
"""Makes what is around a commit to the run of this id; it sees how the commit ends."""


def watched(store: Store, watch: Watch) -> Store:
    """A store that does every commit inside of what `watch` makes for it."""
    return cast(Store, _WatchedStore(store, watch))


class _WatchedStore:
    """Commits itself and is otherwise the store inside, whatever that can do."""

    def __init__(self, store: Store, watch: Watch) -> None:
        self._store = store
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        with self._watch(run_id):
            await self._store.commit(run_id, version, commit)
