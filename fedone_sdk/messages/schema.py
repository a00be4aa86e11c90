"""The wire contract as JSON Schema, for clients in other languages."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from fedone_sdk.messages.assignment import (
    AlphaAssignment,
    Claim,
    LossesAssignment,
    Renewal,
    RunTask,
    VocabularyList,
)
from fedone_sdk.messages.base import Problem
from fedone_sdk.messages.enrolment import (
    ClientInfo,
    ClientList,
    CreatedToken,
    Enrol,
    Enrolled,
    NewToken,
    Rotated,
    TokenInfo,
    TokenList,
)
from fedone_sdk.messages.run import RunResult
from fedone_sdk.messages.score import Score, Scores
from fedone_sdk.messages.steering import About, Health, Quarantine, Removal, RollBack, RunSummary
from fedone_sdk.messages.update import AlphaUpdate, Decline, LossesUpdate, Receipt
from fedone_sdk.messages.watch import Me, Seats, TokenProbabilities

_MESSAGES = (
    Enrol,
    Enrolled,
    Rotated,
    Claim,
    AlphaAssignment,
    LossesAssignment,
    Renewal,
    RunTask,
    VocabularyList,
    Score,
    Scores,
    AlphaUpdate,
    LossesUpdate,
    Decline,
    Receipt,
    RunSummary,
    RunResult,
    Seats,
    TokenProbabilities,
    RollBack,
    Quarantine,
    Removal,
    Me,
    NewToken,
    CreatedToken,
    TokenInfo,
    TokenList,
    ClientInfo,
    ClientList,
    Problem,
    Health,
    About,
)


def json_schemas(ref_template: str = "#/$defs/{model}") -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of every message, by name.

    Args:
        ref_template: Template of references; for OpenAPI ``#/components/schemas/{model}``.
    """
    _, document = TypeAdapter.json_schemas(
        [(message, "serialization", TypeAdapter(message)) for message in _MESSAGES],
        ref_template=ref_template,
    )
    schemas: dict[str, Any] = document["$defs"]
    return schemas
