"""Partitions: exact properties, and the statistics of random ones."""

import json
import math
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.data import SplitMix64, dirichlet, draw_minibatch, iid, partition_clients
from fedone_sdk.data.draws import Partition, _dirichlet_draw, _round_shares
from fedone_sdk.errors import DataError

SEEDS = st.integers(0, 2**53 - 1)


def k_shot(labels: Any, num_clients: int, shots: int, seed: int) -> Partition:
    return partition_clients(labels, num_clients=num_clients, shots=shots, seed=seed)


def rows_of(shards: list[list[int]]) -> list[int]:
    return sorted(chain.from_iterable(shards))


@given(st.integers(1, 20), st.integers(0, 100), SEEDS)
def test_iid_uses_every_row_once(num_clients: int, extra: int, seed: int) -> None:
    num_examples = num_clients + extra
    shards = iid(num_examples, num_clients, seed)
    assert rows_of(shards) == list(range(num_examples))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert shards == iid(num_examples, num_clients, seed)


@given(
    st.integers(1, 12), st.lists(st.sampled_from("abc"), max_size=60), st.floats(1e-6, 1e6), SEEDS,
)  # fmt: skip
def test_dirichlet_uses_every_row_once(
    num_clients: int, extra: list[str], alpha: float, seed: int
) -> None:
    labels = ["a"] * num_clients + extra
    shards = dirichlet(labels, num_clients, alpha, seed)
    assert rows_of(shards) == list(range(len(labels)))
    assert min(map(len, shards)) >= 1
    assert shards == dirichlet(labels, num_clients, alpha, seed)


def skew(shards: list[list[int]], labels: list[int]) -> float:
    """Mean distance of a client's class-1 share from one half."""
    return fmean(abs(fmean(labels[row] for row in shard) - 0.5) for shard in shards)


@pytest.mark.parametrize("shots", [None, 16])
def test_skew_grows_as_alpha_falls(shots: int | None) -> None:
    labels = [row % 2 for row in range(4000)]
    skews = []
    for alpha in (0.01, 0.1, 1.0, 10.0, 1000.0):
        partition = partition_clients(labels, num_clients=50, shots=shots, alpha=alpha, seed=3)
        skews.append(skew(partition.shards, labels))
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.4
    assert skews[-1] < 0.1


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_dirichlet_moments(alpha: float) -> None:
    size, draws = 4, 20_000
    generator = random.Random(11)
    first = [_dirichlet_draw(size, alpha, generator)[0] for _ in range(draws)]
    mean, variance = 1 / size, (1 / size) * (1 - 1 / size) / (size * alpha + 1)
    assert fmean(first) == pytest.approx(mean, abs=5 * math.sqrt(variance / draws))
    assert pvariance(first) == pytest.approx(variance, rel=0.05)


def test_tiny_alpha_does_not_underflow() -> None:
    shares = _dirichlet_draw(5, 1e-8, random.Random(0))
    assert sorted(shares) == pytest.approx([0, 0, 0, 0, 1])


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8), st.integers(1, 200))
def test_rounded_shares_add_up(weights: list[float], total: int) -> None:
    shares = [weight / math.fsum(weights) for weight in weights]
    counts = _round_shares(shares, total)
    assert sum(counts) == total
    assert all(abs(c - s * total) <= 1 for c, s in zip(counts, shares, strict=True))


@given(
    st.integers(1, 8), st.integers(1, 6), st.integers(2, 4), st.integers(0, 9), SEEDS
)  # fmt: skip
def test_k_shot_is_disjoint_while_rows_suffice(
    num_clients: int, shots: int, num_classes: int, extra: int, seed: int
) -> None:
    labels = [c for c in range(num_classes) for _ in range(num_clients * shots + extra)]
    partition = k_shot(labels, num_clients, shots, seed)
    rows = rows_of(partition.shards)
    assert not partition.reused_rows
    assert len(rows) == len(set(rows))
    for shard in partition.shards:
        assert Counter(labels[row] for row in shard) == dict.fromkeys(range(num_classes), shots)


@given(
    st.integers(1, 9), st.integers(1, 6),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=30), SEEDS,
)  # fmt: skip
def test_k_shot_with_few_rows(num_clients: int, shots: int, labels: list[str], seed: int) -> None:
    partition = k_shot(labels, num_clients, shots, seed)
    held = Counter(labels)
    assert partition == k_shot(labels, num_clients, shots, seed)
    assert partition.reused_rows == any(n < num_clients * shots for n in held.values())
    for shard in partition.shards:
        assert all(0 <= row < len(labels) for row in shard)
        assert Counter(labels[row] for row in shard) == dict.fromkeys(held, shots)
        for row, times in Counter(shard).items():
            assert times == 1 or held[labels[row]] < shots
    used = Counter(chain.from_iterable(partition.shards))
    for label, count in held.items():  # reuse is even
        uses = [used[row] for row in range(len(labels)) if labels[row] == label]
        assert len(uses) == count
        assert max(uses) - min(uses) <= 1


