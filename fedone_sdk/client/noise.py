"""The noise on what a device sends, and the epsilon that the device has spent.

The noise is discrete Gaussian (Canonne, Kamath and Steinke 2020): values are clipped and rounded to
integers, integer noise is added to their sums, and the sums are scaled back. Random bits come from
the operating system, because the server knows the run's seed. A *release* is one noised result,
such as the mean losses of an update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random, SystemRandom
from typing import TYPE_CHECKING

import structlog

from fedone_sdk.accountant import GaussianAccountant
from fedone_sdk.budget import Usage
from fedone_sdk.client.rows import Declining, Unfit
from fedone_sdk.client.state import DeviceState, Journal, Precision
from fedone_sdk.errors import ArgumentError, DataError
from fedone_sdk.losses import PROBABILITY_WIDTH, sensitivity
from fedone_sdk.messages import MAX_LOSS, AlphaAssignment, Assignment, RunTask
from fedone_sdk.spec.sections import PrivacySpec, RequiredPrivacy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = structlog.get_logger(__name__)

_GRID = 2**30
"""Number of grid steps between a value's bounds; `fedone_sdk.accountant` needs it to be large."""

_RANDOM = SystemRandom()


def noised_means(
    values: Sequence[Sequence[float]],
    bounds: Sequence[tuple[float, float]],
    noise_multiplier: float,
    random: Random = _RANDOM,
    *,
    sensitivity: float | None = None,
) -> tuple[float, ...]:
    """Return means over examples, shape (d,), with noise that protects one example.

    The width of a row of `values` is the distance between its bounds. One example changes the sum
    of a row by at most the width. If each sum is divided by its row's width, one example changes
    the d sums by at most sqrt(d) in L2 norm: the L2 sensitivity. Noised means may be out of bounds.

    Args:
        values: Shape (d, b): for each mean, the values of the same b examples.
        bounds: Lowest and highest value of each row; the values are clipped to them.
        noise_multiplier: Standard deviation of the noise, divided by the L2 sensitivity.
        random: Source of uniform integers.
        sensitivity: The L2 sensitivity, if it is known to be less than sqrt(d).
    """
    square = float(len(values) * _GRID * _GRID)
    if sensitivity is not None:  # Rounding to the grid may add one grid step to each sum.
        square = (sensitivity * _GRID + math.sqrt(len(values))) ** 2
    variance = math.ceil(noise_multiplier * noise_multiplier * square)
    noise = discrete_gaussian(len(values), variance, random)
    means = []
    for row, (low, high), extra in zip(values, bounds, noise, strict=True):
        shares = (min(max((value - low) / (high - low), 0.0), 1.0) for value in row)
        total = extra + sum(math.floor(share * _GRID + 0.5) for share in shares)
        mean = low + total * (high - low) / (_GRID * len(row))
        means.append(min(max(mean, -MAX_LOSS), MAX_LOSS))
    return tuple(means)


def private_losses(
    losses: Sequence[Sequence[float]], privacy: PrivacySpec, random: Random = _RANDOM
) -> tuple[float, ...]:
    """Return a noised mean loss for each prompt; losses are clipped to [0, `privacy.clip`].

    `losses` has a row for each prompt, and the same examples in each row.
    """
    bounds = [(0.0, privacy.clip)] * len(losses)
    return noised_means(losses, bounds, privacy.noise_multiplier, random)


