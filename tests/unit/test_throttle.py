"""Callers that ask too often are refused, each on its own count."""

from __future__ import annotations

import pytest

from fedone_sdk.aggregator.throttle import Throttle
from fedone_sdk.errors import ProblemError, is_retryable


def refused(throttle: Throttle, now: float, *limits: tuple[str, float | None]) -> ProblemError:
    with pytest.raises(ProblemError) as excinfo:
        throttle.admit(now, *limits)
    assert excinfo.value.code == "rate_limited"
    assert is_retryable(excinfo.value)
    return excinfo.value


def test_no_minute_has_more_than_the_limit() -> None:
    throttle = Throttle()
    throttle.admit(0.0, ("a", 2.0))
    throttle.admit(10.0, ("a", 2.0))
    assert refused(throttle, 20.0, ("a", 2.0)).retry_after_s == 40.0
    throttle.admit(60.0, ("a", 2.0))
    assert refused(throttle, 60.0, ("a", 2.0)).retry_after_s == 10.0


def test_each_caller_has_a_count_of_its_own() -> None:
    throttle = Throttle()
    throttle.admit(0.0, ("a", 1.0))
    throttle.admit(0.0, ("b", 1.0))
    refused(throttle, 1.0, ("a", 1.0))


def test_no_limit_refuses_nobody() -> None:
    throttle = Throttle()
    for _ in range(1000):
        throttle.admit(0.0, ("a", None))


def test_a_request_counts_against_all_limits_or_none() -> None:
    throttle = Throttle()
    throttle.admit(0.0, ("client", 1.0), ("run", 3.0))
    for _ in range(5):
        refused(throttle, 1.0, ("client", 1.0), ("run", 3.0))
    throttle.admit(1.0, ("other", 1.0), ("run", 3.0))
    throttle.admit(1.0, ("third", 1.0), ("run", 3.0))
    refused(throttle, 2.0, ("fourth", 1.0), ("run", 3.0))


def test_less_than_one_a_minute() -> None:
    throttle = Throttle()
    throttle.admit(0.0, ("a", 0.5))
    assert refused(throttle, 61.0, ("a", 0.5)).retry_after_s == 59.0
    throttle.admit(120.0, ("a", 0.5))


def test_who_is_silent_is_forgotten() -> None:
    throttle = Throttle()
    for number in range(100):
        throttle.admit(float(number), (f"client-{number}", 5.0))
    assert len(throttle._meters) == 60
