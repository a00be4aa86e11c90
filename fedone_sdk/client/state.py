"""A device's state: its identity, its count of epsilon, and its current work, in one SQLite file.

Write-ahead logging: a transaction costs one sync, a rollback journal would cost three. With
``synchronous=EXTRA`` a transaction is on disk when it returns, also on file systems that do not
support WAL and where SQLite continues with a rollback journal.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from fedone_sdk.errors import DataError, system_errors
from fedone_sdk.files import erase_log, sync_path
from fedone_sdk.messages import Enrolled, is_sendable

_log = structlog.get_logger(__name__)

Change = tuple[str, dict[str, Any]]
"""An SQL statement with named parameters; ``:server`` is the state's own."""

_FILE = "state.sqlite3"
_TIMEOUT_S = 5.0
"""Maximal wait for another process's transaction, seconds."""

_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS identity (
    server TEXT PRIMARY KEY, client_id TEXT, credential TEXT, nonce TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS journal (
    server TEXT, assignment_id TEXT, kind TEXT, key TEXT, value TEXT,
    PRIMARY KEY (server, assignment_id, kind, key)
);
CREATE TABLE IF NOT EXISTS unsent (
    server TEXT PRIMARY KEY, assignment_id TEXT, run_id TEXT, round INTEGER, body TEXT, memory BLOB
);
CREATE TABLE IF NOT EXISTS noised (
    server TEXT, assignment_id TEXT, PRIMARY KEY (server, assignment_id)
);
CREATE TABLE IF NOT EXISTS memory (server TEXT PRIMARY KEY, run_id TEXT, content BLOB);
CREATE TABLE IF NOT EXISTS privacy (target TEXT PRIMARY KEY, precision REAL) WITHOUT ROWID;
PRAGMA user_version = 1;
COMMIT;
"""
"""The count of privacy is of all servers; the other tables have rows by server."""

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def change(statement: str, **values: Any) -> Change:
    """Return an SQL statement with its parameters."""
    return statement, values


def stored(table: str, **values: Any) -> Change:
    """Return the change that stores a row of the server, in place of an earlier one."""
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    return change(
        f"INSERT OR REPLACE INTO {table} (server, {names}) VALUES (:server, {marks})", **values
    )


def deleted(table: str, **values: Any) -> Change:
    """Return the change that deletes the rows of the server with these values."""
    matches = "".join(f" AND {name} = :{name}" for name in values)
    return change(f"DELETE FROM {table} WHERE server = :server{matches}", **values)


class _DamagedError(sqlite3.DatabaseError):
    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class DeviceState:
    """A device's state for one server, in a file that all its servers share.

    Without a folder nothing is stored. The objects that use the state hold what they need, so that
    a device without a folder, or with a disk that fails, continues in memory. Failures in a row
    are one warning. A damaged file is renamed with the suffix ``.damaged``, and a new one is
    started. A missing folder is created, readable by its owner only.

    Attributes:
        file: The database; None without a folder.

    Raises:
        DataError: The folder cannot be created.
    """

    def __init__(self, folder: str | Path | None, server: str) -> None:
        self.server = server
        self.file = None if folder is None else Path(folder) / _FILE
        self._db: sqlite3.Connection | None = None
        self._fails = False
        self._late: tuple[Change, ...] = ()
        if self.file is None:
            return
        folder = self.file.parent
        with system_errors(DataError, f"{folder}: cannot be used as a state folder"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError):  # A disk that fails is reported with the file.
            sync_path(folder.parent)  # the folder's name

    def __del__(self) -> None:
        self.close()

    @property
    def damaged(self) -> Path | None:
        """The damaged file, which may have a count of epsilon; None if there is none."""
        found = None if self.file is None else self.file.with_name(f"{_FILE}.damaged")
        return found if found is not None and found.exists() else None

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query.

        Raises:
            DataError: They cannot be read.
        """
        if self.file is None:
            return []
        try:
            return self._opened(self.file).execute(query, self._named(values)).fetchall()
        except (OSError, sqlite3.Error) as exc:
            self.close()
            raise DataError(f"{self.file}: cannot be read: {exc}") from exc

    def read(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none, with a warning, if they cannot be read."""
        try:
            return self.rows(query, **values)
        except DataError as exc:
            self._failed("device state cannot be read", exc)
            return []

    def write(self, *changes: Change, erases: bool = False, late: bool = False) -> bool:
        """Apply changes in one transaction, which is durable on return.

        Args:
            changes: The changes, in order.
            erases: Whether deleted rows must also leave the file's log at once.
            late: Whether changes that fail are applied before the next ones, in place of earlier
                late ones.

        Returns:
            False, with a warning, if none of them was stored. Always True without a file.
        """
        if self.file is None:
            return True
        try:
            with self._opened(self.file) as db:  # commits, or rolls back
                db.execute("BEGIN IMMEDIATE")
                for statement, values in (*self._late, *changes):
                    db.execute(statement, self._named(values))
        except (OSError, sqlite3.Error) as exc:
            self.close()
            self._failed("device state cannot be written", exc)
            self._late = changes if late else self._late
            return False
        self._fails, self._late = False, ()
        if erases:
            with suppress(sqlite3.Error):  # The next start does it.
                erase_log(db)
        return True

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _failed(self, what: str, failure: Exception) -> None:
        if not self._fails:
            self._fails = True
            _log.warning(what, file=str(self.file), reason=str(failure))

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"server": self.server, **values}

    def _opened(self, file: Path) -> sqlite3.Connection:
        if self._db is None:
            try:
                self._db = _open(file)
            except sqlite3.DatabaseError as exc:
                if exc.sqlite_errorcode & 0xFF not in _DAMAGE:
                    raise
                _log.warning("damaged device state renamed", file=str(file), reason=str(exc))
                for suffix in ("-wal", "-shm", ""):
                    found = Path(f"{file}{suffix}")
                    if found.exists():
                        found.replace(f"{file}.damaged{suffix}")
                self._db = _open(file)
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


class Identity:
    """A device's identity at one server: credential and enrolment nonce, kept across restarts.

    A damaged one is ignored, and the device enrols again.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self.server = state.server
        self._nonce: str | None = None
        self.client_id: str | None = None
        self.credential: str | None = None
        query = "SELECT client_id, credential, nonce FROM identity WHERE server = :server"
        for client_id, credential, nonce in state.read(query):
            if credential is not None and not is_sendable(credential):
                _log.warning("damaged identity ignored")
                continue
            self.client_id, self.credential, self._nonce = client_id, credential, nonce

    def __repr__(self) -> str:
        return f"Identity(server={self.server!r}, client_id={self.client_id!r})"

    def nonce(self) -> str:
        """Return the nonce to enrol with, which is written before it is used.

        An enrolment that is repeated with the same nonce returns the same client.
        """
        if self._nonce is None:
            self._set(nonce=secrets.token_urlsafe(32))
        return self._nonce or ""

    def reset(self, nonce: str) -> None:
        """Replace an identity by the nonce that it was enrolled with: the device enrols again."""
        self._set(nonce=nonce)

    def enrolled(self, message: Enrolled) -> None:
        """Store a new identity."""
        self._set(message.client_id, message.credential)

    def renew(self, credential: str) -> None:
        """Store another credential of the same client, before it is used."""
        self._set(self.client_id, credential)

    def forget(self) -> None:
        """Delete an identity that the server no longer accepts."""
        self._set()

    def _set(
        self, client_id: str | None = None, credential: str | None = None, nonce: str | None = None
    ) -> None:
        self.client_id, self.credential, self._nonce = client_id, credential, nonce
        self._state.write(
            stored("identity", client_id=client_id, credential=credential, nonce=nonce), late=True
        )
