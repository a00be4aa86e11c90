"""The SQL of the store's methods for both databases; each function runs in an open transaction.

Changes of tokens and clients first lock the row of ``num_clients``, so that replicas make them one
after another. Clients' index numbers then have no gaps, and a token's uses are counted exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from fedone_sdk.stores import base
from fedone_sdk.stores.sql import schema as t

T = TypeVar("T")


@contextmanager
def refusing(message: str) -> Iterator[None]:
    """Translate a duplicate key to a ``ValueError``."""
    try:
        yield
    except IntegrityError as error:
        raise ValueError(message) from error


def ping(connection: sa.Connection) -> None:
    """Write a row, which fails on a full or read-only disk."""
    connection.execute(sa.update(t.meta).where(_NUM_CLIENTS).values(value=t.meta.c.value))


def now(connection: sa.Connection) -> float:
    """Return PostgreSQL's time, seconds since the epoch."""
    query = sa.select(sa.func.extract("epoch", sa.func.clock_timestamp()))
    return float(connection.execute(query).scalar_one())


def _one(connection: sa.Connection, query: sa.Select[Any], record: type[T]) -> T | None:
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else record(**row)


def _all(connection: sa.Connection, query: sa.Select[Any], record: type[T]) -> list[T]:
    return [record(**row) for row in connection.execute(query).mappings()]


# Tokens and clients

_NUM_CLIENTS = t.meta.c.key == "num_clients"
_OF_RUN = (t.log, t.closed_work, t.memories, t.run_data)
_TOKEN = sa.select(*(column for column in t.tokens.c if column.name != "seq"))


def clear(connection: sa.Connection) -> None:
    _lock_clients(connection)
    for table in reversed(t.metadata.sorted_tables):
        if table is not t.meta:
            connection.execute(sa.delete(table))
    connection.execute(sa.update(t.meta).where(_NUM_CLIENTS).values(value=0))


def _lock_clients(connection: sa.Connection) -> int:
    """Lock changes of tokens and clients; return the number of clients."""
    query = sa.select(t.meta.c.value).where(_NUM_CLIENTS).with_for_update()
    return int(connection.execute(query).scalar_one())


def put_token(connection: sa.Connection, token: base.TokenRecord) -> None:
    _lock_clients(connection)
    same = sa.update(t.tokens).where(t.tokens.c.token_sha256 == token.token_sha256)
    if connection.execute(same.values(runs=token.runs, expires_at=token.expires_at)).rowcount:
        return
    with refusing(f"there is an enrolment token {token.name!r} already"):
        connection.execute(sa.insert(t.tokens), asdict(token))


def tokens(connection: sa.Connection) -> list[base.TokenRecord]:
    return _all(connection, _TOKEN.order_by(t.tokens.c.seq), base.TokenRecord)


def revoke_token(connection: sa.Connection, name: str, now: float) -> base.TokenRecord | None:
    of_name = t.tokens.c.name == name
    first = of_name & t.tokens.c.revoked_at.is_(None)
    connection.execute(sa.update(t.tokens).where(first).values(revoked_at=now))
    return _token(connection, of_name)


def enrol(
    connection: sa.Connection, again: bool, client: base.ClientRecord, token_sha256: str, now: float
) -> base.ClientRecord:
    index = _lock_clients(connection)
    token = _token(connection, t.tokens.c.token_sha256 == token_sha256)
    if token is None:
        raise base.TokenRefused("the enrolment token is not known")
    if again:
        known = _client(connection, t.clients.c.client_id == client.client_id)
        if known is not None and known.credential_sha256 == client.credential_sha256:
            return known
    token.check(now)
    if client.enrolment_sha256 is not None:
        known = _client(connection, t.clients.c.enrolment_sha256 == client.enrolment_sha256)
        if known is not None:
            client = known.enrolled_again(client, token)
            of_index = t.clients.c.index == known.index
            connection.execute(sa.update(t.clients).where(of_index).values(**asdict(client)))
            return client
    if token.uses_left == 0:
        raise base.TokenRefused("the enrolment token is used up")
    if token.uses_left is not None:
        fewer = {"uses_left": token.uses_left - 1}
        connection.execute(sa.update(t.tokens).where(t.tokens.c.name == token.name).values(**fewer))
    client = replace(client, index=index, token=token.name, runs=token.runs)
    with refusing(f"client {client.client_id!r} is enrolled already"):
        connection.execute(sa.insert(t.clients), asdict(client))
    connection.execute(sa.update(t.meta).where(_NUM_CLIENTS).values(value=index + 1))
    return client


def clients(
    connection: sa.Connection, after: int = -1, limit: int | None = None
) -> list[base.ClientRecord]:
    query = sa.select(t.clients).where(t.clients.c.index > after).order_by(t.clients.c.index)
    return _all(connection, query.limit(limit), base.ClientRecord)


