"""SQLite files that several processes share."""

from __future__ import annotations

import sqlite3
import time

__all__ = ["PATIENCE_S", "use_wal"]

PATIENCE_S = 60.0
"""How long a transaction waits for those of others."""


def use_wal(db: sqlite3.Connection) -> None:
    """Turns a database to write-ahead logging, in which readers and a writer do not wait.

    Unlike all else, the first change to it does not wait for others that open the file.
    """
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)
