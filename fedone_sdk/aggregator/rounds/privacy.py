"""Privacy accounting: epsilon as a function of the number of results that a device has released.

A release is a result with noise. k releases of the same data with noise multiplier s are as private
as one release with noise multiplier s / sqrt(k). The random choice of mini-batches adds no privacy,
because the server knows the seeds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from fedone_sdk.accountant import GaussianAccountant
from fedone_sdk.aggregator.rounds.run_state import Seat
from fedone_sdk.messages import PrivacyReport
from fedone_sdk.spec import PrivacySpec, RunSpec

_MAX_RELEASES = 10**9


class Accountant:
    """Computes a device's epsilon from its number of releases; needs dp-accounting."""

    def __init__(self, privacy: PrivacySpec) -> None:
        self.accountant = GaussianAccountant(privacy.delta)
        self.privacy = privacy

    def epsilon(self, releases: int) -> float:
        """Return epsilon after a number of releases, at the delta of the run."""
        return self.accountant.epsilon(releases / self.privacy.noise_multiplier**2)

    def affordable(self) -> int | None:
        """Return how many releases ``max_epsilon`` allows for a device; None without a limit."""
        limit = self.privacy.max_epsilon
        if limit is None:
            return None
        return bisect_right(range(1, _MAX_RELEASES + 1), limit, key=self.epsilon)


class Releases:
    """Limits and reports the releases of a run's devices.

    A release is counted when the work is assigned, because a device may have sent its result even
    if the server has not received it.

    Raises:
        MissingExtraError: dp-accounting is not installed.
        ValueError: ``max_epsilon`` is too low for the run's rounds.
    """

    def __init__(self, spec: RunSpec, privacy: PrivacySpec) -> None:
        self.accountant = Accountant(privacy)
        self._privacy = privacy
        self.limit = self.accountant.affordable()
        # With target `alpha`, noise is added once per round, for any number of local steps.
        self._each_step = privacy.target == "losses"
        self._per_seat = spec.method.local_steps if self._each_step else 1
        if self.limit is not None and spec.data is not None:
            seats = spec.rounds * spec.participation.clients_per_round
            possible = spec.data.num_clients * (self.limit // self._per_seat)
            if possible < seats:
                raise ValueError(
                    f"privacy.max_epsilon: {spec.data.num_clients} clients may take part "
                    f"{possible} times in all, but {spec.rounds} rounds have {seats} seats"
                )

    def report(self, counts: Mapping[int, int]) -> PrivacyReport:
        """Return the privacy report; its epsilon is that of the device with the most releases."""
        most = max(counts.values(), default=0)
        return PrivacyReport(
            target=self._privacy.target,
            unit="example" if self._each_step else "device",
            delta=self._privacy.delta,
            epsilon=self.accountant.epsilon(most),
            releases=most,
            clients=len(counts),
            spent_up=len(self.spent_up(counts)),
        )

    def spent_up(self, counts: Mapping[int, int]) -> frozenset[int]:
        """Return the devices that have reached ``max_epsilon``."""
        return frozenset(client for client, count in counts.items() if not self.has_room(count))

    def has_room(self, count: int) -> bool:
        """Whether a device with `count` releases may take part once more."""
        return self.limit is None or count + self._per_seat <= self.limit

    def counted(self, counts: Mapping[int, int], seat: Seat) -> Mapping[int, int]:
        """Return the counts of all devices, with the releases of a seat's assignment added."""
        added = seat.num_steps if self._each_step else 1
        return {**counts, seat.client: counts.get(seat.client, 0) + added}
