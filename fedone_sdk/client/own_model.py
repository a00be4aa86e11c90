"""Scoring by a device's own model, and new candidates that a model writes from a device's rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import structlog

from fedone_sdk.backends.base import Answer, LLMBackend, Query, Wrapper
from fedone_sdk.backends.model_client import metered
from fedone_sdk.backends.queries import check_answer, query_for, rows_of, score_all, written_query
from fedone_sdk.budget import NOTHING, BudgetGuard, Lease, Payer, Usage
from fedone_sdk.candidates import prompt_of, reflection
from fedone_sdk.client.rows import Declining, Unfit, passed, reason_of
from fedone_sdk.errors import BackendError, BudgetError, BudgetExhausted, FormBlocked, ProblemError
from fedone_sdk.losses import feedback, predicted
from fedone_sdk.messages import MAX_TEXT_CHARS, Judged, Proposal, Reflect
from fedone_sdk.task import Example, LogProbs, Score, TaskSpec, target_of
from fedone_sdk.vocabulary import MAX_PROPOSALS, Vocabulary

if TYPE_CHECKING:
    from fedone_sdk.client.work import Step, Work

_log = structlog.get_logger(__name__)

_NUM_WORST, _NUM_BEST = 4, 2
"""How many examples with the highest and lowest losses are shown to the model that writes."""

_MAX_TOKENS = 512


async def ask(step: Step, missing: Sequence[int], lease: Lease) -> None:
    """Score the prompts with the indices `missing`; each answer is stored as soon as it arrives.

    A prompt that occurs twice is sent once, and counts as two queries. The queries are added to
    `lease`, a reservation of the device's budget, when they are sent.
    """
    device, batch = step.work.device, step.batch
    backend = device.backend
    assert backend is not None
    model = backend.fingerprint
    if not batch.texts:  # The app holds all texts back. To hide this, the queries count as sent.
        lease.add(Usage(queries=len(missing)))
        await step.keep([(missing, ())], model, Usage(queries=len(step.keys)))
        return
    backend = metered(backend)
    payer = _Counted(device.budget or BudgetGuard(None, name="client"))
    queries = await _queries(step, missing, backend, payer)
    recorded = _Recorded(backend, step, queries, payer, lease)
    await recorded.begin()
    try:
        await score_all(recorded, queries)
    except (BackendError, BudgetError) as exc:
        _log.warning("the device's model failed", reason=str(exc))
        if batch.private and type(exc) is BackendError:
            # The device does not decline: the server would learn that the model failed on a text.
            await step.keep([(step.missing, [None] * len(batch.texts))], model)
            return
        if type(exc) is FormBlocked:
            backend.reset()  # Later work asks again, because the refusal may have ended.
        kind = Unfit if isinstance(exc, BudgetExhausted) else Declining
        raise kind(reason_of(exc)) from exc
    finally:
        recorded.end()


async def _queries(
    step: Step, missing: Sequence[int], backend: LLMBackend, payer: Payer
) -> dict[Query, list[int]]:
    """Return each query with the indices of the prompts that it scores."""
    run, batch, changed = step.work.run, step.batch, {}
    if step.proposal is not None and run.reflection is not None:
        changed = {run.reflection.slot: step.proposal.text}
    prompts: dict[tuple[int, ...], list[int]] = {}
    rows = step.prompts.rows()
    for place in missing:
        prompts.setdefault(tuple(rows[place]), []).append(place)
    vocabulary = await step.work.vocabulary()
    options: Any = {"backend": backend, "references": batch.references, "payer": payer}
    queries: dict[Query, list[int]] = {}
    for indices, places in prompts.items():
        prompt = prompt_of(run.task, vocabulary, indices, changed)
        query = query_for(run.task, prompt, batch.texts, **options)
        queries.setdefault(query, []).extend(places)
    return queries


class _Counted:
    """A payer that sums up its charges; clients of several servers may share a device's budget."""

    def __init__(self, payer: Payer) -> None:
        self.name, self.charged, self._payer = payer.name, NOTHING, payer

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
        async with self._payer.reserve(worst) as lease:
            try:
                yield lease
            finally:
                self.charged += lease.charge


class _Recorded(Wrapper):
    """A backend that waits for `Hooks.only_when` before a query, and stores its answer and cost.

    `begin` stores an upper bound on the cost of all queries, in case the process is killed. The
    actual cost is what `payer` is charged.
    """

    def __init__(
        self,
        inner: LLMBackend,
        step: Step,
        queries: Mapping[Query, list[int]],
        payer: _Counted,
        lease: Lease,
    ) -> None:
        super().__init__(inner)
        self._step, self._queries, self._payer, self._lease = step, queries, payer, lease
        self._journal = step.work.journal
        num_queries = Usage(queries=len(step.keys))
        self._before = self._journal.spent(step.number).without_queries() + num_queries
        self._at_risk: dict[Query, Usage] = {}
        self._bound = self._before

    async def begin(self) -> None:
        for query in self._queries:
            self._at_risk[query] = (await self.inner.quote(query)).without_queries()
        self._bound = sum(self._at_risk.values(), self._before)
        self._journal.charge(self._step.number, self._bound)

    async def score(self, query: Query) -> Answer:
        await self._step.work.device.condition.wait()
        self._lease.add(Usage(queries=len(self._queries[query])))
        try:
            answer = await self.inner.score(query)
            check_answer(query, answer)
        except ValueError as exc:  # This answer is not stored, so that no restart fails on it.
            raise BackendError(f"the model's answer cannot be used: {exc}") from exc
        rows = rows_of(query, answer)
        self._bound = self._bound.beyond(self._at_risk.pop(query))
        spent = self._bound + self._payer.charged
        await self._step.keep([(self._queries[query], rows)], self.inner.fingerprint, spent)
        return answer

    def end(self) -> None:
        self._journal.charge(self._step.number, self._before + self._payer.charged)


