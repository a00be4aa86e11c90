"""Policy-gradient methods, their optimisers, and the mean of the clients' alphas.

Prompts are drawn from alpha, the weights of N tokens (candidates) at n positions. GS-BDPL is the
Gumbel-Softmax policy gradient of FedOne (Wang et al., ICML 2025). BDPL is black-box discrete prompt
learning on the simplex (Diao et al. 2022).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .method import Candidates, Holder, PlainAlgorithm
from .method_state import Floats, Ints, Memory, State
from .sampling import argmax_prompt, draw_prompts, softmax
from .space import Space, Start, nearest_probabilities, warm_start


@dataclass(frozen=True, slots=True)
class SGD:
    """params <- params - learning_rate * gradient."""

    learning_rate: float

    def update(self, params: Floats, gradient: Floats, memory: Memory) -> tuple[Floats, Memory]:
        """Return the parameters, moved against the gradient; SGD has no memory."""
        if memory:
            raise ValueError("sgd has no memory")
        return params - self.learning_rate * gradient, memory

    def longest_step(self, largest: float) -> float:
        """Return a bound on how far `update` moves a parameter of at most `largest`.

        SGD has none: a step is proportional to the gradient.
        """
        return math.inf


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), as PyTorch computes it.

    The memory holds the moments "m" and "v" (float64, in the shape of the parameters) and the
    number of steps "t".
    """

    learning_rate: float

    BETAS: ClassVar = (0.9, 0.999)
    EPS: ClassVar = 1e-8
    WEIGHT_DECAY: ClassVar = 0.01

    def update(self, params: Floats, gradient: Floats, memory: Memory) -> tuple[Floats, Memory]:
        """Return the next parameters and moments; the initial memory is empty."""
        beta1, beta2 = self.BETAS
        m, v, t = self._moments(memory, params.shape)
        t += 1
        m = beta1 * m + (1.0 - beta1) * gradient
        v = beta2 * v + (1.0 - beta2) * gradient * gradient
        step_size = self.learning_rate / (1.0 - beta1**t)
        scale = np.sqrt(v) / math.sqrt(1.0 - beta2**t) + self.EPS
        decayed = params * (1.0 - self.learning_rate * self.WEIGHT_DECAY)
        return decayed - step_size * m / scale, {"m": m, "v": v, "t": np.array(t, dtype=np.int64)}

    def longest_step(self, largest: float) -> float:
        """Return a bound; `ratio` bounds m / sqrt(v) by the Cauchy-Schwarz inequality."""
        beta1, beta2 = self.BETAS
        ratio = (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - beta1**2 / beta2))
        return self.learning_rate * (max(ratio, 1.0) + self.WEIGHT_DECAY * largest)

    def _moments(self, memory: Memory, shape: tuple[int, ...]) -> tuple[Floats, Floats, int]:
        if not memory:
            return np.zeros(shape), np.zeros(shape), 0
        try:
            m, v, t = memory["m"], memory["v"], int(memory["t"])
        except (KeyError, TypeError) as exc:
            raise ValueError("not a memory of adamw, which has m, v and t") from exc
        if m.shape != shape or v.shape != shape:
            raise ValueError(f"adamw's moments have shape {m.shape}, the parameters {shape}")
        return m, v, t


