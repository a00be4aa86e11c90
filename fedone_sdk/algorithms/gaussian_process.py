"""The Gaussian process behind searches: kernel, noise, posterior and hyperparameters.

Shapes: P prompts, E losses, J mini-batches of up to I prompts, K classes, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .method_state import Floats, Ints
from .space import Space


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MiniBatches:
    """The prompts that were scored on each mini-batch.

    Attributes:
        members: Indices of the prompts, shape (J, I), padded by 0.
        present: Whether an entry of `members` is a prompt and not padding, shape (J, I).
    """

    members: Ints
    present: NDArray[np.bool_]
    num_prompts: int

    @classmethod
    def of(cls, rows: Ints, batches: Ints, num_prompts: int) -> Self:
        """Return the mini-batches, given the prompt and the mini-batch of each loss, shape (E,)."""
        sizes = np.bincount(batches)
        present = np.arange(sizes.max(initial=0)) < sizes[:, None]
        members = np.zeros(present.shape, dtype=np.int64)
        members[present] = rows
        return cls(members=members, present=present, num_prompts=num_prompts)

    def padded(self, values: Floats) -> Floats:
        """Return values grouped by mini-batch: (E, ...) becomes (J, I, ...), padded by 0."""
        result = np.zeros((*self.present.shape, *values.shape[1:]))
        result[self.present] = values
        return result

    def centred(self, values: Floats) -> Floats:
        """Return `padded` values minus the mean of their mini-batch, for numerical precision."""
        padded = self.padded(values)
        sizes = self.present.sum(axis=1).reshape(-1, *[1] * (padded.ndim - 1))
        means = padded.sum(axis=1, keepdims=True) / sizes
        present = self.present.reshape(*self.present.shape, *[1] * (padded.ndim - 2))
        return np.where(present, padded - means, 0.0)

    def totals(self, values: Floats) -> Floats:
        """Return the sum of each prompt's values: (J, I, ...) becomes (P, ...)."""
        result = np.zeros((self.num_prompts, *values.shape[2:]))
        np.add.at(result, self.members[self.present], values[self.present])
        return result

    def matrix(self, blocks: Floats) -> Floats:
        """Return the sum of the mini-batches' matrices: (J, I, I) becomes (P, P)."""
        size = self.num_prompts
        places = self.members[:, :, None] * size + self.members[:, None, :]
        flat = np.bincount(places.ravel(), blocks.ravel(), minlength=size * size)
        return flat.astype(np.float64, copy=False).reshape(size, size)

    def blocks(self, matrix: Floats) -> Floats:
        """Return, per mini-batch, the part of a (P, P) matrix for its prompts: (J, I, I)."""
        return matrix[self.members[:, :, None], self.members[:, None, :]]


