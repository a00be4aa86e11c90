"""Fine-tuning: training of all weights of a copy of the model, on data in one place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedone_sdk.algorithms.sampling import stream, stream_seed
from fedone_sdk.backends.predict import predict
from fedone_sdk.backends.torch_model import TorchModel
from fedone_sdk.baselines.step import check_task, train_step
from fedone_sdk.errors import BackendError, DataError
from fedone_sdk.task import Example, TaskSpec, target_of

if TYPE_CHECKING:
    from fedone_sdk.backends.transformers import TransformersBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuned:
    """A model fine-tuned for a task.

    Attributes:
        backend: Scores with the trained weights. The caller closes it.
        losses: Mean training loss of each epoch, nats.
        held_out_losses: Mean loss on the held-out rows after each epoch, nats.
        best_epoch: The epoch of the kept weights, from 1.
    """

    backend: TransformersBackend
    losses: tuple[float, ...]
    held_out_losses: tuple[float, ...]
    best_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """Fine-tuning by AdamW at a constant learning rate, with early stopping on held-out rows.

    Attributes:
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        batch_size: Examples per step.
        max_epochs: The largest number of epochs.
        patience: Consecutive epochs without a lower held-out loss after which training ends.
        held_out: The held-out share of the rows of each label; at least one row of each.
    """

    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    batch_size: int = 32
    max_epochs: int = 20
    patience: int = 3
    held_out: float = 0.2

    def __post_init__(self) -> None:
        if min(self.batch_size, self.max_epochs, self.patience) < 1:
            raise ValueError("batch_size, max_epochs and patience must be at least 1")
        if not (self.learning_rate > 0 and self.weight_decay >= 0):
            raise ValueError("learning_rate must be above 0, weight_decay at least 0")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be between 0 and 1, not {self.held_out}")

    async def fit(
        self,
        backend: TransformersBackend,
        task: TaskSpec,
        examples: Sequence[Example],
        *,
        prompt: str = "",
        seed: int = 0,
    ) -> FineTuned:
        """Train a copy of the backend's model; the original does not change.

        Args:
            backend: The model, without wrappers around it.
            task: The task; its loss must be ``cross_entropy`` or ``hinge``.
            examples: The rows, at least two of each label that occurs.
            prompt: The prompt's text, for training and for later queries.
            seed: Of the held-out rows, the order of the others, and dropout.

        Returns:
            The model with the weights of the epoch with the lowest held-out loss. On a CPU the
            same seed gives the same weights.

        Raises:
            BackendError: The model failed, or training diverged.
            DataError: An example does not fit the task, or a label has one row only.
            SpecError: The task's loss has no gradients.
        """
        check_task(task)
        kept, held_out = self._split(task, examples, seed)
        model = await backend.with_model(_copy)
        trainee = backend.holding(model, "in-training")
        parameters = list(model.module.parameters())
        optimizer = import_module("torch").optim.AdamW(
            parameters, lr=self.learning_rate, weight_decay=self.weight_decay
        )
        losses: list[float] = []
        held_out_losses: list[float] = []
        best: list[Any] = []
        best_epoch = 0
        async with trainee:
            for epoch in range(1, self.max_epochs + 1):
                steps = []
                for number, batch in enumerate(self._batches(kept, seed, epoch)):
                    dropout = stream_seed(seed, "dropout", epoch, step=number)
                    step = partial(_step, task, batch, optimizer, prompt, dropout)
                    steps.append(len(batch) * await trainee.with_model(step))
                losses.append(sum(steps) / len(kept))
                measured = await predict(trainee, task, prompt, held_out, self.batch_size)
                assert measured.mean_loss is not None  # There are held-out rows.
                held_out_losses.append(measured.mean_loss)
                if best_epoch == 0 or held_out_losses[-1] < held_out_losses[best_epoch - 1]:
                    best_epoch, best = epoch, [weight.detach().clone() for weight in parameters]
                if epoch - best_epoch == self.patience:
                    break
            version = await trainee.with_model(partial(_put_back, best))
        return FineTuned(
            backend=backend.holding(model, version),
            losses=tuple(losses),
            held_out_losses=tuple(held_out_losses),
            best_epoch=best_epoch,
        )

    def _split(
        self, task: TaskSpec, examples: Sequence[Example], seed: int
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
            border = min(max(1, round(self.held_out * len(rows))), len(rows) - 1)
            held_out += [rows[index] for index in order[:border]]
            kept += [rows[index] for index in order[border:]]
        if not kept:
            raise DataError("there are no rows to train on")
        return kept, held_out

    def _batches(
        self, rows: Sequence[Example], seed: int, epoch: int
    ) -> Iterator[Sequence[Example]]:
        order = stream(stream_seed(seed, "order", epoch)).permutation(len(rows))
        for begin in range(0, len(rows), self.batch_size):
            yield [rows[index] for index in order[begin : begin + self.batch_size]]


def _step(
    task: TaskSpec,
    batch: Sequence[Example],
    optimizer: Any,
    prompt: str,
    seed: int,
    model: TorchModel,
) -> float:
    """Take one step with dropout seeded by `seed`; global generators keep their state."""
    torch = import_module("torch")
    device = model.module.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.module.train()
        try:
            return train_step(model, task, batch, optimizer, prompt=prompt)
        finally:
            model.module.eval()


def _copy(model: TorchModel) -> TorchModel:
    copied = model.copy()
    # Half precision would round small steps to 0.
    copied.module.float().requires_grad_(True)
    return copied


def _put_back(weights: Sequence[Any], model: TorchModel) -> str:
    """Restore the best weights, and return a version that identifies them."""
    torch = import_module("torch")
    digest = sha256()
    with torch.no_grad():
        for parameter, weight in zip(model.module.parameters(), weights, strict=True):
            if not torch.isfinite(weight).all():
                raise BackendError("training diverged: a weight is not finite; lower learning_rate")
            parameter.copy_(weight)
            digest.update(weight.cpu().contiguous().view(torch.uint8).numpy())
    model.module.requires_grad_(False)
    return digest.hexdigest()[:16]
