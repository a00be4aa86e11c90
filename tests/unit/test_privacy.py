"""The noise that devices add, and the accountant's epsilon."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedone_sdk.accountant import GaussianAccountant
from fedone_sdk.aggregator.rounds.privacy import Accountant
from fedone_sdk.client import noise
from fedone_sdk.client.noise import (
    discrete_gaussian,
    noised_means,
    private_losses,
    private_step,
    private_terms,
)
from fedone_sdk.data.draws import SplitMix64
from fedone_sdk.messages import MAX_LOSS
from fedone_sdk.spec.sections import PrivacySpec

pytest.importorskip("dp_accounting")

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "noise.json").read_text())


def privacy(**changes: object) -> PrivacySpec:
    return PrivacySpec.model_validate({"clip": 2.0, "noise_multiplier": 1.0, **changes})


class SplitMix(random.Random):
    """Bytes of SplitMix64, big-endian, read as the operating system's are by `SystemRandom`."""

    def __new__(cls, *_: object) -> SplitMix:
        return super().__new__(cls)

    def __init__(self, seed: int) -> None:
        super().__init__()
        words = iter(SplitMix64(seed).next_u64, None)
        self._bytes = (byte for word in words for byte in word.to_bytes(8, "big"))

    def getrandbits(self, k: int) -> int:
        count = (k + 7) // 8
        return int.from_bytes(itertools.islice(self._bytes, count), "big") >> (8 * count - k)


