"""Durable files, which are replaced atomically; locks; SQLite files with write-ahead logging."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replace_file", "sync_path", "user_path"]

_UNSUPPORTED = {errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def user_path(path: str | Path) -> Path:
    """Return a path with ``~`` replaced by the home folder, if the account has one."""
    return Path(os.path.expanduser(path))


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file atomically, even if the machine crashes; on return the content is on disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)  # from a killed process with the same id
        # Created with the final mode, so that other users can never read a secret file.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def create_private(path: str | Path) -> None:
    """Create a file that only its owner can read, unless it exists.

    An existing file is not opened, because closing it would end SQLite's locks on it.

    Raises:
        OSError: The file cannot be created, read or written, or is a folder.
    """
    file = os.path.realpath(path)
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        code = errno.EISDIR if os.path.isdir(file) else errno.EACCES
        if code == errno.EISDIR or not os.access(file, os.R_OK | os.W_OK):
            raise OSError(code, os.strerror(code), file) from None


def sync_path(path: Path) -> None:
    """Flush a file's content, or a folder's list of files, to disk.

    Does nothing where this is not supported: on Windows, on some network file systems, and for a
    path that is writable but not readable.
    """
    if os.name == "nt":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED:
            raise


def lock_file(path: str | Path) -> int:
    """Create a file, and lock it until the returned descriptor is closed or the process ends.

    Raises:
        BlockingIOError: The file is locked already.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if sys.platform != "win32":  # Python's module for this lock exists only on Unix.
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


@contextmanager
def open_database(path: str | Path, timeout_s: float) -> Iterator[sqlite3.Connection]:
    """Open a SQLite file that only its owner can read; close it again if the body fails."""
    create_private(path)
    # The connection may be used in another thread than this one.
    db = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    try:
        yield db
    except BaseException:
        db.close()
        raise


def use_wal(db: sqlite3.Connection, timeout_s: float) -> None:
    """Switch a database to write-ahead logging, in which readers do not block writers.

    SQLite then also overwrites deleted content with zeros. The switch is tried again for
    `timeout_s` seconds, because SQLite's own busy timeout does not apply to it.
    """
    db.execute("PRAGMA secure_delete=ON")
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def erase_log(db: sqlite3.Connection) -> bool:
    """Copy a database's log to its file, and empty the log, so that deleted content is erased.

    Returns:
        False if another connection blocked this for longer than the busy timeout.
    """
    (busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit the changes of the body, or roll them back if it fails."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite itself rolls back after some errors, e.g. a full disk.
            db.execute("ROLLBACK")
        raise
