"""Records and steps that the tests of stores share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.engine import URL

from fedone_sdk.stores import (
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    RunRecord,
    SqlStore,
    Store,
    StoredMemory,
    TokenRecord,
)

RUN = RunRecord(
    run_id="run-1",
    spec='{"rounds": 3}',
    candidates='["good", "naïve", "日本", "🙂", "\'; --"]',
    document='{"round": 0}',
    arrays=bytes(range(256)),
    version=0,
    created_at=1_700_000_000.123456,
)
WORK = ClosedWork(
    assignment_id="work-1",
    run_id="run-1",
    client_index=0,
    outcome="accepted",
    body_sha256="ab" * 32,
    receipt='{"ok": true}',
)
TOKEN = TokenRecord(name="everyone", token_sha256="e" * 64, created_at=0.5)


def device(number: int, **fields: Any) -> ClientRecord:
    """A client that is not enrolled yet."""
    usual: dict[str, Any] = {
        "index": -1,
        "client_id": f"client-{number}",
        "credential_sha256": f"{number:064x}",
        "enrolled_at": 0.1,
    }
    return ClientRecord(**{**usual, **fields})


async def enrol(store: Store, number: int, **fields: Any) -> ClientRecord:
    """Enrols a client with a token for everyone."""
    await store.put_token(TOKEN)
    return await store.enrol(device(number, **fields), TOKEN.token_sha256, 1.0)


def everything(*closed: ClosedWork, signal: str | None = "never") -> Commit:
    """A commit that touches all there is."""
    return Commit(
        document="never",
        arrays=b"never",
        closed=closed,
        log=(LogEntry(kind="a", body="never"),),
        memories=(StoredMemory(client_index=0, round=1, value=b"never"),),
        signal=signal,
    )


@asynccontextmanager
async def opened(where: str | Path | URL, **options: Any) -> AsyncIterator[SqlStore]:
    """A store, open for a while: a SQLite file or a URL."""
    make = SqlStore.sqlite if isinstance(where, Path) else SqlStore.at
    store = make(where, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for what another process or connection brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
