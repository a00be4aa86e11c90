"""examples/paper/reproduce.py: what it writes, how it is interrupted, what it says to mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedone_paper import declared
from reproduce import main
from tests.acceptance import golden_paper
from tests.fake_openai.process import fake_process

SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).resolve().parents[3] / "shared"))
SCRIPT = Path(__file__).parents[2] / "examples" / "paper" / "reproduce.py"
GLUE = SHARED / "data" / "glue"

Done = subprocess.CompletedProcess[str]


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def reproduce(*arguments: object) -> Done:
    process = start(*arguments)
    out, err = process.communicate(timeout=300)
    return Done(process.args, process.returncode, out, err)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experiments that share trials find them here."""
    return tmp_path_factory.mktemp("reproduction")


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[str]:
    """The address of a chat model."""
    with fake_process(tmp_path / "provider.jsonl") as server:
        yield server.url


@pytest.fixture(scope="module")
def data() -> list[object]:
    if not GLUE.exists():
        pytest.skip(f"{GLUE} is absent (FEDONE_SHARED names the folder of shared data)")
    return ["--data", GLUE]


def test_table1_from_an_interruption_to_the_end(data: list[object], tmp_path: Path) -> None:
    command = ["table1", *data, "--quick", "--workers", 2, "--out", tmp_path]
    process = start(*command)
    assert process.stderr is not None
    for line in process.stderr:  # one line per trial
        if "2 of 12 trials" in line:
            break
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"stopped; trials are kept in {tmp_path / 'table1'}" in err
    _, left = psutil.wait_procs(workers, timeout=30)
    assert [worker for worker in left if worker.status() != psutil.STATUS_ZOMBIE] == []
    kept = len(list((tmp_path / "table1" / "trials").glob("*.json")))
    assert 2 <= kept < 12

    done = reproduce(*command)
    assert done.returncode == 0, done.stderr
    assert f"({kept} were there already)" in done.stderr
    document = json.loads((tmp_path / "table1" / "table1.json").read_text())
    assert document["failed"] == {}
    assert len(document["trials"]) == 12
    # White-box rows need weights, which the SDK's own model does not come with.
    assert "FedOne-Prompt tuning is left out: the model's folder has no" in done.stdout
    trials = (tmp_path / "table1" / "trials").glob("*.json")
    golden_paper.check(
        "table1", {file.stem: json.loads(file.read_text())["result"] for file in trials}
    )
    # The table is made of what the trials found.
    for row, cells in document["data"]["rows"].items():
        for task, cell in cells["tasks"].items():
            (value,) = cell["values"].values()
            (file,) = (tmp_path / "table1" / "trials").glob(f"{task}_{row}*.json")
            assert json.loads(file.read_text())["result"]["metric"]["after"] == value
            assert f"| {cells['title']} |" in done.stdout
            assert f" {100 * value:.1f} |" in done.stdout
    text = (tmp_path / "table1" / "table1.md").read_text()
    assert text.startswith("# All methods on the seven tasks, one client per round\n\nA quick run")
    assert re.search(
        r"- Command: `python examples/paper/reproduce.py table1 --data .* --quick`", text
    )
    assert re.search(r"- Model: `onnx:roberta_mini:[0-9a-f]{16}`", text)
    for kind in ("svg", "png"):
        assert (tmp_path / "table1" / f"table1-curves.{kind}").stat().st_size > 1000

    again = reproduce(*command)
    assert again.returncode == 0
    assert "12 of 12 trials (12 were there already)" in again.stderr


def table_fedavg(found: Any, trials: Mapping[str, Any]) -> None:
    assert found["scale"]["clients_per_round"] == 3
    assert set(trials) == {"sst2_bdpl_s0", "sst2_gs-bdpl_s0"}
    for trial in trials.values():
        assert trial["spent"]["queries"] == 3 * 3 * 5  # rounds, clients per round, prompts
        assert trial["evaluation"]["queries"] > 0


