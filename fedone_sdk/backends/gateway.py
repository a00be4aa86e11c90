"""A model behind `fedone gateway`, which holds the key to it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from fedone_sdk.backends._codec import query_key
from fedone_sdk.backends._secrets import read_secret
from fedone_sdk.backends.base import Answer, LLMBackend, Query, Want
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    LabelWordError,
)
from fedone_sdk.messages import (
    MAX_INPUTS,
    LabelWords,
    Message,
    ModelAnswer,
    ModelInfo,
    ModelProblem,
    ModelQuery,
)
from fedone_sdk.task import Rendered

__all__ = ["GatewayBackend"]

T = TypeVar("T")

_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_MAX_QUOTES = 10_000


class GatewayBackend(LLMBackend):
    """Asks a `fedone gateway`, which knows the model's key and tells what each answer cost.

    An answer costs at most what was quoted for it, retries by the gateway included. What the
    gateway remembers costs nothing. The fingerprint is the model's own, so that it may be asked
    directly or through a gateway, and its scores are the same.

    Attributes:
        bounds: What the gateway bounds; only `check` brings the truth.
        answers: What the gateway answers; as above.
        censors: Whether its log-probabilities may be upper bounds only; as above.
        max_inputs: The most inputs that it takes at once; as above.

    Args:
        url: Of the gateway.
        token_env: Environment variable that holds the gateway's token.
        timeout_s: Seconds until an unanswered request counts as failed, and as paid in full. It
            should be more than the gateway itself waits for the model.

    Raises:
        SpecError: The variable is not set, or its value cannot be a token.
    """

    bounds = frozenset({"queries", "requests"})
    answers = frozenset[Want]({"labels"})
    max_inputs = MAX_INPUTS

    def __init__(
        self, url: str, *, token_env: str = "FEDONE_GATEWAY_TOKEN", timeout_s: float = 60.0
    ) -> None:
        self._url = url.rstrip("/")
        self._token_env = token_env
        self._headers = {
            "Authorization": f"Bearer {_token(token_env)}",
            "Content-Type": "application/json",
        }
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._info: ModelInfo | None = None
        self._quotes: OrderedDict[bytes, Usage] = OrderedDict()

    @property
    def fingerprint(self) -> str:
        """The model's own.

        Raises:
            BackendError: The gateway has not been checked yet.
        """
        return self._checked().fingerprint

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Asks the gateway for its model, and lets it check label words and form.

        Raises:
            BackendUnavailable: The gateway, or its model, does not answer.
            BackendBlocked: The token is not valid, this is no gateway, or its model has changed.
            LabelWordError: A label word is not one token.
        """
        message = _message(lambda: LabelWords(label_words=label_words, form=form))
        info = await self._ask("/v1/model/check", message, ModelInfo.model_validate_json)
        self._compare(info.fingerprint, NOTHING)
        self._info = info
        self.bounds, self.answers = frozenset(info.bounds), frozenset(info.answers)
        self.censors, self.max_inputs = info.censors, info.max_inputs

    async def score(self, query: Query) -> Answer:
        """Answers one query by one request.

        Raises:
            BackendError: The model or the gateway refused the query.
            BackendUnavailable: The gateway or its model cannot be asked now.
            BackendBlocked: It cannot be asked until somebody changes something.
            BudgetExhausted: The gateway's budget is spent.
            LabelWordError: A label word is not one token.
        """
        key = query_key("", query)
        message = _wire(query, worst=self._quotes.get(key))
        try:
            answer = await self._ask("/v1/model/score", message, ModelAnswer.model_validate_json)
        finally:
            self._quotes.pop(key, None)
        self._compare(answer.fingerprint, answer.usage)
        if len(answer.log_probs) != len(query.inputs):
            raise BackendBlocked(
                f"answered {len(answer.log_probs)} inputs of {len(query.inputs)}: "
                "check that url names a fedone gateway",
                url=self._url,
                usage=answer.usage,
            )
        return Answer(
            log_probs=answer.log_probs,
            usage=answer.usage,
            cached=answer.cached,
            texts=answer.texts,
            censored=answer.censored,
            model=answer.model,
        )

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """The most that a query of this size may cost, in the gateway's word.

        Raises:
            BackendError: The gateway has not been checked yet.
        """
        worst = self._checked().worst
        full, rest = divmod(batch_size, self.max_inputs)
        usage = _at_most(worst, self.max_inputs) * full
        usage = usage + _at_most(worst, rest) if rest else usage
        texts = Usage(queries=1, completion_tokens=max_tokens * batch_size)
        return usage.without_queries() + texts

    async def quote(self, query: Query) -> Usage:
        """What the gateway quotes: nothing for what it remembers. It is asked once per query."""
        key = query_key("", query)
        if key not in self._quotes:
            path = "/v1/model/quote"
            self._quotes[key] = await self._ask(path, _wire(query), Usage.model_validate_json)
            if len(self._quotes) > _MAX_QUOTES:
                self._quotes.popitem(last=False)
        return self._quotes[key]

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _checked(self) -> ModelInfo:
        if self._info is None:
            raise BackendError("the gateway has not been checked yet", url=self._url, usage=NOTHING)
        return self._info

    def _compare(self, fingerprint: str, usage: Usage) -> None:
        if self._info is not None and fingerprint != self._info.fingerprint:
            raise BackendBlocked(
                f"the gateway's model has changed: it was {self._info.fingerprint}, "
                f"now it is {fingerprint}: go back, or start a new run",
                url=self._url,
                usage=usage,
            )

    async def _ask(self, path: str, message: Message, parse: Callable[[bytes], T]) -> T:
        # A lost request is paid only where it may have reached the model.
        lost = None if path == "/v1/model/score" else NOTHING
        try:
            body = message.model_dump_json().encode()
        except ValueError as exc:
            raise BackendError(
                "an input is not valid Unicode (it has a lone surrogate)", usage=NOTHING
            ) from exc
        try:
            status, headers, found = await self._post(path, body)
        except aiohttp.ClientConnectorCertificateError as exc:
            raise BackendBlocked(
                f"the gateway's certificate is not accepted "
                f"({_one_line(exc.certificate_error)}): check url, or trust its authority through "
                "SSL_CERT_FILE",
                url=self._url,
                usage=NOTHING,
            ) from exc
        except aiohttp.ClientConnectorSSLError as exc:
            raise BackendBlocked(
                f"TLS failed ({_one_line(exc)}): check http or https, and the port, in url",
                url=self._url,
                usage=NOTHING,
            ) from exc
        except aiohttp.InvalidURL as exc:
            raise BackendBlocked("is not a URL: check url", url=self._url, usage=NOTHING) from exc
        except aiohttp.ClientConnectorError as exc:
            raise BackendUnavailable(
                "no connection", url=self._url, said=_one_line(exc), usage=NOTHING
            ) from exc
        except TimeoutError as exc:
            raise BackendUnavailable("no answer in time", url=self._url, usage=lost) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise BackendUnavailable(
                "the connection broke", url=self._url, said=_one_line(exc), usage=lost
            ) from exc
        if status != 200:
            raise self._refusal(status, headers, found, lost)
        try:
            return parse(found)
        except ValidationError as exc:
            raise BackendBlocked(
                "answers, but not as a fedone gateway of this version does: check url",
                url=self._url,
                usage=lost,
            ) from exc

    async def _post(self, path: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        if self._session is None:
            # Created here, not in __init__: a session belongs to the loop that uses it. How many
            # requests are under way is limited by the wrappers.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                trust_env=True,
            )
        async with self._session.post(
            self._url + path,
            data=body,
            headers=self._headers,
            allow_redirects=False,  # a redirect would carry the token elsewhere
        ) as response:
            found = bytearray()
            async for chunk in response.content.iter_any():
                found += chunk
                if len(found) > _MAX_ANSWER_BYTES:
                    raise aiohttp.ClientPayloadError("the answer is too large")
            return response.status, response.headers, bytes(found)

    def _refusal(
        self, status: int, headers: Mapping[str, str], body: bytes, lost: Usage | None
    ) -> Exception:
        try:
            problem = ModelProblem.model_validate_json(body)
        except ValidationError:
            # Not the gateway: a proxy between here and there. Its 5xx will pass.
            if status >= 500 or status == 429:
                return BackendUnavailable(
                    f"HTTP {status}",
                    url=self._url,
                    usage=NOTHING if status in (429, 503) else lost,
                    retry_after_s=_seconds(headers.get("Retry-After")),
                )
            return BackendBlocked(
                f"HTTP {status}, and not from a fedone gateway: check url",
                url=self._url,
                usage=NOTHING,
            )
        if problem.code == "label_word" and problem.word is not None:
            label_word = LabelWordError(problem.word, list(problem.tokens))
            label_word.usage = problem.usage
            return label_word
        if problem.code == "budget_exhausted":
            return BudgetExhausted(problem.detail, usage=problem.usage)
        if problem.code == "backend_unavailable":
            return BackendUnavailable(
                problem.detail, usage=problem.usage, retry_after_s=problem.retry_after_s
            )
        if problem.code == "backend_blocked":
            return BackendBlocked(problem.detail, usage=problem.usage)
        if problem.code == "backend_failed":
            return BackendError(problem.detail, usage=problem.usage)
        # All others are the gateway's own, which has not asked the model then.
        if problem.code == "rate_limited":
            wait = _seconds(headers.get("Retry-After"))
            return BackendUnavailable(
                problem.detail, url=self._url, usage=NOTHING, retry_after_s=wait
            )
        if problem.code == "unauthorized":
            return BackendBlocked(
                f"{problem.detail}: put a valid one in its place",
                url=self._url,
                key_env=self._token_env,
                usage=NOTHING,
            )
        if problem.code in ("forbidden", "not_found", "method_not_allowed"):
            return BackendBlocked(
                f"{problem.detail}: check url, or the gateway's config",
                url=self._url,
                usage=NOTHING,
            )
        if status >= 500:
            return BackendUnavailable(problem.detail, url=self._url, usage=lost)
        return BackendError(problem.detail, url=self._url, usage=NOTHING)


