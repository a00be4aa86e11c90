"""Thompson sampling: the prompts that minimise draws from the posterior."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .search import Known, PromptSearch

_SPARE = 4
"""Extra draws that replace duplicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThompsonSampling(PromptSearch):
    """Each prompt of an ask, new or known, minimises one draw from the posterior.

    A draw is one plausible value function of all prompts, given the losses (Thompson 1933; Russo
    et al. 2018). An observation of a candidate informs all prompts that contain it.

    Each ask also re-evaluates the incumbent, which at first is the reference: a mini-batch of false
    losses is detected by its disagreement with well-known values. With 5 prompts per mini-batch of
    8 rows (SmolLM2 and Gemma on SST-2, 40 runs), the part of the gap closed at 100 / 300 queries is
    85 / 93 %, and 70 / 92 % if a fifth of the clients invert their losses. Without the incumbent it
    is 82 / 96 and 60 / 89 %. The reference in each mini-batch as well costs 1 to 4 points.

    Attributes: see `PromptSearch`.
    """

    def _next(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        drawn = self._new(known, count - 1 + _SPARE, rng)
        every = np.concatenate([known.prompts[:1], drawn])
        first = np.sort(np.unique(every, axis=0, return_index=True)[1])
        # Duplicates are replaced by random prompts.
        missing = max(count - len(first), 0)
        chosen = np.concatenate([every[first], self._random(missing, rng)])[:count]
        return np.asarray(chosen, dtype=np.int64)

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return self._lowest(known, count, rng)
