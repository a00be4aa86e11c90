"""Differences between the prompts of a mini-batch, independent of the mini-batch's level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MiniBatches:
    """The prompts that each mini-batch scored.

    Attributes:
        members: Rows of prompts, shape (J, I), padded by 0.
        present: Where there is a prompt, shape (J, I).
        num_prompts: P.
    """

    members: NDArray[np.int64]
    present: NDArray[np.bool_]
    num_prompts: int

    @classmethod
    def of(cls, rows: NDArray[np.int64], batches: NDArray[np.int64], num_prompts: int) -> Self:
        """Return the mini-batches of some losses.

        Args:
            rows: The prompt of each, shape (E,).
            batches: The mini-batch of each, shape (E,), rising.
            num_prompts: P.
        """
        sizes = np.bincount(batches)
        present = np.arange(sizes.max(initial=0)) < sizes[:, None]
        members = np.zeros(present.shape, dtype=np.int64)
        members[present] = rows
        return cls(members=members, present=present, num_prompts=num_prompts)

    def padded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values grouped by mini-batch: (E, ...) becomes (J, I, ...), padded by 0."""
        result = np.zeros((*self.present.shape, *values.shape[1:]))
        result[self.present] = values
        return result

    def centred(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `padded` values minus the mean of their mini-batch.

        The posterior does not depend on the mean; subtracting it avoids a loss of precision.
        """
        padded = self.padded(values)
        sizes = self.present.sum(axis=1).reshape(-1, *[1] * (padded.ndim - 1))
        means = padded.sum(axis=1, keepdims=True) / sizes
        there = self.present.reshape(*self.present.shape, *[1] * (padded.ndim - 2))
        result: NDArray[np.float64] = np.where(there, padded - means, 0.0)
        return result

    def totals(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of each prompt's values: (J, I, ...) becomes (P, ...)."""
        result = np.zeros((self.num_prompts, *values.shape[2:]))
        np.add.at(result, self.members[self.present], values[self.present])
        return result

    def matrix(self, blocks: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of the mini-batches' matrices: (J, I, I) becomes (P, P)."""
        size = self.num_prompts
        places = self.members[:, :, None] * size + self.members[:, None, :]
        flat = np.bincount(places.ravel(), blocks.ravel(), minlength=size * size)
        return flat.astype(np.float64, copy=False).reshape(size, size)

    def blocks(self, matrix: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the part of a (P, P) matrix that each mini-batch scored, shape (J, I, I)."""
        return matrix[self.members[:, :, None], self.members[:, None, :]]


class Contrasts(NamedTuple):
    """The noise of a mini-batch of one example, after its random intercept is integrated out.

    With the noise covariance R of the prompts' losses and a flat prior for the intercept, their
    precision is R^-1 - R^-1 1 1' R^-1 / (1' R^-1 1). Only differences between prompts count.

    Attributes:
        precision: Shape (J, I, I), 0 where there is no prompt.
        level: Weights of the losses in the intercept's estimate, shape (J, I), sum 1.
        log_det: log det R + log 1' R^-1 1, shape (J,).
        degrees: Independent differences, shape (J,).
    """

    precision: NDArray[np.float64]
    level: NDArray[np.float64]
    log_det: NDArray[np.float64]
    degrees: NDArray[np.float64]

    @classmethod
    def of(
        cls, batches: MiniBatches, unit_covariance: NDArray[np.float64], shared_noise: float
    ) -> Contrasts:
        """Return the contrasts of mini-batches.

        The effect of a prompt varies between examples, and similar prompts vary together. A part of
        the noise therefore has the covariance of the values.

        Args:
            batches: The prompts of each mini-batch.
            unit_covariance: Covariances of the prompts divided by their mean variance, (P, P).
            shared_noise: That part of the noise, in [0, 1).
        """
        present = batches.present
        both = present[:, :, None] & present[:, None, :]
        noise = np.where(both, shared_noise * batches.blocks(unit_covariance), 0.0)
        diagonal = np.arange(present.shape[1])
        noise[:, diagonal, diagonal] += np.where(present, 1.0 - shared_noise, 1.0)
        inverse = np.linalg.inv(noise)
        inverse = np.where(both, inverse, 0.0)
        sums = inverse.sum(axis=2)
        total = sums.sum(axis=1)
        precision = inverse - sums[:, :, None] * sums[:, None, :] / total[:, None, None]
        log_det = np.linalg.slogdet(noise)[1] + np.log(total)
        degrees = present.sum(axis=1) - 1.0
        return cls(precision, sums / total[:, None], log_det, degrees)
