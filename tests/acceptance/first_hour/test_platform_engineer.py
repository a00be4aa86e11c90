"""A platform engineer: start, fitting devices, an unavailable model, access."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fedone_sdk.messages import RunResult
from tests.acceptance.first_hour.desk import (
    ADMIN,
    feedback,
    get,
    plain,
    run_yaml,
    serve,
    write_rows,
)
from tests.acceptance.processes import Start
from tests.processes import Process, until


def test_check_reports_what_is_measured_and_weak_tokens(start: Start, tmp_path: Path) -> None:
    write_rows(tmp_path / "tickets.dev.jsonl", feedback(20))
    run_yaml(tmp_path, "tickets")
    run_yaml(tmp_path, "urgency", labels='{low: " low", high: " high"}')
    (tmp_path / "server.yaml").write_text(
        "listen: 0.0.0.0:0\nstore: fedone.db\nbackend: {kind: onnx}\n"
        "auth: {enrolment_tokens: [{env: WEAK}], admin_token: {env: FEDONE_ADMIN_TOKEN}}\n"
        "runs: [tickets.yaml, urgency.yaml]\n"
    )
    check = start("serve", "server.yaml", "--check", WEAK="password1")
    assert check.ended() == 0, check.err
    assert "server.yaml: would serve 2 runs at 0.0.0.0:0" in check.log
    assert "tickets: measured on 20 rows\n" in check.log
    assert "urgency: not measured: RUN.yaml names no data.dev\n" in check.log
    (warning,) = check.err.splitlines()
    assert warning.startswith("warning: server.yaml: auth.enrolment_tokens.0: can be guessed, and ")
    assert "is open to a network without tls" in warning
    assert not (tmp_path / "fedone.db").exists()

    write_rows(tmp_path / "tickets.dev.jsonl", [{"text": "a", "label": "so-so"}])
    check = start("serve", "server.yaml", "--check", WEAK="password1")
    assert check.ended() == 2
    assert "field 'label' is 'so-so', not one of: bad, good" in check.err


def test_two_runs_an_outage_and_the_end(start: Start, tmp_path: Path) -> None:
    rows = feedback(48)
    write_rows(tmp_path / "tickets.dev.jsonl", rows[:16])
    run_yaml(tmp_path, "tickets", queries=400)
    run_yaml(tmp_path, "urgency", labels='{low: " low", high: " high"}')
    server, url = serve(tmp_path, start, "tickets", "urgency")
    assert '"event": "prompts are measured"' in server.log
    assert '"event": "prompts are not measured"' in server.log

    def runs(command: str, *arguments: object) -> Process:
        process = start("runs", command, *arguments, "--server", url)
        process.ended()
        return process

    def result_of(run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(get(f"{url}/v1/runs/{run}")[1])
        return found

    def devices_of(run: str) -> int:
        return int((result_of(run).get("devices") or {"connected": 0})["connected"])

    def model() -> dict[str, Any]:
        status, answer = get(f"{url}/readyz")
        assert status == 200, answer  # Whatever the model does.
        found: dict[str, Any] = json.loads(answer)["checks"]["model"]
        return found

    devices = [
        start("client", "--server", url, "--data", write_rows(tmp_path / f"{n}.jsonl", part).name)
        for n, part in enumerate((rows[16:32], rows[32:48]))
    ]
    until(lambda: all(devices_of(run) == 2 for run in ("tickets", "urgency")), server)
    until(lambda: result_of("urgency")["devices"]["fit"] == 0, server)
    listing = plain(runs("list").log)
    assert re.search(r"tickets running \d+ of 10000 \S+ 2 of 2 fit ", listing)
    assert "urgency running 0 of 10000 - 0 of 2 fit " in listing
    shown = plain(runs("show", "urgency").log)
    assert "status running, 0 rounds\n" in shown  # It waits; the other devices do not end it.
    assert "devices 2 connected, 0 fit: no row fits: field 'label' is " in shown
    assert ", not one of: low, high" in shown

    # The model goes away: the run pauses, and the server stays ready.
    assert model()["ok"]
    (tmp_path / "down").touch()
    until(lambda: not model()["ok"], server)
    until(lambda: '"event": "run paused"' in server.log, server)
    assert get(f"{url}/")[0] == 200
    paused = plain(runs("show", "tickets").log)
    assert "the model server is down" in paused
    (tmp_path / "down").unlink()
    until(lambda: model()["ok"], server)
    assert runs("resume", "tickets").popen.returncode == 0

    raising = runs("raise", "tickets", "--queries", 420)
    assert raising.popen.returncode == 0, raising.err
    assert " of 420 " in plain(raising.log)
    lower = runs("raise", "tickets", "--queries", 10)
    assert lower.popen.returncode == 2
    assert len(lower.err.splitlines()) == 1

    stopping = runs("stop", "urgency")
    assert stopping.popen.returncode == 0, stopping.err
    until(lambda: (result_of("tickets").get("verdict") or {}).get("source") == "dev", server)
    show = runs("show", "tickets", "--json", "result.json")
    result = RunResult.model_validate_json((tmp_path / "result.json").read_bytes())
    assert result.verdict is not None
    assert f"verdict {result.verdict.text}\n" in plain(show.log)
    assert (result.verdict.examples, len(result.verdict.standings)) == (16, 5)
    assert result.spent.queries <= 420
    assert [device.ended() for device in devices] == [0, 0]
    dry = runs("delete", "urgency", "--dry-run")
    assert dry.log.startswith("1 run would be deleted\n")
    assert runs("delete", "urgency").log.startswith("1 run is deleted\n")
    gone = runs("show", "urgency")
    assert (gone.popen.returncode, gone.err) == (2, "not_found: there is no run 'urgency'\n")

    # An address that leads nowhere has a way back for people, and one line for programs.
    status, page = get(f"{url}/runs/tickets", accept="text/html")
    assert status == 404
    assert "Nothing is at <code>/runs/tickets</code>" in page
    assert '<a href="../">To the dashboard</a>' in page
    status, problem = get(f"{url}/runs/tickets")
    assert (status, json.loads(problem)["code"]) == (404, "not_found")
    assert ADMIN not in server.log
