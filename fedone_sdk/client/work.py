"""The computation of one assignment, from its mini-batches to the update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import structlog
from pydantic import ValidationError

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.client.examples import Declining, Minibatch, reason_of
from fedone_sdk.client.journal import Journal, Row, prompt_key
from fedone_sdk.client.noise import private_losses, private_terms
from fedone_sdk.client.options import Hooks
from fedone_sdk.client.session import Session
from fedone_sdk.client.state import Precision
from fedone_sdk.data.splitmix import draw_minibatch
from fedone_sdk.errors import (
    BackendError,
    BudgetError,
    ProblemError,
    SpecError,
    needs_extra,
    one_line,
)
from fedone_sdk.losses import class_means, example_loss, loss_terms, num_groups
from fedone_sdk.messages import (
    MAX_LOSS,
    MIN_SCORED_SHARE,
    AlphaAssignment,
    AlphaUpdate,
    LossesAssignment,
    LossesUpdate,
    Proposal,
    RunTask,
    Scored,
    Scores,
    Tensor,
    first_error,
)
from fedone_sdk.messages import Score as ScoreRequest
from fedone_sdk.scores import graded
from fedone_sdk.spec.sections import PrivacySpec
from fedone_sdk.task import MAX_BIAS, Example, LogProbs, Score, ScoreFunction, TaskSpec, target_of
from fedone_sdk.vocabulary import Layout, are_prompts

_log = structlog.get_logger(__name__)


_PAIRS = 512
"""(prompt, example) pairs of one request to the gateway. A device that dies repeats one request at
most; smaller requests cost more traffic, because each contains the texts."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One local step: prompts to score on one mini-batch.

    Attributes:
        number: Index of the step in the work, from 0.
        prompts: Shape (P, n), candidate indices.
        on_scored: Called with the number of further prompts that have their losses.
        biases: The label bias of each prompt, shape (P, C); None without label calibration.
        proposal: A text for the run's proposed slot, in place of the prompts' candidates.
        scores: Scores of written answers by the prompts' keys, which this process got.
    """

    number: int
    task: TaskSpec
    batch: Minibatch
    prompts: Tensor
    journal: Journal
    on_scored: Callable[[int], None]
    score: ScoreFunction | None = None
    biases: Tensor | None = None
    proposal: Proposal | None = None
    scores: dict[str, Sequence[LogProbs | Score | None]] = field(default_factory=dict)

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

    async def keep(
        self,
        rows: Iterable[tuple[Sequence[str], Sequence[LogProbs | str | None]]],
        model: str,
        spent: Usage | None = None,
    ) -> None:
        """Add the model's answers to the journal, the losses of written texts instead of these.

        Args:
            rows: The keys of equal prompts, and the model's answer to them per example; None for
                an example that failed.
            model: Fingerprint of the model.
            spent: What the step has cost the device so far.

        Raises:
            Declining: The user's score function is broken.
        """
        found: dict[str, Row] = {}
        for keys, answers in rows:
            scored = await self._graded(answers)
            if self.task.max_written:
                self.scores.update(dict.fromkeys(keys, scored))
            row = tuple(
                1.0 - one.value if isinstance(one, Score) else one and tuple(one) for one in scored
            )
            found |= dict.fromkeys(keys, row)
        self.journal.keep(found, model, None if spent is None else (self.number, spent))
        self.on_scored(len(found))

    def losses(self, row: Row, kept: Sequence[int]) -> list[float]:
        """Return the losses of a prompt on some examples, which the model has answered."""
        found = ((row[index], self.batch.examples[index]) for index in kept)
        return [
            one if isinstance(one, float) else _bounded(example_loss(self.task, one, example))
            for one, example in found
            if one is not None
        ]

    def answers(self, place: int) -> Sequence[LogProbs | float | Score | None]:
        """Return the answers to a scored prompt; of written ones that are lost, the losses."""
        key = self.keys[place]
        return self.scores.get(key) or (self.journal.row(key) or ((), ""))[0]

    def example_losses(self, place: int) -> list[float | None]:
        """Return the loss of a scored prompt on each example, at its bias; None if it failed."""
        row, _ = self.journal.row(self.keys[place]) or ((), "")
        task = self.task_at(place)
        return [
            one
            if one is None or isinstance(one, float)
            else _bounded(example_loss(task, one, example))
            for one, example in zip(row, self.batch.examples, strict=True)
        ]

    def task_at(self, place: int) -> TaskSpec:
        """Return the task with the label bias of a prompt."""
        return self.task if self.biases is None else self.task.with_bias(self.biases.rows()[place])

    async def _graded(
        self, answers: Sequence[LogProbs | str | None]
    ) -> Sequence[LogProbs | Score | None]:
        most = 1.0 if self.batch.private else 1.0 - MIN_SCORED_SHARE
        try:
            return await graded(
                self.task, answers, self.batch.examples, self.score, most_failed=most
            )
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


def _bounded(loss: float) -> float:
    """Bound a loss: a hostile gateway's numbers can be huge for one label only."""
    return min(max(loss, -MAX_LOSS), MAX_LOSS)


