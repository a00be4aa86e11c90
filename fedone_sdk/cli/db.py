"""`fedone db` and `fedone budget`: the schema and copies of a store, and the leases of a ledger."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._options import STORE, JsonFile, SchemaStore, command, group
from fedone_sdk.cli._output import Output, moment, plural
from fedone_sdk.cli._process import naming
from fedone_sdk.errors import ArgumentError, SpecError, UnknownLease

if TYPE_CHECKING:
    from fedone_sdk.budget import OpenLease, OwnerState, SqliteLedger, Usage
    from fedone_sdk.stores import SqlStore


app = group("Manage a store.", example="fedone db upgrade config.yaml")

Config = Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml", help="The service.")]


@command(app)
def upgrade(config_path: Config = None, url: SchemaStore = None) -> None:
    """Upgrade a store to the newest schema; its contents are kept.

    Stop every server on it first, and make a backup. Without arguments the store is that of the
    environment variable FEDONE_STORE__URL.

    Example: fedone db upgrade --store postgresql://fedone@db.example/fedone
    """
    from fedone_sdk.stores.sql.schema import HEAD

    store = _store(config_path, url)
    before = asyncio.run(store.schema())
    if before == HEAD:
        typer.echo(f"schema {HEAD} is the newest")
        return
    asyncio.run(store.upgrade())
    typer.echo(f"created schema {HEAD}" if before is None else f"upgraded {before} to {HEAD}")


@command(app)
def copy(source: Annotated[str, typer.Argument(metavar="FROM", help=STORE)], target: str) -> None:
    """Copy a store into an empty one, with all runs, clients and tokens.

    Stop every server on both first. Then serve the copy only, because two servers would each spend
    up to the caps.

    Example: fedone db copy fedone.db postgresql://fedone@db.example/fedone

    Args:
        target (TO): An empty store, as FROM.
    """
    from fedone_sdk.aggregator import snapshot_sha256

    copied = asyncio.run(_store_at(source).copy_to(_store_at(target), snapshot_sha256))
    for run_id, found in copied.digests.items():
        typer.echo(f"run {run_id}: alpha_sha256 {found}")
    rows = copied.rows
    typer.echo(
        f"copied {plural(rows['runs'], 'run')}, {plural(rows['log'], 'log line')}, "
        f"{plural(rows['clients'], 'client')}, {plural(rows['tokens'], 'token')}"
    )


def _store(config_path: Path | None, url: str | None) -> SqlStore:
    if config_path is not None and url is not None:
        raise ArgumentError("give CONFIG.yaml or --store, not both")
    if url is not None:
        return _store_at(url)
    from fedone_sdk.aggregator import ServeConfig

    if config_path is not None and _is_database(config_path):
        raise ArgumentError(f"{config_path}: is a database, not a CONFIG.yaml: name it by --store")
    config = ServeConfig.load(config_path)
    folder = Path() if config_path is None else config_path.parent
    with naming(str(config_path or "environment")):
        return config.store.build(folder)


def _is_database(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"
    return False


def _store_at(where: str) -> SqlStore:
    from fedone_sdk.stores import SqlStore

    return SqlStore.at(where) if "://" in where else SqlStore.sqlite(where)


def budget(
    path: Path,
    lease_ids: Annotated[list[str] | None, typer.Option("--release")] = None,
    dead: Annotated[bool, typer.Option("--release-dead")] = False,
    unspent: bool = False,
    json_file: JsonFile = None,
) -> None:
    """Show the spent and leased amounts of a ledger, and release leases of ended processes.

    A killed process may have sent the request of an open lease, and the provider may have charged
    for it. A released lease therefore counts as spent in full, unless --unspent is given. If a
    process settles a released lease later, the actual usage replaces that charge.

    Example: fedone budget spent.db --release-dead

    Args:
        path (LEDGER): The SQLite file of a SqliteLedger: .fedone/NAME.compare/ledger.sqlite of
            `fedone compare`.
        lease_ids (LEASE_ID): Release this lease; repeatable.
        dead: Release all leases of processes that have ended.
        unspent: Charge nothing for released leases, if you are certain that nothing was spent.
    """
    from fedone_sdk.budget import NOTHING

    output = Output(json_file)
    released: list[tuple[OpenLease, OwnerState]] = []
    with _opened(path) as ledger:
        if lease_ids or dead:
            for lease, state in _chosen(_stated(ledger.leases()), lease_ids):
                with suppress(UnknownLease):  # Settled in the meantime.
                    ledger.release(lease.lease_id, charge=NOTHING if unspent else None)
                    released.append((lease, state))
        account, leases = ledger.account(None), _stated(ledger.leases())
    charged = NOTHING if unspent else sum((lease.worst for lease, _ in released), NOTHING)
    output.write_json(
        {
            "spent": account.spent,
            "leased": account.leased,
            "leases": [_document(lease, state) for lease, state in leases],
            "released": [lease.lease_id for lease, _ in released],
            "charged": charged,
        }
    )
    output.heading(str(path))
    output.facts({"spent": _text(account.spent), "leased": _text(account.leased)})
    if leases:
        _print(output, leases)
    if released:
        output.console.print(
            f"leases released: {len(released)}; counted as spent: {_text(charged)}"
        )


def _chosen(
    leases: list[tuple[OpenLease, OwnerState]], lease_ids: list[str] | None
) -> list[tuple[OpenLease, OwnerState]]:
    if not lease_ids:
        return [(lease, state) for lease, state in leases if state == "ended"]
    known = {lease.lease_id: (lease, state) for lease, state in leases}
    problems = [f"lease {name!r} is not open" for name in lease_ids if name not in known]
    chosen = [known[name] for name in dict.fromkeys(lease_ids) if name in known]
    problems += [
        f"lease {lease.lease_id!r}: its process {lease.owner.pid} ({lease.owner.program}) runs and "
        "may still settle it; stop it first"
        for lease, state in chosen
        if state == "running"
    ]
    if problems:
        raise ArgumentError(problems)
    return chosen


@contextmanager
def _opened(path: Path) -> Iterator[SqliteLedger]:
    from fedone_sdk.budget import SqliteLedger

    if not path.is_file():
        raise ArgumentError(f"there is no file {path}")
    try:
        if not SqliteLedger.is_ledger(path):
            raise SpecError("is no ledger of a budget", source=str(path))
        yield SqliteLedger(path)
    except sqlite3.Error as exc:
        raise SpecError(f"cannot be used: {exc}", source=str(path)) from exc


def _stated(leases: list[OpenLease]) -> list[tuple[OpenLease, OwnerState]]:
    return [(lease, lease.owner.state()) for lease in leases]


def _document(lease: OpenLease, state: OwnerState) -> dict[str, object]:
    found = {"lease_id": lease.lease_id, "worst": lease.worst, "state": state}
    return found | asdict(lease.owner)


def _print(output: Output, leases: list[tuple[OpenLease, OwnerState]]) -> None:
    output.table(
        ["lease", "process", "host", "program", "opened", "state", "holds"],
        (
            [
                lease.lease_id,
                str(lease.owner.pid),
                lease.owner.host,
                lease.owner.program,
                moment(lease.owner.opened_at),
                state,
                _text(lease.worst),
            ]
            for lease, state in leases
        ),
    )


def _text(usage: Usage) -> str:
    counts = {
        "queries": usage.queries,
        "requests": usage.requests,
        "prompt tokens": usage.prompt_tokens,
        "completion tokens": usage.completion_tokens,
    }
    parts = [f"{unit} {count}" for unit, count in counts.items() if count]
    if usage.usd:
        parts.append(f"USD {usage.usd:.4f}")
    return ", ".join(parts) or "nothing"
