"""A short timed probe: the first rounds of a run on its own local model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedone_sdk.aggregator import ServedRun
from fedone_sdk.aggregator.events import Effect, RoundFinished
from fedone_sdk.aggregator.run import CaughtUp
from fedone_sdk.backends import (
    Answer,
    LLMBackend,
    Query,
    prediction_queries,
    query_for,
    score_all,
)
from fedone_sdk.backends.wrappers import CachedBackend, Wrapper
from fedone_sdk.errors import BackendError, FedOneError
from fedone_sdk.simulation.federation import Federation, simulate
from fedone_sdk.task import references_of

__all__ = ["Burst", "Probe", "probe_run"]

_TRAINING_S = 3.0
"""Seconds of work of the model that are measured in training."""

_EVALUATION_S = 1.5
"""The same in evaluation."""

_PATIENCE_S = 60.0
"""Seconds without any query after which a run is taken for one that waits for clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Queries that were under way together, without a pause of the model between them.

    Attributes:
        queries: Answered queries.
        tokens: Tokens of these.
        seconds: From the first question to the last answer.
    """

    queries: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a probe measured.

    Attributes:
        startup_s: Seconds until the first query: the model is loaded, the clients enrol.
        training: Bursts of training.
        evaluation: Bursts of evaluation; none where the model is too slow or nothing is measured.
        round_s: Seconds of a round without a query under way: selection, messages, the method.
        failure: Why the model did not answer; None where it did.
    """

    startup_s: float
    training: tuple[Burst, ...]
    evaluation: tuple[Burst, ...]
    round_s: float
    failure: str | None = None

    @property
    def queries(self) -> int:
        """Queries that were timed."""
        return sum(burst.queries for burst in (*self.training, *self.evaluation))

    @property
    def seconds(self) -> float:
        """Seconds of measurement."""
        return sum(burst.seconds for burst in (*self.training, *self.evaluation))

    def training_s(self, *, queries: int, tokens: int, rounds: int) -> float:
        """Seconds of all training.

        Args:
            queries: Queries that reach the model.
            tokens: Their tokens.
            rounds: Rounds.
        """
        return self._busy_s(self.training, queries, tokens) + self.round_s * rounds

    def evaluation_s(self, *, queries: int, tokens: int) -> float:
        """Seconds of all evaluation.

        Args:
            queries: Queries that reach the model.
            tokens: Their tokens.
        """
        return self._busy_s(self.evaluation or self.training, queries, tokens)

    def _busy_s(self, bursts: Sequence[Burst], queries: int, tokens: int) -> float:
        seconds = sum(burst.seconds for burst in bursts)
        if self._by_tokens:
            return seconds / sum(burst.tokens for burst in bursts) * tokens
        return seconds / max(sum(burst.queries for burst in bursts), 1) * queries

    @property
    def _by_tokens(self) -> bool:
        """Whether time goes by tokens rather than by queries: which of the two fits better."""
        bursts = [*self.training, *self.evaluation]
        if any(not burst.tokens for burst in bursts):
            return False
        seconds = [burst.seconds for burst in bursts]
        by_tokens = _misfit([burst.tokens for burst in bursts], seconds)
        return by_tokens <= _misfit([burst.queries for burst in bursts], seconds)


