"""The PostgreSQL store: several replicas, and restarts of its server."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, make_url
from tenacity import stop_after_delay

from fedone_sdk.errors import FedOneError, StoreUnavailable
from fedone_sdk.stores import Commit, LogEntry, Member, SqlStore, VersionConflict
from fedone_sdk.stores.sql import postgres as module
from fedone_sdk.stores.sql import replica_session
from tests.chaos.proxy import TcpServer
from tests.contract.stores import RUN, TOKEN, WORK, device, enrol, everything, opened, until
from tests.postgres import PASSWORD, Cluster
from tests.processes import free_port
from tests.processes import until as until_it


@asynccontextmanager
async def replicas(url: str, number: int) -> AsyncIterator[list[SqlStore]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(opened(url)) for _ in range(number)]


@pytest.fixture
def url(postgres: Cluster, database: str) -> str:
    return postgres.url(database)


@pytest.fixture
def tcp_url(postgres: Cluster, database: str) -> str:
    return postgres.tcp_url(database)


@pytest.fixture
def restarted(postgres: Cluster) -> Iterator[Cluster]:
    """The server of a test that ends it: it runs again for the next one."""
    yield postgres
    if not postgres.running:
        postgres.start()


def line(body: object) -> tuple[LogEntry, ...]:
    return (LogEntry(kind="a", body=str(body)),)


class TestReplicas:
    async def test_signals_reach_the_others(self, url: str) -> None:
        async with replicas(url, 3) as stores:
            heard: list[list[str | None]] = [[], [], []]
            for store, ears in zip(stores, heard, strict=True):
                store.listen(ears.append)
            await stores[0].add_run(RUN)
            await stores[0].commit("run-1", 0, Commit(document="1", signal='{"é": 1}'))
            await stores[0].commit("run-1", 1, Commit(document="2"))
            await stores[0].publish("p" * 4000)
            await stores[1].commit("run-1", 2, Commit(document="3", signal="from one"))
            await until(lambda: len(heard[2]) == 3 and len(heard[0]) == 1 and len(heard[1]) == 2)
            assert heard[0] == ["from one"]
            assert heard[1] == ['{"é": 1}', "p" * 4000]
            assert heard[2] == ['{"é": 1}', "p" * 4000, "from one"]

    async def test_signals_come_after_their_commit(self, url: str) -> None:
        async with replicas(url, 2) as (one, two):
            await one.add_run(RUN)
            queue: asyncio.Queue[str | None] = asyncio.Queue()
            two.listen(queue.put_nowait)
            for version in range(30):
                commit = Commit(document="", signal=str(version + 1))
                async with asyncio.TaskGroup() as group:
                    group.create_task(one.commit("run-1", version, commit))
                    said = await asyncio.wait_for(queue.get(), 5)
                    assert await two.versions() == {"run-1": int(said or -1)}

    async def test_no_signal_without_a_write(self, url: str) -> None:
        async with replicas(url, 2) as (one, two):
            heard: list[str | None] = []
            two.listen(heard.append)
            await one.add_run(RUN)
            await one.commit("run-1", 0, Commit(document="1", closed=(WORK,)))
            with pytest.raises(VersionConflict):
                await one.commit("run-1", 0, everything())
            with pytest.raises(ValueError, match="only once"):
                await one.commit("run-1", 1, everything(WORK))
            with pytest.raises(KeyError):
                await one.commit("run-2", 0, everything())
            await one.publish("last")
            await until(lambda: bool(heard))
            assert heard == ["last"]

    async def test_a_listener_is_notified_with_the_write(self, url: str) -> None:
        member = Member(client_index=7, num_examples=3, run_id=None, until=9.0)
        async with replicas(url, 2) as (one, two):
            queue: asyncio.Queue[str | None] = asyncio.Queue()
            two.listen(queue.put_nowait)

            async def said() -> str | None:
                return await asyncio.wait_for(queue.get(), 5)

            await one.join(member, ["here"])
            assert (await said(), await two.members()) == ("here", [member])
            await one.leave([7], ["going", "gone"])
            assert (await said(), await said(), await two.members()) == ("going", "gone", [])
            with pytest.raises(FedOneError):
                await one.join(replace(member, until=None), ["nobody"])  # type: ignore[arg-type]
            await one.publish("last")
            assert await said() == "last"

    async def test_a_later_commit_makes_it_safe(self, url: str, restarted: Cluster) -> None:
        member = Member(client_index=7, num_examples=3, run_id=None, until=9.0)
        async with opened(url) as store:
            await store.add_run(RUN)
            for version in range(20):
                await store.join(replace(member, num_examples=version + 1), ["here"])
                await store.commit("run-1", version, Commit(document=""))
            await asyncio.to_thread(restarted.kill)
            await asyncio.to_thread(restarted.start)
            assert await store.members() == [replace(member, num_examples=20)]

    async def test_a_tool_is_no_replica(self, url: str) -> None:
        async with opened(url) as server, opened(url, serving=False) as tool:
            heard: list[str | None] = []
            server.listen(heard.append)
            assert await server.alive() == {server.replica}
            assert not await tool.lead()
            await tool.publish("from a tool")
            await until(lambda: bool(heard))
            assert heard == ["from a tool"]


class TestLiveness:
    async def test_one_of_them_leads(self, url: str) -> None:
        async with replicas(url, 3) as stores:
            assert len({store.replica for store in stores}) == 3
            for store in stores:
                assert await store.alive() == {store.replica for store in stores}
            assert [await store.lead() for store in stores] == [True, False, False]
            assert [await store.lead() for store in stores] == [True, False, False]
            await stores[0].close()
            assert await stores[2].alive() == {store.replica for store in stores[1:]}
            assert [await store.lead() for store in stores[1:]] == [True, False]

    async def test_other_locks_are_no_replicas(self, url: str, postgres: Cluster) -> None:
        async with replicas(url, 1) as (store,):
            assert await store.lead()
            other = postgres.create()
            async with opened(postgres.url(other)) as stranger:
                assert await store.alive() == {store.replica}
                assert await stranger.lead()
            postgres.drop(other)

    async def test_a_lost_session_comes_back_under_a_new_name(
        self, url: str, postgres: Cluster
    ) -> None:
        async with replicas(url, 2) as (one, two):
            heard: list[str | None] = []
            one.listen(heard.append)
            assert await one.lead()
            before = one.replica
            end_sessions(postgres, url)
            await until(lambda: None in heard)
            assert one.replica != before
            await two.publish("again")
            await until(lambda: heard == [None, "again"])
            async with asyncio.timeout(10):
                while await two.alive() != {one.replica, two.replica}:
                    await asyncio.sleep(0.01)
            leads = [await one.lead(), await two.lead()]
            assert sorted(leads) == [False, True]

    async def test_a_frozen_replica(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replica_session, "_IDLE_TIMEOUT", "SELECT set_config($1, '1s', false)")
        async with replicas(url, 2) as (one, two):
            assert await one.lead()
            async with one._session._busy, asyncio.timeout(10):  # type: ignore[attr-defined]
                while not await two.lead():
                    await asyncio.sleep(0.01)
                assert await two.alive() == {two.replica}

    async def test_a_replica_without_a_session_does_not_lead(
        self, url: str, restarted: Cluster
    ) -> None:
        async with opened(url) as store:
            assert await store.lead()
            await asyncio.to_thread(restarted.stop)
            async with asyncio.timeout(10):
                while await store.lead():
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(restarted.start)
            async with asyncio.timeout(10):
                while not await store.lead():
                    await asyncio.sleep(0.01)


def end_sessions(postgres: Cluster, url: str) -> None:
    """Ends every connection of the stores."""
    database = url.rpartition("/")[2] if "?" not in url else url.partition("@/")[2].split("?")[0]
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        f"WHERE application_name = 'fedone' AND datname = '{database}'"
    )


class TestServerTrouble:
    async def test_a_restart_is_survived(self, url: str, restarted: Cluster) -> None:
        async with replicas(url, 2) as (one, two):
            heard: list[str | None] = []
            two.listen(heard.append)
            await one.add_run(RUN)
            # So that the pools hold connections that will be dead.
            await asyncio.gather(*(store.versions() for store in (one, two) for _ in range(8)))
            names = {one.replica, two.replica}
            restart = asyncio.create_task(asyncio.to_thread(restarted.restart))
            version = 0
            while not restart.done() or version < 50:
                await one.commit("run-1", version, Commit(document="", log=line(version)))
                version += 1
            await restart
            assert [entry.body for entry in await two.log("run-1")] == [
                str(number) for number in range(version)
            ]
            await until(lambda: None in heard)
            async with asyncio.timeout(10):
                while await two.alive() != {one.replica, two.replica}:
                    await asyncio.sleep(0.01)
            assert not names & {one.replica, two.replica}
            await one.publish("again")
            await until(lambda: heard[-1] == "again")

    async def test_an_unreachable_server_is_reported(
        self, tcp_url: str, restarted: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_RETRYING", module._RETRYING.copy(stop=stop_after_delay(0.3)))
        async with opened(tcp_url) as store:
            await store.add_run(RUN)
            await asyncio.to_thread(restarted.stop)
            name = tcp_url.rpartition("/")[2]
            expected = rf"store 127\.0\.0\.1/{name} cannot be used: "
            for ask in (
                store.ping,
                store.heads,
                store.alive,
                lambda: store.commit("run-1", 0, Commit(document="")),
                lambda: store.publish("x"),
                SqlStore.at(tcp_url).open,
            ):
                with pytest.raises(FedOneError, match=expected) as caught:
                    await ask()
                assert PASSWORD not in str(caught.value)
            assert not await store.lead()
            await asyncio.to_thread(restarted.start)
            await store.ping()
            await store.commit("run-1", 0, Commit(document=""))

    async def test_undone_transactions_are_done_again(self, url: str) -> None:
        async with opened(url) as store:
            for code in ("40001", "40P01"):
                tries = []

                def work(
                    connection: Connection, tries: list[None] = tries, code: str = code
                ) -> None:
                    connection.exec_driver_sql("UPDATE meta SET value = value + 1")
                    tries.append(None)
                    if len(tries) < 3:
                        connection.exec_driver_sql(
                            f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$"
                        )

                await store._write(work)
                assert len(tries) == 3
            assert (await enrol(store, 0)).index == 2

    async def test_more_work_than_connections(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_NUM_CONNECTIONS", 2)
        async with opened(url) as store:
            for number in range(40):
                await store.add_run(replace(RUN, run_id=str(number)))
            async with asyncio.timeout(20):
                await asyncio.gather(
                    *(store.commit(str(number), 0, Commit(document="")) for number in range(40))
                )
            assert set((await store.versions()).values()) == {1}


class Proxy(TcpServer):
    """A network that loses messages with some bytes, or their answers, to a PostgreSQL server."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._upstream = port
        self.lose_question: set[bytes] = set()
        self.lose_answer: set[bytes] = set()
        self.open = asyncio.Event()
        self.open.set()
        self.lost = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.open.wait()
        back, forth = await asyncio.open_connection("127.0.0.1", self._upstream)
        deaf = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask(reader, forth, deaf))
                group.create_task(self._answer(back, writer, deaf))
        except* ConnectionError:
            pass
        finally:
            forth.transport.abort()

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deaf: asyncio.Event
    ) -> None:
        while data := await reader.read(1 << 16):
            for mark in [mark for mark in self.lose_question if mark in data]:
                self.lose_question.discard(mark)
                raise self._cut()
            for mark in [mark for mark in self.lose_answer if mark in data]:
                self.lose_answer.discard(mark)
                deaf.set()
            writer.write(data)
            await writer.drain()
        raise ConnectionError

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deaf: asyncio.Event
    ) -> None:
        while data := await reader.read(1 << 16):
            if deaf.is_set():
                raise self._cut()
            writer.write(data)
            await writer.drain()
        raise ConnectionError

    def _cut(self) -> ConnectionError:
        self.lost += 1
        return ConnectionError()


