"""Every exception of the SDK, in one tree.

FedOneError
├── SpecError              a RUN.yaml or a configuration is invalid
│   └── ArgumentError      an option of a command, or an argument of a client, is invalid
├── DataError              a data file or example cannot be used
├── ResultError            a run's result or export cannot be read, or lacks data that is needed
├── MethodError            a user's method failed during a run
├── MissingExtraError      an optional dependency is not installed
├── BudgetError
│   ├── BudgetExhausted    a reservation exceeds the cap
│   └── UnknownLease       a lease (a reserved amount) does not exist, or was settled before
├── BackendError
│   ├── BackendUnavailable the model is temporarily unavailable; a retry may succeed
│   │   └── FormChanged        the server refused the request's format; a retry uses another one
│   ├── BackendBlocked     the model is unavailable until a key, quota or setting changes
│   │   └── FormBlocked        the model refuses all requests of one task; other tasks may continue
│   │       └── LabelsNotShown answers rarely include the label words
│   ├── BackendRefused     the model refused a request, because of its input or format
│   └── LabelWordError     a label word is not exactly one token of the model
├── StoreUnavailable       the aggregator's store is unavailable
├── MessageError           a received message is malformed, or not from the aggregator
│   └── RefusedBetween     a proxy refused a request with a 4xx status
├── TransportError         the aggregator is unreachable; a retry may succeed
└── ProblemError           the aggregator refused, with an RFC 9457 problem and a stable code
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedone_sdk._values import Usage

__all__ = [
    "ArgumentError",
    "BackendBlocked",
    "BackendError",
    "BackendRefused",
    "BackendUnavailable",
    "BudgetError",
    "BudgetExhausted",
    "DataError",
    "FedOneError",
    "FormBlocked",
    "FormChanged",
    "LabelWordError",
    "LabelsNotShown",
    "MessageError",
    "MethodError",
    "MissingExtraError",
    "PROBLEMS",
    "ProblemError",
    "RefusedBetween",
    "ResultError",
    "SpecError",
    "StoreUnavailable",
    "TransportError",
    "UnknownLease",
    "is_retryable",
    "needs_extra",
]


class FedOneError(Exception):
    """Base of all errors that the SDK raises deliberately."""


class SpecError(FedOneError):
    """A RUN.yaml, a configuration or an argument is invalid."""

    def __init__(self, problems: list[str] | str, *, source: str = "spec") -> None:
        self.source = source
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))


class ArgumentError(SpecError):
    """An option of a command, or an argument of a client, is invalid; `source` is "arguments"."""

    def __init__(self, problems: list[str] | str) -> None:
        super().__init__(problems, source="arguments")


class DataError(FedOneError):
    """A data file or an example cannot be used."""


class ResultError(FedOneError):
    """A run's result or export cannot be read, or lacks data that is needed."""


class MethodError(FedOneError):
    """A user's method failed during a run, or returned an invalid value."""


class MissingExtraError(FedOneError, ImportError):
    """An optional dependency is not installed; the message has the command that installs it."""

    def __init__(self, feature: str, *, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{feature} needs an extra: {installing(extra)}")


def installing(*extras: str) -> str:
    """Return the command that installs the packages of some extras."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("fedone-sdk") or []
    except PackageNotFoundError:
        lines = []
    marker = re.compile(rf"extra == ['\"]({'|'.join(extras)})['\"]")
    packages = {line.partition(";")[0].strip(): None for line in lines if marker.search(line)}
    return f"pip install {shlex.join(packages)}" if packages else ", ".join(extras)


@contextmanager
def system_errors(error: type[FedOneError], what: object) -> Iterator[None]:
    """Raise `error` in place of an `OSError` of the body; the message begins with `what`."""
    try:
        yield
    except OSError as exc:
        raise error(f"{what}: {exc.strerror or exc}") from exc


@contextmanager
def needs_extra(feature: str, extra: str) -> Iterator[None]:
    """Raise `MissingExtraError` if an import in the body fails."""
    try:
        yield
    except ImportError as exc:
        raise MissingExtraError(feature, extra=extra) from exc


class BudgetError(FedOneError):
    """Base of budget errors."""


class BudgetExhausted(BudgetError):
    """A reservation exceeds the cap. If a server refused it, all attributes are None.

    Attributes:
        held: The amount that was already spent or reserved.
        asked: The amount of the refused reservation.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        unit: str | None = None,
        cap: object = None,
        held: object = None,
        asked: object = None,
    ) -> None:
        self.unit, self.cap, self.held, self.asked = unit, cap, held, asked
        super().__init__(
            message
            or f"budget of {cap} {unit} exhausted: {held} spent or reserved, {asked} more needed"
        )


class UnknownLease(BudgetError):
    """A lease (a reservation of budget) does not exist, or is already settled."""

    def __init__(self, lease_id: str) -> None:
        self.lease_id = lease_id
        super().__init__(f"lease {lease_id!r} is not open")


class BackendError(FedOneError):
    """The language model failed to answer.

    The error's text has all details, for the operator of the model. Devices get only `summary`.

    Attributes:
        summary: What happened, and how to fix it, without `url`, `key_env` and `said`.
        url: The model's URL.
        key_env: The environment variable of the key, if the key is the problem.
        said: The message of the provider or of the network; it may repeat texts of the request.
        usage: The cost of the failed call. If None (unknown), the reservation is charged in full.
    """

    def __init__(
        self,
        message: str,
        *,
        usage: Usage | None = None,
        url: str | None = None,
        key_env: str | None = None,
        said: str = "",
    ) -> None:
        self.summary = message
        self.url, self.key_env, self.said = url, key_env, said
        self.usage = usage
        super().__init__(message)

    def __str__(self) -> str:
        where = "" if self.url is None else f"{self.url}: "
        key = "" if self.key_env is None else f" (the key is in {self.key_env})"
        return f"{where}{self.summary}{key}{self.said and f' ({self.said})'}"

    @property
    def private(self) -> dict[str, Any]:
        """The fields that `summary` omits, as arguments for an error that replaces this one."""
        return {"url": self.url, "key_env": self.key_env, "said": self.said}


