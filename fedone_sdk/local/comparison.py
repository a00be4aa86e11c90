"""Trials of a comparison: an entrant with one seed, in a federation in this process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedone_sdk.aggregator.model.evaluation import curve_examples
from fedone_sdk.algorithms import load_method, stream_seed
from fedone_sdk.backends import (
    Answer,
    LLMBackend,
    Prediction,
    Query,
    Wrapper,
    prediction_queries,
    score_all,
)
from fedone_sdk.backends.build import build_backend
from fedone_sdk.backends.judge import Judge
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard, Lease, SqliteLedger, Usage
from fedone_sdk.candidates import no_prompt
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import BudgetExhausted, FedOneError, SpecError
from fedone_sdk.evaluation.engine import Result, Trial, Workspace
from fedone_sdk.evaluation.results import Entrant, Point, TrialRecord
from fedone_sdk.evaluation.verdict import label_bias
from fedone_sdk.local.federation import Federation, load_measure, load_score, simulate
from fedone_sdk.local.plan import plan_run, training_queries
from fedone_sdk.task import Example, Score, TaskSpec, TextPrompt, example_loss, predicted, target_of

if TYPE_CHECKING:
    from fedone_sdk.aggregator import ServedRun
    from fedone_sdk.aggregator.rounds.state import RunState
    from fedone_sdk.aggregator.runs.changes import Change

_BIAS_QUERIES = 10
"""Queries to fit the label bias of ``no-prompt-bias``."""

_DIGITS = 32

_NO_PART = ("backend", "gateway", "name")
"""Fields of a run that do not affect results; the fingerprint identifies the model."""

_UNEQUAL = (
    "budget: caps on requests, tokens and usd count what is sent: a trial gets further with "
    "answers that an earlier one has paid for; budget.queries is the same for all"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """An entrant with one seed, and what its trial needs.

    Attributes:
        caps: Of all trials together.
        ledger: File of the account of these caps.
    """

    entrant: Entrant
    federation: Federation
    folder: Path
    cache: Path
    caps: Budget | None = None
    ledger: Path | None = None

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.federation.spec.seed

    @property
    def title(self) -> str:
        """The display name."""
        return f"{self.entrant.name}, seed {self.seed}"

    @property
    def training_queries(self) -> int:
        """Upper bound of its training queries."""
        spec = self.federation.spec
        if self.entrant.kind == "method":
            return training_queries(spec)
        if self.entrant.name != "no-prompt-bias":
            return 0
        rows = sum(map(len, self.federation.shards))
        most = min(_BIAS_QUERIES, math.ceil(rows / spec.method.batch_size))
        return min(most, training_queries(spec))

    def trial(self, model: str) -> Trial:
        """Return its trial on a model with this fingerprint."""
        spec, federation = self.federation.spec, self.federation
        data = json.dumps(
            [federation.shards, federation.dev, federation.vocabulary.dump()],
            sort_keys=True,
            default=str,
        )
        return Trial(
            key=f"{self.entrant.name}_s{self.seed}",
            run=run_contest,
            options={
                "entrant": self.entrant.name,
                "run": spec.model_dump(mode="json", exclude={*_NO_PART}),
                "data": hashlib.sha256(data.encode()).hexdigest()[:_DIGITS],
                "model": model,
            },
            context=self,
        )


def contests(
    entrants: Sequence[Entrant], seeds: Sequence[int], folder: Path, **place: Any
) -> Iterator[Contest]:
    """Yield all contests, seed by seed.

    Those of one seed have the same clients, rows and candidates. As far as their settings agree,
    they also have the same clients per round and the same mini-batches. All of these are drawn from
    the run's seed, independent of the method.
    """
    for seed in seeds:
        read: dict[str, Federation] = {}  # equal data is read once
        for entrant in entrants:
            spec = entrant.seeded(seed)
            key = spec.model_dump_json(include={"data", "prompt", "task"})
            if key not in read:
                read[key] = Federation.load(spec, folder)
            if isinstance(read[key].score, Judge):
                raise SpecError("task.score: fedone compare takes no judge; fedone tune does")
            federation = replace(read[key], spec=spec, score=None, measure=None)
            if not federation.dev:
                raise SpecError("data.dev: is required, with rows, to compare methods")
            yield Contest(entrant=entrant, federation=federation, folder=folder, **place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The total cost of some trials.

    Attributes:
        expected: Sum of the trials' expected usage. Answers that trials share are sent once, so the
            actual usage may be less.
        warnings: What prevents a trial, or makes it incomparable.
    """

    trials: int
    training_queries: int
    evaluation_queries: int
    expected: Usage
    most: Usage
    warnings: tuple[str, ...]
    priced: bool