def private_terms(
    terms: Sequence[Sequence[Sequence[float]]],
    targets: Sequence[int],
    privacy: PrivacySpec,
    random: Random = _RANDOM,
) -> tuple[float, ...]:
    """Return noised numbers for I prompts and C labels.

    They are I mean losses, I x C mean label probabilities, and C label counts. The losses have 12 %
    more noise than in `private_losses`.

    Args:
        terms: The results of `loss_terms` for b examples, shape (I, b, 2 + C).
        targets: The true labels, shape (b,); -1 for an example without a loss, whose terms are 0.
        privacy: `PrivacySpec.clip` is the maximum loss of an example.
        random: Source of uniform integers.
    """
    count, size, labels = len(terms), len(targets), len(terms[0][0]) - 2
    columns = [list(zip(*rows, strict=True)) for rows in terms]
    values: list[Sequence[float]] = [rows[0] for rows in columns]
    values += [column for rows in columns for column in rows[2:]]
    values += [[float(target == label) for target in targets] for label in range(labels)]
    share = max(1.0, PROBABILITY_WIDTH / math.sqrt(count))  # At least 1: the values are 0 or 1.
    bounds = [(0.0, privacy.clip)] * count
    bounds += [(0.0, PROBABILITY_WIDTH)] * (count * labels) + [(0.0, share)] * labels
    means = noised_means(
        values, bounds, privacy.noise_multiplier, random, sensitivity=sensitivity(count)
    )
    return (*means[:-labels], *(size * mean for mean in means[-labels:]))


def private_step(
    before: NDArray[np.float32],
    after: NDArray[np.float32],
    privacy: PrivacySpec,
    random: Random = _RANDOM,
) -> NDArray[np.float64]:
    """Return alpha (the parameters of the method) after a clipped and noised step.

    The sensitivity is twice `privacy.clip`: the largest L2 distance between two clipped steps. The
    result may violate the method's constraints, so the caller projects it (`Algorithm.project`).
    """
    import numpy as np

    start = before.astype(np.float64)
    step = np.nan_to_num(after - start, posinf=0.0, neginf=0.0)
    scale = _GRID / max(float(np.linalg.norm(step)), privacy.clip)
    units = np.trunc(step * scale).astype(np.int64)
    while int(np.sum(units * units)) > _GRID**2:  # the rounded norm may be too large
        units -= np.sign(units)
    variance = math.ceil((2.0 * privacy.noise_multiplier * _GRID) ** 2)
    noise = np.array(discrete_gaussian(units.size, variance, random), dtype=np.int64)
    noised: NDArray[np.int64] = units + noise.reshape(units.shape)
    return start + noised * (privacy.clip / _GRID)


def discrete_gaussian(count: int, variance: int, random: Random = _RANDOM) -> list[int]:
    """Draw integers k, each with probability proportional to ``exp(-k**2 / (2 * variance))``.

    The method is rejection sampling from a discrete Laplace distribution, and is exact.
    """
    scale = int(math.sqrt(variance)) + 1  # Any scale gives the same distribution.
    accepted: list[int] = []
    while len(accepted) < count:
        drawn = _discrete_laplace(scale, random)
        gap = abs(drawn) * scale - variance
        if _exp_coin(gap * gap, 2 * variance * scale * scale, random):
            accepted.append(drawn)
    return accepted


def _discrete_laplace(scale: int, random: Random) -> int:
    """Draw an integer k with probability proportional to ``exp(-abs(k) / scale)``."""
    while True:
        size = random.randrange(scale)
        if not _exp_coin(size, scale, random):
            continue
        while _exp_coin(1, 1, random):
            size += scale
        if not random.getrandbits(1):
            return size
        if size:
            return -size


def _exp_coin(numerator: int, denominator: int, random: Random) -> bool:
    """Return True with probability ``exp(-numerator / denominator)``."""
    while numerator > denominator:
        if not _exp_coin(1, 1, random):
            return False
        numerator -= denominator
    count = 1
    while random.randrange(denominator * count) < numerator:
        count += 1
    return count % 2 == 1


_SPENT = "this work would exceed the client's maximal epsilon"


