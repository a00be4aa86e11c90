"""A store with observed commits, for metrics and traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from fedone_sdk.stores.base import Commit, Store

Watch = Callable[[str], AbstractContextManager[object]]
"""Returns a context manager that surrounds a commit to the run of this id."""


def watched(store: Store, watch: Watch) -> Store:
    """Return a store whose commits run inside the context manager of `watch`."""
    return cast(Store, _WatchedStore(store, watch))


class _WatchedStore:
    """Delegates all methods but `commit` to the wrapped store."""

    def __init__(self, store: Store, watch: Watch) -> None:
        self._store = store
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        with self._watch(run_id):
            await self._store.commit(run_id, version, commit)
