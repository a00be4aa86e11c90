"""The Gaussian mechanism on a device: clipping and noise for its losses or its step of alpha.

The randomness is the operating system's, because the server has the run's seed and could
recompute noise that is derived from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import SystemRandom
from typing import TYPE_CHECKING

from fedone_sdk.spec.sections import PrivacySpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_RANDOM = SystemRandom()


def gaussian(count: int, std: float) -> list[float]:
    """Draw independent normal numbers from the operating system's randomness.

    Each is the scaled sum of four draws, so that the low bits of a result do not reveal the noise:
    the attack of Mironov (2012) inverts the rounding of a single draw, and the cost of inverting
    grows with every further one (Holohan and Braghin, 2021).
    """
    scale = std / 2.0
    return [scale * math.fsum(_RANDOM.gauss(0.0, 1.0) for _ in range(4)) for _ in range(count)]


def losses_sensitivity(privacy: PrivacySpec, num_prompts: int, num_examples: int) -> float:
    """Return the L2 sensitivity of the vector of mean losses to one example.

    Each of the I means over b scored examples changes by at most C / b, so the vector by at most
    sqrt(I) C / b.
    """
    return math.sqrt(num_prompts) * privacy.clip / num_examples


def alpha_sensitivity(privacy: PrivacySpec) -> float:
    """Return the L2 sensitivity of the clipped step to all data of the device: 2 C."""
    return 2.0 * privacy.clip


def private_losses(losses: Sequence[Sequence[float]], privacy: PrivacySpec) -> tuple[float, ...]:
    """Return mean losses with each example's loss clipped to [0, C], plus noise.

    Args:
        losses: Shape (I, b), one row per prompt, the same examples in each.
        privacy: Has the clip C.

    Returns:
        Shape (I,); a noised mean may be negative or above C.
    """
    means = [
        math.fsum(min(max(loss, 0.0), privacy.clip) for loss in row) / len(row) for row in losses
    ]
    std = privacy.noise_multiplier * losses_sensitivity(privacy, len(losses), len(losses[0]))
    return tuple(mean + extra for mean, extra in zip(means, gaussian(len(means), std), strict=True))


def private_step(
    before: NDArray[np.float32], after: NDArray[np.float32], privacy: PrivacySpec
) -> NDArray[np.float64]:
    """Return alpha after a clipped and noised step, shape (n, N); the caller projects it.

    The projection is post-processing, which costs no privacy.
    """
    import numpy as np

    start = before.astype(np.float64)
    step = after.astype(np.float64) - start
    norm = float(np.linalg.norm(step))
    if norm > privacy.clip:
        step *= privacy.clip / norm
    std = privacy.noise_multiplier * alpha_sensitivity(privacy)
    noised: NDArray[np.float64] = (
        start + step + np.array(gaussian(step.size, std)).reshape(step.shape)
    )
    return noised
