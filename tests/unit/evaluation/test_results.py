from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fedone_sdk.evaluation.intervals import difference
from fedone_sdk.evaluation.results import Entrant, Results, TrialRecord, results_of
from fedone_sdk.local.comparison import entrants_of
from fedone_sdk.metrics import evaluate
from fedone_sdk.reports.pages import comparison_html, comparison_svg
from fedone_sdk.spec import RunSpec, validate_spec
from tests.unit.evaluation.records import record
from tests.unit.evaluation.test_engine import RUN

TARGETS = [0, 1] * 20


def entrants(*names: str, **task: Any) -> list[Entrant]:
    document = {**RUN, "task": {**RUN["task"], **task}}
    return entrants_of(document, validate_spec(RunSpec, document, source="run.yaml"), names)


def trial(name: str, seed: int, wrong: int, curve: Sequence[tuple[int, float]]) -> TrialRecord:
    """A trial with wrong first predictions."""
    predicted = [1 - t if place < wrong else t for place, t in enumerate(TARGETS)]
    losses = [1.0 if place < wrong else 0.1 for place in range(40)]
    return record(
        name,
        seed,
        predicted=predicted,
        targets=TARGETS,
        losses=losses,
        curve=curve,
        prompt=f"<{name} & {seed}>",
    )


def results(*records: TrialRecord, **task: Any) -> Results:
    names = dict.fromkeys(one.entrant for one in records)
    found = entrants(*names, **task)
    return results_of(
        name="tiny",
        task=found[0].spec.task,
        entrants=found,
        seeds=(0, 1, 2),
        records={(one.entrant, one.seed): one for one in records},
        num_examples=40,
    )


def good(name: str = "thompson") -> list[TrialRecord]:
    return [trial(name, seed, 2, [(0, 0.5), (10, 0.9), (20, 0.95)]) for seed in range(3)]


def bad(name: str = "random") -> list[TrialRecord]:
    return [trial(name, seed, 20, [(0, 0.5), (10, 0.6), (20, 0.5)]) for seed in range(3)]


def test_the_better_one_is_named() -> None:
    found = results(*good(), *bad(), *good("gs-bdpl"))
    assert found.conclusion == (
        "thompson is better than random (accuracy, 95 % intervals, 3 seeds, 40 dev examples). "
        "No difference from gs-bdpl was seen."
    )
    assert results(*bad(), *good()).conclusion.startswith("random is worse than thompson (")
    assert results(*good(), *good("random")).conclusion.startswith(
        "No difference from thompson was seen for random ("
    )
    one = results(good()[0], bad()[0])
    assert one.conclusion.endswith("do not cover the variation between seeds.")
    for other in (bad()[1], bad()[0].model_copy(update={"targets": TARGETS[::-1]})):
        found = results(good()[0], other)
        assert found.conclusion.endswith("of another with the same measured dev rows.")


def test_less_loss_is_better() -> None:
    found = results(*good(), *bad(), metric="loss")
    assert found.judged == "loss"
    assert found.table[0].count("loss") == 1
    assert {len(row) for row in found.table} == {8}
    assert found.conclusion.startswith("thompson is better than random (loss, ")


def test_queries_to_the_target() -> None:
    first, other = results(*good(), *bad()).standings
    # What the first has at its end, seed by seed.
    assert first.queries_to_target == 20
    assert other.queries_to_target == float("inf")
    first, other = results(*bad(), *good()).standings
    assert (first.queries_to_target, other.queries_to_target) == (0, 0)
    first, other = results(*good(), *bad(), metric="loss").standings
    assert (first.queries_to_target, other.queries_to_target) == (0, 0)


def test_missing_trials_are_reported() -> None:
    found = results(*good()[:2], *bad()[1:])
    assert found.missing == ("random, seed 0", "thompson, seed 2")
    assert found.standings[1].difference is not None
    assert found.standings[1].difference.pairs == 1
    assert {len(row) for row in found.table} == {10}


def test_document_and_page() -> None:
    found = results(*good(), *bad(), trial("no-prompt", 0, 5, [(0, 0.7)]))
    document = found.document()
    assert [one["name"] for one in document["methods"]] == ["thompson", "random", "no-prompt"]
    assert document["methods"][1]["queries_to_target"] is None
    assert document["methods"][2]["settings"] is None
    svg = comparison_svg(found)
    assert svg == comparison_svg(found)
    for text in "accuracy on dev", "training queries", "thompson", "No prompt":
        assert text in svg
    page = comparison_html(found, "fedone compare <run.yaml>")
    assert "&lt;thompson &amp; 1&gt;" in page
    assert "fedone compare &lt;run.yaml&gt;" in page
    assert "<script" not in page
    assert found.conclusion in page


