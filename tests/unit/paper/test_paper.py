"""The paper's numbers: complete, consistent with each other, and next to ours."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from fedone_paper import declared
from fedone_paper.glue import GLUE_TASKS, glue_task
from fedone_paper.soft_prompts import BBT
from fedone_paper.tables import about, paper_row, printed
from fedone_sdk.spec import GradientSpec

ELEMENTS = {
    "prompt-tuning": 20 * 1024,
    "p-tuning-v2": 20 * 1024 + 24 * 3 * 20 * (1024 + 1),
    "bbt": 500,
    "bdpl": 20 * 200,
    "gs-bdpl": 20 * 200,
}
"""Numbers that a client trains, at n = 20, N = 200, H = 1024 and 24 layers."""

SAMPLES = {"bbt": 200, "bdpl": 20, "gs-bdpl": 20}
"""Prompts of a visit, I. The paper's text gives BBT a population of 20."""


def rounded(number: float, digits: str) -> Decimal:
    return Decimal(number).quantize(Decimal(digits), ROUND_HALF_UP)


@pytest.mark.parametrize("name", declared()["studies"])
def test_every_experiment_has_its_place_in_the_paper(name: str) -> None:
    assert about(name).startswith(f"The paper: {printed(name)['place']}; ")


@pytest.mark.parametrize("name", ["table1", "table-fedavg", "table3"])
def test_averages_are_those_of_the_rows(name: str) -> None:
    table = printed(name)
    assert tuple(table["columns"]) == GLUE_TASKS
    assert table["averages"].keys() == table["rows"].keys()
    for row, cells in table["rows"].items():
        assert len(cells) == len(GLUE_TASKS)
        mean = sum(mean for mean, _ in cells) / len(cells)
        if (name, row) == ("table3", "untrained"):
            # It is printed so; the row has 55.12.
            assert (table["averages"][row], round(mean, 2)) == (54.41, 55.12)
            continue
        assert table["averages"][row] == pytest.approx(mean, abs=0.011)


def test_costs_follow_from_shapes() -> None:
    table = printed("table2")
    for name, rows in table["rows"].items():
        assert rounded(ELEMENTS[name] * 4 / 2**20, "0.0001") == pytest.approx(
            Decimal(str(table["trainable"][name])), rel=Decimal("0.02")
        )
        for together, (_, megabytes, visits, queries) in rows.items():
            assert visits == 100 * together
            assert queries == (visits * SAMPLES[name] if name in SAMPLES else None)
            exact = ELEMENTS[name] * 4 * 2 * visits / 2**20
            if (name, together) == ("p-tuning-v2", 10):
                assert (megabytes, rounded(exact, "0.01")) == (11417.20, Decimal("11417.24"))
            else:
                assert rounded(exact, "0.01") == Decimal(str(megabytes))


def test_epochs_of_the_table_of_queries_count_from_0() -> None:
    """Queries are (epochs + 1) K* I, but for the outliers that each column leaves out by itself."""
    for name, rows in printed("table-queries")["rows"].items():
        for together, ((epochs, _), (queries, _)) in rows.items():
            assert queries == pytest.approx((epochs + 1) * together * SAMPLES[name], rel=0.03)
            assert queries != pytest.approx(epochs * together * SAMPLES[name], rel=0.03)


def test_defaults_are_the_papers() -> None:
    setup = printed("setup")
    assert setup["learning_rates"] == declared()["rates"]
    method = GradientSpec()
    assert method.learning_rate in declared()["rates"]
    assert (method.optimizer, method.batch_size) == (setup["optimizer"], setup["batch_size"])
    assert BBT.num_samples == setup["bbt_population"]
    assert BBT.intrinsic_dim == setup["bbt_intrinsic_dim"]


def test_tasks_have_the_papers_metrics() -> None:
    for task, (classes, *_, metric) in printed("datasets")["rows"].items():
        spec = glue_task(task)
        assert (len(spec.labels), spec.metric) == (classes, metric)


@pytest.mark.parametrize("name", ["table1", "table-fedavg", "table3", "table-clients"])
def test_the_page_on_the_reproduction_has_every_row(name: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reproduction.md").read_text(encoding="utf-8")
    table = printed(name)
    for row in table["rows"]:
        cells = paper_row(name, row, table["columns"])
        assert f"| {' | '.join(cells)} |" in page


def test_the_page_has_the_costs_and_the_queries() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reproduction.md").read_text(encoding="utf-8")
    for rows in printed("table2")["rows"].values():
        for seconds, megabytes, *_ in rows.values():
            assert f"{seconds:,.2f}" in page
            assert f"{megabytes:.2f}" in page
    for rows in printed("table-queries")["rows"].values():
        for cells in rows.values():
            assert " | ".join(f"{mean} ± {spread}" for mean, spread in cells) in page
