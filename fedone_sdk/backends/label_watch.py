"""Refusal of queries whose answers do not have the label words."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from fedone_sdk.backends.completions import spelling, token_spellings
from fedone_sdk.backends.request_form import WITHOUT
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import LabelsNotShown

_log = structlog.get_logger(__name__)

NUM_WATCHED = 64
"""How many answers are counted for each set of label words."""

_OF_A_DEVICE = NUM_WATCHED // 4
_MAJORITY = NUM_WATCHED // 2
_FEW = 8  # Answers that all have no label word: a warning, also for a small table.
_MAX_SETS = 256  # Callers of a gateway may use different label words.
_MAX_NAMED = 5
# A token, or the beginning of a written answer, is named in the error only if this many answers
# have it: it is then how the model begins an answer, not a word of one private input.
_MIN_REPEATS = 3
_BEGINNING = 3  # words


@dataclass(slots=True)
class _Count:
    """Counts of answers.

    Attributes:
        unseen: Answers without any of the label words.
        seen: Answers with each label word.
        prefixed: Answers with a token that begins each label word, but is shorter.
        devices: Answers to each device of a gateway.
    """

    answers: int = 0
    unseen: int = 0
    likeliest: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    prefixed: Counter[str] = field(default_factory=Counter)
    devices: Counter[tuple[str, ...]] = field(default_factory=Counter)

    @property
    def split(self) -> list[str]:
        """The label words of several tokens: most answers begin them, and none shows them."""
        return [w for w, n in self.prefixed.items() if n > _MAJORITY and not self.seen[w]]

    @property
    def refused(self) -> bool:
        return self.unseen > _MAJORITY or bool(self.split)


class LabelWatch:
    """Counts answers without label words, and refuses queries once they are the majority.

    The first `NUM_WATCHED` answers for each set of label words count. As soon as more than half
    of them are certain to have none of the words, or to show only the beginning of a word that none
    shows whole, further queries with these words are refused, until `reset`. Queries with other
    label words are still sent.

    Args:
        model: The model, for errors.
        url: Its server, for errors.
        written: Whether the answers are written words, not shown tokens.
    """

    def __init__(self, *, model: str, url: str, written: bool = False) -> None:
        self._model = model
        self._url = url
        self._written = written
        self._counts: OrderedDict[tuple[str, ...], _Count] = OrderedDict()

    def admit(self, words: tuple[str, ...]) -> None:
        """Check a query before it is sent."""
        count = self._counts.get(words)
        if count is not None and count.refused:
            raise self._refusal(words, count)

    def note(
        self, words: tuple[str, ...], shown: Sequence[str], *, device: tuple[str, ...] | None = None
    ) -> None:
        """Count one answer: its shown tokens, the likeliest first, or the written label word.

        Of one device at most `_OF_A_DEVICE` answers count, so that its texts cannot block others.
        """
        count = self._counts.setdefault(words, _Count())
        self._counts.move_to_end(words)
        while len(self._counts) > _MAX_SETS:
            self._counts.popitem(last=False)
        if count.answers == NUM_WATCHED or count.refused:
            return
        if device is not None:
            if count.devices[device] == _OF_A_DEVICE:
                return
            count.devices[device] += 1
        count.answers += 1
        tokens = set().union(*map(token_spellings, shown))
        spelled = {word: spelling(word).rstrip() for word in words}
        seen = [word for word in words if spelled[word] in tokens]
        count.seen.update(seen)
        if not seen:
            count.unseen += 1
            count.likeliest[" ".join(shown[0].split(" ")[: _BEGINNING + 1])] += 1
        if not self._written:
            beginnings = tokens - {"", *spelled.values()}
            count.prefixed.update(
                word for word in words if any(map(spelled[word].startswith, beginnings))
            )
        never = [word for word in words if not count.seen[word]]
        if count.answers == (_FEW if len(never) == len(words) else NUM_WATCHED) and never:
            _log.warning(
                "label words that no answer has",
                model=self._model,
                answers=count.answers,
                words=never,
                effect="losses and accuracy are wrong for these labels",
                change="choose label words of one token that the model writes",
            )

    def reset(self) -> None:
        """Reset all counts."""
        self._counts.clear()

    def _refusal(self, words: tuple[str, ...], count: _Count) -> LabelsNotShown:
        common = [
            repr(text) for text, times in count.likeliest.most_common(3) if times >= _MIN_REPEATS
        ]
        split = [] if count.unseen > _MAJORITY else count.split
        named = ", ".join(map(repr, (split or words)[:_MAX_NAMED]))
        named += ", ..." if (split or words)[_MAX_NAMED:] else ""
        answers = f"of the first {count.answers} answers of model {self._model!r}"
        one_of = "ask it for one of these words and nothing else at the end of the template"
        if split:
            problem = (
                f"none {answers} shows the label word {named}, and most show its beginning, so it "
                "is several tokens: choose label words of one token, such as ' A', ' B' with a "
                f"slot of candidates: codes, or {WITHOUT}"
            )
        elif self._written:
            problem = (
                f"{count.unseen} {answers} are none of the label words {named}, so they count as "
                f"wrong: {one_of}, or set reasoning_effort: none for a model "
                "that reasons until its tokens are used up"
            )
        else:
            problem = (
                f"{count.unseen} {answers} show none of the label words {named} among the "
                f"likeliest tokens, so their losses say nothing: choose label words that the model "
                f"writes, {one_of}, ask a base model with api: completions and an instruct model "
                f"with api: chat, or {WITHOUT}"
            )
        return LabelsNotShown(
            problem,
            url=self._url,
            said=f"most often {', '.join(common)}" if common and not split else "",
            usage=NOTHING,
        )
