"""Stores in SQLite files and PostgreSQL."""

from fedone_sdk.errors import MissingExtraError

try:
    from fedone_sdk.stores.sql import postgres, sqlite  # noqa: F401 (register their drivers)
    from fedone_sdk.stores.sql.store import SqlStore
except ModuleNotFoundError as exc:
    if (exc.name or "").startswith("fedone_sdk"):
        raise
    raise MissingExtraError("SqlStore", extra="server") from exc

__all__ = ["SqlStore"]
