"""The loss oracle of a device with its own model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from fedone_sdk.backends.asking import check_answer, query_for, rows_of, score_all
from fedone_sdk.backends.base import Answer, LLMBackend, Query, Wrapper
from fedone_sdk.backends.model_client import ModelClient
from fedone_sdk.budget import BudgetGuard, Usage
from fedone_sdk.candidates import prompt_of
from fedone_sdk.client.examples import Declining, Unfit, reason_of
from fedone_sdk.client.work import Step
from fedone_sdk.errors import BackendError, BudgetError, BudgetExhausted
from fedone_sdk.task import TextPrompt
from fedone_sdk.vocabulary import Vocabulary

_log = structlog.get_logger(__name__)


class BackendOracle:
    """Scores prompts with a backend on the device, each query after `ready`.

    A prompt that occurs twice is sent once, and counts as two queries. While the oracle works, it
    alone charges `budget`. `proposed` is the slot of a step's proposal.
    """

    def __init__(
        self,
        backend: LLMBackend,
        *,
        vocabulary: Vocabulary,
        ready: Callable[[], Awaitable[None]],
        budget: BudgetGuard | None,
        proposed: str = "",
    ) -> None:
        self._proposed = proposed
        # Counts every attempt, including those of failed calls, for the reported usage.
        self._backend = backend if backend.metered else ModelClient(backend)
        self._vocabulary = vocabulary
        self._ready = ready
        self._bill = budget or BudgetGuard(None, name="client")

    async def ask(self, step: Step, missing: Sequence[int]) -> None:
        """Send all queries concurrently; the journal gets the losses of each as it is answered.

        Raises:
            Declining: The model failed, or the score function is broken.
            SpecError: The backend cannot answer what the task's loss needs.
        """
        if not step.batch.texts:  # All are held back, which a private device does not show.
            cost = Usage(queries=step.prompts.shape[0])
            await step.keep([(step.keys, ())], self._backend.fingerprint, cost)
            return
        rows = step.prompts.rows()
        places: dict[TextPrompt, list[str]] = {}
        for place in missing:
            changed = {} if step.proposal is None else {self._proposed: step.proposal.text}
            indices = [int(index) for index in rows[place]]
            prompt = prompt_of(step.task, self._vocabulary, indices, changed)
            places.setdefault(prompt, []).append(step.keys[place])
        queries = [
            query_for(
                step.task,
                prompt,
                step.batch.texts,
                backend=self._backend,
                references=step.batch.references,
                payer=self._bill,
            )
            for prompt in places
        ]
        keys = {id(query): found for query, found in zip(queries, places.values(), strict=True)}
        recorded = _Recorded(self._backend, step, keys, self._bill, self._ready)
        await recorded.begin(queries)
        try:
            await score_all(recorded, queries)
        except (BackendError, BudgetError) as exc:
            _log.warning("the device's model failed", reason=str(exc))
            if step.batch.private and type(exc) is BackendError:  # Perhaps because of a text.
                unanswered = [key for key in step.keys if step.journal.row(key) is None]
                nothing = [None] * len(step.batch.texts)
                await step.keep([(unanswered, nothing)], self._backend.fingerprint)
                return
            kind = Unfit if isinstance(exc, BudgetExhausted) else Declining
            raise kind(reason_of(exc)) from exc
        finally:
            await recorded.end()


class _Recorded(Wrapper):
    """Awaits `ready` before each query, and adds each answer and its cost to the step's journal.

    Queries that may have been sent when the device dies count as spent.
    """

    def __init__(
        self,
        inner: LLMBackend,
        step: Step,
        keys: Mapping[int, Sequence[str]],
        bill: BudgetGuard,
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(inner)
        self._step = step
        self._keys = keys
        self._bill = bill
        self._ready = ready
        num_queries = Usage(queries=step.prompts.shape[0])
        self._before = step.journal.spent(step.number).without_queries() + num_queries
        self._at_risk: dict[int, Usage] = {}
        self._bound = self._before

    async def begin(self, queries: Sequence[Query]) -> None:
        """Add the bound of all queries to the journal."""
        for query in queries:
            self._at_risk[id(query)] = (await self.inner.quote(query)).without_queries()
        self._bound = sum(self._at_risk.values(), self._before)
        self._start = await self._bill.account()
        self._step.journal.charge(self._step.number, self._bound)

    async def score(self, query: Query) -> Answer:
        await self._ready()
        try:
            answer = await self.inner.score(query)
            check_answer(query, answer)
        except ValueError as exc:  # Before the journal has it: a restart would read it again.
            raise BackendError(f"the model's answer cannot be used: {exc}") from exc
        found = rows_of(query, answer)
        self._bound = self._bound.beyond(self._at_risk.pop(id(query)))
        spent = self._bound + ((await self._bill.account()).spent - self._start.spent)
        await self._step.keep([(self._keys[id(query)], found)], self.inner.fingerprint, spent)
        return answer

    async def end(self) -> None:
        """Replace the bound in the journal by the cost."""
        held = (await self._bill.account()).held - self._start.held
        self._step.journal.charge(self._step.number, self._before + held)
