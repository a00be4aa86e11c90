"""Model calls that a run pays for: their cost, checks of the model, and bugs of backends.

A lease is an amount that is reserved in the run's account. To settle the lease is to replace it
with the actual cost. A quote is a backend's upper bound on the cost of one attempt at a query.
"""

from __future__ import annotations

import asyncio
import traceback
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from fedone_sdk import errors
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.spending import ModelRole, reserve_evaluation, settle_evaluation
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.aggregator.runs.run_view import reasons
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.backends import Answer, LLMBackend, Query, query_for, score_all
from fedone_sdk.backends.judge import Judge
from fedone_sdk.backends.label_words import check_label_words
from fedone_sdk.budget import NOTHING, Lease, Usage
from fedone_sdk.candidates import label_checks, no_prompt
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import ScoreFunction
from fedone_sdk.vocabulary import Vocabulary

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_MAX_BUGS = 3
"""Number of consecutive calls with a bug after which the run pauses."""


class CallBudget:
    """Pays for the requests of one call from the account of a run.

    The first reservation covers one attempt at each query. A retry reserves more before it is sent.
    The id of a reservation starts with the replica's id. If a replica seems to have exited, the
    others find its reservations by this prefix and charge them.

    Args:
        reserve: Reserves an amount of the run's account under an id, or raises `ProblemError`. The
            flag says whether the amount is billed already (see `reserve_evaluation`).

    Attributes:
        spent: The amount spent. Requests that are pending, or have an unknown outcome, count with
            their upper bound.
        granted: The amount that is reserved, including reservations in progress.
        refusal: The error of a refused reservation of a retry, or None.
    """

    def __init__(
        self, run: ServedRun, reserve: Callable[[str, Usage, bool], Awaitable[object]]
    ) -> None:
        self.spent = self.granted = NOTHING
        self.refusal: errors.ProblemError | None = None
        self._run = run
        self._reserve = reserve
        self._priced = True
        # Id -> reserved amount; None while it is unknown whether the store has the reservation.
        self._reservations: dict[str, Usage | None] = {}

    @property
    def name(self) -> str:
        """Id of the run."""
        return self._run.run_id

    async def cover(
        self, backend: LLMBackend, queries: Sequence[Query], query_count: Usage
    ) -> list[Query]:
        """Reserve one attempt at each query; return the queries with this object as their payer.

        `query_count` is reserved, too: the number of queries, or `NOTHING` if they do not count.
        """
        quotes = [await backend.quote(query) for query in queries]
        worst = sum((quote.without_queries() for quote in quotes), NOTHING)
        self._priced = "usd" in backend.bounds
        await self.grant(worst + query_count)
        return [replace(query, payer=self) for query in queries]

    async def grant(self, worst: Usage, *, billed: bool = False) -> None:
        """Reserve the amount `worst`, or raise why it is refused."""
        reservation_id = f"{self._run.replica}/{uuid.uuid4().hex}"
        # Added before the await, so that a concurrent request does not reserve this amount again.
        self.granted += worst
        self._reservations[reservation_id] = None
        try:
            await self._reserve(reservation_id, worst, billed)
        except BaseException as exc:
            self.granted -= worst
            if isinstance(exc, errors.ProblemError):
                del self._reservations[reservation_id]
            raise
        self._reservations[reservation_id] = worst

    def reserved(self, reservation_id: str) -> Usage:
        """Return the amount of a reservation; `NOTHING` if the store may not have it."""
        return self._reservations[reservation_id] or NOTHING

    def shares(self, spent: Usage) -> Iterator[tuple[str, Usage]]:
        """Divide `spent` among the reservations; the last one also pays what exceeds their sum."""
        granted = [key for key, worst in self._reservations.items() if worst is not None]
        for reservation_id, worst in self._reservations.items():
            is_last = reservation_id in granted[-1:]
            share = spent if is_last else spent - spent.beyond(worst or NOTHING)
            spent -= share
            yield reservation_id, share

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        """Count `worst` as spent inside the ``with`` block, then replace it with the actual charge.

        Raises:
            BudgetExhausted: The run's budget does not cover `worst`; the block does not run.
        """
        lease = Lease(uuid.uuid4().hex, worst)
        self.spent += worst
        missing = self.spent.beyond(self.granted)
        if missing != NOTHING:
            try:
                await self.grant(missing)
            except BaseException as exc:
                self.spent -= worst
                if isinstance(exc, errors.ProblemError):
                    self.refusal = exc
                    raise errors.BudgetExhausted(exc.detail) from exc
                raise
        try:
            yield lease
        finally:
            self.spent = self.spent - worst + lease.charge
            if not self._priced:
                self._run.count_unpriced(lease.charge.requests)


