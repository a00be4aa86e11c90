"""The parts of an edge client, its cache of runs, and the handling of one assignment."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import structlog
from pydantic import ValidationError

from fedone_sdk import errors
from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.budget import Usage
from fedone_sdk.client.noise import PrivacyAccount
from fedone_sdk.client.options import EventSink, Hooks, RunFit, Turn
from fedone_sdk.client.rows import WITHHELD, Admitted, Consent, Declining, Unfit, reason_of
from fedone_sdk.client.session import MAX_CALL_WAIT_S, Deadline, Paused, retry_after_s
from fedone_sdk.client.state import DeviceState, Journal, Unsent, unsent_updates
from fedone_sdk.client.work import Work, facts_of
from fedone_sdk.errors import BudgetExhausted, LabelWordError, MissingExtraError, SpecError
from fedone_sdk.messages import Assignment, Decline, RunTask
from fedone_sdk.task import Example, form_of
from fedone_sdk.vocabulary import Vocabulary

if TYPE_CHECKING:
    from fedone_sdk.budget import BudgetGuard
    from fedone_sdk.client.session import Condition, Session

_log = structlog.get_logger(__name__)

_MAX_RUNS = 8
"""Number of cached runs at which the cache is cleared."""

_UNFIT = (BudgetExhausted, LabelWordError, MissingExtraError, SpecError, Unfit)
"""Failures that would recur in all work of the run, so that the device declines the whole run."""

_FOREIGN = ("json_invalid", "missing", "model_type")
"""Types of Pydantic's errors if an answer is not an aggregator's, but for example a login page."""

_NOT_DECLINED = (
    "assignment_expired",
    "model_mismatch",
    "run_conflict",
    "unauthorized",
    "update_conflict",
)
"""Refusals after which the device does not decline the work, because the server has already ended
the work or paused its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The parts of an edge client.

    Attributes:
        backend: The device's own model; if None, the gateway scores.
        reflect: See `WorkPolicy`.
        privacy: What the device requires of runs, and the epsilon that it has spent.
        logs_fit: Whether to log how many rows fit each new run.
    """

    state: DeviceState
    session: Session
    events: EventSink
    condition: Condition
    hooks: Hooks
    consent: Consent
    backend: LLMBackend | None
    reflect: LLMBackend | Literal["gateway"] | None
    budget: BudgetGuard | None
    privacy: PrivacyAccount | None
    logs_fit: bool

    def check(self, run: RunTask) -> None:
        """Check that the device can work for a run."""
        if self.privacy is not None:
            self.privacy.check_run(run)
        if self.backend is None and not run.gateway:
            raise Unfit("no backend: this server has no gateway, and the client has no backend")
        if run.task.loss == "score" and self.hooks.score is None:
            raise Unfit(
                "loss score needs a score function, and this client has none; set Hooks(score=...) "
                "or fedone client --run RUN.yaml"
            )

    def admit(self, run: RunTask, rows: Sequence[Example]) -> Admitted:
        """Return the rows that take part in a run."""
        return self.consent.admit(run, rows, gateway=self.backend is None)

    def shown(self, usage: Usage) -> Usage:
        """Return the usage that the server may see."""
        return usage if self.privacy is None else self.privacy.shown(usage)


class KnownRuns:
    """Cache of the tasks and candidates of a device's runs.

    If the device has its own model, the label words of each run are checked with this model.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._session, self._backend = device.session, device.backend
        self._tasks: dict[str, RunTask] = {}
        self._vocabularies: dict[str, tuple[int, Vocabulary]] = {}

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._tasks

    async def task(self, run_id: str, version: int = 0) -> RunTask:
        """Return a run's task; the cache is used unless its candidates are older than `version`."""
        known = self._tasks.get(run_id)
        if known is not None and known.vocabulary_version >= version:
            return known
        try:
            run = await self._session.call(self._session.transport.task, run_id)
        except errors.MessageError as exc:
            # The server may be newer and use a method that this version does not know. An answer
            # that lacks a run's keys is not the server's, but for example a captive portal's.
            if not isinstance(cause := exc.__context__, ValidationError) or any(
                len(each["loc"]) <= 1 and each["type"] in _FOREIGN for each in cause.errors()
            ):
                raise
            raise Unfit(f"the run cannot be understood: {exc}") from exc
        if self._backend is not None:
            if not run.task.slots:  # With slots, `vocabulary` checks the label words.
                await self._backend.check(run.task.label_words, form_of(run.task))
            fingerprint = self._backend.fingerprint
            if run.model not in (None, fingerprint):
                raise Unfit(f"the run scores with {run.model!r}, the device with {fingerprint!r}")
        if len(self._tasks) >= _MAX_RUNS:
            self.forget()
        self._tasks[run_id] = run
        return run

    async def fit(self, run_id: str, rows: Sequence[Example]) -> RunFit:
        """Return how many of these rows fit a run, and why the other rows do not."""
        try:
            run = await self.task(run_id)
            self._device.check(run)
        except Unfit as exc:
            return RunFit(run_id=run_id, rows=len(rows), fit=0, reason=exc.reason)
        admitted = self._device.admit(run, rows)
        fit = len(admitted.rows)
        return RunFit(run_id=run_id, rows=len(rows), fit=fit, reason=admitted.reason)

    async def vocabulary(self, run_id: str, version: int = 0) -> Vocabulary:
        """Return a run's candidates; the cache is used unless it is older than `version`."""
        have, before = self._vocabularies.get(run_id, (0, None))
        if before is not None and have >= version:
            return before
        from fedone_sdk.candidates import label_checks

        run = await self.task(run_id, version)
        listed = await self._session.call(self._session.transport.vocabulary, run_id, have)
        try:
            vocabulary = listed.vocabulary(before if have else None)
            checks = label_checks(run.task, vocabulary) if vocabulary.slots else ()
        except ValueError as exc:
            raise Declining("the vocabulary is malformed") from exc
        if vocabulary.sha256 != run.vocabulary_sha256:
            self.forget()  # Candidates may have been added since the task was sent.
            raise Declining("the vocabulary does not fit its run")
        if self._backend is not None:
            for words, form in checks:
                await self._backend.check(words, form)
        self._vocabularies[run_id] = run.vocabulary_version, vocabulary
        return vocabulary

    def forget(self) -> None:
        """Clear the cache; after a new enrolment, other runs may have the same names."""
        self._tasks.clear()
        self._vocabularies.clear()


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
        """Return whether the current examples fit a run that the earlier examples did not fit."""
        before, admit = len(self._unfit), self._device.admit
        self._unfit = {id: run for id, run in self._unfit.items() if not admit(run, all_rows).rows}
        return len(self._unfit) < before

    async def work(self, assignment: Assignment, all_rows: Sequence[Example]) -> Turn:
        """Do one assignment and send its update, or decline it.

        Raises:
            Paused: The client was stopped while it waited for `only_when` to become true.
        """
        session, journal = self._device.session, self._journal(assignment)
        self._device.events.emit("assigned", **facts_of(assignment))
        renew = partial(session.call, session.transport.renew, assignment.assignment_id)
        run: RunTask | None = None
        async with Deadline(assignment.deadline_s, renew) as deadline:
            try:
                unsent = journal.unsent
                if unsent is None:
                    run = await self._checked_run(assignment, all_rows)
                    unsent = await deadline.bounded(self._done(run, assignment, all_rows))
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
            (_log.info if fit.reason is None else _log.warning)(f"rows that fit run {fit}")
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
        """Send an update. If it was sent before, the server gives the same answer again."""
        session, facts = self._device.session, facts_of(unsent)
        try:
            await session.call(session.transport.update, unsent.assignment_id, unsent.update)
        except (errors.ProblemError, errors.RefusedBetween) as exc:
            # Declined, because the next claim would otherwise return the same assignment.
            return await self._failed(unsent, exc)
        self._journal(unsent).delete(accepted=unsent)
        _log.info("updated", **facts)
        self._device.events.emit("updated", **facts)
        return Turn(outcome="worked", **facts)

    async def _failed(
        self, work: Assignment | Unsent, failure: Exception, *, private: bool = False
    ) -> Turn:
        """Decline failed work; raise if it can resume, or if the credential is refused."""
        try:
            if _is_kept(failure):
                raise failure
            return await self._decline(work, failure, private=private)
        except errors.ProblemError as refusal:
            if errors.is_retryable(refusal) or refusal.code == "unauthorized":
                raise
            return self._refused(work, refusal)

    def _refused(self, work: Assignment | Unsent, refusal: errors.ProblemError) -> Turn:
        """Delete work that the server has ended; keep the work of a paused run."""
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
        """Decline an assignment; a `private` reason, which may depend on rows, is not sent."""
        facts, session, journal = facts_of(work), self._device.session, self._journal(work)
        log = _log.bind(run_id=work.run_id, round=work.round)
        if not isinstance(failure, errors.FedOneError):
            # A bug, perhaps in the app's model. Raising it would end the client, which would fail
            # again on the same work after each restart.
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
    """Return whether work must not be declined: it can resume, or the server has ended it."""
    if not isinstance(failure, errors.ProblemError):
        is_kept = isinstance(failure, (errors.MessageError, Paused, errors.TransportError))
        return is_kept and not isinstance(failure, errors.RefusedBetween)
    if failure.code == "backend_unavailable" and retry_after_s(failure) <= MAX_CALL_WAIT_S:
        return False  # The call was already retried several times, so the outage may be long.
    return errors.is_retryable(failure) or failure.code in _NOT_DECLINED
