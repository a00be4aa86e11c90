"""What a provider says, as a part of an error: for people, and to be left out for devices."""

from __future__ import annotations

import re

__all__ = ["in_its_words", "without_its_words"]

_WORDS = re.compile(r" \(it says: .*\)", re.DOTALL)


def in_its_words(said: str) -> str:
    """A provider's words as the end of an error's text; nothing where it says nothing."""
    return f" (it says: {said})" if said else ""


def without_its_words(text: str) -> str:
    """An error's text without a provider's words, which may quote what it was sent."""
    return _WORDS.sub("", text)
