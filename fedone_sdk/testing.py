"""Test doubles for programs that use the SDK, without a model and without waiting."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Self

from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.backends import LOG_ZERO, Answer, LLMBackend, Query, Want
from fedone_sdk.backends.base import EVERY_UNIT
from fedone_sdk.budget import Usage
from fedone_sdk.client import EdgeClient, Hooks
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore, Store
from fedone_sdk.task import Example, Rendered, ScoreFunction
from fedone_sdk.vocabulary import Vocabulary

__all__ = ["LoopbackFederation", "ManualClock", "ScriptedBackend"]


class ManualClock:
    """A clock that advances only on request."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds


def pseudo_log_probs(inputs: Rendered, label_words: Sequence[str]) -> tuple[float, ...]:
    """Return label log-probabilities from a hash of the text."""
    weights = [_weight(inputs, word) for word in label_words]
    return tuple(math.log(weight / (2 * sum(weights))) for weight in weights)


def pseudo_reference_log_prob(inputs: Rendered, reference: str) -> float:
    """Return a log-probability from a hash of the texts, from -64 to 0 nats, exact in float32."""
    return -((_weight(inputs, reference) - 1) >> 16) / 1024


def pseudo_text(inputs: Rendered, max_tokens: int) -> str:
    """Return the first digits of a hash of the text."""
    digits = f"{_weight(inputs, 'text'):08x}"
    return " ".join(digits[:max_tokens])


def _weight(inputs: Rendered, word: str) -> int:
    text = "".join(part.text for part in inputs)
    return 1 + int.from_bytes(hashlib.sha256(f"{text}|{word}".encode()).digest()[:4], "big")


class ScriptedBackend(LLMBackend):
    """A backend whose answers come from functions. They return None for an input that fails.

    The attribute `asked` lists all queries so far.

    Args:
        answer: Returns label log-probabilities for an input and label words. A query for ``choice``
            is answered with the likeliest label.
        reference: Returns the log-probability of a reference text after an input.
        write: Returns the text that follows an input, with at most the given number of tokens.
        answers: The kinds of query that the backend supports.
        fingerprint: Fingerprint of the backend's model.
        gate: Called with each query, to delay its answer or to raise; a coroutine is awaited.
    """

    bounds = EVERY_UNIT

    def __init__(
        self,
        answer: Callable[[Rendered, Sequence[str]], tuple[float, ...] | None] = pseudo_log_probs,
        *,
        reference: Callable[[Rendered, str], float | None] = pseudo_reference_log_prob,
        write: Callable[[Rendered, int], str | None] = pseudo_text,
        answers: Iterable[Want] = ("labels", "choice", "reference", "text"),
        fingerprint: str = "scripted",
        gate: Callable[[Query], object] | None = None,
    ) -> None:
        self._answer, self._reference, self._write = answer, reference, write
        self.answers = frozenset(answers)
        self._fingerprint = fingerprint
        self._gate = gate
        self.asked: list[Query] = []

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint."""
        return self._fingerprint

    async def score(self, query: Query) -> Answer:
        """Answer from the functions; usage is one request, and one token per input."""
        if query.want not in self.answers:
            raise ValueError(f"query kind {query.want!r} is not one of {sorted(self.answers)}")
        self.asked.append(query)
        if self._gate is not None:
            waiting = self._gate(query)
            if asyncio.iscoroutine(waiting):
                await waiting
        usage = Usage(requests=1, prompt_tokens=len(query.inputs))
        if query.want == "text":
            texts = tuple(self._write(rendered, query.max_tokens) for rendered in query.inputs)
            rows = tuple(None if text is None else () for text in texts)
            return Answer(log_probs=rows, usage=usage, texts=texts)
        return Answer(log_probs=tuple(self._rows(query)), usage=usage)

    def _rows(self, query: Query) -> Iterator[tuple[float, ...] | None]:
        if query.want == "reference":
            for rendered, text in zip(query.inputs, query.references, strict=True):
                value = self._reference(rendered, text)
                yield None if value is None else (value,)
            return
        for rendered in query.inputs:
            row = self._answer(rendered, query.label_words)
            if row is not None and query.want == "choice":
                choice = row.index(max(row))
                row = tuple(0.0 if label == choice else LOG_ZERO for label in range(len(row)))
            yield row

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """Return a usage of one request, and one token per input."""
        return Usage(queries=1, requests=1, prompt_tokens=batch_size)


class LoopbackFederation:
    """A real aggregator on loopback HTTP, and a factory of edge clients.

    Example:
        ```python
        async with LoopbackFederation(spec, vocabulary, backend=ScriptedBackend()) as federation:
            async with federation.client(examples) as client:
                await client.run_forever()
            print(federation.run.result())
        ```
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
            backend=backend,
            store=store or MemoryStore(),
            enrolment_tokens=[self.token],
            admin_token="admin",
        )
        self.url = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.aggregator)
        self.run: ServedRun = await self.aggregator.service.add_run(self._spec, self._vocabulary)
        self.url = await self.aggregator.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def client(
        self,
        data: Sequence[Example],
        *,
        backend: LLMBackend | None = None,
        score: ScoreFunction | None = None,
    ) -> EdgeClient:
        """Create an edge client of this federation, for use with ``async with``."""
        return EdgeClient(
            self.url,
            token=self.token,
            data=data,
            label=self._spec.task.label_field,
            fields=(*self._spec.task.fields, self._spec.task.label_field),
            backend=backend,
            hooks=Hooks(score=score),
        )
