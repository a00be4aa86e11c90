"""A private PostgreSQL for tests: a cluster in a temporary folder, a fresh database per test.

Every test module loads this one. What only some environments have is imported where it is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.processes import free_port

PASSWORD = "hunter2-of-the-tests"


def find_binaries() -> Path | None:
    """The folder of ``initdb`` and ``postgres``; None where PostgreSQL is not installed."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    newest_first = sorted(versions, key=lambda folder: int(folder.parent.name), reverse=True)
    for folder in [*newest_first, *folders]:
        # Links in /usr/local/bin or wrappers in /usr/bin would not find their neighbours.
        found = (folder / "postgres").resolve().parent
        if all((found / name).exists() for name in ("initdb", "postgres")):
            return found
    return None


class Cluster:
    """A PostgreSQL server, as user ``postgres`` where tests run as root; also on 127.0.0.1."""

    def __init__(self, binaries: Path, folder: Path, *, fsync: bool = True) -> None:
        self._binaries, self._fsync = binaries, fsync
        self.socket_folder, self._data = folder, folder / "data"
        self._log = folder / "log"
        self.port = free_port()
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = _unprivileged()
            self._as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(folder, user.pw_uid, user.pw_gid)
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        password_file = folder / "password"
        password_file.write_text(PASSWORD)
        password_file.chmod(0o644)
        subprocess.run(
            [
                self._binaries / "initdb",
                "--no-sync",
                "--encoding=UTF8",
                "--locale=C",
                "--username=fedone",
                "--auth-local=trust",
                "--auth-host=scram-sha-256",
                f"--pwfile={password_file}",
                self._data,
            ],
            check=True,
            capture_output=True,
            cwd=folder,
            **self._as_user,
        )

    @property
    def running(self) -> bool:
        """Whether it was started and not ended."""
        return self._server is not None

    def start(self) -> None:
        """Start the server, and return when it accepts connections."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.socket_folder,
            "port": self.port,
            "fsync": "on" if self._fsync else "off",
            "shared_buffers": "32MB",
            "max_connections": 100,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._data, *options],
                stdout=log,
                stderr=log,
                cwd=self.socket_folder,
                **self._as_user,
            )
        # However the tests end, the end of its input tells the guard to end the server.
        self._guard = subprocess.Popen(
            ["sh", "-c", f"cat; kill -QUIT {self._server.pid}"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.socket_folder,
            **self._as_user,
        )
        give_up = time.monotonic() + 60
        while not self._answers():
            if self._server.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"PostgreSQL did not start:\n{self._log.read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stops the server as ``pg_ctl stop`` does: sessions are ended, nothing is lost."""
        self._end(signal.SIGINT)

    def restart(self) -> None:
        """As ``pg_ctl restart``."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """Kills every process of the server with SIGKILL, as a crash of the machine would."""
        self._end(signal.SIGKILL)

    def _end(self, by_signal: signal.Signals) -> None:
        import psutil

        server, self._server = self._server, None
        if server is None:
            return
        processes = [psutil.Process(server.pid)]
        if by_signal == signal.SIGKILL:
            # The parent first: it would start children again.
            processes += processes[0].children(recursive=True)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(by_signal)
        server.wait(timeout=60)
        psutil.wait_procs(processes[1:], timeout=60)
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.kill()
        self._guard.stdin.close()
        self._guard.wait()

    def _answers(self) -> bool:
        import asyncpg

        async def ask() -> None:
            connection = await asyncpg.connect(**self.at("postgres"), timeout=5)
            await connection.close()

        try:
            _run(ask())
        except (OSError, asyncpg.PostgresError, TimeoutError):
            return False
        return True

    def at(self, database: str) -> dict[str, Any]:
        """Arguments of ``asyncpg.connect``."""
        return {
            "host": str(self.socket_folder),
            "port": self.port,
            "user": "fedone",
            "database": database,
        }

    def url(self, database: str) -> str:
        """URL by the socket."""
        return f"postgresql://fedone@/{database}?host={self.socket_folder}&port={self.port}"

    def tcp_url(self, database: str, *, password: str = PASSWORD) -> str:
        """URL by TCP, with a password."""
        return f"postgresql://fedone:{password}@127.0.0.1:{self.port}/{database}"

    def create(self) -> str:
        """A new, empty database; its name."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def drop(self, name: str) -> None:
        """Drops a database, with the sessions on it; starts the server if need be."""
        if self._server is None:
            self.start()
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        """Executes a statement; its rows."""
        import asyncpg

        async def execute() -> list[Any]:
            connection = await asyncpg.connect(**self.at(database), timeout=30)
            try:
                return list(await connection.fetch(statement))
            finally:
                await connection.close()

        return _run(execute())


def _run(work: Any) -> Any:
    """Run a coroutine in a separate thread: the tests' loop may be running here."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _unprivileged() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


@contextmanager
def cluster(*, fsync: bool = True) -> Iterator[Cluster]:
    """A running cluster, removed afterwards; a skip without PostgreSQL, except in CI."""
    binaries = find_binaries()
    if binaries is None:
        reason = "PostgreSQL is not installed: no initdb in PATH or /usr/lib/postgresql/*/bin"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    # Not pytest's folder: a socket's path has at most 107 bytes, and its user may differ.
    folder = Path(tempfile.mkdtemp(prefix="fedone-pg-"))
    try:
        server = Cluster(binaries, folder, fsync=fsync)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """One cluster for all tests; tests that stop it start it again."""
    with cluster() as server:
        yield server


@pytest.fixture
def database(postgres: Cluster) -> Iterator[str]:
    """The name of a fresh, empty database."""
    name = postgres.create()
    yield name
    postgres.drop(name)
