"""The description of a task, used in shipped instructions and by a proposer."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["Description"]


def _phrase(text: str) -> str:
    if text != text.strip():
        raise ValueError("must not begin or end with white space")
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        raise ValueError("must be one line of plain text")
    if "{" in text or "}" in text:
        raise ValueError("must not contain braces")
    return text


_Phrase = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_phrase)]


class Description(BaseModel):
    """What is classified, and by what, in the words of the shipped instructions.

    Attributes:
        text: An example's kind, a singular noun without an article: ``movie review``.
        aspect: What its label describes, a noun without an article: ``sentiment``.
        question: The question that the label answers; null asks for the aspect of the text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    text: _Phrase = "text"
    aspect: _Phrase = "label"
    question: _Phrase | None = None

    @property
    def asked(self) -> str:
        """The question, with its question mark."""
        return self.question or f"What is the {self.aspect} of the {self.text}?"
