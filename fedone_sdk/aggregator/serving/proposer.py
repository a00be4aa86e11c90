"""The proposer: a language model that writes new candidates during a run."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import structlog

from fedone_sdk.aggregator.rounds.lifecycle import propose
from fedone_sdk.aggregator.rounds.state import Seat
from fedone_sdk.aggregator.serving.calls import query_as_evaluation
from fedone_sdk.aggregator.serving.feed import Change
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.algorithms.observations import standings
from fedone_sdk.backends import LLMBackend, Query, written_query
from fedone_sdk.candidates import (
    ScoredCandidate,
    proposal_messages,
    read_proposals,
    read_reflection,
    reflection_messages,
)
from fedone_sdk.description import Description
from fedone_sdk.errors import BackendError, BudgetExhausted, FedOneError, ProblemError, SpecError
from fedone_sdk.messages import MAX_WRITTEN_CHARS, Reflect, Reflected
from fedone_sdk.spec import RunSpec
from fedone_sdk.spec.prompt import ProposerSpec
from fedone_sdk.vocabulary import MAX_PROPOSAL_CHARS

_log = structlog.get_logger(__name__)

_SHOWN = 5
"""Number of best and of worst candidates in the proposer's prompt."""


async def is_proposable(run: ServedRun, text: str, model: LLMBackend | None) -> bool:
    """Return whether a device's text can become a candidate: new, plain and short enough."""
    read = read_reflection(
        json.dumps([text]),
        known=run.vocabulary.candidates_of(run.spec.prompt.proposed_slot or ""),
        labels=run.spec.task.labels,
    )
    return read == text and not (model is not None and await model.special_tokens(text))


