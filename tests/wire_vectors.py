"""The wire vectors, which clients in other languages share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fedone_sdk import messages
from fedone_sdk.messages import UPDATE, Assignment

FOLDER = Path(__file__).parent / "vectors"

UNIONS = {
    "AlphaUpdate": UPDATE,
    "LossesUpdate": UPDATE,
    "AlphaAssignment": TypeAdapter(Assignment),
    "LossesAssignment": TypeAdapter(Assignment),
}


def vectors(file: str) -> list[dict[str, Any]]:
    """Return the messages of a file in tests/vectors."""
    found: list[dict[str, Any]] = json.loads((FOLDER / file).read_text(encoding="utf-8"))[
        "messages"
    ]
    return found


def name_of(vector: dict[str, Any]) -> str:
    """Return the id of a vector."""
    return f"{vector['type']}: {vector['name']}"


def parser(name: str) -> TypeAdapter[Any]:
    """Return what reads a message at the other end."""
    return UNIONS.get(name) or TypeAdapter(getattr(messages, name))
