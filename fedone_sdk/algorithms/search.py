"""What searches over whole prompts share: one evaluator, known prompts asked again, a race."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .calibration import BiasGrid
from .draws import Draws
from .evaluator import Evaluator, Judged, updated
from .hyperparameters import LARGEST, PRIOR, Hyperparameters
from .kernel import Features
from .method import Candidates, ClassLosses
from .observations import LOOKS, Observations
from .sampling import argmax_prompt, draw_prompts
from .simplex import nearest_probabilities
from .space import Space
from .start import Start, begun, is_begun
from .state import State
from .streams import stream, stream_seed

__all__ = ["Known", "PromptSearch"]

AGAIN = 0.3
"""The part of an ask that known prompts have."""

LENGTH = 2.0
"""Tokens that repeated slots with a blank begin with, on average.

A few hundred queries tell single tokens and pairs apart; longer prompts are tried, but rarely."""

RACERS = 8
"""Prompts that begin a race, at most."""

BETTER = 0.002
"""What an incumbent must gain for the search not to stand still, nats."""

DRAWS = 16
"""Posterior draws that alpha is made of."""

_REDRAWS = 8
"""How often repetitions within an ask are drawn again; a tiny vocabulary has no other prompts."""

# The names of what `progress` holds.
_TOLD, _MOVED, _RACE = range(3)


class Known(NamedTuple):
    """What is known when new prompts are made.

    Attributes:
        evaluator: The posterior, of prompts with the incumbent first.
        judged: What they are worth.
    """

    evaluator: Evaluator
    judged: Judged

    @property
    def prompts(self) -> NDArray[np.int64]:
        """The prompts that were met, shape (P, n): the incumbent, others by pessimistic value."""
        return self.evaluator.observed.prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSearch(ABC):
    """A search that keeps what it found of every prompt; methods differ in how they make new ones.

    An ask holds known prompts, to be looked at again on another client: the reference (no prompt,
    where it can be said), then half leaders and half prompts that may be better than they look. The
    others are new. `Evaluator` says how losses of different clients are compared.

    The deployable prompt is the incumbent, the best by its pessimistic value, together with its
    best bias; after the first ask, the reference.

    **Race.** After `search` asks, or once the incumbent has stood still for `patience` of them, no
    new prompts are made: the best ones race for `race` asks, fewer and fewer of them (successive
    halving), always against the reference. Then the method has finished.

    alpha is the probability of each candidate to be in the best prompt: how often it is in the best
    of `DRAWS` functions from the posterior, smoothed. What was observed is the search, and it
    travels with alpha.

    Attributes:
        prompt_len: n.
        vocab_size: N.
        num_samples: I, at least 2.
        elite: How many of the best prompts are never forgotten.
        pool_size: How many prompts are remembered, with `LOOKS` times as many losses.
        search: Asks before the race; None never ends the search.
        race: Asks of the race.
        patience: Asks without a better incumbent after which the race begins; None waits.
        blank: The index of the blank token, if the vocabulary has one. "No prompt" is then among
            the first candidates, and the reference. With a space, it says so itself.
        space: Which candidates each position has; n times the same N by default.
        biases: Label biases whose losses are told, shape (G, C) (see `BiasGrid`); None without
            calibration.
        start: What the first ask begins with (`begun`); None begins with nothing.
        seed: Breaks ties of the untrained prompt, and draws what alpha is made of.
    """

    prompt_len: int
    vocab_size: int
    num_samples: int
    elite: int
    pool_size: int
    search: int | None = None
    race: int = 0
    patience: int | None = None
    blank: int | None = None
    space: Space | None = None
    biases: tuple[tuple[float, ...], ...] | None = None
    start: Start | None = None
    seed: int = 0
    _grid: BiasGrid | None = field(init=False, repr=False, compare=False, default=None)
    _features: Features = field(init=False, repr=False, compare=False)

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
        space = _checks.space(
            self.space, prompt_len=self.prompt_len, vocab_size=self.vocab_size, blank=self.blank
        )
        object.__setattr__(self, "_features", Features(space))
        if self.biases is not None:
            object.__setattr__(self, "_grid", BiasGrid(self.biases))

    @property
    def shape(self) -> tuple[int, int]:
        """Positions and tokens, (n, N)."""
        return self.prompt_len, self.vocab_size

    @property
    def shares_memory(self) -> bool:
        """Yes: what was observed is the search."""
        return True

    def init(self) -> State:
        """Return the uniform alpha, or what was begun with, and an empty memory."""
        return State(alpha=self.project(begun(self.shape, self.start, self._space.mask)))

    def check(self, state: State) -> None:
        """Refuse an alpha without logarithms, and a malformed memory."""
        self._alpha_of(state)
        self._observed(state)
        self._values(state)
        self._progress(state)

    def wanted(self, state: State) -> int:
        """Return I; in a race, as many as still run, and the reference."""
        if not self._racing(state):
            return self.num_samples
        return len(self._racers(state, self._observed(state)))

    def ask(
        self, state: State, rng: np.random.Generator, num_samples: int | None = None
    ) -> Candidates:
        """Return known prompts to be scored again, then new ones; in a race, those that run."""
        alpha = self._alpha_of(state)
        count = _checks.count(num_samples, default=self.wanted(state))
        observed = self._observed(state)
        if self._racing(state):
            indices = self._racers(state, observed)[:count]
        elif len(observed.prompts):
            indices = self._distinct(self._next(self._known(state), count, rng), rng)
        else:
            indices = self._distinct(self._first(state, count, rng), rng)
        return Candidates(prompts=indices, probabilities=alpha / alpha.sum(axis=1, keepdims=True))

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike | ClassLosses) -> State:
        """Add what the prompts did to what was observed, and judge all prompts."""
        told = self._told(candidates, losses)
        observed = self._observed(state).with_batch(candidates.prompts, told)
        evaluator, values = updated(observed, self._features, self._grid, self._values(state))
        known = Known(evaluator, evaluator.judged())
        leader = self._leader(known)
        # The incumbent so far has row 0, but for the first ask.
        worth = known.judged.value
        moved = not state.memory or worth[0] - worth[leader] > BETTER
        progress = self._further(state, moved=bool(moved))
        kept = self._kept(known, leader)
        memory = {
            **evaluator.observed.remembering(kept, LOOKS * self.pool_size).memory(),
            "hyperparameters": np.array(values),
            "progress": progress,
        }
        alpha = self._alpha(known, int(progress[_TOLD]))
        return State(alpha=self.project(alpha), memory=memory)

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Project each row on the simplex above what smoothing leaves to an unseen candidate."""
        checked = _checks.matrix("alpha", alpha, shape=self.shape)
        floor = float(np.float32(1.0 / self.vocab_size / (DRAWS + 1)))
        return nearest_probabilities(checked, floor=floor, mask=self._space.mask)

    def prompt(self, state: State) -> NDArray[np.int64]:
        """Return the incumbent; before any loss, a random prompt."""
        prompts = self._observed(state).prompts
        return prompts[0].copy() if len(prompts) else argmax_prompt(state.alpha, self.seed)

    def bias(self, state: State) -> NDArray[np.float64] | None:
        """Return the incumbent's best label bias, (C,); None without calibration or losses."""
        observed = self._observed(state)
        known = self._grid is not None and len(observed.prompts)
        return observed.biases[0].copy() if known else None

    def plain_bias(self, state: State) -> NDArray[np.float64] | None:
        """Return no prompt's best label bias, shape (C,); None where it was never asked about."""
        observed = self._observed(state)
        row = observed.row(self._space.reference)
        return None if row is None or self._grid is None else observed.biases[row].copy()

    def finished(self, state: State) -> bool:
        """Return whether the race is over."""
        told, _, began = self._progress(state)
        return bool(began >= 0 and told - began >= self.race)

    def search_on(self, state: State) -> State:
        """Return the state with a race called off, so that new prompts are made again."""
        if not self._racing(state):
            return state
        told = self._progress(state)[_TOLD]
        return state.evolve(memory={**state.memory, "progress": np.array([told, told, -1.0])})

    # What methods add

    @abstractmethod
    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return prompts to try, shape (count, n)."""

    def _next(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return known prompts to be looked at again, and new ones, shape (count, n)."""
        again = known.prompts[self._again(known, count)]
        return np.concatenate([again, self._new(known, count - len(again), rng)])

    def _leader(self, known: Known) -> int:
        """Return the row of the prompt to deploy."""
        return known.evaluator.incumbent(known.judged)

    # Making prompts

    @property
    def _space(self) -> Space:
        return self._features.space

    def _first(self, state: State, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The first ask: no prompt, random prompts, what was begun with and its like."""
        indices = self._random(count, rng)
        if is_begun(state.alpha):
            known = draw_prompts(state.alpha.astype(np.float64), (count + 1) // 2, rng)
            known[0] = argmax_prompt(state.alpha, self.seed)
            indices[-len(known) :] = self._space.compact(known)
        if self._space.reference is not None:
            indices[0] = self._space.reference
        return indices

    def _random(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Random prompts, with few tokens in repeated slots that have a blank."""
        prompts = self._space.random(count, rng)
        for positions in self._space.groups():
            blank = self._space.blanks[positions[0]]
            if blank is not None and len(positions) > 1:
                beyond = np.arange(len(positions)) >= self._lengths(count, rng)[:, None]
                own = prompts[:, positions]
                prompts[:, positions] = np.where(beyond, blank, own)
        return self._space.compact(prompts)

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
        return np.minimum(rng.geometric(1.0 / LENGTH, size=count), self.prompt_len)

    def _again(self, known: Known, count: int) -> NDArray[np.int64]:
        """Rows to be looked at again: the reference, leaders, then challengers."""
        wanted = min(max(2, round(AGAIN * count)), count - 1) if count > 1 else count
        number = min(wanted, len(known.prompts))
        reference = known.evaluator.reference
        first = [] if reference is None else [reference]
        others = [row for row in range(len(known.prompts)) if row not in first]
        leaders = others[: (number - len(first) + 1) // 2]
        rest = np.array(others[len(leaders) :], dtype=np.int64)
        by_hope = rest[np.argsort(known.judged.optimistic[rest], kind="stable")]
        rows = [*first, *leaders, *by_hope.tolist()]
        return np.array(rows[:number], dtype=np.int64)

    # What is known

    def _known(self, state: State) -> Known:
        evaluator = Evaluator.of(
            self._observed(state), self._features, self._grid, self._values(state)
        )
        return Known(evaluator, evaluator.judged())

    def _kept(self, known: Known, leader: int) -> NDArray[np.int64]:
        """Rows of what is to be remembered: the incumbent, then by pessimistic value."""
        order = np.argsort(known.judged.pessimistic, kind="stable")
        first = np.array([leader], dtype=np.int64)
        ranked: NDArray[np.int64] = np.concatenate([first, order[order != leader]])
        if len(ranked) <= self.pool_size:
            return ranked
        # The elite and the reference stay; of others, those that were met last. By their losses
        # would not do: of a poor candidate, prompts with lucky losses would be left.
        reference = known.evaluator.reference
        stays = np.zeros(len(ranked), dtype=bool)
        stays[ranked[: self.elite - (self.elite == self.pool_size)]] = True
        if reference is not None:
            stays[reference] = True
        last = np.where(stays, np.iinfo(np.int64).max, known.evaluator.observed.last_met())
        kept = np.argsort(-last, kind="stable")[: self.pool_size]
        remembered: NDArray[np.int64] = ranked[np.isin(ranked, kept)]
        return remembered

    def _alpha(self, known: Known, told: int) -> NDArray[np.float64]:
        """Return alpha, shape (n, N)."""
        rng = stream(stream_seed(self.seed, "alpha", told))
        best = self._lowest(known, DRAWS, rng)
        frequency = (best[:, :, None] == np.arange(self.vocab_size)).sum(axis=0)
        alpha: NDArray[np.float64] = (frequency + self._space.uniform) / (DRAWS + 1)
        return alpha

    def _lowest(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The best prompts of draws from the posterior, shape (count, n)."""
        draws = Draws.of(known.evaluator, count, rng)
        return draws.lowest(known.prompts[:1], self._lengths(count, rng), rng)

    def _observed(self, state: State) -> Observations:
        points, classes = (1, 1) if self._grid is None else self._grid.biases.shape
        observed = Observations.remembered(state.memory, self._space, classes, points)
        # It may come from a client, and what it costs to judge grows faster than what it holds.
        size = self.pool_size
        if len(observed.prompts) > size or len(observed.rows) > LOOKS * size:
            raise ValueError(f"a memory holds {size} prompts and {LOOKS * size} losses at most")
        return observed

    def _values(self, state: State) -> Hyperparameters:
        values: Any = state.memory.get("hyperparameters")
        if values is None:
            return PRIOR
        if values.shape != (len(PRIOR),) or not (np.abs(values) <= LARGEST).all():
            raise ValueError(f"hyperparameters must be {len(PRIOR)} numbers up to {LARGEST:g}")
        return Hyperparameters(*values.tolist())

    def _alpha_of(self, state: State) -> NDArray[np.float64]:
        return _checks.positive_alpha(state.alpha, shape=self.shape, mask=self._space.mask)

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

    # The race

    def _progress(self, state: State) -> NDArray[np.float64]:
        """Asks told; of these when another incumbent came; when the race began, -1 before that."""
        progress: Any = state.memory.get("progress")
        if progress is None:
            return np.array([0.0, 0.0, -1.0])
        if progress.shape != (3,) or np.isnan(progress).any() or progress[_TOLD] < 0:
            raise ValueError("progress must be three numbers")
        return np.array(progress, dtype=np.float64)

    def _further(self, state: State, *, moved: bool) -> NDArray[np.float64]:
        """The progress with one ask more, after which there may be a better incumbent."""
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

    def _racers(self, state: State, observed: Observations) -> NDArray[np.int64]:
        """The prompts that still run: half as many in each of log2(RACERS) equal stages."""
        told, _, began = self._progress(state)
        entered = min(RACERS, self.num_samples)
        stages = max(1, math.ceil(math.log2(entered)))
        stage = int((told - began) * stages / self.race) if self.race else 0
        running = max(2, entered >> min(stage, stages - 1))
        rows = list(range(min(running, len(observed.prompts))))
        reference = observed.row(self._space.reference)
        if reference is not None and reference not in rows:
            rows[-1] = reference
        return observed.prompts[rows]
