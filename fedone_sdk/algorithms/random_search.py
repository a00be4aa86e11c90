"""Random search whose leaders are looked at again: what any cleverer method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .search import Known, PromptSearch

__all__ = ["RandomSearch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSearch(PromptSearch):
    """New prompts are drawn without regard to what is known (attributes: see `PromptSearch`)."""

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return self._random(count, rng)
