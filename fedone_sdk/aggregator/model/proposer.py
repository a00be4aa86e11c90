"""The proposer: a model that writes new candidates for a slot of the prompt during a run."""

from __future__ import annotations

import asyncio
import json
import math
import traceback
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog

from fedone_sdk.aggregator.model.calls import Companion, query_as_evaluation
from fedone_sdk.aggregator.rounds.lifecycle import begin_merge, count_call, propose
from fedone_sdk.aggregator.rounds.machine import invalid
from fedone_sdk.aggregator.rounds.run_state import Seat
from fedone_sdk.aggregator.rounds.spending import begin_reflection
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.algorithms.observations import standings
from fedone_sdk.backends import LLMBackend, Query, written_query
from fedone_sdk.candidates import proposals, reflection
from fedone_sdk.errors import BackendError, BudgetExhausted, FedOneError, ProblemError, SpecError
from fedone_sdk.messages import MAX_WRITTEN_CHARS, Reflect, Reflected
from fedone_sdk.spec.prompt import ProposerSpec

_log = structlog.get_logger(__name__)


class _Request(NamedTuple):
    """A query for at most `limit` new candidates, and the indices of the candidates it merges."""

    query: Query
    limit: int
    parents: tuple[int, ...] = ()


class Proposer(Companion):
    """Writes new candidates for a slot of the prompt every few rounds.

    The query contains the task's description, templates and label words, and the candidates with
    their mean losses over clients (with noise if the run has privacy). A failed proposal does not
    stop the run.

    Args:
        model: The gateway's model; no candidate may contain its special tokens.
    """

    def __init__(self, run: ServedRun, backend: LLMBackend, *, model: LLMBackend | None) -> None:
        proposer, slot = run.spec.prompt.proposer, run.spec.prompt.proposed_slot
        if proposer is None or slot is None:
            raise ValueError("the run has no proposer")
        if "text" not in backend.answers:
            raise SpecError(
                f"prompt.proposer.backend: {backend.fingerprint} cannot generate text; kinds "
                "openai, llama_cpp, transformers and vllm can"
            )
        super().__init__(run)
        self._backend = backend
        self._model = model or backend
        self._spec: ProposerSpec = proposer
        self._slot = slot

    def on_change(self, change: Change) -> None:
        """Start a proposal after a round, if one is due."""
        state = self._run.state
        room = state.running and len(state.added) < self._spec.max_candidates
        if change.finished and room and self._is_due():
            self._begin_unless_running(self._propose())

    def _is_due(self) -> bool:
        return self._run.state.round % self._spec.every == 0

    async def _propose(self) -> None:
        run = self._run
        try:
            request = await self._next_request()
            if request is None:
                return
            written = await self._write(request.query)
            texts = proposals.read_proposals(
                written,
                known=run.vocabulary.candidates_of(self._slot),
                count=request.limit,
                labels=run.spec.task.labels,
            )
            texts = tuple([text for text in texts if not await self._model.special_tokens(text)])
            dropped = len(proposals.texts_in(written)) - len(texts)
            record = partial(run.apply, propose, slot=self._slot, texts=texts, dropped=dropped)
            await run.persist(partial(record, parents=request.parents))
            _log.info("candidates proposed", run_id=run.run_id, slot=self._slot, count=len(texts))
        except FedOneError as exc:
            _log.warning("no candidates proposed", run_id=run.run_id, reason=str(exc))
        except Exception:
            # A bug in a backend does not end the run.
            _log.error("the proposer failed", traceback=traceback.format_exc())

    async def _next_request(self) -> _Request | None:
        task, count = self._run.spec.task, self._spec.count
        messages = proposals.proposal_messages(task, self._slot, self._rated(), count=count)
        return _Request(written_query(messages, self._spec.max_tokens), count)

    async def _write(self, query: Query) -> str:
        """Return the model's text, and count the call among the proposer's calls."""
        failure: str | None = None
        try:
            (answer,) = await query_as_evaluation(
                self._run, self._backend, [query], role="proposer"
            )
        except Exception as exc:
            failure = str(exc) if isinstance(exc, FedOneError) else type(exc).__name__
            raise
        finally:
            await self._run.persist(partial(self._run.apply, count_call, failure=failure))
        return answer.text

    def _rated(self) -> Iterator[proposals.ScoredCandidate]:
        run = self._run
        position = run.machine.proposed_position
        candidates = run.vocabulary.of_position(position)
        rated = standings(run.state.method.memory, position, len(candidates))
        labels = tuple(run.spec.task.labels)
        for text, loss, classes in zip(candidates, rated.losses, rated.by_class, strict=True):
            if math.isfinite(loss):
                losses = {}
                if len(classes) == len(labels) and np.isfinite(classes).all():
                    losses = dict(zip(labels, classes.tolist(), strict=True))
                yield proposals.ScoredCandidate(
                    text=text, mean_loss=float(loss), class_losses=losses
                )


