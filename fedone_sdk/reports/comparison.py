"""Answers that a tuned prompt changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedone_sdk.evaluation.outcomes import Outcomes, Which
from fedone_sdk.evaluation.verdict import no_prompt_biased
from fedone_sdk.task import Bias, Example, TaskSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An example whose answer the prompt changes.

    Attributes:
        example: The example.
        before: Index of the label without a prompt, with the label bias of no prompt if there is
            one; -1 for none.
        after: The same with the tuned prompt.
        target: Index of the true label.
    """

    example: Example
    before: int
    after: int
    target: int


def changed_answers(
    task: TaskSpec,
    outcomes: Mapping[Which, Outcomes],
    examples: Sequence[Example],
    plain_bias: Bias | None,
) -> list[Change]:
    """The examples whose answer differs from that without a prompt, in their order.

    Args:
        task: The task.
        outcomes: The run's measurements of no prompt and of the tuned one.
        examples: Their dev split.
        plain_bias: The label bias that training found for no prompt.
    """
    bare, tuned = outcomes["no_prompt"], outcomes["after"]
    plain = no_prompt_biased(task, bare, plain_bias)
    before = (bare if plain is None else plain.outcomes).predicted
    rows = zip(examples, before, tuned.predicted, tuned.targets, strict=True)
    return [
        Change(example=example, before=old, after=new, target=target)
        for example, old, new, target in rows
        if old is not None and new is not None and old != new
    ]
