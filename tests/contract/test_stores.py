"""What every store promises, and what only a file can."""

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection

import fedone_sdk.stores
from fedone_sdk.errors import FedOneError, SpecError
from fedone_sdk.stores import (
    ClientRecord,
    ClosedWork,
    Commit,
    LogEntry,
    MemoryStore,
    RunRecord,
    SqlStore,
    Store,
    VersionConflict,
)

RUN = RunRecord(
    run_id="run-1",
    spec='{"rounds": 3}',
    candidates='["good", "naïve", "日本", "🙂", "\'; --"]',
    document='{"round": 0}',
    arrays=bytes(range(256)),
    version=0,
    created_at=1_700_000_000.123456,
)
WORK = ClosedWork(
    assignment_id="work-1",
    run_id="run-1",
    client_index=0,
    outcome="accepted",
    body_sha256="ab" * 32,
    receipt='{"ok": true}',
)


async def enrol(store: Store, number: int) -> ClientRecord:
    return await store.add_client(
        client_id=f"client-{number}", credential_sha256=f"{number:064x}", name=None, now=0.1
    )


@asynccontextmanager
async def opened(path: Path, *, busy_timeout_s: float = 5.0) -> AsyncIterator[SqlStore]:
    store = SqlStore.sqlite(path, busy_timeout_s=busy_timeout_s)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
    else:
        async with opened(tmp_path / "store.db") as sql_store:
            yield sql_store


class TestEveryStore:
    async def test_starts_empty(self, store: Store) -> None:
        await store.ping()
        assert await store.clients() == []
        assert await store.runs() == []
        assert await store.log("nobody's") == []
        assert await store.closed("nobody's") is None
        assert await store.memory("nobody's", 0) is None

    async def test_clients_come_back(self, store: Store) -> None:
        added = [
            await store.add_client(client_id="b", credential_sha256="1" * 64, name="Bé", now=0.1),
            await store.add_client(client_id="a", credential_sha256="2" * 64, name=None, now=1e9),
        ]
        assert [client.index for client in added] == [0, 1]
        assert await store.clients() == added

    async def test_concurrent_enrolment_leaves_no_gap(self, store: Store) -> None:
        added = await asyncio.gather(*(enrol(store, number) for number in range(20)))
        assert sorted(client.index for client in added) == list(range(20))
        assert await store.clients() == sorted(added, key=lambda client: client.index)

    async def test_refused_enrolment_takes_no_index(self, store: Store) -> None:
        await enrol(store, 0)
        with pytest.raises(ValueError, match="client-0"):
            await enrol(store, 0)
        assert (await enrol(store, 1)).index == 1

    async def test_runs_come_back_in_order(self, store: Store) -> None:
        runs = [replace(RUN, run_id=run_id) for run_id in ("z", "a", "m")]
        for run in runs:
            await store.add_run(run)
        assert await store.runs() == runs

    async def test_known_run_is_refused(self, store: Store) -> None:
        await store.add_run(RUN)
        with pytest.raises(ValueError, match="run-1"):
            await store.add_run(replace(RUN, document="other"))
        assert await store.runs() == [RUN]

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
                memories=((0, arrays), (3, b"\xff\0")),
            ),
        )
        assert await store.runs() == [
            replace(RUN, document='{"round": 1, "naïve": "🙂"}', arrays=arrays, version=1)
        ]
        assert await store.closed("work-1") == WORK
        assert await store.closed("work-2") == late
        assert await store.log("run-1") == list(entries)
        assert await store.memory("run-1", 0) == arrays
        assert await store.memory("run-1", 3) == b"\xff\0"
        assert await store.memory("run-1", 1) is None

    async def test_arrays_stay_unless_given(self, store: Store) -> None:
        await store.add_run(RUN)
        await store.commit("run-1", 0, Commit(document="1"))
        assert await store.runs() == [replace(RUN, document="1", version=1)]

    async def test_log_keeps_order_and_filters(self, store: Store) -> None:
        await store.add_run(RUN)
        await store.add_run(replace(RUN, run_id="run-2"))
        entries = [LogEntry(kind="ab"[number % 2], body=str(number)) for number in range(30)]
        for version in range(10):
            lines = tuple(entries[version * 3 : version * 3 + 3])
            await store.commit("run-1", version, Commit(document="", log=lines))
        other = LogEntry(kind="a", body="other")
        await store.commit("run-2", 0, Commit(document="", log=(other,)))
        assert await store.log("run-1") == entries
        assert await store.log("run-1", "b") == entries[1::2]
        assert await store.log("run-1", "c") == []
        assert await store.log("run-2") == [other]

    async def test_memories_are_overwritten(self, store: Store) -> None:
        await store.add_run(RUN)
        await store.add_run(replace(RUN, run_id="run-2"))
        for run_id in ("run-1", "run-2"):
            await store.commit(run_id, 0, Commit(document="", memories=((0, b"a"), (1, b"b"))))
        newer = ((0, b"c"), (2, b"d"), (2, b"e"))
        await store.commit("run-1", 1, Commit(document="", memories=newer))
        assert [await store.memory("run-1", client) for client in range(3)] == [b"c", b"b", b"e"]
        assert await store.memory("run-2", 0) == b"a"

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
        assert await store.runs() == [replace(RUN, document="1", version=1)]
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
        assert await store.runs() == [replace(RUN, document=winner, version=1)]

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
            (run,) = await store.runs()
            assert run.version in (version, version + 1)
            assert len(await store.log("run-1")) == 2 * run.version
            version = run.version
        await store.commit("run-1", version, Commit(document="after"))