_OPTIMIZERS: dict[str, type[SGD | AdamW]] = {"adamw": AdamW, "sgd": SGD}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient(PlainAlgorithm, ABC):
    """A method that changes alpha by one optimiser step per mini-batch.

    Attributes:
        num_samples: I, the number of prompts per ask, at least 2.
        optimizer: "adamw" or "sgd".
        alpha_min: The floor (least value) of alpha, below 1/N; nu in Theorem 3.4 of the paper. An
            SGD step at the floor grows like 1/alpha_min, so SGD needs a higher floor than AdamW.
        start: The warm start of alpha (`warm_start`); None means a uniform start.
        seed: For the random choice between equally likely tokens in `prompt`.
    """

    space: Space
    num_samples: int
    learning_rate: float
    optimizer: str
    alpha_min: float
    start: Start | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _checks.samples_and_seed(self.num_samples, self.seed)
        _checks.number("learning_rate", self.learning_rate)
        # Rounded to float32 like alpha, so that entries at the floor are equal to it.
        floor = float(np.float32(_checks.number("alpha_min", self.alpha_min)))
        object.__setattr__(self, "alpha_min", floor)
        if not 0.0 < floor < 1.0 / self.space.vocab_size:
            raise ValueError(f"alpha_min must lie in (0, 1/{self.space.vocab_size}), not {floor:g}")
        _checks.choice("optimizer", self.optimizer, tuple(_OPTIMIZERS))

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of positions and of candidates, (n, N)."""
        return self.space.shape

    @property
    def shares_memory(self) -> bool:
        """False: each client has its own moments of the optimiser."""
        return False

    def init(self) -> State:
        """Return the uniform state, or the warm start."""
        return State(alpha=self.project(warm_start(self.space, self.start)))

    def check(self, state: State) -> None:
        """Raise if alpha is not positive, or if the memory is not one of this optimiser."""
        self._optimizer().update(self._alpha(state), np.zeros(self.shape), state.memory)

    def ask(
        self,
        state: State,
        rng: np.random.Generator,
        num_samples: int | None = None,
        holder: Holder | None = None,
    ) -> Candidates:
        """Draw prompts from the distributions that alpha defines; `holder` has no effect."""
        alpha = self._alpha(state)
        count = _checks.count(num_samples, default=self.num_samples)
        probabilities = self._probabilities(alpha, rng)
        return Candidates(
            prompts=draw_prompts(probabilities, count, rng), probabilities=probabilities
        )

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike) -> State:
        """Take one optimiser step against the variance-reduced gradient, then project."""
        values = _checks.losses(losses, candidates, shape=self.shape)
        alpha = self._alpha(state)
        gradient = self._gradient(drawn_advantage(candidates, values), alpha, candidates)
        alpha, memory = self._optimizer().update(alpha, gradient, state.memory)
        return State(alpha=self.project(alpha), memory=memory)

    def longest_step(self, alpha: NDArray[np.float32], num_steps: int) -> float:
        """Return a bound (maybe infinity) on how far `num_steps` steps move an entry of alpha."""
        longest, largest = 0.0, float(alpha.max())
        for _ in range(num_steps):
            # A projection at most doubles a change.
            longest += 2.0 * self._optimizer().longest_step(largest + longest)
        return longest

    @abstractmethod
    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return the nearest feasible `alpha`; a feasible `alpha` is unchanged, bit for bit."""

    def prompt(self, state: State) -> Ints:
        """Return the likeliest token of each position."""
        return argmax_prompt(state.alpha, self.seed)

    @abstractmethod
    def _probabilities(self, alpha: Floats, rng: np.random.Generator) -> Floats:
        """Return the distribution of each position's tokens, shape (n, N)."""

    @abstractmethod
    def _gradient(self, advantage: Floats, alpha: Floats, candidates: Candidates) -> Floats:
        """Return the gradient, shape (n, N), from the advantage of each token.

        The gradient is `(drawn - other) * advantage` (see `drawn_advantage`). Candidates that do
        not exist have the advantage 0.
        """

    def _alpha(self, state: State) -> Floats:
        return _checks.positive_alpha(state.alpha, mask=self.space.mask)

    def _optimizer(self) -> SGD | AdamW:
        return _OPTIMIZERS[self.optimizer](self.learning_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class GumbelSoftmaxBDPL(PolicyGradient):
    """Black-box discrete prompt learning through a Gumbel-Softmax.

    An ask draws one matrix g of Gumbel noise, then I prompts with the probabilities
    p_ij = softmax_j((log alpha_ij + g_ij) / tau) (FedOne, eq. 2). At a small tau the noise decides
    most positions, so the prompts of an ask are similar: at tau = 0.1 and n = 6, only about 4 of 20
    prompts are distinct.

    With fixed noise, the derivative of a prompt's log-probability (eq. 5) is
    (1 - p_ij) / (tau alpha_ij) for the token that was drawn and -p_ij / (tau alpha_ij) for others.

    Attributes:
        tau: Temperature of the softmax. `PolicyGradient` documents the other attributes.
    """

    tau: float

    def __post_init__(self) -> None:
        super(GumbelSoftmaxBDPL, self).__post_init__()
        _checks.number("tau", self.tau)

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Raise entries below the floor to the floor."""
        checked = _checks.array("alpha", alpha, shape=self.shape)
        return np.where(self.space.mask, np.maximum(checked, self.alpha_min), 0.0).astype(
            np.float32
        )

    def _probabilities(self, alpha: Floats, rng: np.random.Generator) -> Floats:
        logs = np.log(alpha, out=np.full(self.shape, -np.inf), where=self.space.mask)
        return softmax((logs + rng.gumbel(size=self.shape)) / self.tau)

    def _gradient(self, advantage: Floats, alpha: Floats, candidates: Candidates) -> Floats:
        return advantage / np.where(self.space.mask, self.tau * alpha, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BDPL(PolicyGradient):
    """Black-box discrete prompt learning: alpha holds the probabilities themselves.

    The derivative d log P / d p is 1/p_ij for the token that was drawn and 0 for other tokens. The
    floor is needed because a token with p = 0 would never be drawn again.
    """

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return the nearest probabilities that are not below the floor."""
        checked = _checks.array("alpha", alpha, shape=self.shape)
        return nearest_probabilities(checked, floor=self.alpha_min, mask=self.space.mask)

    def _probabilities(self, alpha: Floats, rng: np.random.Generator) -> Floats:
        return alpha / alpha.sum(axis=1, keepdims=True)

    def _gradient(self, advantage: Floats, alpha: Floats, candidates: Candidates) -> Floats:
        p = _checks.positive_alpha(candidates.probabilities, mask=self.space.mask)
        return advantage * (1.0 / np.where(self.space.mask, p, 1.0))


def drawn_advantage(candidates: Candidates, losses: Floats) -> Floats:
    """Return the advantage of each token: how far the losses of its prompts are above the mean.

    Let l_r be the loss of prompt r of I prompts. The result has the shape (n, N) and the entries

        1/(I-1) sum_r (l_r - mean l) [prompt r has token j at position i].

    The policy gradient (FedOne, eq. 6) has, in place of the bracket, the derivative of the prompt's
    log-probability. Let this derivative be `drawn_ij` for tokens of the prompt, and `other_ij` for
    other tokens. The sum of l_r - mean l is 0, so the gradient is `(drawn - other) * advantage`.

    Tokens that no prompt has get exactly 0, because AdamW would amplify rounding noise. All
    operations are correctly rounded and in a fixed order, so all machines compute the same bits.
    """
    advantage = np.zeros_like(candidates.probabilities)
    positions = np.arange(len(advantage))
    centred = losses - math.fsum(losses) / len(losses)
    for prompt, loss in zip(candidates.prompts, centred, strict=True):
        advantage[positions, prompt] += loss
    return advantage / (len(losses) - 1)


def aggregate(
    alphas: Sequence[NDArray[np.float32]], weights: Sequence[float] | None = None
) -> NDArray[np.float32]:
    """Return the mean of the clients' alphas, computed in float64 (FedOne, Algorithm 1, line 11).

    Args:
        alphas: One matrix per client, of equal shapes, finite. The last bit of the mean depends on
            their order, which should be the order of the enrolment indices.
        weights: The number of examples of each client; None weighs all equally, as in Algorithm 1.

    Returns:
        Float32; a single client's alpha is returned bit for bit.
    """
    if not alphas:
        raise ValueError("no alphas to aggregate")
    stacked = [np.asarray(alpha, dtype=np.float32) for alpha in alphas]
    if len({alpha.shape for alpha in stacked}) != 1:
        raise ValueError(f"alphas differ in shape: {sorted({a.shape for a in stacked})}")
    if not all(np.isfinite(alpha).all() for alpha in stacked):
        raise ValueError("alphas must be finite")
    shares = np.array([1.0] * len(stacked) if weights is None else weights, dtype=np.float64)
    if shares.shape != (len(stacked),):
        raise ValueError(f"there must be {len(stacked)} weights, one per alpha, not {shares.size}")
    if not np.isfinite(shares).all() or shares.min() < 0.0 or shares.sum() <= 0.0:
        raise ValueError("weights must be finite, at least 0 and not all 0")
    if len(stacked) == 1:
        return stacked[0].copy()
    total = np.zeros(stacked[0].shape)
    for alpha, share in zip(stacked, shares, strict=True):
        total += share * alpha.astype(np.float64)
    return (total / shares.sum()).astype(np.float32)
