"""First-order optimisers of methods, as pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import _checks
from .state import Memory


class Optimizer(Protocol):
    """A rule that moves parameters against a gradient."""

    def update(
        self, params: NDArray[np.float64], gradient: NDArray[np.float64], memory: Memory
    ) -> tuple[NDArray[np.float64], Memory]:
        """Return the next parameters and memory; an empty memory is the initial one."""
        ...

    def longest_step(self, largest: float) -> float:
        """Return the upper bound of a parameter's change; `largest` bounds the parameters."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """params <- params - learning_rate * gradient."""

    learning_rate: float

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        _checks.number("learning_rate", self.learning_rate)

    def update(
        self, params: NDArray[np.float64], gradient: NDArray[np.float64], memory: Memory
    ) -> tuple[NDArray[np.float64], Memory]:
        """Return the next parameters; there is no memory."""
        if memory:
            raise ValueError("sgd has no memory")
        return params - self.learning_rate * gradient, memory

    def longest_step(self, largest: float) -> float:
        """Return infinity: a step is proportional to the gradient."""
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), as PyTorch computes it.

    Its memory: the moments "m" and "v" (float64, the parameters' shape) and the step count "t".
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        """Refuse impossible options."""
        _checks.number("learning_rate", self.learning_rate)
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, not {self.betas!r}")
        for beta in self.betas:
            _checks.fraction("betas", beta)
        _checks.number("eps", self.eps)
        if self.weight_decay != 0.0:
            _checks.number("weight_decay", self.weight_decay)

    def update(
        self, params: NDArray[np.float64], gradient: NDArray[np.float64], memory: Memory
    ) -> tuple[NDArray[np.float64], Memory]:
        """Return the next parameters and moments."""
        beta1, beta2 = self.betas
        if memory:
            m, v, t = _moments(memory, params.shape)
        else:
            m, v, t = np.zeros(params.shape), np.zeros(params.shape), 0
        t += 1
        m = beta1 * m + (1.0 - beta1) * gradient
        v = beta2 * v + (1.0 - beta2) * gradient * gradient
        step_size = self.learning_rate / (1.0 - beta1**t)
        scale = np.sqrt(v) / math.sqrt(1.0 - beta2**t) + self.eps
        decayed = params * (1.0 - self.learning_rate * self.weight_decay)
        return decayed - step_size * m / scale, {"m": m, "v": v, "t": np.array(t, dtype=np.int64)}

    def longest_step(self, largest: float) -> float:
        """Return the bound of m / sqrt(v) by the Cauchy-Schwarz inequality, and of the decay."""
        beta1, beta2 = self.betas
        if beta1**2 >= beta2:
            return math.inf
        ratio = (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - beta1**2 / beta2))
        return self.learning_rate * (max(ratio, 1.0) + self.weight_decay * largest)


OPTIMIZERS = ("adamw", "sgd")


def make_optimizer(name: str, **options: Any) -> Optimizer:
    """Return the optimiser called `name` ("adamw" or "sgd").

    Raises:
        ValueError: The name, an option or a value is invalid.
    """
    _checks.choice("optimizer", name, OPTIMIZERS)
    kind = AdamW if name == "adamw" else SGD
    allowed = tuple(kind.__dataclass_fields__)
    _checks.known_options(f"optimizer {name}", options, allowed)
    if "learning_rate" not in options:
        raise ValueError(f"optimizer {name} needs a learning_rate")
    return kind(**options)


def _moments(
    memory: Memory, shape: tuple[int, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    try:
        m, v, t = memory["m"], memory["v"], int(memory["t"])
    except (KeyError, TypeError) as exc:
        raise ValueError("not a memory of adamw: it holds m, v and t") from exc
    if m.shape != shape or v.shape != shape:
        raise ValueError(f"adamw's moments have shape {m.shape}, the parameters {shape}")
    return m, v, t
