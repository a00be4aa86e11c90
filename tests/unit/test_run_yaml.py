"""The keys of RUN.yaml: how many there are, and that the page has them all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from fedone_sdk.spec import RunSpec

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "run-yaml.md"
MOST_KEYS = 120
DERIVED = {("TaskSpec", "slots")}
"""Set from `prompt.slots`, and not written by people."""


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def leaves() -> list[tuple[str, str]]:
    """Model and key of every leaf: each member of a union counts, a section once."""
    seen: dict[type[BaseModel], None] = {}
    ahead: list[type[BaseModel]] = [RunSpec]
    found = []
    while ahead:
        model = ahead.pop()
        if model in seen:
            continue
        seen[model] = None
        for name, field in model.model_fields.items():
            inner = list(models_in(field.annotation))
            ahead.extend(inner)
            if not inner and (model.__name__, name) not in DERIVED:
                found.append((model.__name__, name))
    return found


def test_a_run_has_few_keys() -> None:
    assert len(leaves()) <= MOST_KEYS, sorted(leaves())


def test_the_page_has_every_key() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [(model, key) for model, key in leaves() if not re.search(rf"\b{key}\b", text)]
    assert not missing
    assert len(text.splitlines()) <= 200
