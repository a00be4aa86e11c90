"""The computation of one assignment, from its mini-batches to the update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import structlog
from pydantic import ValidationError

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.client.examples import Declining, Minibatch, reason_of
from fedone_sdk.client.job import Answers, Job, Step
from fedone_sdk.client.journal import memory_of
from fedone_sdk.client.noise import private_losses, private_terms
from fedone_sdk.data.splitmix import draw_minibatch
from fedone_sdk.errors import BackendError, needs_extra, one_line
from fedone_sdk.losses import class_means, loss_terms, num_groups
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    LossesAssignment,
    LossesUpdate,
    Score,
    Scored,
    Scores,
    Tensor,
    first_error,
)
from fedone_sdk.spec.sections import PrivacySpec
from fedone_sdk.task import MAX_BIAS, LogProbs, target_of
from fedone_sdk.vocabulary import are_prompts

if TYPE_CHECKING:
    from fedone_sdk.algorithms import State
    from fedone_sdk.algorithms.method import Algorithm
    from fedone_sdk.client.own_model import OwnModel

_log = structlog.get_logger(__name__)

_PAIRS = 512
"""(prompt, example) pairs of one request to the gateway. A device that dies repeats one request at
most; smaller requests cost more traffic, because each contains the texts."""


class Work:
    """The computation of one assignment.

    Attributes:
        memory: The method's memory on this device; after the work, the one to keep.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.memory = memory_of(job.device.state, job.assignment.run_id)

    def check(self) -> None:
        """Check that the assignment fits the run; the server is not trusted.

        Raises:
            Declining: It does not.
        """
        run, assignment = self._job.run, self._job.assignment
        if isinstance(assignment, AlphaAssignment):
            alpha = assignment.alpha
            fits = (
                alpha.shape == (run.prompt_len, run.vocab_size)
                and alpha.dtype == "float32"
                # The server runs searches, and a message loads no code.
                and run.method.exchange == "alpha"
            )
            biases = None
        else:
            prompts, biases = assignment.prompts, assignment.biases
            fits = (
                not prompts.dtype.startswith("float")
                and len(prompts.shape) == 2
                and prompts.shape[1] == run.prompt_len
                and math.prod(prompts.shape) > 0
                and are_prompts(
                    prompts.rows(), run.layout or ((run.prompt_len, run.vocab_size, run.blank),)
                )
            )
        if not fits or (run.calibration.kind == "labels") != (biases is not None):
            raise Declining("the assignment does not fit its run")
        if self._job.num_prompts > assignment.leased_queries:
            raise Declining(
                f"the assignment names {self._job.num_prompts} prompts, and leases "
                f"{assignment.leased_queries} queries"
            )
        if isinstance(assignment, LossesAssignment) and run.privacy and not self._noise:
            raise Declining("the run's privacy does not fit its exchange")  # no loss has noise
        if biases is not None and not self._fits(biases):
            raise Declining("the run's calibration does not fit its task")

    def _fits(self, biases: Tensor) -> bool:
        task, shape = self._job.run.task, (self._job.num_prompts, len(self._job.run.task.labels))
        return (
            task.loss == "cross_entropy"
            and (biases.dtype, biases.shape) == ("float32", shape)
            and all(abs(value) <= MAX_BIAS for value in biases.values())
        )

    async def update(self) -> AlphaUpdate | LossesUpdate:
        """Do the work; return its update.

        Raises:
            Declining: The work cannot be done well enough.
            MissingExtraError: The alpha exchange without NumPy.
            SpecError: The backend cannot answer what the task's loss needs.
        """
        self.check()
        given = self._job.assignment
        if isinstance(given, AlphaAssignment):
            return await self._alpha_update(given)
        self.memory = b""  # the memory is the server's
        step = await self._step(0, given.minibatch_seed, given.prompts, given.biases)
        update = await self._losses_update(step)
        if not given.reflect or self._job.run.privacy or self._job.device.reflect is None:
            return update
        # Imported here: few devices need it.
        from fedone_sdk.client.reflection import propose

        proposal = await propose(step, update.losses, self.ask)
        usage = self._job.journal.usage  # With the trial.
        return update.model_copy(update={"proposal": proposal, "usage": usage})

    async def _alpha_update(self, assignment: AlphaAssignment) -> AlphaUpdate:
        with needs_extra("the alpha exchange", "alpha"):
            import numpy as np

            from fedone_sdk.algorithms import State, dump_memory, method_from_spec, stream
            from fedone_sdk.algorithms.method import clip_losses
            from fedone_sdk.algorithms.space import Space
            from fedone_sdk.client.noise import private_step
            from fedone_sdk.messages.tensor import from_wire, prompts_to_wire, to_wire
        run = self._job.run
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
        state = self._with_memory(method, state)
        updates = list[LossesUpdate]()
        for number, step in enumerate(assignment.steps):
            with _declining("no prompts can be drawn"):
                candidates = method.ask(state, stream(step.prompt_seed), step.num_samples)
            prompts = prompts_to_wire(candidates.prompts, run.vocab_size)
            updates.append(
                await self._losses_update(await self._step(number, step.minibatch_seed, prompts))
            )
            with _declining("the method cannot use the losses"):
                clipped = clip_losses(np.array(updates[-1].losses), run.loss_clip)
                state = method.tell(state, candidates, clipped)
        losses = [loss for update in updates for loss in update.losses]
        alpha, mean_loss = state.alpha, sum(losses) / len(losses)
        if run.privacy is not None and run.privacy.target == "alpha":
            draw = partial(private_step, before, alpha, run.privacy)
            noised = self._job.release(("alpha",), lambda: draw().ravel().tolist())
            alpha = method.project(np.array(noised).reshape(before.shape))
            mean_loss = 0.0  # the mean of the losses would be a release without noise
        self.memory = dump_memory(state.memory) if state.memory else b""
        return AlphaUpdate(
            num_examples=self._num_examples,
            scored=sum((update.scored for update in updates), Scored(scored=0)),
            usage=sum((update.usage for update in updates), NOTHING),
            model=updates[-1].model,
            alpha=to_wire(alpha),
            mean_loss=mean_loss,
        )

    def _with_memory(self, method: Algorithm, state: State) -> State:
        """Return a state with the memory of the method on this device, if it has one that fits."""
        from fedone_sdk.algorithms import load_memory

        if self.memory:
            try:
                own = state.evolve(memory=load_memory(self.memory))
                method.check(own)
                return own
            except (ValueError, KeyError) as exc:
                _log.warning("unfit method memory ignored", error=str(exc))
        return state

    @property
    def _num_examples(self) -> int:
        """The device's weight; private devices have the same."""
        return len(self._job.rows) if self._job.run.privacy is None else 1

    async def _step(
        self, number: int, minibatch_seed: int, prompts: Tensor, biases: Tensor | None = None
    ) -> Step:
        run = self._job.run
        drawn = draw_minibatch(len(self._job.rows), run.method.batch_size, minibatch_seed)
        batch = await Minibatch.of(
            run.task,
            [self._job.rows[index] for index in drawn],
            self._job.device.hooks.before_send,
            private=run.privacy is not None,
        )
        return Step(job=self._job, number=number, batch=batch, prompts=prompts, biases=biases)

    # Losses of a step

    async def _losses_update(self, step: Step) -> LossesUpdate:
        """Return the losses of a step's prompts, after scoring those that the journal lacks."""
        missing = step.missing
        self._job.report(len(step.keys) - len(missing))
        if missing:
            await self.ask(step, missing)
        answered = [one for one in map(step.answered, range(len(step.keys))) if one is not None]
        models = {model for _, model in answered}
        if len(models) != 1:
            raise Declining("the model changed during the work")
        rows = [row for row, _ in answered]
        # An example counts for all prompts or for none, so that all are compared on the same ones.
        failed = frozenset(index for row in rows for index, one in enumerate(row) if one is None)
        kept = [index for index in range(len(step.batch.examples)) if index not in failed]
        counts = step.batch.check(failed)
        reported = self._mean_losses if step.biases is None else self._by_class
        values, more = reported(step, rows, kept, counts.scored)
        return LossesUpdate(
            num_examples=self._num_examples,
            scored=counts,
            usage=self._job.journal.spent(step.number),
            model=models.pop(),
            losses=values,
            **more,
        )

    @property
    def _noise(self) -> PrivacySpec | None:
        """The noise on losses, if any."""
        privacy = self._job.run.privacy
        return privacy if privacy is not None and privacy.target == "losses" else None

    def _mean_losses(
        self, step: Step, rows: Sequence[Answers], kept: Sequence[int], scored: int
    ) -> tuple[tuple[float, ...], dict[str, Any]]:
        places = {row: place for place, row in enumerate(rows)}
        losses = {row: step.losses(place) for row, place in places.items()}
        values = [[losses[row][index] or 0.0 for index in kept] for row in rows]
        if self._noise is None:
            return tuple(math.fsum(each) / len(each) for each in values), {}
        # An example without a loss counts as 0 for all prompts, so that neither the noise nor a
        # count depends on what became of it.
        values = [each + [0.0] * (scored - len(each)) for each in values]
        return self._job.release(step.keys, partial(private_losses, values, self._noise)), {}

    def _by_class(
        self, step: Step, rows: Sequence[Answers], kept: Sequence[int], scored: int
    ) -> tuple[tuple[float, ...], dict[str, Any]]:
        """Return the mean losses, and the part of the update for label biases."""
        task, examples = self._job.run.task, step.batch.examples
        targets = [int(target_of(task, examples[index])) for index in kept]
        terms = []
        for place, row in enumerate(rows):
            biased, pairs = step.task_at(place), zip(kept, targets, strict=True)
            log_probs = ((row[index], label) for index, label in pairs)
            terms.append(
                [
                    loss_terms(biased, one, label)
                    for one, label in log_probs
                    if isinstance(one, tuple)
                ]
            )
        labels = len(task.labels)
        groups = num_groups(labels, private=self._noise is not None)
        if self._noise is not None:
            # An example without a loss counts as 0, as without a label bias.
            missing = scored - len(targets)
            terms = [[*own, *[[0.0] * (2 + labels)] * missing] for own in terms]
            targets += [-1] * missing
            draw = partial(private_terms, terms, targets, self._noise)
            numbers = self._job.release(step.keys, draw)
            values, rest = numbers[: len(terms)], iter(numbers[len(terms) :])
            # The largest trace stands for an unknown one.
            means = [[[loss, 1.0, *itertools.islice(rest, labels)]] for loss in values]
            counts = tuple(rest)
        else:
            values = tuple(math.fsum(term[0] for term in own) / len(own) for own in terms)
            means = [class_means(own, targets, groups) for own in terms]
            counts = tuple(float(targets.count(label)) for label in range(labels))
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(means))
        by_class = Tensor.pack(flat, (len(terms), groups, 2 + labels), "float32")
        return values, {"by_class": by_class, "class_counts": counts}

    @cached_property
    def _own_model(self) -> OwnModel | None:
        if self._job.device.backend is None:
            return None
        # Imported here: a device that scores through the gateway does not need it.
        from fedone_sdk.client.own_model import OwnModel

        return OwnModel(self._job, self._job.device.backend)

    async def ask(self, step: Step, missing: Sequence[int]) -> None:
        """Score the prompts of a step at these positions; the journal gets answers as they arrive.

        Raises:
            BudgetExhausted: The device's own budget does not suffice.
            Declining: The model or the score function failed, or no message can carry the step.
            SpecError: The backend cannot answer what the task's loss needs.
        """
        ask = self._ask_gateway if self._own_model is None else self._own_model.ask
        budget = self._job.device.budget
        async with nullcontext() if budget is None else budget.reserve(Usage(queries=len(missing))):
            await ask(step, missing)

    async def _ask_gateway(self, step: Step, missing: Sequence[int]) -> None:
        """Send the requests to the gateway that contain these prompts.

        The requests do not depend on `missing`: one that is sent again after a restart is the same
        request, which the server counts once.
        """
        session, wanted = self._job.device.session, set(missing)
        requests = cuts(len(step.keys), len(step.batch.texts))
        # The server knows the prompts of an assignment, and the parent of a proposal.
        is_known = isinstance(self._job.assignment, LossesAssignment) and len(requests) == 1
        for part in requests:
            if wanted.isdisjoint(part):
                continue
            await self._job.ready()
            try:
                request = Score(
                    assignment_id=self._job.assignment.assignment_id,
                    prompts=None if is_known else step.prompts.part(part),
                    examples=step.batch.texts,
                    references=step.batch.references,
                    proposal=step.proposal,
                )
            except ValidationError as exc:
                # Not chained: the cause quotes private text.
                raise Declining(f"the step cannot be sent: {first_error(exc)}") from None
            scores = await session.call(session.transport.score, request)
            shape = (len(part), len(step.batch.texts), max(len(self._job.run.task.labels), 1))
            answers = zip(part, _answers(scores, shape), strict=True)
            wanted_answers = [([place], row) for place, row in answers if place in wanted]
            await step.keep(wanted_answers, scores.model)


