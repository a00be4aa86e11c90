"""Rates and addresses: which requests count for which caller."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.aggregator.http.guards import NO_LIMITS, Buckets, Limiter, Limits
from fedone_sdk.errors import ProblemError
from fedone_sdk.testing import ManualClock


def limiter_of(clock: ManualClock | None = None, **limits: Any) -> Limiter:
    return Limiter(NO_LIMITS.model_copy(update=limits), now=(clock or ManualClock()).now)


class TestBuckets:
    def test_a_minute_s_worth_may_come_at_once_and_then_evenly(self) -> None:
        clock = ManualClock()
        buckets = Buckets(60, clock.now)
        for _ in range(60):
            assert buckets.wait_s("a") == 0
            buckets.take("a")
        assert buckets.wait_s("a") == pytest.approx(1)
        clock.advance(0.5)
        assert buckets.wait_s("a") == pytest.approx(0.5)
        clock.advance(0.5)
        assert buckets.wait_s("a") == pytest.approx(0)
        buckets.take("a")
        assert buckets.wait_s("a") == pytest.approx(1)
        assert buckets.wait_s("b") == 0

    def test_less_than_one_a_minute_is_one_in_longer(self) -> None:
        buckets = Buckets(0.5, ManualClock().now)
        assert buckets.wait_s("a") == 0
        buckets.take("a")
        assert buckets.wait_s("a") == pytest.approx(120)

    @given(
        st.floats(0.1, 600), st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=100)
    )
    def test_no_span_sees_more_than_its_share(self, per_minute: float, gaps: list[float]) -> None:
        clock, taken = ManualClock(), []
        buckets = Buckets(per_minute, clock.now)
        for gap in gaps:
            clock.advance(gap)
            if buckets.wait_s("a") <= 0:
                buckets.take("a")
                taken.append(clock.now())
        burst = max(per_minute, 1)
        for first, start in enumerate(taken):
            for last in range(first, len(taken)):
                span = taken[last] - start
                assert last - first + 1 <= burst + span * per_minute / 60 + 1e-6

    def test_a_client_that_honours_retry_after_is_admitted(self) -> None:
        clock = ManualClock()
        buckets = Buckets(7, clock.now)
        for _ in range(50):
            clock.advance(buckets.wait_s("a"))
            assert buckets.wait_s("a") <= 1e-9
            buckets.take("a")

    def test_full_buckets_are_dropped(self) -> None:
        clock = ManualClock()
        buckets = Buckets(60, clock.now, capacity=10)
        for number in range(100):
            buckets.take(number)
        assert len(buckets._full_at) == 10
        clock.advance(2.0)
        buckets.take("later")
        assert list(buckets._full_at) == ["later"]


class TestAddresses:
    def address(self, peer: str | None, *forwarded: str, proxies: tuple[str, ...] = ()) -> str:
        request = make_mocked_request(
            "GET", "/", headers=[("X-Forwarded-For", value) for value in forwarded]
        ).clone(remote=peer)
        return limiter_of(trusted_proxies=proxies).address(request)

    @pytest.mark.parametrize(
        ("peer", "counted"),
        [("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"),
         ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
         ("fe80::1%eth0", "fe80::/64"), (None, ""), ("", "")],
    )  # fmt: skip
    def test_callers_that_count_as_one(self, peer: str | None, counted: str) -> None:
        assert self.address(peer) == counted

    def test_an_unknown_proxy_is_not_trusted(self) -> None:
        assert self.address("192.0.2.7", "198.51.100.1") == "192.0.2.7"
        assert self.address("192.0.2.7", "198.51.100.1", proxies=("10.0.0.0/8",)) == "192.0.2.7"

    @pytest.mark.parametrize(
        ("forwarded", "counted"),
        [(("198.51.100.1",), "198.51.100.1"), (("6.6.6.6, 198.51.100.1",), "198.51.100.1"),
         (("6.6.6.6", "198.51.100.1, 10.0.0.2"), "198.51.100.1"),
         (("198.51.100.1, 10.0.0.9, 10.0.0.2",), "198.51.100.1"), (("10.0.0.9",), "10.0.0.9"),
         (("6.6.6.6, nonsense, 10.0.0.2",), "10.0.0.2"), (("",), "10.0.0.1"), ((), "10.0.0.1"),
         (("2001:db8::1",), "2001:db8::/64"), (("[2001:db8::1]",), "2001:db8::/64"),
         (("[2001:db8::1]:80",), "2001:db8::/64"), (("198.51.100.1:80",), "198.51.100.1")],
    )  # fmt: skip
    def test_a_proxy_of_ours_is_believed_as_far_as_it_saw(
        self, forwarded: tuple[str, ...], counted: str
    ) -> None:
        assert self.address("10.0.0.1", *forwarded, proxies=("10.0.0.0/8",)) == counted


class TestLimiter:
    def test_failures_of_one_who_must_wait_already_do_not_add_up(self) -> None:
        """Else a device that shares an address with a broken one would be blocked for days."""
        clock = ManualClock()
        limiter = limiter_of(clock, failures_per_minute_per_ip=60.0)
        for _ in range(10_000):
            limiter.failed("a")
        with pytest.raises(ProblemError) as caught:
            limiter.unknown_caller("a")
        assert caught.value.retry_after_s == pytest.approx(1)
        clock.advance(1.001)
        limiter.unknown_caller("a")

    def test_nothing_is_limited_by_default_in_one_process(self) -> None:
        limiter = Limiter(NO_LIMITS)
        for _ in range(10_000):
            limiter.failed("a")
            limiter.unknown_caller("a")
            limiter.clients.admit(0)


@pytest.mark.parametrize(
    "given",
    [{"trusted_proxies": ["nonsense"]}, {"trusted_proxies": ["10.0.0.1/8"]},
     {"requests_per_minute_per_ip": 0}, {"keepalive_s": 0}],
)  # fmt: skip
def test_impossible_limits_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Limits.model_validate(given)
