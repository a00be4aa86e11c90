"""Moving a prompt to another model: the run, its cost, new label biases, and a recommendation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Literal

from fedone_sdk import backends
from fedone_sdk.algorithms.sampling import stream_seed
from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.budget import NOTHING, Account
from fedone_sdk.candidates import label_checks, no_prompt
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import SpecError
from fedone_sdk.evaluation import verdict
from fedone_sdk.evaluation.outcomes import Outcomes
from fedone_sdk.local.federation import Ask, Federation
from fedone_sdk.local.plan import RunPlan, plan_run
from fedone_sdk.messages import Message, PromptReport, Spread
from fedone_sdk.metrics import MetricFunction, metric_text
from fedone_sdk.reports.artefact import PromptArtefact, artefact_of
from fedone_sdk.reports.source import ReportedRun
from fedone_sdk.spec import BackendSpec, RunSpec, validate_spec
from fedone_sdk.task import Bias, Example, TaskSpec, TextPrompt
from fedone_sdk.vocabulary import Vocabulary

_START_SHARE = 0.8
"""Initial probability of the old prompt's token at each position."""

_MAX_NAME_CHARS = 64

_BIAS_EXAMPLES = 128
"""Number of training examples to which a bias is fitted."""


@dataclass(frozen=True, kw_only=True)
class Retuning:
    """An old prompt, and the run that tunes it for another model.

    Attributes:
        federation: The run, which starts from the old prompt.
        biases: Label biases on the new model by prompt, filled by `find_biases`; empty without
            label calibration.
    """

    artefact: PromptArtefact
    federation: Federation
    biases: dict[TextPrompt, Bias] = field(default_factory=dict)

    @cached_property
    def _examples(self) -> list[Example]:
        """Training examples for fitting biases, a uniform sample of all clients' rows."""
        distinct = {id(row): row for shard in self.federation.shards for row in shard}
        rows = list(distinct.values())
        seed = stream_seed(self.federation.spec.seed, "retune", 0)
        return [rows[at] for at in sorted(draw_minibatch(len(rows), _BIAS_EXAMPLES, seed))]

    def _bias_queries(self, backend: LLMBackend) -> dict[TextPrompt, list[Query]]:
        """Return the queries to fit the biases of the old prompt and of "no prompt"."""
        spec = self.federation.spec
        if spec.calibration.kind != "labels":
            return {}
        examples, size = self._examples, spec.method.batch_size
        prompts = (no_prompt(spec.task, self.federation.vocabulary), self.artefact.prompt.prompt)
        return {
            prompt: backends.prediction_queries(backend, spec.task, prompt, examples, size)
            for prompt in prompts
        }

    async def plan(self, backend: LLMBackend) -> RunPlan:
        """Estimate the cost of the run and its label biases; send no paid request."""
        spec = self.federation.spec
        spec.check_caps(backend.bounds)
        if not backend.local:
            for words, form in label_checks(spec.task, self.federation.vocabulary):
                await backend.check(words, form)
        plan = await plan_run(self.federation, backend=backend)
        queries = [query for batch in self._bias_queries(backend).values() for query in batch]
        quoted = sum([await backend.quote(query) for query in queries], NOTHING).without_queries()
        leased = (backend.worst_case(spec.method.batch_size) * len(queries)).without_queries()
        smallest = plan.smallest_cap + leased
        if not Account(cap=spec.budget).affordable(smallest, 1):
            tokens = smallest.prompt_tokens + smallest.completion_tokens
            raise SpecError(
                "budget: may be too low for one round and all measurements; the smallest sufficient"
                f" cap is {smallest.queries} queries, {smallest.requests} requests, {tokens} "
                f"tokens, USD {smallest.usd:.4f}"
            )
        return plan.model_copy(
            update={
                "evaluation_queries": plan.evaluation_queries + len(queries),
                "expected": plan.expected + quoted,
                "most": plan.most + leased,
                "smallest_cap": smallest,
            }
        )

    async def find_biases(self, backend: LLMBackend, ask: Ask) -> None:
        """Fit the label biases of the old prompt and of "no prompt" on the new model."""
        for prompt, queries in self._bias_queries(backend).items():
            # Cached answers do not go through `ask`, because the run's budget may be exhausted.
            unknown = [query for query in queries if not await backends.is_known(backend, query)]
            paid = dict(zip(unknown, await ask(unknown), strict=True)) if unknown else {}
            rows = [
                row
                for query in queries
                for row in backends.rows_of(query, paid.get(query) or await backend.score(query))
            ]
            self.biases[prompt] = verdict.label_bias(
                self.federation.spec.task, rows, self._examples
            )


