"""Where chaos keeps its runs: SQLite files, or databases of a private PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.postgres import Cluster, cluster

Databases = Callable[[], AbstractContextManager[str]]
"""Makes a fresh database, and gives its URL."""


def databases_of(server: Cluster) -> Databases:
    """Fresh databases of a cluster."""

    @contextmanager
    def fresh() -> Iterator[str]:
        name = server.create()
        try:
            yield server.url(name)
        finally:
            server.drop(name)

    return fresh


@contextmanager
def databases_on(store: str) -> Iterator[Databases | None]:
    """Databases for ``postgres``; None for ``sqlite``, which takes files."""
    if store == "sqlite":
        yield None
    else:
        with cluster() as server:
            yield databases_of(server)
