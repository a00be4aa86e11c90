"""One trial: a simulated federation until the measured prompt, or a baseline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import fedone_sdk
from fedone_sdk.aggregator.serving.evaluation import curve_examples
from fedone_sdk.algorithms import stream_seed
from fedone_sdk.backends import (
    Answer,
    LLMBackend,
    Prediction,
    Query,
    Wrapper,
    prediction_queries,
    score_all,
)
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard
from fedone_sdk.candidates import no_prompt
from fedone_sdk.comparison.entrants import Entrant
from fedone_sdk.comparison.records import Point, TrialRecord
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import FedOneError
from fedone_sdk.evaluation.verdict import label_bias
from fedone_sdk.local import Federation, simulate
from fedone_sdk.task import Example, TaskSpec, TextPrompt, example_loss, predicted, target_of

if TYPE_CHECKING:
    from fedone_sdk.aggregator import ServedRun
    from fedone_sdk.aggregator.rounds.state import RunState
    from fedone_sdk.aggregator.serving.feed import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One entrant with one seed.

    Attributes:
        entrant: The entrant.
        federation: Its run, with the seed and the loaded data.
        identity: Digest of the run's description and data.
    """

    entrant: Entrant
    federation: Federation
    identity: str

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.federation.spec.seed

    @property
    def key(self) -> str:
        """The display name."""
        return f"{self.entrant.name}, seed {self.seed}"

    @property
    def training_queries(self) -> int:
        """Upper bound of its training queries."""
        most, shards = self.entrant.training_queries, self.federation.shards
        if self.entrant.kind == "method":
            return most
        return min(most, math.ceil(sum(map(len, shards)) / self.federation.spec.method.batch_size))


async def run_trial(trial: Trial, backend: LLMBackend) -> TrialRecord:
    """Run a trial to its end. The caller closes the backend.

    Raises:
        FedOneError: The trial failed, or its caps leave nothing for the measurement.
    """
    if trial.entrant.kind == "baseline":
        return await _measured_baseline(trial, backend)
    return await _tuned(trial, backend)


async def _tuned(trial: Trial, backend: LLMBackend) -> TrialRecord:
    federation, spec = trial.federation, trial.federation.spec
    recorder, checkpoints = AnswerRecorder(backend), _Checkpoints()
    result = await simulate(
        federation, backend=recorder, transport="memory", watch=checkpoints.watch
    )
    if result.status not in ("completed", "budget_exhausted"):
        raise FedOneError(f"{trial.key}: {result.reason or result.status}")
    run = checkpoints.run

    def measured(
        state: RunState, examples: Sequence[Example], *, biased: bool = True
    ) -> Prediction | None:
        """Return a state's prompt by the run's evaluation; None if it was not evaluated."""
        machine = run.base.at(state)  # with its candidates
        bias = machine.bias(state) if biased else None
        task = spec.task if bias is None else spec.task.with_bias(bias)
        prompt = run.shown(machine.method.prompt(state.method).tolist())
        queries, prediction_of = _measurement(federation, recorder, task, prompt, examples)
        answers = recorder.repeated(queries)
        return None if answers is None else prediction_of(answers)

    last = measured(run.state, federation.dev)
    if last is None or result.metric.after is None:
        raise FedOneError(
            f"{trial.key}: its caps leave nothing to measure the tuned prompt: raise "
            "evaluation.queries and the caps on requests, tokens and money"
        )
    part = curve_examples(spec, federation.dev)
    curve = [
        (0, measured(run.base.initial_state(), federation.dev, biased=False)),
        *[(queries, measured(state, part)) for queries, state in checkpoints.points],
        (result.spent.queries, last),
    ]
    return _record(
        trial,
        last,
        model=result.model or backend.fingerprint,
        status=result.status,
        rounds=result.rounds,
        queries=result.spent.queries,
        evaluation_queries=result.evaluation.queries,
        spent=result.spent.without_queries(),
        prompt=result.prompt.text,
        bias=result.prompt.bias,
        curve=[_point(queries, found) for queries, found in curve if found is not None],
        wall_s=result.wall_s,
    )


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


