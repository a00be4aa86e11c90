"""What a device stores in one SQLite file: identity, epsilon spent, open work (the journal).

After ``kill -9`` at any point, no answer of an open assignment is paid twice, and no noise is drawn
twice. A transaction is on disk when it returns (``synchronous=EXTRA``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar
from weakref import WeakSet, WeakValueDictionary

import structlog
from pydantic import Base64Bytes, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.client.rows import Declining
from fedone_sdk.errors import DataError, system_errors
from fedone_sdk.files import erase_log, lock_file, open_database, sync_path, transaction, use_wal
from fedone_sdk.messages import Message, Secret, Update, encode
from fedone_sdk.task import LogProbs

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)

Key = tuple[str, str, str]
"""Key of an entry: an assignment's id (or empty), the entry's kind and its name."""

Precision = tuple[str, float]
"""Target (losses or alpha) and precision (1 / noise_multiplier**2) of a release (noised result)."""

Row = tuple[LogProbs | float | None, ...]
"""The model's answers to one prompt, one for each example of the mini-batch: log-probabilities of
the labels, or the loss of a written text; None if the model failed."""

_ANSWERS: Any = tuple[tuple[tuple[FiniteFloat, ...] | FiniteFloat | None, ...], str]

_FILE = "state.sqlite3"
_TIMEOUT_S = 5.0

# The table `privacy` counts the releases to all servers; `entries` are separate for each server.
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (
    server TEXT, assignment_id TEXT, kind TEXT, name TEXT, value TEXT,
    PRIMARY KEY (server, assignment_id, kind, name)
);
CREATE TABLE IF NOT EXISTS privacy (target TEXT PRIMARY KEY, precision REAL) WITHOUT ROWID;
PRAGMA user_version = 1;
COMMIT;
"""
_STORE = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)"
_DELETE = "DELETE FROM entries WHERE (server, assignment_id, kind, name) = (?, ?, ?, ?)"
_COUNT = (
    "INSERT INTO privacy VALUES (?, ?) "
    "ON CONFLICT DO UPDATE SET precision = precision + excluded.precision"
)

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_IN_USE = "{}: {} works with this state folder; end it, or give each device a folder of its own"

_MAX_ASSIGNMENTS = 8
"""Maximum number of assignments with entries. Without a maximum, a server could fill the disk by
assignments that it never ends."""

_MAX_KEPT = 1000
"""Maximum number of assignments with drawn noise, and of runs with proposals, that are recorded."""


class Identity(Message):
    """A device's identity at a server.

    Attributes:
        nonce: Stored before it is sent, so that a repeated enrolment returns the same client.
    """

    client_id: str | None = None
    credential: Annotated[Secret | None, Field(repr=False)] = None
    nonce: Annotated[str | None, Field(repr=False)] = None