def num_clients(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(t.meta.c.value).where(_NUM_CLIENTS)).scalar_one())


def client(connection: sa.Connection, credential_sha256: str) -> base.ClientRecord | None:
    c = t.clients.c
    return _client(
        connection,
        sa.or_(c.credential_sha256 == credential_sha256, c.previous_sha256 == credential_sha256),
    )


def client_at(connection: sa.Connection, index: int) -> base.ClientRecord | None:
    return _client(connection, t.clients.c.index == index)


def client_named(connection: sa.Connection, client_id: str) -> base.ClientRecord | None:
    return _client(connection, t.clients.c.client_id == client_id)


def change_client(connection: sa.Connection, /, index: int, **changes: Any) -> None:
    """Change fields of a client, or raise ``IndexError``."""
    of_index = t.clients.c.index == index
    if connection.execute(sa.update(t.clients).where(of_index).values(**changes)).rowcount != 1:
        raise IndexError(f"there is no client {index}")


def idle_clients(connection: sa.Connection, before: float, limit: int) -> list[int]:
    c = t.clients.c
    idle = sa.func.coalesce(c.seen_at, c.enrolled_at) < before
    known = ~c.credential_sha256.startswith(base.NO_CREDENTIAL)
    query = sa.select(c.index).where(idle & known).order_by(c.index).limit(limit)
    return list(connection.execute(query).scalars())


def retire_client(connection: sa.Connection, index: int, now: float) -> None:
    nothing = ("name", "enrolment_sha256", "token", "previous_sha256")
    c = t.clients.c
    change_client(
        connection,
        index,
        **dict.fromkeys(nothing),
        credential_sha256=sa.literal(base.NO_CREDENTIAL) + c.client_id,
        revoked_at=sa.func.coalesce(c.revoked_at, now),
    )


def _token(connection: sa.Connection, which: Any) -> base.TokenRecord | None:
    return _one(connection, _TOKEN.where(which).with_for_update(), base.TokenRecord)


def _client(connection: sa.Connection, which: Any) -> base.ClientRecord | None:
    query = sa.select(t.clients).where(which).order_by(t.clients.c.index).limit(1)
    return _one(connection, query, base.ClientRecord)


# Waiting clients


def join(connection: sa.Connection, member: base.Member) -> None:
    _upsert(connection, t.members, [asdict(member)])


def leave(connection: sa.Connection, client_indices: Collection[int]) -> None:
    if client_indices:
        connection.execute(_LEAVE, [{"of_client": index} for index in client_indices])


def members(connection: sa.Connection) -> list[base.Member]:
    query = sa.select(t.members).order_by(t.members.c.client_index)
    return _all(connection, query, base.Member)


# Runs


def _columns_of(record: type[base.RunRecord | base.RunHead]) -> sa.Select[Any]:
    columns = (
        t.runs.c[field.name] if field.name in t.runs.c else t.run_data.c[field.name]
        for field in dataclasses.fields(record)
    )
    return sa.select(*columns).join_from(t.runs, t.run_data)


_RUN, _HEAD = _columns_of(base.RunRecord), _columns_of(base.RunHead)


def add_run(connection: sa.Connection, again: bool, record: base.RunRecord) -> None:
    if again and run(connection, record.run_id) == record:
        return
    fields = asdict(record)
    with refusing(f"run {record.run_id!r} exists already"):
        for table in (t.runs, t.run_data):
            row = {c.name: fields[c.name] for c in table.c if c.name in fields}
            connection.execute(sa.insert(table), row)
    # Checked last: the insert has waited for a concurrent deletion of the run.
    if deleted(connection, record.run_id) is not None:
        raise base.RunDeleted(f"run {record.run_id!r} was deleted")


def heads(connection: sa.Connection) -> list[base.RunHead]:
    return _all(connection, _HEAD.order_by(t.runs.c.seq), base.RunHead)


def run(connection: sa.Connection, run_id: str) -> base.RunRecord | None:
    return _one(connection, _RUN.where(t.runs.c.run_id == run_id), base.RunRecord)


def versions(connection: sa.Connection) -> dict[str, int]:
    query = sa.select(t.runs.c.run_id, t.runs.c.version).order_by(t.runs.c.seq)
    return {row.run_id: row.version for row in connection.execute(query)}


def closed(connection: sa.Connection, assignment_id: str) -> base.ClosedWork | None:
    query = sa.select(t.closed_work).where(t.closed_work.c.assignment_id == assignment_id)
    return _one(connection, query, base.ClosedWork)


