"""Cache of paid answers: in memory, and durable in a SQLite file."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import TypeVar

from fedone_sdk.backends.base import Answer, Query
from fedone_sdk.budget import NOTHING
from fedone_sdk.budget.guard import PATIENCE_S
from fedone_sdk.errors import BackendBlocked, BudgetExhausted, SpecError, one_line
from fedone_sdk.files import open_database, transaction, use_wal

T = TypeVar("T")

_APPLICATION_ID = 0x46454441  # "FEDA", to distinguish this file from other SQLite files.

MAX_ENTRIES = 400_000
"""Maximum number of answers in memory; the least recently used ones are dropped."""

Keep = Callable[[Mapping[bytes, Answer]], Awaitable[None]]
"""Stores the answers of one request by their keys."""

Ask = Callable[[Sequence[bytes], Keep], Awaitable[None]]
"""Sends the inputs with these keys to the model, and calls `Keep` after each request."""


class AnswerCache:
    """Stores the answer to each input, and sends equal inputs to the model only once.

    Two inputs are equal if they have the same model, text and `Query.scope`, and their queries ask
    for the same. An input that is equal to a pending input waits for the same answer. Stored and
    shared answers have ``usage=NOTHING`` and ``cached=1``. Errors and failed inputs are shared, but
    not stored. One instance serves one event loop at a time.

    With a file, each answer is on disk before `rows` returns, so no answer is paid twice, even
    after a crash. Several processes may share a file.

    Attributes:
        hits: Number of inputs that were answered without the model.
        misses: Number of inputs that were sent to the model, failed inputs included.

    Args:
        file: SQLite file for all answers; created if it does not exist. It contains no inputs.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.hits = 0
        self.misses = 0
        self._file = None if file is None else _AnswerFile(file)
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._in_flight: dict[bytes, asyncio.Future[Answer]] = {}

    async def rows(self, keys: Sequence[bytes], fingerprint: str, ask: Ask) -> list[Answer]:
        """Return the answer to each key: from memory, a pending call, the file, or else `ask`.

        Raises:
            BackendBlocked: The file cannot be read or written. Paid answers stay in memory, and are
                written before the next call.
        """
        known: dict[bytes, Answer] = {}
        while missing := [key for key in dict.fromkeys(keys) if key not in known]:
            known |= {key: answer for key in missing if (answer := self._remembered(key))}
            unknown = [key for key in missing if key not in known]
            pending = {key: call for key in unknown if (call := self._in_flight.get(key))}
            if mine := [key for key in unknown if key not in pending]:
                known |= await self._ask_once(mine, fingerprint, ask)
            elif pending:
                # Not `await`: a cancelled caller would then cancel the call for all callers.
                await asyncio.wait(pending.values())
                # A call is cancelled if its query was cancelled, or exceeded its budget. One of the
                # waiting queries then makes a new call, and pays for it.
                done = {key: call for key, call in pending.items() if not call.cancelled()}
                known |= {key: _as_known(call.result()) for key, call in done.items()}
        rows = []
        for key in keys:
            rows.append(known[key])
            known[key] = _as_known(known[key])  # A repeated input is free.
        self.hits += sum(row.cached for row in rows)
        return rows

    async def unknown(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of the keys whose answer is neither in memory nor in the file."""
        new = [key for key in dict.fromkeys(keys) if self._remembered(key) is None]
        filed = await self._load_filed(new)
        return sorted(keys.index(key) for key in new if key not in filed)

    async def aclose(self) -> None:
        """Write pending answers and close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            await file.aclose()

    async def _ask_once(
        self, keys: Sequence[bytes], fingerprint: str, ask: Ask
    ) -> dict[bytes, Answer]:
        loop = asyncio.get_running_loop()
        calls: dict[bytes, asyncio.Future[Answer]] = {key: loop.create_future() for key in keys}
        self._in_flight |= calls

        def answered(rows: Mapping[bytes, Answer]) -> None:
            for key, row in rows.items():
                calls[key].set_result(row)

        async def keep(rows: Mapping[bytes, Answer]) -> None:
            good = {key: row for key, row in rows.items() if None not in row.log_probs + row.texts}
            if self._file is not None:
                await self._file.put(good, fingerprint)
            for key, row in good.items():
                self._remember(key, _as_known(row))
            answered(rows)

        try:
            answered(await self._load_filed(keys))
            if missing := [key for key, call in calls.items() if not call.done()]:
                self.misses += len(missing)
                await ask(missing, keep)
            return {key: call.result() for key, call in calls.items()}
        except BudgetExhausted:
            raise
        except Exception as exc:
            for call in calls.values():
                if not call.done():
                    call.set_exception(exc)
                    call.exception()  # Retrieved, because asyncio logs unretrieved exceptions.
            raise
        finally:
            for key, call in calls.items():
                del self._in_flight[key]
                call.cancel()  # A no-op for a finished call.

    async def _load_filed(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        if self._file is None or not keys:
            return {}
        filed = await self._file.get(keys)
        return {key: self._remember(key, answer) for key, answer in filed.items()}

    def _remembered(self, key: bytes) -> Answer | None:
        if key in self._answers:
            self._answers.move_to_end(key)
        return self._answers.get(key)

    def _remember(self, key: bytes, answer: Answer) -> Answer:
        self._answers[key] = answer
        if len(self._answers) > MAX_ENTRIES:
            self._answers.popitem(last=False)
        return answer


def _as_known(answer: Answer) -> Answer:
    return replace(answer, usage=NOTHING, cached=1, limits=None)


def row_keys(
    fingerprint: str, query: Query, shortened: Sequence[object], *, apart: bool = True
) -> list[bytes]:
    """Return the key of each input of a query, a hash of 16 bytes (`apart`: see `LLMBackend`)."""
    shared = [fingerprint, query.scope, query.want, query.label_words, query.max_tokens, query.stop]
    shared.append(query.schema)
    around = _dump(shared if apart else [*shared, query.inputs])
    references = query.references or (None,) * len(query.inputs)
    rows = zip(query.inputs, references, shortened, strict=True)
    return [
        blake2b(around + _dump([*row, None if apart else place]), digest_size=16).digest()
        for place, row in enumerate(rows)
    ]


class _AnswerFile:
    """Answers by key in a SQLite file. One worker thread does all blocking work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: dict[bytes, tuple[bytes, str, float]] = {}
        self._lock = Lock()
        try:
            self._db = _opened(path)
        except OSError as exc:
            raise SpecError(f"cannot be opened: {exc.strerror}", source=str(path)) from exc
        except sqlite3.Error as exc:
            raise SpecError(f"is not a cache of answers: {exc}", source=str(path)) from exc
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="answers")

    async def get(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        return await self._in_worker(lambda: self._get(keys))

    async def put(self, rows: Mapping[bytes, Answer], fingerprint: str) -> None:
        """Store new answers durably, even if the caller is cancelled; old answers are kept."""
        now = time.time()
        with self._lock:
            for key, answer in rows.items():
                self._unwritten[key] = (dump_answer(answer), fingerprint, now)
        await asyncio.shield(self._in_worker(self._flush))

    async def aclose(self) -> None:
        try:
            await self._in_worker(self._flush)
        finally:
            await self._in_worker(self._db.close)
            self._executor.shutdown(wait=False)

    async def _in_worker(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except sqlite3.Error as exc:
            raise BackendBlocked(
                f"{self._path}: the cache of answers cannot be used: {exc}; "
                "free disk space, or move the file away",
                usage=NOTHING,
            ) from exc

    def _get(self, keys: Sequence[bytes]) -> dict[bytes, Answer]:
        self._flush()
        select = "SELECT answer FROM answers WHERE key = ?"
        rows = {key: self._db.execute(select, (key,)).fetchone() for key in keys}
        try:
            return {key: load_answer(row[0]) for key, row in rows.items() if row is not None}
        except ValueError as exc:
            raise sqlite3.DatabaseError("it holds an answer that cannot be read") from exc

    def _flush(self) -> None:
        with self._lock:
            answers = dict(self._unwritten)
        if not answers:  # An earlier flush has written them.
            return
        with transaction(self._db):
            self._db.executemany(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)",
                [(key, *row) for key, row in answers.items()],
            )
        with self._lock:
            for key in answers:
                del self._unwritten[key]


def _opened(path: Path) -> sqlite3.Connection:
    # After this function, only the worker thread uses the connection.
    with open_database(path, PATIENCE_S) as db:
        db.execute("PRAGMA synchronous=FULL")
        with transaction(db):  # Other processes may create the same file.
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if (application, tables) == (0, 0):
                db.execute(
                    "CREATE TABLE answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL, "
                    "model TEXT NOT NULL, created_at REAL NOT NULL) WITHOUT ROWID"
                )
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            elif application != _APPLICATION_ID:
                raise SpecError("is a SQLite file of another program", source=str(path))
        use_wal(db, PATIENCE_S)
        (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(f"it is damaged ({one_line(state)})")
        return db


def _dump(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Lone surrogates are encoded here; the backend rejects them later.
    return text.encode("utf-8", "surrogatepass")


def dump_answer(answer: Answer) -> bytes:
    """Return the log-probabilities, texts and model of an answer as JSON."""
    return _dump([answer.log_probs, answer.texts, answer.censored, answer.model])


def load_answer(data: bytes) -> Answer:
    """Load the result of `dump_answer`, as a cached answer of one input."""
    try:
        log_probs, texts, censored, model = json.loads(data.decode("utf-8", "surrogatepass"))
        rows = tuple(None if row is None else tuple(map(float, row)) for row in log_probs)
        return Answer(
            log_probs=rows,
            texts=tuple(texts),
            censored=censored,
            model=model,
            usage=NOTHING,
            cached=1,
        )
    except (OverflowError, RecursionError, TypeError) as exc:
        raise ValueError(f"not an answer: {exc!r}") from exc
