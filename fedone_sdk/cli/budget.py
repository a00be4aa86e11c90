"""`fedone budget`: the ledger file of a budget."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._options import JsonFile, group
from fedone_sdk.cli._output import Output, moment
from fedone_sdk.errors import ArgumentError, SpecError, UnknownLease

if TYPE_CHECKING:
    from fedone_sdk.budget import Account, OpenLease, OwnerState, SqliteLedger, Usage

app = group(
    "Show a ledger file, and release the leases of killed processes.",
    example="fedone budget show spent.db",
)

Ledger = Annotated[
    Path,
    typer.Argument(
        metavar="LEDGER",
        help="The SQLite file of a SqliteLedger: "
        ".fedone/NAME.compare/ledger.sqlite of `fedone compare`.",
    ),
]


@app.command(epilog="Example: fedone budget show spent.db --json leases.json")
def show(path: Ledger, json_file: JsonFile = None) -> None:
    """Show the spent and leased amounts, and the process of each lease.

    A process of this host is running or has ended. For a process of another host, or of a version
    that recorded no owner, the state is unknown.
    """
    output = Output(json_file)
    with _opened(path) as ledger:
        account, leases = ledger.account(None), _stated(ledger.leases())
    output.write_json(
        {
            "spent": account.spent,
            "leased": account.leased,
            "leases": [_document(lease, state) for lease, state in leases],
        }
    )
    _print(output, path, account, leases)


@app.command(epilog="Example: fedone budget release spent.db --dead --dry-run")
def release(
    path: Ledger,
    lease_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="LEASE_ID...", help="Ids of leases, as shown by `show`."),
    ] = None,
    dead: Annotated[
        bool, typer.Option("--dead", help="Release all leases of processes that have ended.")
    ] = False,
    unspent: Annotated[
        bool,
        typer.Option(
            "--unspent",
            help="Charge nothing, if you are certain that nothing was spent. "
            "By default the full amount counts as spent.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also release leases of running processes.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be released, and change nothing.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Release the leases of ended processes.

    A killed process may have sent the request of an open lease, and the provider may have charged
    for it. A lease therefore counts as spent in full, unless --unspent is given. If a process
    settles a released lease later, the actual usage replaces that charge.
    """
    from fedone_sdk.budget import NOTHING

    output = Output(json_file)
    if bool(lease_ids) == dead:
        raise ArgumentError("give LEASE_IDs or --dead")
    with _opened(path) as ledger:
        chosen = _chosen(_stated(ledger.leases()), lease_ids, force=force)
        released = []
        for lease, state in chosen:
            if not dry_run:
                try:
                    ledger.release(lease.lease_id, charge=NOTHING if unspent else None)
                except UnknownLease:  # Settled in the meantime.
                    continue
            released.append((lease, state))
        account = ledger.account(None)
    output.write_json(
        {
            "released": [lease.lease_id for lease, _ in released],
            "charged": _total(released, unspent),
            "dry_run": dry_run,
            "spent": account.spent,
            "leased": account.leased,
        }
    )
    _print(output, path, account, released)
    output.console.print(
        f"leases {'that would be ' if dry_run else ''}released: {len(released)}; counted as spent: "
        f"{_text(_total(released, unspent))}"
    )
    if released and not unspent:
        output.console.print(
            "their requests may have been sent and charged; --unspent counts nothing as spent"
        )


def _chosen(
    leases: list[tuple[OpenLease, OwnerState]], lease_ids: list[str] | None, *, force: bool
) -> list[tuple[OpenLease, OwnerState]]:
    """Return the named leases, else those of processes that have ended.

    Raises:
        SpecError: A lease is not open, or its process is running. No lease is released then.
    """
    if not lease_ids:
        return [(lease, state) for lease, state in leases if state == "ended"]
    known = {lease.lease_id: (lease, state) for lease, state in leases}
    problems = [f"lease {name!r} is not open" for name in lease_ids if name not in known]
    chosen = [known[name] for name in dict.fromkeys(lease_ids) if name in known]
    if not force:
        problems += [
            f"lease {lease.lease_id!r}: its process {lease.owner.pid} ({lease.owner.program}) "
            "runs and may still settle it; stop it, or give --force"
            for lease, state in chosen
            if state == "running" and lease.owner is not None
        ]
    if problems:
        raise ArgumentError(problems)
    return chosen


@contextmanager
def _opened(path: Path) -> Iterator[SqliteLedger]:
    """Open the ledger in an existing file.

    Raises:
        SpecError: The file is not a ledger, or cannot be used.
    """
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
    return [(lease, lease.state()) for lease in leases]


def _total(leases: list[tuple[OpenLease, OwnerState]], unspent: bool) -> Usage:
    from fedone_sdk.budget import NOTHING

    return NOTHING if unspent else sum((lease.worst for lease, _ in leases), NOTHING)


def _document(lease: OpenLease, state: OwnerState) -> dict[str, object]:
    owner = lease.owner
    return {
        "lease_id": lease.lease_id,
        "worst": lease.worst,
        "state": state,
        "host": owner and owner.host,
        "pid": owner and owner.pid,
        "program": owner and owner.program,
        "opened_at": owner and owner.opened_at,
    }


def _print(
    output: Output, path: Path, account: Account, leases: list[tuple[OpenLease, OwnerState]]
) -> None:
    output.heading(str(path))
    output.facts({"spent": _text(account.spent), "leased": _text(account.leased)})
    if not leases:
        return
    output.table(
        ["lease", "process", "host", "program", "opened", "state", "holds"],
        (
            [
                lease.lease_id,
                *(
                    ("-", "-", "-", "-")
                    if (owner := lease.owner) is None
                    else (str(owner.pid), owner.host, owner.program, moment(owner.opened_at))
                ),
                state,
                _text(lease.worst),
            ]
            for lease, state in leases
        ),
    )


def _text(usage: Usage) -> str:
    """Return an amount as text: the units that are not 0."""
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