class RemlNoise(NamedTuple):
    """The noise of mini-batches with one example each, after the intercepts are integrated out.

    Let R be the covariance of the noise in a mini-batch's losses. The intercept has a flat prior,
    so only differences between prompts count. The precision of the losses is then
    R^-1 - R^-1 1 1' R^-1 / (1' R^-1 1), see Patterson and Thompson 1971 (restricted likelihood).

    Attributes:
        precision: Shape (J, I, I), 0 where there is no prompt.
        level: Weights of the losses in the estimate of the intercept, shape (J, I), sum 1.
        log_det: log det R + log 1' R^-1 1, shape (J,).
        degrees: Number of independent differences between prompts, shape (J,).
    """

    precision: Floats
    level: Floats
    log_det: Floats
    degrees: Floats

    @classmethod
    def of(cls, batches: MiniBatches, unit_covariance: Floats, shared_noise: float) -> RemlNoise:
        """Return the noise of mini-batches.

        The effect of a prompt varies between examples, and similar prompts vary together. A part of
        the noise therefore has the covariance of the values.

        Args:
            batches: The prompts of each mini-batch.
            unit_covariance: The prior covariance divided by its mean variance, (P, P).
            shared_noise: The part of the noise with this covariance, in [0, 1).
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


# Without `slots=True`, because cached_property needs a __dict__.
@dataclass(frozen=True)
class Features:
    """The features of prompts: the candidates of each slot, whatever their position in the slot.

    In a slot of several positions the blank is not a feature, because two prompts that both have a
    blank need not be similar. In a slot of one position the blank is a candidate like any other.
    """

    space: Space

    @cached_property
    def columns(self) -> Ints:
        """The feature of each candidate of each position, -1 for none; shape (n, N)."""
        columns = np.full(self.space.shape, -1, dtype=np.int64)
        first = 0
        for positions, size, blank in self.space.groups():
            numbers = np.arange(first, first + size)
            first += size
            if len(positions) > 1 and blank is not None:
                numbers[blank] = -1
            columns[positions, :size] = numbers
        return columns

    def present(self, prompts: Ints) -> NDArray[np.float32]:
        """Return the features of each prompt, 0 or 1, shape (P, F)."""
        count = sum(size for _, size, _ in self.space.layout)
        present = np.zeros((len(prompts), count + 1), dtype=np.float32)
        columns = self.columns[np.arange(self.space.prompt_len), prompts]
        np.put_along_axis(present, columns, 1.0, axis=1)  # -1 is the extra last column.
        return present[:, :-1]


class Kernel(NamedTuple):
    """The prior covariance of prompts' values, in arbitrary units.

    A value is a sum of normal parts: one per feature, one per pair of features, and one for the
    whole prompt (the nugget). The parts of features have a common random mean, because in some
    tasks most words do harm. Two prompts of a and b features, m in both, have the covariance

        additive (m / L + a b / L^2) + pairs m (m - 1) / (L (L - 1)) + nugget [equal prompts].

    Attributes:
        additive: Variance of the sum of L features' parts at a given common mean.
        pairs: Variance of the sum of the pairs' parts in a prompt of L features.
        nugget: Variance of the nugget.
        length: L, the number of features of a typical prompt, at least 2.
    """

    additive: float
    pairs: float
    nugget: float
    length: float

    def matrix(self, present: NDArray[np.float32]) -> Floats:
        """Return the covariances (P, P) of distinct prompts from their features, 0 or 1, (P, F)."""
        # The variances of one feature's part about the common mean, and of one pair's part.
        feature = self.additive / self.length
        pair = 2.0 * self.pairs / (self.length * (self.length - 1.0))
        both = (present @ present.T).astype(np.float64)
        counts = np.diagonal(both)
        matrix = both * (feature + 0.5 * pair * (both - 1.0))
        matrix += self.additive / self.length**2 * counts[:, None] * counts
        matrix[np.diag_indices(len(matrix))] += self.nugget
        return matrix


def typical_length(present: NDArray[np.float32]) -> float:
    """Return the mean number of features per prompt, at least 2; `present` has shape (P, F)."""
    return max(2.0, float(present.sum(axis=1).mean()))


_LEAST_VARIANCE = 1e-12


class Comparisons(NamedTuple):
    """Losses of one class with the weights of their mini-batches.

    Attributes:
        losses: Shape (J, I), nats, 0 where there is no prompt; or G such arrays, shape (J, I, G).
        weights: Number of examples of the class times the mini-batch's trust, shape (J,).
    """

    batches: MiniBatches
    reml: RemlNoise
    losses: Floats
    weights: Floats

    def precision(self) -> Floats:
        """Return the precision of the values, (P, P), in units of one example's noise."""
        return self.batches.matrix(self.weights[:, None, None] * self.reml.precision)

    def weighted(self) -> Floats:
        """Return the losses times `precision`, summed per prompt, shape (P,) or (P, G)."""
        return self.batches.totals(self._weighted())

    def square(self) -> float:
        """Return the weighted sum of squared differences between losses of shape (J, I)."""
        return float((self.losses * self._weighted()).sum())

    def degrees(self) -> float:
        """Return the number of independent differences of losses, without regard to trust."""
        present = self.weights > 0.0
        return float(self.reml.degrees[present].sum())

    def _weighted(self) -> Floats:
        flat = self.losses.reshape(*self.losses.shape[:2], -1)
        result = self.weights[:, None, None] * (self.reml.precision @ flat)
        return result.reshape(self.losses.shape)


class Posterior(NamedTuple):
    """The posterior values of the observed prompts, for one class.

    Attributes:
        mean: Values relative to the average prompt, nats, shape (P,).
        unit: Covariance of the values in units of the noise variance, shape (P, P).
        noise: The variance of one example's noise, nats^2.
        degrees: The number of independent differences of losses that `noise` was computed from.
    """

    mean: Floats
    unit: Floats
    noise: float
    degrees: float


def posterior(comparisons: Comparisons, prior: Floats) -> Posterior:
    """Return the posterior given losses (J, I).

    `prior` is the inverse of the prior covariance, in units of the noise variance, (P, P).
    """
    unit = inverted(prior + comparisons.precision())
    weighted = comparisons.weighted()
    mean = unit @ weighted
    square = comparisons.square() - float(weighted @ mean)
    degrees = max(comparisons.degrees(), 1.0)
    return Posterior(mean, unit, max(square / degrees, _LEAST_VARIANCE), degrees)


def inverted(matrix: Floats) -> Floats:
    """Return the inverse of a matrix."""
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


_STEP = math.log(2.0)
"""Largest step of a hyperparameter, on a log scale."""

_LEAST_NUGGET = 1e-3
"""Smallest nugget relative to the other variances, so that covariances are well conditioned."""

LARGEST = 12.0
"""Bound on the absolute value of hyperparameters."""


class Hyperparameters(NamedTuple):
    """Log variances and a log-odds; variances are in units of a typical mini-batch's noise.

    `additive`, `pairs` and `nugget` are the logs of these fields of `Kernel`.

    Attributes:
        shared_noise: Log-odds of the part of the noise that has the kernel's covariance.
        curves: Log of a ratio of prior variances: of `Likelihood.unbiased` to `Likelihood.losses`.
    """

    additive: float
    pairs: float
    nugget: float
    shared_noise: float
    curves: float

    @property
    def part(self) -> float:
        """The part of the noise that has the kernel's covariance."""
        return 1.0 / (1.0 + math.exp(-self.shared_noise))

    def kernel(self, examples: float, length: float) -> Kernel:
        """Return the kernel in units of one example's noise.

        A typical mini-batch has `examples` examples, a typical prompt `length` features.
        """
        additive, pairs, nugget = (math.exp(value) / examples for value in self[:3])
        return Kernel(additive, pairs, nugget + _LEAST_NUGGET * (additive + pairs), length)


