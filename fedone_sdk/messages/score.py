"""The gateway's messages: a device without an LLM key asks through the server."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from fedone_sdk.messages.array import MAX_ELEMENTS, Array
from fedone_sdk.messages.base import Id, Message

__all__ = ["MAX_TEXT_CHARS", "MAX_WRITTEN_CHARS", "Score", "Scores"]

MAX_TEXT_CHARS = 20_000
"""The longest text field that the gateway takes."""

MAX_WRITTEN_CHARS = 65_536
"""The longest text that the model wrote: 4096 tokens of 16 characters; the rest is cut off."""

_MAX_EXAMPLES, _MAX_PROMPTS = 1024, 65_536

_Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
_Written = Annotated[str, Field(max_length=MAX_WRITTEN_CHARS)]


class Score(Message):
    """``POST /v1/score``: scores every prompt on every text, under an assignment's lease.

    Attributes:
        assignment_id: Whose lease pays.
        prompts: Shape (P, n), candidate indices, or (P, d), float32, vectors of a latent space;
            absent means the assignment's own prompts.
        examples: The mini-batch's text fields, B of them. Labels stay on the device.
        references: The B reference texts, for loss ``nll`` alone: the model must see them.
    """

    assignment_id: Id
    prompts: Array | None = None
    examples: Annotated[
        tuple[Annotated[dict[str, _Text], Field(max_length=16)], ...],
        FailFast(),
        Field(min_length=1, max_length=_MAX_EXAMPLES),
    ]
    references: Annotated[tuple[_Text, ...], FailFast(), Field(max_length=_MAX_EXAMPLES)] = ()


class Scores(Message):
    """What the model answered.

    Attributes:
        log_probs: Shape (P, B, C), float32, nats; 0 where failed. C is the number of labels, or 1
            for the reference text. Absent where texts were generated.
        texts: P x B generated texts, for loss ``score`` alone, in runs that allow it; empty where
            failed. Cut off after `MAX_WRITTEN_CHARS`.
        failed: (prompt, example) pairs that the model failed on.
        model: Fingerprint of the model.
    """

    log_probs: Array | None = None
    texts: Annotated[
        tuple[Annotated[tuple[_Written, ...], Field(max_length=_MAX_EXAMPLES)], ...],
        Field(max_length=_MAX_PROMPTS),
    ] = ()
    failed: Annotated[tuple[tuple[int, int], ...], Field(max_length=MAX_ELEMENTS)] = ()
    model: str
