from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.algorithms.calibration import BiasGrid
from fedone_sdk.algorithms.pool import LOOKS, Pool
from tests.benchmarks.queries.lies import LIES

BIASES = tuple((0.0, float(offset)) for offset in range(-4, 5))
GRID = BiasGrid(BIASES)
OFFSETS = GRID.biases[:, 1]
PROMPTS = np.arange(12)[:, None]


def plain(losses: list[float] | np.ndarray, count: int = 1) -> ClassLosses:
    means = np.array(losses, dtype=float)[:, None, None]
    return ClassLosses(means=means, counts=np.full(1, count))


def rows(*tokens: int) -> np.ndarray:
    return np.array(tokens)[:, None]


class Client:
    """Examples with log-odds of a difficulty of their own; a prompt shifts and sharpens them."""

    def __init__(self, rng: np.random.Generator, *, positive: float, size: int = 32) -> None:
        self.labels = (rng.random(size) < positive).astype(int)
        self.odds = np.where(self.labels == 1, 1.0, -1.0) * rng.normal(
            1.0 + 0.3 * rng.normal(), 1.0, size
        )

    def losses(self, shifts: np.ndarray, scales: np.ndarray) -> ClassLosses:
        odds = self.odds * scales[:, None] + shifts.reshape(len(scales), -1)
        sign = np.where(self.labels == 1, -1.0, 1.0)
        losses = np.logaddexp(0.0, sign[:, None] * (odds[:, :, None] + OFFSETS))
        counts = np.bincount(self.labels, minlength=2)
        means = np.stack(
            [losses[:, self.labels == c].sum(axis=1) / max(counts[c], 1) for c in range(2)],
            axis=1,
        )
        return ClassLosses(means=means, counts=counts)


def clients(kind: str, rng: np.random.Generator, count: int) -> list[Client]:
    shares = np.full(count, 0.5) if kind == "iid" else rng.dirichlet([0.1, 0.1], count)[:, 1]
    return [Client(rng, positive=share) for share in shares]


@pytest.mark.parametrize("lie", [None, *LIES])
@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_prompts_are_ranked_as_if_all_had_met_all_clients(kind: str, lie: str | None) -> None:
    """12 prompts, three at a time and one of them always, each on 10 clients of 110.

    Also where every fifth client lies.
    """
    rng = np.random.default_rng(4)
    shifts, scales = rng.normal(0.0, 0.7, 12), np.linspace(0.2, 1.8, 12)
    pool = Pool.empty(1, GRID)
    everybody = clients(kind, rng, 110)
    met = []
    lies = np.arange(110) % 5 == 2 if lie else np.zeros(110, dtype=bool)
    for number, client in enumerate(everybody):
        tokens = rows(0, 1 + (2 * number) % 11, 1 + (2 * number + 1) % 11)
        told = client.losses(shifts[tokens[:, 0]], scales[tokens[:, 0]])
        if lies[number]:
            told = replace(told, means=LIES[str(lie)](told.means, rng))
        pool = pool.with_batch(tokens, told)
        met.append(client.losses(shifts, scales))
    # What each is worth at its best bias on a fleet of equally frequent classes.
    by_class = np.stack(
        [
            np.average(
                [losses.means[:, c] for losses in met],
                axis=0,
                weights=[losses.counts[c] for losses in met],
            )
            for c in range(2)
        ]
    )
    truth = GRID.lowest(by_class.mean(axis=0))[0]
    order = pool.prompts[:, 0]
    found = pool.judged
    assert np.corrcoef(found.value, truth[order])[0, 1] > 0.85
    # What is not known is about as much as it says.
    error = found.value - truth[order]
    assert 0.2 < np.median(np.abs(error - np.median(error)) / found.spread) < 1.5
    single = np.array([pool.bias(row)[1] for row in range(12)])  # type: ignore[index]
    best = np.array([GRID.best(by_class.mean(axis=0)[token])[1] for token in order])
    assert np.abs(single - best).mean() < 0.35
    assert np.abs(best).mean() > 0.4
    assert np.median(pool.trust[~lies]) > 0.9
    if lie is not None:
        assert np.median(pool.trust[lies]) < 0.3


def test_what_prompts_change_more_may_differ_more_between_clients() -> None:
    """One prompt does much, to each client's examples otherwise; all others do nothing at all."""
    rng = np.random.default_rng(0)
    pool = Pool.empty(1)
    for number in range(30):
        told = [0.0, -1.0 + 0.2 * rng.normal(), 0.0, 0.0] if number % 5 == 0 else [0.0, 0.0, 0.0]
        tokens = rows(0, 1, 2, 3) if number % 5 == 0 else rows(0, 2, 3)
        pool = pool.with_batch(tokens, plain(np.array(told) + number))
    assert pool.trust.min() > 0.9
    assert pool.own[1, 0, 0] - pool.own[0, 0, 0] < -0.8


