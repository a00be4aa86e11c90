"""Made-up runs, whose numbers are known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from matplotlib.figure import Figure

from fedone_sdk.experiments.settings import Settings
from tests.benchmarks.queries.contest import Scale
from tests.benchmarks.queries.contestants import DEFAULT
from tests.benchmarks.queries.report import draw_curves, written
from tests.benchmarks.queries.results import BenchResults, Passage, Runs, VariantResults
from tests.benchmarks.queries.variants import VARIANTS

MARKS = (50, 100, 500, 2000)
BAR = "gs-bdpl-paper"
IID = "sst2-bad-was-iid"


def run(losses: Sequence[float], *, accuracy: float = 0.8, billed: float = 1.0) -> dict[str, Any]:
    """A run with these losses at the marks."""
    return {
        "refit": None,
        "curve": [
            {
                "mark": mark,
                "queries": mark,
                "requests": round(mark * billed),
                "example_requests": round(32 * mark * billed),
                "tokens": 100 * mark,
                "loss": loss,
                "metric": accuracy,
                "accuracy": accuracy,
                "prompt": " p",
            }
            for mark, loss in zip((0, *MARKS), (0.1, *losses), strict=True)
        ],
    }


def runs(by_seed: Sequence[dict[str, Any]], label: str = "X") -> Runs:
    return Runs(label=label, by_seed=dict(enumerate(by_seed)))


def bare(loss: float) -> dict[str, Any]:
    numbers = {"loss": loss, "metric": 0.7, "accuracy": 0.7}
    plain = {**numbers, "loss": loss + 0.1}
    balanced = {**numbers, "loss": loss - 0.01}
    found = {"plain": plain, "calibrated": numbers, "balanced": balanced}
    return {**found, "contextual": plain, "batch": plain}


def variant(
    name: str,
    methods: Mapping[str, Runs],
    *,
    no_prompt: Sequence[float] = (),
    oracle: float | None = None,
) -> VariantResults:
    found = {
        "loss": oracle,
        "train_loss": oracle,
        "metric": 0.9,
        "tried": 1234,
        "converged": True,
        "prompt": " best",
    }
    return VariantResults(
        variant=VARIANTS[name],
        runs=methods,
        no_prompt={seed: bare(loss) for seed, loss in enumerate(no_prompt)},
        oracle=None if oracle is None else found,
    )


def bench(*variants: VariantResults) -> BenchResults:
    return BenchResults(marks=MARKS, default=DEFAULT, variants=variants, skipped={})


class TestReached:
    def test_the_first_mark_and_for_good(self) -> None:
        found = runs([run([0.4, 0.6, 0.45, 0.4])])
        first, lasting = found.reached(0, 0.5), found.reached(0, 0.5, for_good=True)
        assert first is not None
        assert lasting is not None
        assert (first["mark"], lasting["mark"]) == (50, 500)

    def test_never(self) -> None:
        assert runs([run([0.6] * 4)]).reached(0, 0.5) is None
        # The untrained start is at no cost, but nobody would deploy it.
        assert runs([run([0.6, 0.6, 0.6, 0.4])]).reached(0, 0.2) is None

    def test_not_before_the_first_round(self) -> None:
        found = run([0.3, 0.4, 0.4, 0.4])
        found["curve"][1] |= {"queries": 0, "requests": 0, "example_requests": 0, "tokens": 0}
        own, bar = runs([found]), runs([run([0.5] * 4)])
        passage = Passage.of(own, bar, MARKS)
        assert passage is not None
        assert (passage.median_queries, passage.queries.value) == (100, 100)
        assert passage.ratios["requests"].value == 20.0

    def test_not_for_good_where_the_end_is_worse(self) -> None:
        assert runs([run([0.4, 0.4, 0.4, 0.6])]).reached(0, 0.5, for_good=True) is None


class TestPassage:
    def test_ratios_of_queries_and_bills(self) -> None:
        own = runs([run([0.6, 0.5, 0.4, 0.4])] * 5)
        bar = runs([run([0.9, 0.9, 0.9, 0.5], billed=0.25)] * 5)
        found = Passage.of(own, bar, MARKS)
        assert found is not None
        assert (found.target, found.median_queries, found.queries.value) == (0.5, 100, 100)
        assert found.ratios["queries"] == (20.0, 20.0, 20.0)
        assert found.ratios["requests"] == (5.0, 5.0, 5.0)  # 500 of 2000 billed, against 100
        assert (found.reached, found.seeds) == (1.0, 5)
        assert found.bar_queries.value == 2000

    def test_the_other_may_have_been_as_good_long_before(self) -> None:
        own = runs([run([0.6, 0.5, 0.4, 0.4])])
        found = Passage.of(own, runs([run([0.4, 0.9, 0.5, 0.5])]), MARKS)
        assert found is not None
        assert (found.bar_queries.value, found.ratios["queries"].value) == (500, 20.0)

    def test_is_paired_by_seed(self) -> None:
        """Each seed has a level of its own, larger than what tells the methods apart."""
        own = runs([run([s + 0.1, s - 0.1, s - 0.2, s - 0.2]) for s in range(9)])
        bar = runs([run([s + 0.2] * 3 + [float(s)]) for s in range(9)])
        found = Passage.of(own, bar, MARKS)
        assert found is not None
        assert found.queries == (100.0, 100.0, 100.0)

    def test_seeds_that_never_reach_it_count(self) -> None:
        good, bad = run([0.4] * 4), run([0.6] * 4)
        found = Passage.of(runs([good, bad, bad]), runs([run([0.5] * 4)] * 3), MARKS)
        assert found is not None
        assert found.reached == pytest.approx(1 / 3)
        assert (found.queries.value, found.ratios["queries"].value) == (math.inf, 0.0)
        assert found.median_queries == math.inf

    def test_only_seeds_that_both_have(self) -> None:
        own, bar = runs([run([0.4] * 4)] * 3), runs([run([0.5] * 4)] * 2)
        found = Passage.of(own, bar, MARKS)
        assert found is not None
        assert found.seeds == 2
        assert Passage.of(own, runs([]), MARKS) is None


class TestVariant:
    def test_difference_to_no_prompt_is_paired(self) -> None:
        levels = [0.3, 0.5, 0.7, 0.4]
        own = runs([run([one - 0.01] * 4) for one in levels])
        results = variant(IID, {DEFAULT: own}, no_prompt=levels)
        found = results.against_no_prompt(DEFAULT, 2000, "calibrated")
        assert found is not None
        assert (found.mean, found.most) == (pytest.approx(-0.01), pytest.approx(-0.01))

    def test_share_of_the_gap(self) -> None:
        own = runs([run([0.5, 0.45, 0.45, 0.41])] * 3)
        found = variant(IID, {DEFAULT: own}, no_prompt=[0.5] * 3, oracle=0.4)
        assert found.gap == pytest.approx(0.1)
        half, most = found.closed(DEFAULT, 500), found.closed(DEFAULT, 2000)
        assert half is not None
        assert most is not None
        assert (half.value, most.value) == (pytest.approx(0.5), pytest.approx(0.9))

    def test_no_share_of_a_small_gap(self) -> None:
        own = runs([run([0.5] * 4)])
        found = variant(IID, {DEFAULT: own}, no_prompt=[0.5], oracle=0.485)
        assert found.closed(DEFAULT, 2000) is None


class TestBench:
    def results(self) -> BenchResults:
        own = runs([run([0.6, 0.5, 0.45, 0.41], accuracy=0.8)] * 4, "Ours")
        lied = runs([run([0.6, 0.6, 0.5, 0.42], accuracy=0.77)] * 4, "Ours")
        wide = runs([run([0.7, 0.6, 0.5, 0.45])] * 4, "Ours")
        bar = runs([run([0.9, 0.9, 0.9, 0.5])] * 4, "The paper's")
        return bench(
            variant(IID, {BAR: bar, DEFAULT: own}, no_prompt=[0.5] * 4, oracle=0.4),
            variant(f"{IID}-inverted", {DEFAULT: lied}, no_prompt=[0.5] * 4),
            variant("sst2-terrible-was-iid", {BAR: bar, DEFAULT: own}),
            variant("sst2-terrible-was-iid-k3", {DEFAULT: wide}),
        )

    def test_more_clients_have_the_target_of_one(self) -> None:
        found = self.results()
        passage = found.passage(found.variants[3], DEFAULT, BAR)
        assert passage is not None
        assert (passage.target, passage.queries.value) == (0.5, 500)

    def test_liars_cost_points(self) -> None:
        found = self.results()
        cost = found.cost_of_lies(found.variants[1], DEFAULT)
        assert cost is not None
        assert cost.mean == pytest.approx(-3.0)
        assert found.cost_of_lies(found.variants[0], DEFAULT) is None

    def test_json_is_json(self) -> None:
        data = json.loads(json.dumps(self.results().data(), allow_nan=False))
        method = data["variants"][IID]["methods"][DEFAULT]
        assert method["targets"][BAR]["ratios"]["queries"]["value"] == 20.0
        against = {kind: found["mean"] for kind, found in method["against_no_prompt"].items()}
        assert against == pytest.approx({"calibrated": -0.09, "balanced": -0.08})
        assert method["gap_closed"]["500"]["value"] == pytest.approx(0.5)
        assert method["curve"]["100"]["loss"]["value"] == 0.5
        lied = data["variants"][f"{IID}-inverted"]["methods"][DEFAULT]
        assert lied["cost_of_lies_points"]["mean"] == pytest.approx(-3.0)

    def test_report_says_what_holds(self) -> None:
        text = written(self.results(), Settings(), Scale(marks=MARKS))
        promises = next(line for line in text.splitlines() if "**better**" in line and "|" in line)
        # 20 times fewer queries hold; 50 times fewer requests do not.
        assert "| **20.0 [20.0, 20.0]** | 20.0 [20.0, 20.0] |" in promises
        assert "| 0.1000 | **50% [50%, 50%]** | **90% [90%, 90%]** |" in text
        liars = next(line for line in text.splitlines() if "(inverted) |" in line)
        assert liars.endswith("| -3.00 [-3.00, -3.00] | no |")
        assert "| Ours | 3 | " in text

    def test_report_of_next_to_nothing(self) -> None:
        only = bench(variant(IID, {BAR: runs([run([0.5] * 4)])}))
        text = written(only, Settings(), Scale(marks=MARKS))
        assert "## The default" not in text
        assert "| X | 1 | 0.500 |" in text
        assert written(bench(), Settings(), Scale(marks=MARKS))

    @pytest.mark.parametrize("unit", ["queries", "requests", "tokens"])
    def test_figures(self, unit: str) -> None:
        figure = Figure()
        draw_curves(self.results(), unit)(figure)
        shown = [axes for axes in figure.axes if axes.lines]
        assert len(shown) == 3  # not the liars'
        line = shown[0].lines[0]
        factor = 100 if unit == "tokens" else 1
        assert list(line.get_xdata()) == [factor * mark for mark in MARKS]  # type: ignore[arg-type]
        draw_curves(bench(), unit)(Figure())
