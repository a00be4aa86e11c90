"""Replay of a run from its log, and its move to another store."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import random
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.archives.reading import import_run, read_archive
from fedone_sdk.aggregator.archives.writing import export_run
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.events import (
    Accepted,
    Assigned,
    Effect,
    ResumeRequested,
    RollbackRequested,
    StopRequested,
    TimePassed,
    UpdateArrived,
    WorkDeclined,
    WorkRequested,
)
from fedone_sdk.aggregator.rounds.replay import at_round, compare, replay
from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.serving.feed import RunReloaded
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.algorithms import load_memory
from fedone_sdk.budget import NOTHING
from fedone_sdk.client import AdminClient
from fedone_sdk.errors import ArchiveError, ProblemError
from fedone_sdk.messages import AlphaAssignment, AlphaUpdate, LossesAssignment, LossesUpdate, Scored
from fedone_sdk.messages.ndarray import from_wire, memory_from_wire, memory_to_wire, to_wire
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import ClientRecord, MemoryStore, RunSnapshot, SqlStore, TokenRecord
from fedone_sdk.testing import ManualClock, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.console import Fedone, the_line

WORDS = Vocabulary(candidates=(" good", " bad", "", " fine"))
NUM_CLIENTS = 4


def spec_of(
    *, method: dict[str, Any] | None = None, rounds: int = 6, cap: int | None = None, **part: Any
) -> RunSpec:
    few = {"num_samples": 4, "batch_size": 2}
    if method is None or "name" not in method:
        method = {"name": "gs-bdpl", "tau": 1, **(method or {})}
    return RunSpec.model_validate(
        {
            "name": "run",
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": ["x", "y"]}},
            "method": few | method,
            "participation": {"min_clients": 2, **part},
            "calibration": "none",
            "budget": None if cap is None else {"queries": cap},
            "rounds": rounds,
            "evaluation": {"every": 0},
            "seed": 3,
        }
    )


class Game:
    """A served run on a store, and devices under the test's control."""

    def __init__(self, spec: RunSpec, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.store, self.clock = MemoryStore(), ManualClock()
        self.here: Mapping[int, int] = {client: client + 1 for client in range(NUM_CLIENTS)}
        machine = RoundMachine("run", spec, vocab_size=len(WORDS), blank=WORDS.blank)
        self.run = ServedRun(
            machine,
            vocabulary=WORDS,
            store=self.store,
            clock=self.clock,
            available=lambda _: self.here,
            enrolled=lambda: NUM_CLIENTS,
            names=self.names,
            listener=self.hear,
        )
        self.works: dict[str, AlphaAssignment | LossesAssignment] = {}
        self.made = 0

    async def names(self, clients: Sequence[int]) -> list[str]:
        return [f"client-{client}" for client in clients]

    def hear(self, run: ServedRun, effect: Effect | RunReloaded) -> None:
        pass

    async def begin(self) -> None:
        await self.store.put_token(TokenRecord(name="t", token_sha256="t" * 64, created_at=0.0))
        for client in range(NUM_CLIENTS):
            await self.store.enrol(
                ClientRecord(
                    index=-1,
                    client_id=f"client-{client}",
                    credential_sha256=f"{client:064x}",
                    enrolled_at=1.5,
                ),
                "t" * 64,
                0.0,
            )
        await self.run.create()

    async def claim(self, client: int) -> AlphaAssignment | LossesAssignment | None:
        """As the service does it."""
        await self.run.seat()
        memory = {}
        if self.run.machine.remembers_clients:
            saved = await self.store.memory("run", client)
            memory = {} if saved is None else dict(load_memory(saved))
        self.made += 1
        asked = WorkRequested(client=client, assignment_id=f"work-{self.made}", memory=memory)
        for effect in await self.run.apply(asked):
            if isinstance(effect, Assigned):
                self.works[effect.assignment.assignment_id] = effect.assignment
                return effect.assignment
        return None

    async def send(self, work: AlphaAssignment | LossesAssignment) -> bool:
        """Sends an update for some work; whether it was accepted."""
        common: dict[str, Any] = {
            "num_examples": self.rng.randint(1, 9),
            "scored": Scored(scored=2),
            "usage": NOTHING,
            "model": "scripted",
        }
        update: AlphaUpdate | LossesUpdate
        if isinstance(work, LossesAssignment):
            losses = tuple(self.rng.uniform(0, 2) for _ in range(work.prompts.shape[0]))
            update = LossesUpdate(**common, losses=losses)
        else:
            update = self.alpha_update(work, common)
        self.works.pop(work.assignment_id, None)
        arrived = UpdateArrived(
            assignment_id=work.assignment_id, update=update, body_sha256="b" * 64
        )
        try:
            effects = await self.run.apply(arrived)
        except ProblemError as exc:
            if exc.code != "assignment_expired":
                raise
            return False
        return any(isinstance(effect, Accepted) for effect in effects)

    def alpha_update(self, work: AlphaAssignment, common: dict[str, Any]) -> AlphaUpdate:
        """What a device with NumPy does."""
        algorithm = self.run.machine.method
        state = self.run.machine.initial_state().method.evolve(
            alpha=from_wire(work.alpha), memory=memory_from_wire(work.memory)
        )
        for step in work.steps:
            asked = algorithm.ask(state, np.random.default_rng(step.prompt_seed), step.num_samples)
            losses = [self.rng.uniform(0, 2) for _ in asked.prompts]
            state = algorithm.tell(state, asked, losses)
        memory = memory_to_wire(state.memory) if algorithm.shares_memory else {}
        return AlphaUpdate(**common, alpha=to_wire(state.alpha), memory=memory, mean_loss=1.0)

    async def play(self, rounds: int | None = None) -> None:
        """Well-behaved devices, to the end or for some rounds."""
        while self.run.state.running and (rounds is None or self.run.state.round < rounds):
            await self.run.seat()
            for seat in self.run.state.seats:
                work = await self.claim(seat.client)
                if work is not None and (rounds is None or self.run.state.round < rounds):
                    await self.send(work)

    async def roll_back(self, to_round: int) -> None:
        """As the service does it."""
        log = await self.store.log("run")
        before = at_round(self.run.spec, WORDS, log, to_round)
        kept = await self.store.memories("run")
        await self.run.apply(
            RollbackRequested(
                method=before.state.method,
                memories={client: before.memories.get(client, {}) for client in kept},
                to_round=to_round,
                reason="a test",
            )
        )

    async def snapshot(self) -> RunSnapshot:
        found = await self.store.snapshot("run")
        assert found is not None
        return found


async def played(spec: RunSpec, rounds: int | None = None) -> Game:
    game = Game(spec)
    await game.begin()
    await game.play(rounds)
    return game


MATRIX = [
    {"exchange": exchange, "clients_per_round": clients, **more}
    for exchange in ("alpha", "losses")
    for clients in (1, 2)
    for more in (
        {},
        {"selection": "proportional"},
        {"aggregation": "examples"},
    )
]


@pytest.mark.parametrize("part", MATRIX, ids=lambda part: "-".join(map(str, part.values())))
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("local_steps", [1, 3])
async def test_every_round_again(part: dict[str, Any], optimizer: str, local_steps: int) -> None:
    method = {"optimizer": optimizer, "local_steps": local_steps, "learning_rate": 0.01}
    game = await played(spec_of(method=method, **part))
    snapshot = await game.snapshot()
    lines = list(replay(game.run.spec, WORDS, snapshot.log))
    assert [line.agrees for line in lines] == [True] * 6
    assert len({line.alpha_sha256 for line in lines}) == 6
    assert lines[-1].alpha_sha256 == game.run.result().alpha_sha256
    report = compare(snapshot)
    assert report.difference is None
    assert (report.rounds, report.rollbacks) == (6, 0)


@pytest.mark.parametrize(
    "part",
    [
        {"exchange": "alpha"},
        {"exchange": "losses"},
        {"exchange": "losses", "clients_per_round": 3},
    ],
    ids=lambda part: "-".join(map(str, part.values())),
)
async def test_a_search_again(part: dict[str, Any]) -> None:
    steps = 1 if part.get("clients_per_round") else 2
    game = await played(spec_of(method={"name": "random", "local_steps": steps}, **part))
    report = compare(await game.snapshot())
    assert report.difference is None
    assert report.rounds == 6


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    exchange=st.sampled_from(["alpha", "losses"]),
    clients=st.sampled_from([1, 2, 3]),
    local_steps=st.sampled_from([1, 2]),
    selection=st.sampled_from(["uniform", "proportional"]),
    cap=st.one_of(st.none(), st.integers(20, 120)),
)
def test_whatever_happens(
    seed: int,
    exchange: str,
    clients: int,
    local_steps: int,
    selection: str,
    cap: int | None,
) -> None:
    """Lost seats, declined work, stops, rollbacks, a cap that ends the run during a round."""
    spec = spec_of(
        method={"optimizer": "adamw", "local_steps": local_steps, "learning_rate": 0.1},
        exchange=exchange,
        clients_per_round=clients,
        selection=selection,
        cap=cap,
        rounds=8,
    )

    async def game_of() -> None:
        game = Game(spec, seed)
        await game.begin()
        rng = game.rng
        for _ in range(60):
            action = rng.choices(
                ["claim", "send", "decline", "wait", "stop", "roll back", "look"],
                [8, 8, 1, 1, 1, 1, 1],
            )[0]
            if action == "claim":
                await game.claim(rng.randrange(NUM_CLIENTS))
            elif action == "send" and game.works:
                await game.send(rng.choice(list(game.works.values())))
            elif action == "decline" and game.works:
                work = rng.choice(list(game.works))
                try:
                    await game.run.apply(WorkDeclined(assignment_id=work, reason="no"))
                except ProblemError as exc:
                    if exc.code != "assignment_expired":
                        raise
                del game.works[work]
            elif action == "wait":
                game.clock.advance(rng.choice([1.0, 11.0, 130.0]))
                await game.run.apply(TimePassed())
            elif action == "stop" and game.run.state.running:
                await game.run.apply(StopRequested())
                await game.run.apply(ResumeRequested())
            elif action == "roll back" and game.run.state.running:
                await game.roll_back(rng.randint(0, game.run.state.round))
            elif action == "look":
                report = compare(await game.snapshot())
                assert report.difference is None, str(report.difference)
        snapshot = await game.snapshot()
        report = compare(snapshot)
        assert report.difference is None, str(report.difference)
        assert report.alpha_sha256 == game.run.result().alpha_sha256
        # An archive of it can be read, whatever state it is in, and gives the same run.
        there = MemoryStore()
        await import_run(there, await export_run(game.store, "run"), game.clock.now())
        moved = await there.snapshot("run")
        assert moved is not None
        assert moved.log == snapshot.log
        assert moved.memories == snapshot.memories
        assert compare(moved).difference is None

    asyncio.run(game_of())