def memory(
    connection: sa.Connection, run_id: str, client_index: int, at_round: int | None = None
) -> bytes | None:
    c = t.memories.c
    query = sa.select(c.value).where(c.run_id == run_id, c.client_index == client_index)
    if at_round is not None:
        query = query.where(c.round == at_round)
    return connection.execute(query.order_by(c.round.desc()).limit(1)).scalar()


def log(
    connection: sa.Connection,
    run_id: str,
    kind: str | None = None,
    after: int = -1,
    limit: int | None = None,
) -> list[base.LogEntry]:
    which = (t.log.c.run_id == run_id) & (t.log.c.version > after)
    if kind is not None:
        which &= t.log.c.kind == kind
    if limit is not None:
        first = sa.select(t.log.c.version).where(which).order_by(t.log.c.version).limit(limit)
        last = sa.select(sa.func.max(first.subquery().c.version)).scalar_subquery()
        which &= t.log.c.version <= last
    query = sa.select(t.log.c.kind, t.log.c.body, t.log.c.version).where(which)
    return _all(connection, query.order_by(t.log.c.version, t.log.c.position), base.LogEntry)


def trim(
    connection: sa.Connection, run_id: str, *, log: bool = False, closed: bool = False
) -> None:
    for table, wanted in ((t.log, log), (t.memories, log), (t.closed_work, closed)):
        if wanted:
            connection.execute(sa.delete(table).where(table.c.run_id == run_id))


def delete_run(
    connection: sa.Connection, again: bool, run_id: str, version: int, now: float
) -> None:
    query = sa.select(t.runs.c.version).where(t.runs.c.run_id == run_id).with_for_update()
    at_version = connection.execute(query).scalar_one_or_none()
    if at_version is None:
        if again and deleted(connection, run_id) is not None:
            return
        raise KeyError(run_id)
    if at_version != version:
        raise base.VersionConflict(f"run {run_id!r} is at version {at_version}, not {version}")
    for table in (*_OF_RUN, t.runs):
        connection.execute(sa.delete(table).where(table.c.run_id == run_id))
    connection.execute(sa.insert(t.deleted_runs), {"run_id": run_id, "deleted_at": now})


def deleted(connection: sa.Connection, run_id: str) -> float | None:
    query = sa.select(t.deleted_runs.c.deleted_at).where(t.deleted_runs.c.run_id == run_id)
    deleted_at: float | None = connection.execute(query).scalar_one_or_none()
    return deleted_at


# Statements of a commit, built once.
_ADVANCE = (
    sa.update(t.runs)
    .where(
        t.runs.c.run_id == sa.bindparam("of_run"), t.runs.c.version == sa.bindparam("at_version")
    )
    .values(version=t.runs.c.version + 1, document=sa.bindparam("new_document"))
)
_SET_ARRAYS = (
    sa.update(t.run_data)
    .where(t.run_data.c.run_id == sa.bindparam("of_run"))
    .values(arrays=sa.bindparam("new_arrays"))
)
_LEAVE = sa.delete(t.members).where(t.members.c.client_index == sa.bindparam("of_client"))
_CLOSE, _APPEND = sa.insert(t.closed_work), sa.insert(t.log)


def commit(connection: sa.Connection, run_id: str, version: int, commit: base.Commit) -> None:
    advanced = connection.execute(
        _ADVANCE, {"of_run": run_id, "at_version": version, "new_document": commit.document}
    )
    if advanced.rowcount != 1:
        query = sa.select(t.runs.c.version).where(t.runs.c.run_id == run_id)
        at_version = connection.execute(query).scalar_one_or_none()
        if at_version is None:
            raise KeyError(run_id)
        raise base.VersionConflict(f"run {run_id!r} is at version {at_version}, not {version}")
    if commit.arrays is not None:
        connection.execute(_SET_ARRAYS, {"of_run": run_id, "new_arrays": commit.arrays})
    if commit.closed:
        with refusing("work can be closed only once"):
            connection.execute(_CLOSE, [asdict(work) for work in commit.closed])
    if commit.log:
        entries = [replace(entry, version=version + 1) for entry in commit.log]
        rows = [{"run_id": run_id, "position": at, **asdict(e)} for at, e in enumerate(entries)]
        connection.execute(_APPEND, rows)
    if commit.back_to is not None:
        later = (t.memories.c.run_id == run_id) & (t.memories.c.round > commit.back_to)
        connection.execute(sa.delete(t.memories).where(later))
    if commit.memories:
        rows = [{"run_id": run_id, **asdict(memory)} for memory in commit.memories]
        _upsert(connection, t.memories, rows)


def _upsert(connection: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
    dialect: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table)
    keys = list(table.primary_key)
    values = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    statement = statement.on_conflict_do_update(index_elements=keys, set_=values)
    connection.execute(statement, list(rows))
