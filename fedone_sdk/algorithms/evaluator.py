"""The one evaluator of searches: what every prompt is worth, given everything that was paid for.

The model of a mini-batch is, for each class,

    loss of a prompt = random intercept of the mini-batch + value of the prompt + noise,

each prompt at its own best label bias. Values are a Gaussian process whose kernel knows what
prompts have in common (`kernel`); intercepts have a flat prior, so that prompts are compared where
the same mini-batch met both, or over prompts that link them; the noise of a mean over b examples
has the variance sigma^2 / b, and a part of it is common to prompts that are alike. Variances are
those of the largest marginal likelihood (`hyperparameters`). The best biases are read off the same
process over whole curves of losses, which vary more.

Clients may lie. A mini-batch whose losses disagree with the others by more than noise explains
counts less, by as much: noise is from a t distribution with a scale of its own for each mini-batch
(Lange, Little and Taylor 1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .calibration import BiasGrid
from .contrasts import Contrasts, MiniBatches
from .gaussian_process import Comparisons, Posterior, inverted, posterior
from .hyperparameters import Hyperparameters, Likelihood, alike
from .kernel import Features, Kernel, usual_length
from .observations import Observations

__all__ = ["Evaluator", "Judged", "updated"]

_TAILS = 4.0
"""Degrees of freedom of the t distribution that noise is from: the usual choice."""

_DOUBT = 1.0
"""Standard deviations that an incumbent must be better than the reference by.

Values are shrunk by the prior, so that the best of many is not the luckiest. Part of the gap that
is closed at 100 / 300 queries (40 runs as in `thompson`, honest; a fifth of liars): 83 / 94 % and
63 / 91 % with 0, where a run under liars lost twice the gap; 85 / 93 and 70 / 92 % with 1; 83 / 96
and 59 / 89 % with 1.5; 81 / 93 and 40 / 90 % with 2. Among 200 words of little effect (24 runs of
tests/benchmarks/searches.py) 0.0076 nats are gained after 500 queries with 1 and 0.0056 with 2, and
the worst run loses 0.0001 with either."""

_CONFIRMED = 2.5
"""Sum of the trust of the mini-batches that an incumbent must have met in each class: three agree.

