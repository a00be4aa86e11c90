"""The comparison of methods: a trial is an entrant (a method or a baseline) with one seed."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from structlog.testing import capture_logs

from fedone_sdk.algorithms import load_method, stream_seed
from fedone_sdk.backends import LLMBackend, Prediction, Wrapper, build_backend, predict
from fedone_sdk.backends.judge import Judge, load_score
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard, Lease, SqliteLedger, Usage
from fedone_sdk.candidates import no_prompt
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import ArgumentError, BudgetExhausted, FedOneError, SpecError
from fedone_sdk.evaluation.engine import Result, Trial, Workspace
from fedone_sdk.evaluation.outcomes import OUTCOMES, Outcomes, newest_outcomes
from fedone_sdk.evaluation.results import BASELINES, Entrant, Point, TrialRecord
from fedone_sdk.evaluation.verdict import label_bias
from fedone_sdk.local.federation import Federation, load_measure, simulate
from fedone_sdk.local.plan import plan_run, training_queries
from fedone_sdk.spec import MethodSpec, RunSpec, validate_spec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Example, TaskSpec

_PEERS = ("random", "gs-bdpl")
"""Methods with which the method of RUN.yaml is compared by default."""

_MODELS: Mapping[str, Any] = {
    name: model
    for model in get_args(get_args(MethodSpec)[0])
    for name in get_args(model.model_fields["name"].annotation)
}

METHODS = tuple(_MODELS)
"""The black-box methods, by their names in RUN.yaml."""


def default_names(spec: RunSpec) -> tuple[str, ...]:
    """Return the names of RUN.yaml's method, of its peers, and of the task's baselines."""
    names = [spec.method.name, *_PEERS, *BASELINES]
    if spec.against_bias():
        names.remove("no-prompt-bias")
    return tuple(dict.fromkeys(names))


def entrants_of(document: Mapping[str, Any], base: RunSpec, names: Sequence[str]) -> list[Entrant]:
    """Return one entrant per method or baseline.

    An entrant with another method than RUN.yaml gets those settings of RUN.yaml that its method
    has. If it cannot fit a label bias, ``calibration`` has its default value (see the notes).
    """
    if not names or len(set(names)) < len(names):
        problem = "each name may occur only once" if names else "needs at least one name"
        raise ArgumentError(f"--methods: {problem}")
    return [_entrant(document, base, name) for name in names]


def _entrant(document: Mapping[str, Any], base: RunSpec, name: str) -> Entrant:
    if name in BASELINES:
        if name == "no-prompt-bias" and (problem := base.against_bias()):
            raise ArgumentError(f"--methods: {name} {problem}")
        return Entrant(name=name, kind="baseline", spec=base)
    if name not in METHODS:
        known = ", ".join((*METHODS, *BASELINES))
        raise ArgumentError(f"--methods: {name!r} is not known; allowed: {known}")
    if name == base.method.name:
        return Entrant(name=name, kind="method", spec=base)
    changed = {
        **document,
        "method": _settings(document.get("method") or {}, name),
        "seed": base.seed,
        "budget": base.budget and base.budget.model_dump(),
    }
    if not _MODELS[name].pools:  # Only methods that keep all answers fit a label bias.
        changed.pop("calibration", None)
    try:
        spec = validate_spec(RunSpec, changed, source="arguments")
    except SpecError as exc:
        problem = "; ".join(exc.problems)
        raise ArgumentError(
            f"--methods: {name} cannot run RUN.yaml ({problem}); omit {name}"
        ) from None
    differences = base.differences(spec)
    notes = tuple(note for note in differences if not note.startswith(("method", "seed")))
    return Entrant(name=name, kind="method", spec=spec, notes=notes)


def _settings(method: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings of RUN.yaml's method that another method also has and accepts."""
    model = _MODELS[name]
    shared = {key: method[key] for key in model.model_fields.keys() & method.keys() - {"name"}}
    try:
        model.model_validate({**shared, "name": name})
    except ValidationError as exc:
        invalid = {error["loc"][0] for error in exc.errors() if error["loc"]}
        shared = {key: value for key, value in shared.items() if key not in invalid}
    return {**shared, "name": name}


_BIAS_QUERIES = 10
"""Number of queries to fit the label bias of ``no-prompt-bias``."""

_DIGITS = 32

_IGNORED_FIELDS = {"backend", "gateway", "name"}
"""Fields of a run that do not identify a trial. A trial has the model's fingerprint instead."""

