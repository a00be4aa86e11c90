"""Detection of hosted models that do not show the label words, by their first answers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedone_sdk.backends._completion import Token
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import LabelsNotShown

NUM_WATCHED = 64
"""How many answers are counted for each set of label words."""

_MAX_SETS = 256  # Callers of a gateway may use different label words.
_MAX_NAMED = 5
# A token is named in the error only if this many answers have it as their most likely token: it is
# then how the model begins an answer, not a word of one private input.
_MIN_REPEATS = 3


@dataclass(slots=True)
class _Count:
    """Counts over the first answers for one set of label words."""

    answers: int = 0
    unseen: int = 0
    likeliest: Counter[str] = field(default_factory=Counter)

    @property
    def refused(self) -> bool:
        """Whether more than half of the watched answers are certain to show no label word."""
        return self.unseen > NUM_WATCHED // 2


class LabelWatch:
    """Counts answers that show no label word, and refuses queries once they are the majority.

    The first `NUM_WATCHED` answers for each set of label words count. As soon as more than half
    of them are certain to show none of the words, further queries with these words are refused,
    until `reset`. Queries with other label words are still sent.
    """

    def __init__(self, *, model: str, url: str) -> None:
        self._model = model
        self._url = url
        self._counts: OrderedDict[tuple[str, ...], _Count] = OrderedDict()

    def admit(self, words: tuple[str, ...]) -> None:
        """Check a query before it is sent.

        Raises:
            LabelsNotShown: The answers so far rarely showed them.
        """
        count = self._counts.get(words)
        if count is not None and count.refused:
            raise self._refusal(words, count)

    def note(self, words: tuple[str, ...], num_censored: int, top: Sequence[Token]) -> None:
        """Count one answer: how many label words of its query it does not show, and what it shows.

        The shown tokens are at least one, the likeliest first.
        """
        count = self._counts.setdefault(words, _Count())
        self._counts.move_to_end(words)
        while len(self._counts) > _MAX_SETS:
            self._counts.popitem(last=False)
        if count.answers == NUM_WATCHED or count.refused:
            return
        count.answers += 1
        if num_censored == len(words):
            count.unseen += 1
            count.likeliest[top[0].text] += 1

    def reset(self) -> None:
        """Reset all counts."""
        self._counts.clear()

    def _refusal(self, words: tuple[str, ...], count: _Count) -> LabelsNotShown:
        named = ", ".join(map(repr, words[:_MAX_NAMED])) + (", ..." if words[_MAX_NAMED:] else "")
        common = [
            repr(text) for text, times in count.likeliest.most_common(3) if times >= _MIN_REPEATS
        ]
        return LabelsNotShown(
            f"{count.unseen} of the first {count.answers} answers of model "
            f"{self._model!r} show none of the label words {named} among the likeliest tokens, so "
            "their losses say nothing: choose label words that the model writes, ask it for one of "
            "these words and nothing else at the end of the template, ask a base model with api: "
            "completions and an instruct model with api: chat, or set log_probs: false with loss: "
            "zero_one",
            url=self._url,
            said=f"most often {', '.join(common)}" if common else "",
            usage=NOTHING,
        )
