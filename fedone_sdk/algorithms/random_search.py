"""Random search that re-evaluates its best prompts: the baseline of all searches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .search import Known, PromptSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSearch(PromptSearch):
    """New prompts are drawn uniformly, whatever is known (attributes: see `PromptSearch`)."""

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return self._random(count, rng)