def trials(
    rng: np.random.Generator, count: int, targets: Sequence[int], skill: float
) -> list[TrialRecord]:
    found = []
    for seed in range(count):
        right = rng.random(len(targets)) < skill
        predicted = [t if ok else 1 - t for t, ok in zip(targets, right, strict=True)]
        losses = rng.normal(1.0 - skill, 0.1, len(targets)).tolist()
        found.append(record("any", seed, predicted=predicted, targets=targets, losses=losses))
    return found


@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews", "loss"])
def test_the_mean_is_that_of_the_pairs(metric: str) -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(2, size=60).tolist()
    first, second = trials(rng, 4, targets, 0.9), trials(rng, 4, targets, 0.6)
    found = difference(metric, first, second, 2)
    assert found is not None
    assert found.pairs == 4

    def value(one: TrialRecord) -> float:
        if metric == "loss":
            return math.fsum(x for x in one.losses if x is not None) / 60
        return evaluate(metric, [p for p in one.predicted if p is not None], one.targets)

    expected = np.mean([value(a) - value(b) for a, b in zip(first, second, strict=True)])
    assert found.value == pytest.approx(expected)
    assert found.low < found.value < found.high
    assert found.verdict == ("less" if metric == "loss" else "more")


def test_the_spread_is_that_of_theory() -> None:
    # Only the examples differ: the interval of one seed is that of a mean of 400.
    rng = np.random.default_rng(1)
    losses = rng.normal(0.0, 1.0, 400)
    first, second = record(losses=losses.tolist()), record(losses=[0.0] * 400)
    found = difference("loss", [first], [second], 0)
    assert found is not None
    error = losses.std() / math.sqrt(400)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.06)

    # Only the seeds differ: Student's t of five.
    shifts = np.array([-0.3, -0.1, 0.0, 0.2, 0.5])
    first_five = [record(seed=n, losses=[shift] * 50) for n, shift in enumerate(shifts)]
    second_five = [record(seed=n, losses=[0.0] * 50) for n in range(5)]
    found = difference("loss", first_five, second_five, 0)
    assert found is not None
    error = shifts.std(ddof=1) / math.sqrt(5)
    assert (found.high - found.low) / 2 == pytest.approx(2.776 * error, rel=0.1)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng, hits, tries = np.random.default_rng(2), 0, 150
    for _ in range(tries):
        apart = (
            rng.normal(0, 0.05, (5, 1)) + rng.normal(0, 0.1, (1, 40)) + rng.normal(0, 0.1, (5, 40))
        )
        first = [record(seed=n, losses=row.tolist()) for n, row in enumerate(apart)]
        second = [record(seed=n, losses=[0.0] * 40) for n in range(5)]
        found = difference("loss", first, second, 0)
        assert found is not None
        hits += found.low <= 0.0 <= found.high
    # Three standard errors of 95 % in 150 tries; above it, the interval is too wide.
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / tries) <= hits / tries <= 1.0


def test_the_same_trials_give_the_same_interval() -> None:
    rng = np.random.default_rng(3)
    targets = rng.integers(2, size=30).tolist()
    first, second = trials(rng, 3, targets, 0.8), trials(rng, 3, targets, 0.7)
    assert difference("f1", first, second, 2) == difference("f1", first, second, 2)
    same = difference("f1", first, first, 2)
    assert same == (0.0, 0.0, 0.0, 3, 0.0, 0.5)


def test_what_one_of_both_has_not_answered_counts_for_neither() -> None:
    first = record(predicted=[0, None, 1], targets=[0, 1, 1], losses=[0.1, None, 0.2])
    second = record(predicted=[1, 1, None], targets=[0, 1, 1], losses=[0.3, 0.1, None])
    for metric in "accuracy", "loss":
        found = difference(metric, [first], [second], 2)
        assert found is not None
        assert found.value == pytest.approx(1.0 if metric == "accuracy" else -0.2)
    table = difference("f1", [first], [second], 2)
    assert table is not None


def test_nothing_to_compare() -> None:
    nothing = record(losses=[None], predicted=[None], targets=[0])
    assert difference("accuracy", [], [], 2) is None
    assert difference("mine:metric", [record()], [record()], 2) is None
    for metric in "accuracy", "f1", "loss":
        assert difference(metric, [nothing], [nothing], 2) is None