PRIOR = Hyperparameters(math.log(0.5), math.log(0.25), math.log(0.25), 0.0, math.log(4.0))
"""Prior means; with them, the values of prompts vary as much as the noise of a mini-batch."""

_CURVES_INDEX = 4
"""The index of `curves`, which has its own likelihood."""

_SPREAD = 1.5
"""Prior standard deviation on the log scale: a factor of 4.5 up or down."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Likelihood:
    """The restricted marginal likelihood of losses: the intercepts are integrated out.

    Attributes:
        present: Features of each prompt, 0 or 1, shape (P, F).
        losses: Losses of each class at each prompt's best bias, shape (J, I, K).
        unbiased: Losses at one bias for all prompts, shape (J, I, K); None without label biases.
        weights: Number of examples of each class times the mini-batch's trust, shape (J, K).
        examples: The number of examples of a typical mini-batch.
    """

    batches: MiniBatches
    present: NDArray[np.float32]
    losses: Floats
    unbiased: Floats | None
    weights: Floats
    examples: float

    def improved(
        self, values: Hyperparameters, coordinates: Sequence[int] = range(len(PRIOR))
    ) -> Hyperparameters:
        """Return better hyperparameters, after one step along each coordinate in turn."""
        others = [at for at in coordinates if at < _CURVES_INDEX]
        improved, unbiased = _coordinate_step(self.loss, values, others), self.unbiased
        if unbiased is None or _CURVES_INDEX not in coordinates:
            return improved
        inverse, reml = self._of(improved)

        def loss(tried: Hyperparameters) -> float:
            deviance = self._deviance(unbiased, inverse / math.exp(tried.curves), reml)
            return deviance + _prior_deviance(tried)

        return _coordinate_step(loss, improved, [_CURVES_INDEX])

    def loss(self, values: Hyperparameters) -> float:
        """Return -2 log of likelihood times prior, up to a constant."""
        inverse, reml = self._of(values)
        return self._deviance(self.losses, inverse, reml) + _prior_deviance(values)

    def _of(self, values: Hyperparameters) -> tuple[Floats, RemlNoise]:
        """Return the inverse of the prior covariance, and the noise."""
        length = typical_length(self.present)
        covariance = values.kernel(self.examples, length).matrix(self.present)
        reml = RemlNoise.of(self.batches, unit_covariance(covariance), values.part)
        return inverted(covariance), reml

    def _deviance(self, losses: Floats, inverse: Floats, reml: RemlNoise) -> float:
        prior = -2.0 * float(np.log(np.diagonal(np.linalg.cholesky(inverse))).sum())
        total = 0.0
        for c in range(self.weights.shape[1]):
            weights = self.weights[:, c]
            present = weights > 0.0
            if not present.any():
                continue
            comparisons = Comparisons(self.batches, reml, losses[:, :, c], weights)
            root = np.linalg.cholesky(inverse + comparisons.precision())
            weighted = np.linalg.solve(root, comparisons.weighted())
            square = max(comparisons.square() - float(weighted @ weighted), _LEAST_VARIANCE)
            total += comparisons.degrees() * math.log(square) + prior
            total += 2.0 * float(np.log(np.diagonal(root)).sum())
            total += float(reml.log_det[present].sum())
        return total


def unit_covariance(covariance: Floats) -> Floats:
    """Return a covariance divided by its mean variance."""
    return covariance / np.diagonal(covariance).mean()


def _prior_deviance(values: Hyperparameters) -> float:
    return sum(((value - mean) / _SPREAD) ** 2 for value, mean in zip(values, PRIOR, strict=True))


def _coordinate_step(
    loss: Callable[[Hyperparameters], float], values: Hyperparameters, coordinates: Sequence[int]
) -> Hyperparameters:
    """Move each coordinate up, down or to the minimum of a parabola, if this lowers the loss."""
    if not coordinates:
        return values
    current, best = values, loss(values)
    for at in coordinates:
        tried = [_moved(current, at, step) for step in (-_STEP, _STEP)]
        lower, upper = map(loss, tried)
        bend = lower + upper - 2.0 * best
        if bend > 0.0:
            shift = 0.5 * (lower - upper) / bend * _STEP
            tried.append(_moved(current, at, min(max(shift, -_STEP), _STEP)))
        losses = [lower, upper, *map(loss, tried[2:])]
        lowest = min(range(len(tried)), key=losses.__getitem__)
        if losses[lowest] < best:
            best, current = losses[lowest], tried[lowest]
    return current


def _moved(values: Hyperparameters, at: int, step: float) -> Hyperparameters:
    moved = [*values]
    moved[at] = min(max(moved[at] + step, -LARGEST), LARGEST)
    return Hyperparameters(*moved)
