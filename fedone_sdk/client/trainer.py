"""Training on the device, for white-box methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from fedone_sdk.spec import TrainedSpec
from fedone_sdk.task import Example, TaskSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Trainer(Protocol):
    """Trains soft prompts of a local model (`fedone_sdk.baselines` has those of the paper)."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model: that of the backend that measures the run."""
        ...

    async def train(
        self,
        task: TaskSpec,
        method: TrainedSpec,
        parameters: NDArray[np.float32],
        batches: Sequence[Sequence[Example]],
        seed: int,
    ) -> tuple[NDArray[np.float32], tuple[float, ...]]:
        """Train the parameters, one step per mini-batch, with a new optimiser.

        Args:
            task: The task.
            method: The method and its settings.
            parameters: Initial values, of the method's shape.
            batches: The examples of each step.
            seed: Seed of all randomness in training.

        Returns:
            The trained parameters, and the mean loss of each completed step, nats.

        Raises:
            SpecError: The model does not fit the method.
            BackendError: The model failed.
        """
        ...
