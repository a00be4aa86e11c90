"""A prompt on another model: whether it still holds there, and what a new one gains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from fedone_sdk.aggregator.serving.intervals import Interval, difference, interval
from fedone_sdk.aggregator.serving.outcomes import Outcomes, Which
from fedone_sdk.backends import Answer, LLMBackend, Prediction, Query, is_known, prediction_queries
from fedone_sdk.budget import NOTHING
from fedone_sdk.messages import Message, PromptReport
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Bias, Example, ScoreFunction, TextPrompt

__all__ = ["Conclusion", "Holds", "Keep", "MeasuredPrompt", "Retuned", "Spread", "measure_retuned"]

Holds = Literal["yes", "no", "unknown"]
"""Whether a prompt is as good as before: no where it is worse, by an interval without 0."""

Keep = Literal["as_it_is", "biased"]
"""Which bias the old prompt is kept with, if it is: its old one; or the one found again, where that
is better by an interval without 0, or the old prompt does not hold as it is."""

Conclusion = Literal["take_new", "keep_old", "no_difference", "unknown"]
"""By the new prompt's gain over the old one as that would be kept: its interval is above 0, below
it, or holds it. Where tuning came back to the old prompt's text, that is kept."""


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

    @classmethod
    def of(cls, found: Interval | None) -> Spread | None:
        """As a message; None for none."""
        return None if found is None else cls(value=found.value, low=found.low, high=found.high)


class MeasuredPrompt(Message):
    """A prompt on the dev split.

    Attributes:
        value: The metric; null where it was not measured.
        interval: Its 95 % interval; null also for a metric of one's own.
        bias: The label bias that it was measured with.
        scored: Examples that the model answered.
    """

    value: float | None = None
    interval: tuple[float, float] | None = None
    bias: Bias | None = None
    scored: int = 0


class Retuned(Message):
    """What a change of model does to a prompt. All is measured on the dev split.

    Attributes:
        metric: Its name.
        examples: Examples of the dev split.
        old_model: Fingerprint of the model that the old prompt was tuned for.
        new_model: Fingerprint of the new one.
        on_old_model: The old prompt there, as the artefact says.
        no_prompt: The new model without a prompt.
        no_prompt_biased: The same with its own label bias; null without calibration.
        old_prompt: The old prompt on the new model as it is, with its old bias.
        old_prompt_biased: The same with a bias found for the new model; null as above.
        new_prompt: The new prompt with its bias.
        change: `old_prompt` less `on_old_model`.
        change_biased: `old_prompt_biased` less `on_old_model`.
        holds: Whether the old prompt holds as it is.
        holds_biased: Whether it holds with the bias found again; as `holds` where there is none.
        gain_by_bias: `old_prompt_biased` less `old_prompt`, paired.
        keep: How the old prompt would be kept.
        gain: `new_prompt` less the old prompt as it would be kept, paired.
        gain_as_it_is: `new_prompt` less `old_prompt`, paired.
        gain_biased: `new_prompt` less `old_prompt_biased`, paired; null without calibration.
        gain_over_none: `new_prompt` less `no_prompt_biased` (`no_prompt`), paired.
        prompt: The new prompt; null where none was tuned.
        same_prompt: Whether the new prompt's text is the old one's.
        conclusion: What to do.
    """

    metric: str
    examples: int
    old_model: str | None
    new_model: str
    on_old_model: MeasuredPrompt
    no_prompt: MeasuredPrompt
    no_prompt_biased: MeasuredPrompt | None
    old_prompt: MeasuredPrompt
    old_prompt_biased: MeasuredPrompt | None
    new_prompt: MeasuredPrompt
    change: Spread | None
    change_biased: Spread | None
    holds: Holds
    holds_biased: Holds
    gain_by_bias: Spread | None
    keep: Keep
    gain: Spread | None
    gain_as_it_is: Spread | None
    gain_biased: Spread | None
    gain_over_none: Spread | None
    prompt: PromptReport
    same_prompt: bool
    conclusion: Conclusion


