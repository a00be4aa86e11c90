"""What a device does to its losses, or to its step, so that they say little about its data.

The randomness is the operating system's: the run's seed is known to the server, and noise that
the server can compute is no noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import SystemRandom
from typing import TYPE_CHECKING

from fedone_sdk.spec.privacy import PrivacySpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["alpha_sensitivity", "gaussian", "losses_sensitivity", "private_losses", "private_step"]

_RANDOM = SystemRandom()


def gaussian(count: int, std: float) -> list[float]:
    """Independent normal numbers from the operating system's randomness.

    Each is the scaled sum of four, so that the last bits of a result do not give the noise away:
    the attack of Mironov (2012) inverts the one rounding of a single draw, and the cost of
    inverting grows with every further one (Holohan and Braghin, 2021).

    Args:
        count: How many.
        std: Standard deviation.
    """
    scale = std / 2.0
    return [scale * math.fsum(_RANDOM.gauss(0.0, 1.0) for _ in range(4)) for _ in range(count)]


def losses_sensitivity(privacy: PrivacySpec, num_prompts: int, num_examples: int) -> float:
    """How far one other example can move the vector of mean losses, L2.

    Each of the I means moves by at most C / b, so the vector by at most sqrt(I) C / b.

    Args:
        privacy: Names C.
        num_prompts: I.
        num_examples: b, the examples that were scored.
    """
    return math.sqrt(num_prompts) * privacy.clip / num_examples


def alpha_sensitivity(privacy: PrivacySpec) -> float:
    """How far other data on the device can move its clipped step, L2: two steps of norm C."""
    return 2.0 * privacy.clip


def private_losses(losses: Sequence[Sequence[float]], privacy: PrivacySpec) -> tuple[float, ...]:
    """Mean losses with each example's loss clipped to [0, C], and noise.

    Args:
        losses: Per prompt the loss of each of the same b examples, shape (I, b).
        privacy: The run's.

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
    """Alpha after a clipped and noised step; what the method allows is for the caller to restore.

    Projecting it is post-processing, which gives nothing away.

    Args:
        before: The assignment's alpha, shape (n, N).
        after: Alpha after the local steps.
        privacy: The run's.
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
