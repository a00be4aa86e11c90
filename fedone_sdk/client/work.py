"""One assignment of a device, from its mini-batches to the update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import structlog
from pydantic import ValidationError

from fedone_sdk import errors, messages
from fedone_sdk.budget import NOTHING, Lease, Usage
from fedone_sdk.client.noise import private_losses, private_terms
from fedone_sdk.client.rows import Declining, Minibatch, reason_of
from fedone_sdk.client.state import Journal, Row, Unsent, key_of, memory_of
from fedone_sdk.data.draws import draw_minibatch
from fedone_sdk.errors import BackendError, BudgetError, ProblemError, SpecError
from fedone_sdk.losses import class_means, example_loss, loss_terms, num_groups
from fedone_sdk.messages import Tensor
from fedone_sdk.scores import graded
from fedone_sdk.spec.sections import PrivacySpec
from fedone_sdk.task import MAX_BIAS, Example, LogProbs, Score, TaskSpec, target_of
from fedone_sdk.vocabulary import Vocabulary, are_prompts

if TYPE_CHECKING:
    from fedone_sdk.algorithms import State
    from fedone_sdk.algorithms.method import Algorithm
    from fedone_sdk.client.device import Device, KnownRuns

_log = structlog.get_logger(__name__)

_PAIRS = 512
"""Number of (prompt, example) pairs of one request to the gateway. A device that is restarted
repeats at most one request. Smaller requests cost more traffic, because each contains the texts."""

Answers = tuple[LogProbs | Score | float | None, ...]
"""A model's answers to one prompt, one for each example: label log-probabilities, or the score of a
written text (after a restart, its loss). None for an example on which the model failed."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One local step: prompts to score on one mini-batch.

    Attributes:
        number: Index of the step in the assignment, from 0.
        prompts: P prompts of n candidate indices each, shape (P, n).
        biases: The prompts' biases for C labels, shape (P, C); None without label calibration.
        proposal: A new candidate that the step tries in one prompt; None in other steps.
    """

    work: Work
    number: int
    batch: Minibatch
    prompts: Tensor
    biases: Tensor | None = None
    proposal: messages.Proposal | None = None
    _answered: dict[str, tuple[Answers, str]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The prompts' keys in the journal (stored entries), which depend on the mini-batch."""
        step = self.number, self.batch.sha256, self.proposal and self.proposal.text
        return tuple(key_of(*step, *numbered) for numbered in enumerate(self.prompts.rows()))

    def answered(self, place: int) -> tuple[Answers, str] | None:
        """Return the answers to a prompt and their model's fingerprint; None without answers."""
        key = self.keys[place]
        return self._answered.get(key) or self.work.journal.row(key)

    @property
    def missing(self) -> list[int]:
        """The indices of the prompts without answers."""
        return [place for place in range(len(self.keys)) if self.answered(place) is None]

    async def keep(
        self,
        answers: Iterable[tuple[Iterable[int], Sequence[LogProbs | str | None]]],
        model: str,
        spent: Usage | None = None,
    ) -> None:
        """Add the model's answers to the journal; of a written text only its loss is stored.

        Args:
            answers: For each different prompt, its indices in the step (several if the prompt was
                drawn more than once), and its answers, one per example; None if the model failed.
            model: Fingerprint of the model.
            spent: What the step has cost the device so far.

        Raises:
            Declining: The user's score function or the judge's model failed.
        """
        rows: dict[str, Row] = {}
        for places, by_example in answers:
            scored = await self._graded(by_example)
            row = tuple(1.0 - each.value if isinstance(each, Score) else each for each in scored)
            for key in map(self.keys.__getitem__, places):
                self._answered[key] = scored, model
                rows[key] = row
        self.work.journal.keep(rows, model, None if spent is None else (self.number, spent))
        if self.proposal is None:
            self.work.report(len(rows))

    def losses(self, place: int) -> list[float | None]:
        """Return a scored prompt's losses, one for each example; None if the model failed on it."""
        task, (answers, _) = self.task_at(place), self.answered(place) or ((), "")
        losses = list[float | None]()
        for answer, example in zip(answers, self.batch.examples, strict=True):
            if answer is not None and not isinstance(answer, float):
                # Clipped, because a hostile gateway could send a huge number for one label. The
                # mean loss would then show whether an example has that label.
                loss = example_loss(task, answer, example)
                answer = min(max(loss, -messages.MAX_LOSS), messages.MAX_LOSS)
            losses.append(answer)
        return losses

    def task_at(self, place: int) -> TaskSpec:
        """Return the task with the label bias of a prompt."""
        task = self.work.run.task
        return task if self.biases is None else task.with_bias(self.biases.rows()[place])

    async def _graded(
        self, answers: Sequence[LogProbs | str | None]
    ) -> tuple[LogProbs | Score | None, ...]:
        max_share = 1.0 if self.batch.private else 1.0 - messages.MIN_SCORED_SHARE
        task, score = self.work.run.task, self.work.device.hooks.score
        try:
            scored = await graded(task, answers, self.batch.examples, score, most_failed=max_share)
        except (BackendError, BudgetError, ProblemError) as exc:  # Raised by a judge's model.
            raise Declining(reason_of(exc)) from exc
        except SpecError as exc:
            failed = f"failed with {type(exc.__cause__).__name__}"
            what = "returned a value outside [0, 1]" if exc.__cause__ is None else failed
            # Neither a text nor a value leaves the device: they may quote private data.
            reason = f"task.score: the score function {what}"
            raise Declining(reason, shown=exc.problems[0]) from exc
        return tuple(tuple(each) if isinstance(each, Sequence) else each for each in scored)


