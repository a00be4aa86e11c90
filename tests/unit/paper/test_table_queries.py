from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedone_paper import Settings, find_study
from fedone_paper.federated import Tuning
from fedone_paper.methods import method_of
from fedone_paper.queries import Repeats, trimmed_text
from fedone_paper.statistics import compared, median_interval
from fedone_paper.theory import FigureTheory, fitted
from fedone_paper.time_to_target import Probing, noises, run_to_target, sampled, target_trial
from fedone_sdk.errors import SpecError
from fedone_sdk.evaluation.engine import Result, Workspace

CAP = 1000


@pytest.fixture
def data(glue: Path) -> Path:
    return glue


def run(queries: int | None, *, clients: int = 1, missed_by: float = 0.04) -> Result:
    """A repeat that reached its target after so many queries."""
    last = CAP if queries is None else queries
    loss = 0.55 + (missed_by if queries is None else 0.0)
    keys = ("round", "queries", "expected_loss", "expected_metric", "prompt_loss", "prompt_metric")
    points = (
        (0, 0, 0.6, 0.7, 0.7, 0.7),
        (1, last // 2, 0.58, 0.71, 0.59, 0.7),
        (2, last, loss, 0.74, 0.5, 0.75),
    )
    return {
        "curve": [dict(zip(keys, point, strict=True)) for point in points],
        "reached": {"expected_loss": queries, "expected_metric": last, "prompt_loss": last},
        "queries_per_round": [20 * clients, 20 * clients],
    }


def repeats(by_clients: dict[int, Iterable[int | None]]) -> Repeats:
    return Repeats(
        label="GS-BDPL",
        learning_rates=dict.fromkeys(by_clients, 0.01),
        gains={"expected_loss": 0.05, "prompt_loss": 0.08},
        cap=CAP,
        paper={1: 528.6, 3: 889.4},
        runs={
            clients: {seed: run(found, clients=clients) for seed, found in enumerate(values)}
            for clients, values in by_clients.items()
        },
    )


class TestVerdict:
    def test_says_so_where_one_client_is_best(self) -> None:
        found = repeats({1: [100 + s for s in range(20)], 3: [300 + s for s in range(20)]})
        text = found.verdict("expected_loss")
        assert text.startswith("K*=1 needed the fewest queries")
        assert "in 20 of 20 repeats" in text

    def test_says_so_where_it_is_not(self) -> None:
        found = repeats({1: [300] * 20, 3: [100] * 20, 10: [305, 295] * 10})
        text = found.verdict("expected_loss")
        assert "did **not** need the fewest queries: K*=3 needed fewer" in text
        assert "against K*=10 nothing is shown" in text

    def test_says_so_where_nothing_is_shown(self) -> None:
        for values in ([90, 110] * 10, [100] * 20):
            text = repeats({1: [100] * 20, 3: values}).verdict("expected_loss")
            assert "**not shown**" in text


class TestRepeats:
    def test_every_repeat_stands_in_the_table(self) -> None:
        text = repeats({1: [None, 120, 140, 160, 180, 200], 3: [None] * 6}).markdown()
        assert "| > 1,000, 120, 140, 160, 180, 200 |" in text
        assert "| 1 | 5 of 6 | 160 | 120 to > 1,000 |" in text
        assert "| 3 | 0 of 6 | > 1,000 | > 1,000 | at least 1,000.0 | 889.4 |" in text
        assert "| 70.0 ± 0.0 | 75.0 ± 0.0 |" in text


class TestTableQueries:
    def test_pilots_are_never_reported(self, data: Path) -> None:
        trials = find_study("table-queries").trials(Settings(data=data, seeds=20), {})
        assert len(trials) == 2 * 4 * 20
        assert not {trial.options["seed"] for trial in trials} & {9001, 9002}

    def test_only_k_differs_between_the_runs_of_a_seed(self, data: Path) -> None:
        trials = find_study("table-queries").trials(Settings(data=data, seeds=1), {})
        for name in ("gs-bdpl", "bdpl"):
            contender = method_of("table-queries", name)
            runs = [t.options["run"] for t in trials if t.key.startswith(f"{name}_k")]
            clients = [run["participation"].pop("clients_per_round") for run in runs]
            rounds = [run.pop("rounds") for run in runs]
            # The cap is whole rounds of every K*.
            assert {k * t * 20 for k, t in zip(clients, rounds, strict=True)} <= {contender.cap}
            assert all(run == runs[0] for run in runs)

    def test_pilots_choose_a_rate_for_each_k(self, data: Path) -> None:
        options = {"methods": "bdpl-tuned", "clients": "1,10"}
        settings, experiment = (
            Settings(data=data, seeds=2, options=options),
            find_study("table-queries"),
        )
        pilots = experiment.trials(settings, {})
        rates = {trial.key: trial.options["run"]["method"]["learning_rate"] for trial in pilots}
        assert len(rates) == 2 * 4 * 2
        assert rates["bdpl-tuned_k10_rate0.3_s9002"] == 0.3
        assert {trial.options["seed"] for trial in pilots} == {9001, 9002}
        # K*=1 needs the fewest queries at 0.03; K*=10 gets nearest to its target at 0.1.
        results = {
            key: run(None, clients=10, missed_by=0.01 if "rate0.1_" in key else 0.03)
            if "_k10_" in key
            else run(200 if "rate0.03_" in key else 400)
            for key in rates
        }
        repeats = experiment.trials(settings, results)[len(pilots) :]
        chosen = {trial.key: trial.options["run"]["method"]["learning_rate"] for trial in repeats}
        assert chosen == {
            **{f"bdpl-tuned_k1_s{seed}": 0.03 for seed in range(2)},
            **{f"bdpl-tuned_k10_s{seed}": 0.1 for seed in range(2)},
        }
        report = experiment.report(settings, {**results, "bdpl-tuned_k1_s0": run(100, clients=1)})
        assert "learning rate 0.03 at K*=1, 0.1 at K*=10" in report.markdown

    @pytest.mark.parametrize(
        "option", [("methods", "x"), ("clients", "1,zero"), ("methods", "bbt")]
    )
    def test_refuses_other_options(self, data: Path, option: tuple[str, str]) -> None:
        settings = Settings(data=data, options=dict([option]))
        with pytest.raises(SpecError, match=f"--set {option[0]}"):
            find_study("table-queries").trials(settings, {})


class TestFigureTheory:
    @pytest.mark.parametrize(("c1", "c2"), [(2.0, 1.0), (1.0, 5.0), (3.0, 0.0), (0.0, 2.0)])
    def test_fit_finds_the_constants(self, c1: float, c2: float) -> None:
        rounds = {k: (c1 + c2 / k) ** 2 for k in (1, 3, 10, 30)}
        assert fitted(rounds) == pytest.approx((c1, c2))

    def test_reports_the_formula_beside_the_measurement(self, data: Path) -> None:
        settings = Settings(data=data, seeds=6, options={"methods": "bdpl"})
        experiment = FigureTheory("figure-theory")
        results: dict[str, Result] = {
            f"bdpl_k{k}_s{seed}": run(100 * k + seed, clients=k)
            for k in (1, 3, 10)
            for seed in range(6)
        }
        keys = {trial.key for trial in experiment.trials(settings, {})}
        assert results.keys() < keys  # K*=30 has no results
        found = experiment.measured(settings, results)["bdpl"]
        # c1 : c2 = 3 : 2, so that Q(K*) = K* (3 + 2 / K*)^2 / 25 of that of K*=1.
        for k in (1, 3, 10):
            assert found.formula(k) == pytest.approx(102 * k * (3 + 2 / k) ** 2 / 25)
        rounds = {k: median.value / (20 * k) for k, median in found.medians.items()}
        assert found.fit == pytest.approx(fitted(rounds))
        report = experiment.report(settings, results)
        assert "The fit has c2 / c1 =" in report.markdown
        assert "</svg>" in report.figures["figure-theory"]
        without = {key: result for key, result in results.items() if "_k1_" not in key}
        assert math.isnan(experiment.measured(settings, without)["bdpl"].formula(3))


INF = math.inf


class TestMedian:
    def test_of_twenty_lies_between_the_6th_and_the_15th(self) -> None:
        # The classic table entry: P(Binomial(20, 1/2) < 6) = 0.0207 <= 0.025.
        found = median_interval([float(value) for value in range(20, 0, -1)])
        assert (found.value, found.low, found.high) == (10.0, 6.0, 15.0)

    def test_censored_repeats_are_the_greatest(self) -> None:
        found = median_interval([*map(float, range(1, 13)), *[INF] * 8])
        assert (found.value, found.low, found.high) == (10.0, 6.0, INF)
        assert median_interval([1.0, INF, INF]).value == INF

    def test_of_few_is_bounded_by_nothing(self) -> None:
        found = median_interval([5.0, 6.0, 7.0])
        assert found == (6.0, 0.0, INF)

    def test_holds_the_true_median_as_often_as_it_says(self) -> None:
        generator = random.Random(0)
        draws = [[generator.expovariate(1.0) for _ in range(9)] for _ in range(2000)]
        found = [median_interval(values) for values in draws]
        held = sum(interval.low <= math.log(2) <= interval.high for interval in found)
        # For continuous values the coverage is exact: 2 (1 + 9) / 512 are missed.
        assert held / 2000 == pytest.approx(1 - 20 / 512, abs=0.01)

    @pytest.mark.parametrize("values", [[], [1.0, math.nan]])
    def test_refuses_what_is_no_sample(self, values: list[float]) -> None:
        with pytest.raises(ValueError, match="repeats"):
            median_interval(values)


def test_the_trimmed_mean_leaves_out_a_tenth_at_each_end() -> None:
    values = [*map(float, range(1, 19)), INF, 10_000.0]
    assert trimmed_text(values, 5000) == f"{sum(range(3, 19)) / 16:.1f}"
    assert trimmed_text([1.0, 2.0, INF, INF], 100) == "at least 50.8"


class TestCompared:
    def test_counts_pairs(self) -> None:
        found = compared([100.0, 200.0, 300.0, INF, INF], [200.0, 200.0, INF, 100.0, INF])
        assert (found.fewer, found.more, found.ties) == (2, 1, 2)

    def test_sign_test_is_the_binomial_s(self) -> None:
        ones = [1.0] * 10
        assert compared(ones, [2.0] * 10).p_value == pytest.approx(2 / 2**10)
        assert compared(ones, [2.0] * 5 + [0.5] * 5).p_value == 1.0
        assert compared(ones, ones).p_value == 1.0

    def test_ratio_knows_what_it_does_not_know(self) -> None:
        assert compared([2.0] * 20, [6.0] * 20).ratio == (3.0, 3.0, 3.0, 3.0)
        # The second one was censored at 20: at least ten times as many.
        assert compared([2.0] * 20, [INF] * 20, cap=20).ratio == (10.0, INF, 10.0, INF)
        assert compared([INF] * 20, [2.0] * 20, cap=20).ratio == (0.0, 0.1, 0.0, 0.1)
        # Ten pairs in which both were censored could have any ratio.
        half = [INF] * 10
        assert compared([1.0] * 10 + half, [3.0] * 10 + half, cap=20).ratio == (0.0, 3.0, 0.0, INF)

    def test_a_target_that_was_met_at_the_start(self) -> None:
        assert compared([0.0] * 20, [0.0] * 20).ratio == (1.0,) * 4
        assert compared([0.0] * 20, [20.0] * 20).ratio == (INF,) * 4
        assert compared([20.0] * 20, [0.0] * 20).ratio == (0.0,) * 4

    def test_nothing_to_compare(self) -> None:
        found = compared([], [])
        assert (found.ratio, found.p_value) == (None, 1.0)


ROUNDS = 6


@pytest.fixture
def settings(glue: Path) -> Settings:
    return Settings(data=glue)


def tuning(**changed: Any) -> Tuning:
    method = {"name": "bdpl", "learning_rate": 0.1, "num_samples": 4, "batch_size": 4}
    small = {"num_clients": 3, "shots": 4, "prompt_len": 2, "vocab_size": 12, "rounds": ROUNDS}
    return Tuning(**{"task": "sst2", "method": method, **small, **changed})


def measured(settings: Settings, folder: Path, probing: Probing, **changed: Any) -> Result:
    trial = target_trial("one", settings, tuning(**changed), probing)
    return run_to_target(trial.options, Workspace(inputs=trial.inputs, folder=folder))


class TestSampled:
    def test_follows_alpha(self) -> None:
        alpha = np.array([[0.7, 0.2, 0.1], [0.01, 0.01, 0.98]], dtype=np.float32)
        drawn = sampled(alpha, noises((2, 3), count=4000, seed=0))
        shares = [np.bincount(drawn[:, position], minlength=3) / 4000 for position in (0, 1)]
        np.testing.assert_allclose(shares, alpha, atol=0.025)


class TestTimeToTarget:
    def test_does_not_hang_on_how_often_it_is_measured(
        self, settings: Settings, tmp_path: Path
    ) -> None:
        often, seldom = (
            measured(settings, tmp_path, Probing(queries=every, prompts=4, rows=4, prompt_rows=8))
            for every in (4, 12)
        )
        assert often["prompt"] == seldom["prompt"]
        by_round = {point["round"]: point for point in often["curve"]}
        assert all(point == by_round[point["round"]] for point in seldom["curve"])

    def test_ends_at_its_target(self, settings: Settings, tmp_path: Path) -> None:
        # Below the start by less than nothing: the first measurement is enough.
        probing = Probing(
            queries=4, prompts=4, rows=4, prompt_rows=8, gains={"expected_loss": -10.0}
        )
        found = measured(settings, tmp_path, probing, rounds=500)
        assert found["reached"] == {"expected_loss": 0}
        assert found["status"] == "stopped"
        assert found["rounds"] < 500
