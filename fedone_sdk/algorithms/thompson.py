"""Thompson sampling: prompts that would be best if the truth were one draw from the posterior."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .search import Known, PromptSearch

__all__ = ["ThompsonSampling"]

_SPARE = 4
"""Draws that are made for others which agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThompsonSampling(PromptSearch):
    """New prompts, and known ones, where functions drawn from the posterior are lowest.

    Each draw is what the values of all prompts may be, given the losses (Thompson 1933; Russo et
    al. 2018); its best prompt is asked about. What is learnt of a candidate by one prompt serves
    all that have it. The reference and the incumbent are always asked about.

    Attributes: see `PromptSearch`.
    """

    def _next(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        reference = known.evaluator.reference
        rows = [row for row in (reference, 0) if row is not None]
        again = known.prompts[list(dict.fromkeys(rows))[: max(1, count - 1)]]
        if len(again) == count:
            return again
        drawn = self._new(known, count - len(again) + _SPARE, rng)
        every = np.concatenate([again, drawn])
        first = np.sort(np.unique(every, axis=0, return_index=True)[1])
        # Draws that agree leave room for random prompts.
        missing = max(count - len(first), 0)
        chosen: NDArray[np.int64] = np.concatenate([every[first], self._random(missing, rng)])
        return chosen[:count]

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return self._lowest(known, count, rng)