def test_effects_are_removed_exactly_without_noise() -> None:
    pool = Pool.empty(1)
    for number in range(200):
        # Three at a time, and harder by another number for all of them; 3 and 4 never meet.
        tokens = rows(0, 1 + number % 2, 3 + number % 2)
        pool = pool.with_batch(tokens, plain(2.0 * tokens[:, 0] + 100.0 * (number % 7)))
    own = pool.own[np.argsort(pool.prompts[:, 0]), 0, 0]
    assert own - own[0] == pytest.approx([0.0, 2.0, 4.0, 6.0, 8.0], rel=0.02)


def test_what_a_leader_lacks_on_later_clients_is_not_laid_to_their_charge() -> None:
    """Three that were lucky once are always asked; newcomers of their later clients are no better.

    With each client's effect taken out as it comes, the leaders' luck would go into the effects of
    all later clients.
    """
    rng = np.random.default_rng(0)
    pool = Pool.empty(1).with_batch(rows(0, 1, 2, 3), plain([0.0, -1.0, -1.0, 0.0]))
    for number in range(60):
        noise = 0.1 * rng.normal(size=4)
        # In truth all but the reference, 0, are worth 0.2.
        tokens = rows(0, 1, 2, 10 + number)
        pool = pool.with_batch(tokens, plain(np.array([0.0, 0.2, 0.2, 0.2]) + noise + number))
    own = pool.own[:, 0, 0] - pool.own[0, 0, 0]
    known = dict(zip(pool.prompts[:, 0].tolist(), own.tolist(), strict=True))
    assert known[1] > 0.1
    assert known[2] > 0.1
    assert pool.judged.pessimistic.argmin() == 0


@pytest.mark.parametrize("loss", [0.4, 2.0, 20.0])
def test_a_bad_prompt_does_not_make_those_beside_it_look_good(loss: float) -> None:
    """What it is denied by shrinking must not become an effect of the client that met it."""
    rng = np.random.default_rng(0)
    pool = Pool.empty(1)
    for client in range(20):
        new = range(10 * client + 2, 10 * client + 9)
        losses = 0.4 + 0.01 * rng.normal(size=9) + 0.1 * rng.normal()
        losses[-1] = loss if client == 10 else losses[-1]
        pool = pool.with_batch(rows(0, 1, *new), plain(losses))
    beside = np.isin(pool.prompts[:, 0], range(102, 108))
    values = pool.judged.value
    assert (values[beside] - values[0]).min() > -0.01


def test_a_lucky_client_makes_no_leader_but_is_worth_another_look() -> None:
    rng = np.random.default_rng(0)
    pool = Pool.empty(1)
    for _ in range(8):
        pool = pool.with_batch(
            rows(0, 1, 2, 3), plain(np.array([-1.0, 0.0, 1.0, 0.5]) + rng.normal(0, 0.6, 4))
        )
    pool = pool.with_batch(rows(0, 4), plain([-1.0, -1.6]))
    judged = pool.judged
    assert judged.pessimistic.argmin() == 0
    assert judged.optimistic[1:].argmin() == 3  # of those that do not lead
    assert judged.spread[4] > 2 * judged.spread[0]


def test_what_one_client_says_alone_makes_no_leader() -> None:
    first = Pool.empty(1).with_batch(rows(0, 1, 2), plain([3.0, 2.0, 4.0]))
    assert first.leader() == 1  # there is nothing else
    assert replace(first, blank=0).leader() == 0
    pool = replace(first, blank=2).with_batch(rows(0, 3), plain([3.0, -50.0]))
    assert pool.leader() == 0
    assert pool.ranked(3).prompts[0].tolist() == [0]
    assert pool.with_batch(rows(0, 3), plain([4.0, -49.0])).leader() == 3


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_what_sways_some_examples_and_not_others_does_not_lead_by_luck(kind: str) -> None:
    """All prompts shift the log-odds by 1.2, but unevenly: a loss of 0.01 at the best bias."""
    led = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        pool = Pool.empty(1, GRID, blank=0)
        for client in clients(kind, rng, 40):
            prompts = rows(0, *(1 + rng.choice(11, 2, replace=False)))
            swayed = rng.gamma(12.0, 0.1, (3, len(client.odds))) * (prompts > 0)
            pool = pool.with_batch(prompts, client.losses(swayed, np.ones(3)))
        led += pool.leader() != pool.reference
    assert led == 0


def test_one_class_alone_says_nothing_of_a_prompt() -> None:
    """A shift of the log-odds makes a prompt look good to clients that are all positive."""
    rng = np.random.default_rng(1)
    shifts, scales = np.zeros(3), np.array([1.0, 1.3, 1.0])
    pool = Pool.empty(1, GRID)
    for client in clients("iid", rng, 20):
        pool = pool.with_batch(rows(0, 1), client.losses(shifts[:2], scales[:2]))
    shifts[2] = 2.0
    only_positive = Client(rng, positive=1.0)
    pool = pool.with_batch(rows(0, 1, 2), only_positive.losses(shifts, scales))
    value = pool.judged.value
    assert value.argmin() == 1
    assert pool.judged.pessimistic.argmin() == 1
    assert value[1] < value[2] < value[0]  # as the others' mean