async def query_as_evaluation(
    run: ServedRun, backend: LLMBackend, queries: Sequence[Query], *, role: ModelRole | None = None
) -> list[Answer]:
    """Query the model outside training and charge the run's evaluation account.

    `role` is None for queries to the run's model. For ``judge`` or ``proposer`` the cost is
    reported separately, and the number of queries is not charged.

    Raises:
        BackendError: The model refused a query.
        BudgetExhausted: The backend has a budget of its own, which is exhausted.
        ProblemError: The run's caps do not cover the queries or a retry.
    """

    async def reserve(lease_id: str, worst: Usage, billed: bool) -> None:
        apply = partial(run.apply, reserve_evaluation, lease_id=lease_id, worst=worst)
        await run.wait_for_store(partial(apply, billed=billed))

    call = CallBudget(run, reserve)
    queries = [replace(query, scope=(run.run_id,)) for query in queries]
    count = Usage(queries=len(queries)) if role is None else NOTHING
    sent = NOTHING
    try:
        queries = await call.cover(backend, queries, count)
        sent = count
        return await score_all(backend, queries)
    except errors.BudgetExhausted as exc:
        # If `refusal` is set, the run's budget is exhausted; otherwise the backend's own budget is.
        raise call.refusal or exc from None
    except errors.BackendBlocked:
        sent = NOTHING
        raise
    finally:
        spent = call.spent + sent
        if (beyond := spent.beyond(call.granted)) != NOTHING:
            # A lease of its own: a lease is settled once, even if it was charged as lost meanwhile.
            with suppress(errors.ProblemError):  # For example, the run was deleted.
                await call.grant(beyond, billed=True)
        # A cancelled reservation is settled, too, because the store may have it.
        for lease_id, used in call.shares(spent):
            settle = partial(run.apply, settle_evaluation, lease_id=lease_id, used=used, role=role)
            await run.persist(settle)


def charged_to(run: ServedRun, score: ScoreFunction | None) -> ScoreFunction | None:
    """Return the score function; if it is a judge, its calls are charged to the run."""
    if not isinstance(score, Judge):
        return score
    return replace(score, ask=partial(query_as_evaluation, run, score.backend, role="judge"))


class Companion(ABC):
    """Work that the server does for a run besides training: the evaluation or the proposer."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._tasks: set[asyncio.Task[Any]] = set()
        self._single: asyncio.Task[None] | None = None

    @abstractmethod
    def on_change(self, change: Change) -> None:
        """Begin the work that a change of the run requires."""

    def on_started(self) -> None:  # noqa: B027 (optional)
        """Begin the work of a run that was added or resumed."""

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=f"{type(self).__name__.lower()} {self._run.run_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin_unless_running(self, work: Coroutine[Any, Any, None]) -> None:
        if self._single is not None and not self._single.done():
            work.close()
        else:
            self._single = self._begin(work)

    async def wait_idle(self) -> None:
        """Wait until the work is done and charged."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._single is not None and not self._single.cancelled():
            await asyncio.shield(self._single)

    async def aclose(self) -> None:
        """Cancel the work; pending calls are charged in full."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BugCounter:
    """Counts consecutive calls that raise an unexpected exception, and pauses their run.

    The run is paused because a retry would probably fail, too, and each attempt is charged in full.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._in_a_row = Counter[str]()  # per run

    def reset(self, run: ServedRun) -> None:
        """Record a call without an unexpected exception."""
        self._in_a_row.pop(run.run_id, None)

    async def add(self, run: ServedRun, bug: Exception) -> bool:
        """Record a call that raised; return whether the run is paused."""
        # Formatted here: some log renderers print local variables, which contain devices' texts.
        lines = "".join(traceback.format_exception(bug))
        _log.error(f"{self._what} has a bug", run_id=run.run_id, traceback=lines)
        self._in_a_row[run.run_id] += 1
        times = self._in_a_row[run.run_id]
        if times < _MAX_BUGS:
            return False
        failed = f"{self._what} failed {times} times in a row with {type(bug).__name__}"
        await run.persist(partial(run.pause, f"{failed}: see the server's log"))
        self.reset(run)
        return True


