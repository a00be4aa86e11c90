"""Refusals of a provider through the CLI: what was served, what the ledger says, what a user reads.

The provider is scripted: each situation is a public report about a hosted model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.acceptance.test_cli_paid import RUN
from tests.acceptance.tiny import write_sentences
from tests.console import Fedone
from tests.fake_openai.process import FakeProcess, fake_process

TEMPLATE = 'template: "{prompt} {text} It was"'
CHAT = 'chat: {system: "You judge.", user: "{prompt} {text} It was"}'

COMMANDS: dict[str, Sequence[str]] = {
    "tune": ("--no-store",),
    "score": ("--prompt", " so good"),
    "compare": ("--methods", "gs-bdpl,random", "--seeds", "1", "--yes"),
}


class Ran(NamedTuple):
    """What a command did."""

    code: int
    text: str
    report: dict[str, Any]
    server: FakeProcess

    def served(self, answered: bool) -> int:
        rows = self.server.received
        return sum((row.behaviour == "ok") is answered for row in rows)

    @property
    def ledger(self) -> dict[str, Any]:
        found: dict[str, Any] = self.report.get("spent") or self.report["usage"]
        return found

    def check_ledger(self) -> None:
        """The ledger holds what was served, token by token; refused requests are requests."""
        rows = self.server.received
        assert self.ledger["requests"] == len(rows)
        for unit in ("prompt_tokens", "completion_tokens"):
            assert self.ledger[unit] == sum(getattr(row, unit) for row in rows)


@pytest.fixture
def run(
    fedone: Fedone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Ran]]:
    """Runs a command on a provider: ``run(command, *arguments_of_the_provider, task=)``."""
    monkeypatch.setenv("PAID_KEY", "sk-right-12345678")
    write_sentences(tmp_path)
    with ExitStack() as stack:

        def ran(command: str, *provider: str, task: str = TEMPLATE, text: str = RUN) -> Ran:
            log = tmp_path / "served.jsonl"
            log.unlink(missing_ok=True)
            server = stack.enter_context(fake_process(log, "--key", "sk-right-12345678", *provider))
            file, report = tmp_path / "run.yaml", tmp_path / "report.json"
            filled = text.format(url=server.url, budget="{queries: 100}", more="")
            file.write_text(filled.replace(TEMPLATE, task))
            code, out, err = fedone(command, file, *COMMANDS[command], "--json", report)
            assert "Traceback" not in out + err
            found = json.loads(report.read_text()) if report.exists() else {}
            return Ran(code, out + err, found, server)

        yield ran


Run = Callable[..., Ran]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "behaviour",
    ["moderated", "filtered_prompt", "too_long", "error:400", "error:413", "error:451"],
)
def test_a_refused_input_fails_alone(run: Run, command: str, behaviour: str) -> None:
    ran = run(command, "--text", f"rubbish={behaviour}")
    assert ran.code == 0, ran.text
    ran.check_ledger()
    assert 0 < ran.served(answered=False) < ran.served(answered=True) / 4
    if command != "compare":  # Its trials are processes.
        assert ran.text.count("the model refused an input, which counts as failed") == 1
    if command == "score":
        assert "16 (2 failed)" in ran.text
        assert ran.served(answered=True) == 14  # The others are not paid for twice.
    elif command == "tune":
        assert ran.ledger["queries"] == 24
        assert "not measured" not in ran.text


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ("error:400", "Sorry about that!"),
        ("error:422", "Sorry about that!"),
        ("forbidden", "Project does not have access to this model."),
        ("moderated", "Your input was flagged."),
        ("too_long", "Please reduce the length of the messages."),
    ],
)
def test_a_refusal_of_all_inputs_stops_at_once(
    run: Run, command: str, behaviour: str, says: str
) -> None:
    ran = run(command, "--chance", f"{behaviour}=1")
    assert ran.code == (1 if command == "tune" else 2)
    assert len(ran.server.received) == 2
    assert "the model refuses every input, also a neutral one" in ran.text
    assert says in ran.text
    assert "caps" not in ran.text.splitlines()[-1]
    if command == "tune":
        ran.check_ledger()
        assert ran.ledger["queries"] == ran.report["evaluation"]["queries"] == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_data_of_which_every_input_is_refused(run: Run, command: str) -> None:
    """Only the neutral input passes."""
    ran = run(command, "--text", " text It=ok", "--text", "It was=moderated")
    assert ran.code == (1 if command == "tune" else 2)
    assert 16 <= ran.served(answered=False) <= 24
    assert ran.served(answered=True) <= 4
    assert "inputs in a row: HTTP 403" in ran.text


ADAPTED = {
    "temperature=-1": "without temperature",
    'max_name="max_completion_tokens"': "it expects max_completion_tokens",
    "max_top=5": "at most 5 tokens",
    "takes_system=false": "the system message is the beginning of the user's",
    "takes_text=false": "messages are lists of parts",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("server", ADAPTED)
def test_the_form_of_requests_is_adapted_once(run: Run, command: str, server: str) -> None:
    ran = run(command, "--set", server, task=CHAT)
    assert ran.code == 0, ran.text
    ran.check_ledger()
    models = 2 if command == "compare" else 1
    assert ran.served(answered=False) == models
    if command != "compare":
        assert ran.text.count(ADAPTED[server]) == 1


def test_adaptations_add_up(run: Run) -> None:
    ran = run("score", *(part for each in ADAPTED for part in ("--set", each)), task=CHAT)
    assert ran.code == 0, ran.text
    ran.check_ledger()
    assert ran.served(answered=False) == len(ADAPTED)
