"""The stores under the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fedone_sdk.stores import MemoryStore, Store
from tests.console import fedone
from tests.contract.stores import opened

__all__ = ["fedone", "store"]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    where: Path | str = tmp_path / "store.db"
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        where = server.url(request.getfixturevalue("database"))
    async with opened(where) as sql_store:
        yield sql_store
