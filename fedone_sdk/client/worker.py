"""Assignments of one device: scored under their lease, kept until their update is accepted."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.budget import Usage
from fedone_sdk.client.consent import WITHHELD
from fedone_sdk.client.examples import Declining, Unfit, reason_of
from fedone_sdk.client.journal import Journal, Unsent, memory_of, unsent_updates
from fedone_sdk.client.options import Capabilities, EventSink, Turn
from fedone_sdk.client.session import (
    MAX_CALL_WAIT_S,
    Condition,
    Lease,
    Paused,
    Session,
    retry_after_s,
)
from fedone_sdk.client.state import DeviceState, Precision
from fedone_sdk.client.work import Ask, Assigned, GatewayOracle, Propose, Step, Work
from fedone_sdk.errors import (
    BudgetExhausted,
    FedOneError,
    LabelWordError,
    MessageError,
    MissingExtraError,
    ProblemError,
    RefusedBetween,
    SpecError,
    TransportError,
    is_retryable,
)
from fedone_sdk.messages import Decline, Judged, LossesAssignment, LossesUpdate, Reflect, RunTask
from fedone_sdk.task import Example, form_of
from fedone_sdk.vocabulary import MAX_PROPOSALS, Vocabulary

if TYPE_CHECKING:
    from fedone_sdk.budget import BudgetGuard

_MOST = 8
"""Runs in the cache, which is cleared when it is full."""


class KnownRuns:
    """Tasks and candidates of the runs that a device works for, fetched again when they grow.

    Their label words are checked against the device's own model.
    """

    def __init__(self, session: Session, backend: LLMBackend | None) -> None:
        self._session = session
        self._backend = backend
        self._tasks: dict[str, RunTask] = {}
        self._vocabularies: dict[str, tuple[int, Vocabulary]] = {}

    async def task(self, run_id: str, version: int = 0) -> RunTask:
        """Return a run's task, with at least this version of its candidates.

        Raises:
            Unfit: The run scores with another model than the device's, or cannot be understood.
        """
        known = self._tasks.get(run_id)
        if known is not None and known.vocabulary_version >= version:
            return known
        try:
            known = await self._session.call(self._session.transport.task, run_id)
        except MessageError as exc:
            # For instance of a newer version, with a method that this one does not have. Keeping
            # the seat until its deadline would delay the run.
            raise Unfit(f"the run cannot be understood: {exc}") from exc
        if self._backend is not None:
            if not known.task.slots:  # A slot may hold the beginning of the answer: `vocabulary`.
                await self._backend.check(known.task.label_words, form_of(known.task))
            own = self._backend.fingerprint
            if known.model not in (None, own):
                raise Unfit(f"the run scores with {known.model!r}, the device with {own!r}")
        if len(self._tasks) >= _MOST:
            self.forget()
        self._tasks[run_id] = known
        return known

    async def vocabulary(self, run_id: str, version: int = 0) -> Vocabulary:
        """Return a run's candidates, in at least this version.

        Raises:
            Declining: They are not the run's, or its task cannot use them.
        """
        from fedone_sdk.candidates import label_checks

        have, before = self._vocabularies.get(run_id, (0, None))
        if before is not None and have >= version:
            return before
        run = await self.task(run_id, version)
        listed = await self._session.call(self._session.transport.vocabulary, run_id, have)
        try:
            vocabulary = listed.vocabulary(before if have else None)
            checks = label_checks(run.task, vocabulary) if vocabulary.slots else ()
        except ValueError as exc:
            raise Declining("the vocabulary is malformed") from exc
        if vocabulary.sha256 != run.vocabulary_sha256:
            self.forget()  # Candidates may have been added between the two answers.
            raise Declining("the vocabulary does not fit its run")
        if self._backend is not None:
            for words, form in checks:
                await self._backend.check(words, form)
        self._vocabularies[run_id] = run.vocabulary_version, vocabulary
        return vocabulary

    def forget(self) -> None:
        """Clear the cache: another server may have other runs of the same names."""
        self._tasks.clear()
        self._vocabularies.clear()


_log = structlog.get_logger(__name__)

_UNFIT = (BudgetExhausted, LabelWordError, MissingExtraError, SpecError, Unfit)
"""Failures that the next work of the same run would meet again."""

_NOT_DECLINED = (
    "assignment_expired",
    "model_mismatch",
    "run_conflict",
    "unauthorized",
    "update_conflict",
)
"""Refusals after which there is nothing to decline: the work is gone, or its run is paused."""


class Worker:
    """Does assignments, and sends their updates.

    Without a backend it scores through the gateway.
    """

    def __init__(
        self,
        *,
        session: Session,
        state: DeviceState,
        capabilities: Capabilities,
        budget: BudgetGuard | None,
        condition: Condition,
        events: EventSink,
        logs_fit: bool,
    ) -> None:
        self._session = session
        self._capabilities = capabilities
        self._backend = capabilities.backend
        self._hooks = capabilities.hooks
        self._privacy = capabilities.privacy
        self._budget = budget
        self._condition = condition
        self._events = events
        self._state = state
        self._runs = KnownRuns(session, self._backend)
        self._unfit: dict[str, RunTask] = {}
        self._proposals = Counter[str]()
        self._logs_fit = logs_fit
        self._logged = set[str]()

    def forget(self) -> None:
        """Drop all that belongs to an identity that the server refuses.

        The runs of the next identity may have the same names and be other runs.
        """
        self._runs.forget()

    def fits_more(self, held: Sequence[Example]) -> bool:
        """Return whether the examples fit a run that no earlier ones did."""
        fitting = [
            run_id
            for run_id, run in self._unfit.items()
            if self._capabilities.admit(run, held).rows
        ]
        for run_id in fitting:
            del self._unfit[run_id]
        return bool(fitting)

    async def work(self, assignment: Assigned, held: Sequence[Example]) -> Turn:
        """Do one assignment and send its update, or decline it.

        Raises:
            MessageError: An answer is not an aggregator's.
            Paused: The client stops while `only_when` does not hold; the journal keeps the work.
            ProblemError: The server refuses for now, or does not know the device.
            TransportError: The server cannot be reached.
        """
        self._events.emit("assigned", **_facts(assignment))
        transport = self._session.transport
        run: RunTask | None = None
        try:
            async with Lease(
                assignment.deadline_s,
                lambda: self._session.call(transport.renew, assignment.assignment_id),
            ) as lease:
                try:
                    unsent = self._journal(assignment).unsent
                    if unsent is None:
                        run = await self._checked_run(assignment, held)
                        unsent = await self._done(run, assignment, held, lease)
                except Exception as exc:
                    if _is_kept(exc):
                        raise
                    private = run is not None and run.privacy is not None
                    return await self._decline(assignment, exc, private=private)
                return await self._send(unsent)
        except ProblemError as exc:
            return self._refused(assignment, exc)

    def _refused(self, work: Assigned | Unsent, refusal: ProblemError) -> Turn:
        """Drop work that the server refuses for good, unless its run may be resumed.

        Raises:
            ProblemError: The server refuses for now, or does not know the device.
        """
        if is_retryable(refusal) or refusal.code == "unauthorized":
            raise refusal
        facts = _facts(work)
        _log.warning("work refused", code=refusal.code, detail=refusal.detail, **facts)
        if refusal.code == "model_mismatch":
            self._runs.forget()  # The run has another model than its cached task.
        if refusal.code != "run_conflict":
            self._journal(work).delete()
        self._events.emit("refused", reason=str(refusal), **facts)
        return Turn(outcome="refused", reason=str(refusal), **facts)

    async def _decline(
        self, work: Assigned | Unsent, failure: Exception, *, private: bool = False
    ) -> Turn:
        """Return an assignment undone; the server then offers its seat to another client.

        With `private`, the reason may depend on rows, and stays on the device.

        Raises:
            ProblemError: The assignment has ended, or its run is paused and keeps it.
            TransportError: The server cannot be reached; the next claim gets the same assignment.
        """
        facts = _facts(work)
        log = _log.bind(run_id=work.run_id, round=work.round)
        if not isinstance(failure, FedOneError):
            # A bug, perhaps in the app's model. Raising would end the client again after each
            # restart, as long as it has the same seat.
            log.error("the work failed", traceback="".join(traceback.format_exception(failure)))
        log.warning("assignment declined", reason=str(failure))
        reason = reason_of(failure)[:500]
        message = Decline(
            reason=WITHHELD if private else reason,
            usage=self._reported(self._journal(work).usage),
            unfit=isinstance(failure, _UNFIT),
        )
        await self._session.call(self._session.transport.decline, work.assignment_id, message)
        self._journal(work).delete()
        self._events.emit("declined", reason=reason, **facts)
        return Turn(outcome="declined", reason=reason, **facts)

    async def _checked_run(self, assignment: Assigned, held: Sequence[Example]) -> RunTask:
        """Return an assignment's run after the checks that do not depend on rows."""
        journal = self._journal(assignment)
        journal.check()
        run = await self._runs.task(assignment.run_id, assignment.vocabulary_version)
        if self._logs_fit and assignment.run_id not in self._logged:
            self._logged.add(assignment.run_id)
            fit = self._capabilities.fit(assignment.run_id, run, held)
            (_log.info if fit.reason is None else _log.warning)(f"your rows fit {fit}")
        self._capabilities.check(run)
        if self._privacy is not None:
            self._privacy.check(run, assignment, journal)
        return run

    async def _done(
        self, run: RunTask, assignment: Assigned, held: Sequence[Example], lease: Lease
    ) -> Unsent:
        """Score what the assignment contains, and store the update until it is sent."""
        admitted = self._capabilities.admit(run, held)
        if admitted.refusal is not None:
            self._unfit[assignment.run_id] = run
            raise Unfit(admitted.refusal, shown=admitted.reason)
        facts = _facts(assignment)

        def charge() -> Precision | None:
            if self._privacy is None or run.privacy is None:
                return None
            return self._privacy.charge(run.privacy)

        ask = self._paid(await self._ask(run, assignment, lease))
        work = Work(
            run=run,
            assignment=assignment,
            examples=admitted.rows,
            journal=self._journal(assignment),
            ask=ask,
            propose=await self._proposing(run, assignment, held, ask),
            hooks=self._hooks,
            memory=memory_of(self._state, assignment.run_id),
            charge=charge,
            on_scored=lambda done, total: self._events.emit(
                "scored", done=done, total=total, **facts
            ),
        )
        update = await work.update()
        if isinstance(update, LossesUpdate) and update.proposal is not None:
            self._proposals[assignment.run_id] += 1
        update = update.model_copy(update={"usage": self._reported(update.usage)})
        unsent = Unsent(update=update, memory=work.memory, **facts)
        self._journal(assignment).finish(unsent)
        return unsent

    def _journal(self, work: Assigned | Unsent) -> Journal:
        return Journal(self._state, work.assignment_id)

    def _reported(self, usage: Usage) -> Usage:
        """Return the usage that the server may see."""
        return usage if self._privacy is None else self._privacy.shown(usage)

    async def _ask(self, run: RunTask, assignment: Assigned, lease: Lease) -> Ask:
        ready = partial(self._condition.wait, lease)
        if self._backend is not None:
            # Imported here: a device that scores through the gateway does not need it.
            from fedone_sdk.client.backend_oracle import BackendOracle

            vocabulary = await self._runs.vocabulary(
                assignment.run_id, assignment.vocabulary_version
            )
            return BackendOracle(
                self._backend,
                vocabulary=vocabulary,
                ready=ready,
                budget=self._budget,
                proposed="" if run.reflection is None else run.reflection.slot,
            ).ask
        return GatewayOracle(
            assignment.assignment_id,
            self._session,
            ready=ready,
            known=assignment.exchange == "losses",
        ).ask

    async def _proposing(
        self, run: RunTask, assignment: Assigned, held: Sequence[Example], ask: Ask
    ) -> Propose | None:
        """Return what writes and tries a candidate, if the assignment and the policy allow one."""
        asked = isinstance(assignment, LossesAssignment) and assignment.reflect
        model, about = self._capabilities.reflect, run.reflection
        if not asked or about is None or model is None:
            return None
        # The server may ask for more.
        if self._proposals[assignment.run_id] >= MAX_PROPOSALS:
            return None
        if model == "gateway" and not about.gateway:
            return None
        # Imported here: few devices need it.
        from fedone_sdk.client.reflection import Reflection, Write, writing

        async def write_by_gateway(parent: int, _: str, cases: Sequence[Judged]) -> str:
            message = Reflect(
                assignment_id=assignment.assignment_id, parent=parent, cases=tuple(cases)
            )
            return (await self._session.call(self._session.transport.reflect, message)).text

        if model == "gateway":
            write: Write = write_by_gateway
        else:
            write = writing(model, run, about.slot, self._budget)
        return Reflection(
            run=run,
            slot=about.slot,
            vocabulary=await self._runs.vocabulary(
                assignment.run_id, assignment.vocabulary_version
            ),
            held=held,
            ask=ask,
            write=write,
            before_propose=self._hooks.before_propose,
        ).propose

    def _paid(self, ask: Ask) -> Ask:
        """Return `ask` with its queries charged to the device's own budget."""
        budget = self._budget
        if budget is None:
            return ask

        async def paid(step: Step, missing: Sequence[int]) -> None:
            async with budget.reserve(Usage(queries=len(missing))):
                await ask(step, missing)

        return paid

    # Updates

    async def send_unsent(self) -> None:
        """Send the update that was finished before the device stopped or went offline.

        Raises:
            ProblemError: The server refuses for now, or does not know the device.
            TransportError: The server cannot be reached; the update stays.
        """
        for unsent in unsent_updates(self._state):
            try:
                await self._send(unsent)
            except ProblemError as exc:
                if exc.code != "run_conflict":  # The run may be resumed, and then takes it.
                    self._refused(unsent, exc)

    async def _send(self, unsent: Unsent) -> Turn:
        """Send an update; sent again, it gets the same receipt.

        The server takes the update of a paused run too. An update that it refuses while the
        assignment is open is declined, or the next claim would get the same assignment.

        Raises:
            ProblemError: The assignment has ended, or the server refuses for now.
            TransportError: The server cannot be reached; the update stays.
        """
        facts = _facts(unsent)
        try:
            await self._session.call(
                self._session.transport.update, unsent.assignment_id, unsent.update
            )
        except (ProblemError, RefusedBetween) as exc:
            if is_retryable(exc) or (isinstance(exc, ProblemError) and exc.code in _NOT_DECLINED):
                raise
            return await self._decline(unsent, exc)
        self._journal(unsent).delete(accepted=unsent)
        _log.info("updated", **facts)
        self._events.emit("updated", **facts)
        return Turn(outcome="worked", **facts)


def _is_kept(refusal: Exception) -> bool:
    """Return whether work that met this failure is gone or resumes later; else it is declined."""
    if not isinstance(refusal, ProblemError):
        kept = isinstance(refusal, (MessageError, Paused, TransportError))
        return kept and not isinstance(refusal, RefusedBetween)
    # A model that is unavailable for all attempts may stay so for long, unless the server says
    # how long.
    model_is_away = (
        refusal.code == "backend_unavailable" and retry_after_s(refusal) <= MAX_CALL_WAIT_S
    )
    return (is_retryable(refusal) and not model_is_away) or refusal.code in _NOT_DECLINED


def _facts(work: Assigned | Unsent) -> dict[str, Any]:
    """Return the names of the work."""
    return {"run_id": work.run_id, "assignment_id": work.assignment_id, "round": work.round}