class PrivacyAccount:
    """Counts the noised releases of one device, over all its runs and servers.

    Args:
        own_model: Whether the device scores with its own model, and not through the gateway.

    Raises:
        DataError: The count cannot be read.
        MissingExtraError: dp-accounting is not installed.
        ArgumentError: There is no state folder, or the gateway would see the protected data.
    """

    def __init__(self, required: RequiredPrivacy, state: DeviceState, *, own_model: bool) -> None:
        if state.file is None:
            raise ArgumentError("policy.privacy: needs state_dir, to store the spent epsilon")
        if required.unit != "label" and not own_model:
            raise ArgumentError(
                f"policy.privacy: unit {required.unit!r} needs a backend of the device's own, "
                "because the gateway sees the texts; unit 'label' protects labels only"
            )
        self.required = required
        self._own_model = own_model
        self._accountant = GaussianAccountant(required.delta)
        self._state = state
        self._precisions = state.precisions()

    @property
    def epsilon(self) -> float:
        """The epsilon spent so far, at the required delta."""
        return self._epsilon(self._precisions)

    def check(self, run: RunTask, assignment: Assignment, journal: Journal) -> None:
        """Check that an assignment meets the device's requirements."""
        privacy = self.check_run(run)
        steps = len(assignment.steps) if isinstance(assignment, AlphaAssignment) else 1
        if not self._own_model and privacy.target == "alpha" and steps > 1:
            # The prompts of a second step would reveal alpha after the first step, without noise.
            raise Unfit("the client's labels are private, so it does at most one local step")
        total = steps if privacy.target == "losses" else 1
        self._afford(privacy, max(total - journal.releases, 0))

    def check_run(self, run: RunTask) -> PrivacySpec:
        """Return a run's privacy, if it meets the device's requirements."""
        required, privacy = self.required, run.privacy
        if privacy is None:
            raise Unfit("the client requires noise, and the run asks for none")
        least = required.min_noise_multiplier
        if least is not None and privacy.noise_multiplier < least:
            raise Unfit(
                f"the client requires a noise multiplier of at least {least:g}, and the run's is "
                f"{privacy.noise_multiplier:g}"
            )
        if required.unit == "device" and privacy.target != "alpha":
            raise Unfit("the client requires target alpha, which protects all of its data")
        if not self._own_model and run.task.loss == "nll":
            raise Unfit("the client's labels are private, and loss nll sends them")
        return privacy

    def charge(self, privacy: PrivacySpec) -> Precision:
        """Return the target and the precision (1 / noise_multiplier**2) of a release, to be stored.

        Raises:
            Declining: The count cannot be read.
            Unfit: The release would exceed the maximal epsilon.
        """
        self._afford(privacy, 1)
        return privacy.target, privacy.noise_multiplier**-2

    def update(self) -> None:
        """Read the stored count of releases, and log a change of `epsilon`."""
        try:
            precisions = self._state.precisions()
        except DataError as exc:
            _log.warning("the count of epsilon cannot be read", reason=str(exc))
            return
        if precisions != self._precisions:
            self._precisions = precisions
            _log.info("privacy spent", epsilon=self.epsilon, max_epsilon=self.required.max_epsilon)

    def shown(self, usage: Usage) -> Usage:
        """Return the usage that the server may see: one request per query.

        The exact usage would reveal something about the rows, such as the length of their texts.
        """
        if not self._own_model:
            return usage
        return Usage(queries=usage.queries, requests=usage.queries)

    def _afford(self, privacy: PrivacySpec, releases: int) -> None:
        try:
            self._precisions = self._state.precisions()
        except DataError as exc:  # The error contains a path, which is not sent.
            _log.warning("the count of epsilon cannot be read", reason=str(exc))
            raise Declining("the client's count of epsilon cannot be read") from exc
        target = privacy.target
        precision = self._precisions.get(target, 0.0) + releases / privacy.noise_multiplier**2
        epsilon = self._epsilon({**self._precisions, target: precision})
        max_epsilon = self.required.max_epsilon
        if epsilon > max_epsilon:
            raise Unfit(
                _SPENT,  # The server does not get the figures: they include other servers' runs.
                shown=f"{_SPENT}: {self.epsilon:.4g} is spent, the work would raise it to "
                f"{epsilon:.4g}, the maximum is {max_epsilon:g} (delta {self.required.delta:g})",
            )

    def _epsilon(self, precisions: dict[str, float]) -> float:
        if self.required.unit == "device" and precisions.get("losses"):
            return math.inf  # A release of losses protects one example, not the whole device.
        return self._accountant.epsilon(sum(precisions.values()))