class TestLostAnswers:
    """The store finds out whether a commit with a broken connection was stored."""

    @pytest.fixture
    async def proxy(self, postgres: Cluster) -> AsyncIterator[Proxy]:
        async with Proxy(postgres.port) as proxy:
            yield proxy

    @pytest.fixture
    async def store(
        self, postgres: Cluster, proxy: Proxy, database: str
    ) -> AsyncIterator[SqlStore]:
        url = postgres.tcp_url(database).replace(f":{postgres.port}/", f":{proxy.port}/")
        async with opened(url) as store:
            await store.add_run(RUN)
            yield store

    async def test_lost_commit_that_another_overtook(
        self, store: SqlStore, proxy: Proxy, url: str
    ) -> None:
        proxy.lose_question.add(b"marked")
        proxy.open.clear()
        late = asyncio.create_task(store.commit("run-1", 0, Commit(document="marked")))
        await until(lambda: proxy.lost == 1)
        async with opened(url, serving=False) as other:
            await other.commit("run-1", 0, Commit(document="other"))
        proxy.open.set()
        with pytest.raises(VersionConflict):
            await late
        assert await store.versions() == {"run-1": 1}

    @pytest.mark.parametrize(("num_later", "known"), [(127, True), (128, False)])
    async def test_lost_answer_with_others_on_top(
        self, store: SqlStore, proxy: Proxy, url: str, num_later: int, known: bool
    ) -> None:
        proxy.lose_answer.add(b"marked")
        proxy.open.clear()
        mine = asyncio.create_task(store.commit("run-1", 0, Commit(document="marked")))
        await until(lambda: proxy.lost == 1)
        async with opened(url, serving=False) as other:
            for version in range(1, num_later + 1):
                await other.commit("run-1", version, Commit(document="other"))
        proxy.open.set()
        if known:
            await mine
        else:
            with pytest.raises(FedOneError, match="commit was stored is unknown") as caught:
                await mine
            assert not isinstance(caught.value, VersionConflict)
        assert await store.versions() == {"run-1": num_later + 1}

    async def test_enrolments_and_runs_are_not_added_twice(
        self, store: SqlStore, proxy: Proxy
    ) -> None:
        await store.put_token(replace(TOKEN, uses_left=1))
        proxy.lose_answer.add(b"COMMIT;")
        client = await store.enrol(device(0), TOKEN.token_sha256, 1.0)
        assert proxy.lost == 1
        assert await store.clients() == [client]
        assert (await store.tokens())[0].uses_left == 0
        proxy.lose_answer.add(b"COMMIT;")
        await store.add_run(replace(RUN, run_id="run-2"))
        assert proxy.lost == 2
        assert await store.versions() == {"run-1": 0, "run-2": 0}