@contextmanager
def _declining(what: str) -> Iterator[None]:
    """Turn errors of a method or a message into a decline."""
    try:
        yield
    except (BackendError, ValueError) as exc:
        _log.warning("work failed", what=what, reason=str(exc))
        reason = reason_of(exc) if isinstance(exc, BackendError) else str(exc)
        raise Declining(f"{what}: {one_line(reason)}"[:500]) from exc


def cuts(num_prompts: int, num_examples: int) -> list[range]:
    """Return the requests to the gateway of a step: equal parts of its prompts."""
    num_parts = -(-num_prompts * num_examples // _PAIRS)
    num_parts = min(max(num_parts, 1), num_prompts)
    bounds = [num_prompts * part // num_parts for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _answers(scores: Scores, shape: tuple[int, int, int]) -> list[list[LogProbs | str | None]]:
    """Return the model's answer per prompt and example; None if it failed.

    Raises:
        Declining: The answer does not fit the request.
    """
    num_prompts, num_examples, _ = shape
    rows: list[list[LogProbs | str | None]] = [list(row) for row in scores.texts]
    if scores.log_probs is not None:
        rows = scores.log_probs.rows() if scores.log_probs.shape == shape else []
    if len(rows) != num_prompts or any(len(row) != num_examples for row in rows):
        raise Declining("the server's answer does not fit what was asked")
    for prompt, example in scores.failed:
        if 0 <= prompt < num_prompts and 0 <= example < num_examples:
            rows[prompt][example] = None
    return rows
