"""Placeholders in candidates: the label words and the other slots' texts that stand for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["fill", "label_placeholder"]

_QUOTES = "\"'`"
_OPENING = "([{<\u2018\u201c\u00ab"


def label_placeholder(label: str) -> str:
    """What stands in a candidate for the label word of a class.

    Args:
        label: The label value, a key of the task's labels.
    """
    return f"{{label:{label}}}"


def fill(texts: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Puts the chosen label words and slot texts in the place of their placeholders.

    ``{label:KEY}`` becomes the label word of class KEY. A word after text stands as it is given
    (``It was{label:1}`` and ``" great"``); after white space, at the beginning, and after an
    opening quote or bracket it stands without its leading white space.

    ``{NAME}`` becomes the text of slot NAME, with the label words in it replaced and slot names in
    it left as they are; a slot's reference to itself is left too. Any other brace is text.

    Args:
        texts: The candidate chosen for each slot, by the slot's name. Without the slot ``labels``,
            whose candidate is no text.
        labels: The label word of each class, by label value. For a chat each with the space that
            it has in front of it after text.

    Returns:
        The texts of the same slots. The time taken is linear in what goes in and out.
    """
    worded = {name: _replaced(text, labels, {}) for name, text in texts.items()}
    return {
        name: _replaced(text, labels, {other: worded[other] for other in texts if other != name})
        for name, text in texts.items()
    }


def _replaced(text: str, labels: Mapping[str, str], others: Mapping[str, str]) -> str:
    words = {label_placeholder(label): word for label, word in labels.items()}
    slots = {f"{{{name}}}": other for name, other in others.items()}
    # A shorter key may be the beginning of a longer one only if it holds a brace itself.
    keys = sorted([*words, *slots], key=len, reverse=True)
    if "{" not in text or not keys:
        return text
    pieces: list[str] = []
    before, end = "", 0  # the last 2 characters that were written; the end of what was read
    for match in re.finditer("|".join(map(re.escape, keys)), text):
        plain, found = text[end : match.start()], match[0]
        before = (before + plain[-2:])[-2:]
        piece = slots[found] if found in slots else _word(words[found], before)
        before = (before + piece[-2:])[-2:]
        pieces += [plain, piece]
        end = match.end()
    return "".join([*pieces, text[end:]])


def _word(word: str, before: str) -> str:
    """A label word behind these characters; none are the beginning of the text."""
    if before and before[-1] in _QUOTES:  # opening only where nothing stands in front of it
        before = before[:-1]
    return word.lstrip() if not before or before[-1].isspace() or before[-1] in _OPENING else word
