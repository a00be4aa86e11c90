"""The wire contract as JSON Schema, for clients in other languages."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from fedone_sdk import messages

_MESSAGES = (
    "Enrol Enrolled Rotated Claim AlphaAssignment LossesAssignment Renewal RunTask VocabularyList "
    "Score Scores Reflect Reflected AlphaUpdate LossesUpdate Decline Receipt RunEntry RunSummary "
    "RunResult Seats TokenProbabilities RollBack Quarantine Removal Me NewToken CreatedToken "
    "TokenInfo TokenList ClientInfo ClientList Problem Health About"
)


def json_schemas(ref_template: str = "#/$defs/{model}") -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of every message, by name.

    Args:
        ref_template: Template of references; for OpenAPI ``#/components/schemas/{model}``.
    """
    found = [getattr(messages, name) for name in _MESSAGES.split()]
    _, document = TypeAdapter.json_schemas(
        [(message, "serialization", TypeAdapter(message)) for message in found],
        ref_template=ref_template,
    )
    schemas: dict[str, Any] = document["$defs"]
    return schemas
