"""Thompson sampling: prompts that would be best if the truth were one draw from the posterior."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .search import Known, PromptSearch

__all__ = ["ThompsonSampling"]


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
        return np.concatenate([again, self._new(known, count - len(again), rng)])

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        drawn = self._lowest(known, count, rng)
        # The order of words does not matter to the model, so that any will do.
        return drawn
