"""PBIL: token probabilities that learn from the best prompts of each ask (Baluja 1994)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import _checks
from .method import Candidates
from .pool import Pool
from .sampling import draw_prompts
from .search import PromptSearch
from .simplex import nearest_probabilities
from .start import is_begun
from .state import Memory, State

__all__ = ["PBIL"]

BEST_SHARE = 0.25
"""The part of an ask's new prompts that the probabilities move towards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PBIL(PromptSearch):
    """Population-based incremental learning: alpha is what prompts are drawn from.

    Attributes:
        learning_rate: How far the probabilities move towards the frequencies of the best new
            prompts of an ask, in (0, 1]. The others: see `PromptSearch`.
    """

    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        super(PBIL, self).__post_init__()
        if _checks.number("learning_rate", self.learning_rate) > 1.0:
            raise ValueError(f"learning_rate must lie in (0, 1], not {self.learning_rate!r}")

    def _new(
        self, state: State, pool: Pool, count: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        return draw_prompts(self._probabilities(state), count, rng)

    def _learned(self, state: State, pool: Pool, candidates: Candidates, known: int) -> Memory:
        values, prompts = pool.alone()[known:], candidates.prompts[known:]
        probabilities = self._probabilities(state)
        if len(prompts):
            number = max(1, round(BEST_SHARE * len(prompts)))
            best = prompts[np.argsort(values, kind="stable")[:number]]
            frequency = (best[:, :, None] == np.arange(self.vocab_size)).mean(axis=0)
            probabilities = probabilities + self.learning_rate * (frequency - probabilities)
            probabilities = nearest_probabilities(probabilities, floor=self._floor).astype(float)
        return {"probabilities": probabilities}

    def _alpha(self, pool: Pool, memory: Memory) -> NDArray[np.float64]:
        alpha: NDArray[np.float64] = memory["probabilities"]
        return alpha

    def _probabilities(self, state: State) -> NDArray[np.float64]:
        known = state.memory.get("probabilities")
        if known is not None:
            return _checks.positive_alpha(known, shape=self.shape)
        if is_begun(state.alpha):
            return state.alpha.astype(np.float64)
        start = np.full(self.shape, 1.0 / self.vocab_size)
        if self.blank is not None:
            start *= 1.0 - self._blank_share
            start[:, self.blank] += self._blank_share
        return start