class TestDifferences:
    """A log that was changed is found out."""

    @staticmethod
    def changed(snapshot: RunSnapshot, at: int, change: Any) -> RunSnapshot:
        log = list(snapshot.log)
        body = json.loads(log[at].body)
        change(body)
        log[at] = replace(log[at], body=json.dumps(body))
        return replace(snapshot, log=tuple(log))

    async def test_a_loss(self) -> None:
        # A first step of AdamW would be the same for any loss of the same sign.
        method = {"optimizer": "sgd", "learning_rate": 0.01}
        snapshot = await (await played(spec_of(exchange="losses", method=method))).snapshot()

        def change(body: dict[str, Any]) -> None:
            body["seats"][0]["losses"][0][1] += 0.5

        difference = compare(self.changed(snapshot, 2, change)).difference
        assert difference is not None
        assert (difference.round, difference.what) == (3, "alpha")
        assert difference.stored == json.loads(snapshot.log[2].body)["alpha_sha256"]
        assert difference.replayed != difference.stored

    async def test_the_last_alpha(self) -> None:
        snapshot = await (await played(spec_of(exchange="losses"), rounds=3)).snapshot()
        other = await (await played(spec_of(exchange="losses"), rounds=2)).snapshot()
        forged = replace(snapshot.record, arrays=other.record.arrays)
        difference = compare(replace(snapshot, record=forged)).difference
        assert difference is not None
        assert difference.what == "alpha"

    async def test_a_clients_memory(self) -> None:
        snapshot = await (await played(spec_of(exchange="losses"), rounds=3)).snapshot()
        (index, _), *others = snapshot.memories
        forged = ((index, others[0][1]), *others)
        difference = compare(replace(snapshot, memories=forged)).difference
        assert difference is not None
        assert difference.what == "the clients' memory"

    @pytest.mark.parametrize(
        "change",
        [
            lambda body: body.pop("seats"),
            lambda body: body.update(round=7),
            lambda body: body["seats"].clear(),
            lambda body: body["seats"][0].update(client=-1),
            lambda body: body["seats"][0]["losses"][0].append(1.0),
            lambda body: body["seats"][0].update(losses=[[1e400, 1.0, 1.0, 1.0]]),
        ],
        ids=["no seats", "another round", "none", "no client", "too many", "infinite"],
    )
    async def test_a_damaged_line(self, change: Any) -> None:
        snapshot = await (await played(spec_of(exchange="losses"))).snapshot()
        with pytest.raises(ValueError, match=r"line 2 of the log"):
            compare(self.changed(snapshot, 1, change))