def everything(*closed: ClosedWork) -> Commit:
    return Commit(
        document="never",
        arrays=b"never",
        closed=closed,
        log=(LogEntry(kind="a", body="never"),),
        memories=((0, b"never"),),
    )


class TestSqlStore:
    async def test_reopening_finds_everything(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        entry = LogEntry(kind="round", body="{}")
        async with opened(path) as store:
            client = await enrol(store, 0)
            await store.add_run(RUN)
            commit = Commit(document="1", closed=(WORK,), log=(entry,), memories=((0, b"m"),))
            await store.commit("run-1", 0, commit)
        async with opened(path) as store:
            assert await store.clients() == [client]
            assert await store.runs() == [replace(RUN, document="1", version=1)]
            assert await store.closed("work-1") == WORK
            assert await store.log("run-1") == [entry]
            assert await store.memory("run-1", 0) == b"m"
            assert (await enrol(store, 1)).index == 1

    async def test_killed_process_loses_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        await asyncio.to_thread(commit_and_be_killed, path)
        async with opened(path) as store:
            (run,) = await store.runs()
            assert (run.version, run.document) == (20, "20")
            assert [entry.body for entry in await store.log("r")] == [str(n) for n in range(20)]

    async def test_stores_on_one_file_fence_each_other(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        async with opened(path) as one, opened(path) as two:
            await one.add_run(RUN)
            await one.commit("run-1", 0, Commit(document="one"))
            with pytest.raises(VersionConflict):
                await two.commit("run-1", 0, everything(WORK))
            await two.commit("run-1", 1, Commit(document="two"))
            assert await one.runs() == [replace(RUN, document="two", version=2)]

    async def test_stores_on_one_file_share_the_enrolment(self, tmp_path: Path) -> None:
        stores = [SqlStore.sqlite(tmp_path / "store.db") for _ in range(4)]
        await asyncio.gather(*(store.open() for store in stores))
        added = await asyncio.gather(*(enrol(stores[n % 4], n) for n in range(40)))
        assert sorted(client.index for client in added) == list(range(40))
        for store in stores:
            await store.close()

    async def test_cancelled_write_goes_on(self, tmp_path: Path) -> None:
        began = asyncio.Event()

        def work(connection: Connection) -> None:
            connection.exec_driver_sql("UPDATE meta SET value = 3 WHERE key = 'num_clients'")
            began.set()
            connection.exec_driver_sql("UPDATE meta SET value = 7 WHERE key = 'num_clients'")

        async with opened(tmp_path / "store.db") as store:
            task = asyncio.create_task(store._write(work))
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await enrol(store, 0)).index == 7

    async def test_writes_are_durable(self, tmp_path: Path) -> None:
        async with opened(tmp_path / "store.db") as store:
            pragmas = await store._write(
                lambda connection: {
                    name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                    for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
                }
            )
        assert pragmas == {
            "journal_mode": "wal",
            "synchronous": 2,
            "foreign_keys": 1,
            "busy_timeout": 5000,
        }

    async def test_new_files_are_private(self, tmp_path: Path) -> None:
        path = tmp_path / "a ?%20#é.db"
        umask = os.umask(0)
        try:
            async with opened(path) as store:
                await enrol(store, 0)
                modes = {
                    file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()
                }
        finally:
            os.umask(umask)
        assert modes == {f"{path.name}{suffix}": 0o600 for suffix in ("", "-wal", "-shm")}

    async def test_newer_schema_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        async with opened(path):
            pass
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE meta SET value = 1000 WHERE key = 'schema_version'")
        with pytest.raises(FedOneError, match=r"version 1000.*upgrade"):
            await SqlStore.sqlite(path).open()

    async def test_other_database_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE cookies (id)")
        with pytest.raises(FedOneError, match=r"store\.db.*another program"):
            await SqlStore.sqlite(path).open()

    @pytest.mark.parametrize("kind", ["corrupt", "directory", "no parent"])
    async def test_unusable_path(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "store.db"
        if kind == "corrupt":
            path.write_bytes(b"these are not the bytes of a database" * 100)
        elif kind == "directory":
            path.mkdir()
        else:
            path = tmp_path / "missing" / "store.db"
        with pytest.raises(FedOneError, match=r"store\.db"):
            await SqlStore.sqlite(path).open()

    async def test_locked_by_another(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        async with opened(path, busy_timeout_s=0.01) as store:
            await store.add_run(RUN)
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(FedOneError, match=r"store\.db.*locked"):
                    await store.commit("run-1", 0, Commit(document="1"))
                with pytest.raises(FedOneError, match=r"store\.db.*locked"):
                    await SqlStore.sqlite(path, busy_timeout_s=0.01).open()
                assert await store.runs() == [RUN]
                await store.ping()
            await store.commit("run-1", 0, Commit(document="1"))

    async def test_must_be_open(self, tmp_path: Path) -> None:
        store = SqlStore.sqlite(tmp_path / "store.db")
        await store.close()
        with pytest.raises(FedOneError, match="not open"):
            await store.ping()
        with pytest.raises(FedOneError, match="not open"):
            await enrol(store, 0)
        await store.open()
        with pytest.raises(FedOneError, match="open already"):
            await store.open()
        await store.close()
        with pytest.raises(FedOneError, match="not open"):
            await store.ping()

    @pytest.mark.parametrize(
        "url",
        [
            "nonsense",
            "postgresql+asyncpg://user:secret@host/db",
            "sqlite+aiosqlite://",
            "sqlite+aiosqlite:///:memory:",
            "sqlite+aiosqlite:///file:x.db?uri=true",
        ],
    )
    def test_unusable_url(self, url: str) -> None:
        with pytest.raises(SpecError) as caught:
            SqlStore(url)
        assert "secret" not in str(caught.value)

    async def test_plain_sqlite_url(self, tmp_path: Path) -> None:
        store = SqlStore(f"sqlite:///{tmp_path}/store.db")
        await store.open()
        await store.close()
        assert (tmp_path / "store.db").exists()


def repository() -> str:
    return str(Path(fedone_sdk.stores.__file__).parents[2])


def commit_and_be_killed(path: Path) -> None:
    """20 commits in another process, which is killed as soon as it has said so."""
    script = (
        "import asyncio, sys\n"
        "from fedone_sdk.stores import *\n"
        "async def main():\n"
        "    store = SqlStore.sqlite(sys.argv[1])\n"
        "    await store.open()\n"
        "    run = dict(spec='', candidates='', document='0', version=0, created_at=0.0)\n"
        "    await store.add_run(RunRecord(run_id='r', arrays=b'', **run))\n"
        "    for version in range(20):\n"
        "        log = (LogEntry(kind='a', body=str(version)),)\n"
        "        document = str(version + 1)\n"
        "        await store.commit('r', version, Commit(document=document, log=log))\n"
        "    print('committed', flush=True)\n"
        "    sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": repository()},
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"committed\n"
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL


def run_python(script: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": repository()},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_sqlalchemy_is_loaded_only_when_needed() -> None:
    script = "import sys, fedone_sdk.stores; print('sqlalchemy' in sys.modules)"
    assert run_python(script) == "False\n"


@pytest.mark.parametrize("module", ["sqlalchemy", "aiosqlite"])
def test_missing_extra_is_named(module: str, tmp_path: Path) -> None:
    script = (
        f"import asyncio, sys; sys.modules[{module!r}] = None\n"
        "from fedone_sdk.errors import MissingExtraError\n"
        "try:\n"
        "    from fedone_sdk.stores import SqlStore\n"
        f"    asyncio.run(SqlStore.sqlite({str(tmp_path / 'store.db')!r}).open())\n"
        "except MissingExtraError as error:\n"
        "    print(error.extra)\n"
    )
    assert run_python(script) == "server\n"
    assert not list(tmp_path.iterdir())


def test_public_names() -> None:
    names = fedone_sdk.stores.__all__
    assert names == sorted(names)
    assert all(hasattr(fedone_sdk.stores, name) for name in names)
    with pytest.raises(AttributeError, match="nonsense"):
        fedone_sdk.stores.nonsense  # noqa: B018
