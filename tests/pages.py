"""What stands between the fences of a Markdown page."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Block", "blocks"]

_BLOCK = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: The first word behind the fence.
        info: What stands behind it, such as ``title="run.yaml"``.
        text: Its lines.
    """

    language: str
    info: str
    text: str


def blocks(page: str) -> list[Block]:
    """The blocks that have a language, in their order."""
    return [Block(match[1], match[2] or "", match[3]) for match in _BLOCK.finditer(page)]
