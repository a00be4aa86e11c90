"""The bridge without Flower: nodes that live for one message, and their server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.errors import DataError, MessageError, SpecError
from fedone_sdk.flower import node_file, node_shard
from fedone_sdk.flower.node_server import NodeServer, Tuning
from fedone_sdk.flower.wire import Body, Item, item_of, pack, unpack
from fedone_sdk.local import Federation
from fedone_sdk.messages import Decline, RunResult
from fedone_sdk.stores import SqlStore, Store
from fedone_sdk.testing import ScriptedBackend
from tests.flower.federations import (
    GRADIENT,
    NODES,
    SEARCH,
    Node,
    admit,
    federation,
    legs,
    of_our_own,
)


def tuning(wanted: Federation, **options: Any) -> Tuning:
    return Tuning(spec=wanted.spec, vocabulary=wanted.vocabulary, **options)


def nodes_of(wanted: Federation, backend: Any = None) -> dict[int, Node]:
    return {number: Node(shard, backend) for number, shard in enumerate(wanted.shards)}


async def tuned(wanted: Federation, *, own_models: bool = False) -> RunResult:
    backend = ScriptedBackend()
    server = None if own_models else backend
    dev = () if own_models else wanted.dev
    async with NodeServer(tuning(wanted, backend=server, dev=dev)) as node_server:
        nodes = nodes_of(wanted, backend if own_models else None)
        assert await admit(node_server, nodes) == {}
        await node_server.measure()
        await legs(node_server, nodes)
        await node_server.wait()
        return node_server.run.result()


@pytest.mark.parametrize(
    "changes",
    [
        SEARCH,
        GRADIENT,
        {**GRADIENT, "participation": {"exchange": "losses", "clients_per_round": 2}},
        {
            **GRADIENT,
            "participation": {
                "exchange": "losses",
                "clients_per_round": 4,
                "selection": "proportional",
            },
            "rounds": 3,
        },
        {**SEARCH, "budget": {"queries": 28}},
        {**GRADIENT, "budget": {"queries": 29}, "calibration": "none"},
    ],
    ids=["losses", "alpha", "two-a-round", "two-seats-of-a-node", "losses-capped", "alpha-capped"],
)
def test_it_ends_where_our_own_simulation_ends(changes: dict[str, Any], tmp_path: Path) -> None:
    wanted = federation(tmp_path, **changes)
    own = of_our_own(wanted)
    result = asyncio.run(tuned(wanted))
    assert result.alpha_sha256 == own.alpha_sha256
    assert result.prompt == own.prompt
    assert result.metric == own.metric
    assert result.spent == own.spent
    assert result.status == own.status
    assert [r.mean_loss for r in result.history] == [r.mean_loss for r in own.history]


def test_nodes_with_models_of_their_own_end_there_too(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **SEARCH)
    own = of_our_own(wanted)
    result = asyncio.run(tuned(wanted, own_models=True))
    assert result.alpha_sha256 == own.alpha_sha256
    assert result.spent.queries == own.spent.queries == 30


async def test_a_reply_that_comes_twice_counts_once(tmp_path: Path) -> None:
    wanted, model = federation(tmp_path, **SEARCH, budget={"queries": 30}), ScriptedBackend()
    async with NodeServer(tuning(wanted, backend=model)) as node_server:
        nodes = nodes_of(wanted)
        await admit(node_server, nodes)
        while not node_server.run.ended.is_set():
            for number, items in (await node_server.outgoing(nodes.keys())).items():
                call = await nodes[number].reply(items)
                for _ in range(3):
                    assert await node_server.receive(number, call) is None
        await node_server.wait()
        result = node_server.run.result()
        asked = sum(query.want == "labels" for query in model.asked)
    assert result.spent.queries == asked == 30
    assert len(result.history) == 5
    assert result.alpha_sha256 == (await asyncio.to_thread(of_our_own, wanted)).alpha_sha256


async def test_a_killed_node_has_spent_its_lease_and_another_gets_its_seat(
    tmp_path: Path,
) -> None:
    wanted = federation(tmp_path, **SEARCH, budget={"queries": 30})
    model = ScriptedBackend()
    async with NodeServer(tuning(wanted)) as node_server:  # What nodes spend, only they know.
        nodes = nodes_of(wanted, model)
        await admit(node_server, nodes)
        [dead] = await node_server.outgoing(nodes.keys())
        late = await nodes[dead].reply((await node_server.outgoing(nodes.keys()))[dead])
        await node_server.drop(dead, "the battery is empty")
        assert node_server.run.state.account.spent.queries == 6
        assert not node_server.is_enrolled(dead)
        [other] = await node_server.outgoing(nodes.keys())
        assert other != dead
        # It comes back with its work: it gets the receipt, and works again.
        assert await node_server.admit([(dead, f"partition-{dead}", late)]) == {}
        await legs(node_server, nodes)
        result = node_server.run.result()
    assert result.spent.queries == 30
    assert len(result.history) == 4
    assert result.status == "budget_exhausted"


async def test_late_work_is_refused_and_stays_paid(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **SEARCH, budget={"queries": 30})
    async with NodeServer(tuning(wanted, backend=ScriptedBackend())) as node_server:
        nodes = nodes_of(wanted)
        await admit(node_server, nodes)
        [[number, items]] = (await node_server.outgoing(nodes.keys())).items()
        await node_server.receive(number, await nodes[number].reply(items))  # its texts are scored
        update = await nodes[number].reply((await node_server.outgoing(nodes.keys()))[number])
        assert update.kind == "update"
        work = item_of("decline", update.subject, Decline(reason="the deadline passed"))
        await node_server.receive(number, work)
        await node_server.receive(number, update)
        assert node_server.run.state.round == 0
        assert node_server.run.state.account.spent.queries == 6
        await legs(node_server, nodes)
        assert node_server.run.result().spent.queries == 30
        assert len(node_server.run.history) == 4


@pytest.mark.parametrize("changes", [SEARCH, GRADIENT], ids=["losses", "alpha"])
@pytest.mark.parametrize("broken_after", [3, 4])
def test_a_server_that_starts_again_continues(
    changes: dict[str, Any], broken_after: int, tmp_path: Path
) -> None:
    wanted = federation(tmp_path, **changes)
    own = of_our_own(wanted)
    nodes = nodes_of(wanted)

    async def part(store: Store, names: Mapping[int, int], most: int) -> RunResult:
        async with NodeServer(
            tuning(wanted, backend=ScriptedBackend(), store=store)
        ) as node_server:
            there = {names[number]: node for number, node in nodes.items()}
            order = [(n, f"partition-{k}", await nodes[k].reply([])) for k, n in names.items()]
            assert await node_server.admit(order) == {}
            await legs(node_server, there, most)
            return node_server.run.result()

    path = tmp_path / "run.db"
    same = {number: number for number in nodes}
    others = {number: 1000 - number for number in nodes}  # SuperLink gives other ids
    first = asyncio.run(part(SqlStore.sqlite(path), same, broken_after))
    assert first.status == "running"
    result = asyncio.run(part(SqlStore.sqlite(path), others, 1000))
    assert result.status == "completed"
    assert result.alpha_sha256 == own.alpha_sha256
    assert result.spent.queries == own.spent.queries


async def test_a_node_without_examples_is_not_let_in(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **SEARCH)
    async with NodeServer(tuning(wanted, backend=ScriptedBackend())) as node_server:
        nodes = {**nodes_of(wanted), NODES: Node([])}
        assert await admit(node_server, nodes) == {NODES: "it has no examples"}
        assert node_server.num_nodes == NODES


async def test_a_reply_that_cannot_be_read_costs_the_seat_and_nothing_else(
    tmp_path: Path,
) -> None:
    wanted = federation(tmp_path, **SEARCH)
    async with NodeServer(tuning(wanted, backend=ScriptedBackend())) as node_server:
        nodes = nodes_of(wanted)
        await admit(node_server, nodes)
        [number] = await node_server.outgoing(nodes.keys())
        bad = Item(kind="update", subject="x", body=Body("application/json", b'{"losses": 1}'))
        reason = await node_server.receive(number, bad)
        assert reason is not None
        assert reason.startswith("update: ")
        assert not node_server.is_enrolled(number)
        assert node_server.run.state.account.spent.queries == 0


def test_a_missing_requirement_of_a_run_is_reported_at_once(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **SEARCH)
    with pytest.raises(SpecError, match="dev: is measured by the server's model"):
        NodeServer(tuning(wanted, dev=wanted.dev))
    own = federation(tmp_path, **{**SEARCH, "budget": {"usd": 1}})
    with pytest.raises(SpecError, match=r"budget\.usd: the server cannot bound this"):
        asyncio.run(tuned(own, own_models=True))


class Configured:
    def __init__(self, **node_config: object) -> None:
        self.node_config = {key.replace("_", "-"): value for key, value in node_config.items()}


def test_a_nodes_data(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **SEARCH)
    assert node_shard(wanted, Configured(partition_id=2)) == wanted.shards[2]
    assert len(node_file(Configured(data=str(tmp_path / "rows.jsonl")))) == 60
    for context, complaint in [
        (Configured(), "'partition-id' is missing; it is 0 to 5"),
        (Configured(partition_id=6), "'partition-id' is 6; the run's data has 6 shards"),
        (Configured(partition_id="a"), "'partition-id' is 'a', and must be a whole number"),
    ]:
        with pytest.raises(DataError, match=complaint):
            node_shard(wanted, context)
    with pytest.raises(DataError, match="'data' is missing; start the SuperNode with"):
        node_file(Configured())
    with pytest.raises(DataError, match="nowhere"):
        node_file(Configured(data=str(tmp_path / "nowhere.jsonl")))


LETTER = [item_of("decline", "a", Decline(reason="x")), item_of("task", "run", None)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"protocol": 99}, "upgrade_required"),
        ({"kinds": ["decline"]}, "lists of one length"),
        ({"bodies": None}, "lists of one length"),
        ({"kinds": ["decline", "format"]}, "there is no call 'format'"),
        ({"subjects": ["a", "b" * 201]}, "task: the subject or the form"),
        ({"forms": ["application/json", "application/pickle"]}, "task: the subject or the form"),
        ({"bodies": [b"", "text"]}, "a body is bytes"),
    ],
)
def test_a_malformed_record(change: dict[str, Any], complaint: str) -> None:
    record = pack(LETTER)
    assert unpack(record) == LETTER
    with pytest.raises(Exception, match=complaint):
        unpack({**record, **change})
    with pytest.raises(MessageError, match="there is no ConfigRecord 'fedone'"):
        unpack(None)


def test_a_body_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedone_sdk.flower.wire.MAX_BODY_BYTES", 8)
    with pytest.raises(MessageError, match="a body is bytes, at most 8"):
        unpack(pack(LETTER))
