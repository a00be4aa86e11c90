"""A backend that records answers and can replay them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers import Wrapper
from fedone_sdk.budget import NOTHING


class AnswerRecorder(Wrapper):
    """Records all answers, including those with failed inputs.

    Args:
        inner: The backend; its owner closes it.
    """

    def __init__(self, inner: LLMBackend) -> None:
        super().__init__(inner)
        self._answers: dict[Query, Answer] = {}

    async def score(self, query: Query) -> Answer:
        """Return the inner backend's answer, and record it."""
        answer = await self.inner.score(query)
        self._answers[replace(query, payer=None)] = replace(answer, usage=NOTHING)
        return answer

    def repeated(self, queries: Sequence[Query]) -> list[Answer] | None:
        """Return the recorded answers to queries; None if one was not asked before."""
        found = [self._answers.get(query) for query in queries]
        known = [answer for answer in found if answer is not None]
        return known if len(known) == len(queries) else None