@dataclass(kw_only=True)
class Work:
    """One assignment of a device.

    Attributes:
        rows: The rows that take part.
        all_rows: All rows of the device.
        memory: The method's state on this device (such as AdamW's moments); `update` changes it.
    """

    device: Device
    runs: KnownRuns
    run: messages.RunTask
    assignment: messages.Assignment
    rows: Sequence[Example]
    all_rows: Sequence[Example]
    memory: bytes = b""
    _num_scored: int = 0

    def __post_init__(self) -> None:
        self.journal = Journal(self.device.state, self.assignment.assignment_id)
        self.memory = memory_of(self.device.state, self.assignment.run_id)

    @property
    def num_prompts(self) -> int:
        """Number of prompts to score, over all local steps."""
        if isinstance(self.assignment, messages.AlphaAssignment):
            return sum(step.num_samples for step in self.assignment.steps)
        return self.assignment.prompts.shape[0]

    async def vocabulary(self) -> Vocabulary:
        """Return the run's candidates."""
        assignment = self.assignment
        return await self.runs.vocabulary(assignment.run_id, assignment.vocabulary_version)

    def report(self, num_scored: int) -> None:
        """Report to the app that more prompts have their losses."""
        self._num_scored += num_scored
        if num_scored:
            facts = {"done": self._num_scored, "total": self.num_prompts}
            self.device.events.emit("scored", **facts, **facts_of(self.assignment))

    def release(
        self, keys: Sequence[str], draw: Callable[[], Sequence[float]]
    ) -> tuple[float, ...]:
        """Return the noised numbers of `draw`; charge them to the device's privacy account."""
        account, privacy = self.device.privacy, self.run.privacy
        charge = None if account is None or privacy is None else partial(account.charge, privacy)
        return self.journal.release(keys, draw, charge)

    def check(self) -> None:
        """Check that the assignment fits the run; the server is not trusted."""
        run, assignment, biases = self.run, self.assignment, None
        shape = run.prompt_len, run.vocab_size
        if isinstance(assignment, messages.AlphaAssignment):
            fits = run.method.exchange == "alpha"  # other methods run on the server
            fits &= (assignment.alpha.dtype, assignment.alpha.shape) == ("float32", shape)
        else:
            prompts, biases = assignment.prompts, assignment.biases
            fits = not prompts.dtype.startswith("float") and len(prompts.shape) == 2
            fits = fits and math.prod(prompts.shape) > 0
            fits = fits and are_prompts(prompts.rows(), run.layout or ((*shape, run.blank),))
        if not fits or (run.calibration.kind == "labels") != (biases is not None):
            raise Declining("the assignment does not fit its run")
        num_prompts, leased = self.num_prompts, assignment.leased_queries
        if num_prompts > leased:
            raise Declining(
                f"the assignment has {num_prompts} prompts, but reserves {leased} queries"
            )
        is_losses = isinstance(assignment, messages.LossesAssignment)
        if is_losses and run.privacy and not self._noise:
            # The run's privacy protects alpha, but this assignment exchanges losses.
            raise Declining("the run's privacy does not fit its exchange")
        if biases is not None:
            form = run.task.loss, biases.dtype, biases.shape
            fits = form == ("cross_entropy", "float32", (num_prompts, len(run.task.labels)))
            if not fits or any(abs(value) > MAX_BIAS for value in biases.values()):
                raise Declining("the run's calibration does not fit its task")

    async def update(self) -> messages.Update:
        """Do the work; return its update.

        Raises:
            BudgetExhausted: The device's budget does not suffice.
            Declining: The assignment is invalid, or the model or the score function failed.
            MissingExtraError: The alpha exchange needs NumPy, which is not installed.
            SpecError: The backend does not support the task's loss.
        """
        self.check()
        assignment = self.assignment
        if isinstance(assignment, messages.AlphaAssignment):
            return await self._alpha_update(assignment)
        self.memory = b""  # In this exchange the server has the method's state.
        seed, prompts = assignment.minibatch_seed, assignment.prompts
        step = await self._step(0, seed, prompts, assignment.biases)
        update = await self._losses_update(step)
        if not assignment.reflect or self.device.reflect is None or self.run.privacy is not None:
            return update
        from fedone_sdk.client.own_model import propose

        proposal = await propose(step, update.losses)
        usage = self.journal.usage  # Includes the queries that tried the proposal.
        return update.model_copy(update={"proposal": proposal, "usage": usage})

    async def _alpha_update(self, assignment: messages.AlphaAssignment) -> messages.AlphaUpdate:
        with errors.needs_extra("the alpha exchange", "alpha"):
            import numpy as np

            from fedone_sdk.algorithms import Space, State, dump_memory, method_from_spec, stream
            from fedone_sdk.algorithms.method import clip_losses
            from fedone_sdk.client.noise import private_step
            from fedone_sdk.messages.tensor import from_wire, prompts_to_wire, to_wire
        run = self.run
        before = from_wire(assignment.alpha)
        with _declining("the assignment does not fit its run"):
            layout = run.layout or [(run.prompt_len, run.vocab_size, run.blank)]
            method = method_from_spec(run.method, Space.of(layout, run.vocab_size))
            state = State(alpha=before)
            method.check(state)
        state = self._with_memory(method, state)
        updates = list[messages.LossesUpdate]()
        for number, step in enumerate(assignment.steps):
            with _declining("no prompts can be drawn"):
                candidates = method.ask(state, stream(step.prompt_seed), step.num_samples)
            prompts = prompts_to_wire(candidates.prompts, run.vocab_size)
            batch = await self._step(number, step.minibatch_seed, prompts)
            updates.append(await self._losses_update(batch))
            with _declining("the method cannot use the losses"):
                clipped = clip_losses(np.array(updates[-1].losses), run.loss_clip)
                state = method.tell(state, candidates, clipped)
        losses = [loss for update in updates for loss in update.losses]
        alpha, mean_loss = state.alpha, sum(losses) / len(losses)
        if run.privacy is not None and run.privacy.target == "alpha":
            draw = partial(private_step, before, alpha, run.privacy)
            noised = self.release(("alpha",), lambda: draw().ravel().tolist())
            alpha = method.project(np.array(noised).reshape(before.shape))
            mean_loss = 0.0  # The real mean loss would have no noise.
        self.memory = dump_memory(state.memory) if state.memory else b""
        return messages.AlphaUpdate(
            num_examples=self._num_examples,
            scored=sum((update.scored for update in updates), messages.Scored(scored=0)),
            usage=sum((update.usage for update in updates), NOTHING),
            model=updates[-1].model,
            alpha=to_wire(alpha),
            mean_loss=mean_loss,
        )

    def _with_memory(self, method: Algorithm, state: State) -> State:
        """Return a state with the method's memory on this device, if it is valid."""
        from fedone_sdk.algorithms import load_memory

        if self.memory:
            try:
                with_memory = state.evolve(memory=load_memory(self.memory))
                method.check(with_memory)
                return with_memory
            except (ValueError, KeyError) as exc:
                _log.warning("the method's stored state is invalid, and ignored", error=str(exc))
        return state

    @property
    def _num_examples(self) -> int:
        """The device's weight in an average over devices; 1 under privacy."""
        return len(self.rows) if self.run.privacy is None else 1

    async def _step(
        self, number: int, seed: int, prompts: Tensor, biases: Tensor | None = None
    ) -> Step:
        run = self.run
        drawn = draw_minibatch(len(self.rows), run.method.batch_size, seed)
        rows, private = [self.rows[index] for index in drawn], run.privacy is not None
        batch = await Minibatch.of(run.task, rows, self.device.hooks.before_send, private=private)
        return Step(work=self, number=number, batch=batch, prompts=prompts, biases=biases)

    async def _losses_update(self, step: Step) -> messages.LossesUpdate:
        """Score the prompts without stored answers, and return the losses of all prompts."""
        missing = step.missing
        self.report(len(step.keys) - len(missing))
        if missing:
            await self.ask(step, missing)
        answered = list(filter(None, map(step.answered, range(len(step.keys)))))
        models = {model for _, model in answered}
        if len(models) != 1:
            raise Declining("the model changed during the work")
        rows = [row for row, _ in answered]
        # An example that failed for one prompt is left out for all, so that losses are comparable.
        failed = frozenset(index for row in rows for index, each in enumerate(row) if each is None)
        kept = [index for index in range(len(step.batch.examples)) if index not in failed]
        counts = step.batch.check(failed)
        reported = self._mean_losses if step.biases is None else self._by_class
        values, more = reported(step, rows, kept, counts.scored)
        return messages.LossesUpdate(
            num_examples=self._num_examples,
            scored=counts,
            usage=self.journal.spent(step.number),
            model=models.pop(),
            losses=values,
            **more,
        )

    @property
    def _noise(self) -> PrivacySpec | None:
        privacy = self.run.privacy
        return privacy if privacy is not None and privacy.target == "losses" else None

    def _mean_losses(
        self, step: Step, rows: Sequence[Answers], kept: Sequence[int], scored: int
    ) -> tuple[tuple[float, ...], dict[str, Any]]:
        places = {row: place for place, row in enumerate(rows)}
        losses = {row: step.losses(place) for row, place in places.items()}
        values = [[losses[row][index] or 0.0 for index in kept] for row in rows]
        if self._noise is None:
            return tuple(math.fsum(each) / len(each) for each in values), {}
        # An unscored example has the loss 0 for all prompts, so that the server cannot tell whether
        # an example was scored.
        values = [each + [0.0] * (scored - len(each)) for each in values]
        return self.release(step.keys, partial(private_losses, values, self._noise)), {}

    def _by_class(
        self, step: Step, rows: Sequence[Answers], kept: Sequence[int], scored: int
    ) -> tuple[tuple[float, ...], dict[str, Any]]:
        """Return the mean losses, and the numbers from which the server fits label biases."""
        task, examples = self.run.task, step.batch.examples
        targets = [int(target_of(task, examples[index])) for index in kept]
        labels, terms = len(task.labels), []
        for place, row in enumerate(rows):
            # In a run with label biases, every answer is label log-probabilities.
            biased, answers = step.task_at(place), cast(Any, [row[index] for index in kept])
            terms.append([loss_terms(biased, *pair) for pair in zip(answers, targets, strict=True)])
        groups = num_groups(labels, private=self._noise is not None)
        if self._noise is not None:
            # The terms of an unscored example are 0, as in `_mean_losses`.
            missing = scored - len(targets)
            terms = [[*by_example, *[[0.0] * (2 + labels)] * missing] for by_example in terms]
            targets += [-1] * missing
            draw = partial(private_terms, terms, targets, self._noise)
            numbers = self.release(step.keys, draw)
            values, rest = numbers[: len(terms)], iter(numbers[len(terms) :])
            # The second number of a group (`LossesUpdate.by_class`) is replaced by its maximum, 1.
            means = [[[loss, 1.0, *itertools.islice(rest, labels)]] for loss in values]
            counts = tuple(rest)
        else:
            values = tuple(math.fsum(loss for loss, *_ in rows) / len(rows) for rows in terms)
            means = [class_means(by_example, targets, groups) for by_example in terms]
            counts = tuple(float(targets.count(label)) for label in range(labels))
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(means))
        by_class = Tensor.pack(flat, (len(terms), groups, 2 + labels), "float32")
        return values, {"by_class": by_class, "class_counts": counts}

    async def ask(self, step: Step, missing: Sequence[int]) -> None:
        """Score the prompts with the indices `missing`; store each answer when it arrives."""
        ask, budget = self._ask_gateway, self.device.budget
        if self.device.backend is not None:
            from fedone_sdk.client.own_model import ask
        worst = Usage(queries=len(missing))
        paid = nullcontext(Lease("", worst)) if budget is None else budget.reserve(worst)
        async with paid as lease:
            lease.release()  # Nothing is charged yet; `ask` adds each query that it sends.
            await ask(step, missing, lease)

    async def _ask_gateway(self, step: Step, missing: Sequence[int], lease: Lease) -> None:
        """Score the prompts with the indices `missing` through the gateway."""
        session, wanted = self.device.session, set(missing)
        # Always the same requests for a step: the server charges a repeated request once.
        requests = request_ranges(len(step.keys), len(step.batch.texts))
        # The server knows the prompts of the assignment, so one request for all omits them.
        is_known = isinstance(self.assignment, messages.LossesAssignment) and len(requests) == 1
        for part in requests:
            if wanted.isdisjoint(part):
                continue
            await self.device.condition.wait()
            try:
                request = messages.Score(
                    assignment_id=self.assignment.assignment_id,
                    prompts=None if is_known else step.prompts.part(part),
                    examples=step.batch.texts,
                    references=step.batch.references,
                    proposal=step.proposal,
                )
            except ValidationError as exc:
                # Without the cause, which quotes private text.
                raise Declining(f"the step cannot be sent: {messages.first_error(exc)}") from None
            lease.add(Usage(queries=len(wanted.intersection(part))))
            scores = await session.call(session.transport.score, request)
            shape = (len(part), len(step.batch.texts), max(len(self.run.task.labels), 1))
            answers = zip(part, _answers(scores, shape), strict=True)
            wanted_answers = [([place], row) for place, row in answers if place in wanted]
            await step.keep(wanted_answers, scores.model)


