"""Doubles for tests of programs that use the SDK: real protocols, no model, no waiting."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.budget import Usage
from fedone_sdk.client import EdgeClient
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import Store
from fedone_sdk.task import Example, Rendered
from fedone_sdk.vocabulary import Vocabulary

__all__ = ["LoopbackFederation", "ManualClock", "ScriptedBackend"]


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        self._now += seconds


def pseudo_log_probs(inputs: Rendered, label_words: Sequence[str]) -> tuple[float, ...]:
    """Label log-probabilities that depend on nothing but the text."""
    text = "".join(part.text for part in inputs)
    weights = [
        1 + int.from_bytes(hashlib.sha256(f"{text}|{word}".encode()).digest()[:4], "big")
        for word in label_words
    ]
    return tuple(math.log(weight / (2 * sum(weights))) for weight in weights)


class ScriptedBackend(LLMBackend):
    """A backend that answers from a function and counts what it is really asked.

    Args:
        answer: Label log-probabilities of an input, or None for a failed one; a hash of the text
            by default.
        fingerprint: What it calls its model.
        gate: Awaited before each answer, to hold answers back or to raise.

    Attributes:
        asked: Queries that reached it.
    """

    bounds = frozenset(
        {"queries", "requests", "tokens", "prompt_tokens", "completion_tokens", "usd"}
    )

    def __init__(
        self,
        answer: Callable[[Rendered, Sequence[str]], tuple[float, ...] | None] = pseudo_log_probs,
        *,
        fingerprint: str = "scripted",
        gate: Callable[[Query], object] | None = None,
    ) -> None:
        self._answer = answer
        self._fingerprint = fingerprint
        self._gate = gate
        self.asked: list[Query] = []

    @property
    def fingerprint(self) -> str:
        """The name given."""
        return self._fingerprint

    async def score(self, query: Query) -> Answer:
        """Answers from the function; one request, one token per input."""
        self.asked.append(query)
        if self._gate is not None:
            held = self._gate(query)
            if asyncio.iscoroutine(held):
                await held
        rows = tuple(self._answer(rendered, query.label_words) for rendered in query.inputs)
        return Answer(log_probs=rows, usage=Usage(requests=1, prompt_tokens=len(query.inputs)))

    def worst_case(self, batch_size: int) -> Usage:
        """One request, one token per input."""
        return Usage(queries=1, requests=1, prompt_tokens=batch_size)


class LoopbackFederation:
    """A real aggregator on loopback HTTP, and edge clients to go with it.

    Example:
        ```python
        async with LoopbackFederation(spec, vocabulary, backend=ScriptedBackend()) as federation:
            async with federation.client(examples) as client:
                await client.run_forever()
            print(federation.run.result())
        ```

    Args:
        spec: The run.
        vocabulary: Its candidates.
        backend: The gateway's model; None when clients bring their own.
        store: Where the aggregator keeps the run.
    """

    token = "loopback-enrolment-token"

    def __init__(
        self,
        spec: RunSpec,
        vocabulary: Vocabulary,
        *,
        backend: LLMBackend | None = None,
        store: Store | None = None,
    ) -> None:
        self._spec, self._vocabulary = spec, vocabulary
        self.aggregator = Aggregator(
            backend=backend, store=store, enrolment_tokens=[self.token], admin_token="admin"
        )
        self.url = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.aggregator)
        self.run: ServedRun = await self.aggregator.add_run(self._spec, self._vocabulary)
        self.url = await self.aggregator.listen()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def client(self, data: Sequence[Example], *, backend: LLMBackend | None = None) -> EdgeClient:
        """An edge client of this federation, to be used with ``async with``."""
        return EdgeClient(self.url, token=self.token, data=data, backend=backend)
