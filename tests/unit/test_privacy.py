"""The noise that devices add, and the accountant's epsilon."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from statistics import NormalDist

import numpy as np
import pytest
from pydantic import ValidationError

from fedone_sdk.aggregator.rounds.privacy import Accountant
from fedone_sdk.client import privacy as noise
from fedone_sdk.client.privacy import (
    alpha_sensitivity,
    gaussian,
    losses_sensitivity,
    private_losses,
    private_step,
)
from fedone_sdk.spec.sections import PrivacySpec

dp_accounting = pytest.importorskip("dp_accounting")


def privacy(**changes: object) -> PrivacySpec:
    return PrivacySpec.model_validate({"clip": 2.0, "noise_multiplier": 1.0, **changes})


# The noise


def test_noise_is_normal_and_independent() -> None:
    count, std = 40_000, 3.0
    drawn = sorted(gaussian(count, std))
    assert abs(statistics.fmean(drawn)) < 5 * std / math.sqrt(count)
    assert abs(statistics.stdev(drawn) / std - 1) < 5 / math.sqrt(2 * count)
    # Kolmogorov-Smirnov, critical value at 1e-6.
    normal = NormalDist(0.0, std)
    distance = max(abs(normal.cdf(x) - (i + 0.5) / count) for i, x in enumerate(drawn))
    assert distance < math.sqrt(-math.log(1e-6 / 2) / 2 / count)
    ordered = gaussian(count, 1.0)
    pairs = sum(a * b for a, b in itertools.pairwise(ordered)) / count
    assert abs(pairs) < 5 / math.sqrt(count)


def test_noise_takes_no_seed() -> None:
    random.seed(1)
    first = gaussian(3, 1.0)
    random.seed(1)
    assert gaussian(3, 1.0) != first
    assert isinstance(noise._RANDOM, random.SystemRandom)


def test_losses_are_clipped_and_noised_as_specified(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []

    def still(count: int, std: float) -> list[float]:
        asked.append((count, std))
        return [0.5] * count

    monkeypatch.setattr(noise, "gaussian", still)
    found = private_losses([[-1.0, 1.0, 9.0, 2.0], [0.0, 0.0, 0.0, 1.0]], privacy())
    assert found == (0.5 + (0 + 1 + 2 + 2) / 4, 0.5 + 0.25)
    assert asked == [(2, pytest.approx(math.sqrt(2) * 2.0 / 4))]


def test_one_example_moves_the_means_by_no_more_than_the_sensitivity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brute force over random and extreme losses; the bound is met, and reached."""
    monkeypatch.setattr(noise, "gaussian", lambda count, std: [0.0] * count)
    rng = random.Random(0)
    prompts, examples, widest = 5, 7, 0.0
    spec = privacy()
    bound = losses_sensitivity(spec, prompts, examples)

    def column() -> list[float]:
        return [rng.choice([-5.0, 0.0, rng.uniform(0, 3), 50.0]) for _ in range(prompts)]

    for trial in range(500):
        columns = [column() for _ in range(examples)]
        other = [list(one) for one in columns]
        other[rng.randrange(examples)] = column()
        if not trial:
            columns[0], other = [0.0] * prompts, [[9.0] * prompts, *columns[1:]]
        ours, theirs = (
            private_losses(list(zip(*held, strict=True)), spec) for held in (columns, other)
        )
        widest = max(widest, math.dist(ours, theirs))
    assert bound * (1 - 1e-12) <= widest <= bound * (1 + 1e-12)


def test_other_data_moves_a_step_by_no_more_than_the_sensitivity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noise, "gaussian", lambda count, std: [0.0] * count)
    rng = np.random.default_rng(0)
    spec = privacy(target="alpha", clip=0.3)
    before = np.full((3, 4), 0.25, dtype=np.float32)
    widest = 0.0
    for scale in (0.01, 0.1, 1.0, 10.0):
        for _ in range(50):
            step = (scale * rng.normal(size=before.shape)).astype(np.float32)
            ours = private_step(before, before + step, spec)
            theirs = private_step(before, before - step, spec)
            assert np.linalg.norm(ours - before) <= 0.3 * (1 + 1e-6)
            widest = max(widest, float(np.linalg.norm(ours - theirs)))
    assert alpha_sensitivity(spec) * 0.999 <= widest <= alpha_sensitivity(spec) * (1 + 1e-6)


def test_a_small_step_is_left_alone_but_for_the_noise() -> None:
    before = np.full((30, 40), 0.25, dtype=np.float32)
    after = before.copy()
    after[0, 0] += np.float32(0.125)
    spec = privacy(target="alpha", clip=1.0, noise_multiplier=0.05)
    extra = private_step(before, after, spec) - after
    assert abs(extra.std() / 0.1 - 1) < 5 / math.sqrt(2 * extra.size)


# The accountant


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


@pytest.mark.parametrize("releases", [1, 7, 100])
def test_epsilon_agrees_with_composition(releases: int) -> None:
    """The library's general accountants, independent of the shortcut."""
    sigma = 4.0
    ours = Accountant(privacy(noise_multiplier=sigma)).epsilon(releases)
    event = dp_accounting.GaussianDpEvent(sigma)
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    rdp = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    assert ours <= rdp.compose(event, releases).get_epsilon(1e-5) <= 1.25 * ours
    pld = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    assert pld.compose(event, releases).get_epsilon(1e-5) == pytest.approx(ours, rel=0.02)


def test_a_known_value() -> None:
    """Sigma 1, delta 1e-5: 4.377 (Balle and Wang); the classic bound says 4.845."""
    assert Accountant(privacy()).epsilon(1) == pytest.approx(4.377, abs=5e-4)


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
    assert Accountant(privacy(max_epsilon=1e6, noise_multiplier=1e6)).affordable() == 10**9


# The spec


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0},
        {"noise_multiplier": 0},
        {"delta": 1},
        {"target": "prompts"},
        {"max_epsilon": 0},
        {"sigma": 1},
    ],
)
def test_impossible_values(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        privacy(**wrong)
