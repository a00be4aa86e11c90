"""Four prompts compared on a new model: none, the old one with either bias, and the new one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Literal

from fedone_sdk.evaluation.outcomes import Outcomes
from fedone_sdk.evaluation.verdict import gain, measured, rebiased
from fedone_sdk.messages import Message, PromptReport, Spread
from fedone_sdk.metrics import MetricFunction, metric_text
from fedone_sdk.reports.artefact import PromptArtefact, artefact_of
from fedone_sdk.reports.source import ReportedRun
from fedone_sdk.task import Bias, TaskSpec, TextPrompt
from fedone_sdk.vocabulary import Vocabulary

Which = Literal["no_prompt", "old_prompt", "old_prompt_biased", "new_prompt"]
"""A compared prompt; the first that is best is recommended."""

NAMES: Mapping[Which, str] = {
    "no_prompt": "no prompt",
    "old_prompt": "the old prompt as it is",
    "old_prompt_biased": "the old prompt with a new label bias",
    "new_prompt": "the new prompt",
}


class RetunedPrompt(Message):
    """A prompt on the new model, measured on the dev split.

    Attributes:
        prompt: The prompt with the label bias of the measurement.
        interval: Its 95 % interval; null for a user-defined metric.
        behind: The recommended prompt minus this one, paired by example; null without a
            recommendation, and as above.
    """

    prompt: PromptReport
    value: float | None = None
    interval: tuple[float, float] | None = None
    behind: Spread | None = None


class Retuned(Message):
    """The effect of a change of model on a prompt.

    Attributes:
        prompts: The prompts on the new model. Without label calibration there is no new bias.
        change: The old prompt as it is, new model minus old model; null without intervals.
        recommended: The best prompt; null while the run is not over or if nothing is measured.
        text: What the intervals say, in sentences.
    """

    metric: str
    examples: int
    old_model: str | None
    new_model: str | None
    on_old_model: float | None
    prompts: dict[Which, RetunedPrompt]
    change: Spread | None
    recommended: Which | None
    text: tuple[str, ...] = ()

    @property
    def header(self) -> list[str]:
        """The columns of `rows`."""
        rows = f"{self.metric} on {self.examples} dev rows"
        return [rows, "value", "95 %", "label bias", "recommended gains"]

    @property
    def rows(self) -> list[list[str]]:
        """The prompts as texts."""
        old = ["the old prompt, on the old model", metric_text(self.on_old_model), "-", "-", "-"]
        return [old] + [
            [
                NAMES[which],
                metric_text(one.value),
                "-" if one.interval is None else "{:.3f} to {:.3f}".format(*one.interval),
                "-"
                if one.prompt.bias is None
                else ",".join(f"{value:.4g}" for value in one.prompt.bias),
                "-" if which == self.recommended or one.behind is None else _spread(one.behind),
            ]
            for which, one in self.prompts.items()
        ]


def retuned(
    artefact: PromptArtefact,
    run: ReportedRun,
    biases: Mapping[TextPrompt, Bias],
    *,
    finished: bool,
    measure: MetricFunction | None = None,
) -> Retuned:
    """Compare the prompts by the answers that the run's evaluation paid for."""
    spec, result = run.spec, run.result
    task, old = spec.task, artefact.prompt
    bare = _no_prompt(task, run.vocabulary)
    outcomes: dict[Which, tuple[PromptReport, Outcomes | None]] = {}

    def add(which: Which, prompt: PromptReport, bias: Bias | None, found: Outcomes | None) -> None:
        known = None if found is None else rebiased(task, found, bias)
        outcomes[which] = prompt.model_copy(update={"bias": bias}), known

    before = run.outcomes.get("before")
    if run.untrained.prompt != old.prompt:
        before = None
    given = old.bias if old.bias is not None else artefact.task.bias
    add("no_prompt", bare, biases.get(bare.prompt), run.outcomes.get("no_prompt"))
    add("old_prompt", old, given, before)
    if old.prompt in biases:
        add("old_prompt_biased", old, biases[old.prompt], before)
    outcomes["new_prompt"] = result.prompt, run.outcomes.get("after")

    prompts: dict[Which, RetunedPrompt] = {}
    for which, (prompt, found) in outcomes.items():
        value, ends = (None, None) if found is None else measured(task, found, measure)
        prompts[which] = RetunedPrompt(prompt=prompt, value=value, interval=ends)
    sign = -1.0 if task.metric == "loss" else 1.0
    values = {which: one.value for which, one in prompts.items() if one.value is not None}
    ranked: list[Which] = sorted(values, key=lambda which: -sign * values[which])
    best = ranked[0] if finished and ranked else None
    top = None if best is None else outcomes[best][1]
    for which, (_, found) in outcomes.items():
        if top is not None and found is not None:
            behind = gain(task, top, found)
            prompts[which] = prompts[which].model_copy(update={"behind": behind})
    change = _apart(task.metric, prompts["old_prompt"], artefact)
    moved = Retuned(
        metric=task.metric,
        examples=max((len(one.targets or one.losses) for one in run.outcomes.values()), default=0),
        old_model=artefact.model,
        new_model=result.model,
        on_old_model=artefact.evaluation.metric.after,
        prompts=prompts,
        change=change,
        recommended=best,
    )
    return moved.model_copy(update={"text": tuple(_sentences(moved, finished=finished))})