def test_without_every_class_there_is_no_bias() -> None:
    pool = Pool.empty(1, GRID)
    client = Client(np.random.default_rng(2), positive=1.0)
    pool = pool.with_batch(rows(0, 1), client.losses(np.array([0.0, 1.0]), np.ones(2)))
    assert pool.bias(0).tolist() == [0.0, 0.0]  # type: ignore[union-attr]
    assert pool.judged.value.min() > 0.05


def test_class_shares_of_uneven_clients_are_believed_less() -> None:
    def share(*positive: float) -> float:
        pool = Pool.empty(1, GRID)
        for number, part in enumerate(positive):
            client = Client(np.random.default_rng(number), positive=part, size=200)
            pool = pool.with_batch(rows(0, 1), client.losses(np.zeros(2), np.ones(2)))
        return float(pool.class_share[1])

    alike, apart = [0.8] * 100, [0.0, 1.0, 1.0, 1.0, 1.0] * 20
    assert share(*alike) == pytest.approx(0.8, abs=0.04)
    assert 0.65 < share(*apart) < share(*alike) - 0.03
    # Five who by chance are alike, or one: next to nothing.
    assert 0.5 < share(*[1.0] * 5) < 0.6
    assert 0.5 < share(1.0) < share(*[1.0] * 5)


def test_equal_prompts_share_a_row_and_count_once() -> None:
    pool = Pool.empty(1).with_batch(rows(1, 1, 2), plain([1.0, 1.0, 3.0]))
    assert pool.prompts.tolist() == [[1], [2]]
    assert pool.count[:, 0].tolist() == [1, 1]
    once = Pool.empty(1).with_batch(rows(1, 2), plain([1.0, 3.0]))
    assert np.array_equal(pool.own, once.own)


def test_a_strong_prompt_does_not_hide_who_lies_of_the_others() -> None:
    """Every fifth client mirrors its losses at their mean. Others have met what costs 2 nats."""
    worth = np.append(0.0, np.linspace(-0.1, 0.15, 6))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        pool, lies = Pool.empty(1), np.arange(20) % 5 == 0
        for number, lie in enumerate(lies):
            told = worth * rng.normal(1.0, 0.2, len(worth)) + rng.normal(0.0, 0.01, len(worth))
            if lie:
                told = LIES["inverted"](told, rng)
            elif number % 2:
                told = np.append(told, 2.0 * rng.normal(1.0, 0.2))
            pool = pool.with_batch(rows(*range(len(told))), plain(told + rng.normal(), count=32))
        assert pool.trust[lies].max() < 0.25
        assert np.median(pool.trust[~lies]) > 0.9
        assert pool.leader() == 1


def test_ranked_keeps_no_prompt() -> None:
    pool = Pool.empty(1).with_batch(rows(0, 1, 2, 3), plain([4.0, 3.0, 2.0, 1.0]))
    assert pool.ranked(2).prompts[:, 0].tolist() == [3, 2]
    assert replace(pool, blank=0).ranked(2).prompts[:, 0].tolist() == [0, 3]


def test_the_oldest_losses_are_forgotten_and_what_is_known_by_them_alone() -> None:
    pool = Pool.empty(1).with_batch(rows(0, 1, 2), plain([1.0, 2.0, 0.0]))
    for _ in range(20):
        pool = pool.with_batch(rows(0, 1), plain([1.0, 2.0])).ranked(3)
        assert len(pool.rows) <= 3 * LOOKS
        assert len(pool.examples) == len(np.unique(pool.batches))
    assert pool.prompts[:, 0].tolist() == [0, 1]
    assert float(pool.own[1, 0, 0] - pool.own[0, 0, 0]) == pytest.approx(1.0, abs=0.2)


def test_a_memory_is_read_back_or_refused() -> None:
    client = Client(np.random.default_rng(0), positive=0.5)
    pool = Pool.empty(1, GRID).with_batch(rows(0, 1), client.losses(np.zeros(2), np.ones(2)))
    again = Pool.remembered(pool.memory(), 1, GRID)
    assert again.judged.value.tolist() == pool.judged.value.tolist()
    for name, value in (
        ("prompts", np.zeros((2, 3), np.int64)),
        ("prompts", np.zeros((3, 1), np.int64)),
        ("prompts", np.zeros((2, 1), np.int64)),  # one prompt twice
        ("rows", np.array([0, 2])),
        ("rows", np.zeros(2)),
        *((name, array.flat[0]) for name, array in pool.memory().items()),
        ("batches", np.array([1, 1])),
        ("means", np.zeros((2, 1, 1), np.float32)),
        ("means", np.full((2, 2, 9), np.inf, np.float32)),
        ("examples", -pool.examples),
        ("examples", np.zeros((1, 2), np.int64)),
        ("shares", np.zeros(3)),
    ):
        with pytest.raises(ValueError, match="pool"):
            Pool.remembered({**pool.memory(), name: np.asarray(value)}, 1, GRID)
    with pytest.raises(ValueError, match="memory"):
        Pool.remembered({"m": np.zeros(3)}, 1)
    with pytest.raises(ValueError, match="fit"):
        Pool.remembered(pool.memory(), 1)
    with pytest.raises(ValueError, match="shape"):
        pool.with_batch(rows(0), plain([1.0]))
