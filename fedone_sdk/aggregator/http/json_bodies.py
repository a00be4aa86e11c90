"""What every JSON body must be, before anything is built of it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

__all__ = ["MAX_PARTS", "check_json"]

MAX_PARTS = 1_000_000
"""The most commas, lists and objects of one document, those within strings included."""


def check_json(body: bytes) -> None:
    """Refuses documents that readers understand in several ways, or that cost too much to read.

    The document may still be no JSON at all: its reader finds out.

    Raises:
        ValueError: It is not UTF-8, nests too deep, has too many parts, a key twice, or a number
            that is none.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_PARTS:
        raise ValueError(f"more than {MAX_PARTS} commas, lists and objects")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError("the body is not UTF-8") from exc
    try:
        # As an integer, a long number would be an error of its own, and end the look here.
        json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number, parse_int=float)
    except _Refused:
        raise
    except RecursionError as exc:
        raise ValueError("lists and objects lie too deep") from exc
    except ValueError:
        return


class _Refused(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise _Refused("an object has the same key twice")


def _no_number(_name: str) -> NoReturn:
    raise _Refused("NaN and Infinity are no JSON numbers")
