"""The gateway's messages: a device without an LLM key asks through the server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedone_sdk.messages.array import Array
from fedone_sdk.messages.base import Id, Message

__all__ = ["MAX_TEXT_CHARS", "Score", "Scores"]

MAX_TEXT_CHARS = 20_000
"""The longest text field that the gateway takes."""

_Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]


class Score(Message):
    """``POST /v1/score``: scores every prompt on every text, under an assignment's lease.

    Attributes:
        assignment_id: Whose lease pays.
        prompts: Shape (P, n), candidate indices; absent means the assignment's own prompts.
        examples: The mini-batch's text fields, B of them. Labels stay on the device.
    """

    assignment_id: Id
    prompts: Array | None = None
    examples: Annotated[
        tuple[Annotated[dict[str, _Text], Field(max_length=16)], ...],
        Field(min_length=1, max_length=1024),
    ]


class Scores(Message):
    """Label log-probabilities.

    Attributes:
        log_probs: Shape (P, B, C), float32, nats; 0 where failed.
        failed: (prompt, example) pairs that the model failed on.
        model: Fingerprint of the model.
    """

    log_probs: Array
    failed: tuple[tuple[int, int], ...] = ()
    model: str
