"""The code blocks of a Markdown page."""

from __future__ import annotations

import re
from typing import NamedTuple

_BLOCK = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: The first word behind the fence.
        info: What stands behind it, such as ``title="run.yaml"``.
        text: Its lines.
        line: Where its fence stands in the page, from 1.
    """

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
