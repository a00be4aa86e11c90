"""Evaluation of a run's prompts on held-out examples (the dev split).

The deployable prompt of a state is the prompt that a run with this state would return.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import structlog

from fedone_sdk import errors
from fedone_sdk.aggregator.concurrency import in_thread
from fedone_sdk.aggregator.model import calls
from fedone_sdk.aggregator.rounds.lifecycle import record_metric
from fedone_sdk.aggregator.rounds.run_state import RunState
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.backends import Answer, LLMBackend, Prediction, Query, prediction_queries
from fedone_sdk.backends.judge import Judge
from fedone_sdk.backends.queries import texts_of
from fedone_sdk.candidates import no_prompt
from fedone_sdk.evaluation.outcomes import Outcomes, curve_examples
from fedone_sdk.evaluation.verdict import measured, no_prompt_biased, preference
from fedone_sdk.messages import Preference, Verdict
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.task import Bias, Example, ScoreFunction, TaskSpec

_log = structlog.get_logger(__name__)

_POLL_S = 1.0
_NEED_OPERATOR = (errors.BackendBlocked, errors.BudgetExhausted, errors.SpecError)


class _ShownPrompt(NamedTuple):
    prompt: Sequence[int] | None = None  # indices of candidates; None is "no prompt"
    bias: Bias | None = None


class Evaluation(calls.Companion):
    """Measures a run's prompts on its dev split, concurrently with training.

    Results do not influence training, and queries are charged to a separate account.

    Args:
        is_leader: Whether this replica is the leader, which measures the baselines and the result.
    """

    def __init__(
        self,
        run: ServedRun,
        backend: LLMBackend,
        examples: Sequence[Example],
        score: ScoreFunction | None = None,
        measure: MetricFunction | None = None,
        *,
        is_leader: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(run)
        self._is_leader = is_leader
        self._backend = backend
        self._examples = examples
        self._score = calls.charged_to(run, score)
        self._metric = measure
        self._subset = curve_examples(run.spec, examples)
        # Round, the prompt after it, and the number of rollbacks so far. None wakes `_measure_run`.
        self._points: asyncio.Queue[tuple[int, _ShownPrompt, int] | None] = asyncio.Queue()
        self._bugs = calls.BugCounter("the evaluation")

    def on_change(self, change: Change) -> None:
        """Queue measurements after a round or the end of the run."""
        every = self._run.spec.evaluation.every
        report = None if change.finished is None else change.finished.report
        if report is not None and every and (report.round + 1) % every == 0:
            shown, rollbacks = self._deployable(self._run.state), self._run.state.rollbacks
            self._points.put_nowait((report.round, shown, rollbacks))
        if change.ended:
            self._points.put_nowait(None)
            self.on_started()  # A run that was paused is measured after a stop.

    def on_started(self) -> None:
        """Start to measure the run, unless the measurement is already running."""
        self._begin_unless_running(self._measure_run())

    async def _measure_run(self) -> None:
        """Measure the prompts; return when the run has ended or paused (then call it again)."""
        run = self._run
        if not run.state.running and run.state.metric.after is not None:
            return  # The run was already measured before the server restarted.
        await self._measure_baselines()
        while not run.state.paused:
            if run.state.running or not self._points.empty():
                point = await self._points.get()
                if point is not None:  # None only wakes this loop.
                    await self._measure_point(*point)
            else:
                at = run.state.round, run.state.rollbacks
                await self._wait_for_leadership()
                await self._measure_baselines()  # Those that another leader or a failure left out.
                await self._measure_whole("after", self._deployable(run.state), at)
                if not run.state.running and at == (run.state.round, run.state.rollbacks):
                    return

    async def _measure_baselines(self) -> None:
        """Measure the missing baselines, if this replica is the leader."""
        if not self._is_leader():
            return
        await self._measure_whole("no_prompt", _ShownPrompt())
        untrained = self._deployable(self._run.base.initial_state())
        await self._measure_whole("before", _ShownPrompt(untrained.prompt))

    async def _wait_for_leadership(self) -> None:
        state = self._run.state
        while not (self._is_leader() or state.running or state.metric.after is not None):
            await asyncio.sleep(_POLL_S)
            state = self._run.state

    def _deployable(self, state: RunState) -> _ShownPrompt:
        machine = self._run.machine
        return _ShownPrompt(machine.method.prompt(state.method).tolist(), machine.bias(state))

    async def _measure_point(self, round_number: int, shown: _ShownPrompt, rollbacks: int) -> None:
        if self._run.state.rollbacks != rollbacks:
            return
        result = await self._measure(shown, self._subset)
        if result is not None:
            # After a rollback during the measurement, the round number belongs to another round.
            if self._run.state.rollbacks == rollbacks:
                await self._run.persist(partial(self._run.record_metric, round_number, result[0]))
        elif self._run.state.paused:
            self._points.put_nowait((round_number, shown, rollbacks))

    async def _measure_whole(
        self,
        which: Literal["no_prompt", "before", "after"],
        shown: _ShownPrompt,
        at: tuple[int, int] | None = None,
    ) -> None:
        if getattr(self._run.state.metric, which) is not None:
            return
        result = await self._measure(shown, self._examples)
        if result is None:
            return
        # A prompt with a metric is never measured again, so store its outcomes before its metric.
        metric, prediction = result
        outcomes = Outcomes.of(which, prediction)
        await self._run.persist(partial(self._run.record_outcomes, outcomes))
        record = partial(self._run.apply, record_metric, which=which, value=metric)
        if which == "no_prompt":
            record = partial(record, biased=await in_thread(self._biased_metric, outcomes))
        elif which == "after":
            await self._measure_cheapest()
            record = partial(record, at=at, verdict=await self._verdict(shown))
        await self._run.persist(record)

    def _biased_metric(self, bare: Outcomes) -> float | None:
        task = self._run.spec.task
        plain = no_prompt_biased(task, bare, None)
        return None if plain is None else measured(task, plain.outcomes, self._metric)[0]

    async def _measure_cheapest(self) -> None:
        """Measure the shortest prompt that may be as good as the tuned one, if there is one."""
        short = await in_thread(self._run.cheapest)
        result = short and await self._measure(_ShownPrompt(*short), self._examples)
        if result:
            outcomes = Outcomes.of("cheapest", result[1])
            await self._run.persist(partial(self._run.record_outcomes, outcomes))

    async def _verdict(self, tuned: _ShownPrompt) -> Verdict | None:
        run = self._run
        try:
            outcomes = await run.persist(run.outcomes) or {}
            verdict = await in_thread(run.compute_verdict, outcomes, self._metric)
        except Exception:
            # The metric is stored nevertheless, because it is valid without a verdict.
            lines = traceback.format_exc()
            _log.error("the verdict failed", run_id=run.run_id, traceback=lines)
            return None
        if isinstance(self._score, Judge) and verdict.conclusion != "no_prompt":
            preferred = await self._preference(self._score, tuned)
            verdict = verdict.model_copy(update={"preference": preferred})
        return verdict

    async def _preference(self, judge: Judge, tuned: _ShownPrompt) -> Preference | None:
        """Let the judge compare the texts of the tuned prompt with the texts without a prompt."""
        try:
            ours, bare = [
                texts_of(*(await self._query_prompt(shown, self._examples))[1:])
                for shown in (tuned, _ShownPrompt())
            ]
            return preference(await judge.preferences(ours, bare, self._examples), ours, bare)
        except errors.FedOneError as exc:
            _log.warning("the judge's comparison failed", run_id=self._run.run_id, reason=str(exc))
            return None

    async def _measure(
        self, shown: _ShownPrompt, examples: Sequence[Example]
    ) -> tuple[float, Prediction] | None:
        """Return a prompt's metric and predictions; None if no metric could be measured."""
        run = self._run
        if run.state.paused:
            return None
        try:
            task, queries, answers = await self._query_prompt(shown, examples)
            prediction = await Prediction.of(
                task, queries, answers, examples, score=self._score, measure=self._metric
            )
            self._bugs.reset(run)
            return None if prediction.metric is None else (prediction.metric, prediction)
        except (errors.BackendError, errors.BudgetExhausted, errors.SpecError) as exc:
            _log.warning("evaluation failed", run_id=run.run_id, reason=str(exc))
            if isinstance(exc, _NEED_OPERATOR):
                await run.persist(partial(run.pause, exc))
        except errors.ProblemError as exc:
            _log.warning("evaluation skipped", run_id=run.run_id, reason=exc.detail)
        except Exception as exc:
            # A repeated bug pauses the run, because each measurement is charged in full.
            await self._bugs.add(run, exc)
        return None

    async def _query_prompt(
        self, shown: _ShownPrompt, examples: Sequence[Example]
    ) -> tuple[TaskSpec, Sequence[Query], Sequence[Answer]]:
        """Return the task with the prompt's label bias, and the model's answers to the prompt."""
        run, task = self._run, self._run.spec.task
        if shown.bias is not None:
            task = task.with_bias(shown.bias)
        indices = shown.prompt
        prompt = no_prompt(task, run.vocabulary) if indices is None else run.text_prompt(indices)
        size = run.spec.method.batch_size
        queries = prediction_queries(self._backend, task, prompt, examples, size)
        answers = await calls.query_as_evaluation(run, self._backend, queries)
        await run.record_answers(answers)
        return task, queries, answers
