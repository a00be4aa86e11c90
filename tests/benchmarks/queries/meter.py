"""The billed usage of a run, per query or per example."""

from __future__ import annotations

from typing import NamedTuple

from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.wrapper import Wrapper

__all__ = ["Bill", "Meter"]


class Bill(NamedTuple):
    """Usage of a provider whose answers are cached; repeated inputs cost nothing.

    Attributes:
        requests: Distinct queries, for providers with one request per query.
        example_requests: Distinct (prompt, example) pairs, for one request per example.
        tokens: Prompt tokens of ``requests``.
    """

    requests: int = 0
    example_requests: int = 0
    tokens: int = 0


class Meter(Wrapper):
    """Counts the queries to a model with a cache.

    Attributes:
        bill: The usage so far.

    Args:
        inner: The model with its cache; its owner closes it.
    """

    def __init__(self, inner: LLMBackend) -> None:
        super().__init__(inner)
        self.bill = Bill()
        self._known: set[int] = set()

    async def score(self, query: Query) -> Answer:
        """Return the inner backend's answer."""
        asked = (query.label_words, query.want)
        requests = self._new(hash((query.inputs, *asked)))
        example_requests = sum(self._new(hash((one, *asked))) for one in query.inputs)
        answer = await self.inner.score(query)
        self.bill = Bill(
            self.bill.requests + requests,
            self.bill.example_requests + example_requests,
            self.bill.tokens + answer.usage.prompt_tokens,
        )
        return answer

    def _new(self, asked: int) -> bool:
        """Whether an input is new, by a 64-bit digest."""
        if asked in self._known:
            return False
        self._known.add(asked)
        return True
