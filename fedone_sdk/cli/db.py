"""`fedone db`: the schema and the copies of a store."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._options import STORE, SchemaStore, command, group
from fedone_sdk.cli._output import plural
from fedone_sdk.cli._process import naming
from fedone_sdk.errors import ArgumentError

if TYPE_CHECKING:
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
    from fedone_sdk.stores import SqlStore

    copied = asyncio.run(SqlStore.at(source).copy_to(SqlStore.at(target), snapshot_sha256))
    for run_id, digest in copied.digests.items():
        typer.echo(f"run {run_id}: alpha_sha256 {digest}")
    rows = copied.rows
    typer.echo(
        f"copied {plural(rows['runs'], 'run')}, {plural(rows['log'], 'log line')}, "
        f"{plural(rows['clients'], 'client')}, {plural(rows['tokens'], 'token')}"
    )


def _store(config_path: Path | None, url: str | None) -> SqlStore:
    if config_path is not None and url is not None:
        raise ArgumentError("give CONFIG.yaml or --store, not both")
    from fedone_sdk.aggregator import ServeConfig
    from fedone_sdk.stores import SqlStore

    if url is not None:
        return SqlStore.at(url)

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
