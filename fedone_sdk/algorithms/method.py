"""The one protocol of black-box prompt search: `ask` for candidates, `tell` their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .state import State

__all__ = ["Algorithm", "Candidates", "ClassLosses", "Method", "PlainAlgorithm", "PlainMethod"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Prompts to be scored. Both arrays are read-only.

    Attributes:
        prompts: Token indices, int64, shape (I, n); or vectors of a latent space, float32, shape
            (I, d): exactly the numbers that travel.
        probabilities: The categoricals that tokens were drawn from, float64, shape (n, N); None
            for vectors.
    """

    prompts: NDArray[Any]
    probabilities: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        """Check the arrays and keep read-only copies."""
        if self.probabilities is None:
            prompts = np.array(self.prompts, dtype=np.float32)
            if prompts.ndim != 2 or not np.isfinite(prompts).all():
                raise ValueError("prompts must be a finite matrix (I, d)")
        else:
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
            object.__setattr__(self, "probabilities", probabilities)
        prompts.setflags(write=False)
        object.__setattr__(self, "prompts", prompts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassLosses:
    """Losses of one mini-batch apart by class, for a grid of label biases. Read-only arrays.

    Attributes:
        means: Mean loss of each prompt over the examples of a class, were that bias added to the
            label log-probabilities; float64, shape (I, C, G), 0 for a class without an example.
        counts: Examples of each class, int64, shape (C,), at least one in all.
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
            raise ValueError("counts must be those of at least one example")
        counts = counts.astype(np.int64)
        for name, array in (("means", means), ("counts", counts)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def clipped(self, highest: float | None) -> ClassLosses:
        """Return the losses clipped to [0, `highest`]; None clips none."""
        if highest is None:
            return self
        return ClassLosses(means=np.clip(self.means, 0.0, highest), counts=self.counts)


class Method(Protocol):
    """What is tuned: where its parameters start, and which of them are allowed."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of `alpha`."""
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

    def check(self, state: State) -> None:
        """Refuse a state that the method cannot go on from: its memory may be anybody's.

        Raises:
            ValueError: Alpha has another shape, or the memory is not one of this method.
        """
        ...

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return the nearest feasible `alpha`; a feasible one comes back bit for bit."""
        ...

    def prompt(self, state: State) -> NDArray[Any]:
        """Return the prompt to deploy if the run stopped now, in one dimension.

        That is n token indices, a vector of the latent space, or the parameters themselves.
        """
        ...

    def bias(self, state: State) -> NDArray[np.float64] | None:
        """Return what the prompt wants added to the label log-probabilities, shape (C,)."""
        ...

    def plain_bias(self, state: State) -> NDArray[np.float64] | None:
        """Return the same for no prompt at all, from losses that were paid for; None without."""
        ...

    def finished(self, state: State) -> bool:
        """Return whether the method has ended by itself: more rounds would not change it."""
        ...

    def search_on(self, state: State) -> State:
        """Return the state to go on from when more asks are planned than before."""
        ...


class PlainMethod:
    """What holds for a method that neither calibrates nor ends by itself."""

    __slots__ = ()

    def bias(self, state: State) -> NDArray[np.float64] | None:
        """Return None: nothing is added."""
        return None

    def plain_bias(self, state: State) -> NDArray[np.float64] | None:
        """Return None: nothing is known of no prompt."""
        return None

    def finished(self, state: State) -> bool:
        """Return False: the run's rounds and budget end it."""
        return False

    def search_on(self, state: State) -> State:
        """Return the state as it is: what the method does next is planned by no number of asks."""
        return state


class PlainAlgorithm(PlainMethod):
    """The same, of a black-box method, which always asks for I prompts."""

    __slots__ = ()

    num_samples: int

    def wanted(self, state: State) -> int:
        """Return I."""
        return self.num_samples


class Algorithm(Method, Protocol):
    """A black-box method: pure functions of an immutable state; the randomness is passed in.

    Example::

        state = method.init()
        candidates = method.ask(state, rng)
        state = method.tell(state, candidates, [loss(row) for row in candidates.prompts])
    """

    @property
    def num_samples(self) -> int:
        """The most prompts asked at a time, I."""
        ...

    def wanted(self, state: State) -> int:
        """Return how many prompts the next ask had best be for: at most I."""
        ...

    def ask(
        self, state: State, rng: np.random.Generator, num_samples: int | None = None
    ) -> Candidates:
        """Return prompts to score: `num_samples` of them, the method's own I by default."""
        ...

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike | ClassLosses) -> State:
        """Return the next state.

        Args:
            state: The state that was asked.
            candidates: What it answered, at least 2 prompts.
            losses: Shape (I,), finite; lower is better. For a method that calibrates, by class
                and bias.

        Raises:
            ValueError: If the arguments do not fit each other or the method.
        """
        ...