With 1.5, two agree, and 2 of 400 runs on the tables of docs/benchmarks/slots.md deployed a prompt
that was 0.3 nats or more worse than no prompt; with 2.5 the worst was 0.13 nats worse."""

_FITTED = 128
"""Prompts whose losses hyperparameters are fitted to: those of the last mini-batches. The cost
grows with the cube, and five numbers are known well by then."""

_ALL_AT_ONCE = 64
"""Prompts up to which each mini-batch moves all hyperparameters; then it moves one, in turn."""


class Judged(NamedTuple):
    """The judgement of each prompt.

    Attributes:
        value: Expected loss at the prompt's best bias, relative to the average prompt, shape (P,).
        spread: Posterior standard deviation of the difference to the reference, shape (P,).
        pessimistic: The upper confidence bound of the difference to the reference, shape (P,).
    """

    value: NDArray[np.float64]
    spread: NDArray[np.float64]
    pessimistic: NDArray[np.float64]

    @property
    def optimistic(self) -> NDArray[np.float64]:
        """The lower confidence bound: the best prompt by this deserves another evaluation."""
        return self.value - self.spread


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluator:
    """The posterior of all prompts that are remembered.

    Attributes:
        observed: What was paid for.
        features: What prompts may have in common.
        present: Which features they have, shape (P, F).
        kernel: In units of one example's noise.
        inverse: Of the prior covariance, shape (P, P).
        batches: The prompts of each mini-batch.
        contrasts: The noise of one example.
        losses: Of each class at their prompts' best biases, shape (E, C), nats.
        classes: The posterior of each class; None where it was never seen.
        reference: The row of "no prompt", which the others are compared with; None without.
    """

    observed: Observations
    features: Features
    present: NDArray[np.float32]
    kernel: Kernel
    inverse: NDArray[np.float64]
    batches: MiniBatches
    contrasts: Contrasts
    losses: NDArray[np.float64]
    classes: tuple[Posterior | None, ...]
    reference: int | None

    @classmethod
    def of(
        cls,
        observed: Observations,
        features: Features,
        grid: BiasGrid | None,
        values: Hyperparameters,
    ) -> Self:
        """Return the posterior of what was observed."""
        return cls._of(observed, features, grid, _Parts.of(observed, features, values))

    @classmethod
    def _of(
        cls, observed: Observations, features: Features, grid: BiasGrid | None, parts: _Parts
    ) -> Self:
        losses = _at_best(observed, grid)
        return cls(
            observed=observed,
            features=features,
            present=parts.present,
            kernel=parts.kernel,
            inverse=parts.inverse,
            batches=parts.batches,
            contrasts=parts.contrasts,
            losses=losses,
            classes=parts.posteriors(observed, parts.batches.centred(losses)),
            reference=observed.row(features.space.reference),
        )

    def judged(self) -> Judged:
        """Return the value of each prompt and its uncertainty."""
        size = len(self.observed.prompts)
        value, variance = np.zeros(size), np.zeros(size)
        if self.reference is None:
            # Compared with the mean of all prompts.
            against = np.full(size, 1.0 / size)
        else:
            against = np.zeros(size)
            against[self.reference] = 1.0
        for share, own in zip(self.observed.class_share, self.classes, strict=True):
            if own is None:
                continue
            column = own.unit @ against
            unit = np.diagonal(own.unit) - 2.0 * column + against @ column
            value += share * own.mean
            variance += share**2 * own.noise * unit
        spread = np.sqrt(np.maximum(variance, 0.0))
        held = value - against @ value
        return Judged(value=value, spread=spread, pessimistic=held + _DOUBT * spread)

    def incumbent(self, judged: Judged) -> int:
        """Return the row with the best pessimistic value of those that three mini-batches agree on.

        What one client says alone, of a prompt or of a class, makes no incumbent: where clients
        hold single classes, a prompt that met one of them often and another once would get a bias
        that fits the first alone. The reference needs no such looks, as the others are held to it;
        without one, and without such rows, it is whatever looks best.
        """
        looks = self.observed.trusted_looks[:, self.observed.seen]
        confirmed: NDArray[np.bool_] = np.all(looks >= _CONFIRMED, axis=1)
        if self.reference is not None:
            confirmed[self.reference] = True
        if not confirmed.any():
            return int(judged.pessimistic.argmin())
        return int(np.where(confirmed, judged.pessimistic, np.inf).argmin())


class _Parts(NamedTuple):
    """What follows from the mini-batches and the hyperparameters."""

    present: NDArray[np.float32]
    kernel: Kernel
    inverse: NDArray[np.float64]
    batches: MiniBatches
    contrasts: Contrasts

    @classmethod
    def of(cls, observed: Observations, features: Features, values: Hyperparameters) -> _Parts:
        present = features.present(observed.prompts)
        kernel = values.kernel(_usual(observed), usual_length(present))
        covariance = kernel.matrix(present)
        batches = MiniBatches.of(observed.rows, observed.batches, len(observed.prompts))
        contrasts = Contrasts.of(batches, alike(covariance), values.part)
        return cls(present, kernel, inverted(covariance), batches, contrasts)

    def posteriors(
        self, observed: Observations, losses: NDArray[np.float64]
    ) -> tuple[Posterior | None, ...]:
        """The posterior of each class, from losses (J, I, C)."""
        weights = observed.trust[:, None] * observed.examples
        return tuple(
            posterior(
                Comparisons(self.batches, self.contrasts, losses[:, :, c], weights[:, c]),
                self.inverse,
            )
            if weights[:, c].any()
            else None
            for c in range(weights.shape[1])
        )


def updated(
    observed: Observations,
    features: Features,
    grid: BiasGrid | None,
    values: Hyperparameters,
) -> tuple[Evaluator, Hyperparameters]:
    """Return the posterior after a new mini-batch: with new biases, variances and trust.

    Trust goes on from the last estimate, one turn with each mini-batch.

    Args:
        observed: With the new mini-batch.
        features: What prompts may have in common.
        grid: The label biases; None without calibration.
        values: The variances so far.
    """
    if grid is not None and observed.seen.all():
        observed = replace(observed, biases=_best_biases(observed, features, grid, values))
    few = observed.latest(_FITTED)
    coordinates: Sequence[int] = range(len(values))
    if len(observed.prompts) > _ALL_AT_ONCE:
        coordinates = [observed.num_told % len(values)]
    values = _likelihood(few, features, grid).improved(values, coordinates)
    parts = _Parts.of(observed, features, values)
    losses = parts.batches.centred(_at_best(observed, grid))
    trust = _deserved(observed, parts, losses, parts.posteriors(observed, losses))
    observed = replace(observed, trust=trust)
    return Evaluator._of(observed, features, grid, parts), values


def _usual(observed: Observations) -> float:
    """Examples of a class in a usual mini-batch."""
    return float(observed.examples[observed.examples > 0].mean())


def _at_best(observed: Observations, grid: BiasGrid | None) -> NDArray[np.float64]:
    """Losses of each class at their prompts' best biases, shape (E, C)."""
    if grid is None:
        return observed.means[:, :, 0].astype(np.float64)
    weights = grid.weights(observed.biases)[observed.rows]
    losses: NDArray[np.float64] = np.einsum("ecg,eg->ec", observed.means, weights)
    return losses


