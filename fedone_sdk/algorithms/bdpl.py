"""BDPL: black-box discrete prompt learning on the simplex (Diao et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .estimator import drawn_advantage
from .method import Candidates, PlainAlgorithm
from .optimizers import OPTIMIZERS, Optimizer, make_optimizer
from .sampling import argmax_prompt, draw_prompts
from .simplex import nearest_probabilities
from .space import Space
from .start import Start, warm_start
from .state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class BDPL(PlainAlgorithm):
    """Black-box discrete prompt learning: alpha holds the probabilities themselves.

    Attributes:
        prompt_len: n.
        vocab_size: N.
        num_samples: I, at least 2.
        learning_rate: Of the optimiser.
        optimizer: "adamw" or "sgd".
        alpha_min: The least probability of a token, a float32 below 1/N. At p = 0, 1/p is infinite
            and a token is never drawn again.
        space: Which candidates each position has; None gives every position all N.
        start: The warm start of alpha (`warm_start`); None starts uniform.
        seed: Breaks ties of the deployable prompt.
    """

    prompt_len: int
    vocab_size: int
    num_samples: int
    learning_rate: float
    optimizer: str
    alpha_min: float
    space: Space | None = None
    start: Start | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        _checks.sizes(
            prompt_len=self.prompt_len,
            vocab_size=self.vocab_size,
            num_samples=self.num_samples,
            seed=self.seed,
        )
        floor = float(np.float32(_checks.number("alpha_min", self.alpha_min)))
        object.__setattr__(self, "alpha_min", floor)
        if not 0.0 < floor < 1.0 / self.vocab_size:
            raise ValueError(f"alpha_min must lie in (0, 1/{self.vocab_size}), not {floor:g}")
        _checks.choice("optimizer", self.optimizer, OPTIMIZERS)
        self._optimizer()
        found = _checks.space(self.space, prompt_len=self.prompt_len, vocab_size=self.vocab_size)
        object.__setattr__(self, "space", found)

    @property
    def shape(self) -> tuple[int, int]:
        """Positions and tokens, (n, N)."""
        return self.prompt_len, self.vocab_size

    @property
    def shares_memory(self) -> bool:
        """No: each client keeps its optimiser's moments."""
        return False

    def init(self) -> State:
        """Return the uniform state, or the warm start."""
        return State(alpha=self.project(warm_start(self.shape, self.start, self._mask)))

    def check(self, state: State) -> None:
        """Raise for an alpha without logarithms, or another optimiser's memory."""
        alpha = _checks.positive_alpha(state.alpha, shape=self.shape, mask=self._mask)
        self._optimizer().update(alpha, np.zeros(self.shape), state.memory)

    def ask(
        self, state: State, rng: np.random.Generator, num_samples: int | None = None
    ) -> Candidates:
        """Draw prompts from alpha."""
        alpha = _checks.positive_alpha(state.alpha, shape=self.shape, mask=self._mask)
        count = _checks.count(num_samples, default=self.num_samples)
        probabilities = alpha / alpha.sum(axis=1, keepdims=True)
        return Candidates(
            prompts=draw_prompts(probabilities, count, rng), probabilities=probabilities
        )

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike) -> State:
        """Take one optimiser step against the variance-reduced gradient, then project."""
        values = _checks.losses(losses, candidates, shape=self.shape)
        alpha = _checks.positive_alpha(state.alpha, shape=self.shape, mask=self._mask)
        p = _checks.positive_alpha(candidates.probabilities, shape=self.shape, mask=self._mask)
        # d log P / d p is 1/p_ij at the token that was drawn and 0 at the others. Off the mask the
        # advantage is 0, so that any p works.
        gradient = drawn_advantage(candidates, values) * (1.0 / np.where(self._mask, p, 1.0))
        alpha, memory = self._optimizer().update(alpha, gradient, state.memory)
        return State(alpha=self.project(alpha), memory=memory)

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Project each row on the simplex, above the floor."""
        checked = _checks.matrix("alpha", alpha, shape=self.shape)
        return nearest_probabilities(checked, floor=self.alpha_min, mask=self._mask)

    def prompt(self, state: State) -> NDArray[np.int64]:
        """Return the likeliest token of each position."""
        return argmax_prompt(state.alpha, self.seed)

    @property
    def _mask(self) -> NDArray[np.bool_]:
        assert self.space is not None
        return self.space.mask

    def _optimizer(self) -> Optimizer:
        return make_optimizer(self.optimizer, learning_rate=self.learning_rate)
