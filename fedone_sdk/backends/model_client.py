"""The client of a model, which adds a cache, retries, rate limits and budgets to a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain

from fedone_sdk.backends.answers import AnswerCache, Keep, row_keys
from fedone_sdk.backends.base import Answer, LLMBackend, Query, Wrapper
from fedone_sdk.backends.billing import Billing, with_usage
from fedone_sdk.backends.completions import sampled
from fedone_sdk.backends.queries import CONCURRENCY, run_each
from fedone_sdk.backends.rate_limit import RateLimiter
from fedone_sdk.backends.refusals import Refusals, failed
from fedone_sdk.backends.retries import Retries
from fedone_sdk.budget import NOTHING, BudgetGuard, Price, Usage
from fedone_sdk.errors import BackendError, BackendRefused
from fedone_sdk.spec import LimitsSpec, RetrySpec

_SMALL = 32 * 1024
"""Cache keys of queries up to this many characters are computed on the event loop."""

Watch = Callable[[LLMBackend, Query], AbstractContextManager[object]]
"""Returns a context manager that wraps one request."""


class ModelClient(Wrapper):
    """Sends queries to a model through these stages, in this order.

    1. cache: answers known inputs, and sends equal inputs only once (`AnswerCache`)
    2. split: divides the other inputs into requests of at most `LLMBackend.max_inputs` inputs
    3. samples: sends several requests in place of one if answers are sampled (`sampled`)
    4. refusals: decides whether a model refuses one input or every input (`Refusals`)
    5. retries: repeats a request after temporary failures; has a circuit breaker (`Retries`)
    6. rate limits: delays each attempt (`RateLimiter`)
    7. budget: reserves and charges the cost of each attempt (`Billing`)
    8. watch: records metrics and traces of each attempt, which the adapter then sends

    The requests of a query are sent concurrently. After a failure no further request starts, and
    pending requests complete. Then the most severe error is raised, with the usage of all requests.

    **Budget.** The query's payer and an optional second budget are charged. Before a request is
    sent, an upper bound on its cost is reserved. If the bound does not fit a budget, the request is
    not sent. After the answer, the actual cost is charged. If the actual cost is unknown (after a
    timeout or a cancellation), the bound is charged.

    If a provider bills more than the bound, the bill is charged, even above a cap, and later bounds
    are higher. With `retry`, the first request of each kind and the request after such a bill are
    sent alone, so at most one request at a time exceeds its bound.

    Args:
        inner: The adapter: the backend that sends the requests.
        cache: If None, no answers are stored.
        retry: If None, each request is sent once.
        limits: If None, no request is delayed.
        price: Price of the model. If None, the adapter's cost in money is charged.
        guard: The second budget, which is charged in addition to the query's payer.
        watch: Called for every request, including each retry.
    """

    def __init__(
        self,
        inner: LLMBackend,
        *,
        cache: AnswerCache | None = None,
        retry: RetrySpec | None = None,
        limits: LimitsSpec | None = None,
        price: Price | None = None,
        guard: BudgetGuard | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.cache = cache
        self._price = price
        self._billing = Billing(price, guard)
        self._watch = watch
        self._concurrency = CONCURRENCY if limits is None else limits.concurrency
        max_wait_s = (retry or RetrySpec()).max_wait_s
        self._limiter = None if limits is None else RateLimiter(limits, max_wait_s=max_wait_s)
        self._retries: Retries | None = None
        if retry is not None:
            self._retries = Retries(
                retry,
                on_open=None if self._limiter is None else self._limiter.refuse_waiting,
                alone=lambda: self._billing.surplus.unsure or self._refusals.unsure,
            )
        self._refusals = Refusals(self._retried)
        super().__init__(inner)

    def _copy_attributes(self) -> None:
        super()._copy_attributes()
        self.max_inputs = None
        self.metered = True
        if self.inner.samples:
            self.answers = self.answers - {"counts"} | {"labels"}
        if self._price is not None:
            # Money is bounded if every unit with a price is bounded.
            if self._price.units <= self.bounds:
                self.bounds |= {"usd"}
            else:
                self.bounds -= {"usd"}

    async def score(self, query: Query) -> Answer:
        """Answer one query with as many requests as needed.

        Returns:
            The answer. `usage` is the sum over all requests, money included. `limits` come from the
            last request. If a second model has answered too, `model` is the second one.

        Raises:
            BackendBlocked: The breaker is open, a setting, key or quota must change, or the cache's
                file cannot be used. Of several errors, the first in this list is raised.
            BudgetExhausted: A request does not fit a budget and was not sent.
            BackendError: An input does not fit the model.
            BackendUnavailable: Temporary failure; answered requests are paid.
        """
        sent: list[Answer] = []

        async def send(part: Sequence[int], keep: Keep | None) -> list[Answer]:
            asked = query.part(part)
            try:
                answer = await self._answered(asked, sent)
            except BackendRefused as exc:  # Each half is sent again, to find the refused inputs.
                sent.append(failed(asked, exc.usage or NOTHING))
                half = len(part) // 2
                return [*await send(part[:half], keep), *await send(part[half:], keep)]
            if {len(answer.log_probs), len(answer.texts) or len(part)} != {len(part)}:
                raise ValueError(
                    f"{len(answer.log_probs)} answers were given to {len(part)} inputs"
                )
            if keep is not None:
                rows = dict(zip((keys[place] for place in part), _rows(answer), strict=True))
                await keep(rows)
            return [answer]

        async def send_all(places: Sequence[int], keep: Keep | None = None) -> list[Answer]:
            answers, errors = await run_each(
                lambda part: send(part, keep), self._parts(places), concurrency=self._concurrency
            )
            if errors:
                raise with_usage(errors[0], _total(sent, errors))
            return [answer for _, parts in sorted(answers.items()) for answer in parts]

        if self.cache is None:
            return _merged(await send_all(range(len(query.inputs))), sent)
        keys = await self._keys(query)
        places = {key: place for place, key in reversed([*enumerate(keys)])}

        async def ask(wanted: Sequence[bytes], keep: Keep) -> None:
            await send_all([places[key] for key in wanted], keep)

        return _merged(await self.cache.rows(keys, self.fingerprint, ask), sent)

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """Return the bound on the cost of a query of `batch_size` inputs, money included."""
        max_inputs = self.inner.max_inputs or max(batch_size, 1)
        num_full, remainder = divmod(batch_size, max_inputs)
        usage = NOTHING
        for size, times in ((max_inputs, num_full), (remainder, min(remainder, 1))):
            if times:
                usage += self._billing.bound(self.inner.worst_case(size, max_tokens), size) * times
        return usage.model_copy(update={"queries": 1})

    async def quote(self, query: Query) -> Usage:
        """Return the bound on the cost of all requests of a query, money included.

        A cached input costs nothing, so that a resumed run near its cap can use its paid answers.
        """
        new: Sequence[int] = range(len(query.inputs))
        if self.cache is not None:
            new = await self.cache.unknown(await self._keys(query))
        usage = NOTHING
        for part in self._parts(new):
            usage += self._billing.bound(await self.inner.quote(query.part(part)), len(part))
        return usage.model_copy(update={"queries": 1})

    @property
    def trouble(self) -> str | None:
        """Why the breaker is open, or why the model is known to be unavailable."""
        return (self._retries and self._retries.trouble) or self.inner.trouble

    def reset(self) -> None:
        """Forget recorded failures; the next request is then sent even if the breaker is open."""
        if self._retries is not None:
            self._retries.reset()
        self._refusals.reset()
        self.inner.reset()

    async def aclose(self) -> None:
        """Close the cache's file and the adapter."""
        try:
            if self.cache is not None:
                await self.cache.aclose()
        finally:
            await self.inner.aclose()

    async def _answered(self, query: Query, sent: list[Answer]) -> Answer:
        """Answer a part of a query, by several requests if answers are sampled."""

        async def ask(part: Query) -> Answer:
            answer = await self._refusals.run(part)
            sent.append(answer)
            return answer

        if not self.inner.samples or query.want != "labels":
            return await ask(query)
        return await sampled(query, self.inner.samples, lambda: self.inner.at_once, ask)

    async def _keys(self, query: Query) -> list[bytes]:
        shortened = await self.inner.shortened(query)
        work = partial(row_keys, self.fingerprint, query, shortened, apart=self.inner.apart)
        size = sum(len(part.text) for parts in query.inputs for part in parts)
        return work() if size < _SMALL else await asyncio.to_thread(work)

    def _parts(self, places: Sequence[int]) -> list[Sequence[int]]:
        size = self.inner.max_inputs or max(len(places), 1)
        return [places[start : start + size] for start in range(0, len(places), size)]

    async def _retried(self, query: Query) -> Answer:
        if self._retries is None:
            return await self._limited(query)
        return await self._retries.run(query.want, lambda: self._limited(query))

    async def _limited(self, query: Query) -> Answer:
        self._refusals.admit(query)
        payer, num_inputs = query.payer, len(query.inputs)
        quoted = await self.inner.quote(query)

        async def ask() -> Answer:
            with nullcontext() if self._watch is None else self._watch(self.inner, query):
                return await self.inner.score(query)

        def pay() -> Awaitable[Answer]:
            return self._billing.pay(payer, quoted, num_inputs, ask)

        if self._limiter is None:
            return await pay()
        worst = self._billing.bound(quoted, num_inputs)
        tokens = worst.prompt_tokens + worst.completion_tokens
        return await self._limiter.run("" if payer is None else payer.name, tokens, pay)


