"""`fedone db`: the schema of a store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._options import SchemaStore, group
from fedone_sdk.errors import ArgumentError

if TYPE_CHECKING:
    from fedone_sdk.stores import SqlStore

app = group("Manage a store.", example="fedone db upgrade config.yaml")

Config = Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml", help="The service.")]


@app.command(epilog="Example: fedone db upgrade --store postgresql://fedone@db.example/fedone")
def upgrade(config_path: Config = None, url: SchemaStore = None) -> None:
    """Upgrade a store to the newest schema; its contents are kept.

    Stop every server on it first, and make a backup. Without arguments the store is that of the
    environment variable FEDONE_STORE__URL.
    """
    from fedone_sdk.stores.sql.schema import HEAD

    store = _store(config_path, url)
    before = asyncio.run(store.schema())
    if before == HEAD:
        typer.echo(f"schema {HEAD} is the newest")
        return
    asyncio.run(store.upgrade())
    typer.echo(f"created schema {HEAD}" if before is None else f"upgraded {before} to {HEAD}")


def _store(config_path: Path | None, url: str | None) -> SqlStore:
    if config_path is not None and url is not None:
        raise ArgumentError("give CONFIG.yaml or --store, not both")
    if url is not None:
        from fedone_sdk.stores import SqlStore

        return SqlStore(url) if "://" in url else SqlStore.sqlite(url)

    from fedone_sdk.aggregator.config import ServeConfig

    config = ServeConfig.load(config_path)
    folder = Path() if config_path is None else config_path.parent
    with naming(str(config_path or "environment")):
        return config.store.build(folder)
