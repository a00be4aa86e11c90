"""Attacks on what was deleted: by a reader of the disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fedone_sdk.client import EdgeClient
from fedone_sdk.stores import Commit, LogEntry, SqlStore
from tests.attacks import Succeeded, attack
from tests.contract.stores import RUN, TOKEN, device
from tests.integration.caller import TOKEN as ENROLMENT
from tests.integration.caller import served
from tests.runs import run_spec

SECRET = "Jane Doe lives at 4 Elm Street"


@contextmanager
def _other_build() -> Iterator[None]:
    """SQLite as built by others than Debian: content is not overwritten unless the program asks."""
    connect = sqlite3.connect

    def without(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        db.execute("PRAGMA secure_delete=OFF")
        return db

    with (
        patch.object(sqlite3, "connect", without),
        patch.object(sqlite3.dbapi2, "connect", without),
    ):
        yield


def _leaks(folder: Path, secret: bytes) -> list[str]:
    return [file.name for file in sorted(folder.iterdir()) if secret in file.read_bytes()]


@attack(
    "the disk is read after a run and a client were deleted",
    before="texts of the log in fedone.db and fedone.db-wal",
)
async def _read_deleted_run(folder: Path) -> str:
    long = SECRET + "." * 20_000  # On pages of its own.
    with _other_build():
        store = SqlStore.sqlite(folder / "fedone.db")
        await store.open()
        try:
            await store.add_run(RUN)
            await store.put_token(TOKEN)
            await store.enrol(device(0, name=SECRET), TOKEN.token_sha256, 1.0)
            for version, text in enumerate((SECRET, long)):
                line = LogEntry(kind="lost", body=text)
                await store.commit(RUN.run_id, version, Commit(document=text, log=(line,)))
            assert _leaks(folder, SECRET.encode()), "nothing was stored"
            await store.delete_run(RUN.run_id, 2, 5.0)
            await store.retire_client(0, 6.0)
            # The server goes on: a close would check the log in.
            if found := _leaks(folder, SECRET.encode()):
                raise Succeeded(f"reads it in {found}")
        finally:
            await store.close()
    return "not in the file, and not in its log, while the server runs"


@attack(
    "a device is read after its update was accepted",
    before="losses of its rows in state.sqlite3-wal",
)
async def _read_sent_update(folder: Path) -> str:
    rows = [{"text": f"text {number}", "label": number % 2} for number in range(20)]
    with _other_build():
        async with (
            served(run_spec(rounds=2)) as server,
            EdgeClient(server.url, token=ENROLMENT, data=rows, state_dir=folder) as client,
        ):
            await client.enrol()
            # A client of another server, with the same file: the log outlives a turn.
            with closing(sqlite3.connect(folder / "state.sqlite3")) as other:
                other.execute("SELECT * FROM entries").fetchall()
                assert (await client.run_once()).outcome == "worked"
                if found := _leaks(folder, b'"losses":['):
                    raise Succeeded(f"reads losses in {found}")
    return "no losses in the state file, and none in its log"