class _DamagedError(sqlite3.DatabaseError):
    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class DeviceState:
    """A device's entries (keys and values) for one server, in memory and in a file.

    The file has the entries for all servers. Without a folder there is no file. If the file cannot
    be written, the device continues in memory and logs one warning; the next successful write also
    stores the earlier changes. A damaged file gets the suffix ``.damaged``, and a new file is
    started. A missing folder is created, readable by its owner only.

    Args:
        locks: Whether to lock the folder against other processes until `release`.

    Attributes:
        file: The database; None without a folder.

    Raises:
        DataError: The folder cannot be created, or another process uses it.
    """

    _locks: ClassVar[dict[Path, tuple[int, WeakSet[DeviceState]]]] = {}
    """For each file, the descriptor of its lock, and the objects of this process that use it."""
    _users: ClassVar[WeakValueDictionary[tuple[Path, str], DeviceState]] = WeakValueDictionary()
    """For each file and server, the object in use; a second one would do the same work."""

    def __init__(self, folder: str | Path | None, server: str, *, locks: bool = False) -> None:
        self._db: sqlite3.Connection | None = None
        self._locks_file = locks
        self.server = server
        self.file = None if folder is None else Path(folder).absolute() / _FILE
        self._fails = False
        self._entries: dict[Key, str] = {}
        self._missing: dict[Key, str | None] = {}
        self._in_file: set[Key] = set()
        if self.file is None:
            return
        folder = self.file.parent
        with system_errors(DataError, f"{folder}: cannot be used as a state folder"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError):  # An error of the disk is reported when the file is used.
            sync_path(folder.parent)  # writes the folder's name to the disk
        self._load(self.file)

    def acquire(self) -> None:
        """Begin to work: read the entries again, unless this was done since the last `release`."""
        if self.file is None or self._users.get((self.file, self.server)) is self:
            return
        self._load(self.file)
        if self._users.setdefault((self.file, self.server), self) is not self and self._locks_file:
            raise DataError(_IN_USE.format(self.file.parent, "another client of this program"))
        self._users[self.file, self.server] = self

    def _load(self, file: Path) -> None:
        if self._locks_file:
            with suppress(OSError):  # An error of the disk is reported when the entries are read.
                self._lock(file)
        query = (
            "SELECT assignment_id, kind, name, value FROM entries WHERE server = ? ORDER BY rowid"
        )
        try:
            rows = self._read(query, self.server)
        except DataError as exc:
            self._warn("device state cannot be read", exc)
        else:
            self._entries = {(owner, *key): value for owner, *key, value in rows}
            self._in_file = set(self._entries)
            self._set(self._missing)

    def _lock(self, file: Path) -> None:
        if file not in self._locks:
            try:
                self._locks[file] = lock_file(f"{file}.lock"), WeakSet()
            except BlockingIOError:
                raise DataError(_IN_USE.format(file.parent, "another process")) from None
        self._locks[file][1].add(self)

    def release(self) -> None:
        """Close the file, and let another process or object use it."""
        self.close()
        if self.file is None:
            return
        if self._users.get((self.file, self.server)) is self:
            del self._users[self.file, self.server]
        descriptor, holders = self._locks.get(self.file, (-1, WeakSet()))
        holders.discard(self)
        if descriptor >= 0 and not holders:
            del self._locks[self.file]
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()

    @property
    def assignments(self) -> tuple[str, ...]:
        """The assignments that have entries; the one with the latest entry first."""
        return tuple(dict.fromkeys(owner for owner, *_ in reversed(self._entries) if owner))

    def keys(self, assignment_id: str, *kinds: str) -> list[Key]:
        """Return the keys of an assignment's entries of some kinds, oldest first."""
        return [key for key in self._entries if key[0] == assignment_id and key[1] in kinds]

    def get(self, form: type[T], assignment_id: str, kind: str, name: str = "") -> T | None:
        """Return an entry of a type, or None. A damaged entry is deleted."""
        value = self._entries.get((assignment_id, kind, name))
        if value is None:
            return None
        try:
            entry: T = _adapter(form).validate_json(value)
            return entry
        except ValidationError:
            _log.warning("damaged entry of the device state deleted", kind=kind)
            self.write({(assignment_id, kind, name): None})
            return None

    def write(
        self,
        entries: Mapping[Key, str | None],
        *,
        counted: Precision | None = None,
        durable: bool = False,
        erases: bool = False,
    ) -> bool:
        """Set entries in one transaction; return False if the file cannot be written.

        Args:
            entries: Values by key; None deletes an entry.
            counted: A release to count in the same transaction.
            durable: If the write fails, drop the changes. By default, they stay in memory.
            erases: Whether to erase deleted entries from SQLite's log (WAL), too.
        """
        changes = {**self._missing, **self._evicted(entries), **entries}
        is_stored = self._store(changes, counted, erases)
        if is_stored:
            self._in_file.difference_update(changes)
            self._in_file.update(key for key, value in changes.items() if value is not None)
        if is_stored or not durable:
            kept = [key for key, value in changes.items() if value or key in self._in_file]
            self._missing = {} if is_stored else {key: changes[key] for key in kept}
            self._set(changes)
        return is_stored

    def clear(self) -> None:
        """Delete all entries of the server, except the record of proposals."""
        deleted = [key for key in self._entries if key[1] != "proposals"]
        self.write(dict.fromkeys(deleted), erases=True)

    def _set(self, changes: Mapping[Key, str | None]) -> None:
        for key, value in changes.items():
            self._entries.pop(key, None)
            if value is not None:
                self._entries[key] = value

    def _evicted(self, entries: Mapping[Key, str | None]) -> dict[Key, str | None]:
        """Return changes that delete the oldest entries, if `entries` add an assignment."""
        # Searched from the end, because most changes are of the latest assignment.
        owners = {owner for owner, *_ in entries if owner}
        if all(any(owner == key[0] for key in reversed(self._entries)) for owner in owners):
            return {}
        oldest = self.assignments[_MAX_ASSIGNMENTS - 1 :]
        evicted = [key for key in self._entries if key[0] in oldest]
        old = self.keys("", "noised")[:-_MAX_KEPT] + self.keys("", "proposals")[:-_MAX_KEPT]
        return dict.fromkeys(evicted + old)

    @property
    def identity(self) -> Identity:
        """The device's identity at the server; setting it stores it."""
        return self.get(Identity, "", "identity") or Identity()

    @identity.setter
    def identity(self, identity: Identity) -> None:
        self.write({("", "identity", ""): encode(identity).decode()})

    def precisions(self) -> dict[str, float]:
        """Return the summed precision of all releases, by target."""
        if self.file is None:
            return {}
        counted = dict(self._read("SELECT target, precision FROM privacy"))
        is_sound = all(isinstance(sum, float) and 0 <= sum < math.inf for sum in counted.values())
        damaged = self.file.with_name(f"{_FILE}.damaged")
        if not is_sound or damaged.exists():
            raise DataError(
                f"{damaged if is_sound else self.file}: the count of epsilon cannot be read, so "
                "the epsilon that the device has spent is unknown"
            )
        return counted

    def close(self) -> None:
        """Close the file until its next use."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        assert self.file is not None
        try:
            return self._opened(self.file).execute(query, values).fetchall()
        except (OSError, sqlite3.Error) as exc:
            self.close()
            raise DataError(f"{self.file}: cannot be read: {exc}") from exc

    def _store(
        self, changes: Mapping[Key, str | None], counted: Precision | None, erases: bool
    ) -> bool:
        if self.file is None:
            return True
        try:
            db = self._opened(self.file)
            with transaction(db):
                for key, value in changes.items():
                    if value is None:
                        db.execute(_DELETE, (self.server, *key))
                    else:
                        db.execute(_STORE, (self.server, *key, value))
                if counted is not None:
                    db.execute(_COUNT, counted)
        except (OSError, sqlite3.Error) as exc:
            self.close()
            self._warn("device state cannot be written", exc)
            return False
        self._fails = False
        if erases:
            with suppress(sqlite3.Error):  # The next start erases the log.
                erase_log(db)
        return True

    def _warn(self, what: str, failure: Exception) -> None:
        if not self._fails:
            self._fails = True
            _log.warning(what, file=str(self.file), reason=str(failure))

    def _opened(self, file: Path) -> sqlite3.Connection:
        if self._db is None:
            try:
                self._db = _open(file)
            except sqlite3.DatabaseError as exc:
                if exc.sqlite_errorcode & 0xFF not in _DAMAGE:
                    raise
                _log.warning("damaged device state renamed", file=str(file), reason=str(exc))
                for suffix in ("-wal", "-shm", ""):
                    part = Path(f"{file}{suffix}")
                    if part.exists():
                        part.replace(f"{file}.damaged{suffix}")
                self._db = _open(file)
        return self._db


def _forget_locks() -> None:
    """Make a forked child process lock its files itself; the parent keeps its locks."""
    for descriptor, _ in DeviceState._locks.values():
        os.close(descriptor)
    DeviceState._locks.clear()
    DeviceState._users.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_locks)


def _open(file: Path) -> sqlite3.Connection:
    """Open the database; for reading only, if it cannot be opened for writing."""
    try:
        return _open_for_writing(file)
    except (sqlite3.OperationalError, PermissionError):
        log = file.with_name(f"{file.name}-wal")
        if log.exists() and log.stat().st_size:
            raise  # `immutable` ignores the log and the transactions in it.
        uri = f"{file.absolute().as_uri()}?immutable=1"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def _open_for_writing(file: Path) -> sqlite3.Connection:
    # SQLite's log gets the mode of the file.
    with open_database(file, _TIMEOUT_S) as db:
        use_wal(db, _TIMEOUT_S)
        db.execute("PRAGMA synchronous = EXTRA")
        (checked,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if checked != "ok":
            raise _DamagedError(checked)
        if db.execute("PRAGMA user_version").fetchone() == (0,):
            db.executescript(_SCHEMA)
        # `erase_log` first syncs the last transactions of a killed process to the disk. If the disk
        # is full, only the second step fails, which copies the log to the file.
        try:
            erase_log(db)
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
        return db


def key_of(*parts: object) -> str:
    """Return the key of an entry that depends on these JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class Unsent(Message):
    """An update that the server has not accepted yet.

    Attributes:
        memory: The method's state on this device (such as AdamW's moments), or empty. It is stored
            when the update is accepted.
    """

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    run_id: str
    assignment_id: str
    round: int
    update: Update
    memory: bytes = b""


