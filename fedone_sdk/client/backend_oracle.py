"""The loss oracle of a device with its own model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog

from fedone_sdk.backends.asking import check_answer, query_for, rows_of, score_all
from fedone_sdk.backends.base import Answer, LLMBackend, Query, Wrapper
from fedone_sdk.backends.model_client import ModelClient
from fedone_sdk.budget import BudgetGuard, Usage
from fedone_sdk.candidates import prompt_of
from fedone_sdk.client.examples import Declining, reason_of
from fedone_sdk.client.work import Step
from fedone_sdk.errors import BackendError, BudgetError
from fedone_sdk.task import TextPrompt
from fedone_sdk.vocabulary import Vocabulary

_log = structlog.get_logger(__name__)


class BackendOracle:
    """Scores prompts with a backend on the device, each query after `ready`.

    A prompt that occurs twice is sent once, and counts as two queries.
    """

    def __init__(
        self,
        backend: LLMBackend,
        *,
        vocabulary: Vocabulary,
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        # Counts every attempt, including those of failed calls, for the reported usage.
        self._backend = backend if backend.metered else ModelClient(backend)
        self._vocabulary = vocabulary
        self._ready = ready
        self._bills: dict[int, tuple[Usage, BudgetGuard]] = {}

    async def ask(self, step: Step, missing: Sequence[int]) -> None:
        """Send all queries concurrently; the journal gets the losses of each as it is answered.

        Raises:
            Declining: The model failed, or the score function is broken.
            SpecError: The backend cannot answer what the task's loss needs.
        """
        keys, rows = step.keys, step.prompts.rows()
        bill = BudgetGuard(None, name="client")
        before = step.journal.spent(step.number)
        self._bills[step.number] = before, bill
        places: dict[TextPrompt, list[str]] = {}
        for place in missing:
            prompt = prompt_of(step.task, self._vocabulary, [int(index) for index in rows[place]])
            places.setdefault(prompt, []).append(keys[place])
        queries = {
            prompt: query_for(
                step.task,
                prompt,
                step.batch.texts,
                backend=self._backend,
                references=step.batch.references,
                payer=bill,
            )
            for prompt in places
        }
        # Queries that may have been sent when the device dies count as spent.
        at_risk = {
            prompt: (await self._backend.quote(query)).without_queries()
            for prompt, query in queries.items()
        }

        risked = sum(at_risk.values(), before)

        async def spent() -> Usage:
            return risked + (await bill.account()).spent

        async def answered(query: Query, prompt: TextPrompt, answer: Answer) -> None:
            try:
                check_answer(query, answer)
            except ValueError as exc:  # Before the journal has it: a restart would read it again.
                raise BackendError(f"the model's answer cannot be used: {exc}") from exc
            found = rows_of(query, answer)
            nonlocal risked
            risked = risked.beyond(at_risk.pop(prompt))
            step.keep([(places[prompt], found)], self._backend.fingerprint, await spent())

        step.journal.charge(step.number, await spent())
        prompts = {id(query): prompt for prompt, query in queries.items()}
        recorded = _Recorded(
            self._backend,
            ready=self._ready,
            answered=lambda query, answer: answered(query, prompts[id(query)], answer),
        )
        try:
            await score_all(recorded, queries.values())
        except (BackendError, BudgetError) as exc:
            _log.warning("the device's model failed", reason=str(exc))
            raise Declining(reason_of(exc)) from exc
        finally:
            at_risk.clear()
            held = (await bill.account()).held
            step.journal.charge(step.number, before + held)

    async def usage(self, step: Step) -> Usage:
        """Return the queries, and the cost of all attempts at them."""
        queries = Usage(queries=step.prompts.shape[0])
        if step.number not in self._bills:
            return queries + step.journal.spent(step.number)
        before, bill = self._bills[step.number]
        return queries + before + (await bill.account()).held


class _Recorded(Wrapper):
    """Awaits `ready` before each query, and reports each answer."""

    def __init__(
        self,
        inner: LLMBackend,
        *,
        ready: Callable[[], Awaitable[None]],
        answered: Callable[[Query, Answer], Awaitable[None]],
    ) -> None:
        super().__init__(inner)
        self._ready = ready
        self._answered = answered

    async def score(self, query: Query) -> Answer:
        await self._ready()
        answer = await self.inner.score(query)
        await self._answered(query, answer)
        return answer
