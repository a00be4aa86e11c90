"""The evaluator of searches: the posterior value of each prompt, given the observed losses.

A class is a group of examples whose losses are reported separately. (With many labels or under
privacy, all examples are one group.) For each mini-batch and class, the model is

    loss of a prompt = intercept of the mini-batch + value of the prompt + noise.

- The loss is taken with the prompt's best label bias.
- The intercept has a flat prior, so only losses of the same mini-batch are compared directly.
- The values are a Gaussian process: prompts that share candidates have similar values (`Kernel`).
- The noise of a mean over b examples has the variance sigma^2 / b. A part of the noise is
  correlated between similar prompts. `Likelihood` chooses the variances.

The label bias of a prompt is a bias that all prompts share, plus a deviation. A second Gaussian
process estimates the gradient and the Hessian's trace of the prompt's loss at the shared bias.
`label_bias` computes the deviation from them.

Clients may send false losses. If the losses of a mini-batch disagree with the others by more than
the noise explains, the mini-batch gets a lower weight, its *trust*. It is computed from a t
distribution of the noise with one scale per mini-batch (Lange, Little and Taylor 1989).

Shapes: P prompts, E losses, J mini-batches of I prompts, K classes, C labels, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .gaussian_process import (
    Comparisons,
    Features,
    Hyperparameters,
    Kernel,
    Likelihood,
    MiniBatches,
    Posterior,
    RemlNoise,
    inverted,
    posterior,
    typical_length,
    unit_covariance,
)
from .label_bias import PRIOR_STD, UNKNOWN_TRACE, expanded, lowest
from .method_state import Floats, Ints
from .observations import Observations

_DEGREES_OF_FREEDOM = 4.0
"""Degrees of freedom of the noise's t distribution: the usual choice."""

_MARGIN = 1.0
"""A pessimistic value is the expected value plus this many standard deviations.

With margins of 0, 1, 1.5 and 2, the 40 runs that `ThompsonSampling` describes reached 63, 70, 59
and 40 % of the possible improvement after 100 queries. With honest clients, or after 300 queries,
the results differed by at most 4 points."""

_CONFIRMED = 1.5
"""A prompt is confirmed when, in each class, the trust of its mini-batches adds up to this.

A trust is at most 1, so 1.5 needs two mini-batches, and 2.5 would need three. In 30 simulated runs
of 20 queries, the mean gain was 0.078 (of a possible 0.169) with 1.5, and 0.030 with 2.5."""

_DEVIATION_STD = 1.0
"""Prior standard deviation of a prompt's label bias minus the shared bias, nats."""

_NOISED_STD = 1.0
"""Prior standard deviation of the shared bias if clients add noise, nats."""

_JITTER = 1e-6
"""Fraction of the mean variance that is added to all variances, for the Cholesky root."""

_POOLED = 8.0
"""In a class's noise, the mean noise of all classes counts as this many degrees of freedom."""

_FITTED = 128
"""Hyperparameters are fitted to the last mini-batches, up to this many prompts in all, because the
cost grows with the cube of the number of prompts."""

_ALL_AT_ONCE = 64
"""With more prompts than this, each mini-batch updates only one of the hyperparameters."""


class Estimates(NamedTuple):
    """Estimates of each prompt's loss, and of its difference to a reference (usually "no prompt").

    Attributes:
        value: Expected loss at the prompt's best bias, relative to the average prompt, shape (P,).
        spread: Posterior standard deviation of the difference to the reference, shape (P,).
        pessimistic: The upper confidence bound of the difference to the reference, shape (P,).
    """

    value: Floats
    spread: Floats
    pessimistic: Floats

    @property
    def optimistic(self) -> Floats:
        """The lower confidence bound; the search evaluates the prompts that minimise it."""
        return self.value - self.spread