async def is_proposable(run: ServedRun, text: str, model: LLMBackend | None) -> bool:
    """Return whether a device's text passes `read_reflection` and has no special tokens."""
    read = reflection.read_reflection(
        json.dumps([text]),
        known=run.vocabulary.candidates_of(run.spec.prompt.proposed_slot or ""),
        labels=run.spec.task.labels,
    )
    return read == text and not (model is not None and await model.special_tokens(text))


class Reflections(Proposer):
    """Writes candidates at the request of devices, and merges the best candidates.

    Each call is charged to the run, and does not count as a query. The answer for an assignment is
    kept until the assignment is closed, so that a repeated request costs nothing.
    """

    def __init__(self, run: ServedRun, backend: LLMBackend, *, model: LLMBackend | None) -> None:
        super().__init__(run, backend, model=model)
        self._calls: dict[str, asyncio.Task[Reflected]] = {}  # by assignment

    def on_change(self, change: Change) -> None:
        """Drop the answers for closed assignments, and start a merge if one is due."""
        self._calls = {
            assignment_id: call
            for assignment_id, call in self._calls.items()
            if not call.done() or self._run.state.seat_with(assignment_id) is not None
        }
        super().on_change(change)

    def _is_due(self) -> bool:
        state = self._run.state
        return state.round - state.merged_at >= self._spec.merge_every

    async def _next_request(self) -> _Request | None:
        """Return the query that merges the best candidates of different clients."""
        run = self._run
        parents = await run.apply(begin_merge)
        candidates = run.vocabulary.candidates_of(self._slot)
        texts = [candidates[parent] for parent in parents if candidates[parent]]
        if len(texts) < 2:
            return None
        messages = reflection.merge_messages(run.spec.task, self._slot, texts)
        return _Request(written_query(messages, self._spec.max_tokens), 1, parents)

    async def reflect(self, seat: Seat, message: Reflect) -> Reflected:
        """Let the model write a candidate from the cases of a device, once per assignment.

        A case is a row that was answered wrongly, with feedback.

        Raises:
            ProblemError: The request is invalid, another replica got it first, or the model failed.
        """
        if not seat.reflects or message.parent >= seat.num_samples:
            raise invalid("the assignment asks for no reflection")
        fields = set(self._run.spec.task.fields)
        if any(case.example.keys() != fields for case in message.cases):
            raise invalid(f"cases: must have the fields {sorted(fields)}")
        call = self._calls.get(message.assignment_id)
        if call is None:
            call = self._begin(self._write_reflection(seat, message))
            self._calls[message.assignment_id] = call
        return await asyncio.shield(call)  # The answer is paid for, and is kept for a retry.

    async def _write_reflection(self, seat: Seat, message: Reflect) -> Reflected:
        run = self._run
        await run.apply(begin_reflection, assignment_id=message.assignment_id)
        parent = run.machine.candidates(run.state, seat).prompts[message.parent].tolist()
        current = run.vocabulary.by_slot(parent)[self._slot]
        cases = [(case.example, case.feedback) for case in message.cases]
        messages = reflection.reflection_messages(run.spec.task, self._slot, current, cases)
        query = written_query(messages, self._spec.max_tokens)
        try:
            text = await self._write(query)
        except (BackendError, BudgetExhausted) as exc:
            _log.warning("no reflection", run_id=run.run_id, reason=str(exc))
            raise ProblemError("backend_failed", "the run's proposer failed") from exc
        return Reflected(text=text[:MAX_WRITTEN_CHARS])
