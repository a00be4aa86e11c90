"""The tables of costs and of methods: the trials that they name, and what they say of them."""

from __future__ import annotations

import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedone_paper import Settings, declared, find_study
from fedone_paper.soft_trials import SOFT, count_soft
from fedone_paper.table2 import count_messages
from fedone_paper.tables import printed
from fedone_sdk.evaluation.engine import Result, Workspace

RATES = declared()["rates"]
PILOT_SEED = 10_007


def measured(value: float, **more: Any) -> Result:
    return {"metric": {"name": "accuracy", "after": value}, **more}


@pytest.fixture
def settings(glue: Path) -> Settings:
    return Settings(data=glue, tasks=("sst2",))


def test_rates_are_searched_before_they_are_used(settings: Settings) -> None:
    table = find_study("table1")
    first = {trial.key: trial for trial in table.trials(settings, {})}
    pilots = {key: trial for key, trial in first.items() if key.startswith("pilot_")}
    assert len(pilots) == 2 * len(RATES)
    for trial in pilots.values():
        assert trial.options["seed"] == PILOT_SEED
        assert trial.options["held_out"]
        assert "dev" not in trial.inputs  # what is reported is not what is chosen by
    assert set(first) - set(pilots) == {
        "sst2_no-prompt",
        "sst2_manual",
        *(f"sst2_{name}_s{seed}" for name in ("in-context", "untrained") for seed in range(3)),
    }

    found = {key: measured(0.5) for key in pilots}
    found["pilot_sst2_bdpl_3e-05"] = measured(0.6)
    del found["pilot_sst2_gs-bdpl_0.0003"]  # it failed
    later = {trial.key: trial for trial in table.trials(settings, found)}
    assert set(later) - set(first) == {
        f"sst2_{name}_s{seed}" for name in ("bdpl", "gs-bdpl") for seed in range(3)
    }
    rates = {
        trial.options["run"]["method"]["learning_rate"]
        for key, trial in later.items()
        if key.startswith("sst2_bdpl")
    }
    assert rates == {3e-5}
    run = later["sst2_gs-bdpl_s2"].options["run"]
    assert run["method"]["learning_rate"] == 1e-4  # the largest of equals that ran
    assert run["seed"] == 2
    # The paper's setting.
    assert run["rounds"] == 100
    assert run["data"]["num_clients"] == 100
    assert run["data"]["shots"] == 16
    assert run["prompt"] == {"length": 20, "vocabulary": {"kind": "pmi", "size": 200}}
    assert run["method"] == {
        "name": "gs-bdpl",
        "num_samples": 20,
        "batch_size": 32,
        "learning_rate": 1e-4,
    }
    assert run["participation"] == {"clients_per_round": 1}


def test_the_supplement_has_ten_clients_per_round(settings: Settings) -> None:
    table = find_study("table-fedavg")
    pilots = table.trials(settings, {})
    assert {trial.options["run"]["participation"]["clients_per_round"] for trial in pilots} == {1}
    # The very trials of table1: their answers are paid once.
    same = {trial.key: trial.options for trial in find_study("table1").trials(settings, {})}
    assert all(same[trial.key] == trial.options for trial in pilots)
    found = {trial.key: measured(0.5) for trial in pilots}
    runs = [trial for trial in table.trials(settings, found) if trial.key not in found]
    assert {trial.options["run"]["participation"]["clients_per_round"] for trial in runs} == {10}


def test_a_row_that_cannot_run_is_left_out_and_it_is_said(
    glue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    white = {"fine-tuning", "prompt-tuning", "p-tuning-v2", "bbt"}

    def named(settings: Settings) -> set[str]:
        return {
            row
            for trial in find_study("table1").trials(settings, {})
            for row in white
            if f"sst2_{row}_" in trial.key
        }

    settings = Settings(data=glue, tasks=("sst2",))
    assert named(settings) == set()  # the SDK's own model comes without weights
    report = find_study("table1").report(settings, {})
    assert "- FedOne-BBT is left out: the model's folder has no config.json" in report.markdown
    assert report.markdown.count(" is left out: ") == len(white)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    settings = Settings(data=glue, model=tmp_path, tasks=("sst2",))
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=object()))
    assert named(settings) == white
    trials = {trial.key: trial for trial in find_study("table1").trials(settings, {})}
    soft = trials["pilot_sst2_p-tuning-v2_0.01"].options["soft"]
    assert soft == {"name": "p-tuning-v2", "batch_size": 32, "learning_rate": 0.01}
    assert trials["sst2_bbt_s0"].options["run"]["backend"]["kind"] == "transformers"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert named(settings) == set()
    assert (
        "left out: the extra torch is not installed"
        in find_study("table1").report(settings, {}).markdown
    )


def test_a_gguf_model_continues_a_template(glue: Path) -> None:
    options = {"methods": "no-prompt,gs-bdpl,default", "rounds": "3", "learning_rate": "0.01"}
    model = glue / "model.gguf"
    model.touch()
    settings = Settings(data=glue, tasks=("sst2",), seeds=1, model=model, options=options)
    trials = {trial.key: trial for trial in find_study("table1").trials(settings, {})}
    assert set(trials) == {"sst2_no-prompt", "sst2_gs-bdpl_s0", "sst2_default_s0"}
    assert trials["sst2_no-prompt"].options["run"]["task"] == "sst2/causal"
    for name, method in ("gs-bdpl", "gs-bdpl"), ("default", "thompson"):
        trial = trials[f"sst2_{name}_s0"]
        run = trial.options["run"]
        assert trial.inputs["model"] == model
        assert run["backend"]["kind"] == "llama_cpp"
        assert (run["task"], run["method"]["name"], run["rounds"]) == ("sst2/causal", method, 3)
    assert run["prompt"] == {"slots": [{"name": "instruction", "candidates": "instructions"}]}
    assert "learning_rate" not in run["method"]
    assert trials["sst2_gs-bdpl_s0"].options["run"]["method"]["learning_rate"] == 0.01


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
    [("bdpl", BDPL, 1, 1), ("gs-bdpl", GS_BDPL, 1, 1), ("gs-bdpl", GS_BDPL, 10, 10),
     ("prompt-tuning", TUNING, 1, 1), ("prompt-tuning", TUNING, 10, 10), ("bbt", BBT, 1, 50),
     ("bbt", BBT, 10, 100)],
)  # fmt: skip
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
