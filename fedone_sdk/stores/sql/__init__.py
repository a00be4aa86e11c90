"""A store in a SQL database: a SQLite file or a PostgreSQL server."""

from fedone_sdk.stores.sql.store import SqlStore

__all__ = ["SqlStore"]