def silence(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Replace the noise by zeros; return what is asked for."""
    asked: list[tuple[int, int]] = []

    def still(count: int, variance: int, _: random.Random) -> list[int]:
        asked.append((count, variance))
        return [0] * count

    monkeypatch.setattr(noise, "discrete_gaussian", still)
    return asked


# The noise


@pytest.mark.parametrize("variance", [1, 6, 30])
def test_noise_has_the_probabilities_of_the_discrete_gaussian(variance: int) -> None:
    count, reach = 20_000, math.ceil(9 * math.sqrt(variance))
    weights = {k: math.exp(-k * k / 2 / variance) for k in range(-reach, reach + 1)}
    found = Counter(discrete_gaussian(count, variance, random.Random(variance)))
    expected = {k: count * weight / sum(weights.values()) for k, weight in weights.items()}
    cells = [k for k, number in expected.items() if number > 10]
    distance = sum((found[k] - expected[k]) ** 2 / expected[k] for k in cells)
    assert distance < len(cells) + 5 * math.sqrt(2 * len(cells))
    assert sum(found[k] for k in cells) > 0.99 * count


def test_noise_on_a_fine_grid_is_normal_and_independent() -> None:
    count, std = 20_000, 10**12
    drawn = discrete_gaussian(count, std**2, random.Random(0))
    # Kolmogorov-Smirnov, critical value at 1e-6.
    normal = NormalDist(0.0, std)
    distance = max(abs(normal.cdf(x) - (i + 0.5) / count) for i, x in enumerate(sorted(drawn)))
    assert distance < math.sqrt(-math.log(1e-6 / 2) / 2 / count)
    pairs = sum(a * b for a, b in itertools.pairwise(drawn)) / count / std**2
    assert abs(pairs) < 5 / math.sqrt(count)


def test_noise_takes_no_seed() -> None:
    random.seed(1)
    first = discrete_gaussian(3, 10**18)
    random.seed(1)
    assert discrete_gaussian(3, 10**18) != first
    assert isinstance(noise._RANDOM, random.SystemRandom)


@pytest.mark.parametrize(
    "vector", VECTORS["releases"] + VECTORS["terms"], ids=lambda vector: vector["name"]
)
def test_golden_releases(vector: dict[str, Any]) -> None:
    spec = privacy(clip=vector["clip"], noise_multiplier=vector["noise_multiplier"])
    random = SplitMix(vector["seed"])
    if "terms" in vector:
        released = private_terms(vector["terms"], vector["targets"], spec, random)
    else:
        released = private_losses(vector["losses"], spec, random)
    assert list(released) == vector["released"]


@pytest.mark.parametrize("multiplier", [0.1, 1.0, 1000.0])
@pytest.mark.parametrize("clip", [1e-3, 2.0, 1e3])
def test_no_parameter_makes_the_noise_vanish_or_overflow(clip: float, multiplier: float) -> None:
    spec = privacy(clip=clip, noise_multiplier=multiplier)
    released = private_losses([[0.0]] * 400, spec, random.Random(0))
    std = min(multiplier * math.sqrt(400) * clip, MAX_LOSS)
    assert 0.5 * std < np.std(released) < 1.1 * std
    assert max(map(abs, released)) <= MAX_LOSS
    assert all(
        mean * 2**30 / clip == pytest.approx(round(mean * 2**30 / clip), rel=1e-15)
        for mean in released
    )


def test_values_are_clipped_and_noised_as_specified(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = silence(monkeypatch)
    found = private_losses([[-1.0, 1.0, 9.0, 2.0], [0.0, 0.0, 0.0, 1.0]], privacy())
    assert found == ((0 + 1 + 2 + 2) / 4, 0.25)
    assert noised_means([[-3.0, 0.5]], [(-1.0, 1.0)], 3.0) == (-0.25,)
    assert asked == [(2, 2 * 2**60), (1, 9 * 2**60)]


def test_one_example_moves_the_means_by_no_more_than_the_sensitivity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brute force over random and extreme losses; the bound is met, and reached."""
    silence(monkeypatch)
    rng = random.Random(0)
    prompts, examples, widest = 5, 7, 0.0
    bound = math.sqrt(prompts) * 2.0 / examples

    def column() -> list[float]:
        return [rng.choice([-5.0, 0.0, rng.uniform(0, 3), 50.0]) for _ in range(prompts)]

    for trial in range(500):
        columns = [column() for _ in range(examples)]
        other = [list(one) for one in columns]
        other[rng.randrange(examples)] = column()
        if not trial:
            columns[0], other = [0.0] * prompts, [[9.0] * prompts, *columns[1:]]
        ours, theirs = (
            private_losses(list(zip(*held, strict=True)), privacy()) for held in (columns, other)
        )
        widest = max(widest, math.dist(ours, theirs))
    assert bound * (1 - 1e-12) <= widest <= bound * (1 + 1e-12)


@pytest.mark.parametrize("prompts", [1, 16, 40])
def test_a_count_is_not_clipped(prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    terms = [[[0.0, 0.0, 1.0, 0.0]] * 3] * prompts
    assert private_terms(terms, [0, 0, 1], privacy())[-2:] == pytest.approx((2.0, 1.0))


@pytest.mark.parametrize("labels", [2, 5])
def test_one_example_moves_losses_probabilities_and_counts_by_no_more(
    labels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of the clip, 4 probabilities, and 4 / sqrt(I) examples; extremes reach the bound."""
    asked = silence(monkeypatch)
    rng, prompts, examples, widest = random.Random(0), 3, 4, 0.0

    def drawn() -> tuple[list[list[float]], int]:
        target = rng.randrange(-1, labels)
        if target < 0:
            return [[0.0] * (2 + labels)] * prompts, target
        chosen = rng.choice([None, rng.randrange(labels)])
        odds = [rng.random() if chosen is None else label == chosen for label in range(labels)]
        share = [each / sum(odds) for each in odds]
        return [[rng.choice([0.0, 1.0, 50.0]), 0.0, *share] for _ in range(prompts)], target

    def released(held: list[tuple[list[list[float]], int]]) -> list[float]:
        rows, targets = zip(*held, strict=True)
        found = private_terms(list(zip(*rows, strict=True)), targets, privacy())
        scale = [0.5] * prompts + [0.25] * (prompts * labels)
        scale += [0.25 * math.sqrt(prompts) / examples] * labels
        return [value * unit for value, unit in zip(found, scale, strict=True)]

    low, high = (
        [[loss, 0.0, *row] for _ in range(prompts)]
        for loss, row in ((0.0, [1.0] + [0.0] * (labels - 1)), (50.0, [0.0] * (labels - 1) + [1.0]))
    )
    for trial in range(500):
        held = [drawn() for _ in range(examples)]
        other = [drawn(), *held[1:]]
        if not trial:
            held[0], other[0] = (low, 0), (high, labels - 1)
        widest = max(widest, math.dist(released(held), released(other)))
    bound = math.sqrt(prompts * 1.25)
    assert widest * examples == pytest.approx(bound, rel=1e-9)
    size = prompts + prompts * labels + labels
    assert {count for count, _ in asked} == {size}
    assert {variance for _, variance in asked} == {
        math.ceil((bound * 2**30 + math.sqrt(size)) ** 2)
    }


def test_other_data_moves_a_step_by_no_more_than_the_sensitivity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = silence(monkeypatch)
    rng = np.random.default_rng(0)
    spec = privacy(target="alpha", clip=0.3)
    before = np.full((3, 4), 0.25, dtype=np.float32)
    widest = 0.0
    for scale in (0.01, 0.1, 1.0, 10.0, math.inf):
        for _ in range(50):
            step = (scale * rng.normal(size=before.shape)).astype(np.float32)
            ours = private_step(before, before + step, spec)
            theirs = private_step(before, before - step, spec)
            assert np.linalg.norm(ours - before) <= 0.3 * (1 + 1e-12)
            widest = max(widest, float(np.linalg.norm(ours - theirs)))
    assert 0.6 * 0.999 <= widest <= 0.6 * (1 + 1e-12)
    assert set(asked) == {(12, 4 * 2**60)}


def test_a_small_step_is_left_alone_but_for_the_noise() -> None:
    before = np.full((30, 40), 0.25, dtype=np.float32)
    after = before.copy()
    after[0, 0] += np.float32(0.125)
    spec = privacy(target="alpha", clip=1.0, noise_multiplier=0.1)
    extra = private_step(before, after, spec) - after
    assert abs(extra.std() / 0.2 - 1) < 5 / math.sqrt(2 * extra.size)


# The accountant


@pytest.mark.parametrize("vector", VECTORS["epsilons"])
def test_golden_epsilons(vector: dict[str, Any]) -> None:
    precision = math.fsum(multiplier**-2 for multiplier in vector["multipliers"])
    found = GaussianAccountant(vector["delta"]).epsilon(precision)
    assert found == pytest.approx(vector["epsilon"], rel=1e-9)


def delta_of(epsilon: float, sigma: float) -> float:
    """Balle and Wang (2018), theorem 8, at sensitivity 1."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2.0))  # exact far out, where NormalDist is not

    return phi(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * phi(
        -0.5 / sigma - epsilon * sigma
    )


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("releases", [1, 7, 100])
def test_epsilon_is_the_closed_form(sigma: float, releases: int) -> None:
    epsilon = Accountant(privacy(noise_multiplier=sigma)).epsilon(releases)
    assert delta_of(epsilon, sigma / math.sqrt(releases)) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("sigma", [5.0, 40.0])
def test_the_grid_costs_what_the_accountant_adds(sigma: float) -> None:
    """The bounds of a rounded Gaussian's probabilities, on grids that are coarse enough to see."""
    normal, numbers = NormalDist(0.0, sigma), range(-int(6 * sigma), int(6 * sigma) + 1)
    total = sum(math.exp(-k * k / 2 / sigma**2) for k in range(-2000, 2001))
    for k in numbers:
        rounded = normal.cdf(k + 0.5) - normal.cdf(k - 0.5)
        ratio = math.log(rounded / (math.exp(-k * k / 2 / sigma**2) / total))
        assert -1 / (24 * sigma**2) - 1e-7 <= ratio <= k**2 / (24 * sigma**4) + 1e-7


def test_no_release_costs_nothing_and_more_releases_cost_more() -> None:
    accountant = Accountant(privacy())
    costs = [accountant.epsilon(releases) for releases in range(5)]
    assert costs[0] == 0.0
    assert costs == sorted(set(costs))
    with pytest.raises(ValueError, match="at least 0"):
        accountant.epsilon(-1)


@pytest.mark.parametrize("limit", [0.5, 4.0, 4.38, 20.0, 300.0])
def test_affordable_is_the_last_that_fits(limit: float) -> None:
    accountant = Accountant(privacy(max_epsilon=limit))
    most = accountant.affordable()
    assert most is not None
    assert accountant.epsilon(most) <= limit < accountant.epsilon(most + 1)


def test_no_limit() -> None:
    assert Accountant(privacy()).affordable() is None
    assert Accountant(privacy(max_epsilon=1e6, noise_multiplier=1e3)).affordable() == 10**9


# The spec


@pytest.mark.parametrize(
    "wrong",
    [{"clip": 5e-324, "noise_multiplier": 1e3}, {"clip": 0.999e-3}, {"clip": 1.001e3},
     {"clip": math.nan}, {"noise_multiplier": 0.099}, {"noise_multiplier": 1.001e3},
     {"noise_multiplier": math.inf}, {"delta": 1}, {"max_epsilon": 0}],
)  # fmt: skip
def test_impossible_values(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        privacy(**wrong)