def is_free(backend: LLMBackend, batch_size: int) -> bool:
    """Return whether a model costs no money."""
    return "usd" in backend.bounds and backend.worst_case(batch_size).usd == 0


async def costs_of(contests: Sequence[Contest], backend: LLMBackend) -> Costs:
    """Plan the first trial of each entrant, and multiply by the number of seeds."""
    training = evaluation = 0
    expected = most = NOTHING
    budget = contests[0].federation.spec.budget
    warnings: dict[str, None] = {}
    if budget is not None and budget.model_dump(exclude={"queries"}, exclude_none=True):
        warnings[_UNEQUAL] = None
    for name in dict.fromkeys(contest.entrant.name for contest in contests):
        first, *others = (contest for contest in contests if contest.entrant.name == name)
        count, federation = 1 + len(others), first.federation
        plan = await plan_run(federation, backend=backend)
        training += sum(contest.training_queries for contest in (first, *others))
        if first.entrant.kind == "method":
            measured = plan.evaluation.queries
            expected += plan.expected.without_queries() * count
            most += plan.most.without_queries() * count
            # A cap that ends a run early is part of the comparison.
            warnings |= dict.fromkeys(
                f"{name}: {warning}"
                for warning in plan.warnings
                if not (plan.rounds_affordable and warning.startswith("budget: pays"))
            )
        else:
            measured = plan.evaluation.no_prompt
            asked = (first.training_queries + measured) * count
            each = backend.worst_case(federation.spec.method.batch_size)
            expected += (plan.per_query * asked).without_queries()
            most += (each * asked).without_queries()
        evaluation += measured * count
    return Costs(
        trials=len(contests),
        training_queries=training,
        evaluation_queries=evaluation,
        expected=expected,
        most=most,
        warnings=tuple(warnings),
        priced="usd" in backend.bounds,
    )


class _TotalGuard(BudgetGuard):
    refusal: BudgetExhausted | None = None

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        try:
            async with super().reserve(worst) as lease:
                yield lease
        except BudgetExhausted as exc:
            self.refusal = self.refusal or exc
            raise


def run_contest(options: Mapping[str, Any], workspace: Workspace) -> Result:
    """Run an entrant to its measured prompt; the trial's function."""
    contest: Contest = workspace.context
    federation, folder = contest.federation, contest.folder
    load_method(federation.spec.method, folder)
    task = federation.spec.task
    federation = replace(
        federation, score=load_score(task, folder), measure=load_measure(task, folder)
    )
    return asyncio.run(_run(replace(contest, federation=federation)))


async def _run(contest: Contest) -> Result:
    guard = None
    if contest.ledger is not None:
        ledger = SqliteLedger(contest.ledger, program="fedone compare")
        guard = _TotalGuard(contest.caps, ledger=ledger)
    spec = contest.federation.spec.backend
    if spec.cache is None:
        spec = spec.model_copy(update={"cache": str(contest.cache.absolute())})
    try:
        async with build_backend(spec, contest.folder, guard=guard) as backend:
            measure = _measured_baseline if contest.entrant.kind == "baseline" else _tuned
            record = await measure(contest, backend)
    except FedOneError:
        if guard is not None and guard.refusal is not None:
            raise guard.refusal from None
        raise
    return {**record.model_dump(mode="json"), "spent": record.spent.exact()}


