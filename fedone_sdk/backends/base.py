"""What a language model looks like to the SDK: it answers queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from fedone_sdk.budget import Usage
from fedone_sdk.errors import SpecError
from fedone_sdk.soft_prompt import SoftPrompt, SoftPromptKind
from fedone_sdk.task import LOG_ZERO, Rendered

if TYPE_CHECKING:
    from fedone_sdk.budget import Payer

__all__ = ["Answer", "EmbeddingSpace", "LLMBackend", "LOG_ZERO", "Query", "RateLimits", "Want"]

Want = Literal["labels", "choice", "reference", "text"]
"""What is asked about each input: the log-probabilities of the label words; which of them the
model writes (for models without log-probabilities); the log-probability of a reference text; or a
text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One logical query: one prompt on one mini-batch.

    Attributes:
        inputs: The rendered inputs, B of them.
        label_words: The C label words (``labels`` and ``choice``).
        want: What is asked.
        references: Per input the text whose log-probability is asked for (``reference``).
        max_tokens: The longest text that may be written, tokens (``text``).
        soft_prompt: Vectors that take the prompt's place; the text of its part is empty then.
        payer: Who pays for each request, retries included. No part of what is asked.
    """

    inputs: tuple[Rendered, ...]
    label_words: tuple[str, ...] = ()
    want: Want = "labels"
    references: tuple[str, ...] = ()
    max_tokens: int = 0
    soft_prompt: SoftPrompt | None = None
    payer: Payer | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """What a provider says is left of its rate limits; None is unknown.

    Attributes:
        requests: Requests left.
        requests_reset_s: Seconds until they are full again.
        tokens: Tokens left.
        tokens_reset_s: Seconds until they are full again.
    """

    requests: int | None = None
    requests_reset_s: float | None = None
    tokens: int | None = None
    tokens_reset_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a query.

    Attributes:
        log_probs: Per input its natural log-probabilities, or None where this input failed
            (refused, filtered). ``labels``: C of them, over the whole vocabulary of the model;
            ``choice``: 0.0 for the label that the model wrote, `LOG_ZERO` for the others, and for
            all of them where it wrote something else;
            ``reference``: one, of the whole reference text; ``text``: an empty tuple.
        usage: What was really spent; its ``queries`` stay 0, they are counted by who asks.
        cached: Whether the answer was known already and the model was not asked.
        texts: Per input what the model wrote (``text``).
        censored: How many of the log-probabilities are upper bounds: the model's interface did
            not show that label.
        model: What the provider says has answered, where it says more than the fingerprint.
        limits: What the provider says of its rate limits.
    """

    log_probs: tuple[tuple[float, ...] | None, ...]
    usage: Usage
    cached: bool = False
    texts: tuple[str | None, ...] = ()
    censored: int = 0
    model: str | None = None
    limits: RateLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpace:
    """Where a model's input embeddings lie.

    Attributes:
        size: H, the width of the model.
        std: Standard deviation over all entries of its input embedding matrix.
    """

    size: int
    std: float


class LLMBackend(ABC):
    """A language model that can only be asked.

    A backend of your own implements `fingerprint` and `score`. Retry, rate limits, budget, cache
    and recording are wrappers around it, so that it stays one adapter to one API.

    Attributes:
        bounds: The units that `worst_case` really bounds. A run with a cap in another unit is
            refused at its start.
        answers: What may be asked of it.
        max_inputs: The most inputs of one request; None takes a whole query at once. A wrapper
            splits queries, so that each call of `score` is one request.
        metered: Whether each request is charged to the query's payer (a wrapper does that).
        censors: Whether log-probabilities of labels may be upper bounds only.
        takes: The kinds of soft prompts that it can be asked with.
        local: Whether it runs in this process at no cost, so that a plan may time it.
    """

    bounds: frozenset[str] = frozenset({"queries", "requests"})
    answers: frozenset[Want] = frozenset({"labels"})
    max_inputs: int | None = None
    metered: bool = False
    censors: bool = False
    takes: frozenset[SoftPromptKind] = frozenset()
    local: bool = False

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Names the exact model; scores of different fingerprints must not be mixed."""

    @abstractmethod
    async def score(self, query: Query) -> Answer:
        """Answers one query by one request.

        Raises:
            BackendError: The model refused the query as a whole.
            BackendUnavailable: The model cannot be asked now; asking again may help.
            BackendBlocked: It cannot be asked until somebody changes something.
        """

    async def check(  # noqa: B027 (optional)
        self, label_words: tuple[str, ...], form: Rendered = ()
    ) -> None:
        """Checks, at no cost, that the model is there and can be asked so.

        Args:
            label_words: As the task has them; each must be one token of the model.
            form: The task's form (`fedone_sdk.task.form_of`); empty checks the label words alone,
                as those of a template.

        Raises:
            LabelWordError: A label word is not one token.
            BackendError: The model cannot be used as described.
        """

    async def embedding_space(self) -> EmbeddingSpace:
        """Where the input embeddings lie, of a backend that takes them.

        Raises:
            SpecError: It takes none.
            BackendError: The model cannot be looked at.
        """
        raise SpecError("method: needs a backend that takes input embeddings; this one does not")

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """The most that any query of `batch_size` inputs may spend (in the units of `bounds`).

        It counts one attempt at each of its requests; a retry is charged when it is made.

        Args:
            batch_size: B.
            max_tokens: The longest text that is written for each input; 0 where none is asked for.
        """
        return Usage(queries=1, requests=1)

    async def quote(self, query: Query) -> Usage:
        """The most that this query may spend: at least what it will, at most its `worst_case`."""
        return self.worst_case(len(query.inputs), query.max_tokens)

    async def shortened(self, query: Query) -> object | None:
        """What the model sees of inputs that are too long for it, for the key of a cache.

        How an input is shortened may depend on more than the fingerprint: on the tokeniser that is
        at hand, say.

        Returns:
            A value for JSON, the same for the same texts or token ids; None where nothing is taken
            off, or the fingerprint names all that matters.

        Raises:
            BackendError: An input does not fit the model.
        """
        return None

    @property
    def trouble(self) -> str | None:
        """Why it is known that the model cannot be asked now; None while it may be asked."""
        return None

    def reset(self) -> None:  # noqa: B027 (optional)
        """Forgets that the model failed: somebody says that it can be asked again."""

    async def aclose(self) -> None:  # noqa: B027 (optional)
        """Frees what the backend holds."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