class _Checkpoints:
    """The states of a run whose prompts are points of its curve."""

    def __init__(self) -> None:
        self.points: list[tuple[int, RunState]] = []
        self._run: ServedRun | None = None
        self._queries = 0

    @property
    def run(self) -> ServedRun:
        """The run, after its first event."""
        assert self._run is not None
        return self._run

    def watch(self, run: ServedRun, change: Change | None) -> None:
        """Record an event of the run."""
        self._run, every = run, run.spec.evaluation.every
        if change is not None and change.finished is not None:
            self._queries += change.finished.report.queries
            if every and (change.finished.report.round + 1) % every == 0:
                self.points.append((self._queries, run.state))


async def _measured_baseline(trial: Trial, backend: LLMBackend) -> TrialRecord:
    began, federation, spec = time.monotonic(), trial.federation, trial.federation.spec
    # A baseline has the caps of a run, except that on training queries.
    caps = {} if spec.budget is None else spec.budget.model_dump(exclude={"queries"})
    capped = any(value is not None for value in caps.values())
    guard = BudgetGuard(Budget(**caps) if capped else None, name=trial.entrant.name)

    bare = no_prompt(spec.task, federation.vocabulary)

    async def ask(task: TaskSpec, examples: Sequence[Example]) -> Prediction:
        queries, prediction_of = _measurement(federation, backend, task, bare, examples)
        answers = await score_all(backend, [replace(query, payer=guard) for query in queries])
        return prediction_of(answers)

    task, queries = spec.task, 0
    if trial.entrant.name == "no-prompt-bias":
        queries, size = trial.training_queries, spec.method.batch_size
        # Rows of all clients, in an order drawn from the run's seed.
        held = [row for shard in federation.shards for row in shard]
        seed = stream_seed(spec.seed, "pooled-rows", 0)
        rows = [held[index] for index in draw_minibatch(len(held), queries * size, seed)]
        found = await ask(task, rows)
        if not found.scored:
            raise FedOneError("no-prompt-bias: the model failed on all rows of the clients")
        task = task.with_bias(label_bias(task, found.rows, found.examples))
    last = await ask(task, federation.dev)
    spent = (await guard.account()).spent
    return _record(
        trial,
        last,
        model=backend.fingerprint,
        status="measured",
        queries=queries,
        evaluation_queries=last.usage.queries,
        spent=spent,
        bias=last.task.bias,
        curve=[_point(queries, last)],
        wall_s=round(time.monotonic() - began, 3),
    )


def _measurement(
    federation: Federation,
    backend: LLMBackend,
    task: TaskSpec,
    prompt: TextPrompt,
    examples: Sequence[Example],
) -> tuple[list[Query], Callable[[Sequence[Answer]], Prediction]]:
    """Return the queries that measure a prompt, and the function of their answers."""
    spec = federation.spec
    size, score, measure = spec.method.batch_size, federation.score, federation.measure
    queries = prediction_queries(backend, task, prompt, examples, size)

    def prediction_of(answers: Sequence[Answer]) -> Prediction:
        return Prediction.of(task, queries, answers, examples, score=score, measure=measure)

    return queries, prediction_of


def _point(queries: int, found: Prediction) -> Point:
    metric, loss = found.metric, found.mean_loss
    assert metric is not None
    assert loss is not None
    return Point(queries=queries, metric=metric, loss=loss)


def _record(
    trial: Trial, last: Prediction, *, queries: int, curve: list[Point], **facts: Any
) -> TrialRecord:
    if not last.scored:
        raise FedOneError(f"{trial.key}: the model failed on the whole dev split")
    task, pairs = last.task, list(zip(last.rows, last.examples, strict=True))
    labels: dict[str, Any] = {}
    if not task.generates:
        labels = {
            "predicted": [
                None if row is None or isinstance(row, str) else predicted(task, row)
                for row, _ in pairs
            ],
            "targets": [target_of(task, example) for _, example in pairs],
        }
    spec = trial.federation.spec
    largest = max(map(len, trial.federation.shards))
    return TrialRecord(
        entrant=trial.entrant.name,
        seed=trial.seed,
        identity=trial.identity,
        version=fedone_sdk.__version__,
        queries=queries,
        example_calls=queries * min(spec.method.batch_size, largest),
        metric=curve[-1].metric,
        loss=curve[-1].loss,
        losses=tuple(
            None if row is None else example_loss(task, row, example, last.score)
            for row, example in pairs
        ),
        curve=tuple(curve),
        **labels,
        **facts,
    )