class ModelChecks:
    """Checks that the gateway's model supports a run, and adds its costs to the run's machine."""

    def __init__(self, backend: LLMBackend | None) -> None:
        self._backend = backend

    def reset(self) -> None:
        """Allow queries again after the model has refused all requests."""
        if self._backend is not None:
            self._backend.reset()

    def machine(self, run_id: str, spec: RunSpec, vocabulary: Vocabulary) -> RoundMachine:
        """Return the machine of a run whose model is not checked yet."""
        gateway_model = None if self._backend is None else ""
        try:
            return RoundMachine.of(run_id, spec, vocabulary, gateway_model=gateway_model)
        except ValueError as exc:
            raise errors.SpecError(f"method: {exc}") from exc

    async def with_model(self, machine: RoundMachine, vocabulary: Vocabulary) -> RoundMachine:
        """Check that the model supports a run; return the machine with the model's costs.

        Raises:
            SpecError: The model does not support the run.
            BackendError: The model is not available.
        """
        spec, backend = machine.spec, self._backend
        if backend is None:
            spec.check_caps({"queries"})
            if spec.participation.model is None:
                raise errors.SpecError(
                    "participation.model: is missing; if the server has no backend, the run must "
                    "name the fingerprint of the devices' model"
                )
            return machine
        # Checked before the caps, because some backends know their `bounds` only after a request.
        for words, form in label_checks(spec.task, vocabulary):
            await check_label_words(backend, words, form)
        spec.check_caps(backend.bounds)
        # A template that the backend does not support raises here, rather than in every query.
        example = dict.fromkeys(spec.task.fields, "")
        bare = no_prompt(spec.task, vocabulary)
        query = query_for(spec.task, bare, [example], backend=backend, references=["a"])
        await backend.quote(query)
        return machine.with_model(backend.fingerprint, _worst_query(spec, backend))

    async def check(self, run: ServedRun) -> None:
        """Check the model for a served run, and store its fingerprint and costs in the machine.

        Raises the errors of `with_model`, and a `SpecError` if the run requires another model.
        """
        run.use_machine(await self.with_model(run.base, run.vocabulary))
        check_required_model(run.base)

    async def recheck(self, run: ServedRun) -> None:
        """Check the model of a run if it was unavailable when the run was loaded.

        Otherwise update the upper bound on the cost of a query.

        Raises:
            ProblemError: The model is still unavailable, or costs too much and the run pauses.
        """
        base = run.base
        if base.gateway_model == "":
            try:
                await self.check(run)
            except (errors.BackendError, errors.SpecError) as exc:
                # The cause is only logged, because the response goes to devices.
                _log.warning("the model is not available", run_id=run.run_id, reason=str(exc))
                raise errors.ProblemError(
                    "backend_unavailable", "the model is not available at the moment"
                ) from exc
        elif self._backend is not None and base.gateway_model is not None:
            try:
                worst_query = _worst_query(run.spec, self._backend)
            except errors.SpecError as exc:
                await run.pause(exc)
                raise errors.ProblemError("run_conflict", "the run is paused") from exc
            if worst_query != base.worst_query:
                run.use_machine(base.with_model(base.gateway_model, worst_query))

    async def check_available(self, run: ServedRun) -> None:
        """Check the model before a run resumes; a `ProblemError` if it cannot serve the run."""
        try:
            await self.check(run)
        except (errors.BackendError, errors.SpecError) as exc:
            temporary = isinstance(exc, errors.BackendUnavailable)
            code = "backend_unavailable" if temporary else "backend_blocked"
            raise errors.ProblemError(code, reasons(exc)[0]) from exc


def _worst_query(spec: RunSpec, backend: LLMBackend) -> Usage:
    size, most = spec.method.batch_size, spec.task.max_written
    return bounded(spec, lambda: backend.worst_case(size, most), "backend: the model")


def bounded(spec: RunSpec, bound: Callable[[], Usage], model: str) -> Usage:
    """Return the upper bound on the cost of a query; a `SpecError` if a round's cost overflows."""
    seats, method = spec.participation.clients_per_round, spec.method
    queries = seats * (method.num_samples * method.local_steps + 1)  # +1 for a new candidate
    try:
        worst = bound()
        _ = worst * queries
    except ValidationError as exc:
        raise errors.SpecError(
            f"{model} may bill more than 2**53 tokens or dollars for one round. Compare "
            "the bills in the log with the provider's; then set a lower max_input_tokens or "
            "method.batch_size, or restart the server"
        ) from exc
    return worst


def check_required_model(machine: RoundMachine) -> None:
    """Refuse a run whose ``participation.model`` is not the server's model."""
    required, served = machine.spec.participation.model, machine.gateway_model
    if served is not None and required not in (None, served):
        raise errors.SpecError(
            f"participation.model: is {required!r}, the server's model is {served!r}"
        )
