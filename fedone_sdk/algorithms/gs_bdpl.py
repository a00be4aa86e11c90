"""GS-BDPL: the Gumbel-Softmax policy gradient of FedOne (Wang et al., ICML 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .estimator import drawn_advantage
from .method import Candidates, PlainAlgorithm
from .optimizers import OPTIMIZERS, Optimizer, make_optimizer
from .sampling import argmax_prompt, draw_prompts, softmax
from .space import Space
from .start import Start, warm_start
from .state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class GumbelSoftmaxBDPL(PlainAlgorithm):
    """Black-box discrete prompt learning through a Gumbel-Softmax.

    A step draws one Gumbel noise g (n x N), which fixes the categoricals
    p_ij = softmax_j((log alpha_ij + g_ij) / tau) (eq. 2), and then I prompts from them. At a
    small tau the noise decides most positions, so prompts of one step are similar: at
    tau = 0.1 about 4, 11 and 19 of 20 differ for n = 6, 20 and 50.

    Attributes:
        prompt_len: n.
        vocab_size: N.
        num_samples: I, at least 2.
        tau: Temperature of the softmax.
        learning_rate: Of the optimiser.
        optimizer: "adamw" or "sgd".
        alpha_min: The floor of alpha (the nu > 0 of Theorem 3.4), kept as a float32. A token at the
            floor moves by 1/(tau alpha_min) when it is drawn, so SGD needs a higher floor.
        space: Which candidates each position has; None gives every position all N.
        start: The warm start of alpha (`warm_start`); None starts uniform.
        seed: Breaks ties of the deployable prompt.
    """

    prompt_len: int
    vocab_size: int
    num_samples: int
    tau: float
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
        _checks.number("tau", self.tau)
        # Rounded to float32, so that the floor and the alphas on it compare equal.
        floor = float(np.float32(_checks.number("alpha_min", self.alpha_min)))
        object.__setattr__(self, "alpha_min", floor)
        if not 0.0 < floor <= 1.0 / self.vocab_size:
            raise ValueError(f"alpha_min must lie in (0, 1/{self.vocab_size}], not {floor:g}")
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
        """Draw one Gumbel noise, then the prompts."""
        alpha = _checks.positive_alpha(state.alpha, shape=self.shape, mask=self._mask)
        count = _checks.count(num_samples, default=self.num_samples)
        logs = np.log(alpha, out=np.full(self.shape, -np.inf), where=self._mask)
        logits = (logs + rng.gumbel(size=self.shape)) / self.tau
        probabilities = softmax(logits)
        return Candidates(
            prompts=draw_prompts(probabilities, count, rng), probabilities=probabilities
        )

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike) -> State:
        """Take one optimiser step against the variance-reduced gradient (eqs. 6 and 7)."""
        values = _checks.losses(losses, candidates, shape=self.shape)
        alpha = _checks.positive_alpha(state.alpha, shape=self.shape, mask=self._mask)
        # score_function's two branches differ by 1/(tau alpha), whatever p was.
        gradient = np.zeros(self.shape)
        np.divide(
            drawn_advantage(candidates, values),
            self.tau * alpha,
            out=gradient,
            where=self._mask,
        )
        alpha, memory = self._optimizer().update(alpha, gradient, state.memory)
        return State(alpha=self.project(alpha), memory=memory)

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Clamp alpha to its floor."""
        checked = _checks.matrix("alpha", alpha, shape=self.shape)
        return np.where(self._mask, np.maximum(checked, self.alpha_min), 0.0).astype(np.float32)

    def prompt(self, state: State) -> NDArray[np.int64]:
        """Return the argmax of alpha at each position, which is also the mode over the noise."""
        return argmax_prompt(state.alpha, self.seed)

    @property
    def _mask(self) -> NDArray[np.bool_]:
        assert self.space is not None
        return self.space.mask

    def _optimizer(self) -> Optimizer:
        return make_optimizer(self.optimizer, learning_rate=self.learning_rate)


def score_function(
    indices: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    alpha: NDArray[np.floating],
    tau: float,
) -> NDArray[np.float64]:
    """Return d log P(prompt) / d alpha for each prompt, at fixed Gumbel noise (eq. 5).

    It is (1 - p_ij) / (tau alpha_ij) at the token that was drawn and -p_ij / (tau alpha_ij) at
    the others.

    Args:
        indices: Shape (I, n).
        probabilities: p, shape (n, N).
        alpha: Shape (n, N), positive.
        tau: Temperature.

    Returns:
        Shape (I, n, N).
    """
    drawn = np.eye(probabilities.shape[1])[indices]
    scores: NDArray[np.float64] = (drawn - probabilities) / (tau * alpha.astype(np.float64))
    return scores
