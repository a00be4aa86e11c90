"""Durable storage of an aggregator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk._lazy import lazy
from fedone_sdk.stores.base import Signals, Store, log_pages
from fedone_sdk.stores.memory import MemoryStore
from fedone_sdk.stores.records import (
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
    StoredMemory,
    TokenRecord,
    TokenRefused,
    VersionConflict,
)

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