def metered(backend: LLMBackend) -> LLMBackend:
    """Return a backend that charges the payer of a query, failed attempts included.

    The result is the same object for each call, because it learns from the provider's bills.
    """
    if backend.metered:
        return backend
    client: ModelClient | None = vars(backend).get("_metered_client")
    if client is None:
        client = vars(backend)["_metered_client"] = ModelClient(backend)
    client._copy_attributes()
    return client


def _rows(answer: Answer) -> list[Answer]:
    """Split an answer into the answers to its inputs, without usage."""
    return [
        replace(
            answer,
            log_probs=(row,),
            texts=answer.texts[place : place + 1],
            usage=NOTHING,
            # The request's totals are not known per input, so the first answer gets them.
            censored=0 if place else answer.censored,
            cached=0 if place else answer.cached,
        )
        for place, row in enumerate(answer.log_probs)
    ]


def _merged(rows: Sequence[Answer], sent: Sequence[Answer]) -> Answer:
    first = rows[0].model if rows else None
    return Answer(
        log_probs=tuple(chain.from_iterable(row.log_probs for row in rows)),
        usage=sum((answer.usage for answer in sent), NOTHING),
        cached=sum(row.cached for row in rows),
        texts=tuple(chain.from_iterable(row.texts for row in rows)),
        censored=sum(row.censored for row in rows),
        # If a second model has answered too, it is reported, so that a run detects the change.
        model=next((row.model for row in rows if row.model != first), first),
        limits=sent[-1].limits if sent else None,
    )


def _total(answers: Iterable[Answer], errors: Iterable[Exception]) -> Usage | None:
    usage = sum((answer.usage for answer in answers), NOTHING)
    for error in errors:
        if isinstance(error, BackendError):
            if error.usage is None:
                return None
            usage += error.usage
    return usage
