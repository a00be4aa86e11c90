"""A device's state file: transactions, bounds and damage."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedone_sdk.budget import Usage
from fedone_sdk.client import EdgeClient
from fedone_sdk.client.rows import Declining
from fedone_sdk.client.state import (
    DeviceState,
    Identity,
    Journal,
    Unsent,
    memory_of,
    unsent_updates,
)
from fedone_sdk.errors import DataError
from fedone_sdk.messages import LossesUpdate, Scored
from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from tests.edge import entries, stored
from tests.power import Disk
from tests.runs import WORDS, run_spec

UPDATE = LossesUpdate(
    num_examples=1, scored=Scored(scored=1), usage=Usage(), model="m", losses=(1.0, 2.0)
)
SERVER = "memory:"
COUNT = ("losses", 1.0)
ENROLLED = Identity(client_id="c", credential="secret")


def unsent_of(number: int, **more: Any) -> Unsent:
    facts = {"run_id": "run", "assignment_id": f"a{number}", "round": number, "update": UPDATE}
    return Unsent.model_validate({**facts, **more})


def count(state: DeviceState) -> bool:
    return state.write({}, counted=COUNT)


def forbidden() -> tuple[float, ...]:
    raise AssertionError("the noise is drawn twice")


class TestTransactions:
    @pytest.mark.parametrize("fails_at", range(3))
    def test_noise_and_its_count_are_stored_together(self, tmp_path: Path, fails_at: int) -> None:
        """Whichever write fails, neither is stored, nor used."""
        writes: list[str] = []
        armed = False

        def watch(what: str) -> None:
            if armed and what.startswith("before write"):
                writes.append(what)
                if len(writes) > fails_at:
                    raise OSError(28, "No space left on device")

        with Disk(tmp_path, watch):
            state = DeviceState(tmp_path, SERVER)
            journal = Journal(state, "a0")
            journal.keep({"key": (0.5,)}, "m", (0, Usage(requests=1)))
            armed = True
            with pytest.raises(Declining, match="the noise cannot be stored"):
                journal.release(("key",), lambda: (7.0,), lambda: COUNT)
            armed = False
            assert (journal.releases, state.precisions()) == (0, {})
            assert stored(tmp_path, "SELECT kind FROM entries") == [("answers",), ("spent",)]
            assert journal.release(("key",), lambda: (8.0,), lambda: COUNT) == (8.0,)
            journal.finish(unsent_of(0))
            state.close()
        kinds = stored(tmp_path, "SELECT kind FROM entries ORDER BY kind")
        assert kinds == [("noised",), ("released",), ("unsent",)]
        assert stored(tmp_path, "SELECT * FROM privacy") == [COUNT]

    def test_servers_share_a_file_and_no_entries(self, tmp_path: Path) -> None:
        states = [DeviceState(tmp_path, server) for server in ("a", "b")]
        for number, state in enumerate(states):
            state.identity = Identity(nonce=f"nonce {number}")
            Journal(state, "same").keep({"key": (float(number),)}, "m")
        states[0].clear()
        for kept in (states, [DeviceState(tmp_path, server) for server in ("a", "b")]):
            assert Journal(kept[0], "same").row("key") is None
            assert Journal(kept[1], "same").row("key") == ((1.0,), "m")
            assert [state.identity.nonce for state in kept] == [None, "nonce 1"]


class TestJournal:
    @pytest.mark.parametrize("restarts", [False, True])
    def test_losses_of_a_paused_run_outlast_other_work(
        self, tmp_path: Path, restarts: bool
    ) -> None:
        state = DeviceState(tmp_path if restarts else None, SERVER)
        Journal(state, "paused").keep({"key": (0.5, None)}, "m", (0, Usage(requests=7)))
        Journal(state, "a0").keep({"key": ((-0.25, -1.0),)}, "m")
        Journal(state, "a0").finish(unsent_of(0))
        if restarts:
            state = DeviceState(tmp_path, SERVER)
        assert unsent_updates(state) == [unsent_of(0)]
        Journal(state, "a0").delete(unsent_of(0))
        if restarts:
            state = DeviceState(tmp_path, SERVER)
        journal = Journal(state, "paused")
        assert (journal.row("key"), journal.usage) == (((0.5, None), "m"), Usage(requests=7))
        assert unsent_updates(state) == []
        assert state.assignments == ("paused",)
        journal.delete()
        assert journal.row("key") is None

    def test_the_latest_journals_are_kept(self, tmp_path: Path) -> None:
        state, other = DeviceState(tmp_path, SERVER), DeviceState(tmp_path, "other")
        Journal(other, "a0").keep({"key": (0.5,)}, "m")
        for number in range(10):
            Journal(state, f"a{number}").keep({"key": (0.5,)}, "m")
            Journal(state, "a0").keep({"later": (0.5,)}, "m")
        for kept in (state, DeviceState(tmp_path, SERVER)):
            assert sorted(kept.assignments) == ["a0", *(f"a{number}" for number in range(3, 10))]
        assert DeviceState(tmp_path, "other").assignments == ("a0",)

    @pytest.mark.parametrize("restarts", [False, True])
    def test_noise_is_not_drawn_twice(self, tmp_path: Path, restarts: bool) -> None:
        """Also not for work that comes back after other work, which is declined."""
        state = DeviceState(tmp_path if restarts else None, SERVER)
        assert Journal(state, "a0").release(("key",), lambda: (7.0,)) == (7.0,)
        for number in range(1, 9):
            if restarts:
                state = DeviceState(tmp_path, SERVER)
            Journal(state, "a0").check()
            assert Journal(state, "a0").release(("key",), forbidden) == (7.0,)
            Journal(state, f"a{number}").keep({"key": (0.5,)}, "m")
            Journal(state, f"a{number}").finish(unsent_of(number))
        if restarts:
            state = DeviceState(tmp_path, SERVER)
        with pytest.raises(Declining, match="noise was drawn for this work before"):
            Journal(state, "a0").check()
        Journal(state, "a0").delete()
        Journal(state, "a0").check()
        if restarts:
            assert entries(tmp_path, "noised") == []

    def test_the_memory_of_the_last_run_is_kept(self, tmp_path: Path) -> None:
        state = DeviceState(tmp_path, SERVER)
        for run_id in ("r1", "r2"):
            Journal(state, "a0").delete(unsent_of(0, run_id=run_id, memory=b"m\xff"))
        Journal(state, "a1").delete(unsent_of(1, run_id="r3"))
        for kept in (state, DeviceState(tmp_path, SERVER)):
            assert (memory_of(kept, "r1"), memory_of(kept, "r2")) == (b"", b"m\xff")


DAMAGES = {
    "cut": lambda value: value[:-3],
    "foreign": lambda value: "\0\xff" * 50 + value,
    "wrong": lambda value: '{"row": 1}',
    "NaN of a broken model": lambda value: value.replace("0.5", "NaN"),
    "deep": lambda value: "[" * 100_000 + value,
    "empty": lambda value: "",
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_entries_are_deleted(self, tmp_path: Path, damage: str) -> None:
        """They cost an enrolment, or requests that are counted once, and never end the device."""
        state = DeviceState(tmp_path, SERVER)
        state.identity = ENROLLED
        Journal(state, "a0").keep({"key": (0.5,)}, "m")
        Journal(state, "a1").finish(unsent_of(1, memory=b"0.5"))
        state.close()
        for rowid, value in stored(tmp_path, "SELECT rowid, value FROM entries"):
            damaged = DAMAGES[damage](value)
            stored(tmp_path, "UPDATE entries SET value = ? WHERE rowid = ?", damaged, rowid)
        state = DeviceState(tmp_path, SERVER)
        if damage != "NaN of a broken model":
            assert (state.identity, unsent_updates(state)) == (Identity(), [])
        assert Journal(state, "a0").row("key") is None
        assert entries(tmp_path, "answers") == []


class TestDisks:
    def test_a_disk_that_refuses_every_write_can_be_read(self, tmp_path: Path) -> None:
        """The kernel refuses them here; SQLite needs a file of its own for a log."""
        state = DeviceState(tmp_path, SERVER)
        state.identity = ENROLLED
        state.close()
        program = (
            "import resource, sys, structlog; from pathlib import Path; "
            "structlog.configure(logger_factory=structlog.ReturnLoggerFactory()); "
            "from fedone_sdk.client.state import DeviceState; "
            "_, most = resource.getrlimit(resource.RLIMIT_FSIZE); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (0, most)); "
            "state = DeviceState(Path(sys.argv[1]), 'memory:'); "
            "wrote = state.write({('', 'kind', 'name'): '1'}); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)); "
            "again = state.write({}); "
            "print(state.identity.credential, wrote, again)"
        )
        assert _output(program, str(tmp_path)) == "secret False True"
        assert entries(tmp_path, "kind") == ["1"]  # Stored with the first write that succeeded.

    @pytest.mark.parametrize("why", [errno.ENOSPC, errno.EROFS, errno.EIO])
    def test_a_disk_that_fails_for_some_time(self, tmp_path: Path, why: int) -> None:
        """There is one warning; what is missing is stored with the first write that succeeds."""
        failing = False

        def watch(what: str) -> None:
            if failing and what.startswith(("before open", "before write")):
                raise OSError(why, os.strerror(why))

        with Disk(tmp_path, watch), capture_logs() as logs:
            state = DeviceState(tmp_path, SERVER)
            Journal(state, "old").keep({"key": (0.5,)}, "m")
            state.close()
            failing = True
            Journal(state, "old").keep({"key": (0.7,)}, "m")
            Journal(state, "old").delete()
            state.identity = Identity(nonce="nonce")
            state.identity = ENROLLED
            Journal(state, "a0").keep({"key": (0.5,)}, "m")
            assert not any(count(state) for _ in range(10))
            for number in range(1, 100):  # Work that is over takes no memory.
                Journal(state, f"a{number}").keep({"key": (0.5,)}, "m")
                Journal(state, f"a{number}").delete()
            assert len(state._missing) == 3
            assert (state.identity, Journal(state, "a0").row("key")) == (ENROLLED, ((0.5,), "m"))
            failing = False
            assert count(state)
            state.close()
            again = DeviceState(tmp_path, SERVER)
            assert (again.identity, Journal(again, "a0").row("key")) == (ENROLLED, ((0.5,), "m"))
            assert again.assignments == ("a0",)
            assert again.precisions() == dict([COUNT])
        assert [log["log_level"] for log in logs] == ["warning"]

    def test_a_folder_in_the_home_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        EdgeClient("http://h", token="x", data=[{"text": "a"}], state_dir="~/a")
        assert (tmp_path / "a" / "state.sqlite3").exists()

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"file.*: cannot be used as a state folder"):
            DeviceState(tmp_path / "file", SERVER)

    def test_a_log_of_a_damaged_file_is_not_read_into_the_next_one(self, tmp_path: Path) -> None:
        state = DeviceState(tmp_path, SERVER)
        assert count(state)
        copies = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        state.close()
        for name, content in copies.items():
            (tmp_path / name).write_bytes(content)
        file = tmp_path / "state.sqlite3"
        file.write_bytes(b"x" * len(file.read_bytes()))
        DeviceState(tmp_path, SERVER)
        assert stored(tmp_path, "SELECT * FROM privacy") == []
        assert (tmp_path / "state.sqlite3.damaged").exists()


_WORKS = """
import os, sys
from fedone_sdk.client import EdgeClient
from fedone_sdk.errors import DataError
try:
    client = EdgeClient(sys.argv[2], token="x", data=[{"text": "a"}], state_dir=sys.argv[1])
    print("works", flush=True)
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        EdgeClient("http://b", token="x", data=[{"text": "a"}], state_dir=sys.argv[1])
except DataError as exc:
    print(exc)
