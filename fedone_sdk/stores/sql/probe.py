"""Read-only checks of a database: whether it is usable and what `open` would change."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from fedone_sdk.errors import FedOneError, one_line
from fedone_sdk.stores.sql import schema
from fedone_sdk.stores.sql.postgres import server_of
from fedone_sdk.stores.sql.sqlite import read_schema

_TIMEOUT_S = 5.0


def probe_file(path: Path) -> str:
    """Return what `open` would do with a SQLite file.

    Raises:
        FedOneError: The file cannot be used.
    """
    if not path.exists():
        folder = path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise FedOneError(f"{path}: cannot be created: {folder} is not a writable folder")
        return f"would create {path}"
    if not os.access(path, os.R_OK | os.W_OK):
        raise FedOneError(f"{path}: cannot be read and written")
    # Without a WAL file there is no writer, and `immutable` avoids creating files.
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    try:
        found = read_schema(path, how)
    except schema.SchemaRefused as exc:
        raise FedOneError(f"{path}: {exc}") from exc
    except SQLAlchemyError as exc:
        raise FedOneError(f"{path}: is not a database that can be used") from exc
    if found is None or found == schema.HEAD:
        return f"would use {path}"
    return f"would use {path}, and upgrade it from schema {found} to {schema.HEAD}"


async def probe_server(url: URL) -> str:
    """Return what `open` would do with a PostgreSQL database.

    Raises:
        FedOneError: The server is not reachable or the schema not usable; without the password.
    """
    # Some of the driver's errors pass SQLAlchemy. Imported here: only PostgreSQL needs it.
    from asyncpg import InterfaceError, PostgresError

    url, where = server_of(url)
    engine = create_async_engine(
        url,
        poolclass=NullPool,
        connect_args={"timeout": _TIMEOUT_S, "command_timeout": _TIMEOUT_S},
    )
    try:
        async with engine.connect() as connection:
            found = await connection.run_sync(schema.current)
    except schema.SchemaRefused as exc:
        raise FedOneError(f"{where}: {exc}") from exc
    except (SQLAlchemyError, PostgresError, InterfaceError, OSError, TimeoutError) as exc:
        reason = getattr(exc, "orig", None) or exc
        raise FedOneError(f"{where}: cannot be reached: {_short(reason)}") from exc
    finally:
        await engine.dispose()
    if found is not None and found != schema.HEAD:
        raise FedOneError(
            f"{where}: has schema {found} and this fedone-sdk needs schema {schema.HEAD}; "
            "run `fedone db upgrade`"
        )
    return f"would create the tables in {where}" if found is None else f"would use {where}"


def _short(error: object) -> str:
    text = one_line(error)
    return text.partition(": ")[2] or text if text.startswith("<class") else text
