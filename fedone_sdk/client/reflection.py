"""Reflection on a device: a model reads what a prompt got wrong, and writes a better text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain

import structlog

from fedone_sdk.candidates import quotes, read_reflection, reflection_messages
from fedone_sdk.client.examples import Declining, passed
from fedone_sdk.client.job import Job, Step
from fedone_sdk.errors import BackendError, BudgetError, ProblemError
from fedone_sdk.losses import feedback, predicted
from fedone_sdk.messages import MAX_TEXT_CHARS, Judged, Proposal, Reflect
from fedone_sdk.task import Example, LogProbs, Score, TaskSpec, target_of
from fedone_sdk.vocabulary import MAX_PROPOSALS, Vocabulary

_log = structlog.get_logger(__name__)

_FAILED, _GONE_WELL = 4, 2
"""Examples of a reflection: those with the highest losses, and those with the lowest."""

_MAX_TOKENS = 512


Ask = Callable[[Step, Sequence[int]], Awaitable[None]]
"""Scores the prompts of a step at these positions."""


async def propose(step: Step, losses: Sequence[float], ask: Ask) -> Proposal | None:
    """Write a candidate from a scored mini-batch, and score it on the same rows.

    The parent is the prompt with the lowest loss on the mini-batch: the search draws prompts that
    may be the best, and each client improves its own best one, so that groups of clients keep
    different parents.

    Returns:
        The candidate if its loss is lower than its parent's. None also if the run or the app allows
        none, or if the model failed: that costs the proposal, not the job.
    """
    job = step.job
    about, model = job.run.reflection, job.device.reflect
    # The server may ask for more.
    spent = job.runs.num_proposals[job.assignment.run_id] >= MAX_PROPOSALS
    if about is None or model is None or spent or (model == "gateway" and not about.gateway):
        return None
    try:
        parent = min(range(len(losses)), key=losses.__getitem__)
        proposal = await _better(step, parent, about.slot, ask)
    except (BackendError, BudgetError, Declining, ProblemError) as exc:
        _log.warning("no candidate proposed", reason=str(exc))
        return None
    job.runs.num_proposals[job.assignment.run_id] += proposal is not None
    return proposal


async def _better(step: Step, parent: int, slot: str, ask: Ask) -> Proposal | None:
    job, row = step.job, range(parent, parent + 1)
    vocabulary = await job.vocabulary()
    text = job.journal.written
    if text is None:
        cases = _cases(step, parent)
        if not cases:
            return None
        (indices,) = step.prompts.part(row).rows()
        current = vocabulary.by_slot([int(index) for index in indices])[slot]
        text = job.journal.written = await _written(job, slot, current, parent, cases)
    known = vocabulary.candidates_of(slot)
    candidate = read_reflection(text, known=known, labels=job.run.task.labels)
    if candidate is None or not await _may_leave(candidate, job, vocabulary):
        return None
    proposal = Proposal(parent=parent, text=candidate)
    trial = replace(
        step,
        number=step.number + 1,
        prompts=step.prompts.part(row),
        biases=None if step.biases is None else step.biases.part(row),
        proposal=proposal,
    )
    if trial.missing:
        await ask(trial, trial.missing)
    pairs = zip(step.losses(parent), trial.losses(0), strict=True)
    gains = [old - new for old, new in pairs if old is not None and new is not None]
    return proposal if sum(gains) > 0 else None


async def _written(job: Job, slot: str, current: str, parent: int, cases: Sequence[Judged]) -> str:
    """Return the text that the app's model writes, or the run's through the gateway."""
    device = job.device
    if device.reflect == "gateway" or device.reflect is None:
        message = Reflect(
            assignment_id=job.assignment.assignment_id, parent=parent, cases=tuple(cases)
        )
        return (await device.session.call(device.session.transport.reflect, message)).text
    from fedone_sdk.backends import written_query

    shown = [(case.example, case.feedback) for case in cases]
    query = written_query(reflection_messages(job.run.task, slot, current, shown), _MAX_TOKENS)
    return (await device.reflect.score(replace(query, payer=device.budget))).text


def _cases(step: Step, parent: int) -> list[Judged]:
    """Return the parent's worst examples and its best ones; none if it got all right.

    Written answers are those of this process: after a restart there are none.
    """
    task, batch = step.task_at(parent), step.batch
    answers, _ = step.answered(parent) or ((), "")
    answered = [
        (loss, answer, example, texts)
        for loss, answer, example, texts in zip(
            step.losses(parent), answers, batch.examples, batch.texts, strict=True
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


def _is_right(task: TaskSpec, answer: Score | LogProbs, example: Example) -> bool:
    if isinstance(answer, Score):
        return answer.value >= 1.0
    return task.loss != "nll" and predicted(task, answer) == target_of(task, example)


async def _may_leave(text: str, job: Job, vocabulary: Vocabulary) -> bool:
    """Return whether a text quotes no row of the device, and passes the app's own check."""
    rows = (value for row in job.held for value in row.values() if isinstance(value, str))
    public = [*chain.from_iterable(slot.candidates for slot in vocabulary.slots)]
    public += [template for _, template in job.run.task.messages]
    if (description := job.run.task.description) is not None:
        public += [description.asked, description.text]
    if shared := await asyncio.to_thread(quotes, text, rows, public):
        # The log names the kind of quotation only, since its text is private.
        _log.warning("a candidate quotes a row", what=shared.partition(" ")[0])
        return False
    hook = job.device.hooks.before_propose
    return hook is None or await passed(hook, text, "before_propose") == text
