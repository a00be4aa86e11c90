"""Situations of public reports on models behind an API, through each command that asks one.

The provider is scripted. Each case compares what it served with the ledger, and what a user reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import yaml

from tests.acceptance.test_cli_paid import RUN, without_log_probs
from tests.acceptance.test_cli_processes import ADMIN, CONFIG, Start, starting
from tests.acceptance.tiny import write_sentences
from tests.console import Fedone
from tests.fake_openai.process import FakeProcess, fake_process
from tests.processes import free_port, until

KEY = "sk-right-12345678"
TEMPLATE = 'template: "{prompt} {text} It was"'
CHAT = 'chat: {system: "You judge.", user: "{prompt} {text} It was"}'
COMMANDS: dict[str, Sequence[str]] = {
    "plan": ("--no-probe",),
    "tune": ("--no-store",),
    "score": ("--prompt", " good bad so"),
    "compare": ("--methods", "gs-bdpl,random", "--seeds", "1", "--yes"),
    "serve": (),
}
TRIALS = 2
"""Models that `compare` builds."""


class Case(NamedTuple):
    """What a provider does, and how a command ends on it.

    Attributes:
        provider: Its arguments.
        ends: Whether the run completes, some inputs fail, it pauses, or does not start.
        says: What the operator reads.
        but_score: Also read, but with `score`, whose first failed queries end it.
        most: The largest number of requests of a paused run; a trial of `compare` has as many.
        refused: Requests of one model that are refused before its form is found; None for any.
        exact: Whether the provider reports what it bills; else the ledger has the quote.
        url: The address, around the provider's.
        more: Other keys of the backend.
        environment: Variables.
        model: The run's name of the model.
    """

    provider: tuple[str, ...]
    ends: Literal["completed", "inputs failed", "paused", "not started"] = "completed"
    says: Sequence[str] = ()
    but_score: str = ""
    most: int = 2
    refused: int | None = 0
    task: str = TEMPLATE
    log_probs: bool = True
    exact: bool = True
    url: str = "{}"
    more: str = ""
    environment: Mapping[str, str] = {}
    model: str = "fake-1"


def behaviour(what: Any) -> str:
    """A behaviour of the provider; a mapping has JSON."""
    if isinstance(what, str):
        return what
    ((kind, body),) = what.items()
    status, body = (f"{body[0]}:", body[1]) if kind == "raw" else ("", body)
    return f"{kind}:{status}{json.dumps(body)}"


def case_of(
    *,
    does: Any = None,
    chance: float = 1,
    text: Mapping[str, Any] = {},
    at: Mapping[int, Any] = {},
    set: str | None = None,  # the name of the option
    serves: str | None = None,
    **facts: Any,
) -> Case:
    provider = [("--text", f"{part}={behaviour(what)}") for part, what in text.items()]
    provider += [("--at", f"{number}={behaviour(what)}") for number, what in at.items()]
    if does is not None:
        provider.append(("--chance", f"{behaviour(does)}={chance}"))
    provider += [(f"--{key}", what) for key, what in (("set", set), ("model", serves)) if what]
    if facts.get("ends") == "inputs failed":
        facts["says"] = ["the model refused an input, which counts as failed"]
    if facts.get("task") == "chat":
        facts["task"] = CHAT
    return Case(tuple(word for pair in provider for word in pair), **facts)


ROWS = yaml.safe_load(Path(__file__).with_name("situations.yaml").read_text(encoding="utf-8"))
CASES = {name: case_of(**row) for name, row in ROWS.items()}


class Ran(NamedTuple):
    """What a command did."""

    code: int
    text: str
    report: dict[str, Any]
    server: FakeProcess

    def check_ledger(self, *, exact: bool) -> None:
        """The ledger holds what was served, token by token; refused requests are requests."""
        rows = self.server.received
        ledger = self.report.get("spent") or self.report["usage"]
        assert ledger["requests"] == len(rows)
        for unit in ("prompt_tokens", "completion_tokens"):
            billed = sum(getattr(row, unit) for row in rows)
            assert ledger[unit] == billed or (not exact and ledger[unit] > billed / 2)


Run = Callable[..., Ran]


@pytest.fixture
def run(fedone: Fedone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a command on a provider."""
    monkeypatch.setenv("PAID_KEY", KEY)
    monkeypatch.setenv("FEDONE_ADMIN_TOKEN", ADMIN)
    monkeypatch.chdir(tmp_path)
    write_sentences(tmp_path, dev=40)
    tokens = {"TEST_ADMIN_TOKEN": ADMIN, "FEDONE_TOKEN": "enrol-me-please"}
    with ExitStack() as stack:
        start = stack.enter_context(starting(tmp_path, **tokens))

        def ran(command: str, case: Case) -> Ran:
            provider = fake_process(tmp_path / "served.jsonl", "--key", KEY, *case.provider)
            server = stack.enter_context(provider)
            Path("served.jsonl").touch()
            file, report = Path("run.yaml"), Path("report.json")
            for name, value in case.environment.items():
                monkeypatch.setenv(name, value)
            url = case.url.format(server.url, tail=server.url.removeprefix("http"))
            text = RUN.format(url=url, budget="{queries: 100}", more=case.more)
            text = text.replace("model: fake-1", f"model: {case.model}")
            if case.ends == "paused":  # The breaker must stay open.
                text = text.replace("max_wait_s: 0.01", "max_wait_s: 60")
            file.write_text(text.replace(TEMPLATE, case.task))
            if not case.log_probs:
                without_log_probs(file)
            if command == "serve":
                code, printed = served(start, fedone, case)
            else:
                code, out, err = fedone(command, file, *COMMANDS[command], "--json", report)
                printed = out + err
            assert "Traceback" not in printed
            assert KEY not in printed
            found = json.loads(report.read_text()) if report.exists() else {}
            return Ran(code, printed, found, server)

        yield ran


