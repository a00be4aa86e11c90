"""A program of two steps as a backend: it finds passages for a question, and a model answers.

The tuned prompt is part of the second step. RUN.yaml names the class under ``backend.object``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedone_sdk import Usage
from fedone_sdk.backends import Answer, OpenAIBackend, Query, Wrapper
from fedone_sdk.task import Part, Rendered


def words(text: str) -> set[str]:
    """Return the words of a text that may distinguish topics: those of four or more letters."""
    return {word for word in re.findall(r"\w+", text.casefold()) if len(word) > 3}


class Retrieval(Wrapper):
    """Puts the passages that share the most words with a question before the question.

    Args:
        documents: A file next to this one; blank lines separate its passages.
        passages: Number of passages per question.
        model: Arguments of `OpenAIBackend`.
    """

    def __init__(self, documents: str, passages: int = 2, **model: Any) -> None:
        super().__init__(OpenAIBackend(**model))
        text = (Path(__file__).parent / documents).read_text(encoding="utf-8")
        self._passages, self._count = text.strip().split("\n\n"), passages
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def fingerprint(self) -> str:
        """Identifies the documents and the model, because cached answers depend on both."""
        return f"retrieval:{self._digest}:{self._count}:{self.inner.fingerprint}"

    async def score(self, query: Query) -> Answer:
        """Ask the model with the passages."""
        return await self.inner.score(self._with_passages(query))

    async def quote(self, query: Query) -> Usage:
        """Return the cost of a query with its passages."""
        return await self.inner.quote(self._with_passages(query))

    async def shortened(self, query: Query) -> Sequence[object]:
        """Return what truncation leaves of the inputs with passages."""
        return await self.inner.shortened(self._with_passages(query))

    def _with_passages(self, query: Query) -> Query:
        return replace(query, inputs=tuple(map(self._found, query.inputs)))

    def _found(self, parts: Rendered) -> Rendered:
        asked = words(" ".join(part.text for part in parts if part.kind == "field"))
        ranked = sorted(self._passages, key=lambda passage: -len(asked & words(passage)))
        found = "\n".join(ranked[: self._count])
        first = next(index for index, part in enumerate(parts) if part.kind == "field")
        return (*parts[:first], Part("text", f"{found}\n\n"), *parts[first:])
