"""A device's state in one SQLite file.

Write-ahead logging: a transaction costs one sync, a rollback journal would cost three. With
``synchronous=EXTRA`` a transaction is on disk when it returns, also on file systems that do not
support WAL and where SQLite continues with a rollback journal.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from fedone_sdk.client.device_state import Change, DeviceState
from fedone_sdk.errors import DataError
from fedone_sdk.files import sync_path

_log = structlog.get_logger(__name__)

STATE_FILE = "state.sqlite3"

_TIMEOUT_S = 5.0
"""Maximal wait for another process's transaction, seconds."""

_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS identity (
    server TEXT PRIMARY KEY, client_id TEXT, credential TEXT, nonce TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unsent (
    server TEXT, assignment_id TEXT, run_id TEXT, round INTEGER, noised INTEGER, body TEXT,
    memory BLOB, PRIMARY KEY (server, assignment_id)
);
CREATE TABLE IF NOT EXISTS journal (
    server TEXT, assignment_id TEXT, kind TEXT, key TEXT, value TEXT,
    PRIMARY KEY (server, assignment_id, kind, key)
);
CREATE TABLE IF NOT EXISTS memory (
    server TEXT, run_id TEXT, content BLOB, PRIMARY KEY (server, run_id)
);
CREATE TABLE IF NOT EXISTS privacy (target TEXT PRIMARY KEY, precision REAL) WITHOUT ROWID;
PRAGMA user_version = 1;
COMMIT;
"""
"""The count of privacy is of all servers; the other tables have rows by server."""


_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class _DamagedError(sqlite3.DatabaseError):
    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class StateFile(DeviceState):
    """A device's state for one server, in a file that all its servers share.

    A file that is damaged is renamed with the suffix ``.damaged``, and a new one is started. Its
    folder is created if missing, readable by its owner only.

    Raises:
        DataError: The folder cannot be created.
    """

    file: Path

    def __init__(self, folder: Path, server: str) -> None:
        super().__init__(server)
        self.file = folder / STATE_FILE
        self._db: sqlite3.Connection | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise DataError(f"{folder}: cannot be used as a state folder: {exc}") from exc
        with suppress(OSError):  # A disk that fails is reported with the file.
            sync_path(folder.parent)  # the folder's name

    def __del__(self) -> None:
        self.close()

    @property
    def lost_counts(self) -> Sequence[Path]:
        """Damaged files that may have a count of epsilon."""
        return [self._damaged] if self._damaged.exists() else []

    @property
    def _damaged(self) -> Path:
        return self.file.with_name(f"{STATE_FILE}.damaged")

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query; `DataError` if they cannot be read."""
        try:
            return self._opened().execute(query, {"server": self.server, **values}).fetchall()
        except (OSError, sqlite3.Error) as exc:
            self.close()
            raise DataError(f"{self.file}: cannot be read: {exc}") from exc

    def write(self, *changes: Change) -> bool:
        """Apply changes in one transaction; return whether they are on disk."""
        try:
            with self._opened() as db:  # commits, or rolls back
                db.execute("BEGIN IMMEDIATE")
                for statement, values in changes:
                    db.execute(statement, {"server": self.server, **values})
        except (OSError, sqlite3.Error) as exc:
            self.close()
            _log.warning("device state cannot be written", file=str(self.file), reason=str(exc))
            return False
        return True

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            try:
                self._db = _open(self.file)
            except sqlite3.DatabaseError as exc:
                if exc.sqlite_errorcode & 0xFF not in _DAMAGE:
                    raise
                _log.warning("damaged device state renamed", file=str(self.file), reason=str(exc))
                for suffix in ("-wal", "-shm", ""):
                    found = Path(f"{self.file}{suffix}")
                    if found.exists():
                        found.replace(f"{self._damaged}{suffix}")
                self._db = _open(self.file)
        return self._db


def _open(file: Path) -> sqlite3.Connection:
    """Open the database, for reading only if nothing can be written.

    Raises:
        OSError: The file cannot be created.
        sqlite3.Error: It cannot be used.
    """
    try:
        return _open_for_writing(file)
    except sqlite3.OperationalError:
        log = file.with_name(f"{file.name}-wal")
        if log.exists() and log.stat().st_size:
            raise  # The log has transactions that the file alone does not have.
        return sqlite3.connect(
            f"{file.absolute().as_uri()}?immutable=1",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )


def _open_for_writing(file: Path) -> sqlite3.Connection:
    with suppress(FileExistsError):
        # SQLite would create it readable by others. Its log has the mode of the file.
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    # A client may be created in one thread and run in another.
    db = sqlite3.connect(file, timeout=_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = EXTRA")
        db.execute("PRAGMA secure_delete = ON")  # losses reveal something about the examples
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise _DamagedError(found)
        if db.execute("PRAGMA user_version").fetchone() == (0,):
            db.executescript(_SCHEMA)
        # A process that was killed may have left transactions in the machine's cache. They are
        # on the disk before this process relies on them.
        try:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_FULL:  # The log is synced first.
                raise
    except BaseException:
        db.close()
        raise
    return db
