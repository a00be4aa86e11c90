"""The parts of an edge client (model, budget, hooks, state), and its cache of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.budget import Usage
from fedone_sdk.client.noise import PrivacyAccount
from fedone_sdk.client.options import EventSink, Hooks, RunFit
from fedone_sdk.client.rows import Admitted, Consent, Declining, Unfit
from fedone_sdk.client.session import Condition, Session
from fedone_sdk.client.state import DeviceState
from fedone_sdk.errors import MessageError
from fedone_sdk.messages import RunTask
from fedone_sdk.task import Example, form_of
from fedone_sdk.vocabulary import Vocabulary

if TYPE_CHECKING:
    from fedone_sdk.budget import BudgetGuard

_MAX_RUNS = 8
"""Number of runs at which the cache is cleared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The parts of an edge client.

    Attributes:
        backend: The device's own model; None scores through the gateway.
        reflect: As in `WorkPolicy`.
        privacy: What the device requires of runs, and the epsilon that it has spent.
        logs_fit: Whether to log how the rows fit each new run.
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
                "loss score needs a score function, and this client has none: Hooks(score=...), or "
                "fedone client --run RUN.yaml"
            )

    def admit(self, run: RunTask, rows: Sequence[Example]) -> Admitted:
        """Return the rows that take part in a run."""
        return self.consent.admit(run, rows, gateway=self.backend is None)

    def shown(self, usage: Usage) -> Usage:
        """Return the usage that the server may see."""
        return usage if self.privacy is None else self.privacy.shown(usage)


class KnownRuns:
    """Cache of the tasks and candidates of a device's runs.

    New label words are checked against the device's own model.

    Attributes:
        num_proposals: Per run, the number of candidates that the device has proposed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._session, self._backend = device.session, device.backend
        self._tasks: dict[str, RunTask] = {}
        self._vocabularies: dict[str, tuple[int, Vocabulary]] = {}
        self.num_proposals = Counter[str]()

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._tasks

    async def task(self, run_id: str, version: int = 0) -> RunTask:
        """Return a run's task, with at least this version of its candidates."""
        known = self._tasks.get(run_id)
        if known is not None and known.vocabulary_version >= version:
            return known
        try:
            run = await self._session.call(self._session.transport.task, run_id)
        except MessageError as exc:
            # The server may be newer and use a method that this version does not know.
            raise Unfit(f"the run cannot be understood: {exc}") from exc
        if self._backend is not None:
            if not run.task.slots:  # A slot may start the answer; `vocabulary` checks its words.
                await self._backend.check(run.task.label_words, form_of(run.task))
            fingerprint = self._backend.fingerprint
            if run.model not in (None, fingerprint):
                raise Unfit(f"the run scores with {run.model!r}, the device with {fingerprint!r}")
        if len(self._tasks) >= _MAX_RUNS:
            self.forget()
        self._tasks[run_id] = run
        return run

    async def fit(self, run_id: str, rows: Sequence[Example]) -> RunFit:
        """Return how the device with these rows fits a run."""
        try:
            run = await self.task(run_id)
            self._device.check(run)
        except Unfit as exc:
            return RunFit(run_id=run_id, rows=len(rows), fit=0, reason=exc.reason)
        admitted = self._device.admit(run, rows)
        fit = len(admitted.rows)
        return RunFit(run_id=run_id, rows=len(rows), fit=fit, reason=admitted.reason)

    async def vocabulary(self, run_id: str, version: int = 0) -> Vocabulary:
        """Return a run's candidates, in at least this version."""
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
            self.forget()  # Candidates may have been added between the two answers.
            raise Declining("the vocabulary does not fit its run")
        if self._backend is not None:
            for words, form in checks:
                await self._backend.check(words, form)
        self._vocabularies[run_id] = run.vocabulary_version, vocabulary
        return vocabulary

    def forget(self) -> None:
        """Clear the cache: a new identity may see other runs with the same names."""
        self._tasks.clear()
        self._vocabularies.clear()
