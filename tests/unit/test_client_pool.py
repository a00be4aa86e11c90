"""The client pool: admission, waits, and equal chances."""

import heapq
import random
from collections import Counter

import pytest

from fedone_sdk.aggregator.dispatch.client_pool import (
    MAX_RETRY_AFTER_S,
    MEMBER_TTL_S,
    ClientPool,
    RetryLater,
)
from fedone_sdk.stores import Member


def pool_of(**capacities: int) -> ClientPool:
    pool = ClientPool(random.Random(0))
    for run_id, capacity in capacities.items():
        pool.add_run(run_id, capacity)
    return pool


def enter(
    pool: ClientPool, client: int, now: float = 0.0, patterns: tuple[str, ...] | None = None
) -> object:
    return pool.enter(client, 10 + client, None, patterns, now)


class TestPlaces:
    def test_clients_wait_until_the_places_are_taken(self) -> None:
        pool = pool_of(a=2)
        assert isinstance(enter(pool, 0), Member)
        assert isinstance(enter(pool, 1), Member)
        assert isinstance(enter(pool, 2), RetryLater)
        assert pool.waiting("a", 0.0) == {0: 10, 1: 11}
        assert pool.num_away == 1

    def test_a_member_keeps_its_place_and_is_written_again_before_it_counts_as_gone(self) -> None:
        pool = pool_of(a=1)
        enter(pool, 0)
        assert enter(pool, 0, now=20.0) is None
        assert len(pool) == 1
        again = enter(pool, 0, now=MEMBER_TTL_S * 0.6)
        assert isinstance(again, Member)
        assert again.until == MEMBER_TTL_S * 1.6

    def test_a_member_that_is_silent_for_long_is_not_drawn_and_loses_its_place(self) -> None:
        pool = pool_of(a=1)
        enter(pool, 0)
        assert pool.waiting("a", MEMBER_TTL_S - 1) == {0: 10}
        assert pool.waiting("a", MEMBER_TTL_S) == {}
        assert isinstance(enter(pool, 1, now=MEMBER_TTL_S - 1), RetryLater)
        assert isinstance(enter(pool, 1, now=MEMBER_TTL_S + 20), Member)

    def test_a_changed_number_of_examples_is_kept(self) -> None:
        pool = pool_of(a=1)
        pool.enter(0, 10, None, None, 0.0)
        changed = pool.enter(0, 12, None, None, 1.0)
        assert isinstance(changed, Member)
        assert changed.num_examples == 12
        assert pool.waiting("a", 1.0) == {0: 12}

    def test_a_client_waits_for_every_run_that_has_a_place_and_that_it_may_work_for(self) -> None:
        pool = pool_of(a=1, b=2)
        enter(pool, 0)
        enter(pool, 1)
        assert set(pool.waiting("a", 0.0)) == {0}
        assert set(pool.waiting("b", 0.0)) == {0, 1}
        pool = pool_of(a=1, b=1)
        enter(pool, 0, patterns=("b*",))
        pool.enter(1, 10, "b", None, 0.0)
        assert pool.waiting("a", 0.0) == {}

    def test_a_run_is_waited_for_from_the_next_request_until_it_is_closed(self) -> None:
        pool = pool_of(a=1)
        enter(pool, 0)
        pool.add_run("b", 1)
        assert pool.waiting("b", 0.0) == {}
        assert enter(pool, 0) is None
        assert pool.waiting("b", 0.0) == {0: 10}
        pool.remove_run("b")
        assert pool.waiting("b", 0.0) == {}
        assert not pool.has_run("b")

    def test_a_running_run_is_waited_for_at_once(self) -> None:
        pool = pool_of(a=4)
        enter(pool, 0)
        enter(pool, 1, patterns=("a", "c"))
        pool.enter(2, 12, "b", None, 0.0)
        pool.enter(3, 13, "a", None, 0.0)
        pool.add_run("b", 1, again=True)
        assert pool.waiting("b", 0.0) == {0: 10, 2: 12}
        assert enter(pool, 0) is None
        assert pool.waiting("b", 0.0) == {0: 10, 2: 12}

    def test_without_a_run_some_may_wait_for_one(self) -> None:
        pool = pool_of()
        answers = [enter(pool, client) for client in range(100)]
        assert 0 < sum(isinstance(answer, Member) for answer in answers) < 100

    def test_work_for_one_run_frees_the_places_in_others_until_the_next_request(self) -> None:
        pool = pool_of(a=1, b=1)
        enter(pool, 0)
        pool.start_work(0, "a")
        assert set(pool.waiting("a", 0.0)) == {0}
        assert pool.waiting("b", 0.0) == {}
        assert enter(pool, 0) is None
        assert set(pool.waiting("b", 0.0)) == {0}