def _token(token_env: str) -> str:
    unset = "put the gateway's token there, or name another variable"
    return read_secret("token_env", token_env, unset=unset)


def _wire(query: Query, *, worst: Usage | None = None) -> ModelQuery:
    return _message(
        lambda: ModelQuery(
            want=query.want,
            inputs=tuple(
                tuple((part.kind, part.text) for part in rendered) for rendered in query.inputs
            ),
            label_words=query.label_words,
            references=query.references,
            max_tokens=query.max_tokens,
            worst=worst,
        )
    )


def _message(make: Callable[[], T]) -> T:
    try:
        return make()
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(step) for step in error["loc"])
        raise BackendError(
            f"the query does not fit a gateway: {where}: {error['msg']}", usage=NOTHING
        ) from None


def _at_most(worst: tuple[Usage, ...], batch_size: int) -> Usage:
    """A bound for any size, from those for 1, 2, 4, 8 ... inputs; as good as always exact.

    A query costs no more than a larger one does, and no more than its parts do on their own.
    """
    powers = [power for power in range(batch_size.bit_length()) if batch_size >> power & 1]
    parts = reduce(Usage.__add__, (worst[power] for power in powers))
    larger = (batch_size - 1).bit_length()
    if larger >= len(worst):
        return parts
    return Usage.model_validate(
        {unit: min(amount, getattr(worst[larger], unit)) for unit, amount in parts}
    )


def _seconds(value: str | None) -> float | None:
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _one_line(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
