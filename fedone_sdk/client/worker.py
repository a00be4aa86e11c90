"""The life of an assignment on a device: checked, done under its lease, sent or declined."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import partial

import structlog

from fedone_sdk import errors
from fedone_sdk.client.device import Device, KnownRuns
from fedone_sdk.client.options import Turn
from fedone_sdk.client.rows import WITHHELD, Unfit, reason_of
from fedone_sdk.client.session import MAX_CALL_WAIT_S, Lease, Paused, retry_after_s
from fedone_sdk.client.state import Journal, Unsent, unsent_updates
from fedone_sdk.client.work import Work, facts_of
from fedone_sdk.errors import BudgetExhausted, LabelWordError, MissingExtraError, SpecError
from fedone_sdk.messages import Assignment, Decline, RunTask
from fedone_sdk.task import Example

_log = structlog.get_logger(__name__)

_UNFIT = (BudgetExhausted, LabelWordError, MissingExtraError, SpecError, Unfit)
"""Failures that would recur with other work of the same run."""

_NOT_DECLINED = (
    "assignment_expired",
    "model_mismatch",
    "run_conflict",
    "unauthorized",
    "update_conflict",
)
"""Refusals after which work is not declined: the server has ended it, or its run is paused."""


class Worker:
    """Does the assignments of a device, and sends their updates."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runs = KnownRuns(device)
        self._unfit: dict[str, RunTask] = {}

    def forget(self) -> None:
        """Clear the cache of runs."""
        self._runs.forget()

    def fits_more(self, all_rows: Sequence[Example]) -> bool:
        """Return whether the examples fit a run that the earlier examples did not."""
        before, admit = len(self._unfit), self._device.admit
        self._unfit = {id: run for id, run in self._unfit.items() if not admit(run, all_rows).rows}
        return len(self._unfit) < before

    async def work(self, assignment: Assignment, all_rows: Sequence[Example]) -> Turn:
        """Do one assignment and send its update, or decline it.

        Raises:
            Paused: The client stops while `only_when` is false.
        """
        session, journal = self._device.session, self._journal(assignment)
        self._device.events.emit("assigned", **facts_of(assignment))
        renew = partial(session.call, session.transport.renew, assignment.assignment_id)
        run: RunTask | None = None
        async with Lease(assignment.deadline_s, renew) as lease:
            try:
                unsent = journal.unsent
                if unsent is None:
                    run = await self._checked_run(assignment, all_rows)
                    unsent = await lease.bounded(self._done(run, assignment, all_rows))
            except Exception as exc:
                private = run is not None and run.privacy is not None
                return await self._failed(assignment, exc, private=private)
            return await self._send(unsent)

    async def send_unsent(self) -> None:
        """Send the updates that were finished before the device stopped or went offline."""
        for unsent in unsent_updates(self._device.state):
            await self._send(unsent)

    async def _checked_run(self, assignment: Assignment, all_rows: Sequence[Example]) -> RunTask:
        """Return an assignment's run, after the checks that need no rows."""
        device, run_id, journal = self._device, assignment.run_id, self._journal(assignment)
        journal.check()
        is_known = run_id in self._runs
        run = await self._runs.task(run_id, assignment.vocabulary_version)
        if device.logs_fit and not is_known:
            fit = await self._runs.fit(run_id, all_rows)
            (_log.info if fit.reason is None else _log.warning)(f"your rows fit {fit}")
        device.check(run)
        if device.privacy is not None:
            device.privacy.check(run, assignment, journal)
        return run

    async def _done(
        self, run: RunTask, assignment: Assignment, all_rows: Sequence[Example]
    ) -> Unsent:
        admitted = self._device.admit(run, all_rows)
        if admitted.refusal is not None:
            self._unfit[assignment.run_id] = run
            raise Unfit(admitted.refusal, shown=admitted.reason)
        work = Work(
            device=self._device,
            runs=self._runs,
            run=run,
            assignment=assignment,
            rows=admitted.rows,
            all_rows=all_rows,
        )
        update = await work.update()
        update = update.model_copy(update={"usage": self._device.shown(update.usage)})
        unsent = Unsent(update=update, memory=work.memory, **facts_of(assignment))
        work.journal.finish(unsent)
        return unsent

    async def _send(self, unsent: Unsent) -> Turn:
        """Send an update; the server answers a repeated one with the same receipt.

        Work whose update is refused while the assignment is open is declined; otherwise the next
        claim would get it again.
        """
        session, facts = self._device.session, facts_of(unsent)
        try:
            await session.call(session.transport.update, unsent.assignment_id, unsent.update)
        except (errors.ProblemError, errors.RefusedBetween) as exc:
            return await self._failed(unsent, exc)
        self._journal(unsent).delete(accepted=unsent)
        _log.info("updated", **facts)
        self._device.events.emit("updated", **facts)
        return Turn(outcome="worked", **facts)

    async def _failed(
        self, work: Assignment | Unsent, failure: Exception, *, private: bool = False
    ) -> Turn:
        """Decline work that failed, unless the server has ended it.

        Raises:
            Exception: The failure, if the work can resume or the server does not know the device.
        """
        try:
            if _is_kept(failure):
                raise failure
            return await self._decline(work, failure, private=private)
        except errors.ProblemError as refusal:
            if errors.is_retryable(refusal) or refusal.code == "unauthorized":
                raise
            return self._refused(work, refusal)

    def _refused(self, work: Assignment | Unsent, refusal: errors.ProblemError) -> Turn:
        """Drop work that the server has ended; keep that of a paused run."""
        facts = facts_of(work)
        _log.warning("work refused", code=refusal.code, detail=refusal.detail, **facts)
        if refusal.code == "model_mismatch":
            self._runs.forget()  # The model of the run has changed.
        if refusal.code != "run_conflict":
            self._journal(work).delete()
        self._device.events.emit("refused", reason=str(refusal), **facts)
        return Turn(outcome="refused", reason=str(refusal), **facts)

    async def _decline(
        self, work: Assignment | Unsent, failure: Exception, *, private: bool
    ) -> Turn:
        """Decline an assignment; the server then assigns its seat to another client.

        With `private`, the reason stays on the device, because it may depend on rows.
        """
        facts, session, journal = facts_of(work), self._device.session, self._journal(work)
        log = _log.bind(run_id=work.run_id, round=work.round)
        if not isinstance(failure, errors.FedOneError):
            # A bug, perhaps in the app's model. Raised, it would end the client after each restart.
            log.error("the work failed", traceback="".join(traceback.format_exception(failure)))
        log.warning("assignment declined", reason=str(failure))
        reason = reason_of(failure)[:500]
        message = Decline(
            reason=WITHHELD if private else reason,
            usage=self._device.shown(journal.usage),
            unfit=isinstance(failure, _UNFIT),
        )
        await session.call(session.transport.decline, work.assignment_id, message)
        journal.delete()
        self._device.events.emit("declined", reason=reason, **facts)
        return Turn(outcome="declined", reason=reason, **facts)

    def _journal(self, work: Assignment | Unsent) -> Journal:
        return Journal(self._device.state, work.assignment_id)


def _is_kept(failure: Exception) -> bool:
    """Return whether work that failed so is not declined: it can resume, or is ended."""
    if not isinstance(failure, errors.ProblemError):
        is_kept = isinstance(failure, (errors.MessageError, Paused, errors.TransportError))
        return is_kept and not isinstance(failure, errors.RefusedBetween)
    if failure.code == "backend_unavailable" and retry_after_s(failure) <= MAX_CALL_WAIT_S:
        return False  # After all attempts; the model may be unavailable for long.
    return errors.is_retryable(failure) or failure.code in _NOT_DECLINED
