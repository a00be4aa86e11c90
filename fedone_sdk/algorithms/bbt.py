"""BBT: black-box tuning of a soft prompt by CMA-ES (Sun et al., ICML 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .cma_es import CmaEs
from .method import Candidates, PlainAlgorithm
from .projection import reach
from .state import State

MAX_BOUND = 1e6
MEMORIES = ("client", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class BBT(PlainAlgorithm):
    """Black-box tuning: alpha is the mean of CMA-ES, one row of d numbers.

    A candidate is a vector z of R^d in float32. A fixed random projection turns `bounded(z)` into
    the soft prompt that is scored (`projection.projected`). The step uses the float32 numbers that
    were sent, and the mean from alpha, which a server may have averaged. The rest of the CMA-ES
    state is in the memory.

    At the end of a budget there may be fewer candidates than the population; the step then uses
    that smaller population. Ties rank in the order of the draws, so a constant loss moves the mean
    at random.

    Attributes:
        intrinsic_dim: d.
        num_samples: I, the population, at least 2; from 4 on, its spread updates the covariance.
        sigma: The first step size.
        bound: Scored numbers lie in [-bound, bound].
        memory: Where the CMA-ES state other than the mean is kept: per "client", or in the "run",
            whose clients then share it.
    """

    intrinsic_dim: int
    num_samples: int
    sigma: float
    bound: float
    memory: str

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        _checks.integer("intrinsic_dim", self.intrinsic_dim, minimum=2)
        # A ranking needs two losses.
        _checks.integer("num_samples", self.num_samples, minimum=2)
        _checks.number("sigma", self.sigma)
        if _checks.number("bound", self.bound) > MAX_BOUND:
            raise ValueError(f"bound must be at most {MAX_BOUND:g}, not {self.bound:g}")
        _checks.choice("memory", self.memory, MEMORIES)

    @property
    def shape(self) -> tuple[int, int]:
        """One row of d numbers."""
        return 1, self.intrinsic_dim

    @property
    def shares_memory(self) -> bool:
        """Whether the state of CMA-ES is the run's."""
        return self.memory == "run"

    def init(self) -> State:
        """Return the zero vector."""
        return State(alpha=np.zeros(self.shape, dtype=np.float32))

    def check(self, state: State) -> None:
        """Raise unless a CMA-ES of this size can continue from the state."""
        self._mean(state)
        self._cma_es(state)

    def ask(
        self, state: State, rng: np.random.Generator, num_samples: int | None = None
    ) -> Candidates:
        """Draw vectors around alpha."""
        mean = self._mean(state)
        count = _checks.count(num_samples, default=self.num_samples)
        vectors = self._cma_es(state).sample(mean, count, rng)
        return Candidates(prompts=vectors.astype(np.float32))

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike) -> State:
        """Take one step of CMA-ES with the given candidates as its population."""
        values = _checks.finite_losses(losses, candidates)
        vectors = candidates.prompts
        if candidates.probabilities is not None or vectors.shape[1] != self.intrinsic_dim:
            raise ValueError(f"candidates must be vectors of shape (I, {self.intrinsic_dim})")
        mean, after = self._cma_es(state).after(
            self._mean(state), vectors.astype(np.float64), values, reach=reach(self.bound)
        )
        return State(alpha=self.project(mean[None, :]), memory=after.memory())

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Clip every number to `reach(bound)`; beyond it, `bounded` mirrors."""
        checked = _checks.matrix("alpha", alpha, shape=self.shape)
        limit = reach(self.bound)
        return np.clip(checked, -limit, limit).astype(np.float32)

    def prompt(self, state: State) -> NDArray[np.float32]:
        """Return the mean, shape (d,); models score it through `bounded`, like a candidate."""
        return np.array(state.alpha[0])

    def _mean(self, state: State) -> NDArray[np.float64]:
        mean: NDArray[np.float64] = _checks.matrix("alpha", state.alpha, shape=self.shape)[0]
        return mean

    def _cma_es(self, state: State) -> CmaEs:
        return CmaEs.remembered(state.memory, size=self.intrinsic_dim, sigma=self.sigma)
