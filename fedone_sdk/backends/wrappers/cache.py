"""A memory of answers: the same query is asked once."""

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

__all__ = ["CachedBackend"]


class CachedBackend(Wrapper):
    """Remembers answers, and lets concurrent equal queries share one call.

    Queries are equal when all that is asked is the same, and what the model sees of it where an
    input is too long (`LLMBackend.shortened`); who pays does not matter. A remembered or
    shared answer has ``usage=NOTHING``, ``cached=True`` and no ``limits``, and is otherwise the
    model's. Errors and answers with a failed input are not remembered; who waited for the call
    gets them too. One instance serves one event loop at a time.

    With a file, answers outlive the process: each is on the disk before `score` returns it, so
    what was paid and reported is never paid again, also after a crash. Processes may share a
    file; equal queries under way in two of them are two calls.

    Attributes:
        hits: Answers given without asking the model.
        misses: Calls made to the model, failed ones included.

    Args:
        inner: The backend to ask.
        max_entries: How many answers to keep in memory; the least recently used one goes first.
        file: SQLite file that keeps all answers; made where there is none. It holds no inputs.

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
        """Answers from memory, else joins an equal query under way, else from file, else asks.

        Raises:
            BackendBlocked: The file can no longer be read or written. An answer that was paid is
                written as soon as that works again, before anything else is asked.
        """
        key = await self._key(query)
        while True:
            if (known := self._remembered(key)) is not None:
                self.hits += 1
                return known
            if (call := self._in_flight.get(key)) is None:
                return await self._answer(key, query)
            # Not `await call`: that would cancel the call for everyone when this caller is.
            await asyncio.wait({call})
            if not call.cancelled():
                known = _as_known(call.result())
                self.hits += 1
                return known
            # Who asked was cancelled, and pays for that call itself, or had no budget left: one of
            # those who waited asks anew, so that whatever was spent is always reported to exactly
            # one caller, and nobody is refused by another's budget.

    async def quote(self, query: Query) -> Usage:
        """One query and nothing else where the answer is known; else the inner backend's.

        So a resumed run that is near its cap can replay what it paid for.
        """
        key = await self._key(query)
        if self._remembered(key) is not None or await self._filed(key) is not None:
            return Usage(queries=1)
        return await self.inner.quote(query)

    async def aclose(self) -> None:
        """Closes the file and the inner backend."""
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
            call.exception()  # Perhaps nobody waits; asyncio must not complain about that.
            raise
        else:
            call.set_result(answer)
            return answer
        finally:
            del self._in_flight[key]
            call.cancel()  # Does nothing to a call that has ended.

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
