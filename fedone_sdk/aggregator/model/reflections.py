"""Candidates that devices propose, and the model that writes them from a device's examples."""

from __future__ import annotations

import asyncio
import json

import structlog

from fedone_sdk.aggregator.model.proposer import Asked, Proposer
from fedone_sdk.aggregator.rounds.lifecycle import begin_merge
from fedone_sdk.aggregator.rounds.spending import begin_reflection
from fedone_sdk.aggregator.rounds.state import Seat
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.backends import LLMBackend, written_query
from fedone_sdk.candidates import merge_messages, read_reflection, reflection_messages
from fedone_sdk.errors import BackendError, BudgetExhausted, ProblemError
from fedone_sdk.messages import MAX_WRITTEN_CHARS, Reflect, Reflected

_log = structlog.get_logger(__name__)


async def is_proposable(run: ServedRun, text: str, model: LLMBackend | None) -> bool:
    """Return whether a device's text can become a candidate: new, plain and short enough."""
    read = read_reflection(
        json.dumps([text]),
        known=run.vocabulary.candidates_of(run.spec.prompt.proposed_slot or ""),
        labels=run.spec.task.labels,
    )
    return read == text and not (model is not None and await model.special_tokens(text))


class Reflections(Proposer):
    """Lets the run's proposer write candidates when devices ask it to, and merges the best ones.

    Each call is charged to the run and is no query. The answer to an assignment is kept until the
    assignment is closed, so that a repeated request pays nothing.
    """

    def __init__(self, run: ServedRun, backend: LLMBackend, *, model: LLMBackend | None) -> None:
        super().__init__(run, backend, model=model)
        self._calls: dict[str, asyncio.Task[Reflected]] = {}  # By assignment.

    def on_change(self, change: Change) -> None:
        """Drop the answers to assignments that are closed; start a merge, if one is due."""
        self._calls = {
            assignment_id: call
            for assignment_id, call in self._calls.items()
            if not call.done() or self._run.state.seat_with(assignment_id) is not None
        }
        super().on_change(change)

    def _is_due(self) -> bool:
        state = self._run.state
        return state.round - state.merged_at >= self._spec.merge_every

    async def _next(self) -> Asked | None:
        """Return the query that merges the best candidates of different clusters of clients."""
        run = self._run
        parents = await run.apply(begin_merge)
        candidates = run.vocabulary.candidates_of(self._slot)
        texts = [candidates[parent] for parent in parents if candidates[parent]]
        if len(texts) < 2:
            return None
        messages = merge_messages(run.spec.task, self._slot, texts)
        return Asked(written_query(messages, self._spec.max_tokens), 1, parents)

    async def reflect(self, seat: Seat, message: Reflect) -> Reflected:
        """Let the model write a candidate from a device's cases, once per assignment.

        Raises:
            ProblemError: The assignment asks for no proposal, the cases are not the task's, another
                replica has been asked, or the model failed.
        """
        if not seat.reflects or message.parent >= seat.num_samples:
            raise ProblemError("invalid_message", "the assignment asks for no reflection")
        fields = set(self._run.spec.task.fields)
        if any(case.example.keys() != fields for case in message.cases):
            raise ProblemError("invalid_message", f"cases: must have the fields {sorted(fields)}")
        call = self._calls.get(message.assignment_id)
        if call is None:
            call = self._begin(self._written(seat, message))
            self._calls[message.assignment_id] = call
        return await asyncio.shield(call)  # Paid for, and kept.

    async def _written(self, seat: Seat, message: Reflect) -> Reflected:
        run = self._run
        await run.apply(begin_reflection, assignment_id=message.assignment_id)
        parent = run.machine.candidates(run.state, seat).prompts[message.parent].tolist()
        current = run.vocabulary.by_slot(parent)[self._slot]
        cases = [(case.example, case.feedback) for case in message.cases]
        messages = reflection_messages(run.spec.task, self._slot, current, cases)
        query = written_query(messages, self._spec.max_tokens)
        try:
            text = await self._write(query)
        except (BackendError, BudgetExhausted) as exc:
            _log.warning("no reflection", run_id=run.run_id, reason=str(exc))
            raise ProblemError("backend_failed", "the run's proposer failed") from exc
        return Reflected(text=text[:MAX_WRITTEN_CHARS])
