"""BBT: CMA-ES with the library `cmaes`, and the projection of its vectors to soft prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedone_sdk.algorithms import stream, stream_seed

if TYPE_CHECKING:
    from cmaes import CMA

# Limits of the step size. A smaller step would not change a float32, and a larger step could make a
# draw overflow.
_SIGMA_MIN, _SIGMA_MAX = 1e-12, 1e12
_EPS = 1e-8  # keeps the norm of a candidate at the mean above 0, as in `cmaes`


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
    generation: int = 0

    @classmethod
    def initial(cls, size: int, sigma: float) -> Self:
        """Return the first state of a search in `size` dimensions."""
        zeros = np.zeros(size)
        return cls(sigma=sigma, covariance=np.eye(size), sigma_path=zeros, covariance_path=zeros)

    def sample(
        self, mean: NDArray[np.float64], count: int, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """Draw `count` points from N(mean, sigma^2 C), shape (count, d).

        Uses the symmetric root of C, which is the same in all LAPACK builds. Eigenvectors are not:
        their sign may differ, and for equal eigenvalues (at first, all) also their direction.
        """
        basis, scales = self._library(mean)._eigen_decomposition()
        draws = rng.standard_normal((count, len(mean)))
        points: NDArray[np.float64] = mean + self.sigma * draws @ ((basis * scales) @ basis.T)
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

        The library computes the step, except for the sum of the rank-mu update. For this sum it
        would form all I outer products at once: 800 MB and two seconds for I = 200 and d = 500.
        Here the sum is one matrix product, and the library gets one point, the mean of the better
        half.

        Args:
            mean: m, shape (d,). It may differ from the mean that the last call returned.
            points: Shape (I, d); I is at least 2.
            losses: Shape (I,). Points with equal losses are ranked in their order.
            reach: The mean stays in [-reach, reach]; the paths use the clipped step.
        """
        library = self._library(mean, population=len(points))
        basis, scales = library._eigen_decomposition()
        old, weights, mu = library._C, library._weights, library._mu
        steps = (points[np.argsort(losses, kind="stable")] - mean) / self.sigma  # y_k
        # (eq. 46) Candidates with negative weights are scaled to the length of a typical draw.
        squares = ((steps @ basis / scales) ** 2).sum(axis=1)
        signed = np.where(weights >= 0, weights, weights * len(mean) / (squares + _EPS))
        rank_mu = (steps.T * signed) @ steps - weights.sum() * old
        best = np.clip(mean + self.sigma * (weights[:mu] @ steps[:mu]), -reach, reach)
        rate, library._cmu = library._cmu, 0.0
        library._popsize, library._mu, library._weights = 1, 1, np.ones(1)
        library.tell([(best, 0.0)])
        upper = np.triu(library._C + rate * rank_mu)  # (eq. 47)
        result = CmaEs(
            sigma=min(max(float(library._sigma), _SIGMA_MIN), _SIGMA_MAX),
            covariance=upper + np.triu(upper, 1).T,
            sigma_path=library._p_sigma,
            covariance_path=library._pc,
            generation=int(library._g),
        )
        return library._mean, result

    def _library(self, mean: NDArray[np.float64], population: int | None = None) -> CMA:
        """Return the library's optimiser in this state, set through private attributes."""
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


def bounded(vectors: ArrayLike, bound: float) -> NDArray[np.float32]:
    """Return the vectors with every number mapped into [-bound, bound].

    This is the boundary transform of Hansen's `cma` 3, which the authors of BBT used. Let a be the
    smaller of (1 + bound) / 20 and bound. Up to `bound - a` the transform is the identity. From
    there to `bound + a` it is a parabola, which ends at the bound with slope 0. The mirror image of
    both follows. CMA-ES searches the numbers before the transform. (If numbers were clipped, the
    step size would grow without limit for an optimum at the bound.)
    """
    margin = reach(bound) - bound
    top = bound + margin
    values = np.array(vectors, dtype=np.float64)
    mirrored = top - np.abs(np.mod(values + top, 4.0 * top) - 2.0 * top)
    size = np.abs(mirrored)
    bent = np.copysign(bound - (top - size) ** 2 / (4.0 * margin), mirrored)
    found: NDArray[np.float32] = np.where(size <= bound - margin, mirrored, bent).astype(np.float32)
    return found


def reach(bound: float) -> float:
    """Return the number that `bounded` maps to the bound."""
    return bound + min(bound, (1.0 + bound) / 20.0)


def projected(
    vector: ArrayLike, *, prompt_len: int, size: int, scale: float, bound: float, seed: int
) -> NDArray[np.float32]:
    """Return the soft prompt A bounded(z), shape (prompt_len, size).

    The entries of A are normal with mean 0 and standard deviation scale / sqrt(d) (Sun et al.
    2022, section 3.2, and their code), drawn from the seed row by row in float32. A longer prompt
    starts with the rows of a shorter one.

    Args:
        vector: z, shape (d,).
        prompt_len: n.
        size: H, the width of the model's embeddings.
        scale: Standard deviation of the soft prompt's entries for z ~ N(0, I). With
            std / sigma, first draws of CMA-ES have the standard deviation std.
        bound: See `bounded`.
        seed: Seed of A.
    """
    z = np.array(vector, dtype=np.float32)
    result: NDArray[np.float32] = _normals(seed, prompt_len * size, len(z)) @ bounded(z, bound)
    result *= np.float32(scale / math.sqrt(len(z)))
    return result.reshape(prompt_len, size)


@lru_cache(maxsize=1)  # 41 MB for n = 20, H = 1024, d = 500.
def _normals(seed: int, rows: int, columns: int) -> NDArray[np.float32]:
    rng = stream(stream_seed(seed, "projection", 0))
    normals = rng.standard_normal((rows, columns), dtype=np.float32)
    normals.setflags(write=False)
    return normals
