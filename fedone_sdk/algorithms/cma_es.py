"""The CMA-ES state between two generations as arrays, and its step by the library `cmaes`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.errors import MissingExtraError, needs_extra

from .state import Memory

if TYPE_CHECKING:
    from cmaes import CMA

# Below the least step a float32 no longer changes, and a step of 0 could not be divided by. Above
# the greatest step, or the greatest number of a matrix or path, a draw could overflow.
_SIGMA_MIN, _SIGMA_MAX = 1e-12, 1e12
_LARGEST = 1e32
_EPS = 1e-8  # keeps the norm of a candidate at the mean above 0, as in `cmaes`


def check_library() -> None:
    """Raise unless `cmaes` is installed; does not import it, which takes a second.

    Raises:
        MissingExtraError: `cmaes` is not installed.
    """
    if find_spec("cmaes") is None:
        raise MissingExtraError("BBT", extra="bbt")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CmaEs:
    """The state of CMA-ES except its mean (Hansen 2016, arXiv:1604.00772; its equation numbers).

    Attributes:
        sigma: Step size.
        covariance: C, shape (d, d), symmetric.
        sigma_path: p_sigma, shape (d,).
        covariance_path: p_c, shape (d,).
        generation: Generations so far.
    """

    sigma: float
    covariance: NDArray[np.float64]
    sigma_path: NDArray[np.float64]
    covariance_path: NDArray[np.float64]
    generation: int

    @classmethod
    def remembered(cls, memory: Memory, *, size: int, sigma: float) -> CmaEs:
        """Return the state that `memory` wrote.

        Args:
            memory: The arrays; an empty memory gives the initial state.
            size: d.
            sigma: The first step size.

        Raises:
            ValueError: `memory` is not that of a CMA-ES of this size.
        """
        if not memory:
            return cls(
                sigma=sigma,
                covariance=np.eye(size),
                sigma_path=np.zeros(size),
                covariance_path=np.zeros(size),
                generation=0,
            )
        shapes = {
            "covariance": (size * (size + 1) // 2,),
            "covariance_path": (size,),
            "generation": (),
            "sigma": (),
            "sigma_path": (size,),
        }
        found = {name: array.shape for name, array in memory.items()}
        if found != shapes or memory["generation"].dtype.kind != "i":
            raise ValueError(f"not a memory of CMA-ES in {size} dimensions")
        result = cls(
            sigma=float(memory["sigma"]),
            covariance=np.empty((size, size)),
            sigma_path=memory["sigma_path"],
            covariance_path=memory["covariance_path"],
            generation=int(memory["generation"]),
        )
        upper = np.triu_indices(size)
        result.covariance[upper] = result.covariance.T[upper] = memory["covariance"]
        return result._checked()

    def memory(self) -> Memory:
        """Return the state as arrays; of the covariance, the upper triangle by rows."""
        return {
            "covariance": self.covariance[np.triu_indices(len(self.covariance))],
            "covariance_path": self.covariance_path,
            "generation": np.array(self.generation, dtype=np.int64),
            "sigma": np.array(self.sigma),
            "sigma_path": self.sigma_path,
        }

    def sample(
        self, mean: NDArray[np.float64], count: int, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """Draw `count` points from N(mean, sigma^2 C), shape (count, d).

        Uses the symmetric root of C. Eigenvectors differ between LAPACK builds in sign and, for
        equal eigenvalues (all of them at first), in direction; the root does not.
        """
        B, D = self._library(mean)._eigen_decomposition()
        draws = rng.standard_normal((count, len(mean)))
        points: NDArray[np.float64] = mean + self.sigma * draws @ ((B * D) @ B.T)
        return points

    def after(
        self,
        mean: NDArray[np.float64],
        points: NDArray[np.float64],
        losses: NDArray[np.float64],
        *,
        reach: float,
    ) -> tuple[NDArray[np.float64], CmaEs]:
        """Return the mean and the state after a generation.

        The step is the library's for a population of this size, except for the sum of the rank-mu
        update. The library forms all I outer products at once, which takes 800 MB and two seconds
        at I = 200 and d = 500. Here the library gets one point, the recombination of the better
        half, and the sum is one matrix product.

        Args:
            mean: m, shape (d,); may differ from the last one returned.
            points: Shape (I, d), at least 2.
            losses: Shape (I,). Ties rank in the order of the points, which are exchangeable.
            reach: The mean stays in [-reach, reach]; the paths use the clipped step.

        Raises:
            ValueError: The numbers overflow.
        """
        with np.errstate(all="ignore"):  # the result is checked below
            library = self._library(mean, population=len(points))
            B, D = library._eigen_decomposition()
            old, weights, mu = library._C, library._weights, library._mu
            steps = (points[np.argsort(losses, kind="stable")] - mean) / self.sigma  # y_k
            # (eq. 46) Candidates with negative weights are scaled to the length of a typical draw.
            squares = ((steps @ B / D) ** 2).sum(axis=1)
            signed = np.where(weights >= 0, weights, weights * len(mean) / (squares + _EPS))
            rank_mu = (steps.T * signed) @ steps - weights.sum() * old
            best = np.clip(mean + self.sigma * (weights[:mu] @ steps[:mu]), -reach, reach)
            rate, library._cmu = library._cmu, 0.0
            library._popsize, library._mu, library._weights = 1, 1, np.ones(1)
            library.tell([(best, 0.0)])
            covariance = library._C + rate * rank_mu  # (eq. 47)
            sigma = min(max(float(library._sigma), _SIGMA_MIN), _SIGMA_MAX)
        result = CmaEs(
            sigma=sigma,
            covariance=covariance,
            sigma_path=library._p_sigma,
            covariance_path=library._pc,
            generation=int(library._g),
        )
        return library._mean, result._checked()

    def _library(self, mean: NDArray[np.float64], population: int | None = None) -> CMA:
        """Return the library's optimiser in this state; it has no public way to set it."""
        with needs_extra("BBT", "bbt"):
            from cmaes import CMA
        # With 2 or 3 points the better half is one point. The rate of the rank-mu update is then 0,
        # and the library divides by it before it takes a minimum.
        with np.errstate(divide="ignore"):
            library = CMA(
                mean=mean, sigma=self.sigma, cov=self.covariance, population_size=population
            )
        library._p_sigma, library._pc = self.sigma_path, self.covariance_path
        library._g = self.generation
        return library

    def _checked(self) -> CmaEs:
        arrays = self.covariance, self.sigma_path, self.covariance_path
        if not (
            0.0 < self.sigma <= _SIGMA_MAX
            and 0 <= self.generation < 2**53
            and all(np.abs(array).max() <= _LARGEST for array in arrays)
            and np.diagonal(self.covariance).min() > 0.0
        ):
            raise ValueError("the memory of CMA-ES holds numbers out of range")
        return self
