"""An app developer: fit of the data, the log, errors."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.acceptance.first_hour.desk import ENROLMENT, feedback, run_yaml, serve, write_rows
from tests.acceptance.processes import Start
from tests.processes import Process, free_port, until

APP = """\
import asyncio
import sys

from fedone_sdk import EdgeClient
from fedone_sdk.data import load_examples
from fedone_sdk.errors import FedOneError


async def main(url, token, data):
    rows = {"rows": lambda: load_examples("rows.jsonl"), "wrong": lambda: ["a text", 0]}[data]()
    async with EdgeClient(url, token=token, data=rows, state_dir="app") as client:
        for fit in await client.check():
            print("check:", fit, flush=True)
        await client.run_forever()


try:
    asyncio.run(main(*sys.argv[1:]))
except FedOneError as error:
    print(type(error).__name__, error)
"""
URGENCY = '{low: " low", high: " high"}'
ROWS = feedback(12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_yaml(tmp_path, "tickets")
    run_yaml(tmp_path, "urgency", labels=URGENCY)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    write_rows(tmp_path / "body.jsonl", [{"body": row["text"], "label": "bad"} for row in ROWS])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def infos(process: Process) -> list[str]:
    """What a library's user reads: its lines of level INFO and above, without times."""
    return re.findall(r"\[(?:info|warning|error) *\] (.*)", process.log)


def test_does_my_data_fit(start: Start, folder: Path) -> None:
    _, url = serve(folder, start, "tickets", "urgency")

    def client(url: str, data: str = "rows.jsonl", *more: str) -> Process:
        return start("client", "--server", url, "--data", data, "--check", *more)

    fits = client(url)
    field, empty = client(url, "body.jsonl"), client(url, "empty.jsonl")
    stranger = client(url, "rows.jsonl", "--token", "of-another-server")
    path, unreachable = client(f"{url}/v2"), client(f"http://127.0.0.1:{free_port()}")
    assert fits.ended() == 0, fits.err
    message = fits.log.splitlines()
    assert message[:2] == [f"{url} accepts this client", "your rows fit tickets 12 of 12"]
    why = "field 'label' is 'bad', not one of: low, high"
    assert message[2:] == [f"your rows fit urgency 0 of 12 because {why}"]
    assert field.ended() == 1
    missing = "field 'text' is missing (the row has: body, label)"
    assert f"your rows fit tickets 0 of 12 because {missing}\n" in field.log
    for wrong, line in (
        (empty, "empty.jsonl: has no rows\n"),
        (stranger, "unauthorized: enrolment needs a valid enrolment token\n"),
        (path, f"server: {url}/v2 is not the base URL of an aggregator: "),
        (unreachable, ": cannot be reached: "),
    ):
        assert wrong.ended() == 2
        assert line in wrong.err
        assert "Traceback" not in wrong.err
        assert wrong.log == ""


def test_an_app_and_its_log(start: Start, folder: Path) -> None:
    server, url = serve(folder, start, "tickets", "urgency")
    app = start("app.py", url, ENROLMENT, "rows", program=True)
    until(lambda: len(accepted(app)) >= 3, app)
    assert "check: tickets 12 of 12\n" in app.log
    # The misfit is in the log in the words of the command, and the device works for the other.
    assert "check: urgency 0 of 12 because field 'label' is " in app.log
    assert any(line.startswith("your rows fit urgency 0 of 12 because ") for line in infos(app))

    server.popen.send_signal(signal.SIGKILL)
    server.ended()
    until(lambda: "offline since" in app.log, app)
    time.sleep(3)  # Several attempts of another process.
    restarted = start("serve", "server.yaml")
    until(lambda: "online again" in app.log, app)
    before = len(accepted(app))
    until(lambda: len(accepted(app)) >= before + 2, app)
    assert restarted.popen.poll() is None
    app.popen.send_signal(signal.SIGTERM)
    app.ended()
    lines = infos(app)
    offline = [line for line in lines if "offline since" in line]
    assert len(offline) == 1
    assert re.match(r"offline since \d\d:\d\d +reason=.*cannot be reached", offline[0])
    assert sum("online again" in line for line in lines) == 1
    assert "[debug" not in app.log  # Attempts are not told to an app that asked for no logs.
    # One line for an accepted update, and no other while all is well.
    info = re.findall(r"\[info *\] (\w+ \w*)", app.log)
    assert {line.strip() for line in info} == {"your rows", "updated", "online again"}
    rounds = [re.search(r"assignment_id=(\w+)", line)[1] for line in accepted(app)]  # type: ignore[index]
    assert len(set(rounds)) == len(rounds)


def accepted(app: Process) -> list[str]:
    """Its lines about updates."""
    return [line for line in infos(app) if line.startswith("updated ")]


def test_an_error_is_reported_within_seconds(start: Start, folder: Path) -> None:
    _, url = serve(folder, start, "urgency")
    nowhere = f"http://127.0.0.1:{free_port()}"

    def client(url: str, data: str) -> Process:
        return start("client", "--server", url, "--data", data, "--state", f"{data}.state")

    label, field = client(url, "rows.jsonl"), client(url, "body.jsonl")
    away = client(nowhere, "rows.jsonl")
    shape = start("app.py", url, ENROLMENT, "wrong", program=True)
    label.says("your rows fit urgency 0 of 12 because field 'label' is ")
    field.says("your rows fit urgency 0 of 12 because field 'text' is missing")
    away.says(f'"reason": "{nowhere}: cannot be reached: ')
    assert shape.ended() == 0
    assert shape.log.startswith("DataError data: row 1 is str; it must map fields to values, ")
    assert shape.log.count("\n") == 1
    for process in (label, field):
        lines = [json.loads(line) for line in process.log.splitlines()]
        fit = next(line for line in lines if line["event"].startswith("your rows fit"))
        assert fit["level"] == "warning"
    time.sleep(2)
    # One line tells of a server that is away, however often it is tried.
    events = [json.loads(line)["event"] for line in away.log.splitlines()]
    assert [event.startswith("offline since") for event in events].count(True) == 1
    assert events.count("waiting") <= 1
