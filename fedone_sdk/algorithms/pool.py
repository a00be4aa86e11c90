"""A pool of prompts whose losses came from different clients, ranked as if from one.

Clients differ: one's examples are harder for every prompt, another holds a single class. The model
of a mini-batch is, for each class and each label bias,

    loss of a prompt = the client's effect + the prompt's own + noise,

where the noise of a mean over b examples has the variance sigma^2 / b. Effects and own parts are
those of least squares over all losses that are remembered, so that prompts are compared where the
same client met both, or over prompts that link them. (Taking out each client's effect as it comes
would be simpler, and wrong: a leader got there by luck, and what it lacks on the next client would
be laid to that client's charge.) What a prompt is worth at its best bias is shrunk towards the
other prompts by as much as it is noise (empirical Bayes: the variances are estimated from the
pool). A leader must be better for sure, and a prompt is the less sure the more it changes answers
and the more its own losses disagree: what sways some examples and leaves others alone looks good or
bad by which of them it met.

Clients may lie. A mini-batch whose losses disagree with those of others by more than they do among
each other counts less, by as much: noise is thought to be from a t distribution with a scale of its
own for each mini-batch (Lange, Little and Taylor 1989), which least squares with the weights that
the last residuals deserve fit step by step.

Classes are put together by their share among all clients seen so far, not by those that a prompt
happened to meet: a prompt that was only tried on positive reviews is no better for it. Where each
client holds other classes, a few of them say little of all: the share is shrunk to equal ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .calibration import BiasGrid
from .method import ClassLosses
from .state import Memory

__all__ = ["Judged", "LOOKS", "Pool"]

LOOKS = 4
"""Losses that are remembered, for each prompt that is: leaders have more, most others one."""

_AHEAD = 0.5
"""Mini-batches that a prompt is thought to have had before its first, as good as the average
prompt: what was scored on one client was picked for looking good there."""

_SHARE_SPREAD = 0.1
"""How far classes are thought to be from equally frequent, before clients say otherwise."""

_CLIENTS_AHEAD = 50
"""As many clients a prompt is thought to be for, beside those that were met: where clients differ,
their classes will be shared out otherwise."""

_BARELY = 0.001
"""The same where they are not to be drawn: just what makes them the only solution."""

_SWAYS = 0.2
"""Part of a prompt's own part that differs between usual mini-batches, as a standard deviation.

About what RoBERTa shows on mini-batches of 32 rows of SST-2."""

_TAILS = 4.0
"""Degrees of freedom of the t distribution that residuals are thought to have: the usual choice."""

_SETTLED, _MOST_TURNS = 0.01, 20
"""What trust may still change by when it is good enough, and how often it is estimated at most."""

_TURNS = 6
"""How often noise is told apart from what varies beside it."""

_PRIOR_DEGREES = 4.0
"""How many differences the first guess at the noise counts for."""

_LEAST_VARIANCE = 1e-12

_LEAST_SIGNAL = 0.2
"""Part of the variance between prompts that is believed in, however noisy they are."""

_CONFIRMED = 1.5
"""Mini-batches, as they are trusted, that must have met a leader: of two that disagree, one at most
is trusted."""

_DOUBT = 2.0
"""Standard deviations that a leader must be better by. Many prompts are tried and few are better
than none, so that of those which look better by one of them most are not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """What is known of prompts.

    Attributes:
        value: Expected loss at the prompt's best bias, shape (P,).
        spread: Standard deviation of what is not known of it, were all prompts' losses as noisy,
            shape (P,).
        pessimistic: What a prompt is at least worth, but for bad luck, by the noise of its own
            losses, shape (P,): one lucky client makes no leader.
    """

    value: NDArray[np.float64]
    spread: NDArray[np.float64]
    pessimistic: NDArray[np.float64]

    @property
    def optimistic(self) -> NDArray[np.float64]:
        """What a prompt may be worth: who leads by this is worth another look."""
        return self.value - self.spread


