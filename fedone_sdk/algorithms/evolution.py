"""Evolution: children of the best prompts by crossover and mutation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import _checks
from .search import Known, PromptSearch

BLANK_MUTATIONS = 0.25
"""The part of mutations that insert the blank, if there is one, so that prompts can shorten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolution(PromptSearch):
    """An evolutionary search: new prompts are mutated crossovers of two elite prompts.

    Attributes:
        mutation_rate: Per position, 1/n by default. For the others see `PromptSearch`; parents are
            drawn from the elite.
    """

    mutation_rate: float | None = None

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        super(Evolution, self).__post_init__()
        rate = self.mutation_rate
        if rate is not None and _checks.number("mutation_rate", rate) > 1.0:
            raise ValueError(f"mutation_rate must lie in (0, 1], not {rate!r}")

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        parents = known.prompts[: self.elite]
        shape = count, self.prompt_len
        mother, father = parents[rng.integers(len(parents), size=(2, count))]
        children = np.where(rng.random(shape) < 0.5, mother, father)
        tokens = self._space.random(count, rng)
        blanks = np.array([-1 if blank is None else blank for blank in self._space.blanks])
        shorter = (rng.random(shape) < BLANK_MUTATIONS) & (blanks >= 0)
        tokens = np.where(shorter, blanks, tokens)
        rate = 1.0 / self.prompt_len if self.mutation_rate is None else self.mutation_rate
        mutated = rng.random(shape) < rate
        return self._space.compact(np.where(mutated, tokens, children))
