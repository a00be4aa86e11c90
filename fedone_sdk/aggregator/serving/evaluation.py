"""Evaluation: the deployable prompt on held-out examples, billed apart from training."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import structlog

from fedone_sdk.aggregator.rounds.events import (
    Effect,
    EvaluationReserved,
    EvaluationSettled,
    Measured,
    PauseAsked,
    RoundFinished,
    RunEnded,
)
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.aggregator.runtime.threads import in_thread
from fedone_sdk.aggregator.serving.bugs import Bugs
from fedone_sdk.aggregator.serving.call_budget import CallBudget, Reservations
from fedone_sdk.aggregator.serving.outcomes import Outcomes, Which
from fedone_sdk.aggregator.serving.run import CaughtUp, ServedRun
from fedone_sdk.algorithms import stream_seed
from fedone_sdk.backends import (
    Answer,
    LLMBackend,
    Prediction,
    Query,
    prediction_queries,
    score_all,
)
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.candidates import no_prompt
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BudgetExhausted,
    FedOneError,
    ProblemError,
    SpecError,
    StoreUnavailable,
)
from fedone_sdk.messages import Verdict
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Bias, Example, ScoreFunction, TextPrompt

__all__ = ["Evaluation", "ask_as_evaluation", "curve_examples"]

_log = structlog.get_logger(__name__)

_PATIENCE_S = 1.0


def curve_examples(spec: RunSpec, examples: Sequence[Example]) -> list[Example]:
    """The examples of the dev split that the points of the curve are measured on."""
    if not examples:
        return []
    seed = stream_seed(spec.seed, "evaluation", 0)
    subset = draw_minibatch(len(examples), spec.evaluation.examples, seed)
    return [examples[index] for index in sorted(subset)]


class _Shown(NamedTuple):
    """A prompt that is measured.

    Attributes:
        prompt: As `Method.prompt` gives it; None is no prompt.
        bias: The label bias that belongs to it.
    """

    prompt: Sequence[float] | None = None
    bias: Bias | None = None


class _Found(NamedTuple):
    """What a measurement found.

    Attributes:
        value: The metric.
        bias: The label bias that it found without labels, where another one would find the same.
        outcomes: Example by example; None for a point of the curve.
    """

    value: float
    bias: Bias | None
    outcomes: Outcomes | None


class Evaluation:
    """Measures one run's prompts on its dev split, beside training.

    Nothing that it finds goes back into training: the prompt that is deployed was chosen without
    it, and what it asks has an account of its own.

    Args:
        run: The run.
        backend: The model.
        examples: The dev split.
        score: The user's function, for loss ``score``.
        measure: The user's function, for a metric of their own.
        replica: Names this process now; what it has under way bears its name.
        leads: Whether this replica measures whole dev splits: one of them is enough.
    """

    def __init__(
        self,
        run: ServedRun,
        backend: LLMBackend,
        examples: Sequence[Example],
        score: ScoreFunction | None = None,
        measure: MetricFunction | None = None,
        *,
        replica: Callable[[], str],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._replica, self._leads = replica, leads
        self._run = run
        self._backend = backend
        self._examples = examples
        self._score = score
        self._metric = measure
        self._subset = curve_examples(run.spec, examples)
        # The prompt is taken when its round ends; training does not wait for the measurement.
        self._points: asyncio.Queue[tuple[int, _Shown, int] | None] = asyncio.Queue()
        self._waits = False
        self._bugs = Bugs("the evaluation")

    def notice(self, effect: Effect | CaughtUp) -> None:
        """Takes note of what happened to the run."""
        every = self._run.spec.evaluation.every
        if isinstance(effect, RoundFinished) and every and (effect.report.round + 1) % every == 0:
            shown, rollbacks = self._deployable(self._run.state), self._run.state.rollbacks
            self._points.put_nowait((effect.report.round, shown, rollbacks))
        elif isinstance(effect, RunEnded) or (
            isinstance(effect, CaughtUp) and not self._run.state.running and self._waits
        ):
            self._points.put_nowait(None)  # The run has ended, here or on another replica.

    async def follow(self) -> None:
        """Measures no prompt and the untrained prompt, then the curve, at last the final prompt.

        Returns when the run is over or paused; after a pause, call it again.
        """
        run = self._run
        if not run.state.running and run.state.metric.after is not None:
            return  # a run that had ended before a restart
        begun = await self._measure_beginning()
        while not run.state.paused:
            if run.state.running or not self._points.empty():
                self._waits = True
                point = await self._points.get()
                self._waits = False
                if point is not None:  # else the run has ended, or had before it was resumed
                    await self._measure_point(*point)
            else:
                at = run.state.round, run.state.rollbacks
                await self._until_leading()
                begun = begun or await self._measure_beginning()
                await self._measure_whole("after", self._deployable(run.state), at)
                if not run.state.running and at == (run.state.round, run.state.rollbacks):
                    return

    async def _measure_beginning(self) -> bool:
        """Measures no prompt and the untrained one, if this replica leads; returns whether it does.

        Another replica may have led, and ended, before it came to that.
        """
        if not self._leads():
            return False
        await self._measure_whole("no_prompt", _Shown())
        untrained = self._deployable(self._run.base.start())
        await self._measure_whole("before", _Shown(untrained.prompt))
        return True

    async def _until_leading(self) -> None:
        """Returns when this replica leads, or another one has measured the end of the run."""
        state = self._run.state
        while not (self._leads() or state.running or state.metric.after is not None):
            await asyncio.sleep(_PATIENCE_S)
            state = self._run.state

    def _deployable(self, state: RunState) -> _Shown:
        machine = self._run.machine
        return _Shown(machine.measured(state).tolist(), machine.bias(state))

    async def _measure_point(self, round_number: int, shown: _Shown, rollbacks: int) -> None:
        if self._run.state.rollbacks != rollbacks:
            return
        found = await self._measure(shown, self._subset)
        if found is not None:
            # After a rollback, there is or will be another round of this number.
            if self._run.state.rollbacks == rollbacks:
                await _kept(self._run, partial(self._run.record_metric, round_number, found.value))
        elif self._run.state.paused:
            self._points.put_nowait((round_number, shown, rollbacks))

    async def _measure_whole(
        self, which: Which, shown: _Shown, at: tuple[int, int] | None = None
    ) -> None:
        if getattr(self._run.state.metric, which) is not None:
            return
        found = await self._measure(shown, self._examples, which)
        if found is not None:
            if found.outcomes is not None:
                # First: what has its metric is not measured again.
                await _kept(self._run, partial(self._run.record_outcomes, found.outcomes))
            measured = Measured(
                which=which,
                value=found.value,
                at=at,
                bias=found.bias,
                verdict=await self._verdict() if which == "after" else None,
            )
            await _kept(self._run, partial(self._run.apply, measured))

    async def _verdict(self) -> Verdict | None:
        """Whether tuning was worth it; None where that cannot be found out."""
        run = self._run
        try:
            return await in_thread(run.judged, await run.outcomes(), self._metric)
        except Exception:
            # The metric is known, and counts without it.
            _log.error("no verdict", run_id=run.run_id, traceback=traceback.format_exc())
            return None

    async def _measure(
        self, shown: _Shown, examples: Sequence[Example], which: Which | None = None
    ) -> _Found | None:
        """The metric of a prompt, or None where the budget or the model does not allow it."""
        run, calibration = self._run, self._run.spec.calibration.label_free
        if run.state.paused:
            return None
        try:
            task = run.spec.task
            if shown.bias is not None:
                task = task.with_bias(shown.bias)
            if shown.prompt is None:
                prompt: TextPrompt | SoftPrompt = no_prompt(task, run.vocabulary)
            else:
                prompt = (await run.show(self._backend))(shown.prompt)
            queries = prediction_queries(
                self._backend, task, prompt, examples, run.spec.method.batch_size, calibration
            )
            answers = await ask_as_evaluation(run, self._backend, queries, self._replica)
            await run.note(answers)
            found = Prediction.of(
                task, queries, answers, examples, self._score, calibration, self._metric
            )
            self._bugs.none(run)
            if found.metric is None:
                return None
            # Another batch gives another bias; what is without content says the same again.
            lasts = calibration == "contextual"
            return _Found(
                found.metric,
                found.task.bias if lasts else None,
                None if which is None else Outcomes.of(which, found),
            )
        except (BackendError, BudgetExhausted, SpecError) as exc:
            _log.warning("evaluation failed", run_id=run.run_id, reason=str(exc))
            if isinstance(exc, (BackendBlocked, BudgetExhausted, SpecError)):
                await run.apply(PauseAsked.because(exc))
        except ProblemError as exc:
            _log.warning("evaluation skipped", run_id=run.run_id, reason=exc.detail)
        except StoreUnavailable as exc:
            _log.error("evaluation failed", run_id=run.run_id, reason=str(exc))
        except Exception as exc:
            # What training has paid for must not be lost by what breaks next to it: the run goes
            # on, and pauses where each measurement would be paid for and meet the bug again.
            await _kept(run, partial(self._bugs.met, run, exc))
        return None


async def ask_as_evaluation(
    run: ServedRun,
    backend: LLMBackend,
    queries: Sequence[Query],
    replica: Callable[[], str],
    *,
    counted: bool = True,
) -> list[Answer]:
    """Asks the model something that is no training, and charges it to the run's evaluation.

    Args:
        run: The run that pays.
        backend: The model.
        queries: What is asked.
        replica: Names this process now.
        counted: Count them as evaluation queries, not only what they cost.

    Raises:
        BackendError: The model refused a query.
        BudgetExhausted: A retry cannot be paid for.
        ProblemError: The caps do not allow it; nothing was asked.
    """
    attempts = Reservations(replica)

    async def set_aside(worst: Usage) -> None:
        await attempts.set_aside(
            worst,
            lambda lease_id: run.apply(EvaluationReserved(lease_id=lease_id, worst=worst)),
        )

    quotes = [await backend.quote(query) for query in queries]
    worst = sum((quote.without_queries() for quote in quotes), NOTHING)
    count = Usage(queries=len(queries)) if counted else NOTHING
    reserved, purse = NOTHING, CallBudget(run.run_id, NOTHING, set_aside)
    try:
        await set_aside(worst + count)
        purse.granted, reserved = worst, count
        paid = [replace(query, payer=purse) for query in queries]
        return await score_all(backend, paid)
    except BudgetExhausted as exc:
        # The run's own budget, or one behind the model?
        raise purse.refusal or exc from None
    finally:
        # Also after a cancellation during `set_aside`, which may have opened a lease.
        for lease_id, used in attempts.shares(purse.spent + reserved):
            settled = EvaluationSettled(lease_id=lease_id, used=used)
            await _kept(run, partial(run.apply, settled))


async def _kept(run: ServedRun, keep: Callable[[], Awaitable[object]]) -> None:
    """Stores something, however long the store is away: an open lease holds the budget back."""
    while True:
        try:
            await keep()
        except ProblemError:
            return  # There is no such lease: it was refused, or charged in full.
        except FedOneError:
            _log.error(
                "an evaluation cannot be stored",
                run_id=run.run_id,
                traceback=traceback.format_exc(),
            )
            task = asyncio.current_task()
            if task is None or task.cancelling():
                return  # The next start charges it in full.
            await asyncio.sleep(_PATIENCE_S)
        else:
            return
