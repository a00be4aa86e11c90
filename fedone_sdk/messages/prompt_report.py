"""Reports of prompts: a prompt's text and label bias, its measurements, the verdict on tuning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

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
    """A prompt with its label bias; usually the deployable prompt, the best choice so far.

    Attributes:
        text: The prompt's text; for a prompt of slots, the texts of the slots in order.
        tokens: The prompt's candidates, by position.
        bias: One number per label, which is added to the log-probability of the label word, nats
            (`TaskSpec.bias`); null without a label bias.
        slots: Text of each slot in order, with label words in place of their placeholders; absent
            without slots.
        labels: Label word of each label, if a slot selects the label words; otherwise absent.
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


Compared = Literal["chance", "no_prompt", "no_prompt_biased", "untrained", "cheapest", "tuned"]
"""A compared prompt; `COMPARED` has the display names. ``chance`` is the best constant answer,
``cheapest`` the shortest prompt that may be as good as the tuned prompt."""

COMPARED: Mapping[Compared, str] = {
    "chance": "One answer for everything",
    "no_prompt": "No prompt",
    "no_prompt_biased": "Label bias alone",
    "untrained": "Untrained prompt",
    "cheapest": "Cheapest within the interval",
    "tuned": "Tuned prompt",
}
"""Display names of the compared prompts."""

Conclusion = Literal[
    "worth_keeping", "no_prompt", "unclear", "worse", "guessing", "unknown", "not_measured"
]
"""The conclusion of a verdict: the first of these cases that applies. Two gains of the tuned prompt
have 95 % intervals: over the baseline (`Verdict.against`), and over the best constant answer.

- ``not_measured``: there is no measurement on dev rows.
- ``no_prompt``: the deployable prompt is "no prompt", perhaps with a label bias.
- ``unknown``: the metric is a user function without intervals, or no baseline was measured.
- ``guessing``: the metric is not better than that of the best constant answer.
- ``worse``: the interval of the gain over the baseline is below 0.
- ``worth_keeping``: the intervals of both gains are above 0.
- ``unclear``: all other cases.
"""


class Spread(Message):
    """A difference and its 95 % interval; positive is better.

    Attributes:
        value: The difference, in units of the metric.
        error: Standard error of the difference.
        probability: Probability that the difference is positive, given the examples.
    """

    value: float
    low: float
    high: float
    error: Annotated[float, Field(ge=0)]
    probability: Annotated[float, Field(ge=0, le=1)]


class Standing(Message):
    """Measurement of one prompt on the dev split.

    Attributes:
        value: The metric; null if not measured.
        interval: Bounds of the metric's 95 % interval; null if not known.
        gain: By how much the tuned prompt is better than this prompt, paired by example; null
            without an interval.
        tokens: Tokens that the prompt adds to each call; 4 characters count as one.
        usd: Price of these tokens for a million calls; absent if not known.
        prompt: The ``cheapest`` prompt; absent for others.
    """

    name: Compared
    value: float | None = None
    interval: tuple[float, float] | None = None
    gain: Spread | None = None
    tokens: int | None = Field(default=None, exclude_if=is_none)
    usd: float | None = Field(default=None, exclude_if=is_none)
    prompt: PromptReport | None = Field(default=None, exclude_if=is_none)


class Preference(Message):
    """A judge's comparison of the texts that two prompts give: the tuned prompt, and no prompt.

    Attributes:
        rows: Number of compared rows.
        asked: Number of rows with different texts, which the judge sees in both orders. Equal texts
            are a tie.
        wins: Share of the answers that prefer the tuned prompt's text; a tie counts half.
        low: Lower bound of the 95 % interval of `wins` over the rows; `high` is the upper bound.
        balanced: `wins` with equal weights for rows where the tuned prompt's text is longer and
            rows where it is shorter; null without rows of both kinds.
        agreement: Share of the `asked` rows with the same answer in both orders; null if `asked`
            is 0.
        first: Share of the answers that prefer the text shown first, without ties; null if all
            are ties.
    """

    rows: int
    asked: int
    wins: float
    low: float
    high: float
    balanced: float | None = None
    agreement: float | None = None
    first: float | None = None

    @property
    def text(self) -> str:
        """The comparison in one line."""
        even = "" if self.balanced is None else f", {self.balanced:.1%} with lengths balanced"
        first = "" if self.first is None else f"; the text shown first wins in {self.first:.1%}"
        orders = (
            "all texts are equal"
            if self.agreement is None
            else f"in {self.agreement:.1%} of {self.asked} rows with different texts, the judge "
            "gives the same answer in both orders"
        )
        return (
            f"tuned preferred to no prompt in {self.wins:.1%} of {self.rows} rows (95 % "
            f"{self.low:.1%} to {self.high:.1%}){even}; {orders}{first}"
        )


class Verdict(Message):
    """Whether tuning improved the metric.

    Attributes:
        text: The verdict as a sentence, with the gain and the cost.
        source: ``dev`` for measurements on `data.dev` by the server's model; null without any.
        standings: The measurements, chance first and the tuned prompt last.
        against: The baseline: "no prompt" with or without a label bias, whichever is better. For
            the conclusion ``no_prompt``, it is "no prompt" without a label bias.
        bias: The label bias of ``no_prompt_biased``, nats; null with `bias_from` ``dev``.
        bias_from: Data on which this bias was fitted. ``training``: the run's losses. ``dev``: the
            dev rows, in folds; the bias for one fold was fitted on the other folds.
        needed_examples: For ``unclear``, the approximate number of dev rows that would show a gain
            of this size with 80 % power; null if the gain is within one standard error.
        preference: Comparison by the judge of ``task.score``; absent without a judge.
    """

    conclusion: Conclusion
    text: str = ""
    source: Literal["dev"] | None = None
    examples: int = 0
    standings: tuple[Standing, ...] = ()
    against: Compared | None = None
    bias: tuple[float, ...] | None = None
    bias_from: Literal["training", "dev"] | None = None
    needed_examples: int | None = None
    preference: Preference | None = Field(default=None, exclude_if=is_none)

    def standing(self, name: Compared) -> Standing | None:
        """Return the measurement of a prompt, if any."""
        return next((standing for standing in self.standings if standing.name == name), None)