# Without `slots=True`, because cached_property needs a __dict__.
@dataclass(frozen=True, eq=False)
class Evaluator:
    """The posterior of all remembered prompts."""

    observed: Observations
    features: Features
    parts: Parts

    @classmethod
    def of(cls, observed: Observations, features: Features, values: Hyperparameters) -> Self:
        """Return the posterior given the observations."""
        return cls(observed, features, Parts.of(observed, features, values))

    @property
    def prompts(self) -> Ints:
        """The observed prompts, shape (P, n)."""
        return self.observed.prompts

    @cached_property
    def reference(self) -> int | None:
        """The row of "no prompt", with which prompts are compared; None if not observed."""
        return self.observed.row(self.features.space.reference)

    @cached_property
    def classes(self) -> tuple[Posterior | None, ...]:
        """The posterior of each class; None for a class without observed examples."""
        losses = self.parts.batches.centred(self.observed.losses)
        return self.parts.posteriors(self.observed, losses)

    @cached_property
    def estimates(self) -> Estimates:
        """The value of each prompt and its uncertainty, compared with `reference`."""
        return self.compared(self.reference)

    def compared(self, row: int | None) -> Estimates:
        """Return the estimates, compared with the prompt of a row."""
        size = len(self.prompts)
        value, variance = _optimism(self.observed), np.zeros(size)
        if row is None:
            # Prompts are compared with the mean of all prompts.
            against = np.full(size, 1.0 / size)
        else:
            against = np.zeros(size)
            against[row] = 1.0
        for share, process in zip(self.observed.class_share, self.classes, strict=True):
            if process is None:
                continue
            column = process.unit @ against
            unit = np.diagonal(process.unit) - 2.0 * column + against @ column
            value += share * process.mean
            variance += share**2 * process.noise * unit
        spread = np.sqrt(np.maximum(variance, 0.0))
        difference = value - against @ value
        return Estimates(value=value, spread=spread, pessimistic=difference + _MARGIN * spread)

    def draws(self, prompts: Ints, count: int, rng: np.random.Generator) -> Floats:
        """Return joint posterior draws of values, shape (count, P + Q).

        The first P columns are the observed prompts; the others are Q new `prompts`, shape (Q, n).
        The nugget (`Kernel`) of a new prompt is 0, because no observed loss depends on it.
        """
        present, kernel, inverse, *_ = self.parts
        observed = np.arange(len(present))
        prior = kernel.matrix(np.concatenate([present, self.features.present(prompts)]))
        unknown = np.arange(len(observed), len(prior))
        prior[unknown, unknown] -= kernel.nugget
        # A class has the covariance noise * (prior - gain (seen - unit) gain'), see `Posterior`.
        gain = prior[:, observed] @ inverse
        mean, explained, scale = np.zeros(len(observed)), np.zeros_like(inverse), 0.0
        seen = prior[np.ix_(observed, observed)]
        for share, process in zip(self.observed.class_share, self.classes, strict=True):
            if process is not None:
                mean += share * process.mean
                explained += share**2 * process.noise * (seen - process.unit)
                scale += share**2 * process.noise
        covariance = scale * prior - gain @ explained @ gain.T
        covariance[np.diag_indices(len(prior))] += _JITTER * scale * np.diagonal(prior).mean()
        normal = rng.normal(size=(count, len(prior)))
        return gain @ mean + normal @ np.linalg.cholesky(covariance).T

    @property
    def confirmed(self) -> NDArray[np.bool_]:
        """Whether each prompt is confirmed, as `incumbent` defines it, shape (P,)."""
        evaluations = self.observed.trusted_evaluations[:, self.observed.seen]
        confirmed = np.all(evaluations >= _CONFIRMED, axis=1)
        if self.reference is not None:
            confirmed[self.reference] = True
        return confirmed

    def incumbent(self, estimates: Estimates) -> int:
        """Return the row with the best pessimistic value among confirmed prompts.

        A prompt is confirmed when, for each class, it was scored on two trusted mini-batches. With
        fewer, its bias may fit only one class, because a client may have examples of one class.
        The reference is always confirmed. If no prompt is confirmed, all prompts are compared.
        """
        confirmed = self.confirmed
        if not confirmed.any():
            return int(estimates.pessimistic.argmin())
        return int(np.where(confirmed, estimates.pessimistic, np.inf).argmin())


