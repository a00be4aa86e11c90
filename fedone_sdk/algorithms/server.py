"""Server optimisers: a step with the clients' mean as a pseudo-gradient (Reddi et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import _checks
from .optimizers import AdamW
from .state import Memory

SERVER_OPTIMIZERS = ("adamw", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizer:
    """The server's update of alpha from the clients' mean.

    Attributes:
        name: "none" returns the mean; "adamw" takes an AdamW step with the pseudo-gradient
            alpha - mean(alpha_k) (FedAdam).
        learning_rate: AdamW's.
        weight_decay: AdamW's.
    """

    name: str
    learning_rate: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        _checks.choice("server_optimizer", self.name, SERVER_OPTIMIZERS)
        self._adamw()

    def apply(
        self, alpha: NDArray[np.float32], mean_alpha: NDArray[np.float32], memory: Memory
    ) -> tuple[NDArray[np.float32], Memory]:
        """Return the server's next alpha and memory; the caller projects alpha afterwards.

        Args:
            alpha: The round's initial alpha, shape (n, N).
            mean_alpha: The clients' aggregate, shape (n, N).
            memory: The optimiser's, empty at the start; not the method's.
        """
        if alpha.shape != mean_alpha.shape:
            raise ValueError(f"alpha has shape {alpha.shape}, the mean {mean_alpha.shape}")
        if self.name == "none":
            return mean_alpha.astype(np.float32), memory
        params = alpha.astype(np.float64)
        params, memory = self._adamw().update(params, params - mean_alpha, memory)
        return params.astype(np.float32), memory

    def _adamw(self) -> AdamW:
        return AdamW(learning_rate=self.learning_rate, weight_decay=self.weight_decay)
