"""One gradient step on a task's loss, for white-box methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from fedone_sdk.backends.torch_model import TorchModel, Vectors
from fedone_sdk.errors import BackendError, SpecError
from fedone_sdk.task import Example, TaskSpec, form_of, render, target_of

_LOSSES = {"cross_entropy": "cross_entropy", "hinge": "multi_margin_loss"}


def check_task(task: TaskSpec) -> None:
    """Raise unless the task's loss has gradients.

    Raises:
        SpecError: The loss has no gradients.
    """
    if task.loss not in _LOSSES:
        raise SpecError(
            f"task.loss: {task.loss} cannot be trained by gradients here; "
            f"allowed: {', '.join(_LOSSES)}"
        )


def train_step(
    model: TorchModel,
    task: TaskSpec,
    examples: Sequence[Example],
    optimizer: Any,
    *,
    prompt: str = "",
    vectors: Callable[[], Vectors | None] = lambda: None,
) -> float:
    """Update the optimiser's parameters with the gradient of the mean loss.

    The loss is that of a query: `fedone_sdk.task.label_loss` of the label words' log-probabilities
    over the whole vocabulary.

    Args:
        model: The model.
        task: The task.
        examples: The mini-batch, split into parts if it exceeds the model's batch limit.
        optimizer: torch's.
        prompt: The prompt's text; empty if there are vectors.
        vectors: Creates the soft prompt from the parameters, once per part.

    Returns:
        The mean loss before the step, nats.

    Raises:
        BackendError: The model failed, or the loss is not finite.
        DataError: An example does not fit the task.
        SpecError: The task's loss has no gradients.
    """
    check_task(task)
    functional = import_module("torch").nn.functional
    labels = model.label_ids(task.label_words, form_of(task))
    # Label words of several tokens take one row each.
    rows_per_example = 1 if max(map(len, labels)) == 1 else len(labels)
    size = max(1, model.max_batch // rows_per_example)
    optimizer.zero_grad()
    total = 0.0
    for begin in range(0, len(examples), size):
        part = examples[begin : begin + size]
        inputs = [render(task, prompt, example) for example in part]
        log_probs = model.label_log_probs(inputs, labels, vectors())
        targets = log_probs.new_tensor([target_of(task, example) for example in part]).long()
        loss = getattr(functional, _LOSSES[task.loss])(log_probs, targets, reduction="sum")
        loss = loss / len(examples)
        total += loss.item()
        with model.failing_clearly():
            loss.backward()
    if not math.isfinite(total):
        raise BackendError("training diverged: its loss is not finite; lower learning_rate")
    optimizer.step()
    return total