class TestUrls:
    async def test_ways_to_say_it(self, postgres: Cluster, database: str) -> None:
        by_tcp = postgres.tcp_url(database)
        for url in (
            postgres.url(database),
            by_tcp,
            by_tcp.replace("postgresql:", "postgresql+asyncpg:"),
            f"{by_tcp}?sslmode=prefer&sslrootcert=ca.pem",
        ):
            async with opened(url) as store:
                await store.ping()

    async def test_the_password_is_never_shown(self, postgres: Cluster, database: str) -> None:
        for url in (
            postgres.tcp_url(database, password="sesame"),
            postgres.tcp_url("missing").replace(PASSWORD, f"{PASSWORD}"),
            "postgresql://fedone:sesame@127.0.0.1:1/db",
            "postgresql://fedone:sesame@no.such.host.invalid/db",
        ):
            store = SqlStore.at(url)
            with pytest.raises(StoreUnavailable, match=r"store .*/.* cannot be used: \S") as caught:
                await store.open()
            for text in (str(caught.value), repr(store), repr(caught.value)):
                assert "sesame" not in text
                assert PASSWORD not in text
            assert len(str(caught.value).splitlines()) == 1

    async def test_writes_are_durable(self, url: str) -> None:
        async with opened(url) as store:
            query = "SHOW synchronous_commit"
            assert await store._write(lambda c: c.exec_driver_sql(query).scalar()) == "on"


