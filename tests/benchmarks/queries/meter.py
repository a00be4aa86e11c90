"""What a run is billed, by either custom of providers."""

from __future__ import annotations

from typing import NamedTuple

from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.wrapper import Wrapper

__all__ = ["Bill", "Meter"]


class Bill(NamedTuple):
    """What was asked of a provider; what it was asked before is remembered, and costs nothing.

    Attributes:
        requests: Where a query is one request: queries that differ.
        example_requests: Where every example is one: prompts on examples that differ.
        tokens: Prompt tokens of ``requests``.
    """

    requests: int = 0
    example_requests: int = 0
    tokens: int = 0


class Meter(Wrapper):
    """Counts what passes on its way to a model whose answers are remembered.

    Attributes:
        bill: Up to now.

    Args:
        inner: The model, with a memory of its answers; closed by its owner.
    """

    def __init__(self, inner: LLMBackend) -> None:
        super().__init__(inner)
        self.bill = Bill()
        self._known: set[int] = set()

    async def score(self, query: Query) -> Answer:
        """The inner backend's answer."""
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
        """Whether something was not asked before; 64 bits tell a run's questions apart."""
        if asked in self._known:
            return False
        self._known.add(asked)
        return True
