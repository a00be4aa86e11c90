"""RLOO: a policy gradient over token logits with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import _checks
from .method import Candidates
from .optimizers import AdamW
from .pool import Pool
from .sampling import draw_prompts, softmax
from .search import PromptSearch
from .start import is_begun
from .state import Memory, State

__all__ = ["RLOO"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO(PromptSearch):
    """REINFORCE leave-one-out (Kool et al. 2019): logits, and one Adam that belongs to the run.

    Each new prompt is compared with the mean of the other new ones of its ask. alpha is the
    softmax of the logits, what prompts are drawn from.

    Attributes:
        learning_rate: Adam's. The others: see `PromptSearch`.
    """

    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        super(RLOO, self).__post_init__()
        _checks.number("learning_rate", self.learning_rate)

    def _new(
        self, state: State, pool: Pool, count: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        return draw_prompts(softmax(self._logits(state)), count, rng)

    def _learned(self, state: State, pool: Pool, candidates: Candidates, known: int) -> Memory:
        logits = self._logits(state)
        moments = {name: state.memory[name] for name in ("m", "v", "t") if name in state.memory}
        prompts = candidates.prompts[known:]
        if len(prompts) < 2:
            return {"logits": logits, **moments}
        values = pool.alone()[known:]
        # The others' mean is a baseline that does not know the prompt: no bias.
        advantage = (values - values.mean()) * len(values) / (len(values) - 1)
        drawn = (prompts[:, :, None] == np.arange(self.vocab_size)) - softmax(logits)
        gradient = (advantage[:, None, None] * drawn).mean(axis=0)
        adam = AdamW(learning_rate=self.learning_rate, weight_decay=0.0)
        logits, memory = adam.update(logits, gradient, moments)
        return {"logits": logits, **memory}

    def _alpha(self, pool: Pool, memory: Memory) -> NDArray[np.float64]:
        logits = _checks.matrix("logits", memory["logits"], shape=self.shape)
        return softmax(logits)

    def _logits(self, state: State) -> NDArray[np.float64]:
        known = state.memory.get("logits")
        if known is not None:
            return _checks.matrix("logits", known, shape=self.shape)
        if is_begun(state.alpha):
            begun: NDArray[np.float64] = np.log(state.alpha.astype(np.float64))
            return begun
        logits = np.zeros(self.shape)
        if self.blank is not None:
            odds = self._blank_share / (1.0 - self._blank_share)
            logits[:, self.blank] = np.log(odds * (self.vocab_size - 1))
        return logits
