"""Durable storage of an aggregator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.imports import lazy
from fedone_sdk.stores.base import (
    NO_CREDENTIAL,
    SERVER,
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    Member,
    RunDeleted,
    RunHead,
    RunRecord,
    Signals,
    Store,
    StoredMemory,
    TokenRecord,
    TokenRefused,
    VersionConflict,
    log_pages,
)
from fedone_sdk.stores.memory import MemoryStore

if TYPE_CHECKING:
    from fedone_sdk.stores.sql import SqlStore
else:
    # SQLAlchemy is optional and slow to import.
    __getattr__, __dir__ = lazy(globals(), "sql")

__all__ = [
    "ClientRecord",
    "ClosedWork",
    "Commit",
    "LogEntry",
    "Member",
    "MemoryStore",
    "NO_CREDENTIAL",
    "RunDeleted",
    "RunHead",
    "RunRecord",
    "SERVER",
    "Signals",
    "SqlStore",
    "Store",
    "StoredMemory",
    "TokenRecord",
    "TokenRefused",
    "VersionConflict",
    "log_pages",
]
