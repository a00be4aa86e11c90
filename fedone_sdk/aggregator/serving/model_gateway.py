"""The model gateway: devices without a model query the server's, under their lease."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fedone_sdk.aggregator.rounds.spending import (
    new_queries,
    reserve_call,
    return_queries,
    settle_call,
)
from fedone_sdk.aggregator.rounds.state import Seat
from fedone_sdk.aggregator.runtime import in_thread_if_large
from fedone_sdk.aggregator.serving.calls import BugCounter, CallBudget
from fedone_sdk.aggregator.serving.reflections import is_proposable
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.backends import (
    Answer,
    LLMBackend,
    Query,
    check_answer,
    query_for,
    rows_of,
    score_all,
)
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    DataError,
    FedOneError,
    MissingExtraError,
    ProblemError,
    SpecError,
)
from fedone_sdk.messages import Score, Scores, Tensor
from fedone_sdk.messages.tensor import from_wire
from fedone_sdk.vocabulary import are_prompts

_UNEXPECTED = (DataError, MissingExtraError)
"""Exceptions that indicate a bug in a backend."""


_MOST_IN_VAIN = 8
"""Calls of an assignment that may be sent and fail temporarily. A text on which a model always
fails must not take more and more of the cap."""


class Refused(NamedTuple):
    """The model refused a query for good: an answer without scores."""

    reason: str


class ModelGateway:
    """Scores prompts for clients, with a reservation before and a settlement after each call.

    The lease admits a call before its texts are rendered and counted, which happens in threads.
    A repeated request is answered from memory and its queries count once, also if the model refused
    it. After a restart or a temporary failure it goes to the backend again, within the same lease;
    after `_MOST_IN_VAIN` such failures the model counts as refusing.
    """

    def __init__(self, backend: LLMBackend) -> None:
        self.backend = backend
        self._calls: dict[str, dict[str, asyncio.Task[Scores | Refused]]] = {}
        self._run_ids: dict[str, ServedRun] = {}
        self._pending: dict[asyncio.Task[Scores | Refused], ServedRun] = {}
        # Assignment -> new queries of calls that are admitted, but not reserved yet.
        self._quoting: Counter[str] = Counter()
        # Assignment -> calls that were sent and failed temporarily.
        self._in_vain: Counter[str] = Counter()
        self._bugs = BugCounter("the model's backend")

    async def score(self, run: ServedRun, seat: Seat, message: Score, body_sha256: str) -> Scores:
        """Score a client's request.

        Raises:
            ProblemError: The request does not fit the assignment, or the model failed.
        """
        if run.state.seat_with(message.assignment_id) is None:
            raise ProblemError(
                "assignment_expired", f"assignment {message.assignment_id} has ended"
            )
        calls = self._calls.get(message.assignment_id, {})
        task = calls.get(body_sha256)
        # No await from here to the task: the same request sent twice at once is one call.
        if task is None or _failed(task):
            self._calls[message.assignment_id] = calls
            self._run_ids[message.assignment_id] = run
            task = calls[body_sha256] = asyncio.create_task(
                self._query_model(run, seat, message, body_sha256),
                name=f"gateway {message.assignment_id}",
            )
            self._pending[task] = run
            task.add_done_callback(partial(self._on_call_done, calls, body_sha256))
        # Shielded: the answer is paid for and kept for a retry.
        found = await asyncio.shield(task)
        if isinstance(found, Refused):
            raise ProblemError("backend_failed", found.reason)
        return found

    def discard_answers(self, assignment_id: str) -> None:
        """Discard the answers of a closed assignment."""
        self._calls.pop(assignment_id, None)
        self._in_vain.pop(assignment_id, None)
        self._run_ids.pop(assignment_id, None)

    def prune(self, run: ServedRun) -> None:
        """Discard the answers of a run's assignments that were closed on another replica."""
        for assignment_id in [work for work, of in self._run_ids.items() if of is run]:
            if run.state.seat_with(assignment_id) is None:
                self.discard_answers(assignment_id)

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

    def _on_call_done(
        self,
        calls: dict[str, asyncio.Task[Scores | Refused]],
        call: str,
        task: asyncio.Task[Scores | Refused],
    ) -> None:
        del self._pending[task]
        # Retrieves the exception of a call without a waiter. Failures are not kept: a retry queries
        # the model again, and the traceback would hold the request's texts in memory.
        if _failed(task) and calls.get(call) is task:
            del calls[call]

    @contextmanager
    def _admitted(self, run: ServedRun, work: str, call: str, num_queries: int) -> Iterator[None]:
        """Context of the work for a call until its reservation, if the lease admits it."""
        new = new_queries(run.state, work, call, num_queries, self._quoting[work])
        self._quoting[work] += new
        try:
            yield
        finally:
            self._quoting[work] -= new
            if not self._quoting[work]:
                del self._quoting[work]

    async def _on_bug(self, run: ServedRun, bug: Exception) -> ProblemError:
        """Return the refusal of a call that failed with a bug in the backend."""
        if not await self._bugs.add(run, bug):
            return ProblemError("backend_failed", "the model's backend has a bug")
        return ProblemError("run_conflict", "the run is paused")

    @staticmethod
    def _num_queries(run: ServedRun, seat: Seat, message: Score) -> int:
        """Check the shape of a request's prompts; return their number."""
        if message.proposal is not None:
            if message.prompts is not None or not seat.reflects:
                raise ProblemError("invalid_message", "proposal: the assignment asks for none")
            if message.proposal.parent >= seat.num_samples:
                raise ProblemError("invalid_message", "proposal.parent: is no prompt of it")
            return 1
        if message.prompts is None:
            if run.spec.participation.exchange != "losses":
                raise ProblemError("invalid_message", "prompts: are required in this exchange")
            return seat.num_samples
        array, length = message.prompts, run.spec.prompt.length
        is_integer = not array.dtype.startswith("float")
        if not is_integer or len(array.shape) != 2 or array.shape[1] != length:
            raise ProblemError(
                "invalid_message",
                f"prompts: are {array.dtype} {list(array.shape)}, must be integers [P, {length}]",
            )
        leased = seat.num_samples * seat.num_steps
        if array.shape[0] > leased:
            raise ProblemError(
                "lease_exhausted", f"{array.shape[0]} queries requested, the lease has {leased}"
            )
        if not array.shape[0]:
            raise ProblemError("invalid_message", "prompts: are empty")
        return array.shape[0]

    @staticmethod
    async def _prompts(run: ServedRun, seat: Seat, array: Tensor | None) -> list[list[int]]:
        if array is None:
            drawn: list[list[int]] = run.machine.candidates(run.state, seat).prompts.tolist()
            return drawn
        rows: list[list[int]] = from_wire(array).tolist()
        layout = run.vocabulary.layout(run.spec.prompt.length)
        if not await in_thread_if_large(8 * math.prod(array.shape), are_prompts, rows, layout):
            raise ProblemError(
                "invalid_message", "prompts: an index is not one of its position's candidates"
            )
        return rows

    def _queries(
        self, run: ServedRun, seat: Seat, message: Score, rows: Sequence[Sequence[int]]
    ) -> list[Query]:
        return [
            query_for(
                run.spec.task,
                run.shown(row, None if message.proposal is None else message.proposal.text),
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
            raise ProblemError(
                "invalid_message",
                f"examples: {len(message.examples)} were sent, a mini-batch has at most "
                f"{batch_size}",
            )
        for number, example in enumerate(message.examples):
            if example.keys() != set(task.fields):
                given = sorted(name[:100] for name in example)  # They may be 32 MiB long.
                raise ProblemError(
                    "invalid_message",
                    f"examples.{number}: has the fields {given}, the task's are "
                    f"{list(task.fields)}",
                )
        wanted = len(message.examples) if task.loss == "nll" else 0
        if len(message.references) != wanted:
            raise ProblemError(
                "invalid_message",
                f"references: {len(message.references)} were sent, loss {task.loss} takes {wanted}",
            )

    async def _query_model(
        self, run: ServedRun, seat: Seat, message: Score, call: str
    ) -> Scores | Refused:
        work = message.assignment_id
        call_budget = CallBudget(
            run,
            lambda attempt, worst: run.apply(
                reserve_call, assignment_id=work, call=call, attempt=attempt, worst=worst
            ),
        )
        try:
            num_queries = self._num_queries(run, seat, message)
            self._check(run, message)
            try:
                with self._admitted(run, work, call, num_queries):
                    rows = await self._prompts(run, seat, message.prompts)
                    if message.proposal is not None:
                        if not await is_proposable(run, message.proposal.text, self.backend):
                            raise ProblemError("invalid_message", "proposal.text: is no candidate")
                        rows = [rows[message.proposal.parent]]
                    size = _rendered_size(run, message) * num_queries
                    queries = await in_thread_if_large(
                        size, self._queries, run, seat, message, rows
                    )
                    quotes = [await self.backend.quote(query) for query in queries]
                    worst = sum((quote.without_queries() for quote in quotes), NOTHING)
                    await call_budget.grant(worst + Usage(queries=num_queries))
                answers = await score_all(
                    self.backend, [replace(query, payer=call_budget) for query in queries]
                )
            except BackendBlocked:
                await run.apply(return_queries, assignment_id=work, call=call, queries=num_queries)
                raise
            finally:
                for attempt, used in call_budget.shares(call_budget.spent):
                    await run.apply(settle_call, assignment_id=work, attempt=attempt, used=used)
            size = 8 * num_queries * len(message.examples) * max(len(run.spec.task.labels), 1)
            model = self.backend.fingerprint
            scores = await in_thread_if_large(size, _scores, queries, answers, model)
        except BackendUnavailable as exc:
            self._in_vain[work] += bool(call_budget.spent.requests)
            if self._in_vain[work] >= _MOST_IN_VAIN:
                return Refused(exc.summary)
            raise ProblemError(
                "backend_unavailable", exc.summary, retry_after_s=exc.retry_after_s
            ) from exc
        except (BackendBlocked, BudgetExhausted, SpecError) as exc:
            refusal = call_budget.refusal
            if refusal is not None and isinstance(exc, BudgetExhausted):
                raise ProblemError(refusal.code, refusal.detail) from exc
            # A budget of the backend is exhausted, which only an operator can raise.
            await run.pause(exc)
            raise ProblemError("run_conflict", "the run is paused") from exc
        except BackendError as exc:
            return Refused(exc.summary)
        except Exception as exc:
            if isinstance(exc, FedOneError) and not isinstance(exc, _UNEXPECTED):
                raise  # The store is unavailable, or the run refuses the reservation.
            raise await self._on_bug(run, exc) from exc
        self._bugs.reset(run)
        await run.record_answers(answers)
        return scores


def _rendered_size(run: ServedRun, message: Score) -> int:
    """Return the size of a request's texts with their templates, roughly, bytes."""
    around = sum(len(template) for _, template in run.spec.task.messages)
    texts = sum(len(text) for example in message.examples for text in example.values())
    return texts + len(message.examples) * around


def _scores(queries: Sequence[Query], answers: list[Answer], model: str) -> Scores:
    """Return answers as a message; a ``ValueError`` if they do not fit the queries."""
    for asked, answer in zip(queries, answers, strict=True):
        check_answer(asked, answer)
    failed = tuple(
        (p, b)
        for p, answer in enumerate(answers)
        for b, row in enumerate(rows_of(queries[0], answer))
        if row is None
    )
    query = queries[0]
    if query.want == "text":
        texts = tuple(tuple(str(row or "") for row in rows_of(query, answer)) for answer in answers)
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


def _failed(call: asyncio.Task[Scores | Refused]) -> bool:
    return call.done() and (call.cancelled() or call.exception() is not None)
