"""Reflection on a device: a model reads what a prompt got wrong, and writes a better text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import structlog

from fedone_sdk.candidates import quotes, read_reflection, reflection_messages
from fedone_sdk.client.examples import BeforeSend, Declining, passed
from fedone_sdk.client.work import Ask, Step
from fedone_sdk.errors import BackendError, BudgetError, ProblemError
from fedone_sdk.losses import feedback, predicted
from fedone_sdk.messages import MAX_TEXT_CHARS, Judged, LossesUpdate, Proposal, RunTask, Tensor
from fedone_sdk.task import Example, LogProbs, Score, TaskSpec, target_of
from fedone_sdk.vocabulary import Vocabulary

if TYPE_CHECKING:
    from fedone_sdk.backends.base import LLMBackend
    from fedone_sdk.budget import Payer

_log = structlog.get_logger(__name__)

_FAILED, _GONE_WELL = 4, 2
"""Examples of a reflection: those with the highest losses, and those with the lowest."""

_MAX_TOKENS = 512

Write = Callable[[int, str, Sequence[Judged]], Awaitable[str]]
"""Writes a text, from the index of the parent, its text in the slot, and the cases."""


def writing(model: LLMBackend, run: RunTask, slot: str, payer: Payer | None) -> Write:
    """Return the writing of a model on the device."""
    from fedone_sdk.backends import written_query

    async def write(parent: int, current: str, cases: Sequence[Judged]) -> str:
        shown = [(case.example, case.feedback) for case in cases]
        query = written_query(reflection_messages(run.task, slot, current, shown), _MAX_TOKENS)
        answer = await model.score(replace(query, payer=payer))
        return answer.text

    return write


@dataclass(frozen=True, slots=True, kw_only=True)
class Reflection:
    """Writes a candidate from an assignment's mini-batch, and scores it on the same rows.

    The parent is the prompt with the lowest loss on the mini-batch: the search draws prompts that
    may be the best, and each client improves its own best one, so that groups of clients keep
    different parents. The candidate is scored on the same mini-batch, and proposed if its loss is
    lower than its parent's.

    Attributes:
        held: All examples of the device, of which the text must quote nothing.
        ask: Scores the candidate.
        before_propose: The app's own check.
    """

    run: RunTask
    slot: str
    vocabulary: Vocabulary
    held: Sequence[Example]
    ask: Ask
    write: Write
    before_propose: BeforeSend | None = None

    async def propose(self, step: Step, update: LossesUpdate) -> Proposal | None:
        """Return a candidate with a lower loss than its parent; None if there is none.

        A failure costs the proposal, not the work: the losses are sent all the same.
        """
        try:
            return await self._propose(step, update)
        except (BackendError, BudgetError, Declining, ProblemError) as exc:
            _log.warning("no candidate proposed", reason=str(exc))
            return None

    async def _propose(self, step: Step, update: LossesUpdate) -> Proposal | None:
        parent = min(range(len(update.losses)), key=update.losses.__getitem__)
        text = step.journal.written
        if text is None:
            cases = self._cases(step, parent)
            if not cases:
                return None
            indices = [int(index) for index in step.prompts.rows()[parent]]
            text = await self.write(parent, self.vocabulary.by_slot(indices)[self.slot], cases)
            step.journal.written = text
        known = self.vocabulary.candidates_of(self.slot)
        candidate = read_reflection(text, known=known, labels=step.task.labels)
        if candidate is None or not await self._may_leave(candidate):
            return None
        proposal = Proposal(parent=parent, text=candidate)
        trial = replace(
            step,
            number=step.number + 1,
            prompts=_row(step.prompts, parent),
            biases=None if step.biases is None else _row(step.biases, parent),
            proposal=proposal,
            on_scored=lambda _: None,
        )
        if trial.journal.row(trial.keys[0]) is None:
            await self.ask(trial, [0])
        pairs = zip(step.example_losses(parent), trial.example_losses(0), strict=True)
        gains = [old - new for old, new in pairs if old is not None and new is not None]
        return proposal if sum(gains) > 0 else None

    def _cases(self, step: Step, parent: int) -> list[Judged]:
        """Return the parent's worst examples and its best ones; none if it got all right.

        Written answers are those of this process: after a restart there are none.
        """
        task, batch = step.task_at(parent), step.batch
        answered = [
            (loss, answer, example, texts)
            for loss, answer, example, texts in zip(
                *(step.example_losses(parent), step.answers(parent), batch.examples, batch.texts),
                strict=True,
            )
            if loss is not None and isinstance(answer, (Score, tuple))
        ]
        if all(_is_right(task, answer, example) for _, answer, example, _ in answered):
            return []
        worst_first = sorted(answered, key=lambda one: -one[0])
        chosen = [*worst_first[:_FAILED], *worst_first[_FAILED:][-_GONE_WELL:]]
        return [
            Judged(example=texts, feedback=feedback(task, answer, example)[:MAX_TEXT_CHARS])
            for _, answer, example, texts in chosen
        ]

    async def _may_leave(self, text: str) -> bool:
        rows = (value for row in self.held for value in row.values() if isinstance(value, str))
        public = [*chain.from_iterable(slot.candidates for slot in self.vocabulary.slots)]
        public += [template for _, template in self.run.task.messages]
        if (description := self.run.task.description) is not None:
            public += [description.asked, description.text]
        if shared := await asyncio.to_thread(quotes, text, rows, public):
            # The log names the kind of quotation only, since its text is private.
            _log.warning("a candidate quotes a row", what=shared.partition(" ")[0])
            return False
        hook = self.before_propose
        return hook is None or await passed(hook, text, "before_propose") == text


def _is_right(task: TaskSpec, answer: Score | LogProbs, example: Example) -> bool:
    if isinstance(answer, Score):
        return answer.value >= 1.0
    return task.loss != "nll" and predicted(task, answer) == target_of(task, example)


def _row(array: Tensor, place: int) -> Tensor:
    """Return one row of a matrix, as a matrix."""
    return Tensor.pack(array.rows()[place], (1, array.shape[1]), array.dtype)
