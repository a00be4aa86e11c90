"""Attacks: the losses that malicious clients report."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[np.float64]

Attack = Callable[[_Numbers, np.random.Generator], _Numbers]
"""Losses, one per prompt along the first axis, into the reported losses."""


def _reversed(losses: _Numbers, rng: np.random.Generator) -> _Numbers:
    order = losses.reshape(len(losses), -1).mean(axis=1).argsort(kind="stable")
    found = np.empty_like(losses)
    found[order] = losses[order[::-1]]
    return found


ATTACKS: Mapping[str, Attack] = {
    # The best prompt gets the losses of the worst, the second best of the second worst.
    "reversed": _reversed,
    # The best prompt becomes the worst; mean and spread do not change.
    "inverted": lambda losses, rng: 2.0 * losses.mean(axis=0) - losses,
    "amplified": lambda losses, rng: losses.mean(axis=0) - 10.0 * (losses - losses.mean(axis=0)),
    "random": lambda losses, rng: rng.uniform(0.0, 2.0, losses.shape) * losses.mean(axis=0),
}
"""By name. Traces and probabilities are changed like losses.

A run with label calibration refuses nearly all but ``reversed``: no log-probabilities have such
numbers."""