async def test_a_round_that_was_left_behind() -> None:
    game = await played(spec_of(exchange="losses", method={"optimizer": "adamw"}), rounds=4)
    third = at_round(game.run.spec, WORDS, await game.store.log("run"), 3)
    await game.roll_back(2)
    assert game.run.state.round == 2
    await game.play(3)
    other = at_round(game.run.spec, WORDS, await game.store.log("run"), 3)
    # On the way to where it stands now, not on the one that was given up.
    assert other.alpha_sha256 != third.alpha_sha256
    assert other.alpha_sha256 == game.run.result().alpha_sha256
    await game.play()
    report = compare(await game.snapshot())
    assert report.difference is None
    assert (report.rounds, report.rollbacks) == (4 + 4, 1)


# Archives


async def test_a_run_moves_during_its_work() -> None:
    """Its devices hand in their work to the new place, and it ends as it would have."""
    ends = []
    for moves in (False, True):
        game = await played(spec_of(exchange="losses", clients_per_round=2), rounds=3)
        await game.run.seat()
        works = [await game.claim(seat.client) for seat in game.run.state.seats]
        if moves:
            data = await export_run(game.store, "run", with_credentials=True)
            assert data == await export_run(game.store, "run", with_credentials=True)
            clients = await game.store.clients()
            game.store = MemoryStore()
            record = await import_run(game.store, data, game.clock.now())
            assert await game.store.clients() == clients
            assert (await game.store.snapshot("run")).record == record  # type: ignore[union-attr]
            moved = Game(game.run.spec)
            moved.store, moved.rng, moved.made = game.store, game.rng, game.made
            moved.run._store = game.store
            game = moved
            await game.run.load(record)
            assert game.run.state.status == "stopped"
            assert "imported" in (game.run.state.reason or "")
            assert len(game.run.result().history) == 3
            await game.run.apply(ResumeRequested())
        for work in works:
            assert work is not None
            assert await game.send(work)
        await game.play()
        ends.append(game.run.result())
        assert compare(await game.snapshot()).difference is None
    assert ends[0].alpha_sha256 == ends[1].alpha_sha256
    assert ends[0].history == ends[1].history
    assert ends[0].spent == ends[1].spent


