"""A tuned prompt next to none, on the dev split: what it is worth, and which answers it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedone_sdk.aggregator.outcomes import Outcomes
from fedone_sdk.backends import LLMBackend, Prediction, predict
from fedone_sdk.messages import PromptReport
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.reports.intervals import Interval, difference, interval
from fedone_sdk.task import Bias, Example, TaskSpec, TextPrompt

__all__ = ["Change", "Comparison", "compare_prompts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An example whose answer the prompt changes.

    Attributes:
        example: The example.
        before: Index of the label without a prompt, with the bias that belongs to that; -1 for
            none.
        after: The same with the tuned prompt.
        target: Index of the true label.
    """

    example: Example
    before: int
    after: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was measured; an interval is None where the metric has none (see `interval`).

    Attributes:
        no_prompt: The metric without a prompt and without a bias.
        biased: Without a prompt, with the label bias that belongs to that; None where the run
            found no such bias.
        tuned: With the tuned prompt and its bias.
        gain: `tuned` less `biased`, or less `no_prompt` where there is no `biased`; paired.
        changes: The examples whose answer is another one, in the order of the dev split.
        num_examples: Examples of the dev split.
    """

    no_prompt: Interval | None
    biased: Interval | None
    tuned: Interval | None
    gain: Interval | None
    changes: tuple[Change, ...]
    num_examples: int


async def compare_prompts(
    backend: LLMBackend,
    task: TaskSpec,
    prompt: PromptReport,
    plain_bias: Bias | None,
    examples: Sequence[Example],
    batch_size: int,
    *,
    bare: TextPrompt = "",
    measure: MetricFunction | None = None,
) -> Comparison:
    """Measures a tuned prompt next to none. What a cache knows is not asked again.

    Args:
        backend: The model.
        task: A task with labels, without a bias of its own.
        prompt: The tuned prompt and its bias.
        plain_bias: The label bias that belongs to no prompt; None where none is known.
        examples: The dev split.
        batch_size: Examples of a query.
        bare: What stands for no prompt (`fedone_sdk.candidates.no_prompt`).
        measure: The user's function, for a metric of their own.

    Raises:
        BackendError: The model refused a query.
    """
    plain = await predict(backend, task, bare, examples, batch_size, measure=measure)
    asked = task.with_bias(prompt.bias)
    tuned = await predict(backend, asked, prompt.prompt, examples, batch_size, measure=measure)
    before = plain if plain_bias is None else replace(plain, task=task.with_bias(plain_bias))
    raw, fair, after = (Outcomes.of("no_prompt", found) for found in (plain, before, tuned))
    metric, count = task.metric, len(task.labels)
    return Comparison(
        no_prompt=interval(metric, raw, count),
        biased=None if plain_bias is None else interval(metric, fair, count),
        tuned=interval(metric, after, count),
        gain=difference(metric, after, fair, count),
        changes=tuple(_changes(tuned, fair, after)),
        num_examples=len(examples),
    )


def _changes(found: Prediction, before: Outcomes, after: Outcomes) -> list[Change]:
    rows = zip(found.examples, before.predicted, after.predicted, after.targets, strict=True)
    return [
        Change(example=example, before=old, after=new, target=target)
        for example, old, new, target in rows
        if old is not None and new is not None and old != new
    ]
