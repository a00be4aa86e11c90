"""The interface of language models: a backend (also called adapter) answers queries."""

from __future__ import annotations

import asyncio
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar

from fedone_sdk.backends.chat import is_chat, warn_of_raw_template
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, SpecError
from fedone_sdk.task import LOG_ZERO, Rendered, in_unicode

if TYPE_CHECKING:
    from fedone_sdk.backends.encoders import CausalEncoder, ClozeEncoder
    from fedone_sdk.budget import Payer

__all__ = ["Answer", "LLMBackend", "LOG_ZERO", "Query", "RateLimits", "Want", "Wrapper"]

EVERY_UNIT = frozenset(
    {"queries", "requests", "tokens", "prompt_tokens", "completion_tokens", "usd"}
)
"""All units that a budget can cap."""

_MAX_PREPARED = 2**21
"""Maximum number of tokens of the tokenised queries in memory; each takes about 50 bytes."""

_MAX_MODEL_CHARS = 500

Want = Literal["labels", "choice", "counts", "reference", "text"]
"""What a query asks for.

- ``labels``: log-probabilities of the label words
- ``choice``: the label word that the model writes
- ``counts``: for each label word, how many of several sampled answers are this word
- ``reference``: the log-probability of a reference text
- ``text``: a generated text
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query: one prompt on one mini-batch of B inputs.

    If an attribute names kinds (`Want`) in parentheses, only queries of these kinds use it.

    Attributes:
        inputs: The B rendered inputs.
        label_words: The C label words (``labels``, ``choice`` and ``counts``).
        references: Per input, the text to score (``reference``).
        samples: Number of answers to sample per input; a model may return fewer (``counts``).
        max_tokens: Maximum length of the generated text, in tokens (``text``).
        stop: A generated text ends before the first of these strings (``text``).
        schema: JSON Schema that the generated text must follow; empty for any text (``text``).
        scope: The run, and at a gateway also the device; empty for other callers. Queries share
            cached answers only within a scope. Otherwise a fast or free answer would reveal that
            another device had sent the same text.
        payer: Budget that is charged for each request and retry; ignored in comparisons.
    """

    inputs: tuple[Rendered, ...]
    label_words: tuple[str, ...] = ()
    want: Want = "labels"
    references: tuple[str, ...] = ()
    samples: int = 1
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    schema: str = ""
    scope: tuple[str, ...] = ()
    payer: Payer | None = field(default=None, compare=False, repr=False)

    @property
    def device(self) -> tuple[str, ...] | None:
        """The scope, if it includes a device; None otherwise."""
        return self.scope if len(self.scope) > 1 else None

    def part(self, places: Sequence[int]) -> Query:
        """Return this query for only the inputs at these positions."""
        if places == range(len(self.inputs)):
            return self
        return replace(
            self,
            inputs=tuple(self.inputs[place] for place in places),
            references=tuple(self.references[place] for place in places if self.references),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Remaining rate limits that a provider reports; None if unknown."""

    requests: int | None = None
    requests_reset_s: float | None = None
    tokens: int | None = None
    tokens_reset_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a query.

    Attributes:
        log_probs: Per input, a row of numbers, or None if the input failed (refused, filtered). The
            row depends on the kind of the query:

            - ``labels``: log-probabilities of the C labels, nats, over the whole vocabulary
            - ``choice``: 0.0 for the label that the model wrote, `LOG_ZERO` for the others
            - ``counts``: the number of answers that wrote each label, then of all answers
            - ``reference``: the log-probability of the whole reference text, nats
            - ``text``: no numbers
        usage: Actual usage, with 0 queries; the caller counts queries.
        cached: Number of inputs whose answer came from the SDK's cache.
        cached_tokens: Prompt tokens of the usage that were in the provider's cache.
        texts: Per input, the generated text (``text``).
        censored: Number of log-probabilities that are upper bounds: the API shows no value.
        model: The model version that the provider reports, if more specific than the fingerprint.
    """

    log_probs: tuple[tuple[float, ...] | None, ...]
    usage: Usage
    cached: int = 0
    cached_tokens: int = 0
    texts: tuple[str | None, ...] = ()
    censored: int = 0
    model: str | None = None
    limits: RateLimits | None = None

    def __post_init__(self) -> None:
        texts = tuple(None if text is None else in_unicode(text) for text in self.texts)
        object.__setattr__(self, "texts", texts)
        if self.model is not None:
            object.__setattr__(self, "model", in_unicode(self.model)[:_MAX_MODEL_CHARS])

    @property
    def text(self) -> str:
        """The generated text of the first input; empty if it failed."""
        return (self.texts[0] if self.texts else None) or ""


class LLMBackend(ABC):
    """A black-box language model.

    Subclasses implement `fingerprint` and `score`, for one API. `ModelClient` adds cache, retries,
    rate limits and budget.

    Attributes:
        bounds: The units that `worst_case` bounds. A run with a cap in another unit is refused at
            its start.
        takes_schema: Whether the backend can constrain a generated text to a JSON schema.
        max_inputs: Maximum number of inputs per request; `ModelClient` splits longer queries. None
            means no limit.
        apart: Whether the answer to an input is independent of the other inputs of its query. If
            so, `ModelClient` requests only the inputs that are not in its cache.
        metered: Whether `score` charges each request to the query's payer, as `ModelClient` does.
        samples: For a backend that answers ``counts``: the number of answers per input from which
            `ModelClient` estimates label log-probabilities (`sampled`). 0 for other backends.
        local: Whether the model runs in this process for free; `fedone plan` may measure its speed.
    """

    bounds: frozenset[str] = frozenset({"queries", "requests"})
    answers: frozenset[Want] = frozenset({"labels"})
    takes_schema: bool = False
    max_inputs: int | None = None
    apart: bool = True
    metered: bool = False
    samples: int = 0
    local: bool = False

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identifier of the exact model; scores from different fingerprints are not comparable."""

    @property
    def at_once(self) -> int:
        """Maximum number of sampled answers per request."""
        return 1

    @abstractmethod
    async def score(self, query: Query) -> Answer:
        """Answer one query with one request.

        The SDK's backends shorten an input that is too long: they cut the ends of its text fields,
        the longest first. Prompts, template texts and masks stay whole. Log-probabilities are
        rounded to float32, the precision in which a gateway sends them to devices.

        Raises:
            BackendError: An input does not fit the model, the model refused the query as a whole,
                or the model cannot be loaded or run.
            BackendUnavailable: Temporary failure; a retry may succeed.
            BackendBlocked: Permanent failure until a setting, key or quota changes.
            LabelWordError: A label word is not one token.
            ValueError: The query has no inputs, or lacks a field that its kind needs.
        """

    async def check(  # noqa: B027 (optional)
        self, label_words: tuple[str, ...], form: Rendered = ()
    ) -> None:
        """Check, at no cost, that the model exists and supports the task.

        Args:
            label_words: The task's label words.
            form: An input with empty fields (`fedone_sdk.task.form_of`); if (), it is not checked.

        Raises:
            LabelWordError: A label word is not one token.
            BackendError: The model does not support the task.
        """

    def check_query(self, query: Query) -> None:
        """Check that the kind of a query is supported, and that it has the fields of its kind."""
        if not query.inputs:
            raise ValueError("a query needs at least one input")
        if query.want not in self.answers:
            kinds = " or ".join(sorted(self.answers))
            raise BackendError(f"this model answers queries of kind {kinds}, not {query.want!r}")
        if query.want in ("labels", "choice", "counts") and not query.label_words:
            raise ValueError("a query needs label words")
        if query.want == "reference" and len(query.references) != len(query.inputs):
            raise ValueError("a query needs one reference per input")

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """Return an upper bound on the usage of `batch_size` inputs, in the units of `bounds`."""
        return Usage(queries=1, requests=1)

    async def quote(self, query: Query) -> Usage:
        """Return an upper bound on the usage of this query, at most the `worst_case`."""
        return self.worst_case(len(query.inputs), query.max_tokens)

    async def special_tokens(self, text: str) -> list[str]:
        """Return the model's special tokens in a text; empty if they are unknown."""
        return []

    async def shortened(self, query: Query) -> Sequence[object]:
        """Return for each input a JSON value that identifies the shortened input in a cache.

        The value may be the shortened text or its token ids. It is None if no value is needed: the
        input is not shortened, or `fingerprint` already determines how it is shortened.
        """
        return (None,) * len(query.inputs)

    @property
    def trouble(self) -> str | None:
        """Why the model is known to be unavailable; None if it can be called."""
        return None

    def reset(self) -> None:  # noqa: B027 (optional)
        """Forget recorded failures; called after an operator has resolved their cause."""

    async def aclose(self) -> None:  # noqa: B027 (optional)
        """Release the backend's resources."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Wrapper(LLMBackend):
    """Delegates all methods to the inner backend; subclasses override some.

    Args:
        changes: Values that replace fields of every query, such as ``payer``.
    """

    def __init__(self, inner: LLMBackend, **changes: Any) -> None:
        self.inner = inner
        self._changes = changes
        self._copy_attributes()

    def _copy_attributes(self) -> None:
        names = "bounds", "answers", "takes_schema", "max_inputs", "apart", "metered", "local"
        for name in names:
            setattr(self, name, getattr(self.inner, name))

    @property
    def innermost(self) -> LLMBackend:
        """The adapter inside all wrappers."""
        backend = self.inner
        while isinstance(backend, Wrapper):
            backend = backend.inner
        return backend

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    async def score(self, query: Query) -> Answer:
        return await self.inner.score(self._changed(query))

    def _changed(self, query: Query) -> Query:
        return replace(query, **self._changes) if self._changes else query

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        await self.inner.check(label_words, form)
        self._copy_attributes()

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        return self.inner.worst_case(batch_size, max_tokens)

    async def quote(self, query: Query) -> Usage:
        return await self.inner.quote(self._changed(query))

    async def special_tokens(self, text: str) -> list[str]:
        return await self.inner.special_tokens(text)

    async def shortened(self, query: Query) -> Sequence[object]:
        return await self.inner.shortened(self._changed(query))

    @property
    def trouble(self) -> str | None:
        return self.inner.trouble

    def reset(self) -> None:
        self.inner.reset()

    async def aclose(self) -> None:
        await self.inner.aclose()


class Prepared(Protocol):
    """A tokenised and shortened query, with the upper bound on its usage."""

    @property
    def worst(self) -> Usage: ...


P = TypeVar("P", bound=Prepared)
R = TypeVar("R")


class PreparingBackend(LLMBackend, Generic[P]):
    """Base of the adapters: tokenises and shortens each query once, in a separate thread."""

    def __init__(self) -> None:
        self._token_thread = ThreadPoolExecutor(1, thread_name_prefix="fedone-tokens")
        self._recent: OrderedDict[Query, P] = OrderedDict()
        self._num_tokens = 0

    @abstractmethod
    async def _prepare(self, query: Query) -> P:
        """Tokenise and shorten a query."""

    async def _prepared(self, query: Query) -> P:
        if (prepared := self._recent.get(query)) is None:
            prepared = await self._prepare(query)
            if query not in self._recent:  # A concurrent call may have prepared it.
                self._recent[query] = prepared
                self._num_tokens += prepared.worst.prompt_tokens
            while self._num_tokens > _MAX_PREPARED:
                self._num_tokens -= self._recent.popitem(last=False)[1].worst.prompt_tokens
        return prepared

    async def quote(self, query: Query) -> Usage:
        return (await self._prepared(query)).worst

    async def aclose(self) -> None:
        await asyncio.to_thread(self._token_thread.shutdown)

    async def _in(self, threads: ThreadPoolExecutor, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(threads, call)


E = TypeVar("E", bound="ClozeEncoder | CausalEncoder")
M = TypeVar("M")


class LocalBackend(PreparingBackend[P], Generic[P, E, M]):
    """Base of the adapters to a model in this process, which costs no money.

    The first call that needs the model loads it. The abstract methods may block, because they run
    in the backend's own threads.

    Attributes:
        max_length: Maximum tokens per input, including special tokens and the model's answer.

    Args:
        threads: Maximum number of concurrent queries.
        has_template: Whether the model has a chat template.
    """

    bounds = EVERY_UNIT
    local = True
    max_length: int

    def __init__(
        self, kind: str, model_name: str, *, threads: int = 1, has_template: bool = False
    ) -> None:
        super().__init__()
        self._model_threads = ThreadPoolExecutor(threads, thread_name_prefix=f"fedone-{kind}")
        self._model_name, self._warns_of_raw_template = model_name, has_template
        self._loading = Lock()
        self._encoder: E | None = None
        self._model: M | None = None

    @abstractmethod
    def _load_encoder(self) -> E:
        """Load the tokeniser."""

    @abstractmethod
    def _load_model(self) -> M:
        """Load the weights."""

    @abstractmethod
    def _plan(self, query: Query) -> P:
        """Tokenise and shorten a query."""

    @abstractmethod
    def _run(self, query: Query, plan: P) -> Answer:
        """Run the model."""

    def _loaded_encoder(self) -> E:
        if self._encoder is None:  # No lock: the token thread loads it before any query is run.
            self._encoder = self._load_encoder()
        return self._encoder

    def _loaded(self) -> M:
        with self._loading:
            if self._model is None:
                self._model = self._load_model()
                _ = self.fingerprint  # Computed in this thread and cached: hashing a file is slow.
            return self._model

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        def check() -> None:
            encoder = self._loaded_encoder()
            encoder.label_ids(label_words, form)
            if form:
                encoder.encode(form)

        await self._in(self._token_thread, check)
        await self._in(self._model_threads, self._loaded)
        if form and not is_chat(form) and self._warns_of_raw_template:
            self._warns_of_raw_template = False
            warn_of_raw_template(self._model_name)

    async def special_tokens(self, text: str) -> list[str]:
        return await self._in(
            self._token_thread, lambda: self._loaded_encoder().special_names(text)
        )

    async def score(self, query: Query) -> Answer:
        plan = await self._prepared(query)
        return await self._in(self._model_threads, lambda: self._run(query, plan))

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        most_written = min(max_tokens, self.max_length)
        return one_query(self.max_length * batch_size, most_written * batch_size)

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.to_thread(self._model_threads.shutdown)
        self._model = self._encoder = None

    async def _prepare(self, query: Query) -> P:
        self.check_query(query)
        return await self._in(self._token_thread, lambda: self._plan(query))


def setting_error(problem: str) -> SpecError:
    """Return the error for a key of ``backend``; `problem` begins with the key."""
    return SpecError(problem, source="backend")


def one_query(prompt_tokens: int, completion_tokens: int = 0, requests: int = 1) -> Usage:
    """Return the usage of one query."""
    tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return Usage(queries=1, requests=requests, **tokens)


def float32(value: float) -> float:
    """Return the nearest float32 number."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
