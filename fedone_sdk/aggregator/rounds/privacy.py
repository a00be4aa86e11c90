"""Privacy accounting: epsilon as a function of a device's number of results with noise (releases).

k releases of the same data with noise multiplier s compose to one Gaussian mechanism with
multiplier s / sqrt(k). Subsampling does not amplify privacy here, because the server knows the
seeds of the mini-batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from fedone_sdk.accountant import GaussianAccountant
from fedone_sdk.aggregator.rounds.run_state import Seat
from fedone_sdk.messages import PrivacyReport
from fedone_sdk.spec import PrivacySpec, RunSpec

_MOST_RELEASES = 10**9


class Accountant:
    """Computes a device's epsilon from its number of releases; needs dp-accounting."""

    def __init__(self, privacy: PrivacySpec) -> None:
        self.accountant = GaussianAccountant(privacy.delta)
        self.privacy = privacy

    def epsilon(self, releases: int) -> float:
        """Return epsilon after a number of releases, at the delta of the run."""
        return self.accountant.epsilon(releases / self.privacy.noise_multiplier**2)

    def affordable(self) -> int | None:
        """Return how many releases of a device ``max_epsilon`` allows; None without a limit."""
        limit = self.privacy.max_epsilon
        if limit is None:
            return None
        return bisect_right(range(1, _MOST_RELEASES + 1), limit, key=self.epsilon)


class Releases:
    """Limits and reports the releases of a run's devices.

    A release counts when the work is assigned, because the device of a lost assignment may have
    sent its result.

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
                    f"{possible} times, {spec.rounds} rounds need {seats}"
                )

    def report(self, counts: Mapping[int, int]) -> PrivacyReport:
        """Return the privacy report, with the epsilon of the device that has the most releases."""
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
        """Whether a device with `count` releases may take another seat."""
        return self.limit is None or count + self._per_seat <= self.limit

    def counted(self, counts: Mapping[int, int], seat: Seat) -> Mapping[int, int]:
        """Return the counts with the releases of a seat's assignment added."""
        added = seat.num_steps if self._each_step else 1
        return {**counts, seat.client: counts.get(seat.client, 0) + added}
