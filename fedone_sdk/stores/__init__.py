"""Durable storage of an aggregator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.errors import MissingExtraError
from fedone_sdk.stores.base import (
    NO_CREDENTIAL,
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    Member,
    RunDeleted,
    RunHead,
    RunRecord,
    RunSize,
    RunSnapshot,
    Signals,
    Store,
    TokenRecord,
    TokenRefused,
    VersionConflict,
)
from fedone_sdk.stores.memory import MemoryStore
from fedone_sdk.stores.pages import log_pages

if TYPE_CHECKING:
    from fedone_sdk.stores.sql import SqlStore

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
    "RunSize",
    "RunSnapshot",
    "Signals",
    "SqlStore",
    "Store",
    "TokenRecord",
    "TokenRefused",
    "VersionConflict",
    "log_pages",
]


def __getattr__(name: str) -> object:
    """Import `SqlStore` on first use: SQLAlchemy is optional and slow to import."""
    if name != "SqlStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from fedone_sdk.stores.sql import SqlStore
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fedone_sdk"):
            raise
        raise MissingExtraError("SqlStore", extra="server") from error
    globals()[name] = SqlStore
    return SqlStore
