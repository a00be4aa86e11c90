"""examples/paper/reproduce.py: its files, interruptions and errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    for trial in document["trials"].values():
        assert f" {100 * trial['result']['metric']['after']:.1f} |" in done.stdout
    text = (tmp_path / "table1" / "table1.md").read_text()
    assert text.startswith("# All methods on the seven tasks, one client per round\n\nA quick run")
    assert re.search(
        r"- Command: `python examples/paper/reproduce.py table1 --data .* --quick .*`", text
    )
    assert re.search(r"- Model: `onnx:roberta_mini:[0-9a-f]{16}`", text)
    assert (tmp_path / "table1" / "table1-curves.svg").stat().st_size > 1000

    again = reproduce(*command)
    assert again.returncode == 0
    assert "12 of 12 trials (12 were there already)" in again.stderr


@pytest.mark.parametrize("name", [name for name in declared()["studies"] if name != "table1"])
def test_quick(name: str, out: Path, request: pytest.FixtureRequest) -> None:
    """All but table1, which is above; their numbers are pinned."""
    arguments: list[object] = [name, "--quick", "--out", out]
    if name not in ("figure-toy", "figure-heterogeneity"):
        arguments += request.getfixturevalue("data")
    if name == "table3":
        said: dict[str, object] = {
            "kind": "openai",
            "model": "fake-1",
            "prices": {"prompt": 0, "completion": 0},
        }
        backend = out / "backend.yaml"
        said |= {"base_url": request.getfixturevalue("provider"), "api_key_env": None}
        backend.write_text(json.dumps(said))
        arguments += ["--backend", backend]
    assert main([*map(str, arguments)]) == 0
    document = json.loads((out / name / f"{name}.json").read_text())
    assert (document["name"], document["failed"]) == (name, {})
    results = {key: trial["result"] for key, trial in document["trials"].items()}
    golden_paper.check(name, results)
    text = (out / name / f"{name}.md").read_text()
    assert "A quick run: it shows that everything works, and nothing else." in text
    assert "| the paper |" not in text
    for figure in (out / name).glob("*.svg"):
        assert f"({figure.name})" in text
        assert b"</svg>" in figure.read_bytes()
    assert len([*(out / name).glob("*.svg")]) == (name not in ("table2", "table3"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "arguments: NAME: there is no study 'nonsense'; table1, "),
        (["table1", "--data", "."], "arguments: --data: there is no mnli/train.jsonl"),
        (["table1", "--data", "hf:"], "hf:/mnli: must be hf:glue/TASK"),
        (["figure-theory", "--data", ".", "--set", "methods=bbt"],
         "arguments: --set methods: bbt cannot be run: the model's folder has no config.json"),
        (["table1", "--data", ".", "--set", "speed=9"],
         "arguments: --set: table1 has no setting 'speed'; its names: methods"),
        (["table1", "--data", ".", "--set", "methods=bdpl,magic"],
         "arguments: --set methods: there is no magic; no-prompt, "),
    ],
)  # fmt: skip
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
