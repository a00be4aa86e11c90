"""What the gateway does for its callers, message in, message out; HTTP is a layer above."""

from __future__ import annotations

import hmac
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace

import structlog

from fedone_sdk.aggregator.auth import digest
from fedone_sdk.aggregator.throttle import Throttle
from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.backends.wrappers import BudgetedBackend
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard, Usage
from fedone_sdk.clock import Clock, SystemClock
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    LabelWordError,
    ProblemError,
    SpecError,
    StoreUnavailable,
)
from fedone_sdk.gateway.config import CallerLimits
from fedone_sdk.messages import ModelAnswer, ModelInfo, ModelProblem, ModelQuery
from fedone_sdk.task import Part, PartKind, Rendered

__all__ = ["ModelGateway", "Refusal"]

_log = structlog.get_logger(__name__)


class Refusal(ProblemError):
    """A refusal that says what the query cost all the same.

    Attributes:
        document: Its wire form.
        whole: What happened, with what callers are not told: for the log.
    """

    def __init__(self, code: str, error: Exception, usage: Usage | None) -> None:
        retry_after_s = error.retry_after_s if isinstance(error, BackendUnavailable) else None
        told = error.summary if isinstance(error, BackendError) else str(error)
        # On the wire as one line: it goes into the errors and logs of others.
        super().__init__(code, " ".join(told.split()), retry_after_s=retry_after_s)
        self.whole = " ".join(str(error).split())
        facts: dict[str, object] = {"usage": usage, "retry_after_s": retry_after_s}
        if isinstance(error, LabelWordError):
            facts |= {"word": error.word, "tokens": tuple(error.tokens)}
        self.document = ModelProblem.of(self).model_copy(update=facts)