def served(start: Start, fedone: Fedone, case: Case) -> tuple[int, str]:
    """Serve the run to one client until it ends or pauses; return its state as an exit status."""
    run, _, backend = Path("run.yaml").read_text().partition("backend:\n")
    Path("run.yaml").write_text(run.replace("num_clients: 4, shots: 3", "shots: 3"))
    port = free_port()
    Path("config.yaml").write_text(f"{CONFIG.format(port=port)}backend:\n{backend}")
    url = f"http://127.0.0.1:{port}"
    server = start("serve", "config.yaml", **case.environment)
    if case.ends == "not started":
        return server.ended(), server.log + server.err
    server.says('"event": "serving"')
    client = start("client", "--server", url, "--data", "train.jsonl")
    until(lambda: any(f'"event": "run {end}"' in server.log for end in ("ended", "paused")), server)

    def shown() -> dict[str, Any]:
        show = fedone("runs", "show", "paid", "--server", url, "--json", "report.json")
        assert show.code == 0, show.err
        found: dict[str, Any] = json.loads(Path("report.json").read_text())
        return found

    paused = '"event": "run paused"' in server.log
    if not paused:
        assert client.ended() == 0
    # The last prompt is measured.
    until(lambda: paused or (shown()["verdict"] or {}).get("source") == "dev", server)
    reason = shown()["reason"] or ""
    client.stop()
    server.stop()
    for words in case.says:  # A provider may quote a text of another device.
        assert words not in client.log or "HTTP" not in words
    return int(reason.startswith("paused: ")), server.log + reason


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", CASES)
def test_situation(run: Run, name: str, command: str) -> None:
    case = CASES[name]
    ran = run(command, case)
    rows = ran.server.received
    if case.ends == "not started":
        assert ran.code == 2 or command == "plan"
        assert rows == []
        # A server logs it as JSON, too.
        lines = (line for line in ran.text.splitlines() if not line.startswith("{"))
        (line,) = (line for line in lines if case.says[0] in line)
        assert all(words in line for words in case.says)
        return
    if command == "plan":
        assert (ran.code, rows) == (0, [])
        return
    trials = TRIALS if command == "compare" else 1
    if case.ends == "paused":
        assert ran.code == (1 if command in ("tune", "serve") else 2), ran.text
        assert len(rows) <= case.most * trials
        if command in ("tune", "serve"):
            assert ran.report["reason"].startswith("paused: ")
            # Inputs that are refused before it is clear that all are count.
            assert ran.report["spent"]["queries"] <= case.most / 2
    else:
        assert ran.code == 0, ran.text
        refused = [row for row in rows if row.behaviour.rpartition(":")[2].isdigit()]
        if case.ends == "inputs failed":
            assert 0 < len(refused) < len(rows) / 4
        elif case.refused is not None:
            assert len(refused) == case.refused * trials
    assert command == "score" or case.but_score in ran.text
    for words in case.says:
        assert words in ran.text
        assert case.ends == "paused" or ran.text.count(words) == 1
    assert "caps" not in ran.text.splitlines()[-1]
    if ran.report:
        ran.check_ledger(exact=case.exact)
