"""The computation of one assignment, from its mini-batches to the update."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.calibration import MAX_LABELS
from fedone_sdk.client.batch import BeforeSend, Declining, Minibatch, reason_of
from fedone_sdk.client.scoring import Losses
from fedone_sdk.data.splitmix import draw_minibatch
from fedone_sdk.errors import BackendError, needs_extra, one_line
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    Array,
    LossesAssignment,
    LossesUpdate,
    RunTask,
    Scored,
)
from fedone_sdk.task import Example
from fedone_sdk.vocabulary import Layout, are_prompts

_log = structlog.get_logger(__name__)

Assigned = AlphaAssignment | LossesAssignment


@contextmanager
def _declining(what: str, usage: Usage) -> Iterator[None]:
    """Turn errors of a method or a message into a decline with the cost so far."""
    try:
        yield
    except (BackendError, ValueError) as exc:
        _log.warning("work failed", what=what, reason=str(exc))
        reason = reason_of(exc) if isinstance(exc, BackendError) else str(exc)
        raise Declining(f"{what}: {one_line(reason)}"[:500], usage) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One assignment of a device.

    Attributes:
        run: The run's task.
        assignment: The work.
        examples: The device's examples that fit the task.
        before_send: Gets every text before it leaves the device.
        score: Scores the prompts of a local step (its number, its mini-batch, shape (P, n)).
        before_noise: Called with the cost of the work before noise is added to its alpha.
    """

    run: RunTask
    assignment: Assigned
    examples: Sequence[Example]
    before_send: BeforeSend | None
    score: Callable[[int, Minibatch, Array], Awaitable[Losses]]
    before_noise: Callable[[Usage], None] = lambda usage: None

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
        if self._noises_alpha and isinstance(assignment, LossesAssignment):
            raise Declining("the run's privacy does not fit its exchange")  # no loss has noise
        if self._by_class:
            task = run.task
            sound = (
                task.loss == "cross_entropy"
                and len(task.labels) <= MAX_LABELS
                and isinstance(assignment, LossesAssignment)
            )
            # Losses by class have no noise, and would make the noise of the losses useless.
            if not sound or run.privacy is not None:
                raise Declining("the run's calibration does not fit its task or its privacy")

    @property
    def _layout(self) -> Layout:
        run = self.run
        return run.layout or ((run.prompt_len, run.vocab_size, run.blank),)

    async def update(
        self, remembered: Callable[[], bytes | None]
    ) -> tuple[AlphaUpdate | LossesUpdate, bytes]:
        """Do the work, with the method's memory on this device.

        Returns:
            The update, and the method's memory once it is accepted (empty for none).

        Raises:
            Declining: The work cannot be done well enough.
            MissingExtraError: The alpha exchange without NumPy.
        """
        self.check()
        if isinstance(self.assignment, LossesAssignment):
            return await self._losses_update(self.assignment), b""  # the memory is the server's
        return await self._alpha_update(self.assignment, remembered)

    async def _losses_update(self, assignment: LossesAssignment) -> LossesUpdate:
        losses = await self._losses(0, assignment.minibatch_seed, assignment.prompts)
        return LossesUpdate(
            num_examples=len(self.examples),
            scored=losses.scored,
            usage=losses.usage,
            model=losses.model,
            losses=losses.values,
            by_class=losses.by_class,
            class_counts=losses.class_counts,
        )

    async def _alpha_update(
        self, assignment: AlphaAssignment, remembered: Callable[[], bytes | None]
    ) -> tuple[AlphaUpdate, bytes]:
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
            from fedone_sdk.messages.array import from_wire, prompts_to_wire, to_wire
        run = self.run
        before = from_wire(assignment.alpha)
        with _declining("the assignment does not fit its run", NOTHING):
            method = method_from_spec(
                run.method,
                prompt_len=run.prompt_len,
                vocab_size=run.vocab_size,
                blank=run.blank,
                space=Space.of(run.layout) if run.layout else None,
            )
            state = State(alpha=before)
            method.check(state)
        if saved := remembered():
            try:
                own = state.evolve(memory=load_memory(saved))
                method.check(own)
                state = own
            except (ValueError, KeyError) as exc:
                _log.warning("unfit method memory ignored", error=str(exc))
        usage, scored = NOTHING, Scored(scored=0)
        values: list[float] = []
        for number, step in enumerate(assignment.steps):
            with _declining("no prompts can be drawn", usage):
                candidates = method.ask(state, stream(step.prompt_seed), step.num_samples)
            prompts = prompts_to_wire(candidates.prompts, run.vocab_size)
            try:
                losses = await self._losses(number, step.minibatch_seed, prompts)
            except Declining as exc:
                raise Declining(exc.reason, usage + exc.usage) from exc
            usage += losses.usage
            with _declining("the method cannot use the losses", usage):
                clipped = clip_losses(np.array(losses.values), run.loss_clip)
                state = method.tell(state, candidates, clipped)
            scored += losses.scored
            values.extend(losses.values)
        alpha, mean_loss = state.alpha, sum(values) / len(values)
        if run.privacy is not None and self._noises_alpha:
            self.before_noise(usage)
            alpha = method.project(private_step(before, alpha, run.privacy))
            mean_loss = 0.0  # the mean of the losses would be a release without noise
        update = AlphaUpdate(
            num_examples=len(self.examples),
            scored=scored,
            usage=usage,
            model=losses.model,
            alpha=to_wire(alpha),
            mean_loss=mean_loss,
        )
        return update, dump_memory(state.memory) if state.memory else b""

    @property
    def _noises_alpha(self) -> bool:
        """Whether noise is added to the step of alpha only."""
        return self.run.privacy is not None and self.run.privacy.target == "alpha"

    @property
    def _by_class(self) -> bool:
        """Whether the update has losses by class and label bias."""
        return self.run.calibration.kind == "labels"

    async def _losses(self, number: int, minibatch_seed: int, prompts: Array) -> Losses:
        batch = await Minibatch.of(self.run.task, self._drawn(minibatch_seed), self.before_send)
        return await self.score(number, batch, prompts)

    def _drawn(self, minibatch_seed: int) -> list[Example]:
        drawn = draw_minibatch(len(self.examples), self.run.method.batch_size, minibatch_seed)
        return [self.examples[index] for index in drawn]