@given(st.integers(1, 9), st.integers(1, 6), st.floats(0.01, 100), SEEDS)
def test_dirichlet_shots(num_clients: int, shots: int, alpha: float, seed: int) -> None:
    labels = [str(row % 3) for row in range(60)]
    arguments: dict[str, Any] = {
        "num_clients": num_clients, "shots": shots, "alpha": alpha, "seed": seed,
    }  # fmt: skip
    partition = partition_clients(labels, **arguments)
    assert partition == partition_clients(labels, **arguments)
    # A class of 20 rows is never less than one client's 6 * 3 wanted rows.
    assert all(len(set(shard)) == len(shard) == 3 * shots for shard in partition.shards)
    rows = rows_of(partition.shards)
    assert partition.reused_rows == (len(rows) > len(set(rows)))


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_composition_without_shots_uses_every_row_once(alpha: float | None) -> None:
    labels = [row % 2 for row in range(30)]
    partition = partition_clients(labels, num_clients=7, alpha=alpha, seed=5)
    assert rows_of(partition.shards) == list(range(30))
    assert not partition.reused_rows
    assert len(partition.shards) == 7
    assert all(partition.shards)


def test_seeds_differ() -> None:
    labels = [0, 1] * 50
    assert iid(100, 10, 0) != iid(100, 10, 1)
    assert dirichlet(labels, 10, 1.0, 0) != dirichlet(labels, 10, 1.0, 1)
    assert k_shot(labels, 5, 4, 0) != k_shot(labels, 5, 4, 1)


def test_too_few_rows_are_reported_with_their_number() -> None:
    with pytest.raises(DataError, match=r"3 rows are too few for 4 clients: at least 4"):
        iid(3, 4, 0)
    with pytest.raises(DataError, match=r"3 rows .* 4 clients: at least 4"):
        dirichlet([0, 1, 1], 4, 1.0, 0)
    with pytest.raises(DataError, match=r"0 rows"):
        k_shot([], 2, 1, 0)


VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "minibatch.json").read_text(encoding="utf-8")
)


def test_generator_vector() -> None:
    generator = SplitMix64(VECTORS["splitmix64"]["seed"])
    outputs = VECTORS["splitmix64"]["outputs"]
    assert [str(generator.next_u64()) for _ in outputs] == outputs


@pytest.mark.parametrize("vector", VECTORS["draws"], ids=lambda v: f"{v['seed']}")
def test_draw_vectors(vector: dict[str, Any]) -> None:
    drawn = draw_minibatch(vector["num_examples"], vector["batch_size"], vector["seed"])
    assert drawn == vector["rows"]


@given(st.integers(1, 200), st.integers(1, 250), st.integers(0, 2**53 - 1))
def test_distinct_rows_in_range(num_examples: int, batch_size: int, seed: int) -> None:
    drawn = draw_minibatch(num_examples, batch_size, seed)
    assert len(drawn) == len(set(drawn)) == min(batch_size, num_examples)
    assert set(drawn) <= set(range(num_examples))


def test_every_ordered_draw_is_equally_likely() -> None:
    num_examples, batch_size, draws = 6, 3, 24_000
    seen = Counter(tuple(draw_minibatch(num_examples, batch_size, s)) for s in range(draws))
    cells = math.perm(num_examples, batch_size)
    expected = draws / cells
    assert len(seen) == cells
    chi_square = sum((count - expected) ** 2 / expected for count in seen.values())
    degrees = cells - 1
    # Five standard deviations of a chi-square around its mean.
    assert abs(chi_square - degrees) < 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(("num_examples", "batch_size", "seed"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_bad_arguments(num_examples: int, batch_size: int, seed: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        draw_minibatch(num_examples, batch_size, seed)


@pytest.mark.parametrize("seed", [-1, 2**53])
def test_seed_out_of_range(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be in"):
        SplitMix64(seed)


@given(st.integers(0, 2**53 - 1), st.integers(1, 2**40))
def test_below_is_in_range(seed: int, bound: int) -> None:
    assert 0 <= SplitMix64(seed).below(bound) < bound


@given(st.integers(0, 2**53 - 1), st.lists(st.text(max_size=2)), st.integers(0, 40))
def test_sample_begins_a_shuffle(seed: int, items: list[str], count: int) -> None:
    before = list(items)
    shuffled = SplitMix64(seed).shuffle(items)
    assert items == before
    assert sorted(shuffled) == sorted(items)
    assert SplitMix64(seed).sample(items, count) == shuffled[:count]