async def probe_run(
    federation: Federation, backend: LLMBackend, *, transport: Literal["http", "memory"] = "http"
) -> Probe:
    """Times the first rounds of a run, and the beginning of its evaluation.

    The rounds are those of the run itself: the same clients, mini-batches and prompts, in a
    federation of their own. Nothing of it is stored. Each of the two measurements ends at the
    first answer after its few seconds, so that a slow model is timed by a single query.

    Args:
        federation: The run and its data.
        backend: A local model without wrappers; stays open.
        transport: How messages travel in the run.

    Raises:
        BackendError: The model cannot be used as described.
        LabelWordError: A label word is not one token of the model.
    """
    loop = asyncio.get_running_loop()
    spec, examples = federation.spec, federation.shards[0][:1]
    began = loop.time()
    await backend.check(spec.task.label_words)
    # Without a prompt, and short: what the first pass does once is not measured.
    warm_up = query_for(
        spec.task, "", examples, backend=backend, references=references_of(spec.task, examples)
    )
    await backend.score(warm_up)
    loaded = loop.time()

    training = _Meter(backend, enough_s=_TRAINING_S)
    # A cap leaves its first rounds as they are. More clients than there are do not come.
    here = spec.participation.model_copy(update={"min_clients": None})
    unpaid = replace(
        federation, spec=spec.model_copy(update={"budget": None, "participation": here}), dev=()
    )
    await training.measure(
        simulate(
            unpaid,
            backend=CachedBackend(training),
            transport=transport,
            watch=training.watch,
        )
    )
    evaluation = _Meter(backend, enough_s=_EVALUATION_S)
    slowest = max((burst.seconds / burst.queries for burst in training.bursts), default=0.0)
    if training.failure is None and slowest <= _EVALUATION_S:
        # What the end of training left under way would slow it down.
        await backend.score(warm_up)
        queries = prediction_queries(backend, spec.task, "", federation.dev, spec.method.batch_size)
        await evaluation.measure(score_all(evaluation, queries))
    return Probe(
        startup_s=loaded - began + max(training.first - loaded, 0.0),
        training=tuple(training.bursts),
        evaluation=tuple(evaluation.bursts),
        round_s=training.round_s,
        failure=training.failure
        or evaluation.failure
        or (None if training.bursts else "no query was asked"),
    )


class _Meter(Wrapper):
    """Times what passes, until it is enough.

    Attributes:
        bursts: What was measured.
        first: When the first query came, seconds of the event loop's clock.
        failure: Why the model did not answer.

    Args:
        inner: The backend that is timed.
        enough_s: Seconds of measurement.
    """

    def __init__(self, inner: LLMBackend, *, enough_s: float) -> None:
        super().__init__(inner)
        self.bursts: list[Burst] = []
        self.first = 0.0
        self.failure: str | None = None
        self._enough_s = enough_s
        self._enough = asyncio.Event()
        self._under_way = 0
        self._begin = self._last = 0.0
        self._queries = self._tokens = 0
        self._rounds = 0
        self._idle_s = 0.0

    async def score(self, query: Query) -> Answer:
        """The inner backend's answer, timed."""
        loop = asyncio.get_running_loop()
        if not self._under_way:
            self._begin = loop.time()
            self.first = self.first or self._begin
        self._under_way += 1
        try:
            answer = await self.inner.score(query)
            if not self._enough.is_set():
                self._last = loop.time()
                self._queries += 1
                self._tokens += answer.usage.prompt_tokens + answer.usage.completion_tokens
                if self._busy_s + self._last - self._begin >= self._enough_s:
                    self._enough.set()
            return answer
        except BackendError as exc:
            self.failure = str(exc)
            self._enough.set()
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._close()

    async def measure(self, work: Awaitable[object]) -> None:
        """Awaits what asks this backend, and cancels it once that is enough."""
        enough = asyncio.create_task(self._enough.wait())
        working = asyncio.ensure_future(work)
        try:
            both = [working, enough]
            await asyncio.wait(both, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if self.first:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            enough.cancel()
            working.cancel()
            await asyncio.wait([working])
        self._close()
        if not working.cancelled() and (error := working.exception()) is not None:
            if not isinstance(error, FedOneError):
                raise error
            self.failure = self.failure or str(error)

    def watch(self, run: ServedRun, effect: Effect | CaughtUp | None) -> None:
        """Takes note of the rounds that end."""
        if isinstance(effect, RoundFinished) and self.first and not self._enough.is_set():
            self._rounds += 1
            self._idle_s = asyncio.get_running_loop().time() - self.first - self._busy_s

    @property
    def round_s(self) -> float:
        """Seconds of a round without a query under way; 0 where no round ended."""
        return max(self._idle_s, 0.0) / self._rounds if self._rounds else 0.0

    @property
    def _busy_s(self) -> float:
        return sum(burst.seconds for burst in self.bursts)

    def _close(self) -> None:
        if self._queries:
            self.bursts.append(
                Burst(
                    queries=self._queries,
                    tokens=self._tokens,
                    seconds=self._last - self._begin,
                )
            )
            self._queries = self._tokens = 0


def _misfit(amounts: Sequence[int], seconds: Sequence[float]) -> float:
    """How far seconds in proportion to amounts are from the measured ones: a sum of squares."""
    rate = sum(seconds) / max(sum(amounts), 1)
    return sum((rate * x - y) ** 2 for x, y in zip(amounts, seconds, strict=True))