def retuned_artefact(run: ReportedRun, moved: Retuned) -> PromptArtefact:
    """Return the artefact of the recommended prompt, for the new model."""
    if moved.recommended is None:
        raise ValueError("no prompt is recommended")
    made, best = artefact_of(run), moved.prompts[moved.recommended]
    if moved.recommended == "new_prompt":
        return made
    metric = made.evaluation.metric.model_copy(update={"after": best.value})
    evaluation = made.evaluation.model_copy(
        update={"metric": metric, "interval": best.interval, "verdict": None}
    )
    return made.model_copy(update={"prompt": best.prompt, "evaluation": evaluation}).signed()


def _no_prompt(task: TaskSpec, vocabulary: Vocabulary) -> PromptReport:
    if not vocabulary.slots:
        return PromptReport(text="", tokens=("",))
    blanks = [slot.blank or 0 for slot in vocabulary.slots for _ in range(slot.repeat)]
    return PromptReport.of(task, vocabulary, blanks, None)


def _apart(metric: str, here: RetunedPrompt, artefact: PromptArtefact) -> Spread | None:
    """Return the difference of the unpaired measurements on both models.

    The interval combines those of both (MOVER, Zou and Donner 2008). For measurements on the same
    dev split it is conservative.
    """
    there, ends = artefact.evaluation.metric.after, artefact.evaluation.interval
    if here.value is None or there is None or here.interval is None or ends is None:
        return None
    value = here.value - there
    below = math.hypot(here.value - here.interval[0], ends[1] - there)
    above = math.hypot(here.interval[1] - here.value, there - ends[0])
    if metric == "loss":
        value, below, above = -value, above, below
    error = (below + above) / (2.0 * NormalDist().inv_cdf(0.975))
    return Spread(
        value=value,
        low=value - below,
        high=value + above,
        error=error,
        probability=NormalDist().cdf(value / error) if error else float(value > 0.0),
    )


def _sentences(moved: Retuned, *, finished: bool) -> Iterator[str]:
    if (change := moved.change) is not None:
        says = (
            "it does not hold"
            if change.high < 0
            else "it is better there"
            if change.low > 0
            else f"a loss of up to {-change.low:.3f} is possible"
        )
        yield f"The old prompt as it is, new model less old model: {_spread(change)}; {says}."
    if not finished:
        yield "No recommendation yet, the run is not over."
    elif moved.recommended is None:
        yield "No recommendation, because nothing was measured."
    else:
        best = moved.prompts[moved.recommended]
        yield f"Recommended: {NAMES[moved.recommended]} ({moved.metric} {metric_text(best.value)})."
        close = [
            f"{NAMES[which]} ({_spread(one.behind)})"
            for which, one in moved.prompts.items()
            if which != moved.recommended and one.behind is not None and one.behind.low <= 0
        ]
        if close:
            yield f"Its gain is not distinguishable from luck over {', '.join(close)}."


def _spread(spread: Spread) -> str:
    return f"{spread.value:+.3f}, 95 % {spread.low:+.3f} to {spread.high:+.3f}"