class ModelGateway:
    """Asks one model for many callers, and tells each what its query cost.

    A query costs its caller at most what was quoted for it: `attempts` times what one attempt may
    cost.

    Args:
        backend: The model, with its wrappers. Stays the caller's.
        tokens: Each caller's name and token.
        guard: Pays for everything, as well as the callers; the backend must charge it.
        limits: What each caller may ask.
        generated_text: Whether texts that the model wrote may leave.
        attempts: The most attempts that the backend makes at one request.
        clock: Tells the time.
    """

    def __init__(
        self,
        backend: LLMBackend,
        *,
        tokens: Mapping[str, str],
        guard: BudgetGuard | None = None,
        limits: CallerLimits | None = None,
        generated_text: bool = False,
        attempts: int = 1,
        clock: Clock | None = None,
    ) -> None:
        if not backend.metered:
            backend = BudgetedBackend(backend, guard=guard)
        self._backend = backend
        self._digests = {name: digest(token) for name, token in tokens.items()}
        self._guard = guard
        self._limits = limits or CallerLimits()
        self._attempts = attempts
        self._clock = clock or SystemClock()
        self._throttle = Throttle()
        self._is_checked = False
        self._withheld = frozenset() if generated_text else frozenset({"text"})

    async def start(self) -> None:
        """Checks that the model is there and that the budget can be kept.

        Raises:
            SpecError: A cap is in a unit that the model does not bound.
            BackendError: The model cannot be asked.
        """
        await self._check(())

    async def _check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        await self._backend.check(label_words, form)
        budget = None if self._guard is None else self._guard.budget
        for unit in budget.model_dump(exclude_none=True) if budget is not None else ():
            if unit not in self._backend.bounds:
                raise SpecError(
                    f"budget.{unit}: cannot be bounded before it is spent (what can be: "
                    f"{', '.join(sorted(self._backend.bounds - {'queries'}))})"
                )
        self._is_checked = True

    async def _be_checked(self) -> None:
        if not self._is_checked:  # The model did not answer when the gateway started.
            await self._check(())

    async def ready(self) -> None:
        """Raises if requests cannot be served now. It does not ask the model."""
        if self._guard is not None:
            await self._guard.account()

    def caller(self, token: str | None, action: str) -> str:
        """The name of the caller that this token belongs to, whose request counts from now on.

        Args:
            token: As it was sent.
            action: What is asked; each kind has a count of its own.

        Raises:
            ProblemError: ``unauthorized`` or ``rate_limited``.
        """
        # Every entry is compared: how long it takes tells nothing about which one matched.
        given = digest(token or "")
        known = [
            name for name, secret in self._digests.items() if hmac.compare_digest(given, secret)
        ]
        if not known:
            raise ProblemError("unauthorized", "this needs the token of a caller of this gateway")
        self._throttle.admit(
            self._clock.now(), ((known[0], action), self._limits.client_requests_per_minute)
        )
        return known[0]

    async def check(
        self, label_words: tuple[str, ...], form: Iterable[tuple[PartKind, str]] = ()
    ) -> ModelInfo:
        """The model, after it was checked.

        Args:
            label_words: Each must be one token of the model.
            form: An input without content, which the model must take; empty for none.

        Raises:
            Refusal: It cannot be used, or a label word is not one token.
        """
        try:
            await self._check(label_words, _rendered(form))
            most = self._limits.max_inputs
            sizes = [2**power for power in range(most.bit_length())]
            return ModelInfo(
                fingerprint=self._backend.fingerprint,
                bounds=tuple(sorted(self._backend.bounds)),
                answers=tuple(sorted(self._backend.answers - self._withheld)),
                censors=self._backend.censors,
                max_inputs=most,
                worst=tuple(self._at_most(self._backend.worst_case(size)) for size in sizes),
            )
        except (BackendError, SpecError) as exc:
            raise _refusal(exc, NOTHING) from exc

    async def quote(self, message: ModelQuery) -> Usage:
        """The most that a query may cost its caller.

        Raises:
            ProblemError: It may not be asked.
            Refusal: The model cannot be asked.
        """
        try:
            await self._be_checked()
            return self._at_most(await self._backend.quote(self._query(message)))
        except (BackendError, SpecError) as exc:
            raise _refusal(exc, NOTHING) from exc

    async def score(self, caller: str, message: ModelQuery) -> ModelAnswer:
        """The model's answer, and what it cost.

        Args:
            caller: Who asks, for a fair share of the model.
            message: The query.

        Raises:
            ProblemError: It may not be asked.
            Refusal: The model failed, or the budget is spent.
        """
        bill = BudgetGuard(None if message.worst is None else _cap(message.worst), name=caller)
        try:
            await self._be_checked()
            query = self._query(message)
            answer = await self._backend.score(replace(query, payer=bill))
        except BudgetExhausted as exc:
            spent = (await bill.account()).held
            if await self._is_dearer(query, message.worst):
                # An answer was known when it was quoted, and is so no longer.
                stale = BackendUnavailable("the quote for this query holds no longer")
                raise Refusal("backend_unavailable", stale, spent) from exc
            raise Refusal("budget_exhausted", exc, spent) from exc
        except (BackendError, SpecError) as exc:
            raise _refusal(exc, (await bill.account()).held) from exc
        except (ProblemError, StoreUnavailable):
            raise
        except Exception as exc:
            # Asked again, it would fail again, and cost as much.
            _log.error("the backend has a bug", traceback=traceback.format_exc())
            bug = BackendError("the gateway's backend has a bug: see the gateway's log")
            raise _refusal(bug, (await bill.account()).held) from exc
        return ModelAnswer(
            fingerprint=self._backend.fingerprint,
            log_probs=answer.log_probs,
            texts=answer.texts,
            usage=(await bill.account()).held,
            cached=answer.cached,
            censored=answer.censored,
            model=answer.model,
        )

    def _query(self, message: ModelQuery) -> Query:
        if message.want in self._withheld:
            raise ProblemError("forbidden", "this gateway gives out no generated text")
        if message.want not in self._backend.answers:
            known = ", ".join(sorted(self._backend.answers - self._withheld))
            raise ProblemError("invalid_message", f"want: this model answers {known}")
        if len(message.inputs) > self._limits.max_inputs:
            raise ProblemError(
                "invalid_message",
                f"inputs: {len(message.inputs)} were sent, a query has at most "
                f"{self._limits.max_inputs}",
            )
        references = message.references or ("",) * len(message.inputs)
        for number, (parts, reference) in enumerate(zip(message.inputs, references, strict=True)):
            size = sum(len(text) for _, text in parts) + len(reference)
            if size > self._limits.max_text_chars:
                raise ProblemError(
                    "invalid_message",
                    f"inputs.{number}: has {size} characters, an input has at most "
                    f"{self._limits.max_text_chars}",
                )
        return Query(
            inputs=tuple(map(_rendered, message.inputs)),
            label_words=message.label_words,
            want=message.want,
            references=message.references,
            max_tokens=message.max_tokens,
        )

    def _at_most(self, attempt: Usage) -> Usage:
        """What all attempts may cost together; they are one query all the same."""
        return attempt.without_queries() * self._attempts + Usage(queries=attempt.queries)

    async def _is_dearer(self, query: Query, quoted: Usage | None) -> bool:
        if quoted is None:
            return False
        return self._at_most(await self._backend.quote(query)).beyond(quoted) != NOTHING


def _rendered(parts: Iterable[tuple[PartKind, str]]) -> Rendered:
    return tuple(Part(*part) for part in parts)


def _cap(worst: Usage) -> Budget:
    return Budget.model_validate(worst.model_dump(exclude={"queries"}))


def _refusal(error: BackendError | SpecError, usage: Usage) -> Refusal:
    if isinstance(error, LabelWordError):
        return Refusal("label_word", error, usage)
    if isinstance(error, BackendUnavailable):
        return Refusal("backend_unavailable", error, usage)
    if isinstance(error, BackendBlocked | SpecError):
        return Refusal("backend_blocked", error, usage)
    return Refusal("backend_failed", error, usage)
