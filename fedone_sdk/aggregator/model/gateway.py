"""The model gateway, through which devices query the server's model for their assignments."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from fedone_sdk import backends, errors
from fedone_sdk.aggregator.concurrency import in_thread_if_large
from fedone_sdk.aggregator.model.calls import BugCounter, CallBudget
from fedone_sdk.aggregator.model.proposer import is_proposable
from fedone_sdk.aggregator.rounds import spending
from fedone_sdk.aggregator.rounds.machine import invalid
from fedone_sdk.aggregator.rounds.run_state import Seat
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.messages import Score, Scores, Tensor
from fedone_sdk.messages.tensor import from_wire
from fedone_sdk.vocabulary import are_prompts

_UNEXPECTED = (errors.DataError, errors.MissingExtraError)
"""Exceptions that indicate a bug in a backend."""

_MAX_FAILURES = 8
"""After this number of temporary failures of an assignment's calls, the gateway reports a refusal.
Otherwise a text on which the model always fails could use up the cap."""


class Refused(NamedTuple):
    """The outcome of a call that the model refused; the call is not repeated."""

    reason: str


Call = asyncio.Task[Scores | Refused]


@dataclass(eq=False, slots=True)
class _Work:
    """What the gateway stores for an open assignment."""

    run: ServedRun
    # Pending and successful calls, by the digest of the request's body.
    calls: dict[str, Call] = field(default_factory=dict)
    num_quoting: int = 0  # New queries that are admitted, but not reserved yet.
    num_failures: int = 0  # Calls that were sent and failed temporarily.


class ModelGateway:
    """Scores prompts for clients: reserves the cost before each call, and charges it afterwards.

    The gateway first checks that the lease (the amount that is reserved for the assignment) covers
    the queries. The queries of a repeated request count once. A repeated request gets the same
    answer or refusal from memory. After a restart or a temporary failure, it is sent to the backend
    again, within the same lease.
    """

    def __init__(self, backend: LLMBackend) -> None:
        self.backend = backend
        self._open: dict[str, _Work] = {}
        self._pending: dict[Call, ServedRun] = {}
        self._bugs = BugCounter("the model's backend")

    async def score(self, run: ServedRun, seat: Seat, message: Score, body_sha256: str) -> Scores:
        """Score a client's request; a `ProblemError` if it is invalid or the model failed."""
        assignment_id = message.assignment_id
        if run.state.seat_with(assignment_id) is None:
            raise errors.ProblemError("assignment_expired", f"assignment {assignment_id} has ended")
        work = self._open.setdefault(assignment_id, _Work(run))
        call = work.calls.get(body_sha256)
        # No await before the new task: two equal requests at the same time must be one call.
        if call is None or _failed(call):
            call = work.calls[body_sha256] = asyncio.create_task(
                self._query_model(work, seat, message, body_sha256), name=f"gateway {assignment_id}"
            )
            self._pending[call] = run
            call.add_done_callback(partial(self._on_call_done, work, body_sha256))
        # Shielded from a disconnection: the answer is paid for, and is kept for a retry.
        answer = await asyncio.shield(call)
        if isinstance(answer, Refused):
            raise errors.ProblemError("backend_failed", answer.reason)
        return answer

    def on_change(self, run: ServedRun, change: Change) -> None:
        """Discard the answers of closed assignments."""
        closed = [one.assignment_id for one in change.closed]
        if change.reloaded:  # Another replica may have closed assignments.
            of_run = [work_id for work_id, work in self._open.items() if work.run is run]
            closed += [work_id for work_id in of_run if run.state.seat_with(work_id) is None]
        for assignment_id in closed:
            self._open.pop(assignment_id, None)

    async def wait_idle(self, run: ServedRun) -> None:
        """Wait until the pending calls of a run have ended."""
        calls = [task for task, owner in self._pending.items() if owner is run]
        if calls:
            await asyncio.wait(calls)

    async def stop(self) -> None:
        """Cancel the pending calls; they are charged in full."""
        calls = list(self._pending)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _on_call_done(self, work: _Work, body_sha256: str, call: Call) -> None:
        del self._pending[call]
        # A failed call is dropped, because its traceback would keep texts in memory. `_failed`
        # reads the exception, so that asyncio does not log it.
        if _failed(call) and work.calls.get(body_sha256) is call:
            del work.calls[body_sha256]

    @staticmethod
    def _num_queries(run: ServedRun, seat: Seat, message: Score) -> int:
        """Check the shape of a request's prompts; return their number."""
        if message.proposal is not None:
            if message.prompts is not None or not seat.reflects:
                raise invalid("proposal: the assignment asks for no proposal")
            if message.proposal.parent >= seat.num_samples:
                raise invalid("proposal.parent: is not a prompt of the assignment")
            return 1
        if message.prompts is None:
            if run.spec.participation.exchange != "losses":
                raise invalid("prompts: are required in the alpha exchange")
            return seat.num_samples
        array, length = message.prompts, run.spec.prompt.length
        is_integer = not array.dtype.startswith("float")
        if not is_integer or len(array.shape) != 2 or array.shape[1] != length:
            raise invalid(
                f"prompts: are {array.dtype} {list(array.shape)}, must be integers [P, {length}]"
            )
        leased = seat.num_samples * seat.num_steps
        if array.shape[0] > leased:
            raise errors.ProblemError(
                "lease_exhausted", f"{array.shape[0]} queries were sent, the lease has {leased}"
            )
        if not array.shape[0]:
            raise invalid("prompts: are empty")
        return array.shape[0]

    @staticmethod
    async def _prompts(run: ServedRun, seat: Seat, array: Tensor | None) -> list[list[int]]:
        if array is None:
            drawn: list[list[int]] = run.machine.candidates(run.state, seat).prompts.tolist()
            return drawn
        rows: list[list[int]] = from_wire(array).tolist()
        layout = run.vocabulary.layout(run.spec.prompt.length)
        if not await in_thread_if_large(8 * math.prod(array.shape), are_prompts, rows, layout):
            raise invalid("prompts: an index has no candidate at its position")
        return rows

    def _render(
        self, run: ServedRun, seat: Seat, message: Score, rows: Sequence[Sequence[int]]
    ) -> list[Query]:
        return [
            backends.query_for(
                run.spec.task,
                run.text_prompt(row, None if message.proposal is None else message.proposal.text),
                message.examples,
                backend=self.backend,
                references=message.references,
                scope=(run.run_id, str(seat.client)),
            )
            for row in rows
        ]

    @staticmethod
    def _check(run: ServedRun, message: Score) -> None:
        task, batch_size = run.spec.task, run.spec.method.batch_size
        if len(message.examples) > batch_size:
            raise invalid(
                f"examples: {len(message.examples)} were sent, a mini-batch has at most "
                f"{batch_size}"
            )
        for number, example in enumerate(message.examples):
            if example.keys() != set(task.fields):
                given = sorted(name[:100] for name in example)  # A name may be 32 MiB long.
                raise invalid(
                    f"examples.{number}: has the fields {given}, the task's are {list(task.fields)}"
                )
        wanted = len(message.examples) if task.loss == "nll" else 0
        if len(message.references) != wanted:
            raise invalid(
                f"references: {len(message.references)} were sent, loss {task.loss} takes {wanted}"
            )

    async def _query_model(
        self, work: _Work, seat: Seat, message: Score, call: str
    ) -> Scores | Refused:
        run, assignment_id = work.run, message.assignment_id
        call_budget = CallBudget(
            run,
            lambda reservation_id, worst, _: run.apply(
                spending.reserve_call,
                assignment_id=assignment_id,
                call=call,
                reservation_id=reservation_id,
                worst=worst,
            ),
        )
        try:
            num_queries = self._num_queries(run, seat, message)
            self._check(run, message)
            try:
                queries = await self._admit(work, seat, message, call, num_queries, call_budget)
                answers = await backends.score_all(self.backend, queries)
            except errors.BackendBlocked:
                await run.apply(
                    spending.return_queries,
                    assignment_id=assignment_id,
                    call=call,
                    queries=num_queries,
                )
                raise
            finally:
                for reservation_id, used in call_budget.shares(call_budget.spent):
                    reserved = call_budget.reserved(reservation_id)
                    settle: Callable[[], Awaitable[None]] = partial(
                        run.apply,
                        spending.settle_call,
                        assignment_id=assignment_id,
                        reservation_id=reservation_id,
                        used=used,
                        reserved=reserved,
                    )
                    # A second attempt would charge a bill above `reserved` again.
                    is_over = used.beyond(reserved) != NOTHING
                    await (settle() if is_over else run.persist(settle))
            size = 8 * num_queries * len(message.examples) * max(len(run.spec.task.labels), 1)
            model = self.backend.fingerprint
            scores = await in_thread_if_large(size, _scores, queries, answers, model)
        except errors.BackendUnavailable as exc:
            work.num_failures += bool(call_budget.spent.requests)
            if work.num_failures >= _MAX_FAILURES:
                return Refused(exc.summary)
            raise errors.ProblemError(
                "backend_unavailable", exc.summary, retry_after_s=exc.retry_after_s
            ) from exc
        except (errors.BackendBlocked, errors.BudgetExhausted, errors.SpecError) as exc:
            refusal = call_budget.refusal
            if refusal is not None and isinstance(exc, errors.BudgetExhausted):
                raise errors.ProblemError(refusal.code, refusal.detail) from exc
            # The model is blocked, or the backend's own budget is exhausted: an operator must act.
            await run.pause(exc)
            raise errors.ProblemError("run_conflict", "the run is paused") from exc
        except errors.BackendError as exc:
            return Refused(exc.summary)
        except Exception as exc:
            if isinstance(exc, errors.FedOneError) and not isinstance(exc, _UNEXPECTED):
                raise  # The store is unavailable, or the run has refused the reservation.
            if await self._bugs.add(run, exc):
                raise errors.ProblemError("run_conflict", "the run is paused") from exc
            raise errors.ProblemError("backend_failed", "the model's backend has a bug") from exc
        self._bugs.reset(run)
        await run.record_answers(answers)
        return scores

    async def _admit(
        self, work: _Work, seat: Seat, message: Score, call: str, count: int, payer: CallBudget
    ) -> list[Query]:
        """Check that the lease covers a call, render its queries, and reserve their cost."""
        run = work.run
        new = spending.new_queries(run.state, message.assignment_id, call, count, work.num_quoting)
        work.num_quoting += new
        try:
            rows = await self._prompts(run, seat, message.prompts)
            if message.proposal is not None:
                if not await is_proposable(run, message.proposal.text, self.backend):
                    raise invalid("proposal.text: cannot become a candidate")
                rows = [rows[message.proposal.parent]]
            template_chars = sum(len(template) for _, template in run.spec.task.messages)
            chars = sum(len(text) for example in message.examples for text in example.values())
            size = (chars + len(message.examples) * template_chars) * count
            queries = await in_thread_if_large(size, self._render, run, seat, message, rows)
            return await payer.cover(self.backend, queries, Usage(queries=count))
        finally:
            work.num_quoting -= new


def _scores(queries: Sequence[Query], answers: list[Answer], model: str) -> Scores:
    """Return answers as a message, or raise a ``ValueError`` if they do not fit the queries."""
    for asked, answer in zip(queries, answers, strict=True):
        backends.check_answer(asked, answer)
    failed = tuple(
        (p, b)
        for p, answer in enumerate(answers)
        for b, row in enumerate(backends.rows_of(queries[0], answer))
        if row is None
    )
    query = queries[0]
    if query.want == "text":
        texts = tuple(
            tuple(str(row or "") for row in backends.rows_of(query, answer)) for answer in answers
        )
        return Scores(texts=texts, failed=failed, model=model)
    num_values = len(query.label_words) or 1
    nothing = (0.0,) * num_values
    rows = (row or nothing for answer in answers for row in answer.log_probs)
    shape = (len(answers), len(query.inputs), num_values)
    return Scores(
        log_probs=Tensor.pack(itertools.chain.from_iterable(rows), shape, "float32"),
        failed=failed,
        model=model,
    )


def _failed(call: Call) -> bool:
    return call.done() and (call.cancelled() or call.exception() is not None)