@contextmanager
def pooler(server: Cluster, database: str, folder: Path, **settings: object) -> Iterator[str]:
    """The URL of a database behind PgBouncer, which refuses to run as root."""
    port = free_port()
    page = Path(__file__).parents[2] / "docs" / "operations" / "replicas.md"
    ignored = page.read_text().partition("ignore_startup_parameters = ")[2].partition("`")[0]
    lines = {"listen_addr": "127.0.0.1", "listen_port": port, "unix_socket_dir": "", **settings}
    lines |= {"auth_type": "any", "ignore_startup_parameters": ignored}
    target = f"* = host={server.socket_folder} port={server.port} user=fedone"
    file = folder / "pgbouncer.ini"
    file.write_text(
        f"[databases]\n{target}\n[pgbouncer]\n"
        + "".join(f"{name} = {value}\n" for name, value in lines.items())
    )
    command = ["pgbouncer", "-q", "/dev/stdin"]
    user = "postgres" if os.geteuid() == 0 else None
    with (
        file.open() as config,
        subprocess.Popen(command, stdin=config, stderr=subprocess.DEVNULL, user=user) as process,
    ):
        try:
            until_it(lambda: _listens(port))
            yield f"postgresql://fedone@127.0.0.1:{port}/{database}"
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return not client.connect_ex(("127.0.0.1", port))


