"""Placeholders in candidates: label words and texts of other slots."""

from __future__ import annotations

import re
from collections.abc import Mapping

_QUOTES = "\"'`"
_OPENING = "([{<\u2018\u201c\u00ab"


def label_placeholder(label: str) -> str:
    """Return the placeholder of a class's label word in a candidate.

    Args:
        label: The label value, a key of the task's labels.
    """
    return f"{{label:{label}}}"


def fill(texts: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Replace placeholders by the chosen label words and slot texts.

    ``{label:KEY}`` becomes the label word of class KEY. After text the word is unchanged
    (``It was{label:1}`` and ``" great"``); after white space, at the beginning, and after an
    opening quote or bracket it loses its leading white space.

    ``{NAME}`` becomes the text of slot NAME, with its label words replaced but not its slot names.
    A slot's reference to itself is not replaced. Any other brace is text.

    Args:
        texts: The chosen candidate of each slot, by the slot's name. Without the slot ``labels``,
            whose candidate is not text.
        labels: The label word of each class, by label value. For a chat, with the space that the
            word has after text.
            it has in front of it after text.

        The texts of the same slots. Time is linear in the input and output.
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
    # A shorter key is a prefix of a longer one only if it contains a brace itself.
    keys = sorted([*words, *slots], key=len, reverse=True)
    if "{" not in text or not keys:
        return text
    pieces: list[str] = []
    before, end = "", 0  # the last 2 characters written; the end of the text read
    for match in re.finditer("|".join(map(re.escape, keys)), text):
        plain, found = text[end : match.start()], match[0]
        before = (before + plain[-2:])[-2:]
        piece = slots[found] if found in slots else _word(words[found], before)
        before = (before + piece[-2:])[-2:]
        pieces += [plain, piece]
        end = match.end()
    return "".join([*pieces, text[end:]])


def _word(word: str, before: str) -> str:
    """Return a label word after the characters `before`, which are empty at the beginning."""
    if before and before[-1] in _QUOTES:  # an opening quote only if no text precedes it
        before = before[:-1]
    return word.lstrip() if not before or before[-1].isspace() or before[-1] in _OPENING else word