async def measure_retuned(
    backend: LLMBackend,
    artefact: PromptArtefact,
    spec: RunSpec,
    dev: Sequence[Example],
    prompt: PromptReport,
    biases: Mapping[TextPrompt, Bias],
    *,
    finished: bool,
    bare: TextPrompt = "",
    score: ScoreFunction | None = None,
    measure: MetricFunction | None = None,
) -> Retuned:
    """Compares prompts by answers that the run's evaluation paid for; nothing is asked.

    Args:
        backend: The new model, with the cache that it was asked through.
        artefact: The old prompt.
        spec: The run that tuned it for the new model.
        dev: Its dev split.
        prompt: What the run came to.
        biases: Label biases on the new model, by prompt, as `Retuning` has found them.
        finished: Whether the run is over, so that there is something to conclude.
        bare: What stands for no prompt.
        score: The user's function, for loss ``score``.
        measure: The user's function, for a metric of their own.

    Raises:
        SpecError: The user's function is missing or broken.
    """
    reader = _Reader(backend, spec, dev, score, measure)
    none, old = await reader.known(bare), await reader.known(artefact.prompt.prompt)
    new = await reader.known(prompt.prompt)
    if prompt.bias is not None:
        new = reader.under(new, prompt.bias)
    given = artefact.prompt.bias if artefact.prompt.bias is not None else artefact.task.bias
    as_it_is = old
    if given is not None or artefact.calibration in ("none", "labels"):
        as_it_is = reader.under(old, given)
    plain = reader.under(none, None)
    if spec.calibration.label_free is None:
        none_again = _again(reader, none, biases.get(bare))
        old_again = _again(reader, old, biases.get(artefact.prompt.prompt))
    else:
        none_again, old_again = none, old
    before = _on_old_model(artefact)
    here = reader.measured(as_it_is)
    here_again = None if old_again is None else reader.measured(old_again)
    change = _apart(spec.task.metric, here, before)
    change_again = None if here_again is None else _apart(spec.task.metric, here_again, before)
    by_bias = None if old_again is None else reader.gain(old_again, as_it_is)
    gains: dict[Keep, Spread | None] = {
        "as_it_is": reader.gain(new, as_it_is),
        "biased": None if old_again is None else reader.gain(new, old_again),
    }
    better = by_bias is not None and (by_bias.low > 0.0 or _holds(change) == "no")
    keep: Keep = "biased" if better else "as_it_is"
    same = prompt.prompt == artefact.prompt.prompt
    return Retuned(
        metric=spec.task.metric,
        examples=len(dev),
        old_model=artefact.model,
        new_model=backend.fingerprint,
        on_old_model=before,
        no_prompt=reader.measured(plain),
        no_prompt_biased=None if none_again is None else reader.measured(none_again),
        old_prompt=here,
        old_prompt_biased=here_again,
        new_prompt=reader.measured(new),
        change=change,
        change_biased=change_again,
        holds=_holds(change),
        holds_biased=_holds(change if here_again is None else change_again),
        gain_by_bias=by_bias,
        keep=keep,
        gain=gains[keep],
        gain_as_it_is=gains["as_it_is"],
        gain_biased=gains["biased"],
        gain_over_none=reader.gain(new, none_again or plain),
        prompt=prompt,
        same_prompt=same,
        conclusion=_concluded(gains[keep], same=same) if finished else "unknown",
    )


def _again(reader: _Reader, found: Prediction, bias: Bias | None) -> Prediction | None:
    return None if bias is None else reader.under(found, bias)