class TestMakingRoom:
    def test_a_client_that_worked_makes_room_where_others_wait(self) -> None:
        pool = pool_of(a=2)
        enter(pool, 0)
        assert not pool.finish_work(0, 1.0)
        assert 0 in pool
        for client in (1, 2):
            enter(pool, client)
        assert pool.finish_work(0, 1.0)
        assert isinstance(enter(pool, 0, now=1.1), RetryLater)
        assert isinstance(enter(pool, 2, now=1.2), Member)

    def test_having_waited_in_vain_it_makes_room_too(self) -> None:
        pool = pool_of(a=1)
        enter(pool, 0)
        assert pool.time_out(0, 25.0) is None
        enter(pool, 1, now=25.0)
        assert isinstance(pool.time_out(0, 26.0), RetryLater)
        assert 0 not in pool

    def test_it_is_let_in_again_when_too_few_are_left_to_draw_from(self) -> None:
        pool = pool_of(a=4)
        for client in range(5):
            enter(pool, client)
        for client in range(3):
            pool.finish_work(client, 1.0)
        assert isinstance(enter(pool, 0, now=1.1), Member)

    def test_clients_that_never_return_are_dropped(self) -> None:
        pool = pool_of(a=1)
        enter(pool, 0)
        enter(pool, 1)
        assert pool.time_out(0, 3 * MAX_RETRY_AFTER_S) is None
        assert pool.num_away == 0


class TestPause:
    def test_is_spread_so_that_devices_do_not_come_in_step(self) -> None:
        pool = pool_of(a=1)
        enter(pool, 0)
        pauses = [enter(pool, client, now=1.0) for client in range(1, 200)]
        assert all(isinstance(pause, RetryLater) for pause in pauses)
        assert len({pause.retry_after_s for pause in pauses}) == len(pauses)  # type: ignore[attr-defined]

    def test_is_short_at_first_and_never_longer_than_allowed(self) -> None:
        pool = pool_of(a=1)
        enter(pool, 0)
        for client in range(1, 5000):
            first = enter(pool, client, now=1.0)
            assert isinstance(first, RetryLater)
            assert first.retry_after_s <= 1.5 * 11.0
        late = [enter(pool, client, now=500.0) for client in range(1, 5000)]
        longest = max(pause.retry_after_s for pause in late if isinstance(pause, RetryLater))
        assert 100 < longest <= MAX_RETRY_AFTER_S


def test_stored_members_are_restored() -> None:
    pool = pool_of(a=1)
    enter(pool, 0)
    after = pool_of(a=1)
    after.add(
        Member(client_index=0, num_examples=10, run_id=None, until=MEMBER_TTL_S), ("a", "gone")
    )
    assert after.waiting("a", 0.0) == pool.waiting("a", 0.0)


@pytest.mark.parametrize(("devices", "work_s"), [(40, 1.0), (1500, 1.0), (1500, 0.05)])
def test_every_device_has_the_same_chance(devices: int, work_s: float) -> None:
    """Draws from the pool, over time, are draws from all devices: chi squared of their turns."""
    rng, pool, turns = random.Random(7), pool_of(a=64), Counter[int]()
    polls: dict[int, float] = {}
    # (time, what, who): devices that ask, polls that end, work that ends.
    agenda: list[tuple[float, str, int]] = [
        (rng.uniform(0, 30), "ask", device) for device in range(devices)
    ]
    heapq.heapify(agenda)
    working: int | None = None
    warm, rounds, asked, now = 300.0, 8_000, 0, 0.0
    while sum(turns.values()) < rounds:
        now, what, device = heapq.heappop(agenda)
        if what == "ask":
            asked += now > warm
            answer = pool.enter(device, 10, None, None, now)
            if isinstance(answer, RetryLater):
                heapq.heappush(agenda, (now + answer.retry_after_s, "ask", device))
            else:
                polls[device] = now + 25.0
                heapq.heappush(agenda, (now + 25.0, "tired", device))
        elif what == "tired":
            if polls.get(device) != now:
                continue
            del polls[device]
            rest = pool.time_out(device, now)
            heapq.heappush(agenda, (now + (rest.retry_after_s if rest else 1.0), "ask", device))
        else:
            working = None
            pool.finish_work(device, now)
            heapq.heappush(agenda, (now + 0.01, "ask", device))
        if working is None:
            waiting = [client for client in pool.waiting("a", now) if client in polls]
            if waiting:
                working = rng.choice(sorted(waiting))
                del polls[working]
                turns[working] += now > warm
                heapq.heappush(agenda, (now + work_s * rng.uniform(0.5, 1.5), "done", working))
    expected = rounds / devices
    chi_squared = sum((turns[device] - expected) ** 2 / expected for device in range(devices))
    # Turns that keep a distance from each other vary less than independent ones: only too much
    # spread would be a preference. Mean devices - 1, standard deviation sqrt(2 (devices - 1)).
    assert chi_squared < devices - 1 + 4 * (2 * (devices - 1)) ** 0.5
    if devices > 1000 and work_s == 1.0:
        per_hour = asked / (now - warm) * 3600 / devices
        assert per_hour < 60, "a device that has nothing to do asks about once a minute at most"
