"""The code blocks of a Markdown page."""

from __future__ import annotations

import re
from typing import NamedTuple

_BLOCK = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block."""

    language: str
    info: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    """The blocks that have a language, in their order."""
    return [
        Block(found[1], found[2] or "", found[3], page.count("\n", 0, found.start()) + 1)
        for found in _BLOCK.finditer(page)
    ]