class _Reader:
    """Predictions out of a cache, and what they are worth."""

    def __init__(
        self,
        backend: LLMBackend,
        spec: RunSpec,
        dev: Sequence[Example],
        score: ScoreFunction | None,
        measure: MetricFunction | None,
    ) -> None:
        self._backend, self._spec, self._dev = backend, spec, dev
        self._score, self._metric = score, measure

    async def known(self, prompt: TextPrompt) -> Prediction:
        """What the model answered to a prompt; what is not known is as if it had failed."""
        task, free = self._spec.task, self._spec.calibration.label_free
        size = self._spec.method.batch_size
        queries = prediction_queries(self._backend, task, prompt, self._dev, size, free)
        answers = [await self._answer(query) for query in queries]
        return Prediction.of(task, queries, answers, self._dev, self._score, free, self._metric)

    async def _answer(self, query: Query) -> Answer:
        if await is_known(self._backend, query):
            return await self._backend.score(query)
        # Where the model takes one input at a time, the others may be known.
        count, inputs = len(query.inputs), enumerate(query.inputs)
        parts = [
            replace(query, inputs=(one,), references=query.references[at : at + 1])
            for at, one in inputs
        ]
        known = [
            await self._backend.score(part) if await is_known(self._backend, part) else None
            for part in parts
        ] if count > 1 else [None]  # fmt: skip
        return Answer(
            log_probs=tuple(None if one is None else one.log_probs[0] for one in known),
            texts=tuple(None if one is None else one.texts[0] for one in known)
            if query.want == "text"
            else (),
            usage=NOTHING,
        )

    def under(self, found: Prediction, bias: Bias | None) -> Prediction:
        """The same answers under a bias."""
        return replace(found, task=self._spec.task.with_bias(bias))

    def measured(self, found: Prediction) -> MeasuredPrompt:
        """The metric of a prompt."""
        if not found.scored:
            return MeasuredPrompt(bias=found.task.bias)
        task = found.task
        ends = interval(task.metric, self._outcomes(found), len(task.labels))
        return MeasuredPrompt(
            value=found.metric,
            interval=ends and (ends.low, ends.high),
            bias=task.bias,
            scored=len(found.scored),
        )

    def gain(self, better: Prediction, worse: Prediction) -> Spread | None:
        """What one prompt gains over another on the same examples; positive is better."""
        if not (better.scored and worse.scored):
            return None
        metric, count = self._spec.task.metric, len(self._spec.task.labels)
        first, second = self._outcomes(better), self._outcomes(worse)
        if metric == "loss":
            first, second = second, first
        return Spread.of(difference(metric, first, second, count))

    def _outcomes(self, found: Prediction, which: Which = "after") -> Outcomes:
        return Outcomes.of(which, found)


def _on_old_model(artefact: PromptArtefact) -> MeasuredPrompt:
    found = artefact.evaluation
    return MeasuredPrompt(
        value=found.metric.after,
        interval=found.interval,
        bias=artefact.prompt.bias,
        scored=found.examples or 0,
    )


def _apart(metric: str, here: MeasuredPrompt, there: MeasuredPrompt) -> Spread | None:
    """By how much a prompt is better here than there: two measurements that are not paired.

    The interval is put together from those of both (MOVER, Zou and Donner 2008). On one and the
    same dev split it is wider than it had to be.
    """
    if here.value is None or there.value is None:
        return None
    if here.interval is None or there.interval is None:
        return None
    value = here.value - there.value
    below = math.hypot(here.value - here.interval[0], there.interval[1] - there.value)
    above = math.hypot(here.interval[1] - here.value, there.value - there.interval[0])
    if metric == "loss":
        value, below, above = -value, above, below
    return Spread(value=value, low=value - below, high=value + above)


def _holds(change: Spread | None) -> Holds:
    if change is None:
        return "unknown"
    return "no" if change.high < 0.0 else "yes"


def _concluded(gain: Spread | None, *, same: bool) -> Conclusion:
    if same:
        return "keep_old"
    if gain is None:
        return "unknown"
    if gain.low > 0.0:
        return "take_new"
    return "keep_old" if gain.high < 0.0 else "no_difference"
