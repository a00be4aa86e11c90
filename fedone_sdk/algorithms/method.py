"""The one protocol of black-box prompt search: `ask` for candidates, `tell` their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .state import State

__all__ = ["Algorithm", "Candidates"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Prompts to be scored. Both arrays are read-only.

    Attributes:
        indices: Token indices, int64, shape (I, n).
        probabilities: The categoricals they were drawn from, float64, shape (n, N).
    """

    indices: NDArray[np.int64]
    probabilities: NDArray[np.float64]

    def __post_init__(self) -> None:
        """Check the arrays and keep read-only copies."""
        indices = np.array(self.indices)
        probabilities = np.array(self.probabilities, dtype=np.float64)
        if indices.ndim != 2 or not np.issubdtype(indices.dtype, np.integer):
            raise ValueError("indices must be an integer matrix (I, n)")
        if probabilities.ndim != 2 or len(probabilities) != indices.shape[1]:
            raise ValueError("probabilities must be a matrix (n, N) with one row per position")
        vocab_size = probabilities.shape[1]
        if indices.size and not 0 <= indices.min() <= indices.max() < vocab_size:
            raise ValueError(f"indices must lie in [0, {vocab_size})")
        for name, array in ("indices", indices.astype(np.int64)), ("probabilities", probabilities):
            array.setflags(write=False)
            object.__setattr__(self, name, array)


class Algorithm(Protocol):
    """A black-box method: pure functions of an immutable state; the randomness is passed in.

    Example::

        state = method.init()
        candidates = method.ask(state, rng)
        state = method.tell(state, candidates, [loss(row) for row in candidates.indices])
    """

    @property
    def prompt_len(self) -> int:
        """Positions of a prompt, n."""
        ...

    @property
    def vocab_size(self) -> int:
        """Candidate tokens of a position, N."""
        ...

    @property
    def num_samples(self) -> int:
        """Prompts asked at a time, I."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether what it remembers belongs to the run (a pool of prompts).

        Otherwise it belongs to each client (the moments of its optimiser).
        """
        ...

    def init(self) -> State:
        """Return the untrained state."""
        ...

    def ask(
        self, state: State, rng: np.random.Generator, num_samples: int | None = None
    ) -> Candidates:
        """Return prompts to score: `num_samples` of them, the method's own I by default."""
        ...

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike) -> State:
        """Return the next state.

        Args:
            state: The state that was asked.
            candidates: What it answered, at least 2 prompts.
            losses: Shape (I,), finite; lower is better.

        Raises:
            ValueError: If the arguments do not fit each other or the method.
        """
        ...

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return the nearest feasible `alpha`; a feasible one comes back bit for bit."""
        ...

    def prompt(self, state: State) -> NDArray[np.int64]:
        """Return the prompt to deploy if the run stopped now, shape (n,)."""
        ...
