"""What all wire messages share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["Id", "MAX_MODEL_CHARS", "Message", "Name", "ONE_LINE", "Seed"]


class Message(BaseModel):
    """A JSON message: immutable, finite numbers only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""An identifier that the server made."""


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


ONE_LINE = AfterValidator(_printable)
"""Makes a text one line: what would end it, or tell a terminal to do something, becomes a blank."""

Name = Annotated[str, Field(min_length=1, max_length=200), ONE_LINE]
"""A short text for people."""

MAX_MODEL_CHARS = 300
"""The longest fingerprint of a model."""

Seed = Annotated[int, Field(ge=0, lt=2**53)]
"""A seed of a random stream; below 2^53 so that every JSON parser keeps it exact."""
