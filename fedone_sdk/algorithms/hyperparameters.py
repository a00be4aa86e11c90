"""The variances of the model, fitted by marginal likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .contrasts import Contrasts, MiniBatches
from .gaussian_process import Comparisons, inverted
from .kernel import Kernel, typical_length

_STEP = math.log(2.0)
"""Largest step of a hyperparameter, on a log scale."""

_LEAST_OWN = 1e-3
"""Least variance of a prompt's own part, relative to the other parts: keeps the covariance of
prompts well conditioned."""

_LEAST_VARIANCE = 1e-12

LARGEST = 12.0
"""Bound on the absolute value of hyperparameters."""


class Hyperparameters(NamedTuple):
    """Log variances and a log-odds; variances are in units of a typical mini-batch's noise.

    Attributes:
        additive: The kernel's variance of the same name.
        pairs: Likewise.
        same: Likewise.
        shared_noise: Log-odds of the part of the noise that has the kernel's covariance.
        curves: Prior variance at a fixed label bias, relative to that at each prompt's best bias.
    """

    additive: float
    pairs: float
    same: float
    shared_noise: float
    curves: float

    @property
    def part(self) -> float:
        """The part of the noise that has the kernel's covariance."""
        return 1.0 / (1.0 + math.exp(-self.shared_noise))

    def kernel(self, examples: float, length: float) -> Kernel:
        """Return the kernel in units of one example's noise.

        Args:
            examples: Of a typical mini-batch.
            length: Features of a typical prompt.
        """
        one, pairs, same = (math.exp(value) / examples for value in self[:3])
        return Kernel(one, pairs, same + _LEAST_OWN * (one + pairs), length)


PRIOR = Hyperparameters(math.log(0.5), math.log(0.25), math.log(0.25), 0.0, math.log(4.0))
"""Prior means: at first, half of the differences between prompts are noise."""

_CURVES_INDEX = 4
"""The index of `curves`, which has its own likelihood."""

_SPREAD = 1.5
"""Standard deviation of that prior: a factor of 4.5 either way."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Likelihood:
    """The restricted marginal likelihood of losses: the intercepts are integrated out.

    Attributes:
        batches: The prompts of each mini-batch.
        present: Features of each prompt, 0 or 1, shape (P, F).
        losses: Of each class at each prompt's best bias, shape (J, I, C).
        unbiased: The same at one bias for all prompts; None without calibration.
        weights: Examples of each class times the mini-batch's trust, shape (J, C).
        examples: Of a typical mini-batch.
    """

    batches: MiniBatches
    present: NDArray[np.float32]
    losses: NDArray[np.float64]
    unbiased: NDArray[np.float64] | None
    weights: NDArray[np.float64]
    examples: float

    def improved(
        self, values: Hyperparameters, coordinates: Sequence[int] = range(len(PRIOR))
    ) -> Hyperparameters:
        """Return better hyperparameters: one step along each coordinate in turn."""
        found = _coordinate_step(
            self._loss, list(values), [at for at in coordinates if at < _CURVES_INDEX]
        )
        if self.unbiased is not None and _CURVES_INDEX in coordinates:
            inverse, contrasts = self._of(Hyperparameters(*found))

            def loss(tried: list[float]) -> float:
                wide = math.exp(tried[_CURVES_INDEX])
                assert self.unbiased is not None
                deviance = self._deviance(self.unbiased, inverse / wide, contrasts)
                return deviance + _prior_deviance(Hyperparameters(*tried))

            found = _coordinate_step(loss, found, [_CURVES_INDEX])
        return Hyperparameters(*found)

    def loss(self, values: Hyperparameters) -> float:
        """Return -2 log of likelihood times prior, up to a constant."""
        inverse, contrasts = self._of(values)
        return self._deviance(self.losses, inverse, contrasts) + _prior_deviance(values)

    def _loss(self, values: list[float]) -> float:
        return self.loss(Hyperparameters(*values))

    def _of(self, values: Hyperparameters) -> tuple[NDArray[np.float64], Contrasts]:
        """Return the inverse of the prior covariance, and the contrasts."""
        length = typical_length(self.present)
        covariance = values.kernel(self.examples, length).matrix(self.present)
        contrasts = Contrasts.of(self.batches, unit_covariance(covariance), values.part)
        return inverted(covariance), contrasts

    def _deviance(
        self, losses: NDArray[np.float64], inverse: NDArray[np.float64], contrasts: Contrasts
    ) -> float:
        prior = -2.0 * float(np.log(np.diagonal(np.linalg.cholesky(inverse))).sum())
        total = 0.0
        for c in range(self.weights.shape[1]):
            weights = self.weights[:, c]
            present = weights > 0.0
            if not present.any():
                continue
            own = Comparisons(self.batches, contrasts, losses[:, :, c], weights)
            root = np.linalg.cholesky(inverse + own.precision())
            weighted = np.linalg.solve(root, own.weighted())
            square = max(own.square() - float(weighted @ weighted), _LEAST_VARIANCE)
            total += own.degrees() * math.log(square) + prior
            total += 2.0 * float(np.log(np.diagonal(root)).sum())
            total += float(contrasts.log_det[present].sum())
        return total


def unit_covariance(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a covariance divided by its mean variance."""
    result: NDArray[np.float64] = covariance / np.diagonal(covariance).mean()
    return result


def _prior_deviance(values: Hyperparameters) -> float:
    """-2 log of the prior."""
    return sum(((one - usual) / _SPREAD) ** 2 for one, usual in zip(values, PRIOR, strict=True))


def _coordinate_step(
    loss: Callable[[list[float]], float], values: list[float], coordinates: Sequence[int]
) -> list[float]:
    """One step along each coordinate: to the best of both sides and the parabola's minimum."""
    if not coordinates:
        return values
    found, best = values, loss(values)
    for at in coordinates:
        tried = [_moved(found, at, step) for step in (-_STEP, _STEP)]
        lower, upper = map(loss, tried)
        bend = lower + upper - 2.0 * best
        if bend > 0.0:
            shift = 0.5 * (lower - upper) / bend * _STEP
            tried.append(_moved(found, at, min(max(shift, -_STEP), _STEP)))
        losses = [lower, upper, *map(loss, tried[2:])]
        lowest = min(range(len(tried)), key=losses.__getitem__)
        if losses[lowest] < best:
            best, found = losses[lowest], tried[lowest]
    return found


def _moved(values: list[float], at: int, step: float) -> list[float]:
    moved = list(values)
    moved[at] = min(max(moved[at] + step, -LARGEST), LARGEST)
    return moved
