"""Checks of JSON bodies before they are parsed."""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_PARTS = 1_000_000
"""Maximal number of commas, brackets and braces in a document, including those in strings."""


def check_json(body: bytes) -> None:
    """Refuse documents that are ambiguous or too expensive to parse.

    Does not check the syntax, which the parser does.

    Raises:
        ValueError: The document is not UTF-8, is nested too deeply, has too many parts, a duplicate
            key, or NaN or Infinity.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS} commas, lists and objects")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError("the body is not UTF-8") from exc
    try:
        # Not parsed as integers: long numbers would raise another error and end the check.
        json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number, parse_int=float)
    except _Refused:
        raise
    except RecursionError as exc:
        raise ValueError("lists and objects are nested too deeply") from exc
    except ValueError:
        return


class _Refused(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise _Refused("an object has the same key twice")


def _no_number(_name: str) -> NoReturn:
    raise _Refused("NaN and Infinity are no JSON numbers")