class BackendUnavailable(BackendError):
    """The model is temporarily unavailable; the same call may succeed later."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, **more: Any) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message, **more)


class FormChanged(BackendUnavailable):
    """The server does not accept a request's format; the next attempt uses another format."""


class BackendBlocked(BackendError):
    """The model is unavailable until a key, a quota or a setting is changed; the run pauses."""


class FormBlocked(BackendBlocked):
    """The model refuses every request of a task; it may still answer requests of other tasks."""


class LabelsNotShown(FormBlocked):
    """Most answers of a model do not include the label words of a query."""


class BackendRefused(BackendError):
    """The model refused a request, because of its input or because of its format.

    `ModelClient` sends a test request to find out whether other inputs are refused too.
    """


class LabelWordError(BackendError):
    """A label word is not exactly one token of the model.

    Attributes:
        way_out: What the user can do instead of choosing another word; empty if there is nothing.
        also: The errors for the task's other label words.
    """

    def __init__(
        self,
        word: str,
        tokens: list[str],
        way_out: str = "",
        suggested: Sequence[str] | None = None,
        *,
        also: Sequence[LabelWordError] = (),
    ) -> None:
        self.word, self.tokens, self.way_out, self.also = word, tokens, way_out, (*also,)
        if suggested is None:
            suggested = () if word.startswith(" ") else (f" {word}",)
        self.suggested = (*suggested,)
        hint = f" (did you mean {' or '.join(map(repr, suggested))}?)" if suggested else ""
        self._problem = (
            f"label word {word!r} is {len(tokens)} tokens {tokens} for this model; "
            f"it must be exactly one{hint}{way_out and ': choose another word, or '}{way_out}"
        )
        super().__init__("; ".join(self.problems))

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each label word that is not one token."""
        return (self._problem, *(line for other in self.also for line in other.problems))


class MessageError(FedOneError):
    """A received message is malformed, or is not from the aggregator."""


class RefusedBetween(MessageError):
    """A proxy refused a request with a 4xx status; a repetition would be refused too."""


class StoreUnavailable(FedOneError):
    """A store is unavailable: unreachable, full, locked or damaged."""


class TransportError(FedOneError):
    """The aggregator is unreachable; the same call may succeed later."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


# The stable codes of the HTTP contract, each with its HTTP status and its title.
PROBLEMS: dict[str, tuple[int, str]] = {
    "invalid_message": (422, "The message is malformed"),
    "invalid_run": (422, "The run cannot be started as described"),
    "label_word": (422, "A label word is not one token of the language model"),
    "unauthorized": (401, "The credential is missing or not valid"),
    "budget_exhausted": (402, "The budget does not suffice"),
    "forbidden": (403, "The credential does not allow this"),
    "not_found": (404, "There is no such resource"),
    "method_not_allowed": (405, "The resource does not support this method"),
    "request_timeout": (408, "The request came too slowly"),
    "assignment_expired": (409, "The assignment has ended, and another client may have its seat"),
    "renewal_refused": (409, "The assignment was renewed as often as the run allows"),
    "update_conflict": (409, "Another update was already accepted for this assignment"),
    "model_mismatch": (409, "The update was scored with a model that the run does not use"),
    "lease_exhausted": (409, "The budget reserved for the assignment does not suffice"),
    "token_conflict": (409, "An enrolment token of this name exists"),
    "run_conflict": (409, "The run is not in a state that allows this"),
    "run_ended": (410, "The run has ended"),
    "body_too_large": (413, "The body is larger than allowed"),
    "not_json": (415, "The body must be JSON"),
    "unsupported_encoding": (415, "The body must not be compressed"),
    "backend_blocked": (424, "The language model is unavailable until an operator intervenes"),
    "upgrade_required": (426, "The protocol version is not supported"),
    "rate_limited": (429, "Too many requests"),
    "internal": (500, "The server failed"),
    "backend_failed": (502, "The language model refused the request"),
    "backend_unavailable": (503, "The language model is temporarily unavailable"),
    "store_unavailable": (503, "The server's store is temporarily unavailable"),
}


class ProblemError(FedOneError):
    """A refusal with a stable code, sent as RFC 9457 ``application/problem+json``.

    Attributes:
        code: One of `PROBLEMS`. Callers can rely on it.
        retry_after_s: Delay before the same call, seconds; None if unspecified.
    """

    def __init__(self, code: str, detail: str, *, retry_after_s: float | None = None) -> None:
        self.code, self.detail, self.retry_after_s = code, detail, retry_after_s
        self.status, self.title = PROBLEMS.get(code, (500, code))
        super().__init__(f"{code}: {detail}")


def is_retryable(error: BaseException) -> bool:
    """Return whether the same call may succeed later."""
    if isinstance(error, ProblemError):
        failed_once = error.status >= 500 and error.code != "backend_failed"
        return failed_once or error.status in (408, 429)
    return isinstance(error, (TransportError, BackendUnavailable))


def one_line(text: object) -> str:
    """Return a text on one line, for errors and logs; white space becomes single spaces."""
    return " ".join(str(text).split())
