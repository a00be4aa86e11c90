"""Comparison of the old and the new prompt on a new model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from fedone_sdk.backends import Answer, LLMBackend, Prediction, Query, is_known, prediction_queries
from fedone_sdk.budget import NOTHING
from fedone_sdk.evaluation.intervals import difference, interval
from fedone_sdk.evaluation.outcomes import Outcomes
from fedone_sdk.messages import Message, PromptReport, Spread
from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.task import Bias, TextPrompt

if TYPE_CHECKING:
    from fedone_sdk.local import Federation

Holds = Literal["yes", "no", "unknown"]
"""Whether a prompt is as good as before: no if it is worse, by an interval without 0."""

Keep = Literal["as_it_is", "biased"]
"""The label bias with which the old prompt would be kept: its old one; or a new one, if that is
better by an interval without 0, or if the old prompt does not hold with its old bias."""

Conclusion = Literal["take_new", "keep_old", "no_difference", "unknown"]
"""The recommendation by the new prompt's gain over the kept old one: its interval is above 0, below
0, or contains 0. If tuning returned the old prompt's text, the old prompt is kept."""


class MeasuredPrompt(Message):
    """A prompt on the dev split.

    Attributes:
        value: The metric; null without a measurement.
        interval: Its 95 % interval; null also for a user-defined metric.
        bias: The label bias of the measurement.
        scored: Examples that the model answered.
    """

    value: float | None = None
    interval: tuple[float, float] | None = None
    bias: Bias | None = None
    scored: int = 0


class Retuned(Message):
    """The effect of a change of model on a prompt, measured on the dev split.

    Attributes:
        metric: Its name.
        examples: Examples of the dev split.
        old_model: Fingerprint of the model that the old prompt was tuned for.
        new_model: Fingerprint of the new one.
        on_old_model: The old prompt on the old model, from the artefact.
        no_prompt: The new model without a prompt.
        no_prompt_biased: The same with a label bias for no prompt; null without calibration.
        old_prompt: The old prompt on the new model, with its old bias.
        old_prompt_biased: The same with a bias for the new model; null as above.
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
    federation: Federation,
    prompt: PromptReport,
    biases: Mapping[TextPrompt, Bias],
    *,
    finished: bool,
    bare: TextPrompt = "",
) -> Retuned:
    """Compare prompts by answers that the run's evaluation paid for; nothing is asked.

    Args:
        backend: The new model, with the cache that it was asked through.
        artefact: The old prompt.
        federation: The run that tuned it for the new model.
        prompt: The run's prompt.
        biases: Label biases on the new model by prompt, as found by `Retuning`.
        finished: Whether the run is over, so that a conclusion is possible.
        bare: The prompt that represents no prompt.

    Raises:
        SpecError: The user's function is missing or broken.
    """
    reader, spec = _Reader(backend, federation), federation.spec
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
        none_again, old_again = (
            None if bias is None else reader.under(found, bias)
            for found, bias in ((none, biases.get(bare)), (old, biases.get(artefact.prompt.prompt)))
        )
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
        examples=len(federation.dev),
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


class _Reader:
    """Predictions from a cache, and their metrics."""

    def __init__(self, backend: LLMBackend, federation: Federation) -> None:
        self._backend, self._federation = backend, federation
        self._spec = federation.spec

    async def known(self, prompt: TextPrompt) -> Prediction:
        """Return the cached answers to a prompt; missing answers count as failed."""
        task, free = self._spec.task, self._spec.calibration.label_free
        dev, size = self._federation.dev, self._spec.method.batch_size
        score, measure = self._federation.score, self._federation.measure
        queries = prediction_queries(self._backend, task, prompt, dev, size, free)
        answers = [await self._answer(query) for query in queries]
        return Prediction.of(task, queries, answers, dev, score, free, measure)

    async def _answer(self, query: Query) -> Answer:
        if await is_known(self._backend, query):
            return await self._backend.score(query)
        # If the model accepts one input at a time, the other inputs may be cached.
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
        """Return the same answers with another bias."""
        return replace(found, task=self._spec.task.with_bias(bias))

    def measured(self, found: Prediction) -> MeasuredPrompt:
        """Return the metric of a prompt."""
        if not found.scored:
            return MeasuredPrompt(bias=found.task.bias)
        task = found.task
        ends = interval(task.metric, Outcomes.of("after", found), len(task.labels))
        return MeasuredPrompt(
            value=found.metric,
            interval=ends and (ends.low, ends.high),
            bias=task.bias,
            scored=len(found.scored),
        )

    def gain(self, better: Prediction, worse: Prediction) -> Spread | None:
        """Return the paired gain of one prompt over another; positive is better."""
        if not (better.scored and worse.scored):
            return None
        metric, count = self._spec.task.metric, len(self._spec.task.labels)
        first, second = Outcomes.of("after", better), Outcomes.of("after", worse)
        if metric == "loss":
            first, second = second, first
        found = difference(metric, first, second, count)
        return found and Spread(value=found.value, low=found.low, high=found.high)


def _on_old_model(artefact: PromptArtefact) -> MeasuredPrompt:
    found = artefact.evaluation
    return MeasuredPrompt(
        value=found.metric.after,
        interval=found.interval,
        bias=artefact.prompt.bias,
        scored=found.examples or 0,
    )


def _apart(metric: str, here: MeasuredPrompt, there: MeasuredPrompt) -> Spread | None:
    """Return the difference of two unpaired measurements.

    The interval combines those of both (MOVER, Zou and Donner 2008). For measurements on the same
    dev split it is conservative.
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
