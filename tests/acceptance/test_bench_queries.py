"""The bench of queries: what it writes, what it takes up again, what it says to mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from fedone_sdk import assets
from fedone_sdk.data import load_examples
from tests.benchmarks.queries.__main__ import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sst2/ with 120 training rows and 30 dev rows, of what ships with the SDK."""
    target = tmp_path_factory.mktemp("glue") / "sst2"
    target.mkdir()
    for name, count in ("train", 120), ("dev", 30):
        rows = load_examples(assets.path("companion_feedback") / f"{name}.jsonl", limit=count)
        lines = [json.dumps({"sentence": row["text"], "label": row["label"]}) for row in rows]
        (target / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return target.parent


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """The exit code, in this process: a second is saved each time."""
    # Typer and the commands set these for all of it.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["queries", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    structlog.reset_defaults()
    return exit_.value.code


def test_quick(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "result.json"
    command = ["--quick", "--data", data, "--seeds", 2, "--workers", 2, "--out", tmp_path]
    only_report = [*command, "--only-report"]
    assert bench(monkeypatch, *only_report) == 2
    assert "--out: there is nothing to report in" in capsys.readouterr().err

    assert bench(monkeypatch, *command, "--set", "methods=no-prompt,default") == 0
    capsys.readouterr()
    # All methods, as far as they are there.
    assert bench(monkeypatch, *only_report, "--json", json_file) == 0
    partial = json.loads(json_file.read_text())["data"]["variants"]
    assert {len(found["methods"]) for found in partial.values()} == {1}
    capsys.readouterr()

    assert bench(monkeypatch, *command, "--json", json_file) == 0
    out, err = capsys.readouterr()
    assert "6 of 9 trials (6 were there already)" in err
    document = json.loads(json_file.read_text())
    assert (document["name"], document["failed"]) == ("queries", {})
    trials: dict[str, Any] = {
        file.stem: json.loads(file.read_text())["result"]
        for file in (tmp_path / "queries" / "trials").glob("*.json")
    }
    assert trials.keys() == document["trials"].keys()
    honest, lied = document["data"]["variants"].values()
    # The report is made of what the trials found.
    for name, method in honest["methods"].items():
        for seed, loss in method["losses"].items():
            last = trials[f"sst2-terrible-was-iid_{name}_s{seed}"]["curve"][-1]
            assert last["loss"] == loss
            assert last["queries"] <= 16
    oracle = trials["sst2-terrible-was-iid_oracle"]
    assert honest["oracle"]["prompt"] == oracle["prompt"]
    assert lied["methods"][document["data"]["default"]]["cost_of_lies_points"] is not None
    for heading in ("## The default", "## Liars", "### How much there was to gain"):
        assert heading in out
    text = (tmp_path / "queries" / "queries.md").read_text()
    assert "A quick run: it shows that everything works, and nothing else." in text
    command = f"python -m tests.benchmarks.queries --data {data} --seeds 2 --quick"
    assert f"- Command: `{command}`" in text
    for unit in ("queries", "requests", "tokens"):
        assert f"(queries-{unit}.svg)" in text
        assert b"</svg>" in (tmp_path / "queries" / f"queries-{unit}.svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments: --data: queries needs a folder with TASK/train.jsonl"),
        (["--data", "absent"], "arguments: --data: there is no folder absent"),
        (["--data", "."], "arguments: --data: there is no sst2/train.jsonl"),
        (["--model", "absent"], "arguments: --model: there is no folder absent"),
        (
            ["--data", ".", "--set", "speed=9"],
            "arguments: --set: 'speed=9' is no NAME=VALUE of queries; its names: generations, ",
        ),
        (
            ["--data", ".", "--set", "methods=magic"],
            "arguments: --set methods: there is no 'magic'; no-prompt, ",
        ),
        (
            ["--data", ".", "--set", "variants=sst3"],
            "arguments: --set variants: there is no 'sst3'; sst2-",
        ),
        (["--data", ".", "--set", "marks=9,5"], "arguments: --set marks: 9,5 must rise"),
        (["--json", "absent/x.json"], "arguments: --json: there is no folder absent"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1
