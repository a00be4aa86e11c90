"""Stores in SQL databases: SQLite files and PostgreSQL."""

from fedone_sdk.stores.sql.store import SqlStore

__all__ = ["SqlStore"]
