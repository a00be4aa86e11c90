"""A backend that repeats what it has answered, and asks nothing for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers import Wrapper
from fedone_sdk.budget import NOTHING

__all__ = ["HeardBackend"]


class HeardBackend(Wrapper):
    """Keeps all answers that pass, also those with inputs that failed.

    Args:
        inner: The backend; its owner closes it.
    """

    def __init__(self, inner: LLMBackend) -> None:
        super().__init__(inner)
        self._answers: dict[Query, Answer] = {}

    async def score(self, query: Query) -> Answer:
        """The inner backend's answer."""
        answer = await self.inner.score(query)
        self._answers[replace(query, payer=None)] = replace(answer, usage=NOTHING)
        return answer

    def repeated(self, queries: Sequence[Query]) -> list[Answer] | None:
        """The answers to queries that were all asked before; None where one was not."""
        found = [self._answers.get(query) for query in queries]
        known = [answer for answer in found if answer is not None]
        return known if len(known) == len(queries) else None
