"""A small federation, and its nodes without Flower."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedone_sdk.backends import LLMBackend
from fedone_sdk.flower.node_server import NodeServer
from fedone_sdk.flower.relay import Kept, Relay, kept_folder, turn
from fedone_sdk.flower.wire import Item, pack, unpack
from fedone_sdk.local import Federation, simulate
from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Example
from fedone_sdk.testing import ScriptedBackend
from tests.edge import edge_client

NODES = 6

SEARCH = {"method": {"name": "thompson", "num_samples": 6, "batch_size": 4}, "rounds": 5}
"""The server learns, and what it learns from is the losses by class (calibration labels)."""

GRADIENT = {
    "method": {
        "name": "gs-bdpl",
        "num_samples": 3,
        "batch_size": 4,
        "optimizer": "adamw",
        "local_steps": 2,
    },
    "participation": {"exchange": "alpha"},
    "rounds": 6,
}
"""Nodes learn, with an optimiser whose state is theirs from round to round."""


def federation(folder: Path, **changes: Any) -> Federation:
    """Rows of a few words, spread over `NODES` nodes."""
    rows = [{"text": f"row {n} {('bad', 'good')[n % 2]}", "label": n % 2} for n in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    document = {
        "name": "small",
        "task": {"template": "{text} It was{prompt} {mask}.", "labels": {0: " bad", 1: " good"}},
        "data": {"train": "rows.jsonl", "dev": "rows.jsonl", "num_clients": NODES, "shots": 4},
        "prompt": {"length": 4, "vocabulary": {"kind": "pmi", "size": 20}},
        "participation": {"exchange": "losses"},
        "evaluation": {"every": 2, "examples": 8},
        **changes,
    }
    return Federation.load(RunSpec.model_validate(document), folder)


def of_our_own(wanted: Federation) -> RunResult:
    """How the same run ends in our own simulation."""
    return asyncio.run(simulate(wanted, backend=ScriptedBackend(), transport="memory"))


class Node:
    """An edge client that lives for one message at a time, as Flower's ClientApps do."""

    def __init__(self, shard: Sequence[Example], backend: LLMBackend | None = None) -> None:
        self.shard = shard
        self.kept: Kept = {}
        self._backend = backend

    async def reply(self, items: Sequence[Item]) -> Item:
        answers = unpack(pack(items))  # as it travels
        with kept_folder(self.kept) as (folder, after):
            relay = Relay("node", answers)
            client = edge_client(
                "flower",
                token="flower",
                data=lambda: self.shard,
                backend=self._backend,
                state_dir=folder,
                transport=relay,
            )
            call = await turn(client, relay)
        self.kept = after
        [travelled] = unpack(pack([call]))
        return travelled


async def admit(node_server: NodeServer, nodes: Mapping[int, Node]) -> dict[int, str]:
    """Lets nodes in, in the order of their numbers."""
    return await node_server.admit(
        [(number, f"partition-{number}", await node.reply([])) for number, node in nodes.items()]
    )


async def legs(node_server: NodeServer, nodes: Mapping[int, Node], most: int = 1000) -> int:
    """Takes messages to and fro until the run ends; returns how often."""
    for leg in range(most):
        if node_server.run.ended.is_set():
            return leg
        outgoing = await node_server.outgoing(nodes.keys())
        assert outgoing, "no node has work, and the run has not ended"
        for number, items in outgoing.items():
            await node_server.receive(number, await nodes[number].reply(items))
        account = node_server.run.state.account
        if account.cap is not None and account.cap.queries is not None:
            assert account.held.queries <= account.cap.queries
    return most