class Parts(NamedTuple):
    """The parts of an `Evaluator` that do not depend on the losses.

    Attributes:
        present: Features of each prompt, 0 or 1, shape (P, F).
        kernel: The kernel in units of one example's noise.
        inverse: The inverse of the prior covariance, shape (P, P).
    """

    present: NDArray[np.float32]
    kernel: Kernel
    inverse: Floats
    batches: MiniBatches
    reml: RemlNoise

    @classmethod
    def of(cls, observed: Observations, features: Features, values: Hyperparameters) -> Self:
        """Return the parts for the prompts and mini-batches of `observed`."""
        present = features.present(observed.prompts)
        kernel = values.kernel(_typical_examples(observed), typical_length(present))
        covariance = kernel.matrix(present)
        batches = MiniBatches.of(observed.rows, observed.batches, len(observed.prompts))
        reml = RemlNoise.of(batches, unit_covariance(covariance), values.part)
        return cls(present, kernel, inverted(covariance), batches, reml)

    def posteriors(self, observed: Observations, losses: Floats) -> tuple[Posterior | None, ...]:
        """Return the posterior of each class, from losses (J, I, K).

        The noise of a class is shrunk towards the mean noise of all classes, because one or two
        rows of a class do not show how much the losses of its rows differ.
        """
        weights = observed.trust[:, None] * observed.examples
        processes: dict[int, Posterior] = {
            c: posterior(
                Comparisons(self.batches, self.reml, losses[:, :, c], weights[:, c]), self.inverse
            )
            for c in np.flatnonzero(weights.any(axis=0)).tolist()
        }
        total = sum(each.degrees for each in processes.values())
        common = sum(each.noise * each.degrees for each in processes.values()) / total
        for c, each in processes.items():
            noise = (each.noise * each.degrees + _POOLED * common) / (each.degrees + _POOLED)
            processes[c] = each._replace(noise=noise)
        return tuple(map(processes.get, range(weights.shape[1])))


def updated(
    observed: Observations, features: Features, values: Hyperparameters
) -> tuple[Evaluator, Hyperparameters]:
    """Fit biases, trust and hyperparameters after a new mini-batch, and return the posterior."""
    shared = None
    if observed.biases.shape[1] > 1:
        shared = _shared_bias(observed)
        biases = _best_biases(observed, shared, Parts.of(observed, features, values), values)
        observed = replace(observed, biases=biases)
    recent = observed.latest(_FITTED)
    coordinates: Sequence[int] = range(len(values))
    if len(observed.prompts) > _ALL_AT_ONCE:
        coordinates = [len(observed.examples) % len(values)]
    values = _likelihood(recent, features, shared).improved(values, coordinates)
    parts = Parts.of(observed, features, values)
    losses = parts.batches.centred(observed.losses)
    trust = _trust_of(observed, parts, losses, parts.posteriors(observed, losses))
    observed = replace(observed, trust=trust)
    return Evaluator(observed, features, parts), values


def _typical_examples(observed: Observations) -> float:
    return float(observed.examples[observed.examples > 0].mean())


def _shared_bias(observed: Observations) -> Floats:
    """Return the best label bias for all prompts together, shape (C,)."""
    examples = observed.trust[:, None] * observed.examples
    weights = examples[observed.batches]
    weights = weights / np.where(observed.seen, weights.sum(axis=0), 1.0) * observed.class_share
    weights /= weights.sum()
    start = observed.biases[observed.rows].mean(axis=0)
    every = observed.expansions.at(start)
    flat = type(every)(*(each.reshape(1, weights.size, *each.shape[2:]) for each in every))
    noised = (observed.means[..., 1] >= UNKNOWN_TRACE).any()
    std = _NOISED_STD if noised else PRIOR_STD
    ridge = np.array([1.0 / (std**2 * examples.sum())])
    return _with_unseen(lowest(flat, weights.reshape(1, -1), ridge), observed)[0]


