from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedone_sdk.evaluation.results import (
    Entrant,
    Results,
    TrialRecord,
    header_of,
    results_of,
    row_of,
)
from fedone_sdk.local.comparison import entrants_of
from fedone_sdk.reports.pages import comparison_html, comparison_svg
from fedone_sdk.spec import RunSpec, validate_spec
from tests.unit.evaluation.records import record
from tests.unit.evaluation.test_entrants import RUN

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
        "No difference from thompson was seen: random ("
    )
    one = results(good()[0], bad()[0])
    assert one.conclusion.endswith("One seed gives no interval over seeds.")
    assert results(good()[0], bad()[1]).conclusion.startswith("Nothing is compared yet")


def test_less_loss_is_better() -> None:
    found = results(*good(), *bad(), metric="loss")
    assert found.judged == "loss"
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
    assert len(row_of(found, found.standings[0])) == len(header_of(found))


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
