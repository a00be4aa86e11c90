"""One assignment of a device: what it works with, and the steps of the assignment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.budget import Usage
from fedone_sdk.client.consent import Admitted, Consent
from fedone_sdk.client.examples import Declining, Minibatch, Unfit, reason_of
from fedone_sdk.client.journal import Journal, Row, Unsent, prompt_key
from fedone_sdk.client.options import EventSink, Hooks, RunFit
from fedone_sdk.client.privacy import PrivacyAccount
from fedone_sdk.client.session import Condition, Lease, Session
from fedone_sdk.client.state import DeviceState
from fedone_sdk.errors import BackendError, BudgetError, MessageError, ProblemError, SpecError
from fedone_sdk.losses import example_loss
from fedone_sdk.messages import (
    MAX_LOSS,
    MIN_SCORED_SHARE,
    AlphaAssignment,
    LossesAssignment,
    Proposal,
    RunTask,
    Tensor,
)
from fedone_sdk.scores import graded
from fedone_sdk.task import Example, LogProbs, Score, TaskSpec, form_of
from fedone_sdk.vocabulary import Vocabulary

if TYPE_CHECKING:
    from fedone_sdk.budget import BudgetGuard

Assigned = AlphaAssignment | LossesAssignment

_MAX_RUNS = 8
"""Runs in the cache, which is cleared when it is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What an edge client works with.

    Attributes:
        backend: Its own model; None scores through the gateway.
        reflect: As in `WorkPolicy`.
        budget: Its own budget.
        privacy: What it requires of runs, and its count of noise.
        logs_fit: Whether it logs how its rows fit each run.
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
        """Check that the device can work for a run.

        Raises:
            Unfit: It cannot.
        """
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
    """Tasks and candidates of the runs that a device works for, fetched again when they grow.

    Their label words are checked against the device's own model.

    Attributes:
        num_proposals: Number of candidates that the device has proposed to each run.
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
        """Return a run's task, with at least this version of its candidates.

        Raises:
            Unfit: The run scores with another model than the device's, or cannot be understood.
        """
        known = self._tasks.get(run_id)
        if known is not None and known.vocabulary_version >= version:
            return known
        try:
            run = await self._session.call(self._session.transport.task, run_id)
        except MessageError as exc:
            # For instance of a newer version, with a method that this one does not have. Keeping
            # the seat until its deadline would delay the run.
            raise Unfit(f"the run cannot be understood: {exc}") from exc
        if self._backend is not None:
            if not run.task.slots:  # A slot may hold the beginning of the answer: `vocabulary`.
                await self._backend.check(run.task.label_words, form_of(run.task))
            own = self._backend.fingerprint
            if run.model not in (None, own):
                raise Unfit(f"the run scores with {run.model!r}, the device with {own!r}")
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


@dataclass(kw_only=True)
class Job:
    """One assignment of a device, under its lease.

    Attributes:
        rows: The rows that take part.
        held: All rows of the device.
    """

    device: Device
    runs: KnownRuns
    run: RunTask
    assignment: Assigned
    rows: Sequence[Example]
    held: Sequence[Example]
    lease: Lease
    _num_scored: int = 0

    @cached_property
    def journal(self) -> Journal:
        """What the device keeps of the assignment."""
        return Journal(self.device.state, self.assignment.assignment_id)

    @property
    def num_prompts(self) -> int:
        """Number of prompts to score, over all local steps."""
        if isinstance(self.assignment, AlphaAssignment):
            return sum(step.num_samples for step in self.assignment.steps)
        return self.assignment.prompts.shape[0]

    async def vocabulary(self) -> Vocabulary:
        """Return the run's candidates."""
        given = self.assignment
        return await self.runs.vocabulary(given.run_id, given.vocabulary_version)

    async def ready(self) -> None:
        """Wait until a query may be sent.

        Raises:
            Declining: The lease ends before the app's condition holds.
            Paused: The client stops.
        """
        await self.device.condition.wait(self.lease)

    def report(self, num_scored: int) -> None:
        """Report to the app that further prompts have their losses."""
        self._num_scored += num_scored
        if num_scored:
            done, total = self._num_scored, self.num_prompts
            facts = facts_of(self.assignment)
            self.device.events.emit("scored", done=done, total=total, **facts)

    def release(
        self, keys: Sequence[str], draw: Callable[[], Sequence[float]]
    ) -> tuple[float, ...]:
        """Return numbers with noise, which the device's requirements allow and count."""
        account, privacy = self.device.privacy, self.run.privacy
        if account is None or privacy is None:
            return self.journal.release(keys, draw)
        return self.journal.release(keys, draw, partial(account.charge, privacy))