async def _tuned(contest: Contest, backend: LLMBackend) -> TrialRecord:
    federation, spec = contest.federation, contest.federation.spec
    recorder, checkpoints = AnswerRecorder(backend), _Checkpoints()
    result = await simulate(federation, backend=recorder, watch=checkpoints.watch)
    if result.status not in ("completed", "budget_exhausted"):
        raise FedOneError(f"{contest.title}: {result.reason or result.status}")
    run = checkpoints.run

    async def measured(
        state: RunState, examples: Sequence[Example], *, biased: bool = True
    ) -> Prediction | None:
        machine = run.base.at(state)  # with its candidates
        bias = machine.bias(state) if biased else None
        task = spec.task if bias is None else spec.task.with_bias(bias)
        prompt = run.shown(machine.method.prompt(state.method).tolist())
        queries, prediction_of = _measurement(federation, recorder, task, prompt, examples)
        answers = recorder.repeated(queries)
        return None if answers is None else await prediction_of(answers)

    last = await measured(run.state, federation.dev)
    if last is None or result.metric.after is None:
        raise FedOneError(
            f"{contest.title}: its caps leave nothing to measure the tuned prompt: raise "
            "the caps on requests, tokens and money"
        )
    part = curve_examples(spec, federation.dev)
    curve = [
        (0, await measured(run.base.initial_state(), federation.dev, biased=False)),
        *[(queries, await measured(state, part)) for queries, state in checkpoints.points],
        (result.spent.queries, last),
    ]
    return _record(
        contest,
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
    """Records all answers, including those with failed inputs."""

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
        assert self._run is not None
        return self._run

    def watch(self, run: ServedRun, change: Change | None) -> None:
        self._run, every = run, run.spec.evaluation.every
        if change is not None and change.finished is not None:
            self._queries += change.finished.report.queries
            if every and (change.finished.report.round + 1) % every == 0:
                self.points.append((self._queries, run.state))


async def _measured_baseline(contest: Contest, backend: LLMBackend) -> TrialRecord:
    began, federation, spec = time.monotonic(), contest.federation, contest.federation.spec
    # A baseline has the caps of a run, except that on training queries.
    caps = {} if spec.budget is None else spec.budget.model_dump(exclude={"queries"})
    capped = any(value is not None for value in caps.values())
    guard = BudgetGuard(Budget(**caps) if capped else None, name=contest.entrant.name)

    bare = no_prompt(spec.task, federation.vocabulary)

    async def ask(task: TaskSpec, examples: Sequence[Example]) -> Prediction:
        queries, prediction_of = _measurement(federation, backend, task, bare, examples)
        answers = await score_all(backend, [replace(query, payer=guard) for query in queries])
        return await prediction_of(answers)

    task, queries = spec.task, 0
    if contest.entrant.name == "no-prompt-bias":
        queries, size = contest.training_queries, spec.method.batch_size
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
        contest,
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
) -> tuple[list[Query], Callable[[Sequence[Answer]], Awaitable[Prediction]]]:
    spec = federation.spec
    size, score, measure = spec.method.batch_size, federation.score, federation.measure
    queries = prediction_queries(backend, task, prompt, examples, size)

    async def prediction_of(answers: Sequence[Answer]) -> Prediction:
        return await Prediction.of(task, queries, answers, examples, score=score, measure=measure)

    return queries, prediction_of


def _point(queries: int, found: Prediction) -> Point:
    metric, loss = found.metric, found.mean_loss
    assert metric is not None
    assert loss is not None
    return Point(queries=queries, metric=metric, loss=loss)


def _record(
    contest: Contest, last: Prediction, *, queries: int, curve: list[Point], **facts: Any
) -> TrialRecord:
    if not last.scored:
        raise FedOneError(f"{contest.title}: the model failed on the whole dev split")
    task, pairs = last.task, list(zip(last.rows, last.examples, strict=True))
    labels: dict[str, Any] = {}
    if not task.generates:
        labels = {
            "predicted": [
                None if row is None or isinstance(row, Score) else predicted(task, row)
                for row, _ in pairs
            ],
            "targets": [target_of(task, example) for _, example in pairs],
        }
    spec = contest.federation.spec
    largest = max(map(len, contest.federation.shards))
    return TrialRecord(
        entrant=contest.entrant.name,
        seed=contest.seed,
        queries=queries,
        example_calls=queries * min(spec.method.batch_size, largest),
        metric=curve[-1].metric,
        loss=curve[-1].loss,
        losses=tuple(
            None if row is None else example_loss(task, row, example) for row, example in pairs
        ),
        curve=tuple(curve),
        **labels,
        **facts,
    )
