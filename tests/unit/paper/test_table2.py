"""The table of costs: counts come from messages or shapes."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

from fedone_paper import Settings, find_study
from fedone_paper.soft_trials import SOFT, count_soft
from fedone_paper.table2 import count_messages
from fedone_paper.tables import printed
from fedone_sdk.evaluation.engine import Workspace

BDPL: dict[str, Any] = {"name": "bdpl"}
GS_BDPL: dict[str, Any] = {"name": "gs-bdpl"}
BBT: dict[str, Any] = {"name": "bbt", "num_samples": 200}
TUNING: dict[str, Any] = {"name": "prompt-tuning"}
P_TUNING: dict[str, Any] = {"name": "p-tuning-v2"}


def count(tmp_path: Path, method: dict[str, Any], **changes: Any) -> dict[str, Any]:
    options = {
        "method": method,
        "prompt_len": 20,
        "vocab_size": 200,
        "hidden_size": 1024,
        "num_layers": 24,
        "num_clients": 100,
        "clients_per_round": 1,
        "rounds": 100,
        "exchange": "alpha",
        **changes,
    }
    run = count_soft if method["name"] in SOFT else count_messages
    return run(options, Workspace(inputs={}, folder=tmp_path))


def megabytes(found: dict[str, Any], times: int = 1) -> str:
    exact = Decimal((found["elements_down"] + found["elements_up"]) * 4 * times) / 2**20
    return str(exact.quantize(Decimal("0.01"), ROUND_HALF_UP))


@pytest.mark.parametrize(
    ("row", "method", "together", "times"),
    [
        ("bdpl", BDPL, 1, 1),
        ("gs-bdpl", GS_BDPL, 1, 1),
        ("gs-bdpl", GS_BDPL, 10, 10),
        ("prompt-tuning", TUNING, 1, 1),
        ("prompt-tuning", TUNING, 10, 10),
        ("bbt", BBT, 1, 50),
        ("bbt", BBT, 10, 100),
    ],
)
def test_the_papers_counts_come_out(
    tmp_path: Path, row: str, method: dict[str, Any], together: int, times: int
) -> None:
    """Of 100 rounds, or of fewer that are counted several times."""
    found = count(tmp_path, method, clients_per_round=together, rounds=100 // times)
    assert found["status"] == "completed"
    _, mb, visits, queries = printed("table2")["rows"][row][together]
    assert megabytes(found, times) == f"{mb:.2f}"
    assert (found["visits"] * times, found["queries"] * times) == (visits, queries or 0)


def test_counts_that_are_not_the_papers(tmp_path: Path) -> None:
    """The population of its text, and prefixes without what is sent and never trained."""
    text = count(tmp_path, {**BBT, "num_samples": 20}, rounds=2)
    assert (megabytes(text, 50), text["queries"] * 50) == ("0.38", 2000)
    assert megabytes(count(tmp_path, P_TUNING, rounds=2), 50) == "750.00"


def test_the_papers_numbers_stand_beside_ours_at_its_own_shapes() -> None:
    experiment, settings = find_study("table2"), Settings()
    counted = {
        "gs-bdpl": (4000, 2000, 3.05),
        "p-tuning-v2": (983_040, 0, 750.0),
        "prompt-tuning": (20_480, 0, 15.625),
    }
    results = {
        f"{name}_alpha_k1": {
            "visits": 100,
            "elements_down": 100 * elements,
            "elements_up": 100 * elements,
            "queries": queries,
            "communication": {"upload_bytes": 1, "download_bytes": 1},
        }
        for name, (elements, queries, _) in counted.items()
    }
    text = experiment.report(settings, results).markdown
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines()}
    assert rows["| GS-BDPL"][3:5] == rows["| GS-BDPL"][8:10] == ["3.05", "100"]
    assert (rows["| P-tuning v2"][3], rows["| P-tuning v2"][8]) == ("750.00", "1141.72")
    assert rows["| Prompt tuning"][3] == rows["| Prompt tuning"][8] == "15.63"
