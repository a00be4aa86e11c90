"""The paper's numbers: complete, consistent with each other, and next to ours."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedone_paper import Settings, declared
from fedone_paper.glue import GLUE_TASKS, glue_task
from fedone_paper.methods import METHODS
from fedone_paper.settings import fetch_data, fetch_model
from fedone_paper.soft_prompts import BBT
from fedone_paper.tables import about, paper_row, printed
from fedone_sdk.evaluation.engine import Result, Workspace
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


COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = "import sys; from fedone_paper.settings import fetch_model; print(fetch_model(sys.argv[1]))"


def fetched(cache: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Fetch a model without a network, in a process that has read the variables."""
    environment = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", FETCH, name],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_model_of_the_hub_is_a_folder_of_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="it comes with the extra torch")
    repository = tmp_path / "models--tiny--roberta"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    found = fetched(tmp_path, "tiny/roberta")
    assert (found.returncode, found.stdout.strip()) == (0, str(snapshot)), found.stderr
    absent = fetched(tmp_path, "tiny/absent")
    assert absent.returncode != 0
    assert "'tiny/absent' is not a folder, and the hub does not have it" in absent.stderr


def test_a_folder_and_a_file_stay_what_they_are(tmp_path: Path) -> None:
    assert fetch_model(str(tmp_path)) == tmp_path
    assert fetch_model("models/mini/model.gguf") == Path("models/mini/model.gguf")


def test_rows_of_the_hub_become_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str, *, split: str) -> list[dict[str, object]]:
        asked.append((name, config, split))
        return [{"sentence": f"a {split}", "label": 1, "idx": 0}]

    datasets = ModuleType("datasets")
    datasets.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    for _ in range(2):
        assert fetch_data("hf:glue", ("sst2", "mnli"), tmp_path) == tmp_path
    assert asked == [
        ("nyu-mll/glue", "sst2", "train"),
        ("nyu-mll/glue", "sst2", "validation"),
        ("nyu-mll/glue", "mnli", "train"),
        ("nyu-mll/glue", "mnli", "validation_matched"),
    ]
    row = json.loads((tmp_path / "sst2" / "dev.jsonl").read_text())
    assert row["sentence"] == "a validation"
    assert fetch_data(str(tmp_path), ("sst2",), tmp_path / "other") == tmp_path


RUN = {
    "task": "sst2",
    "num_clients": 4,
    "shots": 4,
    "prompt_len": 3,
    "vocab_size": 20,
    "num_samples": 4,
    "batch_size": 4,
    "searches": False,
}
MANUAL_PROMPTS = declared()["manual_prompts"]


def run(glue: Path, seed: int, folder: Path) -> Result:
    run = {**RUN, "seed": seed}
    trial = METHODS["in-context"].trial("x", Settings(data=glue), run)
    return trial.run(trial.options, Workspace(inputs=trial.inputs, folder=folder))


def test_a_manual_prompt_names_every_label_word() -> None:
    assert set(MANUAL_PROMPTS) == set(GLUE_TASKS)
    for task, prompt in MANUAL_PROMPTS.items():
        words = {word.strip() for word in glue_task(task).label_words}
        assert words <= set(prompt.replace(",", "").replace(".", "").split())


def test_demonstrations_leave_room_for_the_inputs(glue: Path, tmp_path: Path) -> None:
    dev = glue / "sst2" / "dev.jsonl"
    long = '{"sentence": "' + "quite a long story about many things " * 40 + '", "label": 1}\n'
    dev.write_text(long * 10)
    found = run(glue, 0, tmp_path / "work")
    assert (found["demonstrations"], found["prompt"]) == (0, "")
