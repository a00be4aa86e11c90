"""Copy of a whole store into an empty one, table by table through the one schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, delete, func, insert, select, text

from fedone_sdk.errors import FedOneError
from fedone_sdk.stores.sql import schema

_ROWS = 100
"""Number of rows that are read and written at once."""

_SEQUENCE = """
SELECT setval(pg_get_serial_sequence('{table}', 'seq'), coalesce(max(seq), 1), max(seq) IS NOT NULL)
FROM {table}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The number of rows by table, and the digest of each run's state."""

    rows: dict[str, int]
    digests: dict[str, str]


def copy(source: Connection, target: Connection, digest: Callable[[bytes], str]) -> Copied:
    """Copy all rows, then compare the number of rows of each table and the digest of each run.

    Both connections are in a transaction, and no server holds either store. `digest` is that of a
    run's arrays.

    Raises:
        FedOneError: The target is not empty, or the copy differs from the source.
        SchemaRefused: The source has another schema.
    """
    if (found := schema.current(source)) != schema.HEAD:
        raise schema.SchemaRefused(
            f"it has schema {found}, a copy needs {schema.HEAD}; run `fedone db upgrade`"
        )
    tables = schema.metadata.sorted_tables
    for table in tables:
        if table is not schema.meta and _count(target, table):
            raise FedOneError(f"the target is not empty: it has rows in the table {table.name}")
    target.execute(delete(schema.meta))
    for table in tables:
        query = select(table).execution_options(yield_per=_ROWS)
        for some in source.execute(query).mappings().partitions():
            target.execute(insert(table), [dict(row) for row in some])
    if target.dialect.name == "postgresql":
        for table in tables:
            if "seq" in table.c:
                target.execute(text(_SEQUENCE.format(table=table.name)))
    copied = _content(target, digest)
    if copied != _content(source, digest):
        raise FedOneError("the copy differs from the source")
    return copied


def _content(connection: Connection, digest: Callable[[bytes], str]) -> Copied:
    of_run = select(schema.run_data.c.run_id, schema.run_data.c.arrays).execution_options(
        yield_per=1
    )
    return Copied(
        rows={table.name: _count(connection, table) for table in schema.metadata.sorted_tables},
        digests={row.run_id: digest(row.arrays) for row in connection.execute(of_run)},
    )


def _count(connection: Connection, table: Table) -> int:
    query: Any = select(func.count()).select_from(table)
    found: int = connection.execute(query).scalar_one()
    return found
