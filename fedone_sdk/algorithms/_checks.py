"""Checks of the arguments of methods; each failure is a one-line `ValueError`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from .method import Candidates
    from .method_state import Floats


def integer(name: str, value: object, *, minimum: int = 0) -> int:
    """Return `value` as an int; raise unless it is an integer >= `minimum`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, not {value!r}")
    return int(value)


def number(name: str, value: object) -> float:
    """Return `value` as a float; raise unless it is a finite number > 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.integer, np.floating))
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ValueError(f"{name} must be a finite number > 0, not {value!r}")
    return float(value)


def choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def samples_and_seed(num_samples: object, seed: object) -> None:
    """Check the arguments that all methods share."""
    # A method compares losses with each other, which needs at least two.
    integer("num_samples", num_samples, minimum=2)
    integer("seed", seed)


def count(num_samples: int | None, *, default: int) -> int:
    """Return `num_samples` if it is an integer >= 1, or `default` if it is None."""
    return default if num_samples is None else integer("num_samples", num_samples, minimum=1)


def array(name: str, value: ArrayLike, *, shape: tuple[int, ...]) -> Floats:
    """Return `value` as a finite float64 array of the given shape."""
    try:
        result = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{name} must be numbers of shape {shape}") from exc
    if result.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, not {result.shape}")
    if not np.isfinite(result).all():
        raise ValueError(f"{name} must be finite")
    return result


def positive_alpha(value: ArrayLike, *, mask: NDArray[np.bool_]) -> Floats:
    """Return `alpha` in float64; raise unless it is positive where `mask` is True, 0 elsewhere."""
    alpha = array("alpha", value, shape=mask.shape)
    if alpha[mask].min() <= 0.0:
        raise ValueError("alpha must be positive; call project first")
    if alpha[~mask].any():
        raise ValueError("alpha must be 0 for candidates that a position does not have")
    return alpha


def losses(value: ArrayLike, candidates: Candidates, *, shape: tuple[int, int]) -> Floats:
    """Return the losses in float64; raise if they or the candidates do not fit alpha's `shape`."""
    drawn_from = candidates.probabilities.shape
    if drawn_from != shape:
        raise ValueError(
            f"candidates must be drawn from probabilities of shape {shape}, not {drawn_from}"
        )
    num_samples = len(candidates.prompts)
    if num_samples < 2:
        raise ValueError("tell needs at least 2 prompts to compare")
    return array("losses", value, shape=(num_samples,))
