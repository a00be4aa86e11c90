"""The contract of every store: memory, SQLite, PostgreSQL."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.stores import (
    SERVER,
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    Member,
    RunHead,
    Store,
    StoredMemory,
    TokenRecord,
    TokenRefused,
    VersionConflict,
    log_pages,
)
from tests.contract.stores import RUN, TOKEN, WORK, device, enrol, everything
from tests.interpreter import printed_by

OTHER = replace(RUN, run_id="other")


def kept(client_index: int, at_round: int, value: bytes) -> StoredMemory:
    return StoredMemory(client_index=client_index, round=at_round, value=value)


class TestTokens:
    async def test_it_knows_the_time(self, store: Store) -> None:
        assert abs(await store.now() - time.time()) < 60

    async def test_tokens_come_back_in_order(self, store: Store) -> None:
        scoped = TokenRecord(
            name="a", token_sha256="1", runs=("acme-*", "é"), expires_at=9.5, created_at=2.0
        )
        limited = TokenRecord(
            name="0", token_sha256="2", runs=(), uses_left=3, created_at=1.0, revoked_at=4.0
        )
        for token in (TOKEN, scoped, limited):
            await store.put_token(token)
        assert await store.tokens() == [TOKEN, scoped, limited]

    async def test_a_token_is_known_by_its_secret(self, store: Store) -> None:
        token = replace(TOKEN, uses_left=5)
        await store.put_token(token)
        await store.enrol(device(0), token.token_sha256, 1.0)
        revoked = await store.revoke_token(token.name, 8.0)
        assert revoked == replace(token, uses_left=4, revoked_at=8.0)
        limits: dict[str, Any] = {"runs": ("x",), "expires_at": 3.0}
        await store.put_token(replace(token, name="b", uses_left=9, created_at=7.0, **limits))
        assert await store.tokens() == [replace(revoked, **limits)]

    async def test_a_name_has_one_secret(self, store: Store) -> None:
        await store.put_token(TOKEN)
        with pytest.raises(ValueError, match="'everyone'"):
            await store.put_token(replace(TOKEN, token_sha256="other"))
        assert await store.tokens() == [TOKEN]

    async def test_the_first_revocation_counts(self, store: Store) -> None:
        await store.put_token(TOKEN)
        assert await store.revoke_token(TOKEN.name, 2.0) == replace(TOKEN, revoked_at=2.0)
        assert await store.revoke_token(TOKEN.name, 3.0) == replace(TOKEN, revoked_at=2.0)


class TestClients:
    async def test_clients_come_in_pages(self, store: Store) -> None:
        assert await store.num_clients() == 0
        added = [await enrol(store, number) for number in range(5)]
        assert await store.num_clients() == 5
        assert await store.clients(limit=2) == added[:2]
        assert await store.clients(after=1, limit=2) == added[2:4]
        assert await store.clients(after=3) == added[4:]
        assert await store.clients(after=4, limit=2) == []

    async def test_clients_come_back(self, store: Store) -> None:
        await store.put_token(replace(TOKEN, runs=("acme-*",)))
        plain = device(1, name="Bé")
        full = device(0, enrolment_sha256="5" * 64, token="asked", runs=("all",))
        added = [await store.enrol(client, TOKEN.token_sha256, 1.0) for client in (plain, full)]
        assert added == [
            replace(client, index=index, token=TOKEN.name, runs=("acme-*",))
            for index, client in enumerate((plain, full))
        ]
        assert await store.clients() == added

    async def test_a_token_enrols_as_many_as_it_says(self, store: Store) -> None:
        await store.put_token(replace(TOKEN, uses_left=5))
        results = await asyncio.gather(
            *(store.enrol(device(number), TOKEN.token_sha256, 1.0) for number in range(50)),
            return_exceptions=True,
        )
        enrolled = [result for result in results if isinstance(result, ClientRecord)]
        refused = [result for result in results if isinstance(result, TokenRefused)]
        assert (len(enrolled), len(refused)) == (5, 45)
        assert {str(error) for error in refused} == {"the enrolment token is used up"}
        assert sorted(client.index for client in enrolled) == list(range(5))
        assert (await store.tokens())[0].uses_left == 0

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"token_sha256": "other"}, "not known"), ({"uses_left": 0}, "used up"),
            ({"expires_at": 1.0}, "expired"), ({"revoked_at": 0.7}, "revoked"),
        ],
    )  # fmt: skip
    async def test_bad_token(self, store: Store, changes: dict[str, Any], reason: str) -> None:
        await store.put_token(replace(TOKEN, **changes))
        with pytest.raises(TokenRefused, match=reason):
            await store.enrol(device(0), TOKEN.token_sha256, 1.0)
        assert await store.clients() == []

    async def test_refused_enrolment_takes_nothing(self, store: Store) -> None:
        await store.put_token(replace(TOKEN, uses_left=2))
        await store.enrol(device(0), TOKEN.token_sha256, 1.0)
        with pytest.raises(ValueError, match="client-0"):
            await store.enrol(device(0), TOKEN.token_sha256, 1.0)
        assert (await store.enrol(device(1), TOKEN.token_sha256, 1.0)).index == 1

    async def test_a_repeated_enrolment(self, store: Store) -> None:
        await store.put_token(replace(TOKEN, uses_left=1))
        nonce = "a" * 64
        first = await store.enrol(device(0, enrolment_sha256=nonce), TOKEN.token_sha256, 1.0)
        await store.change_client(
            0, credential_sha256="rotated", previous_sha256=first.credential_sha256
        )
        asked = device(1, enrolment_sha256=nonce, name="n", enrolled_at=9.0)
        again = await store.enrol(asked, TOKEN.token_sha256, 1.0)
        assert again == replace(first, credential_sha256=asked.credential_sha256)
        assert await store.clients() == [again]
        assert await store.client("rotated") is None
        assert await store.client(first.credential_sha256) is None
        assert (await store.tokens())[0].uses_left == 0
        await store.change_client(0, revoked_at=5.0)
        with pytest.raises(TokenRefused, match="client was revoked"):
            await store.enrol(asked, TOKEN.token_sha256, 1.0)

    async def test_a_known_nonce_does_not_take_over_the_client(self, store: Store) -> None:
        """Not into the runs of another token."""
        await store.put_token(replace(TOKEN, runs=("acme-*",)))
        others = replace(TOKEN, name="others", token_sha256="o", runs=("others-*",))
        await store.put_token(others)
        await store.put_token(replace(TOKEN, name="all", token_sha256="a"))
        nonce = "a" * 64
        first = await store.enrol(device(0, enrolment_sha256=nonce), TOKEN.token_sha256, 1.0)
        same = device(1, enrolment_sha256=nonce)
        for token in ("o", "a"):
            with pytest.raises(TokenRefused, match="other runs"):
                await store.enrol(same, token, 1.0)
        assert await store.clients() == [first]
        # Another token for the same runs will do: the one before may be used up.
        await store.put_token(replace(TOKEN, name="second", token_sha256="s", runs=("acme-*",)))
        again = await store.enrol(same, "s", 1.0)
        assert again == replace(first, credential_sha256=same.credential_sha256)

    async def test_concurrent_repeats_are_one_client(self, store: Store) -> None:
        await store.put_token(replace(TOKEN, uses_left=1))
        repeats = (device(number, enrolment_sha256="a" * 64) for number in range(10))
        added = await asyncio.gather(
            *(store.enrol(client, TOKEN.token_sha256, 1.0) for client in repeats)
        )
        assert {client.index for client in added} == {0}
        assert len({client.client_id for client in added}) == 1

    async def test_credentials(self, store: Store) -> None:
        client = await enrol(store, 0)
        await enrol(store, 1)
        assert await store.client(client.credential_sha256) == client
        await store.change_client(
            0, credential_sha256="new", previous_sha256=client.credential_sha256
        )
        rotated = replace(client, credential_sha256="new", previous_sha256=client.credential_sha256)
        assert await store.client("new") == rotated
        assert await store.client(client.credential_sha256) == rotated
        await store.change_client(0, credential_sha256="new", previous_sha256=None)
        assert await store.client("new") == replace(client, credential_sha256="new")
        assert await store.client(client.credential_sha256) is None
        assert (await store.clients())[1].credential_sha256 == device(1).credential_sha256

    async def test_an_unknown_client_cannot_be_changed(self, store: Store) -> None:
        with pytest.raises(IndexError):
            await store.change_client(0, revoked_at=1.0)


class TestMembers:
    async def test_members_come_back(self, store: Store) -> None:
        third = Member(client_index=3, num_examples=10, run_id="run-1", until=5.0)
        first = Member(client_index=1, num_examples=2, run_id=None, until=1e9)
        await store.join(third)
        await store.join(first)
        assert await store.members() == [first, third]
        later = replace(third, num_examples=11, run_id=None, until=6.0)
        await store.join(later)
        assert await store.members() == [first, later]

    async def test_leaving(self, store: Store) -> None:
        members = [
            Member(client_index=index, num_examples=1, run_id=None, until=1.0) for index in range(5)
        ]
        await asyncio.gather(*(store.join(member) for member in members))
        await store.leave([0, 3, 7])
        await store.leave([])
        assert await store.members() == [members[1], members[2], members[4]]
        await store.leave(range(40_000))
        assert await store.members() == []


class TestBeingOne:
    async def test_is_alive_and_leads(self, store: Store) -> None:
        assert await store.alive() == {store.replica}
        assert await store.lead()
        assert await store.lead()

    async def test_does_not_hear_itself(self, store: Store) -> None:
        heard: list[str | None] = []
        store.listen(heard.append)
        await store.add_run(RUN)
        await store.commit("run-1", 0, Commit(document="", signal="mine"))
        await store.publish("mine")
        await asyncio.sleep(0.05)
        assert heard == []

    async def test_a_new_life_has_a_new_name(self, store: Store) -> None:
        before = store.replica
        await store.close()
        await store.open()
        assert store.replica != before
        assert await store.alive() == {store.replica}


class TestRuns:
    async def test_starts_empty(self, store: Store) -> None:
        await store.ping()
        assert await store.tokens() == []
        assert await store.clients() == []
        assert await store.members() == []
        assert await store.versions() == {}
        assert await store.versions() == {}
        assert await store.run("nobody's") is None
        assert await store.client("nobody's") is None
        assert await store.revoke_token("nobody's", 1.0) is None
        assert await store.log("nobody's") == []
        assert await store.closed("nobody's") is None
        assert await store.memory("nobody's", 0) is None

    async def test_runs_come_back_in_order(self, store: Store) -> None:
        runs = [replace(RUN, run_id=run_id) for run_id in ("z", "a", "m")]
        for run in runs:
            await store.add_run(run)
        assert [head.run_id for head in await store.heads()] == ["z", "a", "m"]
        assert list((await store.versions()).items()) == [("z", 0), ("a", 0), ("m", 0)]
        assert await store.run("a") == runs[1]

    async def test_known_run_is_refused(self, store: Store) -> None:
        await store.add_run(RUN)
        with pytest.raises(ValueError, match="run-1"):
            await store.add_run(replace(RUN, document="other"))
        assert await store.run("run-1") == RUN

    @pytest.mark.parametrize("arrays", [b"", b"\0", bytes(range(256)) * 400])
    async def test_commit_comes_back(self, store: Store, arrays: bytes) -> None:
        await store.add_run(RUN)
        entries = (LogEntry(kind="round", body="{}"), LogEntry(kind="metric", body='"é"'))
        late = ClosedWork(assignment_id="work-2", run_id="run-1", client_index=3, outcome="expired")
        await store.commit(
            "run-1",
            0,
            Commit(
                document='{"round": 1, "naïve": "🙂"}',
                arrays=arrays,
                closed=(WORK, late),
                log=entries,
                memories=(kept(0, 1, arrays), kept(3, 1, b"\xff\0")),
            ),
        )
        assert await store.run("run-1") == replace(
            RUN, document='{"round": 1, "naïve": "🙂"}', arrays=arrays, version=1
        )
        assert await store.closed("work-1") == WORK
        assert await store.closed("work-2") == late
        assert await store.log("run-1") == [replace(entry, version=1) for entry in entries]
        assert await store.memory("run-1", 0) == arrays
        assert await store.memory("run-1", 3) == b"\xff\0"
        assert await store.memory("run-1", 1) is None

    async def test_arrays_stay_unless_given(self, store: Store) -> None:
        await store.add_run(RUN)
        await store.commit("run-1", 0, Commit(document="1"))
        assert await store.run("run-1") == replace(RUN, document="1", version=1)

    async def test_log_keeps_order_and_filters(self, store: Store) -> None:
        await store.add_run(RUN)
        await store.add_run(replace(RUN, run_id="run-2"))
        entries = [
            LogEntry(kind="ab"[number % 2], body=str(number), version=7) for number in range(30)
        ]
        for version in range(10):
            lines = tuple(entries[version * 3 : version * 3 + 3])
            await store.commit("run-1", version, Commit(document="", log=lines))
        other = LogEntry(kind="a", body="other")
        await store.commit("run-2", 0, Commit(document="", log=(other,)))
        assert await store.versions() == {"run-1": 10, "run-2": 1}
        # The store says which commit wrote a line, whatever the entry said.
        entries = [replace(entry, version=n // 3 + 1) for n, entry in enumerate(entries)]
        other = replace(other, version=1)
        assert await store.log("run-1") == entries
        assert await store.log("run-1", after=8) == entries[24:]
        assert await store.log("run-1", "b", after=8) == entries[25::2]
        assert await store.log("run-1", after=10) == []
        assert await store.log("run-1", "b") == entries[1::2]
        assert await store.log("run-1", "c") == []
        assert await store.log("run-2") == [other]
        # A page ends with a commit, so that the next one begins after it.
        assert await store.log("run-1", limit=1) == entries[:3]
        assert await store.log("run-1", after=1, limit=4) == entries[3:9]
        assert await store.log("run-1", "b", after=8, limit=1) == entries[25:26]
        assert await store.log("run-1", after=10, limit=5) == []
        pages = [page async for page in log_pages(store, "run-1")]
        assert [entry for page in pages for entry in page] == entries
        assert len(pages) > 1
        found = [page async for page in log_pages(store, "run-1", "b", after=4)]
        assert [entry for page in found for entry in page] == entries[13::2]
        assert [page async for page in log_pages(store, "run-1", "c")] == []

    async def test_the_head_of_a_run_has_no_arrays(self, store: Store) -> None:
        assert await store.heads() == []
        await store.add_run(RUN)
        await store.add_run(OTHER)
        await store.commit("run-1", 0, Commit(document="1"))
        assert await store.heads() == [
            RunHead(
                run_id="run-1", spec=RUN.spec, document="1", version=1, created_at=RUN.created_at
            ),
            RunHead(
                run_id="other",
                spec=RUN.spec,
                document=RUN.document,
                version=0,
                created_at=RUN.created_at,
            ),
        ]

    async def test_the_newest_memory_of_a_round_counts(self, store: Store) -> None:
        await store.add_run(RUN)
        await store.add_run(replace(RUN, run_id="run-2"))
        for run_id in ("run-1", "run-2"):
            first = (kept(0, 5, b"a"), kept(1, 5, b"b"), kept(SERVER, 5, b"s"))
            await store.commit(run_id, 0, Commit(document="", memories=first))
        newer = (kept(0, 5, b"c"), kept(2, 10, b"d"), kept(SERVER, 10, b"t"))
        await store.commit("run-1", 1, Commit(document="", memories=newer))
        clients = (0, 1, 2, SERVER)
        assert [await store.memory("run-1", one) for one in clients] == [b"c", b"b", b"d", b"t"]
        assert [await store.memory("run-1", SERVER, at) for at in (5, 7, 10)] == [b"s", None, b"t"]
        assert await store.memory("run-2", 0) == b"a"

    async def test_a_rollback_removes_the_memories_of_later_rounds(self, store: Store) -> None:
        await store.add_run(RUN)
        await store.add_run(replace(RUN, run_id="run-2"))
        memories = (kept(0, 5, b"a"), kept(0, 10, b"b"), kept(1, 10, b"c"), kept(SERVER, 10, b"s"))
        for run_id in ("run-1", "run-2"):
            await store.commit(run_id, 0, Commit(document="", memories=memories))
        await store.commit("run-1", 1, Commit(document="", back_to=9))
        assert [await store.memory("run-1", one) for one in (0, 1, SERVER)] == [b"a", None, None]
        await store.commit("run-1", 2, Commit(document="", back_to=0))
        assert await store.memory("run-1", 0) is None
        assert await store.memory("run-2", 0) == b"b"

    @pytest.mark.parametrize("version", [0, 2])
    async def test_conflict_changes_nothing(self, store: Store, version: int) -> None:
        await store.add_run(RUN)
        await store.commit("run-1", 0, Commit(document="1"))
        with pytest.raises(VersionConflict):
            await store.commit("run-1", version, everything(WORK))
        await self.check_unchanged(store)
        assert await store.closed("work-1") is None

    @pytest.mark.parametrize(
        "closed",
        [
            (replace(WORK, assignment_id="work-2"), replace(WORK, outcome="again")),
            (replace(WORK, assignment_id="work-2"), replace(WORK, assignment_id="work-2")),
            (replace(WORK, assignment_id="work-2", run_id="run-2"),),
        ],
        ids=["closed before", "twice in one", "another run's"],
    )
    async def test_impossible_commit_changes_nothing(
        self, store: Store, closed: tuple[ClosedWork, ...]
    ) -> None:
        await store.add_run(RUN)
        await store.commit("run-1", 0, Commit(document="1", closed=(WORK,)))
        with pytest.raises(ValueError, match="closed"):
            await store.commit("run-1", 1, everything(*closed))
        await self.check_unchanged(store)
        assert await store.closed("work-1") == WORK
        await store.commit("run-1", 1, Commit(document="2"))

    async def check_unchanged(self, store: Store) -> None:
        assert await store.run("run-1") == replace(RUN, document="1", version=1)
        assert await store.log("run-1") == []
        assert await store.memory("run-1", 0) is None
        assert await store.closed("work-2") is None

    async def test_unknown_run(self, store: Store) -> None:
        with pytest.raises(KeyError):
            await store.commit("run-1", 0, everything(WORK))
        assert await store.closed("work-1") is None

    async def test_of_rivals_one_wins(self, store: Store) -> None:
        await store.add_run(RUN)
        results = await asyncio.gather(
            *(store.commit("run-1", 0, Commit(document=str(number))) for number in range(5)),
            return_exceptions=True,
        )
        assert sum(isinstance(result, VersionConflict) for result in results) == 4
        winner = str(results.index(None))
        assert await store.run("run-1") == replace(RUN, document=winner, version=1)

    async def test_cancelled_commit_is_whole(self, store: Store) -> None:
        await store.add_run(RUN)
        version = 0
        for num_steps in range(12):
            lines = (LogEntry(kind="a", body="1"), LogEntry(kind="a", body="2"))
            task = asyncio.create_task(
                store.commit("run-1", version, Commit(document="", log=lines))
            )
            for _ in range(num_steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            run = await store.run("run-1")
            assert run.version in (version, version + 1)
            assert len(await store.log("run-1")) == 2 * run.version
            version = run.version
        await store.commit("run-1", version, Commit(document="after"))


@pytest.mark.parametrize(
    ("module", "store"),
    [
        ("sqlalchemy", "SqlStore.sqlite('store.db')"),
        ("alembic", "SqlStore.sqlite('store.db')"),
        ("asyncpg", "SqlStore.at('postgresql://host/db')"),
    ],
)
def test_missing_extra_is_named(module: str, store: str, tmp_path: Path) -> None:
    script = (
        f"import asyncio, sys; sys.modules[{module!r}] = None\n"
        "from fedone_sdk.errors import MissingExtraError\n"
        "try:\n"
        "    from fedone_sdk.stores import SqlStore\n"
        f"    asyncio.run({store}.open())\n"
        "except MissingExtraError as error:\n"
        "    print(error.extra)\n"
    )
    assert printed_by(script) == "server"
    assert not list(tmp_path.iterdir())
