"""The duration of a planned run, by a short timed probe of its first rounds on a local model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedone_sdk.aggregator import ServedRun
from fedone_sdk.aggregator.rounds.events import Effect, RoundFinished
from fedone_sdk.aggregator.serving.feed import RunReloaded
from fedone_sdk.backends import Answer, LLMBackend, Query, prediction_queries, query_for, score_all
from fedone_sdk.backends.wrappers import CachedBackend, Wrapper
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, FedOneError
from fedone_sdk.local.federation import Federation, simulate
from fedone_sdk.messages import Message
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import references_of

_TRAINING_S = 3.0
"""Seconds of model time to measure in training."""

_EVALUATION_S = 1.5
"""The same in evaluation."""

_PATIENCE_S = 60.0
"""Seconds without any query after which the run is assumed to wait for clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Queries in flight together, without a pause of the model between them.

    Attributes:
        queries: Answered queries.
        tokens: Tokens of these.
        seconds: From the first query to the last answer.
    """

    queries: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result of a probe.

    Attributes:
        startup_s: Seconds until the first query: loading the model, enrolment.
        training: Bursts of training.
        evaluation: Bursts of evaluation; empty if the model is too slow or there is none.
        round_s: Seconds per round without a query in flight: selection, messages, the method.
        failure: The model's error; None if it answered.
    """

    startup_s: float
    training: tuple[Burst, ...]
    evaluation: tuple[Burst, ...]
    round_s: float
    failure: str | None = None

    @property
    def queries(self) -> int:
        """Number of timed queries."""
        return sum(burst.queries for burst in (*self.training, *self.evaluation))

    @property
    def seconds(self) -> float:
        """Seconds of measurement."""
        return sum(burst.seconds for burst in (*self.training, *self.evaluation))

    def training_s(self, *, queries: int, tokens: int, rounds: int) -> float:
        """Return the seconds of all training."""
        return self._busy_s(self.training, queries, tokens) + self.round_s * rounds

    def evaluation_s(self, *, queries: int, tokens: int) -> float:
        """Return the seconds of all evaluation."""
        return self._busy_s(self.evaluation or self.training, queries, tokens)

    def _busy_s(self, bursts: Sequence[Burst], queries: int, tokens: int) -> float:
        seconds = sum(burst.seconds for burst in bursts)
        if self._by_tokens:
            return seconds / sum(burst.tokens for burst in bursts) * tokens
        return seconds / max(sum(burst.queries for burst in bursts), 1) * queries

    @property
    def _by_tokens(self) -> bool:
        """Whether time is proportional to tokens rather than queries, by the better fit."""
        bursts = [*self.training, *self.evaluation]
        if any(not burst.tokens for burst in bursts):
            return False
        seconds = [burst.seconds for burst in bursts]
        by_tokens = _squared_error([burst.tokens for burst in bursts], seconds)
        return by_tokens <= _squared_error([burst.queries for burst in bursts], seconds)


async def probe_run(
    federation: Federation, backend: LLMBackend, *, transport: Literal["http", "memory"] = "http"
) -> Probe:
    """Time the first rounds of a run, and the start of its evaluation.

    The rounds are the run's own: the same clients, mini-batches and prompts, in a separate
    federation. Nothing is stored. Each of the two measurements ends at the first answer after its
    few seconds, so one query suffices for a slow model.

    Raises:
        BackendError: The model cannot be used as described.
        LabelWordError: A label word is not one token of the model.
    """
    loop = asyncio.get_running_loop()
    spec, examples = federation.spec, federation.shards[0][:1]
    began = loop.time()
    await backend.check(spec.task.label_words)
    # A short warm-up without a prompt, so that one-time costs of the first pass are not measured.
    warm_up = query_for(
        spec.task, "", examples, backend=backend, references=references_of(spec.task, examples)
    )
    await backend.score(warm_up)
    loaded = loop.time()

    training = _Meter(backend, enough_s=_TRAINING_S)
    # A cap does not change the first rounds. No more clients than these will enrol.
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
        # Queries left from training would slow evaluation down.
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


class Duration(Message):
    """The estimated duration of a run and the basis of the estimate.

    Attributes:
        basis: ``probe``: the expectation, from queries timed on this machine; ``rate_limits``: the
            lower bound that the backend's rate limits imply.
        seconds: Total.
        startup_s: Before the first query: imports, data, the model, enrolment.
        training_s: Training.
        evaluation_s: Evaluation.
        probe_queries: Number of timed queries.
        probe_s: Duration of the timed queries, seconds.
    """

    basis: Literal["probe", "rate_limits"]
    seconds: float
    startup_s: float = 0.0
    training_s: float = 0.0
    evaluation_s: float = 0.0
    probe_queries: int = 0
    probe_s: float = 0.0


def by_limits(spec: RunSpec, expected: Usage) -> Duration | None:
    """Return the duration that a backend's rate limits imply; None without limits."""
    limits = getattr(spec.backend, "limits", None)
    if limits is None:
        return None
    tokens = expected.prompt_tokens + expected.completion_tokens
    pairs = (
        (expected.requests, limits.requests_per_minute),
        (tokens, limits.tokens_per_minute),
    )
    minutes = [amount / limit for amount, limit in pairs if limit is not None]
    if not minutes:
        return None
    return Duration(basis="rate_limits", seconds=round(60 * max(minutes), 1))


def by_probe(
    probe: Probe, *, startup_s: float, training: Usage, evaluation: Usage, rounds: int
) -> Duration:
    """Return the duration at the speed that a probe measured.

    The process took `startup_s` before the probe. Training has `rounds`; usages are expected ones.
    """
    startup = startup_s + probe.startup_s
    training_s = probe.training_s(
        queries=training.requests, tokens=_tokens(training), rounds=rounds
    )
    evaluation_s = probe.evaluation_s(queries=evaluation.requests, tokens=_tokens(evaluation))
    return Duration(
        basis="probe",
        seconds=round(startup + training_s + evaluation_s, 1),
        startup_s=round(startup, 1),
        training_s=round(training_s, 1),
        evaluation_s=round(evaluation_s, 1),
        probe_queries=probe.queries,
        probe_s=round(probe.seconds, 1),
    )


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens


class _Meter(Wrapper):
    """Times the inner backend's queries for a fixed duration.

    Attributes:
        bursts: The measurements.
        first: Time of the first query, seconds of the event loop's clock.
        failure: The model's error.
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
        """Return the inner backend's answer, timed."""
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
        """Await `work`, which queries this backend, and cancel it once enough is measured."""
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

    def watch(self, run: ServedRun, effect: Effect | RunReloaded | None) -> None:
        """Count the rounds that end."""
        if isinstance(effect, RoundFinished) and self.first and not self._enough.is_set():
            self._rounds += 1
            self._idle_s = asyncio.get_running_loop().time() - self.first - self._busy_s

    @property
    def round_s(self) -> float:
        """Seconds per round without a query in flight; 0 if no round ended."""
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


def _squared_error(amounts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the sum of squared errors of a proportional fit of seconds to amounts."""
    rate = sum(seconds) / max(sum(amounts), 1)
    return sum((rate * x - y) ** 2 for x, y in zip(amounts, seconds, strict=True))
