"""What a language model looks like to the SDK: it answers queries with label log-probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from fedone_sdk.budget import Usage
from fedone_sdk.task import Rendered

__all__ = ["Answer", "LLMBackend", "Query"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One logical query: one prompt on one mini-batch.

    Attributes:
        inputs: The rendered inputs, B of them.
        label_words: The C label words whose log-probabilities are asked for.
    """

    inputs: tuple[Rendered, ...]
    label_words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a query.

    Attributes:
        log_probs: Per input, C natural log-probabilities over the whole vocabulary of the model;
            None where this input failed (refused, filtered).
        usage: What was really spent; its ``queries`` stay 0, they are counted by who asks.
        cached: Whether the answer was known already and the model was not asked.
    """

    log_probs: tuple[tuple[float, ...] | None, ...]
    usage: Usage
    cached: bool = False


class LLMBackend(ABC):
    """A language model that can only be asked.

    A backend of your own implements `fingerprint` and `score`. Retry, rate limits, budget and
    cache are wrappers around it, so that it stays one adapter to one API.

    Attributes:
        bounds: The units that `worst_case` really bounds. A run with a cap in another unit is
            refused at its start.
    """

    bounds: frozenset[str] = frozenset({"queries", "requests"})

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Names the exact model; scores of different fingerprints must not be mixed."""

    @abstractmethod
    async def score(self, query: Query) -> Answer:
        """Answers one query.

        Raises:
            BackendError: The model refused the query as a whole.
            BackendUnavailable: The model cannot be asked now.
        """

    async def check(self, label_words: tuple[str, ...]) -> None:  # noqa: B027 (optional)
        """Checks that every label word is one token of the model.

        Raises:
            LabelWordError: One is not.
        """

    def worst_case(self, batch_size: int) -> Usage:
        """The most that one query of `batch_size` inputs may spend (in the units of `bounds`)."""
        return Usage(queries=1, requests=1)

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
