"""Edge clients from flat options, which tests vary one at a time."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedone_sdk.client import EdgeClient, Hooks, Network, WorkPolicy

_HOOKS, _NETWORK, _POLICY = ({f.name for f in fields(k)} for k in (Hooks, Network, WorkPolicy))


def edge_client(server: str, **options: Any) -> EdgeClient:
    """Create an edge client from arguments of `EdgeClient` and of its options."""
    hooks = {name: options.pop(name) for name in _HOOKS & options.keys()}
    network = {name: options.pop(name) for name in _NETWORK & options.keys()}
    policy = {name: options.pop(name) for name in _POLICY & options.keys()}
    policy["privacy"] = options.pop("require_privacy", None)
    if network:
        options["network"] = Network(**network)
    return EdgeClient(server, policy=WorkPolicy(**policy), hooks=Hooks(**hooks), **options)


async def run_to_end(client: EdgeClient) -> None:
    """Take turns until the client's runs have ended, without the waits between the turns."""
    while (await client.run_once()).outcome != "ended":
        pass


def stored(state_dir: Path, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Return rows of a device's state file, or change them."""
    file = state_dir / "state.sqlite3"
    with closing(sqlite3.connect(f"file:{file}?mode=rw", uri=True)) as db, db:
        return db.execute(query, values).fetchall()


def entries(state_dir: Path, kind: str) -> list[str]:
    """Return the values of a kind in a device's state file, oldest first."""
    query = "SELECT value FROM entries WHERE kind = ? ORDER BY rowid"
    return [value for (value,) in stored(state_dir, query, kind)]