def _best_biases(
    observed: Observations, shared: Floats, parts: Parts, values: Hyperparameters
) -> Floats:
    """Return the best label bias of each prompt, shape (P, C)."""
    prior = parts.inverse / math.exp(values.curves)
    about = observed.expansions.at(shared)
    numbers = np.concatenate([about.gradients, about.traces[..., None]], axis=-1)
    padded = parts.batches.padded(numbers)
    weights = observed.trust[:, None] * observed.examples
    smooth = np.zeros((len(observed.prompts), *numbers.shape[1:]))
    for c in np.flatnonzero(observed.seen):
        comparisons = Comparisons(parts.batches, parts.reml, padded[:, :, c], weights[:, c])
        mean = np.linalg.solve(prior + comparisons.precision(), comparisons.weighted())
        residuals = padded[:, :, c] - mean[parts.batches.members]
        intercepts = np.einsum("ji,jig->jg", parts.reml.level, residuals)
        smooth[:, c] = mean + np.average(intercepts, axis=0, weights=weights[:, c])
    totals = np.where(observed.seen, weights.sum(axis=0), 1.0)
    targets = np.einsum("jk,jkc->kc", weights, observed.targets) / totals[:, None]
    prompts = expanded(smooth[..., :-1], targets, smooth[..., -1], shared)
    share = np.broadcast_to(observed.class_share, smooth.shape[:2])
    examples = np.bincount(observed.rows, weights.sum(axis=1)[observed.batches])
    ridge: Floats = 1.0 / (_DEVIATION_STD**2 * np.maximum(examples, 1.0))
    return _with_unseen(lowest(prompts, share, ridge), observed)


def _with_unseen(biases: Floats, observed: Observations) -> Floats:
    """Return biases (P, C), where a label without examples has the mean of the other labels."""
    seen = np.broadcast_to(observed.seen, biases.shape[1:])
    filled = np.where(seen, biases, biases[:, seen].mean(axis=1, keepdims=True))
    return filled - filled[:, :1]


def _optimism(observed: Observations) -> Floats:
    """Return by how much the loss at a fitted bias is too low, shape (P,).

    Without this correction, prompts with few examples would seem the best. A bias of C - 1 numbers
    is fitted to n examples with the ridge r / n. If H is the Hessian of their mean loss, the loss
    is too low by about tr((H + r / n)^-1 H) / 2n nats (Akaike 1974, with a ridge). H is taken as
    the identity, multiplied by the mean trace / (C - 1).
    """
    free = observed.biases.shape[1] - 1
    if not free:
        return np.zeros(len(observed.prompts))
    traces = observed.expansions.at(observed.biases[observed.rows][:, None]).traces
    weights = (observed.trust[:, None] * observed.examples).sum(axis=1)[observed.batches]
    examples = np.bincount(observed.rows, weights)
    traced = np.bincount(observed.rows, weights * (traces @ observed.class_share))
    bend = traced / (free * examples)
    return free * bend / (bend * examples + _DEVIATION_STD**-2) / 2.0


def _likelihood(observed: Observations, features: Features, shared: Floats | None) -> Likelihood:
    batches = MiniBatches.of(observed.rows, observed.batches, len(observed.prompts))
    unbiased = None
    if shared is not None:
        unbiased = batches.centred(observed.expansions.at(shared).losses)
    return Likelihood(
        batches=batches,
        present=features.present(observed.prompts),
        losses=batches.centred(observed.losses),
        unbiased=unbiased,
        weights=observed.trust[:, None] * observed.examples,
        examples=_typical_examples(observed),
    )


def _trust_of(
    observed: Observations,
    parts: Parts,
    losses: Floats,
    processes: tuple[Posterior | None, ...],
) -> Floats:
    """Return the trust in each mini-batch, from its agreement with the others, shape (J,)."""
    batches, reml = parts.batches, parts.reml
    squares = np.zeros(len(observed.examples))
    degrees = np.zeros(len(observed.examples))
    for c, process in enumerate(processes):
        if process is None:
            continue
        examples = observed.examples[:, c]
        residuals = np.where(batches.present, losses[:, :, c] - process.mean[batches.members], 0.0)
        square = np.einsum("ji,jik,jk->j", residuals, reml.precision, residuals)
        squares += examples * square / process.noise
        # The posterior is fitted to these losses, which uses some of their degrees of freedom.
        fitted = np.einsum("jik,jik->j", reml.precision, batches.blocks(process.unit))
        fitted *= observed.trust * examples
        degrees += np.where(examples > 0, np.maximum(reml.degrees - fitted, 0.0), 0.0)
    trust: Floats = (_DEGREES_OF_FREEDOM + degrees) / (_DEGREES_OF_FREEDOM + squares)
    return np.minimum(trust, 1.0)
