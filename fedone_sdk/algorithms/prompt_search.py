"""The base class of the search methods: known and new prompts, successive halving.

Shapes: I prompts of an ask, P observed prompts, n positions, N candidates, C labels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .evaluator import Evaluator, updated
from .gaussian_process import LARGEST, PRIOR, Features, Hyperparameters
from .method import Candidates, ClassLosses, Holder
from .method_state import Floats, Ints, State
from .observations import EVALUATIONS_PER_PROMPT, Observations
from .sampling import argmax_prompt, draw_prompts, stream, stream_seed
from .space import Space, Start, is_warm_started, nearest_probabilities, warm_start

POOL_SIZE = 256
"""Number of prompts that a search remembers; with 1,000, each `tell` would take a second."""

ELITE = 4
"""Number of best prompts that are always remembered, and from which new prompts are made."""

REVISITED = 0.3
"""The fraction of an ask's prompts that are known and scored again."""

CHANGES = 2.0
"""Mean number of positions in which new prompts differ from "no prompt"."""

FINALISTS = 8
"""The largest number of prompts that enter successive halving."""

NEAR = 128
"""A posterior draw has this many new prompts near "no prompt", and as many near the best ones."""

DRAWS = 16
"""Number of posterior draws that alpha is computed from."""

_REDRAWS = 8
"""Duplicates in an ask are redrawn at most this often: a small space may have too few prompts."""

_WITHIN = 1.959964
"""Half the width of a 95 % interval in posterior standard deviations."""