class Proposer:
    """Lets a model write new candidates: every few rounds, or when a device asks it to.

    Without reflection its prompt has the task's description, templates and label words, and
    candidates with their mean losses: aggregates, which are noised in private runs. The run
    continues after a failed proposal.

    Args:
        run: A run with a proposer.
        backend: The model that writes.
        model: The gateway's model, whose special tokens no candidate may hold.

    Raises:
        SpecError: The proposer writes no text.
    """

    def __init__(
        self,
        run: ServedRun,
        backend: LLMBackend,
        *,
        model: LLMBackend | None,
    ) -> None:
        proposer, slot = run.spec.prompt.proposer, run.spec.prompt.proposed_slot
        if proposer is None or slot is None:
            raise ValueError("the run has no proposer")
        if "text" not in backend.answers:
            raise SpecError(
                f"prompt.proposer.backend: {backend.fingerprint} writes no text; kinds openai, "
                "llama_cpp, transformers and vllm do"
            )
        self._run = run
        self._backend = backend
        self._model = model or backend
        self._spec: ProposerSpec = proposer
        self._slot = slot
        self._task: asyncio.Task[None] | None = None
        self._reflections: dict[str, asyncio.Task[str]] = {}  # By assignment.

    def on_change(self, change: Change) -> None:
        """Start a proposal after a round, if one is due."""
        if change.finished is None or self._spec.kind == "reflection":
            return
        busy = self._task is not None and not self._task.done()
        if not busy and (change.finished.report.round + 1) % self._spec.every == 0 and self._room():
            self._task = asyncio.create_task(self._propose(), name=f"proposer {self._run.run_id}")

    async def wait_idle(self) -> None:
        """Wait until the pending calls are answered and charged."""
        if tasks := self._pending:
            await asyncio.wait(tasks)

    async def aclose(self) -> None:
        """Cancel the pending calls; they are charged in full."""
        for task in (tasks := self._pending):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _pending(self) -> list[asyncio.Task[Any]]:
        tasks = [*self._reflections.values(), *([] if self._task is None else [self._task])]
        return [task for task in tasks if not task.done()]

    async def reflect(self, seat: Seat, message: Reflect) -> Reflected:
        """Let the model write a candidate from a device's cases, once per assignment.

        Raises:
            ProblemError: The assignment asks for no proposal, or the model failed.
        """
        if not seat.reflects or message.parent >= seat.num_samples:
            raise ProblemError("invalid_message", "the assignment asks for no reflection")
        for assignment_id in [*self._reflections]:
            if self._run.state.seat_with(assignment_id) is None:
                del self._reflections[assignment_id]
        task = self._reflections.get(message.assignment_id)
        if task is None:
            task = self._reflections[message.assignment_id] = asyncio.create_task(
                self._reflected(seat, message), name=f"reflection {message.assignment_id}"
            )
        return Reflected(text=await asyncio.shield(task))  # The answer is paid for, and kept.

    async def _reflected(self, seat: Seat, message: Reflect) -> str:
        run = self._run
        parent = run.machine.candidates(run.state, seat).prompts[message.parent].tolist()
        current = run.vocabulary.by_slot(parent)[self._slot]
        cases = [(case.example, case.feedback) for case in message.cases]
        messages = reflection_messages(run.spec.task, self._slot, current, cases)
        query = written_query(messages, self._spec.max_tokens)
        try:
            (answer,) = await query_as_evaluation(run, self._backend, [query], counted=False)
        except (BackendError, BudgetExhausted) as exc:
            _log.warning("no reflection", run_id=run.run_id, reason=str(exc))
            raise ProblemError("backend_failed", "the run's proposer failed") from exc
        return ((answer.texts[0] if answer.texts else None) or "")[:MAX_WRITTEN_CHARS]

    def _room(self) -> bool:
        state = self._run.state
        known = len(state.proposed) + len(state.waiting)
        return state.running and known < self._spec.max_candidates

    async def _propose(self) -> None:
        run, spec = self._run, self._run.spec
        try:
            query = proposal_query(spec, self._slot, list(self._scored()))
            # Charged to evaluation, but not counted as an evaluation query.
            (answer,) = await query_as_evaluation(run, self._backend, [query], counted=False)
            texts = read_proposals(
                (answer.texts[0] if answer.texts else None) or "",
                known=run.vocabulary.candidates_of(self._slot),
                count=self._spec.count,
                max_chars=MAX_PROPOSAL_CHARS,
                labels=spec.task.labels,
            )
            texts = tuple([text for text in texts if not await self._model.special_tokens(text)])
            await run.apply(propose, slot=self._slot, texts=texts)
            _log.info("candidates proposed", run_id=run.run_id, slot=self._slot, count=len(texts))
        except FedOneError as exc:
            _log.warning("no candidates proposed", run_id=run.run_id, reason=str(exc))

    def _scored(self) -> Iterator[ScoredCandidate]:
        run = self._run
        names = [slot.name for slot in run.spec.prompt.slots for _ in range(slot.repeat)]
        position = names.index(self._slot)
        candidates = run.vocabulary.of_position(position)
        found = standings(run.state.method.memory, position, len(candidates))
        labels = tuple(run.spec.task.labels)
        for text, loss, classes in zip(candidates, found.losses, found.by_class, strict=True):
            if math.isfinite(loss):
                by_class = (
                    dict(zip(labels, classes.tolist(), strict=True))
                    if len(classes) == len(labels) and np.isfinite(classes).all()
                    else {}
                )
                yield ScoredCandidate(text=text, mean_loss=float(loss), class_losses=by_class)


def proposal_query(spec: RunSpec, slot: str, scored: Sequence[ScoredCandidate]) -> Query:
    """Return the query that asks a run's proposer for new candidates of a slot."""
    proposer = spec.prompt.proposer
    if proposer is None:
        raise ValueError("the run has no proposer")
    scored = sorted(scored, key=lambda one: one.mean_loss)
    messages = proposal_messages(
        description=spec.task.description or Description(),
        labels=spec.task.labels,
        slot_name=slot,
        form=spec.task.messages,
        best=scored[:_SHOWN],
        worst=scored[_SHOWN:][-_SHOWN:],
        count=proposer.count,
        max_chars=MAX_PROPOSAL_CHARS,
    )
    return written_query(messages, proposer.max_tokens)
