"""The way of a query to a model: split, cache, retries, rate limits, budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import replace
from functools import reduce
from itertools import chain

import structlog

from fedone_sdk.backends.answers import AnswerCache, query_key
from fedone_sdk.backends.asking import CONCURRENCY, ask_each
from fedone_sdk.backends.base import Answer, LLMBackend, Query, Wrapper
from fedone_sdk.backends.rate_limit import RateLimiter
from fedone_sdk.backends.retries import Retries
from fedone_sdk.budget import NOTHING, BudgetGuard, Lease, Payer, Price, Usage
from fedone_sdk.errors import BackendBlocked, BackendError, BudgetExhausted
from fedone_sdk.spec import LimitsSpec, RetrySpec

_log = structlog.get_logger(__name__)

_SMALL = 32 * 1024
"""Characters up to which a key is computed on the event loop."""

Watch = Callable[[LLMBackend, Query], AbstractContextManager[object]]
"""Returns a context manager that wraps one request."""


class ModelClient(Wrapper):
    """Sends queries to a model through stages, in one order.

    1. split: divides a query into requests of at most `LLMBackend.max_inputs` inputs;
    2. cache: returns known answers, and joins equal pending requests (`AnswerCache`);
    3. retries: repeats a request after temporary failures, until a circuit breaker opens
       (`Retries`);
    4. rate limits: delays each attempt (`RateLimiter`);
    5. budget: reserves each attempt before it is sent, and settles it after the answer;
    6. watch, for metrics and traces; then the adapter sends the request.

    **Split.** The requests of a query are sent concurrently. After a failure no further one starts,
    pending ones complete, and the most severe error is raised with the usage of all (`ask_each`).

    **Cache.** Requests are equal if their contents and the truncated forms of inputs that are too
    long (`LLMBackend.shortened`) are equal; the payer does not matter.

    **Budget.** The query's payer is charged, and an optional second budget. The upper bound of a
    request's cost is reserved before it is sent; a request that does not fit is not sent. The
    actual cost is charged after the answer, and the rest is released. A request of unknown cost (a
    timeout, a cancelled caller) is charged in full. Logical queries are counted by the caller,
    because a retry is the same query. The bound is the adapter's `quote`, which must be above the
    bill. If a provider bills more, the actual cost is charged, a cap may be exceeded by the
    difference, and a warning is logged.

    Args:
        inner: The adapter.
        cache: None keeps no answers.
        retry: None sends each request once.
        limits: None delays no request.
        price: Price of the model. None keeps the adapter's cost, so that there is no bound in money
            unless the adapter has one.
        guard: A budget that is charged in addition to the query's payer.
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
        self._guard = guard
        self._watch = watch
        self._concurrency = CONCURRENCY if limits is None else limits.concurrency
        self._limiter: RateLimiter | None = None
        if limits is not None:
            max_wait_s = (retry or RetrySpec()).max_wait_s
            self._limiter = RateLimiter(**limits.model_dump(), max_wait_s=max_wait_s)
        self._retries: Retries | None = None
        if retry is not None:
            self._retries = Retries(**retry.model_dump(), on_open=self._refuse_waiting)
        super().__init__(inner)

    def _describe(self) -> None:
        super()._describe()
        self.max_inputs = None
        self.metered = True
        if self._price is not None:
            # Money is bounded if every unit with a price is.
            if self._price.units <= self.bounds:
                self.bounds |= {"usd"}
            else:
                self.bounds -= {"usd"}

    async def score(self, query: Query) -> Answer:
        """Answers one query with as many requests as needed.

        Returns:
            The rows in the order of the inputs, the sums of `usage` and `censored`, `cached` if all
            parts are, `limits` of the last part, and the `model` of the first part, or of one that
            differs from it. `usage` includes the cost in money.

        Raises:
            BackendBlocked: The breaker is open, or a setting, key or quota must change, or the
                cache's file cannot be used; takes precedence over all other errors.
            BudgetExhausted: A request does not fit a budget and was not sent; or the model's own
                budget is exhausted. Second in precedence.
            BackendError: A request was refused; third in precedence.
            BackendUnavailable: Temporary failure; answered requests are paid.
        """
        parts = self._parts(query)
        if len(parts) == 1:
            return await self._cached(parts[0])
        answers, errors = await ask_each(self._cached, parts, concurrency=self._concurrency)
        if errors:
            raise _with_usage(errors[0], _total(answers.values(), errors))
        return _merged([answers[index] for index in range(len(parts))])

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """Return the bound of all requests of `batch_size` inputs, as one query, with its cost."""
        most = self.inner.max_inputs or max(batch_size, 1)
        full, rest = divmod(batch_size, most)
        usage = NOTHING
        for size, times in ((most, full), (rest, min(rest, 1))):
            if times:
                usage += self._priced(self.inner.worst_case(size, max_tokens)) * times
        return _as_one_query(usage)

    async def quote(self, query: Query) -> Usage:
        """Return the quote of all requests of the query, as one query, with its cost in money.

        A cached request costs nothing, so that a resumed run near its cap can replay paid answers.
        """
        quotes = []
        for part in self._parts(query):
            known = self.cache is not None and await self.cache.holds(await self._key(part))
            quotes.append(NOTHING if known else self._priced(await self.inner.quote(part)))
        return _as_one_query(reduce(Usage.__add__, quotes))

    @property
    def trouble(self) -> str | None:
        """Why the breaker is open, or the model is known to be unavailable."""
        return (self._retries and self._retries.trouble) or self.inner.trouble

    def reset(self) -> None:
        """Clear recorded failures: the next request is the breaker's probe."""
        if self._retries is not None:
            self._retries.reset()
        self.inner.reset()

    async def aclose(self) -> None:
        """Close the cache's file and the adapter."""
        try:
            if self.cache is not None:
                await self.cache.aclose()
        finally:
            await self.inner.aclose()

    # Split

    def _parts(self, query: Query) -> list[Query]:
        most = self.inner.max_inputs
        if most is None or len(query.inputs) <= most:
            return [query]
        return [
            replace(
                query,
                inputs=query.inputs[start : start + most],
                references=query.references[start : start + most],
            )
            for start in range(0, len(query.inputs), most)
        ]

    # Cache, retries, rate limits

    async def _cached(self, query: Query) -> Answer:
        if self.cache is None:
            return await self._retried(query)
        key = await self._key(query)
        return await self.cache.answer(key, self.fingerprint, lambda: self._retried(query))

    async def _key(self, query: Query) -> bytes:
        shortened = await self.inner.shortened(query)
        size = sum(len(part.text) for parts in query.inputs for part in parts)
        if size < _SMALL:
            return query_key(self.fingerprint, query, shortened)
        return await asyncio.to_thread(query_key, self.fingerprint, query, shortened)

    async def _retried(self, query: Query) -> Answer:
        if self._retries is None:
            return await self._limited(query)
        return await self._retries.run(query.want, lambda: self._limited(query))

    async def _limited(self, query: Query) -> Answer:
        worst = self._priced(await self.inner.quote(query)).without_queries()
        if self._limiter is None:
            return await self._paid(query, worst)
        payer = "" if query.payer is None else query.payer.name
        tokens = worst.prompt_tokens + worst.completion_tokens
        return await self._limiter.run(payer, tokens, lambda: self._paid(query, worst))

    def _refuse_waiting(self, reason: BackendBlocked) -> None:
        if self._limiter is not None:
            self._limiter.refuse_waiting(reason)

    # Budget

    async def _paid(self, query: Query, worst: Usage) -> Answer:
        async with AsyncExitStack() as stack:
            leases = await self._reserve(stack, query.payer, worst)
            try:
                with nullcontext() if self._watch is None else self._watch(self.inner, query):
                    answer = await self.inner.score(query)
            except BackendError as exc:
                if exc.usage is not None:
                    self._settle(leases, worst, self._priced(exc.usage))
                raise
            except BudgetExhausted as exc:  # From another account, behind this model.
                self._settle(leases, worst, self._priced(exc.usage or NOTHING))
                raise
            usage = self._priced(answer.usage)
            self._settle(leases, worst, usage)
            return answer if usage is answer.usage else replace(answer, usage=usage)

    async def _reserve(
        self, stack: AsyncExitStack, payer: Payer | None, worst: Usage
    ) -> list[Lease]:
        payers: list[Payer] = [] if self._guard is None else [self._guard]
        if payer is not None and payer is not self._guard:
            payers.append(payer)
        leases: list[Lease] = []
        try:
            for each in payers:
                leases.append(await stack.enter_async_context(each.reserve(worst)))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return leases

    def _settle(self, leases: list[Lease], worst: Usage, usage: Usage) -> None:
        used = usage.without_queries()
        over = used.beyond(worst)
        if over != NOTHING:
            _log.warning(
                "the provider counted more than the request was bounded by",
                model=self.fingerprint,
                quoted=worst.exact(),
                beyond=over.exact(),
            )
        for lease in leases:
            lease.settle(used)

    def _priced(self, usage: Usage) -> Usage:
        return usage if self._price is None else self._price.priced(usage)


