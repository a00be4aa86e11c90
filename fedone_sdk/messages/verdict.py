"""Whether tuning was worth it: the tuned prompt against what would have cost nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedone_sdk.messages.base import Message

__all__ = ["COMPARED", "Compared", "Conclusion", "Spread", "Standing", "Verdict"]

Compared = Literal["chance", "no_prompt", "no_prompt_biased", "untrained", "tuned"]
"""What is measured: one answer for everything, no prompt, no prompt with a label bias of its own,
the prompt that the run began with, the deployable prompt."""

COMPARED: Mapping[Compared, str] = {
    "chance": "One answer for everything",
    "no_prompt": "No prompt",
    "no_prompt_biased": "No prompt, with its own label bias",
    "untrained": "Untrained prompt",
    "tuned": "Tuned prompt",
}
"""Their names for people."""

Conclusion = Literal["worth_keeping", "unclear", "worse", "guessing", "unknown", "not_measured"]
"""What the intervals say of the tuned prompt.

- ``worth_keeping``: better than the fair baseline and than chance, both intervals above 0.
- ``unclear``: one of these two intervals holds 0.
- ``worse``: the interval against the fair baseline is below 0.
- ``guessing``: not above chance.
- ``unknown``: there is no interval, as the metric is a function of the user's.
- ``not_measured``: there is no measurement on dev rows.
"""


class Spread(Message):
    """A difference and its 95 % interval; positive is better.

    Attributes:
        value: The difference, in units of the metric.
        low: The lower end.
        high: The upper end.
    """

    value: float
    low: float
    high: float


class Standing(Message):
    """One prompt on the dev split.

    Attributes:
        name: Which.
        value: The metric; null where it was not measured.
        interval: The ends of its 95 % interval; null where it has none.
        gain: The tuned prompt less this one, paired example by example; null as above.
    """

    name: Compared
    value: float | None = None
    interval: tuple[float, float] | None = None
    gain: Spread | None = None


class Verdict(Message):
    """Whether tuning was worth it.

    Attributes:
        conclusion: What the intervals say.
        text: The same as a sentence, with the gain and what it cost.
        source: Where the numbers come from: ``dev``, the rows of `data.dev`, which the server
            asked its own model about. Null where there are none.
        examples: Rows that were measured.
        standings: What was measured, chance first and the tuned prompt last.
        against: The fair baseline: the better of no prompt with and without a label bias.
        bias: The label bias of ``no_prompt_biased``, nats; null where there is none, or one for
            each fold.
        bias_from: What that bias was fitted on: ``training``, the losses that the run paid for;
            ``dev``, the dev rows, of which each got a bias that was fitted on the others;
            ``model``, found without labels, as ``calibration`` says.
        empty: Whether the tuned prompt is no prompt, so that it gains by its bias alone.
        more_examples: About how many more rows would tell, if the gain stayed what it is; null
            where the intervals tell already, or it would take more than 100 times the rows.
    """

    conclusion: Conclusion
    text: str = ""
    source: Literal["dev"] | None = None
    examples: int = 0
    standings: tuple[Standing, ...] = ()
    against: Compared | None = None
    bias: tuple[float, ...] | None = None
    bias_from: Literal["training", "dev", "model"] | None = None
    empty: bool = False
    more_examples: int | None = None

    def standing(self, name: Compared) -> Standing | None:
        """What was measured of one of them; None where nothing was."""
        return next((one for one in self.standings if one.name == name), None)
