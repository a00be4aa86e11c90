"""What searches over whole prompts share: a pool, leaders looked at again, a race at the end."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .calibration import BiasGrid
from .method import Candidates, ClassLosses
from .pool import LOOKS, Pool
from .sampling import argmax_prompt, draw_prompts
from .simplex import nearest_probabilities
from .start import Start, begun, is_begun
from .state import State

__all__ = ["PromptSearch"]

AGAIN = 0.3
"""The part of an ask that known prompts have."""

LENGTH = 2.0
"""Tokens that prompts begin with, on average, where there is a blank.

A few hundred queries tell single tokens and pairs apart; longer prompts are tried, but rarely."""

RACERS = 8
"""Prompts that begin a race, at most."""

BETTER = 0.002
"""What a leader must gain for the search not to stand still, nats."""

_REDRAWS = 8
"""How often repetitions within an ask are drawn anew; a tiny vocabulary has no other prompts."""

# The names of what `progress` holds.
_TOLD, _MOVED, _RACE = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSearch(ABC):
    """A search that keeps what it found of every prompt; methods differ in how they make new ones.

    An ask holds known prompts, to be looked at again on another client: the reference (no prompt,
    where the vocabulary has a blank), then half leaders and half prompts that may be better than
    they look. The others are new. `Pool` says how losses of different clients are compared.

    The deployable prompt is the leader by its pessimistic value, together with its best bias; after
    the first ask, the reference.

    **Race.** After `search` asks, or once the leader has stood still for `patience` of them, no new
    prompts are made: the best ones race for `race` asks, fewer and fewer of them (successive
    halving), always against the reference. Then the method has finished.

    alpha is the token frequencies of the best `elite` prompts, smoothed: what other parts read.
    The pool is the search, and it travels with alpha.

    Attributes:
        prompt_len: n.
        vocab_size: N.
        num_samples: I, at least 2.
        elite: How many of the best prompts alpha is made of.
        pool_size: How many prompts are remembered, with `LOOKS` times as many losses.
        search: Asks before the race; None never ends the search.
        race: Asks of the race.
        patience: Asks without a better leader after which the race begins; None waits.
        blank: The index of the blank token, if the vocabulary has one. "No prompt" is then among
            the first candidates, and the reference.
        biases: Label biases whose losses are told, shape (G, C) (see `BiasGrid`); None without
            calibration.
        start: What the first ask begins with (`begun`); None begins with nothing.
        seed: Breaks ties of the untrained prompt.
    """

    prompt_len: int
    vocab_size: int
    num_samples: int
    elite: int = 4
    pool_size: int = 256
    search: int | None = None
    race: int = 0
    patience: int | None = None
    blank: int | None = None
    biases: tuple[tuple[float, ...], ...] | None = None
    start: Start | None = None
    seed: int = 0
    _grid: BiasGrid | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        _checks.sizes(
            prompt_len=self.prompt_len,
            vocab_size=self.vocab_size,
            num_samples=self.num_samples,
            seed=self.seed,
        )
        _checks.integer("elite", self.elite, minimum=1)
        if _checks.integer("pool_size", self.pool_size) < max(self.elite, 2):
            raise ValueError(f"pool_size must be at least 2, and hold the elite of {self.elite}")
        if self.search is not None:
            _checks.integer("search", self.search)
        _checks.integer("race", self.race)
        if self.patience is not None:
            _checks.integer("patience", self.patience, minimum=1)
        if self.blank is not None and _checks.integer("blank", self.blank) >= self.vocab_size:
            raise ValueError(f"blank must lie in [0, {self.vocab_size}), not {self.blank}")
        if self.biases is not None:
            object.__setattr__(self, "_grid", BiasGrid(self.biases))

    @property
    def shape(self) -> tuple[int, int]:
        """Positions and tokens, (n, N)."""
        return self.prompt_len, self.vocab_size

    @property
    def shares_memory(self) -> bool:
        """Yes: the pool is the search."""
        return True

    def init(self) -> State:
        """Return the uniform alpha, or what was begun with, and an empty pool."""
        return State(alpha=self.project(begun(self.shape, self.start)))

    def check(self, state: State) -> None:
        """Refuse an alpha without logarithms, and a malformed memory."""
        _checks.positive_alpha(state.alpha, shape=self.shape)
        self._pool(state)
        self._progress(state)

    def wanted(self, state: State) -> int:
        """Return I; in a race, as many as still run, and the reference."""
        if not self._racing(state):
            return self.num_samples
        pool = self._pool(state)
        return len(self._racers(state, pool))

    def ask(
        self, state: State, rng: np.random.Generator, num_samples: int | None = None
    ) -> Candidates:
        """Return known prompts to be scored again, then new ones; in a race, those that run."""
        alpha = _checks.positive_alpha(state.alpha, shape=self.shape)
        count = _checks.count(num_samples, default=self.wanted(state))
        pool = self._pool(state)
        if self._racing(state):
            indices = self._racers(state, pool)[:count]
        elif len(pool.prompts):
            again = pool.prompts[self._again(pool, count)]
            new = self._new(pool, count - len(again), rng)
            indices = self._distinct(np.concatenate([again, new]), rng)
        else:
            indices = self._distinct(self._first(state, count, rng), rng)
        return Candidates(prompts=indices, probabilities=alpha / alpha.sum(axis=1, keepdims=True))

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike | ClassLosses) -> State:
        """Add what the prompts did to the pool, and rank it."""
        told = self._told(candidates, losses)
        added = self._pool(state).with_batch(candidates.prompts, told)
        pool = added.ranked(self.pool_size)
        # The leader so far has row 0, but for the first ask.
        values = added.judged.value
        moved = not state.memory or values[0] - values[added.leader()] > BETTER
        memory = {**pool.memory(), "progress": self._further(state, moved=bool(moved))}
        return State(alpha=self.project(self._alpha(pool)), memory=memory)

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Project each row on the simplex above what smoothing leaves to an unseen token."""
        checked = _checks.matrix("alpha", alpha, shape=self.shape)
        return nearest_probabilities(checked, floor=float(np.float32(self._floor)))

    def prompt(self, state: State) -> NDArray[np.int64]:
        """Return the leader by pessimistic value; before any loss, a random prompt."""
        prompts = self._pool(state).prompts
        return prompts[0].copy() if len(prompts) else argmax_prompt(state.alpha, self.seed)

    def bias(self, state: State) -> NDArray[np.float64] | None:
        """Return the leader's best label bias, shape (C,); None without calibration or losses."""
        pool = self._pool(state)
        return pool.bias(0) if len(pool.prompts) else None

    def plain_bias(self, state: State) -> NDArray[np.float64] | None:
        """Return no prompt's best label bias, shape (C,); None where it was never asked about."""
        pool = self._pool(state)
        return None if pool.reference is None else pool.bias(pool.reference)

    def finished(self, state: State) -> bool:
        """Return whether the race is over."""
        told, _, began = self._progress(state)
        return bool(began >= 0 and told - began >= self.race)

    # What methods add

    @abstractmethod
    def _new(self, pool: Pool, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return prompts to try, shape (count, n)."""

    # Helpers

    def _alpha(self, pool: Pool) -> NDArray[np.float64]:
        """Return alpha for a ranked pool, shape (n, N)."""
        elite = pool.prompts[: self.elite]
        frequency = (elite[:, :, None] == np.arange(self.vocab_size)).sum(axis=0)
        alpha: NDArray[np.float64] = (frequency + 1.0 / self.vocab_size) / (len(elite) + 1)
        return alpha

    @property
    def _floor(self) -> float:
        """The least alpha."""
        return 1.0 / self.vocab_size / (self.elite + 1)

    def _first(self, state: State, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The first ask: no prompt, random prompts, what was begun with and its like."""
        indices = self._random(count, rng)
        if is_begun(state.alpha):
            known = draw_prompts(state.alpha.astype(np.float64), (count + 1) // 2, rng)
            known[0] = argmax_prompt(state.alpha, self.seed)
            indices[-len(known) :] = self._compact(known)
        if self.blank is not None:
            indices[0] = self.blank
        return indices

    def _random(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Random prompts, short ones where there is a blank."""
        tokens = rng.integers(self.vocab_size, size=(count, self.prompt_len))
        if self.blank is None:
            return tokens
        beyond = np.arange(self.prompt_len) >= self._lengths(count, rng)[:, None]
        return self._compact(np.where(beyond, self.blank, tokens))

    def _distinct(self, prompts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """The same with random prompts instead of repetitions, which would tell nothing."""
        for _ in range(_REDRAWS):
            first = np.unique(prompts, axis=0, return_index=True)[1]
            repeated = np.setdiff1d(np.arange(len(prompts)), first)
            if not len(repeated):
                break
            prompts[repeated] = self._random(len(repeated), rng)
        return prompts

    def _lengths(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Numbers of tokens that new prompts have at most: 1, and more with falling chances."""
        if self.blank is None:
            return np.full(count, self.prompt_len)
        return np.minimum(rng.geometric(1.0 / LENGTH, size=count), self.prompt_len)

    def _compact(self, prompts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same texts with their blanks at the end, so that equal texts are equal prompts."""
        if self.blank is None:
            return prompts
        order = np.argsort(prompts == self.blank, axis=1, kind="stable")
        return np.take_along_axis(prompts, order, axis=1)

    def _num_again(self, pool: Pool, count: int) -> int:
        """How many of an ask for `count` prompts are known ones."""
        wanted = min(max(2, round(AGAIN * count)), count - 1) if count > 1 else count
        return min(wanted, len(pool.prompts))

    # The pool and the race

    def _pool(self, state: State) -> Pool:
        pool = Pool.remembered(state.memory, self.prompt_len, self._grid, self.blank)
        # It may come from a client, and what it costs to judge grows faster than what it holds.
        if len(pool.prompts) > self.pool_size or len(pool.rows) > LOOKS * self.pool_size:
            raise ValueError(
                f"a pool holds {self.pool_size} prompts and {LOOKS * self.pool_size} losses at most"
            )
        if (
            pool.prompts.size
            and not 0 <= pool.prompts.min() <= pool.prompts.max() < self.vocab_size
        ):
            raise ValueError(f"the pool's tokens must lie in [0, {self.vocab_size})")
        return pool

    def _told(self, candidates: Candidates, losses: ArrayLike | ClassLosses) -> ClassLosses:
        if isinstance(losses, ClassLosses):
            if len(losses.means) != len(candidates.prompts):
                raise ValueError(
                    f"losses must be of {len(candidates.prompts)} prompts, not {len(losses.means)}"
                )
            _checks.losses(losses.means[:, 0, 0], candidates, shape=self.shape)
            return losses
        values = _checks.losses(losses, candidates, shape=self.shape)
        return ClassLosses(means=values[:, None, None], counts=np.ones(1, dtype=np.int64))

    def _again(self, pool: Pool, count: int) -> NDArray[np.int64]:
        """Rows to be looked at again: the reference, leaders, then challengers."""
        number = self._num_again(pool, count)
        first = [] if pool.reference is None else [pool.reference]
        others = [row for row in range(len(pool.prompts)) if row not in first]
        leaders = others[: (number - len(first) + 1) // 2]
        rest = np.array(others[len(leaders) :], dtype=np.int64)
        by_hope = rest[np.argsort(pool.judged.optimistic[rest], kind="stable")]
        rows = [*first, *leaders, *by_hope.tolist()]
        return np.array(rows[:number], dtype=np.int64)

    def _progress(self, state: State) -> NDArray[np.float64]:
        """Asks told; of these when another leader came; when the race began, -1 before that."""
        progress: Any = state.memory.get("progress")
        if progress is None:
            return np.array([0.0, 0.0, -1.0])
        if progress.shape != (3,) or np.isnan(progress).any() or progress[_TOLD] < 0:
            raise ValueError("progress must be three numbers")
        return np.array(progress, dtype=np.float64)

    def _further(self, state: State, *, moved: bool) -> NDArray[np.float64]:
        """The progress with one ask more, after which there may be a better leader."""
        progress = self._progress(state)
        progress[_TOLD] += 1
        if moved:
            progress[_MOVED] = progress[_TOLD]
        enough = self.search is not None and progress[_TOLD] >= self.search
        still = self.patience is not None and progress[_TOLD] - progress[_MOVED] >= self.patience
        if progress[_RACE] < 0 and (enough or still):
            progress[_RACE] = progress[_TOLD]
        return progress

    def _racing(self, state: State) -> bool:
        return bool(self._progress(state)[_RACE] >= 0)

    def _racers(self, state: State, pool: Pool) -> NDArray[np.int64]:
        """The prompts that still run: half as many in each of log2(RACERS) equal stages."""
        told, _, began = self._progress(state)
        entered = min(RACERS, self.num_samples)
        stages = max(1, math.ceil(math.log2(entered)))
        stage = int((told - began) * stages / self.race) if self.race else 0
        running = max(2, entered >> min(stage, stages - 1))
        rows = list(range(min(running, len(pool.prompts))))
        if pool.reference is not None and pool.reference not in rows:
            rows[-1] = pool.reference
        return pool.prompts[rows]