def _as_one_query(usage: Usage) -> Usage:
    return usage.without_queries() + Usage(queries=1)


def _merged(answers: Sequence[Answer]) -> Answer:
    return Answer(
        log_probs=tuple(chain.from_iterable(answer.log_probs for answer in answers)),
        usage=reduce(Usage.__add__, (answer.usage for answer in answers)),
        cached=all(answer.cached for answer in answers),
        texts=tuple(chain.from_iterable(answer.texts for answer in answers)),
        censored=sum(answer.censored for answer in answers),
        # A run must detect that answers came from different models.
        model=next((a.model for a in answers if a.model != answers[0].model), answers[0].model),
        limits=answers[-1].limits,
    )


def _total(answers: Iterable[Answer], errors: Iterable[Exception]) -> Usage | None:
    usage = reduce(Usage.__add__, (answer.usage for answer in answers), NOTHING)
    for error in errors:
        if isinstance(error, BackendError):
            if error.usage is None:
                return None
            usage += error.usage
    return usage


def _with_usage(error: Exception, usage: Usage | None) -> Exception:
    if not isinstance(error, BackendError):
        return error
    # A copy, because the cache may share the error with other callers.
    copied = type(error).__new__(type(error), *error.args)
    copied.__dict__.update(error.__dict__)
    copied.usage = usage
    copied.__cause__ = error.__cause__
    return copied.with_traceback(error.__traceback__)