Propose = Callable[[Step, LossesUpdate], Awaitable[Proposal | None]]
"""Writes a candidate from a scored step and scores it; None if it is not better."""

Ask = Callable[[Step, Sequence[int]], Awaitable[None]]
"""Scores the prompts of a step at these positions; the journal gets the losses as they arrive. It
raises `Declining` if the model failed."""


async def score_step(
    step: Step,
    ask: Ask,
    privacy: PrivacySpec | None = None,
    *,
    num_examples: int,
    charge: Callable[[], Precision | None] = lambda: None,
) -> LossesUpdate:
    """Return the losses of a step's prompts, and score those that the journal does not have.

    Raises:
        Declining: The model failed on too many examples, the score function did, or noise cannot
            be kept.
        SpecError: The backend cannot answer what the task's loss needs.
    """
    keys = step.keys
    missing = [place for place, key in enumerate(keys) if step.journal.row(key) is None]
    step.on_scored(len(keys) - len(missing))
    if missing:
        await ask(step, missing)
    found = [row for row in map(step.journal.row, keys) if row is not None]
    models = {model for _, model in found}
    if len(models) != 1:
        raise Declining("the model changed during the work")
    rows = [row for row, _ in found]
    # An example counts for all prompts or for none, so that all are compared on the same ones.
    failed = frozenset(index for row in rows for index, one in enumerate(row) if one is None)
    kept = [index for index in range(len(step.batch.examples)) if index not in failed]
    counts = step.batch.check(failed)
    noised = privacy if privacy is not None and privacy.target == "losses" else None

    def released(draw: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        return step.journal.release(keys, draw, charge)

    more: dict[str, Any] = {}
    if step.biases is not None:
        values, more = _by_class(step, rows, kept, counts.scored, noised, released)
    else:
        by_row = {row: step.losses(row, kept) for row in dict.fromkeys(rows)}
        losses = [by_row[row] for row in rows]
        if noised is not None:
            # An example without a loss counts as 0 for all prompts, so that neither the noise nor a
            # count depends on what became of it.
            losses = [row + [0.0] * (counts.scored - len(row)) for row in losses]
            values = released(partial(private_losses, losses, noised))
        else:
            values = tuple(math.fsum(row) / len(row) for row in losses)
    return LossesUpdate(
        num_examples=num_examples,
        scored=counts,
        usage=step.journal.spent(step.number),
        model=models.pop(),
        losses=values,
        **more,
    )


def _by_class(
    step: Step,
    rows: Sequence[Row],
    kept: Sequence[int],
    scored: int,
    privacy: PrivacySpec | None,
    released: Callable[[Callable[[], tuple[float, ...]]], tuple[float, ...]],
) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the mean losses, and the part of the update for label biases."""
    assert step.biases is not None
    targets = [int(target_of(step.task, step.batch.examples[index])) for index in kept]
    terms = []
    for row, bias in zip(rows, step.biases.rows(), strict=True):
        task, answers = step.task.with_bias(bias), [row[index] for index in kept]
        pairs = zip(answers, targets, strict=True)
        terms.append(
            [loss_terms(task, one, label) for one, label in pairs if isinstance(one, tuple)]
        )
    labels = len(step.task.labels)
    groups = num_groups(labels, private=privacy is not None)
    if privacy is not None:
        # An example without a loss counts as 0, as without a label bias.
        missing = scored - len(targets)
        terms = [[*own, *[[0.0] * (2 + labels)] * missing] for own in terms]
        targets += [-1] * missing
        numbers = released(partial(private_terms, terms, targets, privacy))
        values, rest = numbers[: len(rows)], iter(numbers[len(rows) :])
        # The largest trace stands for an unknown one.
        means = [[[loss, 1.0, *itertools.islice(rest, labels)]] for loss in values]
        counts = tuple(rest)
    else:
        values = tuple(math.fsum(term[0] for term in own) / len(own) for own in terms)
        means = [class_means(own, targets, groups) for own in terms]
        counts = tuple(float(targets.count(label)) for label in range(labels))
    flat = itertools.chain.from_iterable(itertools.chain.from_iterable(means))
    by_class = Tensor.pack(flat, (len(rows), groups, 2 + labels), "float32")
    return values, {"by_class": by_class, "class_counts": counts}


class GatewayOracle:
    """Scores prompts through the aggregator's gateway, each request after `ready`.

    Args:
        assignment_id: The assignment whose lease pays.
        known: Whether the server has drawn the prompts, so that requests can omit them.
    """

    def __init__(
        self,
        assignment_id: str,
        session: Session,
        *,
        ready: Callable[[], Awaitable[None]],
        known: bool,
    ) -> None:
        self._assignment_id = assignment_id
        self._session = session
        self._ready = ready
        self._known = known

    async def ask(self, step: Step, missing: Sequence[int]) -> None:
        """Score the parts that contain these prompts.

        The parts do not depend on `missing`: a part that is sent again after a restart is the same
        request, which the server counts once.

        Raises:
            Declining: The score function is broken, or no message can carry the step.
        """
        keys, wanted = step.keys, set(missing)
        count, length = step.prompts.shape
        parts = cuts(count, len(step.batch.texts))
        size = len(step.prompts.to_bytes()) // max(count, 1)
        for part in parts:
            if wanted.isdisjoint(part):
                continue
            await self._ready()
            raw = step.prompts.to_bytes()[part.start * size : part.stop * size]
            prompts = Tensor.from_bytes(raw, (len(part), length), step.prompts.dtype)
            omitted = step.proposal is not None or (self._known and len(parts) == 1)
            request = self._request(step, None if omitted else prompts)
            scores = await self._session.call(self._session.transport.score, request)
            num_values = max(len(step.task.labels), 1)
            answers = _answers(scores, len(part), len(step.batch.texts), num_values)
            fresh = [
                ([keys[place]], row)
                for place, row in zip(part, answers, strict=True)
                if place in wanted
            ]
            await step.keep(fresh, scores.model)

    def _request(self, step: Step, prompts: Tensor | None) -> ScoreRequest:
        try:
            return ScoreRequest(
                assignment_id=self._assignment_id,
                prompts=prompts,
                examples=step.batch.texts,
                references=step.batch.references,
                proposal=step.proposal,
            )
        except ValidationError as exc:
            # Not chained: the cause quotes private text.
            raise Declining(f"the step cannot be sent: {first_error(exc)}") from None


def cuts(num_prompts: int, num_examples: int) -> list[range]:
    """Return the requests to the gateway of a step: equal parts of its prompts."""
    num_parts = -(-num_prompts * num_examples // _PAIRS)
    num_parts = min(max(num_parts, 1), num_prompts)
    bounds = [num_prompts * part // num_parts for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _answers(
    scores: Scores, num_prompts: int, num_examples: int, num_values: int
) -> list[list[LogProbs | str | None]]:
    """Return the model's answer per prompt and example; None if it failed.

    Raises:
        Declining: The answer does not fit the request.
    """
    rows: list[list[LogProbs | str | None]] = [list(row) for row in scores.texts]
    shape = (num_prompts, num_examples, num_values)
    if scores.log_probs is not None:
        rows = scores.log_probs.rows() if scores.log_probs.shape == shape else []
    if len(rows) != num_prompts or any(len(row) != num_examples for row in rows):
        raise Declining("the server's answer does not fit what was asked")
    for prompt, example in scores.failed:
        if 0 <= prompt < num_prompts and 0 <= example < num_examples:
            rows[prompt][example] = None
    return rows


Assigned = AlphaAssignment | LossesAssignment


@contextmanager
def _declining(what: str) -> Iterator[None]:
    """Turn errors of a method or a message into a decline."""
    try:
        yield
    except (BackendError, ValueError) as exc:
        _log.warning("work failed", what=what, reason=str(exc))
        reason = reason_of(exc) if isinstance(exc, BackendError) else str(exc)
        raise Declining(f"{what}: {one_line(reason)}"[:500]) from exc


@dataclass(slots=True, kw_only=True)
class Work:
    """One assignment of a device.

    Attributes:
        memory: The method's memory on this device; after the work, the one to keep.
        charge: Checks that noise is allowed, and returns what counts it.
        on_scored: Called with the number of prompts that have their losses, and of all.
        propose: Writes a candidate from a scored step; None for a device that proposes nothing.
    """

    run: RunTask
    assignment: Assigned
    examples: Sequence[Example]
    journal: Journal
    ask: Ask
    hooks: Hooks
    memory: bytes
    charge: Callable[[], Precision | None]
    on_scored: Callable[[int, int], None]
    propose: Propose | None = None
    _num_scored: int = 0

    @property
    def num_prompts(self) -> int:
        """Number of prompts to score, over all local steps."""
        if isinstance(self.assignment, AlphaAssignment):
            return sum(step.num_samples for step in self.assignment.steps)
        return self.assignment.prompts.shape[0]

    def check(self) -> None:
        """Check that the assignment fits the run; the server is not trusted.

        Raises:
            Declining: It does not.
        """
        run, assignment = self.run, self.assignment
        if isinstance(assignment, AlphaAssignment):
            alpha = assignment.alpha
            fits = (
                alpha.shape == (run.prompt_len, run.vocab_size)
                and alpha.dtype == "float32"
                # The server runs searches, and a message loads no code.
                and run.method.exchange == "alpha"
            )
        else:
            prompts = assignment.prompts
            fits = (
                not prompts.dtype.startswith("float")
                and len(prompts.shape) == 2
                and prompts.shape[1] == run.prompt_len
                and math.prod(prompts.shape) > 0
                and are_prompts(prompts.rows(), self._layout)
            )
        if not fits:
            raise Declining("the assignment does not fit its run")
        if self.num_prompts > assignment.leased_queries:
            raise Declining(
                f"the assignment names {self.num_prompts} prompts, and leases "
                f"{assignment.leased_queries} queries"
            )
        if self._noises_alpha and isinstance(assignment, LossesAssignment):
            raise Declining("the run's privacy does not fit its exchange")  # no loss has noise
        biases = assignment.biases if isinstance(assignment, LossesAssignment) else None
        if (run.calibration.kind == "labels") != (biases is not None):
            raise Declining("the assignment does not fit its run")
        if biases is not None and not self._fits(biases):
            raise Declining("the run's calibration does not fit its task")

    def _fits(self, biases: Tensor) -> bool:
        """Return whether label biases fit the task and the prompts."""
        task, shape = self.run.task, (self.num_prompts, len(self.run.task.labels))
        return (
            task.loss == "cross_entropy"
            and (biases.dtype, biases.shape) == ("float32", shape)
            and all(abs(value) <= MAX_BIAS for value in biases.values())
        )

    @property
    def _layout(self) -> Layout:
        run = self.run
        return run.layout or ((run.prompt_len, run.vocab_size, run.blank),)

    async def update(self) -> AlphaUpdate | LossesUpdate:
        """Do the work; return its update.

        Raises:
            Declining: The work cannot be done well enough.
            MissingExtraError: The alpha exchange without NumPy.
        """
        self.check()
        if isinstance(self.assignment, LossesAssignment):
            self.memory = b""  # the memory is the server's
            given = self.assignment
            step = await self._step(0, given.minibatch_seed, given.prompts, given.biases)
            update = await self._score(step)
            if not given.reflect or self.propose is None or self.run.privacy is not None:
                return update
            proposal = await self.propose(step, update)
            usage = self.journal.usage  # With the trial.
            return update.model_copy(update={"proposal": proposal, "usage": usage})
        return await self._alpha_update(self.assignment)

    async def _alpha_update(self, assignment: AlphaAssignment) -> AlphaUpdate:
        with needs_extra("the alpha exchange", "alpha"):
            import numpy as np

            from fedone_sdk.algorithms import (
                State,
                dump_memory,
                load_memory,
                method_from_spec,
                stream,
            )
            from fedone_sdk.algorithms.method import clip_losses
            from fedone_sdk.algorithms.space import Space
            from fedone_sdk.client.noise import private_step
            from fedone_sdk.messages.tensor import from_wire, prompts_to_wire, to_wire
        run = self.run
        before = from_wire(assignment.alpha)
        with _declining("the assignment does not fit its run"):
            method = method_from_spec(
                run.method,
                prompt_len=run.prompt_len,
                vocab_size=run.vocab_size,
                blank=run.blank,
                space=Space.of(run.layout) if run.layout else None,
            )
            state = State(alpha=before)
            method.check(state)
        if self.memory:
            try:
                own = state.evolve(memory=load_memory(self.memory))
                method.check(own)
                state = own
            except (ValueError, KeyError) as exc:
                _log.warning("unfit method memory ignored", error=str(exc))
        usage, scored = NOTHING, Scored(scored=0)
        values: list[float] = []
        for number, step in enumerate(assignment.steps):
            with _declining("no prompts can be drawn"):
                candidates = method.ask(state, stream(step.prompt_seed), step.num_samples)
            prompts = prompts_to_wire(candidates.prompts, run.vocab_size)
            scores = await self._score(await self._step(number, step.minibatch_seed, prompts))
            usage += scores.usage
            with _declining("the method cannot use the losses"):
                clipped = clip_losses(np.array(scores.losses), run.loss_clip)
                state = method.tell(state, candidates, clipped)
            scored += scores.scored
            values.extend(scores.losses)
        alpha, mean_loss = state.alpha, sum(values) / len(values)
        if run.privacy is not None and self._noises_alpha:
            draw = partial(private_step, before, alpha, run.privacy)
            noised = self.journal.release(("alpha",), lambda: draw().ravel().tolist(), self.charge)
            alpha = method.project(np.array(noised).reshape(alpha.shape))
            mean_loss = 0.0  # the mean of the losses would be a release without noise
        self.memory = dump_memory(state.memory) if state.memory else b""
        return AlphaUpdate(
            num_examples=self._num_examples,
            scored=scored,
            usage=usage,
            model=scores.model,
            alpha=to_wire(alpha),
            mean_loss=mean_loss,
        )

    @property
    def _noises_alpha(self) -> bool:
        """Whether noise is added to the step of alpha only."""
        return self.run.privacy is not None and self.run.privacy.target == "alpha"

    @property
    def _num_examples(self) -> int:
        """The device's weight; private devices have the same."""
        return len(self.examples) if self.run.privacy is None else 1

    async def _step(
        self, number: int, minibatch_seed: int, prompts: Tensor, biases: Tensor | None = None
    ) -> Step:
        task = self.run.task
        drawn = draw_minibatch(len(self.examples), self.run.method.batch_size, minibatch_seed)
        examples = [self.examples[index] for index in drawn]
        return Step(
            number=number,
            task=task,
            batch=await Minibatch.of(
                task, examples, self.hooks.before_send, private=self.run.privacy is not None
            ),
            prompts=prompts,
            journal=self.journal,
            on_scored=self._scored,
            score=self.hooks.score,
            biases=biases,
        )

    async def _score(self, step: Step) -> LossesUpdate:
        return await score_step(
            step, self.ask, self.run.privacy, num_examples=self._num_examples, charge=self.charge
        )

    def _scored(self, count: int) -> None:
        self._num_scored += count
        if count:
            self.on_scored(self._num_scored, self.num_prompts)
