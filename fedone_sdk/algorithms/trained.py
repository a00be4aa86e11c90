"""Parameters that clients train with the model's gradients: the white-box baselines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .method import PlainMethod
from .sampling import stream, stream_seed
from .state import State

LARGEST = 1e6
"""Bound on the absolute value of a parameter, far above any trained value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(PlainMethod):
    """A soft prompt that clients train and the server averages; there is no `ask` or `tell`.

    Attributes:
        rows: Rows of alpha.
        columns: Columns of alpha.
        init_std: Standard deviation of the first values.
        seed: Seeds the first values.
    """

    rows: int
    columns: int
    init_std: float
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        _checks.integer("rows", self.rows, minimum=1)
        _checks.integer("columns", self.columns, minimum=1)
        _checks.number("init_std", self.init_std)
        _checks.integer("seed", self.seed)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def shares_memory(self) -> bool:
        """No: there is no memory."""
        return False

    def init(self) -> State:
        """Return normal random values."""
        rng = stream(stream_seed(self.seed, "parameters", 0))
        return State(alpha=rng.normal(scale=self.init_std, size=self.shape).astype(np.float32))

    def check(self, state: State) -> None:
        """Raise for another shape, or any memory."""
        _checks.matrix("alpha", state.alpha, shape=self.shape)
        if state.memory:
            raise ValueError("parameters that clients train have no memory")

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Clip the parameters, so that one client cannot make the average overflow."""
        checked = _checks.matrix("alpha", alpha, shape=self.shape)
        return np.clip(checked, -LARGEST, LARGEST).astype(np.float32)

    def prompt(self, state: State) -> NDArray[np.float32]:
        """Return the parameters as one row."""
        return state.alpha.ravel()