class TestWhoMayTakeItIn:
    async def test_credentials_are_exported_only_on_request(self) -> None:
        game = await played(spec_of(), rounds=2)
        data = await export_run(game.store, "run")
        clients = read_archive(data).clients
        assert [client.client_id for client in clients] == [
            client.client_id for client in (await game.store.clients())[: len(clients)]
        ]
        for client in await game.store.clients():
            assert client.credential_sha256.encode() not in gzip.decompress(data)
            assert await game.store.client(client.credential_sha256) == client
        there = MemoryStore()
        await import_run(there, data, 0.0)
        for client in await game.store.clients():
            assert await there.client(client.credential_sha256) is None

    async def test_a_store_with_the_same_clients(self) -> None:
        game = await played(spec_of(), rounds=2)
        data = await export_run(game.store, "run")
        there = Game(spec_of())
        await there.begin()
        there.store._runs.clear()
        before = await there.store.clients()
        await import_run(there.store, data, 0.0)
        assert await there.store.clients() == before

    @pytest.mark.parametrize("ends", [False, True])
    async def test_a_store_with_other_clients(self, ends: bool) -> None:
        game = await played(spec_of(), rounds=None if ends else 2)
        data = await export_run(game.store, "run")
        there = MemoryStore()
        await there.put_token(TokenRecord(name="t", token_sha256="t", created_at=0.0))
        stranger = ClientRecord(
            index=-1, client_id="stranger", credential_sha256="s", enrolled_at=0.0
        )
        await there.enrol(stranger, "t", 0.0)
        if not ends:
            with pytest.raises(ArchiveError, match=r"client 0 is 'client-0' .*'stranger' here"):
                await import_run(there, data, 0.0)
            assert await there.runs() == []
            return
        await import_run(there, data, 0.0)
        assert [client.client_id for client in await there.clients()] == ["stranger"]
        # Taken out again, it does not pass this store's clients off as its own.
        again = read_archive(await export_run(there, "run"))
        assert again.clients == ()
        assert again.snapshot.log == (await game.snapshot()).log

    async def test_a_run_that_is_here_already(self) -> None:
        game = await played(spec_of(), rounds=2)
        before = await game.snapshot()
        with pytest.raises(ArchiveError, match="exists already"):
            await import_run(game.store, await export_run(game.store, "run"), 0.0)
        assert await game.snapshot() == before

    async def test_no_such_run(self) -> None:
        with pytest.raises(ArchiveError, match="no run 'gone'"):
            await export_run(MemoryStore(), "gone")