_UNEQUAL = (
    "budget: a cap on requests, tokens or usd lets later trials run longer, because answers in the "
    "cache are free; a cap on queries does not have this effect"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """An entrant with one seed, and what its trial needs.

    Attributes:
        caps: Caps on all trials together.
        ledger: File with the amounts that the trials have reserved and spent.
    """

    entrant: Entrant
    federation: Federation
    folder: Path
    cache: Path
    caps: Budget | None = None
    ledger: Path | None = None

    @property
    def title(self) -> str:
        """The display name."""
        return f"{self.entrant.name}, seed {self.federation.spec.seed}"

    @property
    def training_queries(self) -> int:
        """Upper bound on the trial's training queries."""
        spec = self.federation.spec
        if self.entrant.kind == "method":
            return training_queries(spec)
        if self.entrant.name != "no-prompt-bias":
            return 0
        rows = sum(map(len, self.federation.shards))
        queries = min(_BIAS_QUERIES, math.ceil(rows / spec.method.batch_size))
        return min(queries, training_queries(spec))

    def trial(self, model: str) -> Trial:
        """Return the trial; `model` is the fingerprint of its model."""
        federation = self.federation
        data = federation.rows_sha256 + federation.vocabulary.dump()
        return Trial(
            key=f"{self.entrant.name}_s{federation.spec.seed}",
            run=run_contest,
            options={
                "entrant": self.entrant.name,
                "run": federation.spec.model_dump(mode="json", exclude=_IGNORED_FIELDS),
                "data": hashlib.sha256(data.encode()).hexdigest()[:_DIGITS],
                "model": model,
            },
            context=self,
        )


def contests(
    entrants: Sequence[Entrant], seeds: Sequence[int], folder: Path, **options: Any
) -> Iterator[Contest]:
    """Yield all contests, seed by seed.

    Contests with the same seed have the same clients, rows and candidates. If they have the same
    batch size, each round also has the same clients and mini-batches: these draws depend on the
    seed, not on the method.
    """
    for seed in seeds:
        federations: dict[str, Federation] = {}  # Equal data is loaded once.
        for entrant in entrants:
            spec = entrant.spec.model_copy(update={"seed": seed})
            key = spec.model_dump_json(include={"data", "prompt", "task"})
            if key not in federations:
                # Other seeds would repeat the warnings of the first.
                with nullcontext() if seed == seeds[0] else capture_logs():
                    federations[key] = Federation.load(spec, folder)
            if isinstance(federations[key].score, Judge):
                raise SpecError("task.score: fedone compare does not support a judge")
            if spec.prompt.proposer is not None:
                raise SpecError("prompt.proposer: fedone compare does not support a proposer")
            # The trial loads the functions again, possibly in another process.
            federation = replace(federations[key], spec=spec, score=None, measure=None)
            if not federation.dev:
                raise SpecError("data.dev: is required, with rows, to compare methods")
            yield Contest(entrant=entrant, federation=federation, folder=folder, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The planned cost of all trials together.

    Attributes:
        expected: Sum of the trials' expected usage. Because of the shared cache, they may use less.
        warnings: Problems that prevent trials, or make them incomparable.
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
    """Plan one trial of each entrant, and multiply its cost by the entrant's number of trials."""
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
            measured = plan.evaluation_queries
            expected += plan.expected.without_queries() * count
            most += plan.most.without_queries() * count
            # No warning for a cap that ends a run early: the cap is part of the comparison.
            warnings |= dict.fromkeys(
                f"{name}: {warning}"
                for warning in plan.warnings
                if not (plan.rounds_affordable and warning.startswith("budget: pays"))
            )
        else:
            measured = math.ceil(len(federation.dev) / federation.spec.method.batch_size)
            queries = (first.training_queries + measured) * count
            task = federation.spec.task
            worst = backend.worst_case(federation.spec.method.batch_size, task.max_written)
            expected += (plan.per_query * queries).without_queries()
            most += (worst * queries).without_queries()
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


class _SharedGuard(BudgetGuard):
    """Applies the caps on all trials together; `refusal` is the first refused reservation."""

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
    """Run the trial of an entrant, and measure its prompt."""
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
        ledger = SqliteLedger(contest.ledger)
        guard = _SharedGuard(contest.caps, ledger=ledger)
    spec = contest.federation.spec.backend
    if spec.cache is None:
        spec = spec.model_copy(update={"cache": str(contest.cache.absolute())})
    try:
        async with build_backend(spec, contest.folder, guard=guard) as backend:
            measure = _measure_baseline if contest.entrant.kind == "baseline" else _tune
            record = await measure(contest, backend)
    except FedOneError:
        if guard is not None and guard.refusal is not None:
            raise guard.refusal from None
        raise
    return {**record.model_dump(mode="json"), "spent": record.spent.exact()}


async def _tune(contest: Contest, backend: LLMBackend) -> TrialRecord:
    store = MemoryStore()
    result = await simulate(contest.federation, backend=backend, store=store)
    if result.status not in ("completed", "budget_exhausted"):
        raise FedOneError(f"{contest.title}: {result.reason or result.status}")
    outcomes = newest_outcomes(await store.log(result.run_id, OUTCOMES))
    metric = result.metric
    if "after" not in outcomes or metric.after is None:
        raise FedOneError(
            f"{contest.title}: the caps on requests, tokens or money were used up before the tuned "
            "prompt was measured; raise them"
        )
    spent = accumulate(report.queries for report in result.history)
    during = zip(spent, (report.metric for report in result.history), strict=True)
    points = [(0, metric.before), *during, (result.spent.queries, metric.after)]
    return _record(
        contest,
        outcomes["after"],
        model=result.model or backend.fingerprint,
        status=result.status,
        rounds=result.rounds,
        queries=result.spent.queries,
        evaluation_queries=result.evaluation.queries,
        spent=result.spent.without_queries(),
        prompt=result.prompt.text,
        bias=result.prompt.bias,
        curve=tuple(Point(queries=at, metric=value) for at, value in points if value is not None),
        wall_s=result.wall_s,
    )


async def _measure_baseline(contest: Contest, backend: LLMBackend) -> TrialRecord:
    began, federation, spec = time.monotonic(), contest.federation, contest.federation.spec
    # A baseline has the caps of a run, except the cap on training queries.
    caps = {} if spec.budget is None else spec.budget.model_dump(exclude={"queries"})
    capped = any(value is not None for value in caps.values())
    guard = BudgetGuard(Budget(**caps) if capped else None, name=contest.entrant.name)
    bare, charged = no_prompt(spec.task, federation.vocabulary), Wrapper(backend, payer=guard)
    options: dict[str, Any] = {"score": federation.score, "measure": federation.measure}

    async def predicted(task: TaskSpec, examples: Sequence[Example]) -> Prediction:
        size = spec.method.batch_size
        prediction = await predict(charged, task, bare, examples, size, **options)
        if not prediction.scored:
            raise FedOneError(f"{contest.title}: the model failed on all rows")
        return prediction

    task, queries = spec.task, 0
    if contest.entrant.name == "no-prompt-bias":
        queries = contest.training_queries
        # The rows of all clients, in an order drawn from the run's seed.
        rows = [row for shard in federation.shards for row in shard]
        seed = stream_seed(spec.seed, "pooled-rows", 0)
        drawn = draw_minibatch(len(rows), queries * spec.method.batch_size, seed)
        fitted = await predicted(task, [rows[index] for index in drawn])
        task = task.with_bias(label_bias(task, fitted.rows, fitted.examples))
    last = await predicted(task, federation.dev)
    assert last.metric is not None
    return _record(
        contest,
        Outcomes.of("after", last),
        model=backend.fingerprint,
        status="measured",
        queries=queries,
        evaluation_queries=last.usage.queries,
        spent=(await guard.account()).spent,
        bias=task.bias,
        curve=(Point(queries=queries, metric=last.metric),),
        wall_s=round(time.monotonic() - began, 3),
    )


def _record(
    contest: Contest, last: Outcomes, *, queries: int, curve: tuple[Point, ...], **facts: Any
) -> TrialRecord:
    largest = max(map(len, contest.federation.shards))
    losses = [loss for loss in last.losses if loss is not None]
    return TrialRecord(
        entrant=contest.entrant.name,
        seed=contest.federation.spec.seed,
        queries=queries,
        example_calls=queries * min(contest.federation.spec.method.batch_size, largest),
        metric=curve[-1].metric,
        loss=math.fsum(losses) / len(losses),
        predicted=last.predicted,
        targets=last.targets,
        losses=last.losses,
        curve=curve,
        **facts,
    )