def table2(found: Any, trials: Mapping[str, Any]) -> None:
    elements = {line["name"]: line["elements"] for line in found["counts"]}
    # n N; n H; 2 layers n H; the dimensions of z.
    assert elements["bdpl"] == elements["gs-bdpl"] == 20 * 200
    assert elements["prompt-tuning"] == 20 * 1024
    assert elements["p-tuning-v2"] == 2 * 24 * 20 * 1024
    assert elements["bbt-20"] == elements["bbt-200"] == 500
    for line in found["counts"]:
        sent = line["elements"] * 4 * 2 * 2 / 2**20  # bytes, down and up, rounds
        assert line["megabytes"] == pytest.approx(sent)
        if line["wire_megabytes"]:  # soft prompts have no wire
            assert sent < line["wire_megabytes"]["alpha"] < sent + 0.1
        assert line["visits"] == 2
    assert {line["name"]: line["queries"] for line in found["counts"]} == {
        "prompt-tuning": 0,
        "p-tuning-v2": 0,
        "bbt-200": 400,
        "bbt-20": 40,
        "bdpl": 40,
        "gs-bdpl": 40,
    }


def table3(found: Any, trials: Mapping[str, Any]) -> None:
    rows = found["rows"]
    assert list(rows) == [
        "No prompt",
        "No prompt, label bias",
        "Prompt without training",
        "FedOne-BDPL",
        "FedOne-GS-BDPL",
        "The SDK's default: instructions, label bias",
    ]
    for label, row in rows.items():
        (result,) = row["sst2"]
        assert 0 <= result["metric"] <= 1
        assert (result["examples"], result["failed"]) == (16, 0)
        tuned = label.startswith(("FedOne", "The SDK"))
        assert found["spent"][label]["queries"] == (9 if tuned else 0)  # rounds, prompts
        assert found["spent"][label]["requests"] >= (16 + 9 if tuned else 16)