@pytest.mark.skipif(shutil.which("pgbouncer") is None, reason="needs PgBouncer")
@pytest.mark.parametrize(
    ("settings", "works"),
    [
        ({"pool_mode": "session"}, True),
        ({"pool_mode": "transaction"}, False),
        ({"pool_mode": "transaction", "server_round_robin": 1}, False),
        ({"pool_mode": "transaction", "default_pool_size": 1}, False),
    ],
)
async def test_a_pooler(
    postgres: Cluster, database: str, tmp_path: Path, settings: dict[str, object], works: bool
) -> None:
    """A session needs a server process of its own; the check says so as well as the start."""
    async with opened(postgres.url(database)):
        pass  # creates the tables
    with pooler(postgres, database, tmp_path, **settings) as url:
        store = SqlStore.at(url)
        for use in (store.check, store.open):
            if works:
                await use()
            else:
                with pytest.raises(FedOneError, match="a pooler in transaction mode"):
                    await use()
        await store.close()


async def test_a_database_that_refuses_writes_for_some_time(
    postgres: Cluster, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections of that time stay read-only; the pool replaces them."""
    monkeypatch.setattr(module, "_RETRYING", module._RETRYING.copy(stop=stop_after_delay(1.0)))
    sets = f"ALTER DATABASE {database} SET default_transaction_read_only"
    async with opened(postgres.url(database)) as store:
        await store.add_run(RUN)
        postgres.execute(f"{sets} = on")
        await store._engine.dispose()  # type: ignore[union-attr]
        for use in (store.ping, lambda: store.commit("run-1", 0, Commit(document="1"))):
            with pytest.raises(StoreUnavailable, match="read-only transaction"):
                await use()
        postgres.execute(f"{sets} = off")
        await store.commit("run-1", 0, Commit(document="1"))
        await asyncio.gather(*(store.ping() for _ in range(20)))


async def test_an_encoding_without_all_characters(postgres: Cluster, database: str) -> None:
    postgres.execute(f"DROP DATABASE {database}")
    postgres.execute(f"CREATE DATABASE {database} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    store = SqlStore.at(postgres.url(database))
    for use in (store.check, store.open):
        with pytest.raises(FedOneError, match=r"encoding LATIN1.*: CREATE DATABASE .* 'UTF8'"):
            await use()


@pytest.mark.parametrize(
    ("query", "host", "shown"),
    [("host=h1:5432&host=h2:5433", "h1%3A5432%2Ch2%3A5433", "h1:5432,h2:5433"),
     ("host=fd00::12", "%5Bfd00%3A%3A12%5D", "[fd00::12]")],
)  # fmt: skip
def test_hosts(query: str, host: str, shown: str) -> None:
    _, parameters, where = module._server_of(make_url(f"postgresql://u@/db?{query}"))
    assert (parameters, where) == (f"postgresql://?host={host}", f"{shown}/db")
