"""The report of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pydantic import Field

from fedone_sdk.candidates import prompt_of
from fedone_sdk.messages.base import Message, is_none
from fedone_sdk.task import Filling, Labels, TaskSpec, TextPrompt
from fedone_sdk.vocabulary import LABELS, SlotName, Vocabulary


class SlotText(Message):
    """A slot's text in a prompt."""

    name: SlotName
    text: str


class PromptReport(Message):
    """A prompt with its label bias, by default the deployable one.

    Attributes:
        text: Its text; for a prompt of slots, their texts in order.
        tokens: Its candidates, by position.
        bias: Number per label to add to the label words' log-probabilities, nats
            (`TaskSpec.bias`); null for none.
        slots: Text of each slot in order, with label words in place of their placeholders; absent
            without slots.
        labels: Label words chosen by the prompt, by label; absent if it chooses none.
    """

    text: str
    tokens: tuple[str, ...]
    bias: tuple[float, ...] | None = None
    slots: tuple[SlotText, ...] | None = Field(default=None, exclude_if=is_none)
    labels: Labels | None = Field(default=None, exclude_if=is_none)

    @classmethod
    def of(
        cls,
        task: TaskSpec,
        vocabulary: Vocabulary,
        indices: Sequence[int],
        bias: tuple[float, ...] | None,
    ) -> PromptReport:
        """Return the report of a prompt of candidates."""
        prompt = prompt_of(task, vocabulary, indices)
        tokens = tuple(vocabulary.tokens(indices))
        if isinstance(prompt, str):
            return cls(text=prompt, tokens=tokens, bias=bias)
        names = [slot.name for slot in vocabulary.slots if slot.name != LABELS]
        words = OrderedDict(zip(task.labels, prompt.labels, strict=True)) if prompt.labels else None
        texts = zip(names, prompt.texts, strict=True)
        return cls(
            text=prompt.text,
            tokens=tokens,
            bias=bias,
            slots=tuple(SlotText(name=name, text=text) for name, text in texts),
            labels=words,
        )

    @property
    def prompt(self) -> TextPrompt:
        """Return the prompt as the input of a task."""
        if self.slots is None:
            return self.text
        return Filling(tuple(slot.text for slot in self.slots), tuple((self.labels or {}).values()))
