from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedone_paper import Settings, find_study
from fedone_sdk.evaluation.engine import Result
from tests.unit.paper.glue import sst2_folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    sst2_folder(folder)
    for task in ("cola", "mrpc"):
        (folder / task).symlink_to(folder / "sst2")
    return folder


def result(after: float, *, reused: bool = False) -> Result:
    metric = {"name": "accuracy", "no_prompt": 0.8, "before": 0.7, "after": after}
    curve = [
        {"round": -1, "queries": 0, "metric": 0.7},
        {"round": 9, "queries": 200, "metric": after},
    ]
    return {
        "metric": metric,
        "curve": curve,
        "reused_rows": reused,
        "wall_s": 2.0,
        "rounds": 100,
        "spent": {"queries": 2000},
        "communication": {"upload_bytes": 1, "download_bytes": 2, "messages": 3},
    }


class TestTableClients:
    def test_says_whose_rows_are_shared(self, data: Path) -> None:
        results = {
            f"c{clients}_s{seed}": result(0.75 + 0.01 * seed, reused=clients > 100)
            for clients in (100, 1000, 10_000)
            for seed in range(3)
        }
        settings = Settings(data=data, seeds=3)
        assert results.keys() == {
            trial.key for trial in find_study("table-clients").trials(settings, {})
        }
        report = find_study("table-clients").report(settings, results)
        text = report.markdown
        assert "| 100 | 80.0 ± 0.0 | 70.0 ± 0.0 | 76.0 ± 1.0 | 80.8 ± 0.4 | no |" in text
        assert "| 10,000 | 80.0 ± 0.0 | 70.0 ± 0.0 | 76.0 ± 1.0 | 79.8 ± 1.0 | yes |" in text
        assert "Clients, by seed: 1,000 against 100: 0.0 ± 0.0 points" in text
        figure = Figure()
        report.figures["table-clients"](figure)
        assert [axes.get_xscale() for axes in figure.axes] == ["log"]


class TestFigurePromptLength:
    def test_compares_each_length_with_the_papers(self, data: Path) -> None:
        results = {
            f"sst2_n{length}_s{seed}": result((0.8 if length == 20 else 0.7) + 0.001 * seed)
            for length in (10, 20, 40, 60)
            for seed in range(5)
        }
        settings = Settings(data=data, seeds=5)
        keys = {trial.key for trial in find_study("figure-prompt-length").trials(settings, {})}
        assert results.keys() < keys
        assert len(keys) == 3 * 4 * 5
        report = find_study("figure-prompt-length").report(settings, results)
        assert (
            "10 against 20: -10.0 ± 0.0 points, better in 0 and worse in 5 of 5" in report.markdown
        )
        # The first seed of the others stays where it was.
        assert "in 17 of 20 runs" in report.markdown
        figure = Figure()
        report.figures["figure-prompt-length"](figure)
        assert [axes.get_title() for axes in figure.axes] == ["sst2"]  # the others failed

    def test_lengths_differ_in_nothing_else(self, data: Path) -> None:
        trials = find_study("figure-prompt-length").trials(Settings(data=data, seeds=1), {})
        runs = [trial.options["run"] for trial in trials if trial.key.startswith("sst2")]
        assert [run["prompt"].pop("length") for run in runs] == [10, 20, 40, 60]
        assert all(run == runs[0] for run in runs)