def retune_name(artefact: PromptArtefact, backend: str) -> str:
    """Return the name of the run, from the names of the artefact and the backend file."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{artefact.name}-on-{backend}")[:_MAX_NAME_CHARS]


def retune_spec(
    artefact: PromptArtefact, backend: BackendSpec, run: RunSpec, *, name: str
) -> RunSpec:
    """Return the run that starts from an artefact's prompt and uses another model."""
    tokens, slots = artefact.prompt.tokens, artefact.prompt.slots is not None
    if not slots and "".join(tokens) != artefact.prompt.text:
        raise SpecError("prompt: text must be the joined tokens")
    if problems := _differences(artefact, run):
        raise SpecError(problems)
    document = run.model_dump()
    document["name"], document["backend"] = name, backend
    prompt, task = document["prompt"], document["task"]
    prompt["start"] = [{token: _START_SHARE} for token in tokens]
    if not slots:
        prompt["length"] = max(prompt["length"], len(tokens))
        if prompt["length"] > len(tokens):  # Positions after `start` need a blank candidate.
            words = prompt["vocabulary"]
            listed = words.get("candidates", ())
            words |= {"candidates": ("", *filter(None, listed))} if listed else {"blank": True}
    # The old label bias belongs to the old model, so the task starts without one.
    if task["bias"] is not None:
        task["bias"], document["calibration"] = None, "auto"
    return validate_spec(RunSpec, document, source="arguments")


def _differences(artefact: PromptArtefact, run: RunSpec) -> list[str]:
    old, new, problems = artefact.task, run.task, []
    names = [slot.name for slot in artefact.prompt.slots or ()]
    if names != list(run.prompt.text_slots) or (
        (artefact.prompt.labels is not None) is not run.prompt.chooses_labels
    ):
        required = ", ".join([*names, *(["labels"] if artefact.prompt.labels else [])]) or "none"
        problems.append(f"prompt.slots: must be the slots of the old prompt ({required})")
    if list(old.labels) != list(new.labels):
        required = ", ".join(old.labels) or "none"
        problems.append(f"task.labels: must be the labels of the old prompt ({required})")
    for key in ("metric", "loss", "label_field"):
        was, now = getattr(old, key), getattr(new, key)
        if was != now:
            problems.append(
                f"task.{key}: is {now!r}, but the prompt was tuned and measured with {was!r}"
            )
    if run.data is None or run.data.dev is None:
        problems.append("data.dev: is required to compare prompts")
    return problems


Which = Literal["no_prompt", "old_prompt", "old_prompt_biased", "new_prompt"]
"""A compared prompt. If several have the best value, the first of them is recommended."""

_NAMES: Mapping[Which, str] = {
    "no_prompt": "no prompt",
    "old_prompt": "the old prompt as it is",
    "old_prompt_biased": "the old prompt with a new label bias",
    "new_prompt": "the new prompt",
}


class MeasuredPrompt(Message):
    """A prompt's measurement on the new model and the dev split.

    Attributes:
        prompt: The prompt with the label bias of the measurement.
        interval: The 95 % interval of the metric `value`; null for a user-defined metric.
        behind: The gain of the recommended prompt over this prompt, paired by row; null if unknown.
    """

    prompt: PromptReport
    value: float | None = None
    interval: tuple[float, float] | None = None
    behind: Spread | None = None


class RetuneReport(Message):
    """The effect of a change of model on a prompt.

    Attributes:
        prompts: The prompts on the new model; ``old_prompt_biased`` only with label calibration.
        change: How much better the old prompt is on the new than on the old model; null if unknown.
        recommended: The best prompt; null before the run has ended, or if nothing is measured.
        text: The conclusions from the intervals, in sentences.
    """

    metric: str
    examples: int
    old_model: str | None
    new_model: str | None
    on_old_model: float | None
    prompts: dict[Which, MeasuredPrompt]
    change: Spread | None
    recommended: Which | None
    text: tuple[str, ...] = ()

    @property
    def header(self) -> list[str]:
        """The columns of `rows`."""
        rows = f"{self.metric} on {self.examples} dev rows"
        return [rows, "value", "95 % interval", "label bias", "gain of recommended prompt"]

    @property
    def rows(self) -> list[list[str]]:
        """A table of the prompts."""
        old = ["the old prompt, on the old model", metric_text(self.on_old_model), "-", "-", "-"]
        return [old] + [
            [
                _NAMES[which],
                metric_text(one.value),
                "-" if one.interval is None else "{:.3f} to {:.3f}".format(*one.interval),
                "-"
                if one.prompt.bias is None
                else ",".join(f"{value:.4g}" for value in one.prompt.bias),
                "-" if which == self.recommended or one.behind is None else _text(one.behind),
            ]
            for which, one in self.prompts.items()
        ]

    def artefact(self, run: ReportedRun) -> PromptArtefact:
        """Return the artefact of the recommended prompt, for the new model of `run`."""
        if self.recommended is None:
            raise ValueError("no prompt is recommended")
        artefact, best = artefact_of(run), self.prompts[self.recommended]
        if self.recommended == "new_prompt":
            return artefact
        metric = artefact.evaluation.metric.model_copy(update={"after": best.value})
        evaluation = artefact.evaluation.model_copy(
            update={"metric": metric, "interval": best.interval, "verdict": None}
        )
        changes = {"prompt": best.prompt, "evaluation": evaluation}
        return artefact.model_copy(update=changes).signed()