def facts_of(work: Assigned | Unsent) -> dict[str, Any]:
    """Return the names of an assignment, for events and logs."""
    return {"run_id": work.run_id, "assignment_id": work.assignment_id, "round": work.round}


Answers = tuple[LogProbs | Score | float | None, ...]
"""A model's answers to one prompt, per example: label log-probabilities, the score of a written
text, or of one from an earlier life of the process its loss; None if the model failed."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One local step: prompts to score on one mini-batch.

    Attributes:
        number: Index of the step in the work, from 0.
        prompts: Shape (P, n), candidate indices.
        biases: The label bias of each prompt, shape (P, C); None without label calibration.
        proposal: A text for the run's proposed slot, in place of the prompts' candidates.
    """

    job: Job
    number: int
    batch: Minibatch
    prompts: Tensor
    biases: Tensor | None = None
    proposal: Proposal | None = None
    _answered: dict[str, tuple[Answers, str]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The prompts' keys in the journal."""
        digest = self.batch.sha256
        if self.proposal is not None:
            digest = f"{digest} {self.proposal.text}"
        return tuple(
            prompt_key(self.number, position, row, digest)
            for position, row in enumerate(self.prompts.rows())
        )

    def answered(self, place: int) -> tuple[Answers, str] | None:
        """Return the answers to a prompt and the fingerprint of their model; None before."""
        key = self.keys[place]
        return self._answered.get(key) or self.job.journal.row(key)

    @property
    def missing(self) -> list[int]:
        """The positions of the prompts without answers."""
        return [place for place in range(len(self.keys)) if self.answered(place) is None]

    async def keep(
        self,
        answers: Iterable[tuple[Iterable[int], Sequence[LogProbs | str | None]]],
        model: str,
        spent: Usage | None = None,
    ) -> None:
        """Add the model's answers to the journal, the losses of written texts instead of these.

        Args:
            answers: The positions of equal prompts, and the model's answer to them per example;
                None for an example that failed.
            model: Fingerprint of the model.
            spent: What the step has cost the device so far.

        Raises:
            Declining: The user's score function is broken.
        """
        rows: dict[str, Row] = {}
        for places, given in answers:
            scored = await self._graded(given)
            row = tuple(1.0 - one.value if isinstance(one, Score) else one for one in scored)
            for key in map(self.keys.__getitem__, places):
                self._answered[key] = scored, model
                rows[key] = row
        self.job.journal.keep(rows, model, None if spent is None else (self.number, spent))
        if self.proposal is None:
            self.job.report(len(rows))

    def losses(self, place: int) -> list[float | None]:
        """Return the loss of a scored prompt on each example, at its bias; None if it failed."""
        task, (answers, _) = self.task_at(place), self.answered(place) or ((), "")
        return [
            answer
            if answer is None or isinstance(answer, float)
            # Bounded, because a hostile gateway's numbers can be huge for one label only.
            else min(max(example_loss(task, answer, example), -MAX_LOSS), MAX_LOSS)
            for answer, example in zip(answers, self.batch.examples, strict=True)
        ]

    def task_at(self, place: int) -> TaskSpec:
        """Return the task with the label bias of a prompt."""
        task = self.job.run.task
        return task if self.biases is None else task.with_bias(self.biases.rows()[place])

    async def _graded(
        self, answers: Sequence[LogProbs | str | None]
    ) -> tuple[LogProbs | Score | None, ...]:
        most = 1.0 if self.batch.private else 1.0 - MIN_SCORED_SHARE
        task, score = self.job.run.task, self.job.device.hooks.score
        try:
            scored = await graded(task, answers, self.batch.examples, score, most_failed=most)
        except (BackendError, BudgetError, ProblemError) as exc:  # Of a model that scores.
            raise Declining(reason_of(exc)) from exc
        except SpecError as exc:
            cause = exc.__cause__
            # Neither a text nor a value leaves the device: they may quote private data.
            raise Declining(
                "task.score: the score function returned a value outside [0, 1]"
                if cause is None
                else f"task.score: the score function failed with {type(cause).__name__}",
                shown=exc.problems[0],
            ) from exc
        return tuple(tuple(one) if isinstance(one, Sequence) else one for one in scored)
