"""Soft prompts that clients train by gradient descent: prompt tuning and P-tuning v2."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from fedone_sdk.backends import Wrapper
from fedone_sdk.backends.torch_model import TorchModel
from fedone_sdk.baselines.step import check_task, train_step
from fedone_sdk.errors import BackendError, SpecError
from fedone_sdk.soft_prompt import SoftPromptKind
from fedone_sdk.spec import MethodSpec, PromptTuningSpec, PTuningV2Spec, TrainedSpec
from fedone_sdk.task import Example, TaskSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.backends.transformers import TransformersBackend


class SoftPromptTrainer(ABC):
    """Trains a soft prompt with frozen model weights; a `fedone_sdk.client.Trainer`.

    It uses the backend's weights in the backend's worker thread, alternating with its queries. The
    gradients are those of the loss of a query, without dropout. Training has no randomness, so
    repetitions give the same result. AdamW's state is reset at each call, that is, at each visit to
    a client.

    Attributes:
        method: The method's name.
        kind: The place of its soft prompt in the model.

    Args:
        backend: The model, without wrappers.
    """

    method: ClassVar[str]
    kind: ClassVar[SoftPromptKind]

    def __init__(self, backend: TransformersBackend) -> None:
        self._backend = backend

    @property
    def fingerprint(self) -> str:
        """The backend's."""
        return self._backend.fingerprint

    async def train(
        self,
        task: TaskSpec,
        method: TrainedSpec,
        parameters: NDArray[np.float32],
        batches: Sequence[Sequence[Example]],
        seed: int,
    ) -> tuple[NDArray[np.float32], tuple[float, ...]]:
        """Train the soft prompt, one step of AdamW per mini-batch.

        Args:
            task: The task; its loss must be ``cross_entropy`` or ``hinge``.
            method: The method: learning rate, weight decay, patience.
            parameters: Initial values, in the shape of the method's soft prompt.
            batches: The examples of each step.
            seed: Unused, because training has no randomness.

        Returns:
            The trained parameters, and the mean loss before each step, nats.

        Raises:
            BackendError: The model failed, or training diverged.
            DataError: An example does not fit the task.
            SpecError: The task, the method or its numbers do not fit this trainer or the model.
        """
        if method.name != self.method:
            raise SpecError(f"method.name: {method.name!r}, but the client trains {self.method!r}")
        check_task(task)
        await self._backend.with_model(lambda model: self._check(model, method))
        torch = import_module("torch")
        weights = torch.tensor(parameters, dtype=torch.float32, requires_grad=True)
        optimizer = torch.optim.AdamW(
            [weights], lr=method.learning_rate, weight_decay=method.weight_decay
        )

        def step(batch: Sequence[Example], model: TorchModel) -> float:
            return train_step(
                model, task, batch, optimizer, vectors=lambda: model.on_device(self.kind, weights)
            )

        losses: list[float] = []
        lowest, since = math.inf, 0
        for batch in batches:
            loss = await self._backend.with_model(partial(step, batch))
            losses.append(loss)
            lowest, since = (loss, 0) if loss < lowest else (lowest, since + 1)
            if since == method.patience:
                break
        if not torch.isfinite(weights).all():
            raise BackendError("training diverged: a parameter is not finite; lower learning_rate")
        trained: NDArray[np.float32] = weights.detach().numpy()
        return trained, tuple(losses)

    def _check(self, model: TorchModel, method: TrainedSpec) -> None:
        rows, width = model.soft_shape(self.kind, 1)
        if method.hidden_size != width:
            raise SpecError(f"method.hidden_size: {method.hidden_size}, but the model's is {width}")
        if isinstance(method, PTuningV2Spec) and 2 * method.num_layers != rows:
            raise SpecError(
                f"method.num_layers: {method.num_layers}, but the model has {rows // 2}"
            )


class PromptTuning(SoftPromptTrainer):
    """Trains n input embeddings at the prompt's place (Lester et al. 2021)."""

    method = "prompt-tuning"
    kind = "embeddings"


class PTuningV2(SoftPromptTrainer):
    """Trains n keys and n values of every layer (Liu et al. 2022), without reparameterisation."""

    method = "p-tuning-v2"
    kind = "key_values"


def trainer_of(method: MethodSpec, backend: LLMBackend) -> SoftPromptTrainer | None:
    """Return the trainer of a method's soft prompt; None for black-box methods.

    Raises:
        SpecError: The backend does not have the model's weights.
    """
    if isinstance(method, PromptTuningSpec):
        return PromptTuning(bare_model(backend))
    if isinstance(method, PTuningV2Spec):
        return PTuningV2(bare_model(backend))
    return None


def bare_model(backend: LLMBackend) -> TransformersBackend:
    """Return the transformers model inside its wrappers.

    Raises:
        SpecError: It is another kind of model.
    """
    from fedone_sdk.backends.transformers import TransformersBackend

    while isinstance(backend, Wrapper):
        backend = backend.inner
    if not isinstance(backend, TransformersBackend):
        raise SpecError("backend.kind: white-box methods need transformers")
    return backend
