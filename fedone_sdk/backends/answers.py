"""Paid answers: in memory, and durable in a SQLite file."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from fedone_sdk.backends.base import Answer, Query
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.budget.ledger import PATIENCE_S
from fedone_sdk.errors import BackendBlocked, BudgetExhausted, SpecError
from fedone_sdk.files import transaction, use_wal

T = TypeVar("T")

_APPLICATION_ID = 0x46454441  # "FEDA", to distinguish this file from other SQLite files.


class AnswerCache:
    """Keeps answers by key, and shares one call between concurrent equal queries.

    A cached or shared answer has ``usage=NOTHING``, ``cached=True`` and no ``limits``. Errors and
    answers with a failed input are not kept, but shared with all callers of that call. One instance
    serves one event loop at a time.

    With a file, answers are durable: each is on disk before `answer` returns, so that an answer is
    never paid twice, also after a crash. Processes may share a file; equal concurrent queries of
    two processes are two calls.

    Attributes:
        misses: Number of calls of the model, failed ones included.

    Args:
        file: SQLite file for all answers; created if it does not exist. It contains no inputs.

    Raises:
        SpecError: The file cannot be opened, is damaged, or is not a cache's.
    """

    def __init__(self, file: Path | None = None, *, max_entries: int = 100_000) -> None:
        self.hits = 0
        self.misses = 0
        self._max_entries = max_entries
        self._file = None if file is None else _AnswerFile(file)
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._in_flight: dict[bytes, asyncio.Future[Answer]] = {}

    async def answer(
        self, key: bytes, fingerprint: str, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Return the answer from memory, a pending equal query, the file or `ask`, in this order.

        Raises:
            BackendBlocked: The file cannot be read or written. A paid answer is written once that
                works again, before any further call.
        """
        while True:
            if (known := self._remembered(key)) is not None:
                self.hits += 1
                return known
            if (call := self._in_flight.get(key)) is None:
                return await self._called(key, fingerprint, ask)
            # Not `await call`: a cancelled caller would cancel the call for all callers.
            await asyncio.wait({call})
            if not call.cancelled():
                known = _as_known(call.result())
                self.hits += 1
                return known
            # The calling query was cancelled (and pays for the call), or had no budget left. One of
            # the waiting queries then calls again, so that usage is reported to exactly one caller,
            # and no query fails because of another's budget.

    async def holds(self, key: bytes) -> bool:
        """Whether memory or the file has the answer."""
        return self._remembered(key) is not None or await self._filed(key) is not None

    async def aclose(self) -> None:
        """Write pending answers and close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            await file.aclose()

    async def _called(
        self, key: bytes, fingerprint: str, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        call = self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._filed(key)
            if answer is None:
                answer = await self._new(key, fingerprint, ask)
            else:
                self.hits += 1
        except BudgetExhausted:
            raise
        except Exception as exc:
            call.set_exception(exc)
            call.exception()  # Marks it as retrieved, for a call without waiters.
            raise
        else:
            call.set_result(answer)
            return answer
        finally:
            del self._in_flight[key]
            call.cancel()  # A no-op for a finished call.

    async def _new(
        self, key: bytes, fingerprint: str, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        self.misses += 1
        answer = await ask()
        if None not in answer.log_probs and None not in answer.texts:
            if self._file is not None:
                await self._file.put(key, fingerprint, answer)
            self._remember(key, _as_known(answer))
        return answer

    async def _filed(self, key: bytes) -> Answer | None:
        if self._file is None or (found := await self._file.get(key)) is None:
            return None
        return self._remember(key, _as_known(found))

    def _remembered(self, key: bytes) -> Answer | None:
        if key in self._answers:
            self._answers.move_to_end(key)
        return self._answers.get(key)

    def _remember(self, key: bytes, answer: Answer) -> Answer:
        self._answers[key] = answer
        if len(self._answers) > self._max_entries:
            self._answers.popitem(last=False)
        return answer


def _as_known(answer: Answer) -> Answer:
    return replace(answer, usage=NOTHING, cached=True, limits=None)


def query_key(fingerprint: str, query: Query, shortened: object | None = None) -> bytes:
    """16-byte key of a query to a model, independent of the payer.

    `shortened` is the truncated form of inputs that are too long; None if no input is.
    """
    named: list[object] = [
        fingerprint,
        query.want,
        query.label_words,
        query.inputs,
        query.references,
        query.max_tokens,
    ]
    if shortened is not None:
        named.append({"shortened": shortened})
    return blake2b(_dump(named), digest_size=16).digest()


class _AnswerFile:
    """Answers by key in a SQLite file (WAL), which several processes may share.

    One worker thread does all blocking work. Answers that arrive during a write are written in one
    transaction, so that they share one `fsync`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: dict[bytes, tuple[str, Answer]] = {}
        self._lock = Lock()
        try:
            self._db = _opened(path)
        except OSError as exc:
            raise SpecError(f"cannot be opened: {exc.strerror}", source=str(path)) from exc
        except sqlite3.Error as exc:
            raise SpecError(f"is no cache of answers: {exc}", source=str(path)) from exc
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="answers")

    async def get(self, key: bytes) -> Answer | None:
        return await self._in_worker(lambda: self._get(key))

    async def put(self, key: bytes, fingerprint: str, answer: Answer) -> None:
        """Store an answer durably. The first answer to a key is kept.

        The answer of a cancelled caller is written too.
        """
        with self._lock:
            self._unwritten[key] = (fingerprint, answer)
        await asyncio.shield(self._in_worker(self._flush, usage=answer.usage))

    async def aclose(self) -> None:
        try:
            await self._in_worker(self._flush)
        finally:
            await self._in_worker(self._db.close)
            self._executor.shutdown(wait=False)

    async def _in_worker(self, call: Callable[[], T], usage: Usage = NOTHING) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except sqlite3.Error as exc:
            raise BackendBlocked(
                f"{self._path}: the cache of answers cannot be used: {exc}; "
                "free the disk, or move the file away",
                usage=usage,
            ) from exc

    def _get(self, key: bytes) -> Answer | None:
        self._flush()
        found = self._db.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        try:
            return load_answer(found[0])
        except ValueError as exc:
            raise sqlite3.DatabaseError("it holds an answer that cannot be read") from exc

    def _flush(self) -> None:
        with self._lock:
            answers = dict(self._unwritten)
        if not answers:  # An earlier flush has written them.
            return
        now = time.time()
        rows = [
            (key, dump_answer(answer), fingerprint, now)
            for key, (fingerprint, answer) in answers.items()
        ]
        with transaction(self._db):
            self._db.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", rows)
        with self._lock:
            for key in answers:
                del self._unwritten[key]


