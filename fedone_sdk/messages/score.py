"""Messages of the gateway, through which devices query the server's model."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from fedone_sdk.messages.base import Id, Message, is_none
from fedone_sdk.messages.tensor import MAX_ELEMENTS, Tensor
from fedone_sdk.vocabulary import MAX_PROPOSAL_CHARS, Token

MAX_TEXT_CHARS = 20_000
"""Maximal length of a text field in a gateway request, characters."""

MAX_WRITTEN_CHARS = 65_536
"""Length at which generated texts are truncated: 4096 tokens of 16 characters."""

_MAX_EXAMPLES, _MAX_PROMPTS = 1024, 65_536

MAX_CASES = 8
"""Maximal number of examples from which a model writes a candidate."""

_Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
_Written = Annotated[str, Field(max_length=MAX_WRITTEN_CHARS)]


class Proposal(Message):
    """A candidate that a device proposes, for the slot `Reflection.slot`.

    Attributes:
        parent: Index of the prompt that the candidate improves, among the assignment's prompts.
        text: The candidate.
    """

    parent: Annotated[int, Field(ge=0, lt=_MAX_PROMPTS)]
    text: Annotated[Token, Field(min_length=1, max_length=MAX_PROPOSAL_CHARS)]


class Judged(Message):
    """The text fields of an example; `feedback` says what was expected and what was answered."""

    example: Annotated[dict[str, _Text], Field(max_length=16)]
    feedback: _Text


class Reflect(Message):
    """``POST /v1/reflect``: the run's model writes a candidate, at most once per assignment.

    Attributes:
        parent: Index of the prompt to improve, among the assignment's prompts.
        cases: Examples with the answers to this prompt; the feedback contains their labels.
    """

    assignment_id: Id
    parent: Annotated[int, Field(ge=0, lt=_MAX_PROMPTS)]
    cases: Annotated[tuple[Judged, ...], Field(min_length=1, max_length=MAX_CASES)]


class Reflected(Message):
    """The model's unchanged answer."""

    text: _Written


class Score(Message):
    """``POST /v1/score``: score every prompt on every example.

    Attributes:
        assignment_id: The assignment whose reserved queries pay for the scores.
        prompts: P prompts as candidate indices, shape (P, n); absent for the assignment's prompts.
        examples: Text fields of the B examples of the mini-batch, without labels.
        references: The B reference texts for loss ``nll``; otherwise empty.
        proposal: If present, only one prompt is scored: the proposal's parent with the new text.
    """

    assignment_id: Id
    prompts: Tensor | None = None
    examples: Annotated[
        tuple[Annotated[dict[str, _Text], Field(max_length=16)], ...],
        FailFast(),
        Field(min_length=1, max_length=_MAX_EXAMPLES),
    ]
    references: Annotated[tuple[_Text, ...], FailFast(), Field(max_length=_MAX_EXAMPLES)] = ()
    proposal: Proposal | None = Field(default=None, exclude_if=is_none)


class Scores(Message):
    """The model's scores.

    Attributes:
        log_probs: Shape (P, B, C), float32, nats; 0 for failed pairs. C is the number of labels, or
            1 for the reference text. Absent for generated texts.
        texts: P x B generated texts, only for loss ``score``; empty for failed pairs. Truncated to
            `MAX_WRITTEN_CHARS`.
        failed: (prompt, example) pairs for which the model failed.
    """

    log_probs: Tensor | None = None
    texts: Annotated[
        tuple[Annotated[tuple[_Written, ...], Field(max_length=_MAX_EXAMPLES)], ...],
        Field(max_length=_MAX_PROMPTS),
    ] = ()
    failed: Annotated[tuple[tuple[int, int], ...], Field(max_length=MAX_ELEMENTS)] = ()
    model: str
