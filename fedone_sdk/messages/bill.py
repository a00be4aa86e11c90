"""JSON form of usage, in which an unknown price is null rather than 0."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_serializer, model_validator

from fedone_sdk.budget import Usage
from fedone_sdk.messages.base import Message

_ACCOUNTS = ("spent", "leased", "evaluation")
_COUNTS = ("queries", "requests", "prompt_tokens", "completion_tokens")

# Not a separate model: pydantic 2.14 cannot build a message with several fields of it.
Bill = Annotated[
    dict[str, int | float | None],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                **{name: {"type": "integer", "minimum": 0} for name in _COUNTS},
                "usd": {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]},
            },
            "required": [*_COUNTS, "usd"],
            "additionalProperties": False,
        }
    ),
]
"""An amount in the five units as JSON; `usd` is null if a price is unknown."""


def bill(usage: Usage, *, priced: bool) -> Bill:
    """Return an amount as JSON values."""
    found = usage.model_dump(mode="json")
    return found if priced else {**found, "usd": None}


class Billed(Message):
    """A message with amounts, whose `usd` is null in JSON if a price is unknown.

    Attributes:
        priced: Whether all prices are known; otherwise `Usage.usd` is incomplete.
    """

    priced: bool = Field(default=True, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read_unknown(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        unknown = {
            name: {**account, "usd": 0}
            for name in _ACCOUNTS
            if isinstance(account := document.get(name), dict) and account.get("usd", 0) is None
        }
        return {**document, **unknown, "priced": False} if unknown else document

    @field_serializer(*_ACCOUNTS, when_used="json", check_fields=False)
    def _bill(self, value: Usage) -> Bill:
        return bill(value, priced=self.priced)
