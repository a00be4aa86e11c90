"""A device's state file: transactions, bounds and damage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedone_sdk.budget import Usage
from fedone_sdk.client.device_state import change, open_state
from fedone_sdk.client.identity import Identity
from fedone_sdk.client.journal import MOST_ROWS, Journal
from fedone_sdk.client.unfinished import UnfinishedWork, Unsent
from fedone_sdk.errors import DataError
from fedone_sdk.messages import Enrolled, LossesUpdate, Scored
from tests.edge import stored
from tests.power import Disk, disk

__all__ = ["disk"]

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
    def test_what_was_written_is_there(self, tmp_path: Path, disk: Disk) -> None:
        for number in range(3):
            state = open_state(tmp_path / "state", SERVER)
            Journal(state, "a").keep({f"key {number}": (0.5, None)}, "m")
            state.close()
            disk.cut()
        journal = Journal(open_state(tmp_path / "state", SERVER), "a")
        assert [journal.row(f"key {number}") for number in range(3)] == [((0.5, None), "m")] * 3

    def test_what_was_read_is_there_too(self, tmp_path: Path) -> None:
        """A killed process may have left a transaction that was not synced."""
        death = Death()
        with Disk(tmp_path, death) as disk:
            state = open_state(tmp_path / "state", SERVER)
            Identity(state).begin("nonce")
            death.comes_at = "before fsync state.sqlite3-wal"
            assert not state.write(COUNT)
            state.close()
            death.comes_at, death.is_over = None, True
            reader = open_state(tmp_path / "state", SERVER)
            assert reader.rows("SELECT * FROM privacy") == [("losses", 1.0)]
            death.is_over = False  # It dies without a close, which would sync.
            reader.close()
            disk.cut()
            death.is_over = True
            after = open_state(tmp_path / "state", SERVER)
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
            state = open_state(tmp_path, SERVER)
            work = UnfinishedWork(state)
            work.journal("a0").keep({"key": (0.5,)}, "m", (0, Usage(requests=1)))
            armed = True
            assert not work.put(unsent_of(0, noised=True), [COUNT])
            armed = False
            assert work.unsent() == []
            kinds = stored(tmp_path, "SELECT kind FROM journal ORDER BY kind")
            assert kinds == [("charge",), ("losses",)]
            assert stored(tmp_path, "SELECT * FROM unsent") == []
            assert stored(tmp_path, "SELECT * FROM privacy") == []
            assert work.put(unsent_of(0, noised=True), [COUNT])
            state.close()
        assert stored(tmp_path, "SELECT kind FROM journal") == []
        assert len(stored(tmp_path, "SELECT * FROM unsent")) == 1
        assert stored(tmp_path, "SELECT * FROM privacy") == [("losses", 1.0)]

    def test_noise_and_its_count_are_stored_together(self, tmp_path: Path) -> None:
        full = False

        def watch(what: str) -> None:
            if full and what.startswith("before write"):
                raise OSError(28, "No space left on device")

        with Disk(tmp_path, watch):
            state = open_state(tmp_path, SERVER)
            journal = Journal(state, "a")
            full = True
            with pytest.raises(OSError, match="cannot be stored"):
                journal.release(("k",), lambda: (0.5,), lambda: [COUNT])
            full = False
            assert stored(tmp_path, "SELECT * FROM privacy") == []
            assert journal.release(("k",), lambda: (0.75,), lambda: [COUNT]) == (0.75,)
            assert stored(tmp_path, "SELECT * FROM privacy") == [("losses", 1.0)]
            assert Journal(state, "a").release(("k",), forbidden) == (0.75,)
            state.close()

    def test_servers_share_a_file_and_no_rows(self, tmp_path: Path) -> None:
        states = [open_state(tmp_path, server) for server in ("a", "b")]
        for number, state in enumerate(states):
            Identity(state).begin(f"nonce {number}")
            Journal(state, "same").keep({"key": (float(number),)}, "m")
        UnfinishedWork(states[0]).forget()
        assert Journal(states[0], "same").row("key") is None
        assert Journal(states[1], "same").row("key") == ((1.0,), "m")
        assert [Identity(state).nonce() for state in states] == ["nonce 0", "nonce 1"]


class TestBounds:
    def test_what_is_stored_is_bounded(self, tmp_path: Path) -> None:
        state = open_state(tmp_path, SERVER)
        work = UnfinishedWork(state)
        for number in range(40):
            work.put(unsent_of(number))
            work.journal(f"b{number}").keep({"key": (0.5, None)}, "m")
        for kept in (work, UnfinishedWork(state)):
            assert [unsent.round for unsent in kept.unsent()] == list(range(24, 40))
        query = "SELECT assignment_id FROM journal"
        assert stored(tmp_path, query) == [(f"b{number}",) for number in range(36, 40)]
        big = Journal(state, "big")
        row = tuple([0.123456789] * 10_000)
        for number in range(200):
            big.keep({f"key {number}": row}, "m")
        ((size,),) = stored(tmp_path, "SELECT sum(length(value)) FROM journal")
        assert size <= 8 * 1024 * 1024 + 200
        assert big.row("key 199") == (row, "m")
        assert Journal(state, "big").row("key 0") == (row, "m")
        # What was spent is not forgotten, however much is kept.
        big.charge(3, Usage(requests=7))
        assert Journal(state, "big").spent(3) == Usage(requests=7)

    @pytest.mark.parametrize("restarts", [False, True])
    def test_noise_outlives_the_losses(self, tmp_path: Path, restarts: bool) -> None:
        """Work that comes back is scored again, and gets the same noise."""
        state = open_state(tmp_path, SERVER)
        work = UnfinishedWork(state)
        for number in range(30):
            journal = work.journal(f"a{number}")
            journal.keep({"key": (0.5,)}, "m", (0, Usage(requests=number)))
            journal.release(("key",), lambda number=number: (float(number),))
            if restarts:
                work = UnfinishedWork(state)
        for number in reversed(range(30)):
            journal = work.journal(f"a{number}")
            assert journal.row("key") == (((0.5,), "m") if number > 25 else None)
            assert journal.release(("key",), forbidden) == (float(number),)
            assert journal.spent(0) == Usage(requests=number)

    def test_noise_in_memory_outlives_the_losses(self) -> None:
        work = UnfinishedWork(open_state(None, SERVER))
        for number in range(30):
            journal = work.journal(f"a{number}")
            journal.keep({"key": (0.5,)}, "m")
            journal.release(("key",), lambda number=number: (float(number),))
        assert work.journal("a0").row("key") is None
        assert work.journal("a0").release(("key",), forbidden) == (0.0,)

    def test_noise_is_bounded(self, tmp_path: Path) -> None:
        state = open_state(tmp_path, SERVER)
        Journal(state, "a").release(("key",), lambda: (1.0,))
        many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT :most)"
        insert = "INSERT INTO journal SELECT :server, 'b' || i, 'noised', 'k', '[1.0]' FROM n"
        assert state.write(change(f"{many} {insert}", most=MOST_ROWS - 1))
        assert Journal(state, "a").releases == 1
        Journal(state, "c").release(("key",), lambda: (1.0,))
        assert Journal(state, "a").releases == 0
        assert stored(tmp_path, "SELECT count(*) FROM journal") == [(MOST_ROWS,)]

    def test_updates_with_noise_are_not_deleted_before_others(self, tmp_path: Path) -> None:
        work = UnfinishedWork(open_state(tmp_path, SERVER))
        for number in range(12):
            work.journal(f"a{number}").release(("key",), lambda: (7.0,))
            work.put(unsent_of(number, noised=True))
        for number in range(12, 24):
            work.put(unsent_of(number))
        wanted = [*range(12), *range(20, 24)]
        assert [unsent.round for unsent in work.unsent()] == wanted
        for number in range(24, 32):
            work.put(unsent_of(number, noised=True))
        wanted = [*range(4, 12), *range(24, 32)]
        restarted = UnfinishedWork(open_state(tmp_path, SERVER))
        for kept in (work, restarted):
            assert [unsent.round for unsent in kept.unsent()] == wanted
            # The noise of a deleted update is there, until the work is over.
            assert kept.journal("a0").release(("key",), forbidden) == (7.0,)
        restarted.drop("a0")
        assert Journal(open_state(tmp_path, SERVER), "a0").releases == 0

    def test_memories_of_the_last_runs_are_kept(self, tmp_path: Path) -> None:
        work = UnfinishedWork(open_state(tmp_path, SERVER))
        for number in [*range(40), 8]:
            work.accept(
                Unsent(
                    run_id=f"r{number}",
                    assignment_id="a",
                    round=1,
                    update=UPDATE,
                    memory=b"%d" % number,
                )
            )
        for kept in (work, UnfinishedWork(open_state(tmp_path, SERVER))):
            found = [number for number in range(40) if kept.memory(f"r{number}")]
            assert found == [*range(8, 40)]

    def test_deleted_losses_are_erased(self, tmp_path: Path) -> None:
        state = open_state(tmp_path, SERVER)
        work = UnfinishedWork(state)
        work.journal("a").keep({"a key to look for": (0.5,)}, "m")
        work.drop("a")
        state.close()
        (file,) = tmp_path.iterdir()
        assert b"a key to look for" not in file.read_bytes()


class TestDisks:
    def test_a_device_without_a_folder_does_not_load_sqlite(self) -> None:
        program = (
            "import sys; from fedone_sdk.client import EdgeClient; "
            "EdgeClient('http://x', token='t', data=[{'text': 'a', 'label': 0}]); "
            "print('sqlite3' in sys.modules)"
        )
        assert _output(program) == "False"

    def test_a_disk_that_refuses_every_write_can_be_read(self, tmp_path: Path) -> None:
        """The kernel refuses them here; SQLite needs a file of its own for a log."""
        state = open_state(tmp_path, SERVER)
        Identity(state).enrolled(Enrolled(client_id="c", credential="secret"))
        state.close()
        program = (
            "import resource, sys, structlog; from pathlib import Path; "
            "structlog.configure(logger_factory=structlog.ReturnLoggerFactory()); "
            "from fedone_sdk.client.device_state import change, open_state; "
            "from fedone_sdk.client.identity import Identity; "
            "state = open_state(Path(sys.argv[1]), 'memory:'); "
            "_, most = resource.getrlimit(resource.RLIMIT_FSIZE); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (0, most)); "
            "found = Identity(state).credential; "
            "wrote = state.write(change('DELETE FROM identity')); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)); "
            "again = state.write(change('DELETE FROM identity')); "
            "print(found, wrote, again)"
        )
        assert _output(program, str(tmp_path)) == "secret False True"

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"file.*: cannot be used as a state folder"):
            open_state(tmp_path / "file", SERVER)

    def test_a_log_of_a_damaged_file_is_not_read_into_the_next_one(self, tmp_path: Path) -> None:
        state = open_state(tmp_path, SERVER)
        assert state.write(COUNT)
        copies = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        state.close()
        for name, content in copies.items():
            (tmp_path / name).write_bytes(content)
        file = tmp_path / "state.sqlite3"
        file.write_bytes(b"x" * len(file.read_bytes()))
        assert open_state(tmp_path, SERVER).rows("SELECT * FROM privacy") == []
        assert (tmp_path / "state.sqlite3.damaged").exists()


def _output(program: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()
