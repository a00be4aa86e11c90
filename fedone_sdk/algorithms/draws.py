"""Posterior draws as functions of any prompt, and the prompts that minimise them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .evaluator import Evaluator
from .space import Space

_ACTIVE = 256
"""Most features in a draw: those that were observed, and a random part of the others."""

_RESTARTS = 4
"""Initial prompts of the search for a draw's minimum."""

_SWEEPS = 3
"""Most passes of that search over all positions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """D functions drawn from the posterior: sums of the effects of features and their pairs.

    Drawn by Matheron's rule (Wilson et al. 2021): a draw from the prior, corrected by the
    observed losses.

    Attributes:
        columns: The active feature of each candidate of each position, shape (n, N): -1 where
            there is no feature (effect 0), -2 where the candidate is excluded.
        single: Effect of each feature, shape (D, F).
        pairs: Effect of each pair, symmetric with a diagonal of 0, shape (D, F, F).
        observed: Values of the observed prompts, with their own parts, shape (D, P).
        own: Standard deviation of the own part of an unobserved prompt, shape (D,).
        prompts: The observed prompts, shape (P, n).
    """

    space: Space
    columns: NDArray[np.int64]
    single: NDArray[np.float64]
    pairs: NDArray[np.float64]
    observed: NDArray[np.float64]
    own: NDArray[np.float64]
    prompts: NDArray[np.int64]

    @classmethod
    def of(cls, evaluator: Evaluator, count: int, rng: np.random.Generator) -> Draws:
        """Return D = `count` draws of the value: the sum over classes, weighted by their share."""
        space = evaluator.features.space
        active = _active(evaluator, rng)
        columns = _renumbered(evaluator.features.columns, active)
        present = evaluator.present[:, active].astype(np.float64)
        one, pair = evaluator.kernel.one, evaluator.kernel.pair
        common = evaluator.kernel.common
        size, width = present.shape
        single = np.zeros((count, width))
        pairs = np.zeros((count, width, width))
        observed = np.zeros((count, size))
        own_part = 0.0
        covariance = evaluator.kernel.matrix(evaluator.present)
        upper = np.triu_indices(width, 1)
        roots = _noise_roots(evaluator)
        have = _Pairs.of(present)
        for c, (share, own) in enumerate(
            zip(evaluator.observed.class_share, evaluator.classes, strict=True)
        ):
            if own is None:
                continue
            scale = share * np.sqrt(own.noise)
            own_part += scale**2 * evaluator.kernel.same
            w = rng.normal(0.0, np.sqrt(one), (count, width))
            w += rng.normal(0.0, np.sqrt(common), (count, 1))
            drawn = np.zeros((count, width, width))
            drawn[:, upper[0], upper[1]] = rng.normal(0.0, np.sqrt(pair), (count, len(upper[0])))
            both = drawn.reshape(count, -1)
            prior = w @ present.T
            prior += np.where(have.present, both[:, have.places], 0.0).sum(axis=2)
            prior += rng.normal(0.0, np.sqrt(evaluator.kernel.same), (count, size))
            # The weighted losses in units of the noise, and a draw of their noise.
            weights = evaluator.observed.trust * evaluator.observed.examples[:, c]
            weighted = own.weighted / np.sqrt(own.noise)
            noise = _noise(evaluator, roots, weights, count, rng)
            data_precision = evaluator.batches.matrix(
                weights[:, None, None] * evaluator.contrasts.precision
            )
            right = weighted + noise - prior @ data_precision
            # (1 + precision K)^-1 right = K^-1 (K^-1 + precision)^-1 right
            dual = (right @ own.unit) @ evaluator.inverse
            w += one * dual @ present
            single += scale * (w + common * (dual @ present.sum(axis=1))[:, None])
            both += pair * have.totals(dual, width * width)
            pairs += scale * both.reshape(drawn.shape)
            observed += scale * (prior + dual @ covariance)
        return cls(
            space=space,
            columns=columns,
            single=single,
            pairs=pairs + pairs.transpose(0, 2, 1),
            observed=observed,
            own=np.full(count, np.sqrt(own_part)),
            prompts=evaluator.observed.prompts,
        )

    def lowest(
        self, start: NDArray[np.int64], changed: NDArray[np.bool_], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return the minimum of each draw, found by coordinate descent from several prompts.

        An observed prompt with a lower value in the draw takes its place.

        Args:
            start: A prompt, shape (n,).
            changed: Of each draw, the positions that may differ from it, shape (D, n).
            rng: Draws the other initial prompts, and the own parts of unobserved prompts.
        """
        count, space = len(self.single), self.space
        others = space.random(count * _RESTARTS, rng).reshape(count, _RESTARTS, -1)
        given = np.broadcast_to(start, (count, 1, len(start)))
        others = np.where(changed[:, None], others, given)
        prompts, values = self._descended(np.concatenate([given, others], axis=1), changed)
        best = values.argmin(axis=1)
        found = prompts[np.arange(count), best]
        found_values = values[np.arange(count), best]
        found = space.compact(found)
        known = (found[:, None, :] == self.prompts).all(axis=2)
        met = known.any(axis=1)
        found_values += np.where(met, 0.0, self.own * rng.normal(size=count))
        rows = self.observed.argmin(axis=1)
        best_met = self.observed[np.arange(count), rows]
        return np.where((met | (best_met < found_values))[:, None], self.prompts[rows], found)

    def _descended(
        self, prompts: NDArray[np.int64], changed: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Coordinate descent of each draw from several prompts, (D, S, n), and values (D, S)."""
        prompts = prompts.copy()
        draw = np.arange(len(self.single))[:, None]
        positions = list(range(self.space.prompt_len))
        for _ in range(_SWEEPS):
            before = prompts.copy()
            for at in positions:
                size = self.space.sizes[at]
                columns = self.columns[at, :size]
                rest = self._rest(prompts, at)
                takes = columns >= 0
                again = np.inf if size > self.space.slots.count(self.space.slots[at]) else 0.0
                # Shape (D, S, candidates).
                values = np.zeros((*prompts.shape[:2], size))
                of = columns[takes]
                values[:, :, takes] = self.single[:, None, of]
                for other in range(rest.shape[2]):
                    there = rest[:, :, other]
                    added = self.pairs[draw, np.maximum(there, 0)][:, :, of]
                    values[:, :, takes] += np.where(there[:, :, None] >= 0, added, 0.0)
                    # A repeated candidate adds no effect. If a blank can replace it, or other
                    # candidates are left, it is not used twice.
                    twice = (there[:, :, None] == columns) & (columns >= 0)
                    values[twice] = np.nan
                values = np.where(np.isnan(values), again, values)
                values[:, :, columns == -2] = np.inf
                new = values.argmin(axis=2)
                prompts[:, :, at] = np.where(changed[:, at, None], new, prompts[:, :, at])
            if (prompts == before).all():
                break
        return prompts, self._values(prompts)

    def _rest(self, prompts: NDArray[np.int64], at: int) -> NDArray[np.int64]:
        """Return the features of all other positions, without repetitions, shape (D, S, n - 1)."""
        columns = self.columns[np.arange(self.space.prompt_len), prompts]
        rest = np.delete(columns, at, axis=2)
        rest = np.where(rest == -2, -1, rest)
        rest = np.sort(rest, axis=2)
        again = np.zeros(rest.shape, dtype=bool)
        again[:, :, 1:] = rest[:, :, 1:] == rest[:, :, :-1]
        return np.where(again, -1, rest)

    def _values(self, prompts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the sum of effects of features and pairs, shape (D, S)."""
        columns = self.columns[np.arange(self.space.prompt_len), prompts]
        present = np.zeros((*prompts.shape[:2], self.single.shape[1] + 2))
        np.put_along_axis(present, columns, 1.0, axis=2)
        present = present[:, :, :-2]
        single = np.einsum("dsf,df->ds", present, self.single)
        paired = np.einsum("dsf,dfg,dsg->ds", present, self.pairs, present, optimize=True)
        values: NDArray[np.float64] = single + 0.5 * paired
        return values


class _Pairs(NamedTuple):
    """The pairs of features that prompts have.

    Attributes:
        places: Index into a flat (F, F) matrix above its diagonal, shape (P, pairs), 0 for none.
        present: Whether there is a pair, shape (P, pairs).
    """

    places: NDArray[np.int64]
    present: NDArray[np.bool_]

    @classmethod
    def of(cls, present: NDArray[np.float64]) -> _Pairs:
        """Return the pairs of prompts with the given 0/1 features, (P, F)."""
        width = present.shape[1]
        counts = present.sum(axis=1).astype(np.int64)
        most = int(counts.max())
        own = np.full((len(present), most), width)
        own[np.arange(most) < counts[:, None]] = np.nonzero(present)[1]
        first, second = np.triu_indices(most, 1)
        there = own[:, second] < width  # the features of a prompt are ascending
        return cls(np.where(there, own[:, first] * width + own[:, second], 0), there)

    def totals(self, values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
        """Return the values of prompts, (D, P), summed over those with each pair, (D, size)."""
        rows = np.nonzero(self.present)[0]
        places = self.places[self.present]
        totals = [np.bincount(places, one[rows], minlength=size) for one in values]
        return np.array(totals, dtype=np.float64)


def _active(evaluator: Evaluator, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the features in the draws, ascending."""
    counts = evaluator.present.sum(axis=0)
    met = counts > 0
    known = np.flatnonzero(met)
    real = np.unique(evaluator.features.columns)
    others = real[(real >= 0) & ~met[real]]
    if len(known) + len(others) > _ACTIVE:
        known = known[np.argsort(-counts[known], kind="stable")][: _ACTIVE * 3 // 4]
        others = rng.permutation(others)[: _ACTIVE - len(known)]
    return np.sort(np.concatenate([known, others]))


def _renumbered(columns: NDArray[np.int64], active: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the columns renumbered among the active features; -1 stays, all others become -2."""
    place = np.full(columns.max() + 2, -2, dtype=np.int64)
    place[active] = np.arange(len(active))
    place[-1] = -1
    renumbered: NDArray[np.int64] = place[columns]
    return renumbered


def _noise_roots(evaluator: Evaluator) -> NDArray[np.float64]:
    """Square roots of the contrasts' precisions, shape (J, I, I)."""
    values, vectors = np.linalg.eigh(evaluator.contrasts.precision)
    roots: NDArray[np.float64] = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
    return roots


def _noise(
    evaluator: Evaluator,
    roots: NDArray[np.float64],
    weights: NDArray[np.float64],
    count: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Return noise with the precision of the losses as its covariance, shape (D, P)."""
    drawn = rng.normal(size=(*roots.shape[:2], count))
    noise = (roots @ drawn) * np.sqrt(weights)[:, None, None]
    return evaluator.batches.totals(noise).T
