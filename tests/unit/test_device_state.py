"""A device's state file: transactions, bounds and damage."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fedone_sdk.budget import Usage
from fedone_sdk.client.examples import Declining
from fedone_sdk.client.journal import CurrentWork, Journal, Unsent
from fedone_sdk.client.state import DeviceState, Identity, change
from fedone_sdk.errors import DataError
from fedone_sdk.messages import Enrolled, LossesUpdate, Scored
from tests.edge import stored
from tests.power import Disk

UPDATE = LossesUpdate(
    num_examples=1, scored=Scored(scored=1), usage=Usage(), model="m", losses=(1.0, 2.0)
)
SERVER = "memory:"
COUNT = change("INSERT INTO privacy VALUES ('losses', 1.0)")


def unsent_of(number: int, *, noised: bool = False) -> Unsent:
    return Unsent(
        run_id="run", assignment_id=f"a{number}", round=number, update=UPDATE, noised=noised
    )


def forbidden() -> tuple[float, ...]:
    raise AssertionError("the noise is drawn twice")


class Death:
    """The end of a process at an operation of its disk, given by its name or its number.

    Attributes:
        comes_at: The operation.
        has_come: Whether the process has died; nothing works then.
        is_over: Whether another process uses the disk.
    """

    def __init__(self) -> None:
        self.comes_at: str | int | None = None
        self.has_come = self.is_over = False
        self._passed = 0

    def __call__(self, what: str) -> None:
        self._passed += 1
        self.has_come = self.has_come or self.comes_at in (what, self._passed)
        if self.has_come and not self.is_over:
            raise KeyboardInterrupt


class TestPowerCuts:
    def test_what_was_read_is_there_too(self, tmp_path: Path) -> None:
        """A killed process may have left a transaction that was not synced."""
        death = Death()
        with Disk(tmp_path, death) as disk:
            state = DeviceState(tmp_path / "state", SERVER)
            Identity(state).reset("nonce")
            death.comes_at = "before fsync state.sqlite3-wal"
            assert not state.write(COUNT)
            state.close()
            death.comes_at, death.is_over = None, True
            reader = DeviceState(tmp_path / "state", SERVER)
            assert reader.rows("SELECT * FROM privacy") == [("losses", 1.0)]
            death.is_over = False  # It dies without a close, which would sync.
            reader.close()
            disk.cut()
            death.is_over = True
            after = DeviceState(tmp_path / "state", SERVER)
            assert after.rows("SELECT * FROM privacy") == [("losses", 1.0)]
            after.close()


class TestTransactions:
    @pytest.mark.parametrize("fails_at", range(4))
    def test_an_update_and_its_count_are_stored_together(
        self, tmp_path: Path, fails_at: int
    ) -> None:
        """Whichever write fails, the losses are there as long as the update is not."""
        writes: list[str] = []
        armed = False

        def watch(what: str) -> None:
            if armed and what.startswith("before write"):
                writes.append(what)
                if len(writes) > fails_at:
                    raise OSError(28, "No space left on device")

        with Disk(tmp_path, watch):
            state = DeviceState(tmp_path, SERVER)
            work = CurrentWork(state)
            work.journal("a0").keep({"key": (0.5,)}, "m", (0, Usage(requests=1)))
            armed = True
            assert not work.put(unsent_of(0, noised=True), [COUNT])
            armed = False
            assert work.unsent is None
            kinds = stored(tmp_path, "SELECT kind FROM journal ORDER BY kind")
            assert kinds == [("answers",), ("charge",)]
            assert stored(tmp_path, "SELECT * FROM unsent") == []
            assert stored(tmp_path, "SELECT * FROM privacy") == []
            assert work.put(unsent_of(0, noised=True), [COUNT])
            state.close()
        assert stored(tmp_path, "SELECT kind FROM journal") == []
        assert len(stored(tmp_path, "SELECT * FROM unsent")) == 1
        assert stored(tmp_path, "SELECT * FROM privacy") == [("losses", 1.0)]

    def test_servers_share_a_file_and_no_rows(self, tmp_path: Path) -> None:
        states = [DeviceState(tmp_path, server) for server in ("a", "b")]
        for number, state in enumerate(states):
            Identity(state).reset(f"nonce {number}")
            Journal(state, "same").keep({"key": (float(number),)}, "m")
        CurrentWork(states[0]).forget()
        assert Journal(states[0], "same").row("key") is None
        assert Journal(states[1], "same").row("key") == ((1.0,), "m")
        assert [Identity(state).nonce() for state in states] == ["nonce 0", "nonce 1"]


class TestCurrentWork:
    @pytest.mark.parametrize("restarts", [False, True])
    def test_losses_of_a_paused_run_outlast_other_work(
        self, tmp_path: Path, restarts: bool
    ) -> None:
        state = DeviceState(tmp_path if restarts else None, SERVER)
        work = CurrentWork(state)
        work.journal("paused").keep({"key": (0.5, None)}, "m", (0, Usage(requests=7)))
        work.journal("b").keep({"key": (0.25, None)}, "m")
        work.put(unsent_of(0))
        work.accept(unsent_of(0))
        work.drop("b")
        if restarts:
            work = CurrentWork(state)
        assert work.journal("paused").row("key") == ((0.5, None), "m")
        assert work.spent("paused") == Usage(requests=7)
        assert work.journal("b").row("key") is None
        work.drop("paused")
        assert CurrentWork(state).journal("paused").row("key") is None

    def test_the_latest_journals_are_kept(self, tmp_path: Path) -> None:
        state = DeviceState(tmp_path, SERVER)
        other = DeviceState(tmp_path, "other")
        Journal(other, "a0").keep({"key": (0.5,)}, "m")
        work = CurrentWork(state)
        for number in range(10):
            work.journal(f"a{number}").keep({"key": (0.5,)}, "m")
            work.journal("a0").keep({"later": (0.5,)}, "m")
        for kept in (work, CurrentWork(state)):
            found = [n for n in range(10) if kept.journal(f"a{n}").row("key") is not None]
            assert found == [0, *range(3, 10)]
        assert Journal(other, "a0").row("key") is not None

    @pytest.mark.parametrize("restarts", [False, True])
    @pytest.mark.parametrize("at", ["losses", "update"])
    def test_noise_is_not_drawn_twice(self, tmp_path: Path, at: str, restarts: bool) -> None:
        """Work that comes back after other work is declined, not noised again."""
        state = DeviceState(tmp_path if restarts else None, SERVER)
        work = CurrentWork(state)
        work.journal("a0").keep({"key": (0.5,)}, "m")
        if at == "losses":
            assert work.journal("a0").release(("key",), lambda: (7.0,)) == (7.0,)
            assert work.journal("a0").release(("key",), forbidden) == (7.0,)
        else:
            assert work.put(unsent_of(0, noised=True))
        for number in range(8):
            work.journal(f"b{number}").keep({"key": (0.5,)}, "m")
        work.put(Unsent(run_id="r", assignment_id="b", round=1, update=UPDATE))
        if restarts:
            work = CurrentWork(state)
        with pytest.raises(Declining, match="the noise of this work was drawn before"):
            work.journal("a0")
        work.drop("a0")
        if restarts:
            assert stored(tmp_path, "SELECT * FROM noised") == []

    def test_the_memory_of_the_last_run_is_kept(self, tmp_path: Path) -> None:
        work = CurrentWork(DeviceState(tmp_path, SERVER))
        for run_id in ("r1", "r2"):
            work.accept(
                Unsent(run_id=run_id, assignment_id="a", round=1, update=UPDATE, memory=b"m")
            )
        for kept in (work, CurrentWork(DeviceState(tmp_path, SERVER))):
            assert (kept.memory("r1"), kept.memory("r2")) == (None, b"m")


class TestDisks:
    def test_a_disk_that_refuses_every_write_can_be_read(self, tmp_path: Path) -> None:
        """The kernel refuses them here; SQLite needs a file of its own for a log."""
        state = DeviceState(tmp_path, SERVER)
        Identity(state).enrolled(Enrolled(client_id="c", credential="secret"))
        state.close()
        program = (
            "import resource, sys, structlog; from pathlib import Path; "
            "structlog.configure(logger_factory=structlog.ReturnLoggerFactory()); "
            "from fedone_sdk.client.state import DeviceState, change; "
            "from fedone_sdk.client.state import Identity; "
            "state = DeviceState(Path(sys.argv[1]), 'memory:'); "
            "_, most = resource.getrlimit(resource.RLIMIT_FSIZE); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (0, most)); "
            "found = Identity(state).credential; "
            "wrote = state.write(change('DELETE FROM identity')); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)); "
            "again = state.write(change('DELETE FROM identity')); "
            "print(found, wrote, again)"
        )
        assert _output(program, str(tmp_path)) == "secret False True"

    @pytest.mark.parametrize("why", [errno.ENOSPC, errno.EROFS, errno.EIO])
    def test_a_disk_that_fails_for_some_time(self, tmp_path: Path, why: int) -> None:
        """There is one warning, and the identity is stored with the first write that succeeds."""
        failing = True

        def watch(what: str) -> None:
            if failing and what.startswith(("before open", "before write")):
                raise OSError(why, os.strerror(why))

        with Disk(tmp_path, watch), capture_logs() as logs:
            state = DeviceState(tmp_path, SERVER)
            identity = Identity(state)
            identity.nonce()
            identity.enrolled(Enrolled(client_id="c", credential="secret"))
            assert not any(state.write(COUNT) for _ in range(10))
            failing = False
            assert state.write(change("DELETE FROM privacy"))
            state.close()
            assert Identity(DeviceState(tmp_path, SERVER)).credential == "secret"
        assert [log["log_level"] for log in logs] == ["warning"]

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"file.*: cannot be used as a state folder"):
            DeviceState(tmp_path / "file", SERVER)

    def test_a_log_of_a_damaged_file_is_not_read_into_the_next_one(self, tmp_path: Path) -> None:
        state = DeviceState(tmp_path, SERVER)
        assert state.write(COUNT)
        copies = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        state.close()
        for name, content in copies.items():
            (tmp_path / name).write_bytes(content)
        file = tmp_path / "state.sqlite3"
        file.write_bytes(b"x" * len(file.read_bytes()))
        assert DeviceState(tmp_path, SERVER).rows("SELECT * FROM privacy") == []
        assert (tmp_path / "state.sqlite3.damaged").exists()


def _output(program: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()
