"""Privacy accounting: epsilon as a function of a device's number of releases.

k releases of the same data with noise multiplier s compose to one Gaussian mechanism with
multiplier s / sqrt(k). The server knows the mini-batch seeds, so subsampling does not amplify
privacy and is not counted.
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
    """Privacy loss of a device as a function of its releases; needs dp-accounting."""

    def __init__(self, privacy: PrivacySpec) -> None:
        self._accountant = GaussianAccountant(privacy.delta)
        self.privacy = privacy

    def epsilon(self, releases: int) -> float:
        """Return epsilon after a number of releases, at the delta of the run."""
        return self._accountant.epsilon(releases / self.privacy.noise_multiplier**2)

    def affordable(self) -> int | None:
        """Return the maximal releases per device within ``max_epsilon``; None without a limit."""
        limit = self.privacy.max_epsilon
        if limit is None:
            return None
        return bisect_right(range(1, _MOST_RELEASES + 1), limit, key=self.epsilon)


class Releases:
    """Limits and reports the releases of a run's devices.

    Releases count when work is assigned, because a lost assignment may have been released.

    Args:
        spec: The run; its ``privacy`` is set.

    Raises:
        MissingExtraError: dp-accounting is not installed.
        ValueError: ``max_epsilon`` is too low for the run's rounds.
    """

    def __init__(self, spec: RunSpec) -> None:
        if spec.privacy is None:
            raise ValueError("privacy: is not set")
        self.accountant = Accountant(spec.privacy)
        self.privacy = spec.privacy
        self.most = self.accountant.affordable()
        # Target `alpha` adds noise once per round, whatever the number of local steps.
        self._each_step = spec.privacy.target == "losses"
        self.per_seat = spec.method.local_steps if self._each_step else 1
        if self.most is not None and spec.data is not None:
            seats = spec.rounds * spec.participation.clients_per_round
            room = spec.data.num_clients * (self.most // self.per_seat)
            if room < seats:
                raise ValueError(
                    f"privacy.max_epsilon: {spec.data.num_clients} clients may take part "
                    f"{room} times, {spec.rounds} rounds need {seats}"
                )

    @classmethod
    def of(cls, spec: RunSpec) -> Releases | None:
        """Return the releases of a run; None if its devices add no noise."""
        return None if spec.privacy is None else cls(spec)

    def of_work(self, seat: Seat) -> int:
        """Return the number of releases of a seat's assignment."""
        return seat.num_steps if self._each_step else 1

    def report(self, counts: Mapping[int, int]) -> PrivacyReport:
        """Return the privacy report, with the epsilon of the device with most releases."""
        most = max(counts.values(), default=0)
        return PrivacyReport(
            target=self.privacy.target,
            unit="example" if self._each_step else "device",
            delta=self.privacy.delta,
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
        return self.most is None or count + self.per_seat <= self.most


def may_take_seat(releases: Releases | None, counts: Mapping[int, int], client: int) -> bool:
    """Whether a client may take a seat within ``max_epsilon``."""
    return releases is None or releases.has_room(counts.get(client, 0))


def count_releases(
    releases: Releases | None, counts: Mapping[int, int], seat: Seat
) -> Mapping[int, int]:
    """Return the counts with the releases of a seat's assignment added."""
    if releases is None:
        return counts
    return {**counts, seat.client: counts.get(seat.client, 0) + releases.of_work(seat)}