class Journal:
    """The entries of one assignment: answers, spending, noise, and the update until it is accepted.

    The entries contain numbers, digests, and the candidate that a model wrote.
    """

    def __init__(self, state: DeviceState, assignment_id: str) -> None:
        self._state = state
        self.assignment_id = assignment_id

    def row(self, key: str) -> tuple[Row, str] | None:
        """Return the answers to a prompt and their model's fingerprint; None if not stored."""
        return self._get(_ANSWERS, "answers", key)

    def keep(
        self, rows: Mapping[str, Row], model: str, spent: tuple[int, Usage] | None = None
    ) -> None:
        """Add answers of one model, by key; `spent` is a step's number and its cost so far."""
        entries = {self._key("answers", key): json.dumps((row, model)) for key, row in rows.items()}
        if spent is not None:
            entries |= self._spent(*spent)
        self._state.write(entries)

    def spent(self, step: int) -> Usage:
        """Return what the device's own model has spent on a step."""
        return self._get(Usage, "spent", str(step)) or NOTHING

    def charge(self, step: int, spent: Usage) -> None:
        """Set what a step has cost so far, including the upper bound of queries in progress."""
        self._state.write(self._spent(step, spent))

    @property
    def usage(self) -> Usage:
        """What the device's own model has spent on the work."""
        if self.unsent is not None:
            return self.unsent.update.usage
        steps = self._state.keys(self.assignment_id, "spent")
        return sum((self.spent(int(step)) for *_, step in steps), NOTHING)

    @property
    def written(self) -> str | None:
        """The candidate that a model wrote; after a restart it is not paid for again."""
        return self._get(str, "written")

    @written.setter
    def written(self, text: str) -> None:
        self._state.write({self._key("written"): json.dumps(text)})

    def proposals(self, run_id: str) -> set[str]:
        """Return the other assignments of a run for which the device has sent a candidate."""
        return (self._state.get(set[str], "", "proposals", run_id) or set()) - {self.assignment_id}

    def add_proposal(self, run_id: str) -> None:
        """Record that the device sends a candidate for this assignment."""
        sent = [*self.proposals(run_id), self.assignment_id]
        self._state.write({("", "proposals", run_id): json.dumps(sent)})

    @property
    def releases(self) -> int:
        """Number of releases whose noise has been drawn."""
        return len(self._state.keys(self.assignment_id, "released"))

    def check(self) -> None:
        """Check that, if noise was drawn, the noised numbers are still stored."""
        if self._noised in self._state.keys("", "noised") and not self.releases:
            raise Declining("noise was drawn for this work before, and the noised result is lost")

    def release(
        self,
        keys: Sequence[str],
        draw: Callable[[], Sequence[float]],
        charge: Callable[[], Precision] | None = None,
    ) -> tuple[float, ...]:
        """Return the noised numbers of `draw`; after a restart, the stored numbers.

        If a device sent the same numbers with different noise, a server could average the noise
        away. One transaction stores the noised numbers and counts the release.
        """
        name = key_of(*keys)
        released = self._get(tuple[FiniteFloat, ...], "released", name)
        if released is None:
            counted = None if charge is None else charge()
            released = tuple(draw())
            entries = {self._key("released", name): json.dumps(released), self._noised: "true"}
            if not self._state.write(entries, counted=counted, durable=True):
                raise Declining("the noise cannot be stored")
        return released

    @property
    def unsent(self) -> Unsent | None:
        """The finished update; None while the work is not done."""
        return self._get(Unsent, "unsent")

    def finish(self, unsent: Unsent) -> None:
        """Replace the stored answers and spending by the finished update."""
        update = {self._key("unsent"): encode(unsent).decode()}
        self._state.write({**self._deleted("answers", "spent", "written"), **update})

    def delete(self, accepted: Unsent | None = None) -> None:
        """Delete the entries; store the `Unsent.memory` of an accepted update."""
        entries = self._deleted("answers", "spent", "written", "released", "unsent")
        entries[self._noised] = None
        if accepted is not None and accepted.memory:
            content = base64.b64encode(accepted.memory).decode()
            entries["", "memory", ""] = json.dumps((accepted.run_id, content))
        self._state.write(entries, erases=True)

    @property
    def _noised(self) -> Key:
        return "", "noised", self.assignment_id

    def _deleted(self, *kinds: str) -> dict[Key, str | None]:
        return dict.fromkeys(self._state.keys(self.assignment_id, *kinds))

    def _spent(self, step: int, spent: Usage) -> dict[Key, str]:
        return {self._key("spent", str(step)): json.dumps(spent.exact())}

    def _key(self, kind: str, name: str = "") -> Key:
        return self.assignment_id, kind, name

    def _get(self, form: type[T], kind: str, name: str = "") -> T | None:
        return self._state.get(form, self.assignment_id, kind, name)


def unsent_updates(state: DeviceState) -> list[Unsent]:
    """Return the updates that the server has not accepted yet."""
    updates = [Journal(state, assignment_id).unsent for assignment_id in state.assignments]
    return list(filter(None, updates))


def memory_of(state: DeviceState, run_id: str) -> bytes:
    """Return the method's memory of a run, such as AdamW's moments; empty if there is no memory."""
    stored_run, content = state.get(tuple[str, Base64Bytes], "", "memory") or ("", b"")
    return content if stored_run == run_id else b""
