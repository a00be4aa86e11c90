"""Splitting of queries into requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain

from fedone_sdk.backends.asking import CONCURRENCY, ask_each
from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.wrapper import Wrapper
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendError


class SplitBackend(Wrapper):
    """Splits queries for a model that accepts `max_inputs` inputs per request.

    A query of B inputs becomes ceil(B / max_inputs) concurrent queries. After a failure no further
    one starts, pending ones complete, and the most severe error is raised with the usage of all
    (`ask_each`).

    Args:
        inner: The inner backend.
        concurrency: Maximum concurrent parts of one query.
    """

    def __init__(self, inner: LLMBackend, *, concurrency: int = CONCURRENCY) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        super().__init__(inner)
        self._concurrency = concurrency

    def _describe(self) -> None:
        super()._describe()
        self.max_inputs = None

    async def score(self, query: Query) -> Answer:
        """Answers one query with as many requests as needed.

        Returns:
            The rows in the order of the inputs, the sums of `usage` and `censored`, `cached` if all
            parts are, `limits` of the last part, and the `model` of the first part, or of one that
            differs from it.

        Raises:
            BackendBlocked: A part raised it; takes precedence over all other errors.
            BudgetExhausted: The budget does not suffice for a part; second in precedence.
            BackendError: A part was refused; third in precedence.
            BackendUnavailable: Temporary failure; answered parts are paid.
        """
        parts = self._parts(query)
        if len(parts) == 1:
            return await self.inner.score(query)
        answers, errors = await ask_each(self.inner, parts, concurrency=self._concurrency)
        if errors:
            raise _with_usage(errors[0], _total(answers.values(), errors))
        return _merged([answers[index] for index in range(len(parts))])

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """Return the bound of all requests of `batch_size` inputs, as one query."""
        most = self.inner.max_inputs
        if most is None or batch_size <= most:
            return self.inner.worst_case(batch_size, max_tokens)
        full, rest = divmod(batch_size, most)
        usage = self.inner.worst_case(most, max_tokens) * full
        return _as_one_query(usage + self.inner.worst_case(rest, max_tokens) if rest else usage)

    async def quote(self, query: Query) -> Usage:
        """Return the quote of all requests of the query, as one query."""
        quotes = [await self.inner.quote(part) for part in self._parts(query)]
        return quotes[0] if len(quotes) == 1 else _as_one_query(reduce(Usage.__add__, quotes))

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
    """Return the usage of all parts; None if that of one part is unknown."""
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
    # A copy, because an inner cache may share the error with other callers.
    copied = type(error).__new__(type(error), *error.args)
    copied.__dict__.update(error.__dict__)
    copied.usage = usage
    copied.__cause__ = error.__cause__
    return copied.with_traceback(error.__traceback__)