def _best_biases(
    observed: Observations, features: Features, grid: BiasGrid, values: Hyperparameters
) -> NDArray[np.float64]:
    """The label bias that suits each prompt best, shape (P, C)."""
    parts = _Parts.of(observed, features, values)
    prior = parts.inverse / math.exp(values.curves)
    curves = np.zeros((len(observed.prompts), len(grid.biases)))
    losses = parts.batches.padded(observed.means.astype(np.float64))
    weights = observed.trust[:, None] * observed.examples
    for c, share in enumerate(observed.class_share):
        own = Comparisons(parts.batches, parts.contrasts, losses[:, :, c], weights[:, c])
        mean = np.linalg.solve(prior + own.precision(), own.weighted())
        residuals = losses[:, :, c] - mean[parts.batches.members]
        intercepts = np.einsum("ji,jig->jg", parts.contrasts.level, residuals)
        curves += share * (mean + np.average(intercepts, axis=0, weights=weights[:, c]))
    return grid.bests(curves)


def _likelihood(observed: Observations, features: Features, grid: BiasGrid | None) -> Likelihood:
    batches = MiniBatches.of(observed.rows, observed.batches, len(observed.prompts))
    unbiased = None
    if grid is not None and observed.seen.all():
        # At the bias that suits most prompts.
        weights = observed.class_share[:, None]
        place = int((weights * observed.means.mean(axis=0)).sum(axis=0).argmin())
        unbiased = batches.centred(observed.means[:, :, place].astype(np.float64))
    return Likelihood(
        batches=batches,
        present=features.present(observed.prompts),
        losses=batches.centred(_at_best(observed, grid)),
        unbiased=unbiased,
        weights=observed.trust[:, None] * observed.examples,
        examples=_usual(observed),
    )


def _deserved(
    observed: Observations,
    parts: _Parts,
    losses: NDArray[np.float64],
    found: tuple[Posterior | None, ...],
) -> NDArray[np.float64]:
    """The trust that mini-batches deserve by how far they agree with the others, shape (J,)."""
    batches, contrasts = parts.batches, parts.contrasts
    squares = np.zeros(len(observed.examples))
    degrees = np.zeros(len(observed.examples))
    for c, own in enumerate(found):
        if own is None:
            continue
        examples = observed.examples[:, c]
        residuals = np.where(batches.present, losses[:, :, c] - own.mean[batches.members], 0.0)
        square = np.einsum("ji,jik,jk->j", residuals, contrasts.precision, residuals)
        squares += examples * square / own.noise
        # The posterior is fitted to these losses, which uses up some of the degrees of freedom.
        followed = np.einsum("jik,jik->j", contrasts.precision, batches.blocks(own.unit))
        followed *= observed.trust * examples
        degrees += np.where(examples > 0, np.maximum(contrasts.degrees - followed, 0.0), 0.0)
    deserved: NDArray[np.float64] = (_TAILS + degrees) / (_TAILS + squares)
    return np.minimum(deserved, 1.0)
