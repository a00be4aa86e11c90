"""SQLite files shared by several processes."""

from __future__ import annotations

import sqlite3
import time

PATIENCE_S = 60.0
"""Maximal wait of a transaction for another process, seconds."""


def use_wal(db: sqlite3.Connection) -> None:
    """Switch a database to write-ahead logging, in which readers do not block writers.

    Retries, because the first change to WAL ignores the busy timeout.
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
