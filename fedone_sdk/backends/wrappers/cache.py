"""A memory of answers: the same query is asked once."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.budget import NOTHING, Usage

__all__ = ["CachedBackend"]


class CachedBackend(LLMBackend):
    """Remembers answers, and lets concurrent equal queries share one call.

    A remembered or shared answer has ``usage=NOTHING`` and ``cached=True``, and is otherwise the
    model's. Errors and answers with a failed input are not remembered; who waited for the call
    gets them too. One instance serves one event loop at a time.

    Attributes:
        hits: Answers given without asking the model.
        misses: Calls made to the model, failed ones included.

    Args:
        inner: The backend to ask.
        max_entries: How many answers to keep; the least recently used one goes first.
    """

    def __init__(self, inner: LLMBackend, *, max_entries: int = 100_000) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, not {max_entries}")
        self.hits = 0
        self.misses = 0
        self.bounds = inner.bounds
        self._inner = inner
        self._max_entries = max_entries
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._in_flight: dict[bytes, asyncio.Future[Answer]] = {}

    @property
    def fingerprint(self) -> str:
        """The inner backend's."""
        return self._inner.fingerprint

    async def score(self, query: Query) -> Answer:
        """Answers from memory, else joins an equal query under way, else asks."""
        key = _key(self.fingerprint, query)
        while True:
            if (known := self._answers.get(key)) is not None:
                self._answers.move_to_end(key)
                self.hits += 1
                return known
            if (call := self._in_flight.get(key)) is None:
                return await self._ask(key, query)
            # Not `await call`: that would cancel the call for everyone when this caller is.
            await asyncio.wait({call})
            if not call.cancelled():
                known = _as_known(call.result())
                self.hits += 1
                return known
            # Who asked was cancelled, and pays for that call itself: one of those who waited asks
            # anew, so that whatever was spent is always reported to exactly one caller.

    async def _ask(self, key: bytes, query: Query) -> Answer:
        self.misses += 1
        call = self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._inner.score(query)
        except Exception as exc:
            call.set_exception(exc)
            call.exception()  # Perhaps nobody waits; asyncio must not complain about that.
            raise
        else:
            call.set_result(answer)
            if None not in answer.log_probs:
                self._answers[key] = _as_known(answer)
                if len(self._answers) > self._max_entries:
                    self._answers.popitem(last=False)
            return answer
        finally:
            del self._in_flight[key]
            call.cancel()  # Does nothing to a call that has ended.

    async def check(self, label_words: tuple[str, ...]) -> None:
        """Checks the label words with the inner backend."""
        await self._inner.check(label_words)

    def worst_case(self, batch_size: int) -> Usage:
        """The inner backend's: nothing may be in memory."""
        return self._inner.worst_case(batch_size)

    async def aclose(self) -> None:
        """Closes the inner backend."""
        await self._inner.aclose()


def _as_known(answer: Answer) -> Answer:
    return replace(answer, usage=NOTHING, cached=True)


def _key(fingerprint: str, query: Query) -> bytes:
    text = json.dumps(
        [fingerprint, query.label_words, query.inputs], ensure_ascii=False, separators=(",", ":")
    )
    # "surrogatepass": a lone surrogate is the inner backend's to refuse.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
