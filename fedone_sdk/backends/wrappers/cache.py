"""Cache of answers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

from fedone_sdk.backends._codec import query_key
from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers._answer_file import AnswerFile
from fedone_sdk.backends.wrappers.wrapper import Wrapper
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BudgetExhausted


class CachedBackend(Wrapper):
    """Caches answers, and shares one call between concurrent equal queries.

    Queries are equal if their contents and the truncated forms of inputs that are too long
    (`LLMBackend.shortened`) are equal; the payer does not matter. A cached or shared answer has
    ``usage=NOTHING``, ``cached=True`` and no ``limits``. Errors and answers with a failed input are
    not cached, but shared with all callers of that call. One instance serves one event loop at a
    time.

    With a file, answers are durable: each is on disk before `score` returns, so that an answer is
    never paid twice, also after a crash. Processes may share a file; equal concurrent queries of
    two processes are two calls.

    Attributes:
        hits: Number of answers from the cache.
        misses: Number of calls of the inner backend, failed ones included.

    Args:
        inner: The inner backend.
        max_entries: Maximum answers in memory; the least recently used one is evicted.
        file: SQLite file for all answers; created if it does not exist. It contains no inputs.

    Raises:
        SpecError: The file cannot be opened, is damaged, or is not a cache's.
    """

    def __init__(
        self, inner: LLMBackend, *, max_entries: int = 100_000, file: Path | None = None
    ) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, not {max_entries}")
        super().__init__(inner)
        self.hits = 0
        self.misses = 0
        self._max_entries = max_entries
        self._file = None if file is None else AnswerFile(file)
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._in_flight: dict[bytes, asyncio.Future[Answer]] = {}

    async def score(self, query: Query) -> Answer:
        """Answers from memory, a pending equal query, the file or the inner backend, in this order.

        Raises:
            BackendBlocked: The file cannot be read or written. A paid answer is written once that
                works again, before any further call.
        """
        key = await self._key(query)
        while True:
            if (known := self._remembered(key)) is not None:
                self.hits += 1
                return known
            if (call := self._in_flight.get(key)) is None:
                return await self._answer(key, query)
            # Not `await call`: a cancelled caller would cancel the call for all callers.
            await asyncio.wait({call})
            if not call.cancelled():
                known = _as_known(call.result())
                self.hits += 1
                return known
            # The calling query was cancelled (and pays for the call), or had no budget left. One of
            # the waiting queries then calls again, so that usage is reported to exactly one caller,
            # and no query fails because of another's budget.

    async def quote(self, query: Query) -> Usage:
        """One query at no other cost if the answer is cached; else the inner backend's quote.

        A resumed run near its cap can thus replay paid answers.
        """
        key = await self._key(query)
        if self._remembered(key) is not None or await self._filed(key) is not None:
            return Usage(queries=1)
        return await self.inner.quote(query)

    async def aclose(self) -> None:
        """Close the file and the inner backend."""
        try:
            if self._file is not None:
                file, self._file = self._file, None
                await file.aclose()
        finally:
            await self.inner.aclose()

    async def _key(self, query: Query) -> bytes:
        return query_key(self.fingerprint, query, await self.inner.shortened(query))

    async def _answer(self, key: bytes, query: Query) -> Answer:
        call = self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._filed(key)
            if answer is None:
                answer = await self._ask(key, query)
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

    async def _ask(self, key: bytes, query: Query) -> Answer:
        self.misses += 1
        answer = await self.inner.score(query)
        if None not in answer.log_probs and None not in answer.texts:
            if self._file is not None:
                await self._file.put(key, self.fingerprint, answer)
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