@pytest.fixture(scope="module")
def data() -> bytes:
    async def make() -> bytes:
        game = await played(spec_of(exchange="losses", clients_per_round=2), rounds=3)
        await game.run.seat()
        await game.claim(game.run.state.seats[0].client)
        return await export_run(game.store, "run", with_credentials=True)

    return asyncio.run(make())


class TestHostileArchives:
    @staticmethod
    def forged(data: bytes, change: Any) -> bytes:
        """The archive with its lines changed, and an end that fits them."""
        import hashlib

        lines = [json.loads(line) for line in gzip.decompress(data).splitlines()[:-1]]
        change(lines)
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        end = {"kind": "end", "lines": len(lines), "sha256": hashlib.sha256(text).hexdigest()}
        return gzip.compress(text + json.dumps(end).encode() + b"\n")

    async def refused(self, data: bytes, match: str) -> None:
        store = MemoryStore()
        with pytest.raises(ArchiveError, match=match) as caught:
            await import_run(store, data, 0.0)
        assert "\n" not in str(caught.value)
        assert await store.runs() == []
        assert await store.clients() == []

    async def test_the_whole_one_is_taken_in(self, data: bytes) -> None:
        await import_run(MemoryStore(), self.forged(data, lambda lines: None), 0.0)

    @pytest.mark.parametrize("seed", range(5))
    async def test_flipped_bits_and_lost_ends(self, data: bytes, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            broken = bytearray(data)
            if rng.random() < 0.5:
                # Past gzip's header, parts of which say nothing.
                broken[rng.randrange(10, len(broken))] ^= 1 << rng.randrange(8)
            else:
                del broken[rng.randrange(len(broken)) :]
            await self.refused(bytes(broken), "archive")

    async def test_a_bomb(self) -> None:
        bomb = gzip.compress(b"0" * 10_000_000)
        with pytest.raises(ArchiveError, match="more than 1000000 bytes"):
            read_archive(bomb, max_unpacked_bytes=1_000_000)

    async def test_compressed_arrays(self, data: bytes) -> None:
        import base64
        import hashlib
        import io

        def change(lines: list[Any]) -> None:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **{"memory/method/alpha": np.zeros((2, 4), "<f4")})
            payload = hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue()
            lines[1]["arrays"] = base64.b64encode(payload).decode()

        await self.refused(self.forged(data, change), "archive is damaged: not a saved memory")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda a: a.clear(), "not an archive"),
            (lambda a: a[0].update(format="tar"), "not an archive of a run"),
            (lambda a: a[0].update(version=2), "has version 2, this fedone-sdk reads 1"),
            (lambda a: a[0].update(run_id="other"), "described as"),
            (lambda a: a.pop(1), "first line is not a run"),
            (lambda a: a.append(a[1]), "occurs twice"),
            (lambda a: a[1].update(more=1), "more"),
            (lambda a: a[1].update(spec="{}"), "damaged"),
            (lambda a: a[1].update(document="[" * 100_000), "damaged"),
            (lambda a: a[1].update(candidates='["a"]'), "damaged"),
        ],
        ids=range(10),
    )
    async def test_other_lines(self, data: bytes, change: Any, match: str) -> None:
        await self.refused(self.forged(data, change), match)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("status", "dancing"),
            ("status", 7),
            ("round", 2),
            ("round", -1),
            ("round", "3"),
            ("round", True),
            ("fills", 1.5),
            ("reason", 3),
            ("passed", ["a"]),
            ("started_at", float("nan")),
            ("seats", [{}]),
            ("seats", 5),
            ("account", {"cap": {"queries": 10**9}, "spent": {}, "leases": {}}),
            ("account", {"cap": None, "spent": {"queries": -1}, "leases": {}}),
            ("account", {"cap": None, "spent": {}, "leases": {}}),
            ("metric", {"name": 3}),
            ("counters", {}),
            ("models", [1]),
            ("unheard_of", 1),
        ],
        ids=str,
    )
    async def test_other_states(self, data: bytes, key: str, value: Any) -> None:
        def change(lines: list[Any]) -> None:
            document = json.loads(lines[1]["document"])
            document[key] = value
            lines[1]["document"] = json.dumps(document)

        await self.refused(self.forged(data, change), "archive")

    async def test_other_losses(self, data: bytes) -> None:
        def change(lines: list[Any]) -> None:
            line = next(line for line in lines if line["kind"] == "log")
            body = json.loads(line["body"])
            body["seats"][0]["losses"][0][0] += 0.25
            line["body"] = json.dumps(body)

        await self.refused(self.forged(data, change), "is inconsistent: alpha differs")

    async def test_a_client_too_few(self, data: bytes) -> None:
        def change(lines: list[Any]) -> None:
            last = max(i for i, line in enumerate(lines) if line["kind"] == "client")
            del lines[last]

        await self.refused(self.forged(data, change), "client 3 is missing")

    async def test_clients_of_another_owner(self, data: bytes) -> None:
        def change(lines: list[Any]) -> None:
            for line in lines:
                if line["kind"] == "client":
                    line["client_id"] = f"other-{line['index']}"

        await self.refused(self.forged(data, change), "the log names other clients")

    async def test_a_receipt_for_other_work(self, data: bytes) -> None:
        def change(lines: list[Any]) -> None:
            line = next(line for line in lines if line["kind"] == "closed")
            line["assignment_id"] = "other"

        await self.refused(self.forged(data, change), "receipt is for other work")


