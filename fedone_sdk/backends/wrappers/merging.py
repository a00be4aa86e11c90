"""Queries of many callers as one forward pass of a local model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.wrapper import Wrapper
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError

__all__ = ["MergingBackend"]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A query that waits, and where its answer goes."""

    query: Query
    answer: asyncio.Future[Answer]

    def fits(self, other: Query) -> bool:
        """Whether one pass can answer both."""
        mine = replace(self.query, inputs=(), references=(), payer=None)
        return mine == replace(other, inputs=(), references=(), payer=None)


class MergingBackend(Wrapper):
    """Answers queries that wait at the same time by one query to the model inside.

    For local models, where one pass over many inputs is faster than many passes over few: on a
    GPU, say. What a query's scores are then hangs on its companions, in the last bits of float32
    and in more of a quantised model, so that two runs are not the same any more. The fingerprint
    says so, and keeps a cache from mixing both. Texts are not written together.

    Each query counts as the request that it would be alone, and an equal share of the tokens for
    each of its inputs.

    Args:
        inner: The backend inside.
        most_inputs: The most inputs that are asked together.
        at_once: Merged queries under way at once; meanwhile the next ones gather.

    Raises:
        ValueError: A number is below 1, or `inner` charges each request to its payer.
    """

    def __init__(self, inner: LLMBackend, *, most_inputs: int = 256, at_once: int = 1) -> None:
        if most_inputs < 1 or at_once < 1:
            raise ValueError("most_inputs and at_once must be at least 1")
        if inner.metered:
            raise ValueError("a request of several queries has no one payer; merge local models")
        super().__init__(inner)
        self._most_inputs = most_inputs
        self._at_once = at_once
        self._waiting: list[_Call] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def fingerprint(self) -> str:
        """The inner backend's, marked."""
        return f"{self.inner.fingerprint}:merged"

    async def score(self, query: Query) -> Answer:
        """Answers one query, perhaps together with others.

        Raises:
            BackendError: As the backend inside, for this query alone.
        """
        if query.want == "text" or len(query.inputs) >= self._most_inputs:
            return await self.inner.score(query)
        call = _Call(query, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if len(self._tasks) < self._at_once:
            task = asyncio.create_task(self._ask(), name="merged queries")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await call.answer

    async def quote(self, query: Query) -> Usage:
        """The most that the query may cost: how its share comes out hangs on the others."""
        return self.worst_case(len(query.inputs), query.max_tokens)

    async def aclose(self) -> None:
        """Ends what is under way, and closes the backend inside."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for call in self._waiting:
            call.answer.cancel()
        await super().aclose()

    async def _ask(self) -> None:
        await asyncio.sleep(0)  # Those of the same moment come along.
        while calls := self._next():
            try:
                await self._answer(calls)
            finally:
                for call in calls:
                    call.answer.cancel()  # Nothing, where it has its answer.

    def _next(self) -> list[_Call]:
        """Takes the call that waits longest, and those that fit it."""
        self._waiting = [call for call in self._waiting if not call.answer.done()]
        taken: list[_Call] = []
        size = 0
        most = min(self._most_inputs, self.inner.max_inputs or self._most_inputs)
        for call in self._waiting:
            larger = size + len(call.query.inputs)
            if not taken or (larger <= most and call.fits(taken[0].query)):
                taken.append(call)
                size = larger
        self._waiting = [call for call in self._waiting if call not in taken]
        return taken

    async def _answer(self, calls: Sequence[_Call]) -> None:
        if len(calls) > 1:
            try:
                answers = await self._together([call.query for call in calls])
            except BackendError:
                pass  # One of them may be to blame for it: each is asked alone.
            else:
                for call, answer in zip(calls, answers, strict=True):
                    if not call.answer.done():
                        call.answer.set_result(answer)
                return
        for call in calls:
            if call.answer.done():
                continue
            try:
                answer = await self.inner.score(call.query)
            except Exception as exc:
                if not call.answer.done():
                    call.answer.set_exception(exc)
            else:
                if not call.answer.done():
                    call.answer.set_result(answer)

    async def _together(self, queries: Sequence[Query]) -> list[Answer]:
        whole = replace(
            queries[0],
            inputs=tuple(chain.from_iterable(query.inputs for query in queries)),
            references=tuple(chain.from_iterable(query.references for query in queries)),
            payer=None,
        )
        found = await self.inner.score(whole)
        answers, start, censored = [], 0, found.censored
        for query in queries:
            end = start + len(query.inputs)
            usage = _share(found.usage, start, end, len(whole.inputs))
            rows = found.log_probs[start:end]
            answers.append(replace(found, log_probs=rows, usage=usage, censored=censored))
            censored = 0
            start = end
        return answers


def _share(usage: Usage, start: int, end: int, whole: int) -> Usage:
    """What the inputs from `start` to `end` cost; all shares together are the usage."""

    def part(total: int) -> int:
        return total * end // whole - total * start // whole

    return Usage(
        requests=usage.requests,
        prompt_tokens=part(usage.prompt_tokens),
        completion_tokens=part(usage.completion_tokens),
    )
