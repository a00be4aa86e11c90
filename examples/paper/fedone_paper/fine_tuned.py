"""Fine-tuning: training of all weights on the rows of all clients, as a trial."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fedone_paper.federated import tuning_federation
from fedone_paper.soft_model import SoftModel
from fedone_sdk.algorithms import stream, stream_seed
from fedone_sdk.errors import DataError
from fedone_sdk.evaluation.engine import Result, Workspace
from fedone_sdk.task import Example, TaskSpec, target_of

_BATCH_SIZE = 32
_WEIGHT_DECAY = 0.01
_PATIENCE = 3
"""Training ends after this number of epochs in a row without a lower held-out loss."""
_HELD_OUT = 0.2
"""Share of each label's rows that are held out; at least one row per label."""


def run_fine_tuning(options: dict[str, Any], workspace: Workspace) -> Result:
    """Fine-tune on the rows of a federation's clients, and measure the result on dev.

    Args:
        options: ``run`` (its method is not used); ``rates``: the learning rates, of which the rate
            with the lowest held-out loss is used; and ``max_epochs``.
        workspace: Has the inputs ``model``, ``train`` and ``dev``.
    """
    began = time.monotonic()
    federation = tuning_federation(options, workspace)
    task, seed = federation.spec.task, federation.spec.seed
    # Clients may share rows; here each row is used once.
    rows = list({id(row): row for shard in federation.shards for row in shard}.values())
    model = SoftModel(workspace.inputs["model"])
    tried = []
    for rate in options["rates"]:
        fitted = fine_tune(model, task, rows, seed, rate, options["max_epochs"])
        found = fitted.model.measure(task, federation.dev, _BATCH_SIZE)
        tried.append((min(fitted.held_out_losses), rate, fitted, found))
    lowest, rate, fitted, found = min(tried, key=lambda trial: trial[0])
    return {
        "metric": {"name": task.metric, "after": found.metric},
        "mean_loss": found.loss,
        "learning_rate": rate,
        "held_out_loss": lowest,
        "epochs": fitted.best_epoch,
        "rows": len(rows),
        "model": model.fingerprint,
        "reused_rows": federation.reused_rows,
        "wall_s": time.monotonic() - began,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuned:
    """A model fine-tuned for a task.

    Attributes:
        model: The model with the weights of the best epoch.
        held_out_losses: Mean loss on the held-out rows after each epoch, nats.
        best_epoch: Number of the best epoch, from 1.
    """

    model: SoftModel
    held_out_losses: Sequence[float]
    best_epoch: int


def fine_tune(
    model: SoftModel,
    task: TaskSpec,
    rows: Sequence[Example],
    seed: int,
    learning_rate: float,
    max_epochs: int,
) -> FineTuned:
    """Train a copy of the model by AdamW at a constant rate, with dropout and early stopping.

    `seed` determines the held-out rows, the order of the training rows, and dropout.

    Raises:
        DataError: A label has only one row.
    """
    torch = import_module("torch")
    kept, held_out = _split(task, rows, seed)
    trainee = model.copy()
    module = trainee.module.requires_grad_(True)
    weights = list(module.parameters())
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=_WEIGHT_DECAY)
    losses: list[float] = []
    best: list[Any] = []
    best_epoch = 0
    for epoch in range(1, max_epochs + 1):
        for number, batch in enumerate(_batches(kept, seed, epoch)):
            torch.manual_seed(stream_seed(seed, "dropout", epoch, step=number))
            module.train()
            optimizer.zero_grad()
            trainee.losses(task, batch).sum().backward()
            optimizer.step()
            module.eval()
        losses.append(trainee.measure(task, held_out, _BATCH_SIZE).loss)
        if best_epoch == 0 or losses[-1] < losses[best_epoch - 1]:
            best_epoch, best = epoch, [weight.detach().clone() for weight in weights]
        if epoch - best_epoch == _PATIENCE:
            break
    with torch.no_grad():
        for parameter, weight in zip(weights, best, strict=True):
            parameter.copy_(weight)
    return FineTuned(model=trainee, held_out_losses=losses, best_epoch=best_epoch)


def _split(
    task: TaskSpec, examples: Sequence[Example], seed: int
) -> tuple[list[Example], list[Example]]:
    by_label: dict[object, list[Example]] = defaultdict(list)
    for example in examples:
        by_label[target_of(task, example)].append(example)
    rng = stream(stream_seed(seed, "held-out", 0))
    kept: list[Example] = []
    held_out: list[Example] = []
    for label, rows in sorted(by_label.items(), key=str):
        if len(rows) < 2:
            raise DataError(f"label {label!r} has one row; holding out takes at least two")
        order = rng.permutation(len(rows))
        border = min(max(1, round(_HELD_OUT * len(rows))), len(rows) - 1)
        held_out += [rows[index] for index in order[:border]]
        kept += [rows[index] for index in order[border:]]
    return kept, held_out


def _batches(rows: Sequence[Example], seed: int, epoch: int) -> Iterator[Sequence[Example]]:
    order = stream(stream_seed(seed, "order", epoch)).permutation(len(rows))
    for begin in range(0, len(rows), _BATCH_SIZE):
        yield [rows[index] for index in order[begin : begin + _BATCH_SIZE]]