async def propose(step: Step, losses: Sequence[float]) -> Proposal | None:
    """Let a model write a candidate from a scored mini-batch, and score it on the same rows.

    The candidate is to improve its parent: the prompt with the lowest loss on the mini-batch.

    Returns:
        The candidate, if its loss is lower than its parent's. None if the loss is not lower, if the
        run or the app allows no proposal, or if the model failed.
    """
    work = step.work
    reflection = work.run.reflection
    if reflection is None or (work.device.reflect == "gateway" and not reflection.gateway):
        return None
    if len(work.journal.proposals(work.assignment.run_id)) >= MAX_PROPOSALS:
        return None  # The device's own limit per run.
    try:
        parent = min(range(len(losses)), key=losses.__getitem__)
        return await _better_candidate(step, parent, reflection.slot)
    except (BackendError, BudgetError, Declining, ProblemError) as exc:
        _log.warning("no candidate proposed", reason=str(exc))
        return None


async def _better_candidate(step: Step, parent: int, slot: str) -> Proposal | None:
    work, only_parent = step.work, range(parent, parent + 1)
    vocabulary = await work.vocabulary()
    text = work.journal.written
    if text is None:
        cases = _cases(step, parent)
        if not cases:
            return None
        (indices,) = step.prompts.part(only_parent).rows()
        current = vocabulary.by_slot([int(index) for index in indices])[slot]
        text = work.journal.written = await _write(work, slot, current, parent, cases)
    known = vocabulary.candidates_of(slot)
    candidate = reflection.read_reflection(text, known=known, labels=work.run.task.labels)
    if candidate is None or not await _may_leave(candidate, work, vocabulary):
        return None
    proposal = Proposal(parent=parent, text=candidate)
    prompts = step.prompts.part(only_parent)
    biases = step.biases and step.biases.part(only_parent)
    number = step.number + 1
    trial = replace(step, number=number, prompts=prompts, biases=biases, proposal=proposal)
    if work.device.backend is None and work.device.reflect != "gateway":
        work.journal.add_proposal(work.assignment.run_id)  # The gateway gets the device's text.
    if trial.missing:
        await work.ask(trial, trial.missing)
    pairs = zip(step.losses(parent), trial.losses(0), strict=True)
    gains = [old - new for old, new in pairs if old is not None and new is not None]
    if sum(gains) <= 0:
        return None
    work.journal.add_proposal(work.assignment.run_id)
    return proposal


async def _write(work: Work, slot: str, current: str, parent: int, cases: Sequence[Judged]) -> str:
    device = work.device
    if device.reflect == "gateway" or device.reflect is None:
        assignment_id = work.assignment.assignment_id
        message = Reflect(assignment_id=assignment_id, parent=parent, cases=tuple(cases))
        return (await device.session.call(device.session.transport.reflect, message)).text
    shown = [(case.example, case.feedback) for case in cases]
    query = written_query(
        reflection.reflection_messages(work.run.task, slot, current, shown), _MAX_TOKENS
    )
    return (await metered(device.reflect).score(replace(query, payer=device.budget))).text


def _cases(step: Step, parent: int) -> list[Judged]:
    """Return the examples with the parent's highest and lowest losses; none if all were right."""
    task, batch = step.task_at(parent), step.batch
    answers, _ = step.answered(parent) or ((), "")
    answered = [
        (loss, answer, example, texts)
        for loss, answer, example, texts in zip(
            step.losses(parent), answers, batch.examples, batch.texts, strict=True
        )
        # After a restart a generated text has only its loss, because the text is not stored.
        if loss is not None and isinstance(answer, (Score, tuple))
    ]
    if all(_is_right(task, answer, example) for _, answer, example, _ in answered):
        return []
    worst_first = sorted(answered, key=lambda case: -case[0])
    chosen = [*worst_first[:_NUM_WORST], *worst_first[_NUM_WORST:][-_NUM_BEST:]]
    return [
        Judged(example=texts, feedback=feedback(task, answer, example)[:MAX_TEXT_CHARS])
        for _, answer, example, texts in chosen
    ]


def _is_right(task: TaskSpec, answer: Score | LogProbs, example: Example) -> bool:
    if isinstance(answer, Score):
        return answer.value >= 1.0
    return task.loss != "nll" and predicted(task, answer) == target_of(task, example)


async def _may_leave(text: str, work: Work, vocabulary: Vocabulary) -> bool:
    """Return whether a text quotes no row of the device, and `before_propose` accepts it."""
    rows = (value for row in work.all_rows for value in row.values() if isinstance(value, str))
    public = [*chain.from_iterable(slot.candidates for slot in vocabulary.slots)]
    public += [template for _, template in work.run.task.messages]
    if (description := work.run.task.description) is not None:
        public += [description.asked, description.text]
    if shared := await asyncio.to_thread(reflection.copied_part, text, rows, public):
        # Only the kind of the quotation is logged, because the text is private.
        _log.warning("a candidate quotes a row", what=shared.partition(" ")[0])
        return False
    hook = work.device.hooks.before_propose
    return hook is None or await passed(hook, text, "before_propose") == text
