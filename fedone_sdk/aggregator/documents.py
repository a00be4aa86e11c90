"""What every JSON body must be, before anything is built of it."""

from __future__ import annotations

import json
import re

__all__ = ["MAX_DEPTH", "MAX_TOKENS", "check_json"]

MAX_DEPTH = 32
"""How deep lists and objects may lie in each other; messages need 6."""

MAX_TOKENS = 200_000
"""The most strings, lists and objects of one document, and the most commas."""

# Digits and blanks are passed over at the speed of the regex. Possessive, so that a string of a
# million escapes leaves no trail to go back on.
_TOKENS = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"(?P<key>[ \t\r\n]*+:)?|[][{},]|NaN|Infinity|"', re.DOTALL
)


def check_json(body: bytes) -> None:
    """Refuses documents that readers understand in several ways, or that cost too much to read.

    The document may still be no JSON at all: its reader finds out.

    Raises:
        ValueError: It is not UTF-8, nests too deep, has too many parts, a key twice, or a number
            that is none.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError("the body is not UTF-8") from exc
    # One entry for each list or object that is open: its keys so far.
    keys: list[set[bytes]] = []
    parts = commas = 0
    for token in _TOKENS.finditer(body):
        text = token[0]
        first = text[:1]
        if first == b",":
            commas += 1
            if commas > MAX_TOKENS:
                raise ValueError(f"more than {MAX_TOKENS} commas")
            continue
        parts += 1
        if parts > MAX_TOKENS:
            raise ValueError(f"more than {MAX_TOKENS} strings, lists and objects")
        if first in b"[{":
            if len(keys) == MAX_DEPTH:
                raise ValueError(f"lists and objects lie more than {MAX_DEPTH} deep")
            keys.append(set())
        elif first in b"]}":
            if keys:
                keys.pop()
        elif first in b"NI":
            raise ValueError("NaN and Infinity are no JSON numbers")
        elif token["key"] is not None and keys:
            key = text[: -len(token["key"])]
            key = _plain(key) if b"\\" in key else key[1:-1]
            if key in keys[-1]:
                raise ValueError("an object has the same key twice")
            keys[-1].add(key)


def _plain(key: bytes) -> bytes:
    try:
        return str(json.loads(key)).encode("utf-8", "surrogatepass")
    except ValueError:
        return key
