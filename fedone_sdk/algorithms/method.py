"""The protocol of a method: `ask` returns prompts to score, and `tell` takes their losses.

Shapes: I prompts of an ask, n positions with N candidates, K groups of examples, C labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .method_state import Floats, Ints, State

__all__ = ["Algorithm", "Candidates", "ClassLosses", "Holder", "PlainAlgorithm", "clip_losses"]

_Float = TypeVar("_Float", bound=np.floating[Any])


class Holder(NamedTuple):
    """The client whose rows are in a mini-batch.

    Attributes:
        client: Enrolment index of the client.
        all_rows: Whether each mini-batch of the client has all of the client's rows.
    """

    client: int
    all_rows: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """The prompts that an ask returns, which are scored next. The arrays are read-only.

    Attributes:
        prompts: I prompts of n positions, as indices of the slots' candidates, int64, shape (I, n).
        probabilities: The distributions that the indices were drawn from, float64, shape (n, N).
        biases: The label bias to score each prompt with, nats, rounded to float32, shape (I, C) for
            C labels; None if the method fits no label biases.
        holder: The client that scores the prompts; None if unknown.
    """

    prompts: Ints
    probabilities: Floats
    biases: NDArray[np.floating[Any]] | None = None
    holder: Holder | None = None

    def __post_init__(self) -> None:
        prompts = np.array(self.prompts)
        probabilities = np.array(self.probabilities, dtype=np.float64)
        if prompts.ndim != 2 or not np.issubdtype(prompts.dtype, np.integer):
            raise ValueError("prompts must be an integer matrix (I, n)")
        if probabilities.ndim != 2 or len(probabilities) != prompts.shape[1]:
            raise ValueError("probabilities must be a matrix (n, N) with one row per position")
        vocab_size = probabilities.shape[1]
        if prompts.size and not 0 <= prompts.min() <= prompts.max() < vocab_size:
            raise ValueError(f"prompts must lie in [0, {vocab_size})")
        arrays: dict[str, NDArray[Any]] = {
            "prompts": prompts.astype(np.int64),
            "probabilities": probabilities,
        }
        if self.biases is not None:
            arrays["biases"] = np.array(self.biases, dtype=np.float32)
            if arrays["biases"].ndim != 2 or len(arrays["biases"]) != len(prompts):
                raise ValueError("biases must be a matrix (I, C) with one row per prompt")
        _set_read_only(self, arrays)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassLosses:
    """Losses of one mini-batch, from which label biases can be fitted. The arrays are read-only.

    The examples are in K groups: one per class, or one for all. `label_bias` has the formulas.

    Attributes:
        means: Float64, shape (I, K, 2 + C). Per prompt and group: the mean loss, the trace of its
            Hessian with respect to the label bias, and the mean probability of each label. They
            are computed with the prompt's bias, and are 0 for a group without examples.
        counts: Number of examples in each group, int64, shape (K,); the sum is at least 1.
        targets: Shares of the true labels in each group, float64, shape (K, C).
        biases: The label bias that each prompt was scored with, nats, float64, shape (I, C).
    """

    means: Floats
    counts: Ints
    targets: Floats
    biases: NDArray[np.floating[Any]]

    def __post_init__(self) -> None:
        means = np.array(self.means, dtype=np.float64)
        if means.ndim != 3 or means.shape[2] < 3 or not np.isfinite(means).all():
            raise ValueError("means must be finite numbers of shape (I, K, 2 + C)")
        prompts, groups, labels = len(means), means.shape[1], means.shape[2] - 2
        counts = np.array(self.counts)
        if not np.issubdtype(counts.dtype, np.integer) or counts.shape != (groups,):
            raise ValueError(f"counts must be {groups} integers, one per group")
        if counts.min(initial=0) < 0 or not counts.any():
            raise ValueError("counts must be at least 0, and their sum at least 1")
        targets, biases = (np.array(each, dtype=np.float64) for each in (self.targets, self.biases))
        if targets.shape != (groups, labels) or not np.isfinite(targets).all():
            raise ValueError(f"targets must be finite numbers of shape ({groups}, {labels})")
        if biases.shape != (prompts, labels) or not np.isfinite(biases).all():
            raise ValueError(f"biases must be finite numbers of shape ({prompts}, {labels})")
        counts = counts.astype(np.int64)
        arrays = {"means": means, "counts": counts, "targets": targets, "biases": biases}
        _set_read_only(self, arrays)

    @classmethod
    def plain(cls, losses: Floats) -> ClassLosses:
        """Return plain losses, shape (I,), as `ClassLosses` of one group and one label."""
        means = np.stack([losses, np.zeros_like(losses), np.ones_like(losses)], axis=1)
        return cls(
            means=means[:, None],
            counts=np.ones(1, dtype=np.int64),
            targets=np.ones((1, 1)),
            biases=np.zeros((len(losses), 1)),
        )

    def plus(self, more: Floats) -> ClassLosses:
        """Return the losses plus `more`, which has one number per prompt, shape (I,)."""
        means = self.means.copy()
        means[..., 0] += more[:, None]
        return replace(self, means=means)

    def clipped(self, highest: float | None) -> ClassLosses:
        """Return the losses clipped to [0, `highest`]; None does not clip."""
        means = self.means.copy()
        means[..., 0] = clip_losses(means[..., 0], highest)
        return replace(self, means=means)


def _set_read_only(instance: object, arrays: dict[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        array.setflags(write=False)
        object.__setattr__(instance, name, array)


def clip_losses(losses: NDArray[_Float], highest: float | None) -> NDArray[_Float]:
    """Return losses clipped to [0, `highest`]; None does not clip."""
    return losses if highest is None else np.clip(losses, 0.0, highest)


class Algorithm(Protocol):
    """A black-box method. Its results depend only on the arguments, and states are immutable.

    Example::

        state = method.init()
        candidates = method.ask(state, rng)
        state = method.tell(state, candidates, [loss(row) for row in candidates.prompts])
    """

    @property
    def num_samples(self) -> int:
        """The largest number of prompts per ask, I."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of `alpha`, (n, N)."""

    @property
    def shares_memory(self) -> bool:
        """Whether all clients share one memory; False if each client has its own."""

    def init(self) -> State:
        """Return the untrained state."""

    def check(self, state: State) -> None:
        """Raise unless the method can continue from a state, which may come from a client.

        Raises:
            ValueError: Alpha has another shape, or the memory is not one of this method.
        """

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return the nearest feasible `alpha`; a feasible `alpha` is unchanged, bit for bit."""

    def prompt(self, state: State) -> Ints:
        """Return the deployable prompt: the indices of n candidates."""

    def bias(self, state: State) -> Floats | None:
        """Return the deployable prompt's label bias, shape (C,); None if no biases are fitted."""

    def plain_bias(self, state: State) -> Floats | None:
        """Return the label bias of "no prompt", fitted to its losses; None if it has no losses."""

    def finished(self, state: State) -> bool:
        """Return whether the method has converged, so that further rounds change nothing."""

    def search_on(self, state: State) -> State:
        """Return the state from which a search continues after a cap was raised."""

    def wanted(self, state: State) -> int:
        """Return the preferred number of prompts of the next ask, at most I."""

    def ask(
        self,
        state: State,
        rng: np.random.Generator,
        num_samples: int | None = None,
        holder: Holder | None = None,
    ) -> Candidates:
        """Return `num_samples` prompts (by default `wanted`) to score on rows of `holder`."""

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike | ClassLosses) -> State:
        """Return the next state.

        Args:
            state: The state that was passed to `ask`.
            candidates: The result of `ask`, at least 2 prompts.
            losses: Shape (I,), finite; lower is better. A method that fits label biases takes
                `ClassLosses`.

        Raises:
            ValueError: The arguments do not fit each other or the method.
        """


class PlainAlgorithm:
    """Defaults for a method without label biases that asks for I prompts and never finishes.

    Every `alpha` of the method's shape is feasible.
    """

    __slots__ = ()

    num_samples: int

    def check(self: Algorithm, state: State) -> None:
        """Raise ValueError if alpha has another shape; the memory is not checked."""
        if state.alpha.shape != tuple(self.shape):
            raise ValueError(f"alpha must be of shape {self.shape}, not {state.alpha.shape}")

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return alpha as it is."""
        return np.asarray(alpha, dtype=np.float32)

    def wanted(self, state: State) -> int:
        """Return I for every state."""
        return self.num_samples

    def bias(self, state: State) -> Floats | None:
        """Return None: the method fits no label biases."""
        return None

    def plain_bias(self, state: State) -> Floats | None:
        """Return None: the method fits no label biases."""
        return None

    def finished(self, state: State) -> bool:
        """Return False: only the run's rounds and budget end the run."""
        return False

    def search_on(self, state: State) -> State:
        """Return the state unchanged: this method does not plan its asks."""
        return state
