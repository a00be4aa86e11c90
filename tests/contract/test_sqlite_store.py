"""The SQLite store: files, locks, threads."""

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

import fedone_sdk.stores
from fedone_sdk.errors import FedOneError, SpecError, StoreUnavailable
from fedone_sdk.stores import Commit, SqlStore, VersionConflict
from fedone_sdk.stores.sql import sqlite
from tests.contract.stores import RUN, WORK, enrol, everything, opened, until


class TestFile:
    async def test_a_killed_process_loses_nothing_and_leaves_no_lock(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        await asyncio.to_thread(commit_and_be_killed, path)
        async with opened(path) as store:
            run = await store.run("r")
            assert run is not None
            assert (run.version, run.document) == (20, "20")
            assert [entry.body for entry in await store.log("r")] == [str(n) for n in range(20)]

    async def test_stores_on_one_file_fence_each_other(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        async with opened(path) as one, opened(path, serving=False) as two:
            await one.add_run(RUN)
            await one.commit("run-1", 0, Commit(document="one"))
            with pytest.raises(VersionConflict):
                await two.commit("run-1", 0, everything(WORK))
            await two.commit("run-1", 1, Commit(document="two"))
            assert await one.run("run-1") == replace(RUN, document="two", version=2)

    async def test_a_cancelled_write_completes(self, tmp_path: Path) -> None:
        async with opened(tmp_path / "store.db") as store:
            number = "UPDATE meta SET value = 7 WHERE key = 'num_clients'"
            task, go_on = await held_back(store, number)
            task.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await enrol(store, 0)).index == 7

    async def test_writes_are_durable(self, tmp_path: Path) -> None:
        wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}

        def read(connection: Connection) -> dict[str, object]:
            return {key: connection.exec_driver_sql(f"PRAGMA {key}").scalar() for key in wanted}

        async with opened(tmp_path / "store.db") as store:
            assert await store._write(read) == wanted

    async def test_new_files_are_private(self, tmp_path: Path) -> None:
        path = tmp_path / "a ?%20#é.db"
        umask = os.umask(0)
        try:
            async with opened(path) as store:
                await enrol(store, 0)
                files = [*path.parent.iterdir()]
                modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in files}
        finally:
            os.umask(umask)
        assert modes == {f"{path.name}{suffix}": 0o600 for suffix in ("", "-wal", "-shm", ".lock")}

    @pytest.mark.parametrize("kind", ["corrupt", "directory", "no parent"])
    async def test_unusable_path(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / ("missing/store.db" if kind == "no parent" else "store.db")
        if kind == "corrupt":
            path.write_bytes(b"these are not the bytes of a database" * 100)
        elif kind == "directory":
            path.mkdir()
        with pytest.raises(FedOneError, match=r"store\.db"):
            await SqlStore.sqlite(path).open()

    async def test_locked_by_another(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fedone_sdk.stores.sql.sqlite._BUSY_S", 0.01)
        path = tmp_path / "store.db"
        async with opened(path) as store:
            await store.add_run(RUN)
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(FedOneError, match=r"store\.db.*locked"):
                    await store.commit("run-1", 0, Commit(document="1"))
                with pytest.raises(FedOneError, match=r"store\.db.*locked"):
                    await SqlStore.sqlite(path, serving=False).open()
                with pytest.raises(FedOneError, match=r"store\.db.*locked"):
                    await store.ping()
                assert await store.run("run-1") == RUN
            await store.ping()
            await store.commit("run-1", 0, Commit(document="1"))

    async def test_a_connection_that_refuses_writes_is_replaced(self, tmp_path: Path) -> None:
        async with opened(tmp_path / "store.db") as store:
            await store.add_run(RUN)
            writer = store._writer  # type: ignore[union-attr]
            await asyncio.to_thread(_make_read_only, writer)
            with pytest.raises(StoreUnavailable, match="readonly"):
                await store.ping()
            await store.commit("run-1", 0, Commit(document="1"))
            await store.ping()

    async def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A small write may still succeed there, and a commit may not."""
        async with opened(tmp_path / "store.db") as store:
            monkeypatch.setattr(sqlite, "_MIN_FREE", 2**60)
            with pytest.raises(StoreUnavailable, match="the disk is full"):
                await store.ping()

    @pytest.mark.parametrize("name", ["store.db", "store.db-wal"])
    async def test_a_file_that_was_deleted_or_replaced(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name
        async with opened(tmp_path / "store.db") as store:
            for change in (file.unlink, file.touch):
                change()
                with pytest.raises(StoreUnavailable, match=f"{name} was deleted or replaced while"):
                    await store.add_run(RUN)

    async def test_a_new_connection_after_an_error_of_the_disk(self, tmp_path: Path) -> None:
        def fail(connection: Connection) -> None:
            connection.invalidate()  # This deletes the log.
            (tmp_path / "other").touch()  # The next log cannot have the same inode.

        async with opened(tmp_path / "store.db") as store:
            with pytest.raises(StoreUnavailable):
                await store._write(fail)  # type: ignore[attr-defined]
            await store.add_run(RUN)

    async def test_a_mounted_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, mounts = tmp_path / "my store.db", tmp_path / "mountinfo"
        there = str(path.resolve()).replace(" ", r"\040")
        mounts.write_text(f"36 25 254:0 /vol/a.db {there} rw - ext4 /dev/vda rw\n")
        monkeypatch.setattr(sqlite, "_MOUNTS", mounts)
        with pytest.raises(StoreUnavailable, match="mounted as a single file, without its log"):
            await SqlStore.sqlite(path).open()

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
        ["mysql://user:secret@host/db", "postgresql+psycopg2://user:secret@host/db",
         "postgresql://user:secret@host:port/db", "sqlite://", "sqlite:///:memory:",
         "sqlite:///file:x.db?uri=true"],
    )  # fmt: skip
    def test_unusable_url(self, url: str) -> None:
        with pytest.raises(SpecError) as caught:
            SqlStore.at(url)
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("driver", ["sqlite", "sqlite+aiosqlite"])
    async def test_url(self, tmp_path: Path, driver: str) -> None:
        store = SqlStore.at(f"{driver}:///{tmp_path}/store.db")
        await store.open()
        await store.close()
        assert (tmp_path / "store.db").exists()


class TestOneServer:
    """Two servers on one file would each assume to be the only one."""

    async def test_a_second_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        async with opened(path) as first:
            with pytest.raises(FedOneError, match=r"store\.db .*in use by another process"):
                await SqlStore.sqlite(path).open()
            with pytest.raises(FedOneError, match="in use by another process"):
                await SqlStore.sqlite(path, serving=False).upgrade()
            await first.add_run(RUN)
            # The refusal keeps the first one's locks, so that its log is not deleted.
            other = f"import sqlite3; sqlite3.connect({str(path)!r}).execute('SELECT * FROM runs')"
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", other], check=True)
            assert (tmp_path / "store.db-wal").exists()
        async with opened(path) as second:
            assert await second.run("run-1") == RUN

    async def test_links_lead_to_the_same_lock(self, tmp_path: Path) -> None:
        path, link, folder = tmp_path / "store.db", tmp_path / "link.db", tmp_path / "folder"
        link.symlink_to(path)
        folder.symlink_to(tmp_path)
        for first in (path, link):
            async with opened(first):
                for other in {path, link, folder / "store.db", folder / "link.db"} - {first}:
                    with pytest.raises(FedOneError, match="in use by another process"):
                        await SqlStore.sqlite(other).open()
        (tmp_path / "hard.db").hardlink_to(path)
        for name in ("store.db", "link.db", "hard.db"):
            with pytest.raises(
                FedOneError, match=r"\.db cannot be used: it has a second hard link"
            ):
                await SqlStore.sqlite(tmp_path / name).open()

    async def test_a_tool_may_read_meanwhile(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        async with opened(path) as server:
            await server.add_run(RUN)
            async with opened(path, serving=False) as tool:
                assert await tool.run("run-1") == RUN
                await server.commit("run-1", 0, Commit(document="1"))
                assert await tool.versions() == {"run-1": 1}
        async with opened(path, serving=False), opened(path):
            pass

    async def test_a_tool_makes_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(FedOneError, match=r"store\.db cannot be used: there is no such file"):
            await SqlStore.sqlite(tmp_path / "store.db", serving=False).open()
        assert os.listdir(tmp_path) == []


class TestSharedTransactions:
    """Writes that wait together are one transaction, and none of them notices."""

    async def test_a_failing_one_affects_no_other(self, tmp_path: Path) -> None:
        async with opened(tmp_path / "store.db") as store:
            runs = [replace(RUN, run_id=str(number)) for number in range(20)]
            for run in runs:
                await store.add_run(run)
            await store.commit("0", 0, Commit(document="1", closed=(replace(WORK, run_id="0"),)))
            with transactions(store) as counted:
                results = await asyncio.gather(
                    *(
                        # Every third closes work that is closed, every fifth comes too late.
                        store.commit(
                            run.run_id,
                            5 if number % 5 == 0 else 0,
                            everything(
                                replace(
                                    WORK,
                                    run_id=run.run_id,
                                    assignment_id=f"work-{1 if number % 3 == 0 else run.run_id}",
                                )
                            )
                            if number > 0
                            else Commit(document="late"),
                        )
                        for number, run in enumerate(runs)
                    ),
                    return_exceptions=True,
                )
            for number, result in enumerate(results):
                run_id = str(number)
                if number % 5 == 0:
                    assert isinstance(result, VersionConflict)
                elif number % 3 == 0 or number == 1:
                    assert isinstance(result, ValueError)
                else:
                    assert result is None
                failed = result is not None
                assert len(await store.log(run_id)) == (0 if failed else 1)
                assert await store.memory(run_id, 0) == (None if failed else b"never")
                version = 1 if number == 0 or not failed else 0
                assert (await store.versions())[run_id] == version
        assert len(counted) <= 3

    async def test_none_is_acknowledged_before_the_commit(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        async with opened(path) as store:
            for number in range(8):
                await store.add_run(replace(RUN, run_id=str(number)))
            committing, go_on = threading.Event(), threading.Event()

            @event.listens_for(store._engine, "commit")
            def commit(_: Connection) -> None:
                committing.set()
                assert go_on.wait(10)

            tasks = [
                asyncio.create_task(store.commit(str(number), 0, Commit(document="1")))
                for number in range(8)
            ]
            await until(committing.is_set)
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in tasks)
            assert set((await store.versions()).values()) == {0}
            go_on.set()
            await asyncio.gather(*tasks)
            assert set((await store.versions()).values()) == {1}

    async def test_a_commit_that_fails_fails_for_all(self, tmp_path: Path) -> None:
        async with opened(tmp_path / "store.db") as store:
            for number in range(4):
                await store.add_run(replace(RUN, run_id=str(number)))
            engine = store._engine

            def fail(_: Connection) -> None:
                raise sqlite3.OperationalError("disk I/O error")

            event.listen(engine, "commit", fail)
            results = await asyncio.gather(
                *(store.commit(str(number), 0, Commit(document="1")) for number in range(4)),
                return_exceptions=True,
            )
            event.remove(engine, "commit", fail)
            assert {type(result) for result in results} == {StoreUnavailable}
            assert [str(result) for result in results] == [
                f"store {tmp_path}/store.db cannot be used: disk I/O error"
            ] * 4
            assert set((await store.versions()).values()) == {0}
            await store.commit("0", 0, Commit(document="1"))

    async def test_a_cancelled_call_leaves_the_queue(self, tmp_path: Path) -> None:
        async with opened(tmp_path / "store.db") as store:
            await store.add_run(RUN)
            first, go_on = await held_back(store)
            second = asyncio.create_task(store.commit("run-1", 0, everything()))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(second, 5)
            go_on.set()
            await first
            assert await store.run("run-1") == RUN

    async def test_closing_waits_for_started_work(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        store = SqlStore.sqlite(path)
        await store.open()
        await store.add_run(RUN)
        writing, go_on = await held_back(store, "UPDATE runs SET document = 'written'")
        late = asyncio.create_task(store.commit("run-1", 0, everything()))
        await asyncio.sleep(0)
        closing_store = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(writing, closing_store)
        with pytest.raises(FedOneError, match="not open"):
            await late
        async with opened(path) as again:
            assert await again.run("run-1") == replace(RUN, document="written")


async def held_back(
    store: SqlStore, statement: str = "SELECT 1"
) -> tuple[asyncio.Task[None], threading.Event]:
    """Start a write that waits for the event before its statement."""
    began, go_on = threading.Event(), threading.Event()

    def work(connection: Connection) -> None:
        began.set()
        go_on.wait()
        connection.exec_driver_sql(statement)

    task = asyncio.create_task(store._write(work))
    await until(began.is_set)
    return task, go_on


@contextmanager
def transactions(store: SqlStore) -> Iterator[list[None]]:
    """Counts the transactions of a store that are committed."""
    counted: list[None] = []
    engine = store._engine

    def count(_: Connection) -> None:
        counted.append(None)

    event.listen(engine, "commit", count)
    try:
        yield counted
    finally:
        event.remove(engine, "commit", count)


def commit_and_be_killed(path: Path) -> None:
    """20 commits in another process, which is killed once it has reported them."""
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
        env={**os.environ, "PYTHONPATH": str(Path(fedone_sdk.stores.__file__).parents[2])},
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"committed\n"
            with pytest.raises(FedOneError, match="in use by another process"):
                asyncio.run(SqlStore.sqlite(path).open())
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL


def _make_read_only(writer: Connection) -> None:
    writer.exec_driver_sql("PRAGMA query_only = ON")
    writer.rollback()
