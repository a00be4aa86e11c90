"""A pool of prompts whose losses came from different clients, ranked as if from one.

Clients differ: one's examples are harder for every prompt, another holds a single class. The model
of a mini-batch is, for each class and each label bias,

    loss of a prompt = the client's effect + the prompt's own + noise,

where the noise of a mean over b examples has the variance sigma^2 / b. Prompts that were seen
before measure the client's effect; what is left is added to the prompt's sum. What a prompt is
worth at its best bias is shrunk towards the other prompts by as much as it is noise (empirical
Bayes: the variances are estimated from the pool).

Classes are put together by their share among all clients seen so far, not by those that a prompt
happened to meet: a prompt that was only tried on positive reviews is no better for it. Where each
client holds other classes, a few of them say little of all: the share is shrunk to equal ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .calibration import BiasGrid
from .method import ClassLosses
from .state import Memory

__all__ = ["Judged", "Pool"]

_SHARE_SPREAD = 0.1
"""How far classes are thought to be from equally frequent, before clients say otherwise."""

_CLIENTS_AHEAD = 50
"""As many clients a prompt is thought to be for, beside those that were met: where clients differ,
their classes will be shared out otherwise."""

_PRIOR_DEGREES = 4.0
"""How many differences the first guess at the noise counts for."""

_LEAST_VARIANCE = 1e-12

_LEAST_SIGNAL = 0.2
"""Part of the variance between prompts that is believed in, however noisy they are."""

_DOUBT = 2.0
"""Standard deviations that a leader must be better by. Many prompts are tried and few are better
than none, so that of those which look better by one of them most are not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """What is known of prompts.

    Attributes:
        value: Expected loss at the prompt's best bias, shape (P,).
        spread: Standard deviation of what is not known of it, shape (P,).
    """

    value: NDArray[np.float64]
    spread: NDArray[np.float64]

    @property
    def pessimistic(self) -> NDArray[np.float64]:
        """What a prompt is at least worth, but for bad luck: one lucky client makes no leader."""
        return self.value + _DOUBT * self.spread

    @property
    def optimistic(self) -> NDArray[np.float64]:
        """What a prompt may be worth: who leads by this is worth another look."""
        return self.value - self.spread


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Distinct prompts with what was found of them.

    Attributes:
        prompts: Shape (P, n), int64.
        total: Sums over examples of each prompt's losses without the clients' effects, float64,
            shape (P, C, G); C and G are 1 where losses come neither by class nor by bias.
        count: Examples behind them, float64, shape (P, C).
        effect: Sums over examples of the clients' effects, shape (C, G).
        seen: Examples of each class in all mini-batches, shape (C,).
        shares: Sums over mini-batches of each class's share, and of its square; shape (2, C).
        noise: Sum of squared differences of one prompt's losses between clients, each weighted
            to estimate sigma^2, and how many they are, for each class; then the same of prompts'
            values at their best biases; shape (C + 1, 2).
        grid: The label biases; None without calibration.
    """

    prompts: NDArray[np.int64]
    total: NDArray[np.float64]
    count: NDArray[np.float64]
    effect: NDArray[np.float64]
    seen: NDArray[np.float64]
    shares: NDArray[np.float64]
    noise: NDArray[np.float64]
    grid: BiasGrid | None = None

    @classmethod
    def empty(cls, prompt_len: int, grid: BiasGrid | None = None) -> Self:
        """Return a pool without prompts."""
        points, classes = (1, 1) if grid is None else grid.biases.shape
        return cls(
            prompts=np.empty((0, prompt_len), dtype=np.int64),
            total=np.empty((0, classes, points)),
            count=np.empty((0, classes)),
            effect=np.zeros((classes, points)),
            seen=np.zeros(classes),
            shares=np.zeros((2, classes)),
            noise=np.zeros((classes + 1, 2)),
            grid=grid,
        )

    @classmethod
    def remembered(cls, memory: Memory, prompt_len: int, grid: BiasGrid | None = None) -> Self:
        """Return the pool that `memory` holds; an empty memory holds an empty pool.

        Raises:
            ValueError: It is not the memory of such a pool.
        """
        pool = cls.empty(prompt_len, grid)
        if not memory:
            return pool
        names = pool.memory().keys()
        if missing := sorted(names - memory.keys()):
            raise ValueError(f"not the memory of a pool: {', '.join(missing)} missing")
        pool = cls(grid=grid, **{name: memory[name] for name in names})
        size = len(pool.prompts)
        classes, points = pool.effect.shape if pool.effect.ndim == 2 else (0, 0)
        fits = (
            (points, classes) == ((1, 1) if grid is None else grid.biases.shape)
            and pool.prompts.shape == (size, prompt_len)
            and np.issubdtype(pool.prompts.dtype, np.integer)
            and pool.total.shape == (size, classes, points)
            and pool.count.shape == (size, classes)
            and pool.seen.shape == (classes,)
            and pool.shares.shape == (2, classes)
            and pool.noise.shape == (classes + 1, 2)
        )
        if not fits:
            raise ValueError(f"the pool's arrays do not fit prompts of {prompt_len} tokens")
        if not all(np.isfinite(memory[name]).all() for name in names):
            raise ValueError("the pool's numbers must be finite")
        if size and (pool.count.min() < 0 or pool.count.sum(axis=1).min() <= 0):
            raise ValueError("every prompt of a pool was scored at least once")
        if min(pool.seen.min(), pool.shares.min(), pool.noise.min()) < 0:
            raise ValueError("a pool's counts and variances are not negative")
        return pool

    def memory(self) -> dict[str, NDArray[np.generic]]:
        """Return the pool as a part of a state's memory."""
        return {
            "prompts": self.prompts,
            "total": self.total,
            "count": self.count,
            "effect": self.effect,
            "seen": self.seen,
            "shares": self.shares,
            "noise": self.noise,
        }

    # What a mini-batch adds

    def with_batch(self, prompts: NDArray[np.int64], losses: ClassLosses) -> Self:
        """Return the pool with one mini-batch's losses added.

        The client's effect is the mean of what known prompts' losses differ from their shrunken
        means, each weighted by N / (N + b), as the noise of N examples behind the one and b
        behind the other demands. Without a known prompt, it is the mean of all.

        Args:
            prompts: Shape (I, n); equal ones share a row.
            losses: Of these prompts, in their order.

        Raises:
            ValueError: The losses have other classes or biases than the pool.
        """
        if losses.means.shape[1:] != self.effect.shape:
            raise ValueError(
                f"losses must be of shape (I, {', '.join(map(str, self.effect.shape))}), "
                f"not {losses.means.shape}"
            )
        pool, rows = self._with_rows(prompts)
        effects = pool._effects(rows, losses)
        total, count = pool.total.copy(), pool.count.copy()
        for row, own in zip(rows, losses.means - effects, strict=True):
            total[row] += losses.counts[:, None] * own
            count[row] += losses.counts
        return replace(
            pool._met(losses, effects),
            total=total,
            count=count,
            noise=pool.noise + pool._differences(rows, losses),
        )

    def alone(self, prompts: NDArray[np.int64], losses: ClassLosses) -> NDArray[np.float64]:
        """Return what the prompts of a mini-batch are worth by it alone, unshrunk; shape (I,).

        The client's effect is taken out; a class that did not occur tells nothing.
        """
        pool, rows = self._with_rows(prompts)
        effects = pool._effects(rows, losses)
        own = np.where(losses.counts[:, None] > 0, losses.means - effects, 0.0)
        after = pool._met(losses, effects)
        return after.lowest(after._mixed(own))

    def _met(self, losses: ClassLosses, effects: NDArray[np.float64]) -> Self:
        """The pool with one more client known, its prompts left as they are."""
        share = losses.counts / losses.counts.sum()
        return replace(
            self,
            effect=self.effect + losses.counts[:, None] * effects,
            seen=self.seen + losses.counts,
            shares=self.shares + np.stack([share, share**2]),
        )

    def _with_rows(self, prompts: NDArray[np.int64]) -> tuple[Self, list[int]]:
        row_of = {prompt.tobytes(): row for row, prompt in enumerate(self.prompts)}
        rows = [row_of.setdefault(prompt.tobytes(), len(row_of)) for prompt in prompts]
        new = len(row_of) - len(self.prompts)
        distinct = np.pad(self.prompts, ((0, new), (0, 0)))
        distinct[rows] = prompts
        total = np.pad(self.total, ((0, new), (0, 0), (0, 0)))
        count = np.pad(self.count, ((0, new), (0, 0)))
        return replace(self, prompts=distinct, total=total, count=count), rows

    def _effects(self, rows: list[int], losses: ClassLosses) -> NDArray[np.float64]:
        own = self._own()
        effects = np.zeros(self.effect.shape)
        for c, examples in enumerate(losses.counts):
            if not examples:
                continue
            weight = self.count[rows, c] / (self.count[rows, c] + examples)
            if weight.any():
                surprise = losses.means[:, c] - own[rows, c]
                effects[c] = (weight[:, None] * surprise).sum(axis=0) / weight.sum()
            else:
                effects[c] = losses.means[:, c].mean(axis=0)
        return effects

    def _differences(self, rows: list[int], losses: ClassLosses) -> NDArray[np.float64]:
        """What a mini-batch says of the noise: how known prompts differ from what was known."""
        found = np.zeros(self.noise.shape)
        counts, point = losses.counts, self._usual_point
        for c, examples in enumerate(counts):
            known = np.array([place for place, row in enumerate(rows) if self.count[row, c] > 0])
            if examples and len(known) > 1:
                which = np.array(rows)[known]
                left = losses.means[known, c, point] - self._means()[which, c, point]
                found[c] = _estimate(left, 1.0 / examples + 1.0 / self.count[which, c])
        # Of values: each prompt at its own best bias, which must be known well enough for that.
        enough = (self.count[rows] >= 2 * counts).all(axis=1) & (counts.sum() > 0)
        known = np.flatnonzero(enough)
        if len(known) > 1:
            which = np.array(rows)[known]
            points = self._points()[which]
            share = np.where(counts > 0, self.class_share, 0.0)
            left = losses.means[known, :, points] - self._means()[which, :, points]
            behind = 1.0 / np.maximum(counts, 1) + 1.0 / np.maximum(self.count[which], 1.0)
            found[-1] = _estimate((share * left).sum(axis=1), (share**2 * behind).sum(axis=1))
        return found

    # What is known

    @property
    def class_share(self) -> NDArray[np.float64]:
        """The part of all examples that each class has, shape (C,)."""
        equal = 1.0 / len(self.seen)
        batches = self.shares[0].sum()  # each has shares that sum to 1
        if not batches:
            return np.full(self.seen.shape, equal)
        mean, square = self.shares / batches
        # A few clients who by chance are all alike do not show how clients differ: what their mean
        # is worth is told by how far they are from equal shares.
        from_equal = square - 2.0 * equal * mean + equal**2
        varies = float((from_equal / batches + (square - mean**2) / _CLIENTS_AHEAD).max())
        believed = _SHARE_SPREAD**2 / (_SHARE_SPREAD**2 + varies)
        result: NDArray[np.float64] = equal + believed * (mean - equal)
        return result

    @property
    def usual(self) -> NDArray[np.float64]:
        """Losses of the average prompt on the average client, shape (C, G)."""
        result: NDArray[np.float64] = self.effect / np.maximum(self.seen, 1.0)[:, None]
        return result

    @property
    def average(self) -> NDArray[np.float64]:
        """The same over all classes, shape (G,)."""
        result: NDArray[np.float64] = (self.class_share[:, None] * self.usual).sum(axis=0)
        return result

    def variances(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return sigma^2 of one example and the prompts' variance, at the usual bias; each (C,)."""
        noise, signal = np.ones(self.seen.shape), np.ones(self.seen.shape)
        for c in range(len(self.seen)):
            seen = self.count[:, c] > 0
            if seen.sum() < 2:
                continue
            means = self._means()[seen, c, self._usual_point]
            noise[c], signal[c] = self._apart(c, means, 1.0 / self.count[seen, c])
        return noise, signal

    def _apart(
        self, row: int, values: NDArray[np.float64], per_noise: NDArray[np.float64]
    ) -> tuple[float, float]:
        """The variance of one example's noise, and what prompts vary beyond it.

        Args:
            row: Of `noise`.
            values: What differs between prompts, shape (P,).
            per_noise: The noise of each of them in that of one example, shape (P,).
        """
        between, usual = float(np.var(values)), float(per_noise.mean())
        squares, degrees = self.noise[row]
        # Until prompts have met several clients, half of what tells them apart is thought noise.
        guess = 0.5 * between / usual
        noise = (squares + _PRIOR_DEGREES * guess) / (degrees + _PRIOR_DEGREES)
        signal = max(between - noise * usual, _LEAST_SIGNAL * between)
        # Prompts that do not differ at all have a variance of 0, which nothing can be divided by.
        return max(noise, _LEAST_VARIANCE), max(signal, _LEAST_VARIANCE)

    def judged(self) -> Judged:
        """Return the value of each prompt and how sure it is.

        The best of many that were looked at once looks better than it is: values are shrunk
        towards their mean, by the part of what they vary that is noise. Of a prompt that some
        class has not met nothing is believed: what helps one class mostly hurts another.
        """
        value = self.lowest(self._mixed(self._means()))
        known = (self.count[:, self.seen > 0] > 0).all(axis=1)
        if known.sum() < 2:
            return Judged(value=value, spread=np.ones(len(value)))
        per_noise = (self.class_share**2 / np.maximum(self.count, 1.0)).sum(axis=1)
        noise, signal = self._apart(-1, value[known], per_noise[known])
        believed = np.where(known, signal / (signal + noise * per_noise), 0.0)
        mean = float(value[known].mean())
        return Judged(
            value=mean + believed * (value - mean), spread=np.sqrt(signal * (1.0 - believed))
        )

    def bias(self, row: int) -> NDArray[np.float64] | None:
        """Return the best label bias of a prompt, shape (C,); None without calibration."""
        if self.grid is None:
            return None
        if not self.seen.all():
            return np.zeros(len(self.seen))
        return self.grid.best(self._mixed(self._means())[row])

    def ranked(self, size: int, *, keep: int | None = None) -> Self:
        """Return the `size` prompts with the best pessimistic value, best first; ties keep order.

        Args:
            size: How many.
            keep: A row that stays, whatever its rank.
        """
        order = np.argsort(self.judged().pessimistic, kind="stable")
        chosen = order[:size]
        if keep is not None and keep not in chosen:
            chosen[-1] = keep
        return replace(
            self, prompts=self.prompts[chosen], total=self.total[chosen], count=self.count[chosen]
        )

    def _own(self) -> NDArray[np.float64]:
        """Each prompt's own part of its loss, as far as it is believed at once; (P, C, G).

        What was scored on one client counts half: it was picked for looking good.
        """
        usual = self.seen / max(self.shares[0].sum(), 1.0)
        believed = self.count / np.maximum(self.count + usual, 1.0)
        own: NDArray[np.float64] = self._means() * believed[:, :, None]
        return own

    def _means(self) -> NDArray[np.float64]:
        means: NDArray[np.float64] = self.total / np.maximum(self.count, 1.0)[:, :, None]
        return means

    def _mixed(self, own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Losses over all classes, shape (P, G)."""
        mixed: NDArray[np.float64] = (self.class_share[:, None] * (self.usual[None] + own)).sum(
            axis=1
        )
        return mixed

    def lowest(self, mixed: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what curves over the biases, shape (P, G), are at their best; shape (P,)."""
        if self.grid is None or not self.seen.all():
            unbiased: NDArray[np.float64] = mixed[:, self._unbiased]
            return unbiased
        return self.grid.lowest(mixed)[0]

    @property
    def _unbiased(self) -> int:
        """The bias of nothing; a class that nobody has shown would make the best one endless."""
        return 0 if self.grid is None else len(self.grid.biases) // 2

    @property
    def _usual_point(self) -> int:
        """The grid's point that suits the average prompt best."""
        if not self.seen.all():
            return self._unbiased
        return int(self.average.argmin())

    def _points(self) -> NDArray[np.int64]:
        """The grid's point that suits each prompt best, as it was found; shape (P,)."""
        if self.grid is None or not self.seen.all():
            return np.full(len(self.prompts), self._unbiased)
        return self.grid.lowest(self._mixed(self._means()))[1]


def _estimate(left: NDArray[np.float64], per_noise: NDArray[np.float64]) -> tuple[float, int]:
    """The sum of squared differences that estimate the noise, and their number.

    What all prompts have in common is the client's; one degree of freedom goes into that.
    """
    return float(((left - left.mean()) ** 2 / per_noise).sum()), len(left) - 1
