"""The commands as processes: signals, kill -9, and a server with its clients."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from tests.acceptance.tiny import result_in, write_sentences
from tests.processes import Process, free_port, until

RUN = """\
name: tiny
task: {{template: "{{prompt}} {{text}} It was {{mask}}.", labels: {{0: " terrible", 1: " great"}}}}
{data}
prompt: {{length: 3, vocabulary: {{kind: list, candidates: [" good", " bad", " really", " so"]}}}}
method:
  {{name: gs-bdpl, num_samples: 4, batch_size: 4, optimizer: sgd, learning_rate: 0.01,
   alpha_min: 0.01}}
participation: {{exchange: losses}}
budget: {{queries: {cap}}}
rounds: {rounds}
"""
CONFIG = """\
listen: 127.0.0.1:{port}
store: fedone.db
auth: {{enrolment_tokens: [enrol-me-please], admin_token: {{env: TEST_ADMIN_TOKEN}}}}
runs: [run.yaml]
"""
ADMIN = "an-admin-token"
_PATIENCE_S = 40.0
_ROOT = str(Path(__file__).parents[2])


class Start(Protocol):
    """Starts a `fedone` command, or with `program` a file of Python."""

    def __call__(self, *arguments: object, program: bool = False, **more: str) -> Process: ...


@contextmanager
def starting(folder: Path, **environment: str) -> Iterator[Start]:
    """Starts processes in a folder; those that still run at the end are killed."""
    with ExitStack() as stack:
        count = iter(range(1000))

        def start(*arguments: object, program: bool = False, **more: str) -> Process:
            module = () if program else ("-m", "fedone_sdk.cli")
            process = Process(
                [sys.executable, *module, *map(str, arguments)],
                {**os.environ, "PYTHONPATH": _ROOT, **environment, **more},
                folder,
                str(next(count)),
                separate=True,
                patience_s=_PATIENCE_S,
            )
            stack.enter_context(process.popen)
            stack.callback(process.popen.kill)
            return process

        yield start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    tokens = {"TEST_ADMIN_TOKEN": ADMIN, "FEDONE_ADMIN_TOKEN": ADMIN}
    with starting(tmp_path, FEDONE_TOKEN="enrol-me-please", **tokens) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sentences(tmp_path)
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "one.jsonl").write_text("".join(lines[:20]))
    (tmp_path / "two.jsonl").write_text("".join(lines[20:]))
    return tmp_path


def local_run(folder: Path, *, rounds: int) -> Path:
    data = "data: {train: train.jsonl, num_clients: 4, shots: 3}"
    path = folder / "run.yaml"
    path.write_text(RUN.format(data=data, cap=4 * rounds, rounds=rounds))
    return path


def served_run(folder: Path, *, rounds: int, data: str = "") -> str:
    (folder / "run.yaml").write_text(RUN.format(data=data, cap=4 * rounds, rounds=rounds))
    port = free_port()
    (folder / "config.yaml").write_text(CONFIG.format(port=port))
    return f"http://127.0.0.1:{port}"


# On one machine


def test_ctrl_c_ends_a_run_with_what_it_learnt(start: Start, folder: Path) -> None:
    run_file = local_run(folder, rounds=5000)
    run = start("tune", run_file, "--json", "r.json")
    run.says("round 1/")
    run.popen.send_signal(signal.SIGINT)
    assert run.ended() == 130
    found = result_in(folder / "r.json")
    assert found.status == "stopped"
    assert 0 < found.rounds < 5000
    assert found.prompt.text
    assert "stopped (interrupted)" in run.log
    assert "prompt so far" in run.log
    assert f"interrupted; continue with: fedone tune {run_file} --json r.json\n" in run.err
    assert "Traceback" not in run.err
    assert "\x1b" not in run.log + run.err


def test_ctrl_c_twice_aborts(start: Start, folder: Path) -> None:
    run_file = local_run(folder, rounds=5000)
    run_file.write_text(run_file.read_text().replace("num_clients", "dev: long.jsonl, num_clients"))
    # The measurement is long, so that the second Ctrl-C arrives during it.
    (folder / "long.jsonl").write_text((folder / "train.jsonl").read_text() * 1000)
    run = start("tune", run_file, "--json", "r.json")
    run.says("round 1/")
    run.popen.send_signal(signal.SIGINT)
    run.says("Ctrl-C again aborts")
    time.sleep(0.2)  # Signals within 0.1 s count as one.
    run.popen.send_signal(signal.SIGINT)
    assert run.ended() == 130
    assert "Traceback" not in run.err
    assert f"Continue with: fedone tune {run_file} --json r.json\n" in run.err
    assert run.log == ""
    assert not (folder / "r.json").exists()


# Served


def test_serve_and_clients(start: Start, folder: Path) -> None:
    # The server's own rows: what it measures on them is apart from the cap on training.
    url = served_run(folder, rounds=12, data="data: {train: none.jsonl, dev: train.jsonl}")
    server = start("serve", "config.yaml")
    server.says('"event": "serving"')
    watching = start("runs", "watch", "tiny", "--server", url, "--json", "watched.json")
    clients = [
        start("client", "--server", url, "--data", f"{name}.jsonl", "--state", name)
        for name in ("one", "two")
    ]
    assert [client.ended() for client in clients] == [0, 0], server.log
    assert watching.ended() == 0
    assert watching.log.startswith("round 1, loss")
    found = result_in(folder / "watched.json")
    assert (found.status, found.rounds, found.spent.queries) == ("completed", 12, 48)
    assert '"event": "prompts are measured"' in server.log

    def judged() -> bool:
        show = start("runs", "show", "tiny", "--server", url, "--json", "judged.json")
        assert show.ended() == 0
        verdict = result_in(folder / "judged.json").verdict
        return verdict is not None and verdict.source == "dev" and verdict.text in show.log

    until(judged, server)
    verdict = result_in(folder / "judged.json").verdict
    assert verdict is not None
    assert (verdict.source, verdict.examples, len(verdict.standings)) == ("dev", 40, 5)
    assert result_in(folder / "judged.json").evaluation.queries > 0
    listing = start("runs", "list", "--server", url)
    exporting = start("runs", "export", "tiny", "--server", url)
    stopping = start("runs", "stop", "tiny", "--server", url)
    wrong = start("runs", "show", "nope", "--server", url)
    assert listing.ended() == 0
    heads, row = (re.split(r"  +", line.strip()) for line in listing.log.strip().splitlines())
    assert heads == ["run", "status", "rounds", "metric", "devices", "last update", "USD"]
    assert row[:3] == ["tiny", "completed", "12 of 12"]
    assert row[-1] == "0.0000"
    assert exporting.ended() == 0
    kinds = [
        json.loads(line)["kind"] for line in (folder / "tiny.run.jsonl").read_text().splitlines()
    ]
    assert (kinds.count("round"), kinds.count("outcomes")) == (12, 3)
    assert stopping.ended() == wrong.ended() == 2
    assert stopping.err == "run_conflict: the run has ended: completed\n"
    assert wrong.err == "not_found: there is no run 'nope'\n"

    server.popen.send_signal(signal.SIGTERM)
    assert server.ended() == 0
    for process in (server, *clients):
        events = [json.loads(line) for line in process.log.splitlines()]
        assert all({"event", "level", "timestamp"} <= event.keys() for event in events)
        assert process.err == ""
        assert ADMIN not in process.log
        assert "enrol-me-please" not in process.log


def test_a_port_in_use_is_one_line(start: Start, folder: Path) -> None:
    url = served_run(folder, rounds=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(url.rpartition(":")[2])))
        taken.listen()
        server = start("serve", "config.yaml")
        assert server.ended() == 2
    assert server.err.startswith("config.yaml: listen: 127.0.0.1:")
    assert len(server.err.splitlines()) == 1


def test_matrices_have_one_thread_by_default() -> None:
    code = """
import atexit, os, sys
atexit.register(lambda: print(os.environ["OPENBLAS_NUM_THREADS"]))
from fedone_sdk.cli import main
assert "numpy" not in sys.modules
sys.argv = ["fedone", "serve", "--help"]
main()
"""
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "1"
