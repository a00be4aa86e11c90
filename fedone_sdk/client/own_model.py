"""The scores of a model on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from fedone_sdk.backends.asking import check_answer, query_for, rows_of, score_all
from fedone_sdk.backends.base import Answer, LLMBackend, Query, Wrapper
from fedone_sdk.backends.model_client import ModelClient
from fedone_sdk.budget import BudgetGuard, Usage
from fedone_sdk.candidates import prompt_of
from fedone_sdk.client.examples import Declining, Unfit, reason_of
from fedone_sdk.client.job import Job, Step
from fedone_sdk.errors import BackendError, BudgetError, BudgetExhausted

_log = structlog.get_logger(__name__)


class OwnModel:
    """Scores the prompts of one assignment with a backend on the device.

    A prompt that occurs twice is sent once, and counts as two queries. While it works, it alone
    charges the device's budget.
    """

    def __init__(self, job: Job, backend: LLMBackend) -> None:
        self._job = job
        # Counts every attempt, including those of failed calls, for the reported usage.
        self._backend = backend if backend.metered else ModelClient(backend)
        self._bill = job.device.budget or BudgetGuard(None, name="client")

    async def ask(self, step: Step, missing: Sequence[int]) -> None:
        """Send all queries concurrently; the journal gets the answers to each as they arrive.

        Raises:
            Declining: The model failed, or the score function is broken.
            SpecError: The backend cannot answer what the task's loss needs.
        """
        model, batch = self._backend.fingerprint, step.batch
        if not batch.texts:  # All are held back, which a private device does not show.
            await step.keep([(missing, ())], model, Usage(queries=len(step.keys)))
            return
        queries: dict[Query, list[int]] = {}
        for place in missing:
            queries.setdefault(await self._query(step, place), []).append(place)
        recorded = _Recorded(self._backend, step, queries, self._bill)
        await recorded.begin()
        try:
            await score_all(recorded, queries)
        except (BackendError, BudgetError) as exc:
            _log.warning("the device's model failed", reason=str(exc))
            if batch.private and type(exc) is BackendError:  # Perhaps because of a text.
                await step.keep([(step.missing, [None] * len(batch.texts))], model)
                return
            kind = Unfit if isinstance(exc, BudgetExhausted) else Declining
            raise kind(reason_of(exc)) from exc
        finally:
            await recorded.end()

    async def _query(self, step: Step, place: int) -> Query:
        task, reflection = self._job.run.task, self._job.run.reflection
        changed = {}
        if step.proposal is not None and reflection is not None:
            changed = {reflection.slot: step.proposal.text}
        indices = [int(index) for index in step.prompts.rows()[place]]
        prompt = prompt_of(task, await self._job.vocabulary(), indices, changed)
        return query_for(
            task,
            prompt,
            step.batch.texts,
            backend=self._backend,
            references=step.batch.references,
            payer=self._bill,
        )


class _Recorded(Wrapper):
    """Waits for the app's condition before each query, and adds its answer and cost to the journal.

    Queries that may have been sent when the device dies count as spent.
    """

    def __init__(
        self,
        inner: LLMBackend,
        step: Step,
        queries: Mapping[Query, Sequence[int]],
        bill: BudgetGuard,
    ) -> None:
        super().__init__(inner)
        self._step = step
        self._queries = queries
        self._bill = bill
        self._journal = step.job.journal
        num_queries = Usage(queries=len(step.keys))
        self._before = self._journal.spent(step.number).without_queries() + num_queries
        self._at_risk: dict[Query, Usage] = {}
        self._bound = self._before

    async def begin(self) -> None:
        """Add the bound of all queries to the journal."""
        for query in self._queries:
            self._at_risk[query] = (await self.inner.quote(query)).without_queries()
        self._bound = sum(self._at_risk.values(), self._before)
        self._start = await self._bill.account()
        self._journal.charge(self._step.number, self._bound)

    async def score(self, query: Query) -> Answer:
        await self._step.job.ready()
        try:
            answer = await self.inner.score(query)
            check_answer(query, answer)
        except ValueError as exc:  # Before the journal has it: a restart would read it again.
            raise BackendError(f"the model's answer cannot be used: {exc}") from exc
        rows = rows_of(query, answer)
        self._bound = self._bound.beyond(self._at_risk.pop(query))
        spent = self._bound + ((await self._bill.account()).spent - self._start.spent)
        await self._step.keep([(self._queries[query], rows)], self.inner.fingerprint, spent)
        return answer

    async def end(self) -> None:
        """Replace the bound in the journal by the cost."""
        held = (await self._bill.account()).held - self._start.held
        self._journal.charge(self._step.number, self._before + held)