# Indices into `progress`.
_ASKS, _HALVING_START = range(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSearch(ABC):
    """A search that remembers the losses of prompts; subclasses make new prompts.

    `Estimates` has an expected, an optimistic and a pessimistic value of each known prompt. The
    reference is "no prompt", if the space has it.

    By default an ask returns new prompts, and known prompts to score again: the reference, prompts
    with the best pessimistic values, and as many prompts with the best optimistic values.

    The deployable prompt is the *incumbent*, the prompt with the best pessimistic value. Until
    another prompt is confirmed (`Evaluator.incumbent`), the incumbent is the reference.

    **Successive halving.** After `search` asks, no new prompts are made. For `halving` asks, the
    best prompts and the reference are scored again, in stages of equal length. Each stage keeps the
    better half of the prompts. Then the method has finished.

    alpha is the estimated probability that a candidate is in the best prompt; it is only reported.

    Attributes:
        num_samples: I, at least 2.
        search: Number of asks before the halving; if None, there is no halving.
        halving: Number of asks in the halving.
        num_labels: C, the number of labels whose biases are fitted; with 1, none are fitted.
        num_groups: The number of groups of examples with separate losses: C, or 1.
        start: The warm start for the first ask (`warm_start`); None means a uniform start.
        seed: Seed of the untrained prompt and of the posterior draws for alpha.
    """

    space: Space
    num_samples: int
    search: int | None = None
    halving: int = 0
    num_labels: int = 1
    num_groups: int = 1
    start: Start | None = None
    seed: int = 0
    _features: Features = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _checks.samples_and_seed(self.num_samples, self.seed)
        if self.search is not None:
            _checks.integer("search", self.search)
        _checks.integer("halving", self.halving)
        object.__setattr__(self, "_features", Features(self.space))
        _checks.integer("num_labels", self.num_labels, minimum=1)
        if _checks.integer("num_groups", self.num_groups) not in (1, self.num_labels):
            raise ValueError(f"num_groups must be 1 or num_labels = {self.num_labels}")

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of positions and of candidates, (n, N)."""
        return self.space.shape

    @property
    def shares_memory(self) -> bool:
        """True: all clients of a run share the observations."""
        return True

    def init(self) -> State:
        """Return the uniform alpha or the warm start, with an empty memory."""
        return State(alpha=self.project(warm_start(self.space, self.start)))

    def check(self, state: State) -> None:
        """Raise if alpha is not positive, or if the memory is malformed."""
        self._alpha_of(state)
        self._observed(state)
        self._values(state)
        self._progress(state)

    def wanted(self, state: State) -> int:
        """Return I; in successive halving, the number of prompts that remain."""
        if not self._is_halving(state):
            return self.num_samples
        return len(self._finalists(state, self._observed(state)))

    def ask(
        self,
        state: State,
        rng: np.random.Generator,
        num_samples: int | None = None,
        holder: Holder | None = None,
    ) -> Candidates:
        """Return known and new prompts; in successive halving, the prompts that remain."""
        alpha = self._alpha_of(state)
        count = _checks.count(num_samples, default=self.wanted(state))
        observed = self._observed(state)
        if self._is_halving(state):
            # Resized, because fewer prompts than `count` may have been observed.
            indices = np.resize(self._finalists(state, observed), (count, self.space.prompt_len))
        elif len(observed.prompts):
            indices = self._distinct(self._next(self._known(state), count, rng), rng)
        else:
            indices = self._distinct(self._first(state, count, rng), rng)
        return Candidates(
            prompts=indices,
            probabilities=alpha / alpha.sum(axis=1, keepdims=True),
            biases=observed.biases_for(indices) if self._calibrates else None,
            holder=holder,
        )

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike | ClassLosses) -> State:
        """Add the losses to the observations, and update the posterior and the incumbent."""
        observed_losses = self._as_losses(candidates, losses)
        observed = self._observed(state).with_batch(
            candidates.prompts, observed_losses, candidates.holder
        )
        known, variances = updated(observed, self._features, self._values(state))
        progress = self._further(state)
        kept = self._kept(known, self._incumbent(known))
        memory = {
            **known.observed.remembering(kept, EVALUATIONS_PER_PROMPT * POOL_SIZE).memory(),
            "hyperparameters": np.array(variances),
            "progress": progress,
        }
        alpha = self._alpha(known, int(progress[_ASKS]))
        return State(alpha=self.project(alpha), memory=memory)

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return the nearest probabilities; the floor is the least value that `_alpha` can have."""
        checked = _checks.array("alpha", alpha, shape=self.shape)
        floor = float(np.float32(1.0 / self.space.vocab_size / (DRAWS + 1)))
        return nearest_probabilities(checked, floor=floor, mask=self.space.mask)

    def prompt(self, state: State) -> Ints:
        """Return the incumbent; before any losses, the likeliest candidates (`argmax_prompt`)."""
        prompts = self._observed(state).prompts
        return prompts[0].copy() if len(prompts) else argmax_prompt(state.alpha, self.seed)

    def bias(self, state: State) -> Floats | None:
        """Return the incumbent's best label bias, shape (C,); None if no bias was fitted."""
        observed = self._observed(state)
        known = self._calibrates and len(observed.prompts)
        return observed.biases[0].copy() if known else None

    def plain_bias(self, state: State) -> Floats | None:
        """Return the best label bias of "no prompt", shape (C,); None if none was fitted."""
        observed = self._observed(state)
        row = observed.row(self.space.reference)
        return observed.biases[row].copy() if self._calibrates and row is not None else None

    def cheapest(self, state: State, length: Callable[[Ints], int]) -> tuple[Ints, Floats | None]:
        """Return the shortest confirmed prompt that may be as good as the incumbent, and its bias.

        A prompt may be as good as the incumbent if the 95 % posterior interval of their difference
        contains 0. "No prompt" is returned only if it is the incumbent.
        """
        observed = self._observed(state)
        if not len(observed.prompts):
            return self.prompt(state), None
        known = self._known(state)
        estimates, lengths = known.compared(0), np.array([*map(length, known.prompts)])
        value = estimates.value
        near = value - value[0] <= _WITHIN * estimates.spread
        near &= known.confirmed & (lengths > 0)
        near[0] = True
        row = min(np.flatnonzero(near), key=lambda row: (lengths[row], value[row]))
        return known.prompts[row].copy(), observed.biases[row].copy() if self._calibrates else None

    def finished(self, state: State) -> bool:
        """Return whether the halving is over."""
        asks, halving_start = self._progress(state)
        return bool(halving_start >= 0 and asks - halving_start >= self.halving)

    def search_on(self, state: State) -> State:
        """Return the state with the halving cancelled, so that new prompts are made again."""
        if not self._is_halving(state):
            return state
        asks = self._progress(state)[_ASKS]
        return state.evolve(memory={**state.memory, "progress": np.array([asks, -1.0])})

    # Hooks that subclasses override

    @abstractmethod
    def _new(self, known: Evaluator, count: int, rng: np.random.Generator) -> Ints:
        """Return new prompts, shape (count, n)."""

    def _next(self, known: Evaluator, count: int, rng: np.random.Generator) -> Ints:
        """Return known prompts to re-evaluate and new ones, shape (count, n)."""
        again = known.prompts[self._revisited(known, count)]
        return np.concatenate([again, self._new(known, count - len(again), rng)])

    def _incumbent(self, known: Evaluator) -> int:
        """Return the row of the prompt to deploy."""
        return known.incumbent(known.estimates)

    @property
    def _calibrates(self) -> bool:
        return self.num_labels > 1

    def _first(self, state: State, count: int, rng: np.random.Generator) -> Ints:
        """Return the first ask: "no prompt", prompts near it, and prompts of the warm start."""
        indices = self._near(count, rng)
        if is_warm_started(state.alpha):
            drawn = draw_prompts(state.alpha.astype(np.float64), (count + 1) // 2, rng)
            drawn[0] = argmax_prompt(state.alpha, self.seed)
            indices[-len(drawn) :] = self.space.compact(drawn)
        if self.space.reference is not None:
            indices[0] = self.space.reference
        return indices

    def _near(self, count: int, rng: np.random.Generator) -> Ints:
        """Return random prompts that differ from the reference in few positions, (count, n)."""
        prompts = self.space.random(count, rng)
        if self.space.reference is not None:
            prompts = np.where(self._changed(count, rng), prompts, self.space.reference)
        return self.space.compact(prompts)

    def _distinct(self, prompts: Ints, rng: np.random.Generator) -> Ints:
        """Return the prompts with random ones in place of repetitions."""
        for _ in range(_REDRAWS):
            first = np.unique(prompts, axis=0, return_index=True)[1]
            repeated = np.setdiff1d(np.arange(len(prompts)), first)
            if not len(repeated):
                break
            prompts[repeated] = self._near(len(repeated), rng)
        return prompts

    def _changed(self, count: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Return the positions in which new prompts may differ from the reference, (count, n).

        For each prompt, a number k is drawn from a geometric distribution. Then k random slots of
        one position may differ, and the first k positions of each slot of several positions. (If
        such a slot has no blank candidate, all its positions may differ.)
        """
        order = np.zeros((count, self.space.prompt_len), dtype=np.int64)
        if self.space.reference is not None:
            groups = [*self.space.groups()]
            single = [positions[0] for positions, _, _ in groups if len(positions) == 1]
            order[:, single] = rng.random((count, len(single))).argsort(axis=1)
            for positions, _, blank in groups:
                if len(positions) > 1 and blank is not None:
                    order[:, positions] = np.arange(len(positions))
        return order < rng.geometric(1.0 / CHANGES, size=(count, 1))

    def _revisited(self, known: Evaluator, count: int) -> Ints:
        """Return the rows of known prompts that an ask scores again (see the class)."""
        wanted = min(max(2, round(REVISITED * count)), count - 1) if count > 1 else count
        number = min(wanted, len(known.prompts))
        reference = known.reference
        first = [] if reference is None else [reference]
        others = [row for row in range(len(known.prompts)) if row not in first]
        best = others[: (number - len(first) + 1) // 2]
        worse = np.array(others[len(best) :], dtype=np.int64)
        challengers = worse[np.argsort(known.estimates.optimistic[worse], kind="stable")]
        rows = [*first, *best, *challengers.tolist()]
        return np.array(rows[:number], dtype=np.int64)

    def _known(self, state: State) -> Evaluator:
        """Return the posterior; its prompts are the incumbent, then others by pessimistic value."""
        return Evaluator.of(self._observed(state), self._features, self._values(state))

    def _kept(self, known: Evaluator, incumbent: int) -> Ints:
        """Return rows to remember: the incumbent, then the others by pessimistic value."""
        order = np.argsort(known.estimates.pessimistic, kind="stable")
        first = np.array([incumbent], dtype=np.int64)
        ranked: Ints = np.concatenate([first, order[order != incumbent]])
        if len(ranked) <= POOL_SIZE:
            return ranked
        # Keep the best few, the reference, and the prompts that were scored last.
        # Ranking all prompts by loss would keep poor prompts with lucky losses.
        reference = known.reference
        is_kept = np.zeros(len(ranked), dtype=bool)
        is_kept[ranked[:ELITE]] = True
        if reference is not None:
            is_kept[reference] = True
        last = np.where(is_kept, np.iinfo(np.int64).max, known.observed.last_batches())
        kept = np.argsort(-last, kind="stable")[:POOL_SIZE]
        return ranked[np.isin(ranked, kept)]

    def _alpha(self, known: Evaluator, asks: int) -> Floats:
        """Return alpha: how often the best prompts of draws have each candidate, shape (n, N)."""
        rng = stream(stream_seed(self.seed, "alpha", asks))
        best = self._lowest(known, DRAWS, rng)
        frequency = (best[:, :, None] == np.arange(self.space.vocab_size)).sum(axis=0)
        return (frequency + self.space.uniform) / (DRAWS + 1)

    def _lowest(self, known: Evaluator, count: int, rng: np.random.Generator) -> Ints:
        """Return the prompts with the lowest values in posterior draws, shape (count, n).

        The prompts are the observed ones, and new ones near the reference or near the best prompts.
        A new prompt may differ from the reference only in the positions that `_changed` draws.
        """
        best = known.prompts[rng.integers(min(len(known.prompts), ELITE), size=NEAR)]
        changes = rng.geometric(1.0 / CHANGES, size=(NEAR, 1))
        moved = rng.random(best.shape).argsort(axis=1) < changes
        near_best = self.space.compact(np.where(moved, self.space.random(NEAR, rng), best))
        new = np.unique(np.concatenate([self._near(NEAR, rng), near_best]), axis=0)
        new = new[~(new[:, None] == known.prompts).all(axis=2).any(axis=1)]
        values = known.draws(new, count, rng)
        if self.space.reference is not None:
            differs = new != self.space.reference
            beyond = (differs & ~self._changed(count, rng)[:, None]).any(axis=2)
            values[:, len(known.prompts) :][beyond] = np.inf
        every = np.concatenate([known.prompts, new])
        return every[values.argmin(axis=1)]

    def _observed(self, state: State) -> Observations:
        observed = Observations.remembered(
            state.memory, self.space, self.num_groups, self.num_labels
        )
        # The memory may come from a client, so the cost of the posterior needs a bound.
        most = EVALUATIONS_PER_PROMPT * POOL_SIZE
        if len(observed.prompts) > POOL_SIZE or len(observed.rows) > most:
            raise ValueError(f"a memory holds {POOL_SIZE} prompts and {most} losses at most")
        return observed

    def _values(self, state: State) -> Hyperparameters:
        values: Any = state.memory.get("hyperparameters")
        if values is None:
            return PRIOR
        if values.shape != (len(PRIOR),) or not (np.abs(values) <= LARGEST).all():
            raise ValueError(f"hyperparameters must be {len(PRIOR)} numbers up to {LARGEST:g}")
        return Hyperparameters(*values.tolist())

    def _alpha_of(self, state: State) -> Floats:
        return _checks.positive_alpha(state.alpha, mask=self.space.mask)

    def _as_losses(self, candidates: Candidates, losses: ArrayLike | ClassLosses) -> ClassLosses:
        if isinstance(losses, ClassLosses):
            _checks.losses(losses.means[:, 0, 0], candidates, shape=self.shape)
            return losses
        return ClassLosses.plain(_checks.losses(losses, candidates, shape=self.shape))

    def _progress(self, state: State) -> Floats:
        """Return the number of asks, and the first ask of the halving (-1 before the halving)."""
        progress: Any = state.memory.get("progress")
        if progress is None:
            return np.array([0.0, -1.0])
        if progress.shape != (2,) or np.isnan(progress).any() or progress[_ASKS] < 0:
            raise ValueError("progress must be two numbers")
        return np.array(progress, dtype=np.float64)

    def _further(self, state: State) -> Floats:
        """Return the progress after one more ask."""
        asks, halving_start = self._progress(state)
        asks += 1.0
        if halving_start < 0 and self.search is not None and asks >= self.search:
            halving_start = asks
        return np.array([asks, halving_start])

    def _is_halving(self, state: State) -> bool:
        return bool(self._progress(state)[_HALVING_START] >= 0)

    def _finalists(self, state: State, observed: Observations) -> Ints:
        """Return the prompts of the current stage, half as many as in the stage before."""
        asks, halving_start = self._progress(state)
        entered = min(FINALISTS, self.num_samples)
        stages = max(1, math.ceil(math.log2(entered)))
        stage = int((asks - halving_start) * stages / self.halving) if self.halving else 0
        running = max(2, entered >> min(stage, stages - 1))
        rows = list(range(min(running, len(observed.prompts))))
        reference = observed.row(self.space.reference)
        if reference is not None and reference not in rows:
            rows[-1] = reference
        return observed.prompts[rows]
