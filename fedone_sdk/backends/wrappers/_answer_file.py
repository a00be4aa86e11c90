"""Persistent answers of a cache, in a SQLite file."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TypeVar

from fedone_sdk.backends._codec import dump, dump_answer, load_answer
from fedone_sdk.backends.base import Answer
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.budget.ledger import PATIENCE_S
from fedone_sdk.errors import BackendBlocked, SpecError
from fedone_sdk.files import transaction, use_wal

T = TypeVar("T")

_APPLICATION_ID = 0x46454441  # "FEDA", to distinguish this file from other SQLite files.
_SCHEMA = 1


class AnswerFile:
    """Answers by key in a SQLite file (WAL), which several processes may share.

    One worker thread does all blocking work. Answers that arrive during a write are written in one
    transaction, so that they share one `fsync`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: dict[bytes, tuple[str, Answer]] = {}
        self._lock = Lock()
        try:
            self._db = _opened(path)
        except OSError as exc:
            raise SpecError(f"cannot be opened: {exc.strerror}", source=str(path)) from exc
        except sqlite3.Error as exc:
            raise SpecError(f"is no cache of answers: {exc}", source=str(path)) from exc
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="answers")

    async def get(self, key: bytes) -> Answer | None:
        """Return the answer to a key, or None.

        Raises:
            BackendBlocked: The file cannot be read, or an earlier answer cannot be written.
        """
        return await self._in_worker(lambda: self._get(key))

    async def put(self, key: bytes, fingerprint: str, answer: Answer) -> None:
        """Store an answer durably. The first answer to a key is kept.

        The answer of a cancelled caller is written too.

        Raises:
            BackendBlocked: It cannot be written; the next call retries it first.
        """
        with self._lock:
            self._unwritten[key] = (fingerprint, answer)
        await asyncio.shield(self._in_worker(self._flush, usage=answer.usage))

    async def aclose(self) -> None:
        """Write pending answers and close the file."""
        try:
            await self._in_worker(self._flush)
        finally:
            await self._in_worker(self._db.close)
            self._executor.shutdown(wait=False)

    async def _in_worker(self, call: Callable[[], T], usage: Usage = NOTHING) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except sqlite3.Error as exc:
            raise BackendBlocked(
                f"{self._path}: the cache of answers cannot be used: {exc}; "
                "free the disk, or move the file away",
                usage=usage,
            ) from exc

    def _get(self, key: bytes) -> Answer | None:
        self._flush()
        found = self._db.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        try:
            return load_answer(json.loads(found[0].decode("utf-8", "surrogatepass")))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise sqlite3.DatabaseError("it holds an answer that cannot be read") from exc

    def _flush(self) -> None:
        with self._lock:
            answers = dict(self._unwritten)
        if not answers:  # An earlier flush has written them.
            return
        now = time.time()
        rows = [
            (key, dump(dump_answer(answer)), fingerprint, now)
            for key, (fingerprint, answer) in answers.items()
        ]
        with transaction(self._db):
            self._db.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", rows)
        with self._lock:
            for key in answers:
                del self._unwritten[key]


def _opened(path: Path) -> sqlite3.Connection:
    # SQLite would create it readable for all users; the answers may be generated text.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    # Created here, then used only by the worker.
    db = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.execute("PRAGMA synchronous=FULL")
    db.execute("BEGIN IMMEDIATE")  # Other processes may create the same file.
    application, schema = _number(db, "application_id"), _number(db, "user_version")
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if (application, schema, tables) == (0, 0, 0):
        db.execute(
            "CREATE TABLE answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL, "
            "model TEXT NOT NULL, created_at REAL NOT NULL) WITHOUT ROWID"
        )
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {_SCHEMA}")
    elif application != _APPLICATION_ID:
        raise SpecError("is a SQLite file of something else", source=str(path))
    elif schema != _SCHEMA:
        raise SpecError(
            f"is a cache of schema {schema}, this version of the SDK reads {_SCHEMA}; move it away",
            source=str(path),
        )
    db.execute("COMMIT")
    use_wal(db, PATIENCE_S)
    (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        raise sqlite3.DatabaseError(f"it is damaged ({' '.join(state.split())})")


def _number(db: sqlite3.Connection, pragma: str) -> int:
    (value,) = db.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)
