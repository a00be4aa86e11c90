"""The protocol of black-box prompt search: `ask` for candidates, `tell` their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .state import State

__all__ = [
    "Algorithm",
    "Candidates",
    "ClassLosses",
    "PlainAlgorithm",
    "clip_losses",
]

_Float = TypeVar("_Float", bound=np.floating[Any])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Prompts to be scored. Both arrays are read-only.

    Attributes:
        prompts: Token indices, int64, shape (I, n).
        probabilities: The categoricals that the tokens were drawn from, float64, shape (n, N).
    """

    prompts: NDArray[np.int64]
    probabilities: NDArray[np.float64]

    def __post_init__(self) -> None:
        """Check the arrays and keep read-only copies."""
        prompts = np.array(self.prompts)
        probabilities = np.array(self.probabilities, dtype=np.float64)
        if prompts.ndim != 2 or not np.issubdtype(prompts.dtype, np.integer):
            raise ValueError("prompts must be an integer matrix (I, n)")
        if probabilities.ndim != 2 or len(probabilities) != prompts.shape[1]:
            raise ValueError("probabilities must be a matrix (n, N) with one row per position")
        vocab_size = probabilities.shape[1]
        if prompts.size and not 0 <= prompts.min() <= prompts.max() < vocab_size:
            raise ValueError(f"prompts must lie in [0, {vocab_size})")
        prompts = prompts.astype(np.int64)
        probabilities.setflags(write=False)
        prompts.setflags(write=False)
        object.__setattr__(self, "probabilities", probabilities)
        object.__setattr__(self, "prompts", prompts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassLosses:
    """Losses of one mini-batch per class, for a grid of label biases. Read-only arrays.

    Attributes:
        means: Mean loss of each prompt over the examples of a class, with the bias added to the
            label log-probabilities; float64, shape (I, C, G), 0 for a class without an example.
        counts: Examples of each class, int64, shape (C,); their sum is at least 1.
    """

    means: NDArray[np.float64]
    counts: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Check the arrays and keep read-only copies."""
        means = np.array(self.means, dtype=np.float64)
        if means.ndim != 3 or not np.isfinite(means).all():
            raise ValueError("means must be finite numbers of shape (I, C, G)")
        counts = np.array(self.counts)
        if not np.issubdtype(counts.dtype, np.integer) or counts.shape != means.shape[1:2]:
            raise ValueError(f"counts must be {means.shape[1]} integers, one per class")
        if counts.min(initial=0) < 0 or not counts.any():
            raise ValueError("counts must not be negative, and sum to at least 1")
        counts = counts.astype(np.int64)
        for name, array in (("means", means), ("counts", counts)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def clipped(self, highest: float | None) -> ClassLosses:
        """Return the losses clipped to [0, `highest`]; None does not clip."""
        return ClassLosses(means=clip_losses(self.means, highest), counts=self.counts)


def clip_losses(losses: NDArray[_Float], highest: float | None) -> NDArray[_Float]:
    """Return losses clipped to [0, `highest`]; None does not clip."""
    return losses if highest is None else np.clip(losses, 0.0, highest)


class Algorithm(Protocol):
    """A black-box method: pure functions of an immutable state; the generator is passed in.

    Example::

        state = method.init()
        candidates = method.ask(state, rng)
        state = method.tell(state, candidates, [loss(row) for row in candidates.prompts])
    """

    @property
    def num_samples(self) -> int:
        """The largest number of prompts per ask, I."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of `alpha`, (n, N)."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether the memory belongs to the run (a pool of prompts).

        Otherwise each client has its own (the moments of its optimiser).
        """
        ...

    def init(self) -> State:
        """Return the untrained state."""
        ...

    def check(self, state: State) -> None:
        """Raise unless the method can continue from a state, whose memory may be untrusted.

        Raises:
            ValueError: Alpha has another shape, or the memory is not that of this method.
        """
        ...

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return the nearest feasible `alpha`; a feasible one comes back bit for bit."""
        ...

    def prompt(self, state: State) -> NDArray[np.int64]:
        """Return the prompt to deploy if the run stopped now: n token indices."""
        ...

    def bias(self, state: State) -> NDArray[np.float64] | None:
        """Return the deployable prompt's label bias, shape (C,); None without calibration."""
        ...

    def plain_bias(self, state: State) -> NDArray[np.float64] | None:
        """Return the label bias of "no prompt", fitted to observed losses; None without them."""
        ...

    def finished(self, state: State) -> bool:
        """Return whether the method has converged: further rounds would not change it."""
        ...

    def search_on(self, state: State) -> State:
        """Return the state to go on from when more asks are planned than before."""
        ...

    def wanted(self, state: State) -> int:
        """Return the preferred number of prompts of the next ask, at most I."""
        ...

    def ask(
        self, state: State, rng: np.random.Generator, num_samples: int | None = None
    ) -> Candidates:
        """Return prompts to score: `num_samples` of them, the method's own I by default."""
        ...

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike | ClassLosses) -> State:
        """Return the next state.

        Args:
            state: The state that was passed to `ask`.
            candidates: The result of `ask`, at least 2 prompts.
            losses: Shape (I,), finite; lower is better. A method with calibration takes
                `ClassLosses`.

        Raises:
            ValueError: The arguments do not fit each other or the method.
        """
        ...


class PlainAlgorithm:
    """Defaults for a method without calibration that asks for I prompts and never finishes."""

    __slots__ = ()

    num_samples: int

    def wanted(self, state: State) -> int:
        """Return I."""
        return self.num_samples

    def bias(self, state: State) -> NDArray[np.float64] | None:
        """Return None: there is no calibration."""
        return None

    def plain_bias(self, state: State) -> NDArray[np.float64] | None:
        """Return None: there is no calibration."""
        return None

    def finished(self, state: State) -> bool:
        """Return False: only the run's rounds and budget end it."""
        return False

    def search_on(self, state: State) -> State:
        """Return the state as it is: what the method does next is planned by no number of asks."""
        return state
