"""The description of a task, used in shipped instructions and by a proposer."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["Description", "PRESET_DESCRIPTIONS"]


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


_NLI = Description(
    text="premise-hypothesis pair",
    aspect="entailment",
    question="Does the premise entail the hypothesis?",
)

PRESET_DESCRIPTIONS: dict[str, Description] = {
    "mnli": _NLI,
    "mnli-reversed": _NLI,
    "qqp": Description(
        text="question pair",
        aspect="equivalence",
        question="Do the two questions ask the same thing?",
    ),
    "sst2": Description(text="movie review", aspect="sentiment"),
    "mrpc": Description(
        text="sentence pair",
        aspect="equivalence",
        question="Do the two sentences mean the same thing?",
    ),
    "cola": Description(
        text="sentence",
        aspect="grammatical acceptability",
        question="Is the sentence grammatically correct?",
    ),
    "qnli": Description(
        text="question-sentence pair",
        aspect="entailment",
        question="Does the sentence contain the answer to the question?",
    ),
    "rte": Description(
        text="sentence pair",
        aspect="entailment",
        question="Does the first sentence entail the second?",
    ),
}
"""Descriptions of the built-in tasks, by name without a style: ``sst2``, not ``sst2/chat``."""