# Commands


class TestCommands:
    @pytest.fixture
    def runs(self, fedone: Fedone) -> Fedone:
        return functools.partial(fedone, "runs")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        async def make() -> None:
            game = await played(spec_of(exchange="losses"), rounds=3)
            store = SqlStore.sqlite(tmp_path / "here.db")
            await store.open()
            await import_run(store, await export_run(game.store, "run"), 0.0)
            await store.close()

        asyncio.run(make())
        return tmp_path

    def test_replay(self, runs: Fedone, folder: Path) -> None:
        report = folder / "report.json"
        code, out, _ = runs("replay", "run", "--store", folder / "here.db", "--json", report)
        assert code == 0
        found = json.loads(report.read_text())
        assert found["agrees"] is True
        assert (found["run_id"], found["rounds"], found["difference"]) == ("run", 3, None)
        assert "run: the same alpha" in out
        assert found["alpha_sha256"] in out

    def test_a_log_that_was_changed(self, runs: Fedone, folder: Path) -> None:
        with sqlite3.connect(folder / "here.db") as db:
            (text,) = db.execute("SELECT body FROM log WHERE kind = 'round' LIMIT 1").fetchone()
            body = json.loads(text)
            body["seats"][0]["losses"][0].reverse()
            db.execute("UPDATE log SET body = ? WHERE body = ?", (json.dumps(body), text))
        db.close()
        report = folder / "report.json"
        code, out, _ = runs("replay", "run", "--store", folder / "here.db", "--json", report)
        assert code == 1
        difference = json.loads(report.read_text())["difference"]
        assert (difference["round"], difference["what"]) == (1, "alpha")
        assert difference["stored"] == body["alpha_sha256"] != difference["replayed"]
        assert difference["stored"] in out
        assert difference["replayed"] in out

    def test_there_and_back(self, runs: Fedone, folder: Path) -> None:
        archive = folder / "run.fedone"
        code, out, _ = runs("export", "run", "-o", archive, "--store", folder / "here.db")
        assert code == 0
        assert out.startswith(f"{archive}: run run, ")
        assert archive.stat().st_mode & 0o777 == 0o600
        assert runs("replay", "run", "--archive", archive)[0] == 0
        there = folder / "there.db"
        code, out, _ = runs("import", archive, "--store", there)
        assert (code, out) == (0, "run run: imported\n")
        again = folder / "again.fedone"
        assert runs("export", "run", "-o", again, "--store", there)[0] == 0
        first, second = (read_archive(path.read_bytes()) for path in (archive, again))
        assert second.clients == first.clients
        # An imported run has new deadlines; nothing else differs.
        assert replace(second.snapshot, record=first.snapshot.record) == first.snapshot
        for state in (first.state, second.state):
            assert state.status == "stopped"
        assert second.state.account == first.state.account
        code, out, err = runs("import", archive, "--store", there)
        assert (code, out) == (2, "")
        assert err == "run 'run' cannot be imported: run 'run' exists already\n"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["replay", "run"], "arguments: give one of --server, --store"),
            (["replay", "run", "--store", "gone.db"], "--store: there is no file gone.db"),
            (["replay", "run", "--store", "mysql://x/y"], "not supported"),
            (["replay", "nope", "--store", "here.db"], "there is no run 'nope' in the store"),
            (["replay", "nope", "--archive", "run.fedone"], "holds run 'run', not 'nope'"),
            (["replay", "run", "--archive", "gone"], "gone: No such file"),
            (["replay", "run", "--archive", "a", "--store", "b"], "give one of"),
            (["replay", "run", "--server", "http://127.0.0.1:9"], "--admin-token: is required"),
            (
                ["export", "run", "--store", "here.db", "-o", "no/where"],
                "--output: there is no folder no",
            ),
            (["import", "here.db", "--store", "there.db"], "the archive is damaged"),
            (["import", "run.fedone"], "give one of --server, --store"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_mistakes(
        self,
        runs: Fedone,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        arguments: list[str],
        message: str,
    ) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.delenv("FEDONE_ADMIN_TOKEN", raising=False)
        runs("export", "run", "--store", "here.db")
        assert message in the_line(runs(*arguments))
        assert not Path("there.db").exists() or arguments[0] == "import"


async def test_a_run_moves_between_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, as the commands do."""
    monkeypatch.setattr(Rules, "CLAIM_TIMEOUT_S", 0.5)
    backend = ScriptedBackend()
    async with (
        Aggregator(backend=backend, enrolment_tokens=["t"], admin_token="a") as here,
        Aggregator(backend=backend, enrolment_tokens=["t"], admin_token="a") as there,
        AsyncExitStack() as stack,
    ):
        spec = spec_of(exchange="losses", min_clients=1, rounds=3)
        run = await here.add_run(spec, WORDS)
        old, new = await here.listen(), await there.listen()
        example = {"text": "x", "label": 0}
        async with EdgeClient(old, token="t", data=[example]) as client:
            async with asyncio.timeout(30):
                while run.state.round < 2:
                    await client.run_once()
        async with AdminClient(old, "a") as admin, AdminClient(old, "t") as device:
            data = await admin.export_run("run")
            with pytest.raises(ProblemError) as caught:
                await device.export_run("run")
        assert caught.value.code in ("unauthorized", "forbidden")
        admin = await stack.enter_async_context(AdminClient(new, "a"))
        moved = await admin.import_run(data)
        assert (moved.status, moved.rounds) == ("stopped", 2)
        assert moved.alpha_sha256 == run.result().alpha_sha256
        for broken, message in ((data[:-9], "damaged"), (data, "exists already")):
            with pytest.raises(ProblemError, match=message) as caught:
                await admin.import_run(broken)
            assert caught.value.code == "invalid_run"
        await admin.resume("run")
        async with EdgeClient(new, token="t", data=[example]) as client:
            async with asyncio.timeout(30):
                await client.run_forever()
        assert (await admin.get("run")).status == "completed"