def facts_of(work: messages.Assignment | Unsent) -> dict[str, Any]:
    """Return the ids of an assignment, for events and logs."""
    return {"run_id": work.run_id, "assignment_id": work.assignment_id, "round": work.round}


@contextmanager
def _declining(what: str) -> Iterator[None]:
    try:
        yield
    except (BackendError, ValueError) as exc:
        _log.warning("work failed", what=what, reason=str(exc))
        reason = reason_of(exc) if isinstance(exc, BackendError) else str(exc)
        raise Declining(f"{what}: {errors.one_line(reason)}"[:500]) from exc


def request_ranges(num_prompts: int, num_examples: int) -> list[range]:
    """Split the prompts of a step into ranges of about equal size, one per request."""
    num_parts = -(-num_prompts * num_examples // _PAIRS)
    num_parts = min(max(num_parts, 1), num_prompts)
    bounds = [num_prompts * part // num_parts for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _answers(
    scores: messages.Scores, shape: tuple[int, int, int]
) -> list[list[LogProbs | str | None]]:
    """Return the model's answers, by prompt and example; None where the model failed."""
    num_prompts, num_examples, _ = shape
    rows: list[list[LogProbs | str | None]] = [list(row) for row in scores.texts]
    if scores.log_probs is not None:
        rows = scores.log_probs.rows() if scores.log_probs.shape == shape else []
    if len(rows) != num_prompts or any(len(row) != num_examples for row in rows):
        raise Declining("the server's answer has another shape than the request")
    for prompt, example in scores.failed:
        if 0 <= prompt < num_prompts and 0 <= example < num_examples:
            rows[prompt][example] = None
    return rows
