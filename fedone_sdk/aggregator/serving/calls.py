"""Calls of the model that a run pays for: reservations, retries, evaluation, bugs of backends."""

from __future__ import annotations

import asyncio
import traceback
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import structlog

from fedone_sdk.aggregator.rounds.spending import reserve_evaluation, settle_evaluation
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.backends import Answer, LLMBackend, Query, score_all
from fedone_sdk.budget import NOTHING, Lease, Usage
from fedone_sdk.errors import BackendBlocked, BudgetExhausted, FedOneError, ProblemError

_log = structlog.get_logger(__name__)

_RETRY_S = 1.0

_MAX_BUGS = 3
"""Number of consecutive calls with a bug after which the run pauses."""


class Reservations:
    """Reservations of a call, each under its own id, so that each is settled once.

    Other replicas charge the reservations of a replica that they consider dead. If it is alive, it
    gets a new id and reserves under that, so that nothing is charged twice.
    """

    def __init__(self, replica: Callable[[], str]) -> None:
        self._replica = replica
        self._granted: dict[str, Usage] = {}
        self._unknown: list[str] = []

    async def reserve_more(self, worst: Usage, reserve: Callable[[str], Awaitable[object]]) -> None:
        """Reserve `worst` under a new id, or raise the refusal."""
        attempt = f"{self._replica()}/{uuid.uuid4().hex}"
        self._unknown.append(attempt)  # If the store fails, the reservation may exist or not.
        try:
            await reserve(attempt)
        except ProblemError:
            self._unknown.remove(attempt)
            raise
        self._unknown.remove(attempt)
        self._granted[attempt] = worst

    def shares(self, spent: Usage) -> Iterator[tuple[str, Usage]]:
        """Yield the part of `spent` that each reservation pays; the last one pays any excess."""
        for attempt in self._unknown:
            yield attempt, NOTHING
        last = next(reversed(self._granted), None)
        for attempt, granted in self._granted.items():
            share = spent if attempt == last else spent - spent.beyond(granted)
            spent -= share
            yield attempt, share


class CallBudget:
    """Payer of the requests of one call.

    The initial grant covers one attempt at each request. Retries reserve more from the run's
    account before they are sent.

    Attributes:
        spent: The amount spent; a pending request, or one of unknown outcome, counts in full.
    """

    def __init__(
        self, name: str, granted: Usage, more: Callable[[Usage], Awaitable[object]]
    ) -> None:
        self.name = name
        self.granted = granted
        self.refusal: ProblemError | None = None
        self._more = more
        self.spent = NOTHING

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        """Reserve `worst` while the body runs, then charge the amount that the body settles.

        Raises:
            BudgetExhausted: The run's budget does not cover it; the body does not run.
        """
        lease = Lease(uuid.uuid4().hex, worst)
        self.spent += worst
        missing = self.spent.beyond(self.granted)
        if missing != Usage():
            # Added before the await: a concurrent request must not use the same amount.
            self.granted += missing
            try:
                await self._more(missing)
            except BaseException as exc:
                self.granted -= missing
                self.spent -= worst
                if isinstance(exc, ProblemError):
                    self.refusal = exc
                    raise BudgetExhausted(exc.detail) from exc
                raise
        try:
            yield lease
        finally:
            self.spent = self.spent - worst + lease.charge


async def query_as_evaluation(
    run: ServedRun,
    backend: LLMBackend,
    queries: Sequence[Query],
    replica: Callable[[], str],
    *,
    counted: bool = True,
) -> list[Answer]:
    """Query the model outside training and charge the run's evaluation account.

    `counted` adds the evaluation queries to their cost.

    Raises:
        BackendError: The model refused a query.
        BudgetExhausted: The budget does not cover a retry.
        ProblemError: The caps do not cover the queries; none was sent.
    """
    attempts = Reservations(replica)

    async def reserve_more(worst: Usage) -> None:
        await attempts.reserve_more(
            worst,
            lambda lease_id: run.apply(reserve_evaluation, lease_id=lease_id, worst=worst),
        )

    queries = [replace(query, scope=(run.run_id,)) for query in queries]
    quotes = [await backend.quote(query) for query in queries]
    worst = sum((quote.without_queries() for quote in quotes), NOTHING)
    count = Usage(queries=len(queries)) if counted else NOTHING
    reserved, call_budget = NOTHING, CallBudget(run.run_id, NOTHING, reserve_more)
    try:
        await reserve_more(worst + count)
        call_budget.granted, reserved = worst, count
        paid = [replace(query, payer=call_budget) for query in queries]
        return await score_all(backend, paid)
    except BudgetExhausted as exc:
        # Tells the run's budget from a budget of the backend.
        raise call_budget.refusal or exc from None
    except BackendBlocked:
        reserved = NOTHING
        raise
    finally:
        # Also after a cancellation during `reserve_more`, which may have opened a lease.
        for lease_id, used in attempts.shares(call_budget.spent + reserved):
            settle = partial(run.apply, settle_evaluation, lease_id=lease_id, used=used)
            await persist(run, settle)


async def persist(run: ServedRun, keep: Callable[[], Awaitable[object]]) -> None:
    """Store a result, with retries until the store is available: an open lease blocks budget."""
    while True:
        try:
            await keep()
        except ProblemError:
            return  # No such lease: refused, or already charged in full.
        except FedOneError:
            _log.error(
                "an evaluation cannot be stored",
                run_id=run.run_id,
                traceback=traceback.format_exc(),
            )
            task = asyncio.current_task()
            if task is None or task.cancelling():
                return  # The next start of the server charges it in full.
            await asyncio.sleep(_RETRY_S)
        else:
            return


class BugCounter:
    """Counts consecutive calls that raise an unexpected exception, and pauses their run.

    A retry would raise again, and each attempt is charged in full.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._in_a_row: Counter[str] = Counter()  # Per run.

    def reset(self, run: ServedRun) -> None:
        """Record a call without an unexpected exception."""
        self._in_a_row.pop(run.run_id, None)

    async def add(self, run: ServedRun, bug: Exception) -> bool:
        """Record a call that raised; return whether the run is paused."""
        # Formatted here: some log renderers print local variables, which contain texts.
        lines = "".join(traceback.format_exception(bug))
        _log.error(f"{self._what} has a bug", run_id=run.run_id, traceback=lines)
        self._in_a_row[run.run_id] += 1
        times = self._in_a_row[run.run_id]
        if times < _MAX_BUGS:
            return False
        self.reset(run)
        reason = (
            f"{self._what} failed {times} times in a row with {type(bug).__name__}: see the "
            "server's log"
        )
        await run.pause(reason)
        return True
