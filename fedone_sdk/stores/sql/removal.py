"""Statements of the store's methods that remove data."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table, delete, func, insert, literal, select, update

from fedone_sdk.stores.records import NO_CREDENTIAL, RunDeleted, RunSize, VersionConflict
from fedone_sdk.stores.sql import schema as t

_OF_RUN = (t.log, t.closed_work, t.memories, t.run_data)


def size(connection: Connection, run_id: str) -> RunSize:
    """See `Store.size`."""

    def count(table: Table) -> int:
        query = select(func.count()).select_from(table).where(table.c.run_id == run_id)
        found: int = connection.execute(query).scalar_one()
        return found

    return RunSize(log=count(t.log), closed=count(t.closed_work))


def trim(connection: Connection, run_id: str, *, log: bool = False, closed: bool = False) -> None:
    """See `Store.trim`."""
    for table, wanted in ((t.log, log), (t.memories, log), (t.closed_work, closed)):
        if wanted:
            connection.execute(delete(table).where(table.c.run_id == run_id))


def delete_run(connection: Connection, again: bool, run_id: str, version: int, now: float) -> None:
    """See `Store.delete_run`."""
    query = select(t.runs.c.version).where(t.runs.c.run_id == run_id).with_for_update()
    found = connection.execute(query).scalar_one_or_none()
    if found is None:
        if again and deleted(connection, run_id) is not None:
            return
        raise KeyError(run_id)
    if found != version:
        raise VersionConflict(f"run {run_id!r} is at version {found}, not {version}")
    for table in (*_OF_RUN, t.runs):
        connection.execute(delete(table).where(table.c.run_id == run_id))
    row = {"run_id": run_id, "version": version, "deleted_at": now}
    connection.execute(insert(t.deleted_runs), row)


def deleted(connection: Connection, run_id: str) -> float | None:
    """See `Store.deleted`."""
    query = select(t.deleted_runs.c.deleted_at).where(t.deleted_runs.c.run_id == run_id)
    found: float | None = connection.execute(query).scalar_one_or_none()
    return found


def refuse_deleted(connection: Connection, run_id: str) -> None:
    """Refuse a new run with the id of a deleted one.

    Call it after the insert, which waits for a concurrent deletion.

    Raises:
        RunDeleted: The id is reserved.
    """
    if deleted(connection, run_id) is not None:
        raise RunDeleted(f"run {run_id!r} was deleted")


def see_client(connection: Connection, index: int, now: float) -> None:
    """See `Store.see_client`."""
    change_client(connection, index, seen_at=now)


def idle_clients(connection: Connection, before: float, limit: int) -> list[int]:
    """See `Store.idle_clients`."""
    c = t.clients.c
    idle = func.coalesce(c.seen_at, c.enrolled_at) < before
    known = ~c.credential_sha256.startswith(NO_CREDENTIAL)
    query = select(c.index).where(idle & known).order_by(c.index).limit(limit)
    return list(connection.execute(query).scalars())


def retire_client(connection: Connection, index: int, now: float) -> None:
    """See `Store.retire_client`."""
    nothing = ("name", "enrolment_sha256", "token", "previous_sha256")
    c = t.clients.c
    change_client(
        connection,
        index,
        **dict.fromkeys(nothing),
        credential_sha256=literal(NO_CREDENTIAL) + c.client_id,
        revoked_at=func.coalesce(c.revoked_at, now),
    )


def change_client(connection: Connection, index: int, **changes: Any) -> None:
    """Change fields of a client, or raise ``IndexError``."""
    of_index = t.clients.c.index == index
    if connection.execute(update(t.clients).where(of_index).values(**changes)).rowcount != 1:
        raise IndexError(f"there is no client {index}")