def _opened(path: Path) -> sqlite3.Connection:
    # SQLite would create it readable for all users; the answers may be generated text.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    # Created here, then used only by the worker.
    db = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.execute("PRAGMA synchronous=FULL")
    db.execute("BEGIN IMMEDIATE")  # Other processes may create the same file.
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if (application, tables) == (0, 0):
        db.execute(
            "CREATE TABLE answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL, "
            "model TEXT NOT NULL, created_at REAL NOT NULL) WITHOUT ROWID"
        )
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    elif application != _APPLICATION_ID:
        raise SpecError("is a SQLite file of something else", source=str(path))
    db.execute("COMMIT")
    use_wal(db, PATIENCE_S)
    (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        raise sqlite3.DatabaseError(f"it is damaged ({' '.join(state.split())})")


def _dump(value: object) -> bytes:
    """One line of JSON. Floats have the shortest form that parses to the same value."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # "surrogatepass": the model rejects lone surrogates.
    return text.encode("utf-8", "surrogatepass")


def dump_answer(answer: Answer) -> bytes:
    """Return an answer as JSON, without the rate limits, which are short-lived."""
    return _dump(
        {
            "log_probs": answer.log_probs,
            "texts": answer.texts,
            "censored": answer.censored,
            "cached": answer.cached,
            "model": answer.model,
            "usage": answer.usage.exact(),
        }
    )


def load_answer(data: bytes) -> Answer:
    """Load the result of `dump_answer`."""
    try:
        found: dict[str, Any] = json.loads(data.decode("utf-8", "surrogatepass"))
        return Answer(
            log_probs=tuple(
                None if row is None else tuple(float(value) for value in row)
                for row in found["log_probs"]
            ),
            texts=tuple(found["texts"]),
            censored=found["censored"],
            cached=found["cached"],
            model=found["model"],
            usage=Usage.model_validate(found["usage"]),
        )
    except (AttributeError, KeyError, OverflowError, TypeError) as exc:
        raise ValueError(f"no answer: {exc!r}") from exc