def retune_report(
    artefact: PromptArtefact,
    run: ReportedRun,
    biases: Mapping[TextPrompt, Bias],
    *,
    finished: bool,
    measure: MetricFunction | None = None,
) -> RetuneReport:
    """Compare the prompts, using only answers that the run's evaluation has already paid for."""
    task = run.spec.task
    measurements = _measurements(artefact, run, biases)
    prompts: dict[Which, MeasuredPrompt] = {}
    for which, (prompt, outcomes) in measurements.items():
        value = ends = None
        if outcomes is not None:
            value, ends = verdict.measured(task, outcomes, measure)
        prompts[which] = MeasuredPrompt(prompt=prompt, value=value, interval=ends)
    sign = -1.0 if task.metric == "loss" else 1.0
    values = {which: one.value for which, one in prompts.items() if one.value is not None}
    recommended = max(values, key=lambda which: sign * values[which], default=None)
    if recommended is not None and finished:
        best = measurements[recommended][1]
        for which, (_, outcomes) in measurements.items():
            if best is not None and outcomes is not None:
                behind = verdict.gain(task, best, outcomes)
                prompts[which] = prompts[which].model_copy(update={"behind": behind})
    report = RetuneReport(
        metric=task.metric,
        examples=max((len(one.targets or one.losses) for one in run.outcomes.values()), default=0),
        old_model=artefact.model,
        new_model=run.result.model,
        on_old_model=artefact.evaluation.metric.after,
        prompts=prompts,
        change=_change_of_model(task.metric, prompts["old_prompt"], artefact),
        recommended=recommended if finished else None,
    )
    return report.model_copy(update={"text": tuple(_sentences(report, finished=finished))})


def _measurements(
    artefact: PromptArtefact, run: ReportedRun, biases: Mapping[TextPrompt, Bias]
) -> dict[Which, tuple[PromptReport, Outcomes | None]]:
    task, old = run.spec.task, artefact.prompt
    bare = _bare_prompt(task, run.vocabulary)
    # The untrained prompt is the old prompt, unless a token of it is not in the vocabulary.
    before = run.outcomes.get("before") if run.untrained.prompt == old.prompt else None

    def biased(
        prompt: PromptReport, bias: Bias | None, outcomes: Outcomes | None
    ) -> tuple[PromptReport, Outcomes | None]:
        prompt = prompt.model_copy(update={"bias": bias})
        return prompt, outcomes and verdict.rebiased(task, outcomes, bias)

    measurements: dict[Which, tuple[PromptReport, Outcomes | None]] = {
        "no_prompt": biased(bare, biases.get(bare.prompt), run.outcomes.get("no_prompt")),
        "old_prompt": biased(old, artefact.task.bias if old.bias is None else old.bias, before),
    }
    if old.prompt in biases:
        measurements["old_prompt_biased"] = biased(old, biases[old.prompt], before)
    measurements["new_prompt"] = run.result.prompt, run.outcomes.get("after")
    return measurements


def _bare_prompt(task: TaskSpec, vocabulary: Vocabulary) -> PromptReport:
    if not vocabulary.slots:
        return PromptReport(text="", tokens=("",))
    blanks = [slot.blank or 0 for slot in vocabulary.slots for _ in range(slot.repeat)]
    return PromptReport.of(task, vocabulary, blanks, None)


def _change_of_model(metric: str, new: MeasuredPrompt, artefact: PromptArtefact) -> Spread | None:
    """Return how much better the old prompt is on the new model than on the old model.

    The interval combines the intervals of both metrics (MOVER, Zou and Donner 2008). It is too wide
    if both were measured on the same dev split.
    """
    old, ends = artefact.evaluation.metric.after, artefact.evaluation.interval
    if new.value is None or old is None or new.interval is None or ends is None:
        return None
    value = new.value - old
    below = math.hypot(new.value - new.interval[0], ends[1] - old)
    above = math.hypot(new.interval[1] - new.value, old - ends[0])
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


def _sentences(report: RetuneReport, *, finished: bool) -> Iterator[str]:
    if (change := report.change) is not None:
        outcome = (
            "it is worse on the new model"
            if change.high < 0
            else "it is better on the new model"
            if change.low > 0
            else f"it may be worse by up to {-change.low:.3f}"
        )
        yield f"Gain of the old prompt as it is, from old to new model: {_text(change)}; {outcome}."
    if not finished:
        yield "No recommendation yet, because the run has not ended."
    elif report.recommended is None:
        yield "No recommendation, because nothing was measured."
    else:
        best = report.prompts[report.recommended]
        value = f"{report.metric} {metric_text(best.value)}"
        yield f"Recommended: {_NAMES[report.recommended]} ({value})."
        close = [
            f"{_NAMES[which]} ({_text(one.behind)})"
            for which, one in report.prompts.items()
            if which != report.recommended and one.behind is not None and one.behind.low <= 0
        ]
        if close:
            yield f"Its gain over {' and '.join(close)} is not distinguishable from luck."


def _text(spread: Spread) -> str:
    return f"{spread.value:+.3f}, 95 % {spread.low:+.3f} to {spread.high:+.3f}"
