"""Evaluation: the deployable prompt on held-out examples, billed apart from training."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from typing import Literal

import structlog

from fedone_sdk.aggregator.events import (
    Effect,
    EvaluationReserved,
    EvaluationSettled,
    Measured,
    RoundFinished,
    RunEnded,
)
from fedone_sdk.aggregator.run import ServedRun
from fedone_sdk.algorithms import stream_seed
from fedone_sdk.backends import LLMBackend, predict
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import BackendError, ProblemError
from fedone_sdk.task import Example

__all__ = ["Evaluation"]

_log = structlog.get_logger(__name__)


class Evaluation:
    """Measures one run's prompts on its dev split, beside training.

    Nothing that it finds goes back into training: the prompt that is deployed was chosen without
    it, and what it asks has an account of its own.

    Args:
        run: The run.
        backend: The model.
        examples: The dev split.
    """

    def __init__(self, run: ServedRun, backend: LLMBackend, examples: Sequence[Example]) -> None:
        self._run = run
        self._backend = backend
        self._examples = examples
        seed = stream_seed(run.spec.seed, "evaluation", 0)
        subset = draw_minibatch(len(examples), run.spec.evaluation.examples, seed)
        self._subset = [examples[index] for index in sorted(subset)]
        # The prompt is taken when its round ends; training does not wait for the measurement.
        self._points: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()

    def notice(self, effect: Effect) -> None:
        """Takes note of what happened to the run."""
        every = self._run.spec.evaluation.every
        if isinstance(effect, RoundFinished) and every and (effect.report.round + 1) % every == 0:
            self._points.put_nowait((effect.report.round, self._run.prompt().text))
        elif isinstance(effect, RunEnded):
            self._points.put_nowait(None)

    async def follow(self) -> None:
        """Measures no prompt and the untrained prompt, then the curve, at last the final prompt."""
        run = self._run
        if not run.state.running and run.state.metric.after is not None:
            return  # a run that had ended before a restart
        await self._measure_whole("no_prompt", "")
        await self._measure_whole("before", run.prompt(run.machine.start()).text)
        while run.state.running or not self._points.empty():
            point = await self._points.get()
            if point is None:
                continue  # the run has ended, or had ended before it was resumed
            value = await self._measure(point[1], self._subset)
            if value is not None:
                await run.record_metric(point[0], value)
        await self._measure_whole("after", run.prompt().text)

    async def _measure_whole(
        self, which: Literal["no_prompt", "before", "after"], prompt: str
    ) -> None:
        known = getattr(self._run.state.metric, which)
        if known is not None and which != "after":
            return
        value = await self._measure(prompt, self._examples)
        if value is not None:
            await self._run.apply(Measured(which=which, value=value))

    async def _measure(self, prompt: str, examples: Sequence[Example]) -> float | None:
        """The metric of a prompt, or None where the budget or the model does not allow it."""
        run, task = self._run, self._run.spec.task
        size = run.spec.method.batch_size
        lease_id = f"evaluation-{uuid.uuid4().hex}"
        worst = self._backend.worst_case(size) * math.ceil(len(examples) / size)
        try:
            await run.apply(EvaluationReserved(lease_id=lease_id, worst=worst))
        except ProblemError as exc:
            _log.warning("evaluation skipped", run_id=run.run_id, reason=exc.detail)
            return None
        used = worst  # what a failed call cost is unknown, so it is charged in full
        try:
            found = await predict(self._backend, task, prompt, examples, size)
            used = found.usage
            run.counters.cache_hits += found.cache_hits
        except BackendError as exc:
            _log.warning("evaluation failed", run_id=run.run_id, reason=str(exc))
            return None
        finally:
            await run.apply(EvaluationSettled(lease_id=lease_id, used=used))
        return found.metric
