"""What was spent, as people and programs are told: money that is not known is not 0."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_serializer, model_validator

from fedone_sdk.budget import Usage
from fedone_sdk.messages.base import Message

__all__ = ["Bill", "Billed", "bill"]

_ACCOUNTS = ("spent", "leased", "evaluation")
_COUNTS = ("queries", "requests", "prompt_tokens", "completion_tokens")

# No model of its own: pydantic 2.14 cannot build a message with several fields of one.
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
"""An amount in the five units, as JSON has it; `usd` is null where a price is not known."""


def bill(usage: Usage, *, priced: bool) -> Bill:
    """An amount as JSON has it.

    Args:
        usage: The amount.
        priced: Whether its price is known.
    """
    found = usage.model_dump(mode="json")
    return found if priced else {**found, "usd": None}


class Billed(Message):
    """A message with accounts, whose `usd` is null in JSON where a price is not known.

    Attributes:
        priced: Whether the price of all that was spent is known; else `Usage.usd` lacks a part.
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