def figure_toy(found: Any, trials: Mapping[str, Any]) -> None:
    (split,) = found["splits"]
    assert set(split["final_accuracy"]) == {"1", "10", "40"}
    for clients in 1, 10, 40:
        trial = trials[f"iid_k{clients}_s0"]
        assert split["final_accuracy"][str(clients)] == [trial["accuracy"][-1]]
        # Two epochs of one mini-batch at each client, within 2,000 queries.
        assert trial["visits"] == clients * trial["rounds"] == clients * (2000 // (2 * clients))
    assert split["final_accuracy"]["1"][0] > 0.6  # it learns


def figure_heterogeneity(found: Any, trials: Mapping[str, Any]) -> None:
    assert [split["label"] for split in found["splits"]] == [
        "IID",
        "Dirichlet 0.5",
        "Dirichlet 0.1",
    ]
    assert len({tuple(split["final_accuracy"]["1"]) for split in found["splits"]}) == 3


def table_queries(found: Any, trials: Mapping[str, Any]) -> None:
    assert list(found["methods"]) == ["GS-BDPL (tau = 1)", "BDPL"]
    for method in found["methods"].values():
        for clients, row in method["targets"]["expected_loss"]["clients"].items():
            (queries,) = row["queries"].values()
            assert queries is None or 0 < queries <= method["cap"] == 24
            assert row["median"]["value"] == queries
            assert clients in ("1", "3")
    for trial in trials.values():
        assert trial["curve"][0]["queries"] == 0
        assert trial["curve"][-1]["queries"] <= 24
        assert 0 < trial["curve"][-1]["expected_loss"] < 5


def figure_prompt_length(found: Any, trials: Mapping[str, Any]) -> None:
    assert list(found) == ["sst2"]
    assert list(found["sst2"]) == ["5", "10"]
    (five, ten) = found["sst2"].values()
    assert five["0"]["metric"]["no_prompt"] == ten["0"]["metric"]["no_prompt"]
    for length, row in found["sst2"].items():
        assert row["0"]["metric"] == trials[f"sst2_n{length}_s0"]["metric"]
        assert 0.5 < row["0"]["metric"]["after"] < 1


def table_clients(found: Any, trials: Mapping[str, Any]) -> None:
    assert list(found["sst2"]) == ["10", "100", "1000"]
    for clients, runs in found["sst2"].items():
        assert trials[f"c{clients}_s0"]["num_clients"] == int(clients)
        assert runs["0"]["queries"] == 3 * 4  # rounds, prompts
        assert runs["0"]["reused_rows"] == (clients == "1000")


def figure_theory(found: Any, trials: Mapping[str, Any]) -> None:
    assert list(found) == ["gs-bdpl", "bdpl"]
    for name, panel in found.items():
        assert list(panel["measured"]) == ["1", "3"]
        assert f"{name}_k3_s0" in trials
        one = panel["measured"]["1"]["value"]
        assert panel["predicted"] == pytest.approx(
            {"1": one, "3": one and one * 3 * (3 + 2 / 3) ** 2 / 25}
        )


@pytest.mark.parametrize(
    ("name", "check", "figure"),
    [
        ("table-fedavg", table_fedavg, "table-fedavg-curves"),
        ("table2", table2, None),
        ("table3", table3, None),
        ("figure-toy", figure_toy, "figure-toy"),
        ("figure-heterogeneity", figure_heterogeneity, "figure-heterogeneity"),
        ("table-queries", table_queries, "table-queries"),
        ("figure-prompt-length", figure_prompt_length, "figure-prompt-length"),
        ("table-clients", table_clients, "table-clients"),
        ("figure-theory", figure_theory, "figure-theory"),
    ],
)
def test_quick(
    name: str,
    check: Callable[[Any, Mapping[str, Any]], None],
    figure: str | None,
    out: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Table1's is above."""
    arguments: list[object] = [name, "--quick", "--out", out]
    if name not in ("figure-toy", "figure-heterogeneity"):
        arguments += request.getfixturevalue("data")
    if name == "table3":
        arguments += ["--base-url", request.getfixturevalue("provider"), "--api-model", "fake-1"]
    assert main([*map(str, arguments)]) == 0
    document = json.loads((out / name / f"{name}.json").read_text())
    assert (document["name"], document["failed"]) == (name, {})
    results = {
        file.stem: json.loads(file.read_text())["result"]
        for file in out.glob("*/trials/*.json")
        if file.stem in document["trials"]
    }
    assert results.keys() == document["trials"].keys()
    golden_paper.check(name, results)
    check(document["data"], results)
    text = (out / name / f"{name}.md").read_text()
    assert "A quick run: it shows that everything works, and nothing else." in text
    if figure is not None:
        assert f"({figure}.svg)" in text or name == "table2"
        assert b"</svg>" in (out / name / f"{figure}.svg").read_bytes()
        assert (out / name / f"{figure}.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "arguments: NAME: there is no study 'nonsense'; table1, "),
        (["table1"], "arguments: --data: table1 needs a folder with TASK/train.jsonl"),
        (["table1", "--data", "absent"], "arguments: --data: there is no folder absent"),
        (["table1", "--data", "."], "arguments: --data: there is no mnli/train.jsonl"),
        (["table1", "--data", "README.md"], "arguments: --data: there is no folder README.md"),
        (["table1", "--model", "absent"], "arguments: --model: there is no folder absent"),
        (["table1", "--model", "docs"], "arguments: --model: docs holds no model: neither"),
        (
            ["table2", "--quick", "--out", "README.md"],
            "arguments: --out: README.md is no folder",
        ),
        (["figure-toy", "--task", "sst2"], "arguments: --task: figure-toy has no use for it"),
        (["table1", "--data", ".", "--cap", "9"], "arguments: --cap: table1 has no use for it"),
        (["figure-toy", "--data", "docs"], "docs: has no train-images-idx3-ubyte"),
        (
            ["table2", "--set", "rounds=0"],
            "arguments: --set rounds: must be a positive whole number",
        ),
        (
            ["table-queries", "--data", ".", "--set", "cap=50"],
            "arguments: --set cap: 50 is no multiple of 600, whole rounds of every K*",
        ),
        (
            ["figure-theory", "--data", ".", "--set", "methods=bbt"],
            "arguments: --set methods: bbt cannot be run: the model's folder has no config.json",
        ),
        (["table1", "--data", ".", "--task", "x"], "arguments: --task: there is no 'x'; mnli, "),
        (
            ["table1", "--data", ".", "--set", "speed=9"],
            "arguments: --set: 'speed=9' is no NAME=VALUE of table1; its names: methods",
        ),
        (
            ["table1", "--data", ".", "--set", "methods=bdpl,magic"],
            "arguments: --set methods: there is no magic; no-prompt, ",
        ),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_what_there_is() -> None:
    done = reproduce("--list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(declared()["studies"])