class _Parts(NamedTuple):
    """What losses are made of.

    Attributes:
        own: Of each prompt, beside the average one, shape (P, C, G).
        effects: Of each mini-batch's client, shape (J, C, G).
        trust: How much each mini-batch counts, in (0, 1], shape (J,).
    """

    own: NDArray[np.float64]
    effects: NDArray[np.float64]
    trust: NDArray[np.float64]


class _Noise(NamedTuple):
    """Residuals that estimate sigma^2.

    Attributes:
        squares: The sum of their squares, each over the noise that it has in that of one example.
        degrees: Of freedom.
    """

    squares: float
    degrees: float


# No slots: estimates are kept with the pool they are of.
@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Distinct prompts with the losses that are remembered of them.

    Attributes:
        prompts: Shape (P, n), int64.
        rows: Which prompt a loss is of, shape (E,), int64.
        batches: Which mini-batch it is from, shape (E,), int64, rising.
        means: Mean losses over the examples of a class, were a bias added, shape (E, C, G),
            float32; C and G are 1 where losses come neither by class nor by bias.
        examples: Examples of each class in those mini-batches, shape (J, C), int64.
        shares: Sums over all mini-batches of each class's share, and of its square; shape (2, C).
        grid: The label biases; None without calibration.
        blank: The token of which "no prompt" is made; None where the vocabulary has none.
    """

    prompts: NDArray[np.int64]
    rows: NDArray[np.int64]
    batches: NDArray[np.int64]
    means: NDArray[np.float32]
    examples: NDArray[np.int64]
    shares: NDArray[np.float64]
    grid: BiasGrid | None = None
    blank: int | None = None

    @classmethod
    def empty(cls, prompt_len: int, grid: BiasGrid | None = None, blank: int | None = None) -> Self:
        """Return a pool without prompts."""
        points, classes = (1, 1) if grid is None else grid.biases.shape
        return cls(
            prompts=np.empty((0, prompt_len), dtype=np.int64),
            rows=np.empty(0, dtype=np.int64),
            batches=np.empty(0, dtype=np.int64),
            means=np.empty((0, classes, points), dtype=np.float32),
            examples=np.empty((0, classes), dtype=np.int64),
            shares=np.zeros((2, classes)),
            grid=grid,
            blank=blank,
        )

    @classmethod
    def remembered(
        cls,
        memory: Memory,
        prompt_len: int,
        grid: BiasGrid | None = None,
        blank: int | None = None,
    ) -> Self:
        """Return the pool that `memory` holds; an empty memory holds an empty pool.

        Raises:
            ValueError: It is not the memory of such a pool.
        """
        pool = cls.empty(prompt_len, grid, blank)
        if not memory:
            return pool
        names = pool.memory().keys()
        if missing := sorted(names - memory.keys()):
            raise ValueError(f"not the memory of a pool: {', '.join(missing)} missing")
        own = {name: memory[name] for name in names}
        classes = len(pool.shares[0])
        # By their numbers, as it may come from a client: what has no rows at all has no length.
        size, looks = own["prompts"].size // prompt_len, own["rows"].size
        clients = own["examples"].size // classes
        shapes = {
            "prompts": (size, prompt_len),
            "rows": (looks,),
            "batches": (looks,),
            "means": (looks, *pool.means.shape[1:]),
            "examples": (clients, classes),
            "shares": (2, classes),
        }
        fits = all(
            own[name].shape == shape and own[name].dtype.kind == getattr(pool, name).dtype.kind
            for name, shape in shapes.items()
        )
        if not fits:
            raise ValueError(f"the pool's arrays do not fit prompts of {prompt_len} tokens")
        if not all(np.isfinite(array).all() for array in own.values()):
            raise ValueError("the pool's numbers must be finite")
        if not (_all_there(own["rows"], size) and _all_there(own["batches"], clients)):
            raise ValueError("every prompt and mini-batch of a pool has a loss")
        if (np.diff(own["batches"]) < 0).any():
            raise ValueError("a pool's mini-batches stand in their order")
        if len(np.unique(own["prompts"], axis=0)) != size:
            raise ValueError("the prompts of a pool differ")
        if own["examples"].min(initial=0) < 0 or own["shares"].min() < 0:
            raise ValueError("a pool's counts are not negative")
        if not own["examples"].any(axis=1).all():
            raise ValueError("every mini-batch of a pool has examples")
        return cls(grid=grid, blank=blank, **own)

    def memory(self) -> dict[str, NDArray[np.generic]]:
        """Return the pool as a part of a state's memory."""
        return {
            "prompts": self.prompts,
            "rows": self.rows,
            "batches": self.batches,
            "means": self.means,
            "examples": self.examples,
            "shares": self.shares,
        }

    # What is remembered

    def with_batch(self, prompts: NDArray[np.int64], losses: ClassLosses) -> Self:
        """Return the pool with one mini-batch's losses added.

        Args:
            prompts: Shape (I, n). Equal ones have equal losses there, and count once.
            losses: Of these prompts, in their order.

        Raises:
            ValueError: The losses have other classes or biases than the pool.
        """
        if losses.means.shape[1:] != self.means.shape[1:]:
            raise ValueError(
                f"losses must be of shape (I, {', '.join(map(str, self.means.shape[1:]))}), "
                f"not {losses.means.shape}"
            )
        row_of = {prompt.tobytes(): row for row, prompt in enumerate(self.prompts)}
        rows = [row_of.setdefault(prompt.tobytes(), len(row_of)) for prompt in prompts]
        distinct = np.pad(self.prompts, ((0, len(row_of) - len(self.prompts)), (0, 0)))
        distinct[rows] = prompts
        share = losses.counts / losses.counts.sum()
        met, first = np.unique(rows, return_index=True)
        return replace(
            self,
            prompts=distinct,
            rows=np.append(self.rows, met),
            batches=np.append(self.batches, np.full(len(met), len(self.examples))),
            means=np.concatenate([self.means, losses.means[first].astype(np.float32)]),
            examples=np.concatenate([self.examples, losses.counts[None]]),
            shares=self.shares + np.stack([share, share**2]),
        )

    def ranked(self, size: int) -> Self:
        """Return the leader and the prompts with the next best pessimistic values, in this order.

        The reference stays, whatever its rank.

        Ties keep their order. Of more than `LOOKS` times `size` losses the oldest are forgotten,
        and prompts with them that have no others.

        Args:
            size: How many prompts, at most.
        """
        leader = self.leader()
        order = np.argsort(self.judged.pessimistic, kind="stable")
        chosen = np.concatenate([[leader], order[order != leader]])[:size]
        if self.reference is not None and self.reference not in chosen:
            chosen[-1] = self.reference
        looks = np.flatnonzero(np.isin(self.rows, chosen))[-LOOKS * size :]
        chosen = chosen[np.isin(chosen, self.rows[looks])]
        place = np.zeros(len(self.prompts), dtype=np.int64)
        place[chosen] = np.arange(len(chosen))
        batches, renumbered = np.unique(self.batches[looks], return_inverse=True)
        return replace(
            self,
            prompts=self.prompts[chosen],
            rows=place[self.rows[looks]],
            batches=renumbered,
            means=self.means[looks],
            examples=self.examples[batches],
        )

    # What is known of clients

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Which classes any client has shown, shape (C,)."""
        seen: NDArray[np.bool_] = self.shares[0] > 0.0
        return seen

    @cached_property
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

    @cached_property
    def _looks(self) -> NDArray[np.float64]:
        """How often each prompt was in each mini-batch, shape (P, J)."""
        looks = np.zeros((len(self.prompts), len(self.examples)))
        np.add.at(looks, (self.rows, self.batches), 1.0)
        return looks

    @cached_property
    def count(self) -> NDArray[np.float64]:
        """Examples of each class behind what is known of each prompt, as trusted, shape (P, C)."""
        count: NDArray[np.float64] = self._looks @ self._trusted
        return count

    @property
    def trust(self) -> NDArray[np.float64]:
        """How much each mini-batch counts, in (0, 1], shape (J,)."""
        return self._parts.trust

    @property
    def _trusted(self) -> NDArray[np.float64]:
        """Examples of each class in each mini-batch, as trusted, shape (J, C)."""
        return self.trust[:, None] * self.examples

    @cached_property
    def _parts(self) -> _Parts:
        """Least squares, again and again with the trust that the last residuals deserve."""
        trust = np.ones(len(self.examples))
        for _ in range(_MOST_TURNS):
            parts = self._least_squares(trust)
            trust = self._deserved(parts)
            if np.abs(trust - parts.trust).max(initial=0.0) < _SETTLED:
                break
        return self._shrunk(self._least_squares(trust))

    def _shrunk(self, parts: _Parts) -> _Parts:
        """The parts with own ones drawn to 0 by `_AHEAD` mini-batches.

        Only they, and after all else: a client's effect would take up what a bad prompt is denied,
        and make all that met it there look good; and what differs much would seem to disagree with
        itself.
        """
        own = np.zeros_like(parts.own)
        for c, told in enumerate(self.examples.T.astype(np.float64)):
            if told.any():
                examples = parts.trust * told
                beside = self.means[:, c] - parts.effects[self.batches, c]
                np.add.at(own[:, c], self.rows, examples[self.batches, None] * beside)
                own[:, c] /= self._behind(examples, told, _AHEAD)
        return parts._replace(own=own)

    def _behind(
        self, examples: NDArray[np.float64], told: NDArray[np.float64], ahead: float
    ) -> NDArray[np.float64]:
        """Examples of a class behind each prompt, and those of `ahead` mini-batches; (P, 1)."""
        behind: NDArray[np.float64] = self._looks @ examples + ahead * told[told > 0].mean()
        return behind[:, None]

    def _least_squares(self, trust: NDArray[np.float64]) -> _Parts:
        """Own parts and clients' effects, as trusted as the mini-batches are."""
        shape = self.means.shape[1:]
        own = np.zeros((len(self.prompts), *shape))
        effects = np.zeros((len(self.examples), *shape))
        for c, told in enumerate(self.examples.T.astype(np.float64)):
            if not told.any():
                continue
            examples = trust * told
            weighted = examples[self.batches, None] * self.means[:, c]
            of_prompt = np.zeros((len(own), shape[1]))
            of_client = np.zeros((len(effects), shape[1]))
            np.add.at(of_prompt, self.rows, weighted)
            np.add.at(of_client, self.batches, weighted)
            links = self._looks * examples
            behind = self._behind(examples, told, _BARELY)
            # The normal equations of the effects, once own parts are what these leave.
            matrix = np.diag(links.sum(axis=0)) - links.T @ (links / behind)
            absent = np.flatnonzero(told == 0.0)
            matrix[absent, absent] = 1.0  # no such class, no effect
            effects[:, c] = np.linalg.solve(matrix, of_client - links.T @ (of_prompt / behind))
            own[:, c] = (of_prompt - links @ effects[:, c]) / behind
        return _Parts(own, effects, trust)

    def _deserved(self, parts: _Parts) -> NDArray[np.float64]:
        """The trust that mini-batches deserve by how far they agree with the others, shape (J,)."""
        squares, degrees = np.zeros((2, len(self.examples)))
        residuals = self._residuals_of(parts)
        for c, told in enumerate(self.examples.T.astype(np.float64)):
            telling = self._telling(told[self.batches] > 0)
            rows, batches = self.rows[telling], self.batches[telling]
            examples = told[batches]
            # Of a prompt that others hardly met, or a client that hardly met others' prompts, the
            # own part and the effect follow the loss, and leave little to be told by.
            weights = parts.trust[batches] * examples
            of_prompt = np.bincount(rows, weights, minlength=len(self.prompts))[rows]
            of_client = np.bincount(batches, weights, minlength=len(squares))[batches]
            free = (1.0 - weights / of_prompt) * (1.0 - weights / of_client)
            if not free.sum() > 0.0:
                continue
            square = examples[:, None] * residuals[telling, c] ** 2
            swayed = self._sway[c] * parts.own[rows, c] ** 2
            trusted = parts.trust[batches, None] * square
            usual, freedom = _without(swayed, trusted, free[:, None])
            square /= usual / freedom + swayed
            np.add.at(squares, batches, square.mean(axis=1))
            np.add.at(degrees, batches, free)
        deserved: NDArray[np.float64] = (_TAILS + degrees) / (_TAILS + squares)
        return np.minimum(deserved, 1.0)

    @cached_property
    def _sway(self) -> NDArray[np.float64]:
        """The variance between examples of what a prompt changes, over its square; shape (C,)."""
        usual = self.examples.sum(axis=0) / np.maximum((self.examples > 0).sum(axis=0), 1)
        result: NDArray[np.float64] = usual * _SWAYS**2
        return result

    @property
    def own(self) -> NDArray[np.float64]:
        """What each prompt's losses are beside those of the average prompt, shape (P, C, G)."""
        return self._parts.own

    @cached_property
    def usual(self) -> NDArray[np.float64]:
        """Losses of the average prompt on the average client, shape (C, G)."""
        examples = self._trusted[:, :, None]
        total = (examples * self._parts.effects).sum(axis=0)
        behind = examples.sum(axis=0)
        result: NDArray[np.float64] = total / np.where(behind > 0.0, behind, 1.0)
        return result

    @property
    def average(self) -> NDArray[np.float64]:
        """The same over all classes, shape (G,)."""
        result: NDArray[np.float64] = (self.class_share[:, None] * self.usual).sum(axis=0)
        return result

    # What is known of prompts

    @cached_property
    def reference(self) -> int | None:
        """The row of "no prompt", which the others are held to; None where there is none."""
        rows = np.flatnonzero((self.prompts == self.blank).all(axis=1))
        return int(rows[0]) if len(rows) else None

    def variances(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return sigma^2 of one example and the prompts' variance, at the usual bias; each (C,)."""
        point = int(self.average.argmin()) if self.seen.all() else self._unbiased
        noise, signal = np.ones(self.seen.shape), np.ones(self.seen.shape)
        for c in range(len(self.seen)):
            known = self.count[:, c] > 0
            if known.sum() < 2:
                continue
            examples = self._trusted[self.batches, c]
            residuals = self._residuals[:, c, point]
            found = self._noise(residuals, examples > 0, _one_over(examples))
            noise[c], signal[c] = _apart(
                found, self.own[known, c, point], 1.0 / self.count[known, c]
            )
        return noise, signal

    @cached_property
    def judged(self) -> Judged:
        """The value of each prompt and how sure it is.

        The best of many that were looked at once looks better than it is: values are shrunk
        towards their mean, by the part of what they vary that is noise. Of a prompt that some
        class has not met nothing is believed: what helps one class mostly hurts another.
        """
        raw, points = self._lowest(self._mixed(self.own))
        known = np.all(self.count[:, self.seen] > 0, axis=1)
        if known.sum() < 2:
            return Judged(value=raw, spread=np.ones(len(raw)), pessimistic=raw + _DOUBT)
        # A value's residual: of all classes, at the bias that suits the prompt best.
        squared = self.class_share**2
        examples = self._trusted[self.batches]
        at_best = self._residuals[np.arange(len(self.rows)), :, points[self.rows]]
        per_noise = np.where(examples > 0, squared * _one_over(examples), 0.0)
        residuals = np.where(examples > 0, self.class_share * at_best, 0.0).sum(axis=1)
        # No prompt changes nothing; where there is none, the average prompt has to do.
        changed = self.own if self.reference is None else self.own - self.own[self.reference]
        sways = self._sway * changed[np.arange(len(raw)), :, points] ** 2
        swayed = (per_noise * sways[self.rows]).sum(axis=1)
        found = self._noise(residuals, known[self.rows], per_noise.sum(axis=1), swayed)
        behind = squared * _one_over(self.count)
        noise, signal = _apart(found, raw[known], behind[known].sum(axis=1))
        value, spread = _believed(raw, noise * behind.sum(axis=1), signal, known)
        # Who leads is asked with the noise of each prompt's own losses.
        expected = noise * per_noise.sum(axis=1) + swayed
        unsure = (behind * (noise + sways)).sum(axis=1)
        unsure *= self._disagreement(residuals, expected, known)
        careful, doubt = _believed(raw, unsure, signal, known)
        return Judged(value=value, spread=spread, pessimistic=careful + _DOUBT * doubt)

    def _disagreement(
        self,
        residuals: NDArray[np.float64],
        expected: NDArray[np.float64],
        known: NDArray[np.bool_],
    ) -> NDArray[np.float64]:
        """How much noisier each prompt's own losses are than is expected of them, shape (P,).

        Args:
            residuals: Of each loss, shape (E,).
            expected: Their variances, shape (E,).
            known: Which prompts are to be judged, shape (P,).
        """
        telling = self._telling(known[self.rows])
        rows, trust = self.rows[telling], self.trust[self.batches[telling]]
        off = np.bincount(rows, trust * residuals[telling] ** 2 / expected[telling], len(known))
        degrees = np.maximum(np.bincount(rows, trust, len(known)) - 1.0, 0.0)
        noisier: NDArray[np.float64] = (_PRIOR_DEGREES + off) / (_PRIOR_DEGREES + degrees)
        return noisier

    def leader(self) -> int:
        """Return the row with the best pessimistic value of those that two mini-batches agree on.

        What one client says alone, of a prompt or of a class, makes no leader: until there are
        such rows the reference leads, and without one whatever looks best.
        """
        values = self.judged.pessimistic
        confirmed = np.minimum(self._looks, 1.0) @ self.trust >= _CONFIRMED
        if confirmed.any():
            return int(np.where(confirmed, values, np.inf).argmin())
        return int(values.argmin()) if self.reference is None else self.reference

    def bias(self, row: int) -> NDArray[np.float64] | None:
        """Return the best label bias of a prompt, shape (C,); None without calibration."""
        if self.grid is None:
            return None
        if not self.seen.all():
            return np.zeros(len(self.seen))
        return self.grid.best(self._mixed(self.own)[row])

    def lowest(self, mixed: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what curves over the biases, shape (P, G), are at their best; shape (P,)."""
        return self._lowest(mixed)[0]

    def _lowest(self, mixed: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The same, and which of the grid's points is nearest."""
        if self.grid is None or not self.seen.all():
            return mixed[:, self._unbiased], np.full(len(mixed), self._unbiased)
        return self.grid.lowest(mixed)

    def _mixed(self, own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Losses over all classes, shape (P, G)."""
        mixed: NDArray[np.float64] = (self.class_share[:, None] * (self.usual + own)).sum(axis=1)
        return mixed

    @property
    def _unbiased(self) -> int:
        """The bias of nothing; a class that nobody has shown would make the best one endless."""
        return 0 if self.grid is None else len(self.grid.biases) // 2

    @cached_property
    def _residuals(self) -> NDArray[np.float64]:
        return self._residuals_of(self._parts)

    def _residuals_of(self, parts: _Parts) -> NDArray[np.float64]:
        """What neither client nor prompt explains of each loss, shape (E, C, G)."""
        residuals: NDArray[np.float64] = (
            self.means - parts.effects[self.batches] - parts.own[self.rows]
        )
        return residuals

    def _telling(self, usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which of the usable losses tell something by their residuals, shape (E,).

        A prompt that was met once explains its loss.
        """
        met = np.bincount(self.rows[usable], minlength=len(self.prompts))
        telling: NDArray[np.bool_] = usable & (met[self.rows] > 1)
        return telling

    def _noise(
        self,
        residuals: NDArray[np.float64],
        usable: NDArray[np.bool_],
        per_noise: NDArray[np.float64],
        swayed: NDArray[np.float64] | float = 0.0,
    ) -> _Noise:
        """What residuals say of the noise.

        Args:
            residuals: Shape (E,).
            usable: Which of them, shape (E,).
            per_noise: Their noise in that of one example, shape (E,).
            swayed: What they vary beside it, shape (E,).
        """
        telling = self._telling(usable)
        if not telling.any():
            return _Noise(squares=0.0, degrees=0.0)
        prompts, batches = np.unique(self.rows[telling]), np.unique(self.batches[telling])
        explained = len(prompts) + len(batches) - 1
        degrees = max(int(telling.sum()) - explained, 0)
        beside = np.broadcast_to(swayed, residuals.shape)[telling] / per_noise[telling]
        squares = residuals[telling] ** 2 / per_noise[telling]
        found, freedom = _without(beside, squares, np.full(len(squares), degrees / len(squares)))
        return _Noise(squares=float(found), degrees=float(freedom))


def _without(
    swayed: NDArray[np.float64], squares: NDArray[np.float64], free: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Squared residuals without what varies beside the noise, and their degrees of freedom.

    The noise is their quotient, found step by step: residuals count less by how much of what is
    expected of them is no noise, so that a few strong prompts do not make all others look noisy.

    Args:
        swayed: The variance beside the noise of each residual, shape (E,) or (E, G).
        squares: The squared residuals, of the same shape.
        free: Their degrees of freedom; broadcasts to the same shape.

    Returns:
        Both summed over the residuals, of shape () or (G,).
    """
    weights = np.ones_like(squares)
    for _ in range(_TURNS):
        found = np.maximum((weights**2 * squares).sum(axis=0), _LEAST_VARIANCE)
        freedom = np.maximum((weights * free).sum(axis=0), _LEAST_VARIANCE)
        noise = found / freedom
        weights = noise / (noise + swayed)
    return found, freedom


def _one_over(examples: NDArray[np.float64]) -> NDArray[np.float64]:
    """The noise of a mean over examples in that of one; as of one where there is none."""
    noise: NDArray[np.float64] = 1.0 / np.where(examples > 0.0, examples, 1.0)
    return noise


def _all_there(numbers: NDArray[np.int64], count: int) -> bool:
    """Whether these are the numbers from 0 to below `count`, and none is missing."""
    if not numbers.size:
        return count == 0
    known = numbers.min() >= 0 and numbers.max() < count
    return bool(known and np.bincount(numbers, minlength=count).all())


def _believed(
    raw: NDArray[np.float64],
    unsure: NDArray[np.float64],
    signal: float,
    known: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What is to be expected of prompts, and the standard deviation of what is not known.

    Args:
        raw: What losses say of them, shape (P,).
        unsure: The variance of its noise, shape (P,).
        signal: The variance between prompts.
        known: Of which prompts anything is believed, shape (P,).
    """
    believed = np.where(known, signal / (signal + unsure), 0.0)
    mean = float(raw[known].mean())
    return mean + believed * (raw - mean), np.sqrt(signal * (1.0 - believed))


def _apart(
    found: _Noise, values: NDArray[np.float64], per_noise: NDArray[np.float64]
) -> tuple[float, float]:
    """The variance of one example's noise, and what prompts vary beyond it.

    Args:
        found: What residuals say of it.
        values: What differs between prompts, shape (P,).
        per_noise: The noise of each of them in that of one example, shape (P,).
    """
    between, usual = float(np.var(values)), float(per_noise.mean())
    # Until prompts have met several clients, half of what tells them apart is thought noise.
    guess = 0.5 * between / usual
    noise = (found.squares + _PRIOR_DEGREES * guess) / (found.degrees + _PRIOR_DEGREES)
    signal = max(between - noise * usual, _LEAST_SIGNAL * between)
    # Prompts that do not differ at all have a variance of 0, which nothing can be divided by.
    return max(noise, _LEAST_VARIANCE), max(signal, _LEAST_VARIANCE)