"""


async def test_a_folder_is_for_one_process(tmp_path: Path) -> None:
    """Until its last client there has ended; clients of one process share it."""
    options = {"token": "x", "data": [{"text": "a"}], "state_dir": tmp_path}
    async with EdgeClient("http://a.example", **options):
        async with EdgeClient("http://b.example", **options):
            for server in ("http://a.example", "http://b.example", "http://c.example"):
                assert "another process works with this state folder; end it" in await _ran(
                    tmp_path, server
                )
        assert "another process" in await _ran(tmp_path, "http://b.example")
    works, forked = (await _ran(tmp_path, "http://a.example")).splitlines()
    assert works == "works"
    assert "another process" in forked


async def test_a_folder_is_for_one_client_of_a_server(tmp_path: Path) -> None:
    """The next client continues with the identity that the first one has stored."""
    async with LoopbackFederation(run_spec(), WORDS, backend=ScriptedBackend()) as served:
        options = {"token": served.token, "data": [{"text": "a", "label": 0}]}
        one, two = [EdgeClient(served.url, state_dir=tmp_path, **options) for _ in range(2)]
        async with one, two:
            await one.enrol()
            with pytest.raises(DataError, match="another client of this program works with this"):
                await two.enrol()
        async with two:
            await two.enrol()
        assert one._session.credential == two._session.credential


async def _ran(folder: Path, server: str) -> str:
    return await asyncio.to_thread(_output, _WORKS, str(folder), server)


def _output(program: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()
