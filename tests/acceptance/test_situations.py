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
    says: tuple[str, ...] = ()
    most: int = 2
    refused: int | None = 0
    task: str = TEMPLATE
    log_probs: bool = True
    exact: bool = True
    url: str = "{}"
    more: str = ""
    environment: Mapping[str, str] = {}
    model: str = "fake-1"


def always(behaviour: str) -> tuple[str, ...]:
    return ("--chance", f"{behaviour}=1")


def one_input(behaviour: str) -> Case:
    says = ("the model refused an input, which counts as failed",)
    return Case(("--text", f"rubbish={behaviour}"), "inputs failed", says)


def no_input(behaviour: str, *says: str) -> Case:
    neutral = "the model refuses every input, also a neutral one"
    return Case(always(behaviour), "paused", (neutral, *says))


def adapted(server: str, change: str) -> Case:
    return Case(("--set", server), says=(change,), refused=1, task=CHAT)


def ended(behaviour: str, *says: str, **facts: Any) -> Case:
    return Case(always(behaviour), "paused", says, **facts)


def raw(status: int, body: object) -> str:
    return f"raw:{status}:{json.dumps(body)}"


def merged(**parts: object) -> str:
    return f"merged:{json.dumps(parts)}"


def first_token(*top: tuple[str, float]) -> str:
    rows = [{"token": token, "logprob": value} for token, value in top]
    return merged(logprobs={"content": [{"token": "x", "logprob": 0.0, "top_logprobs": rows}]})


def wrong(says: str, url: str = "{}", **environment: str) -> Case:
    return Case((), "not started", (says,), url=url, environment=environment)


CASES = {
    # One input
    "a flagged text": one_input("moderated"),
    "a filtered prompt": one_input("filtered_prompt"),
    "a text that is too long": one_input("too_long"),
    "400 for a text": one_input("error:400"),
    "413 for a text": one_input("error:413"),
    "451 for a text": one_input("error:451"),
    # All inputs
    "400 for all": no_input("error:400", "HTTP 400", "Sorry about that!"),
    "422 for all": no_input("error:422", "HTTP 422", "Sorry about that!"),
    "a key without the model": no_input("forbidden", "Project does not have access to this model."),
    "all texts flagged": no_input("moderated", "Your input was flagged."),
    "all texts too long": no_input("too_long", "Please reduce the length of the messages."),
    "only a neutral text passes": Case(
        ("--text", " text It=ok", "--text", "It was=moderated"),
        "paused",
        ("inputs in a row: HTTP 403", "Your input was flagged."),
        most=24,
    ),
    # Forms
    "no temperature": adapted("temperature=-1", "without temperature"),
    "max_completion_tokens": adapted(
        'max_name="max_completion_tokens"', "it expects max_completion_tokens"
    ),
    "five tokens": adapted("max_top=5", "at most 5 tokens"),
    "no system message": adapted(
        "takes_system=false", "the system message is the beginning of the user's"
    ),
    "lists of parts": adapted("takes_text=false", "messages are lists of parts"),
    # Answers
    "content in parts": Case(always("parts")),
    "a token twice": Case(always("twice")),
    "probabilities beyond 1": ended("twice:x", "likeliest tokens add up to", "log_probs: false"),
    "no credits, as 200": ended("error_body:402", "no quota left", "Insufficient credits", most=1),
    "an error, as 200": no_input("error_body", "HTTP 400", "Insufficient credits"),
    "a wrong key, as 200": ended("ended:401", "key is missing or not valid", most=1),
    "no log-probabilities": ended(
        "no_log_probs", "shows no log-probabilities: set log_probs", most=1
    ),
    "a fence and JSON": Case(always('says:```json\\n{"label": "{}"}\\n```'), log_probs=False),
    "no label word": ended(
        "says:I think that it is fun",
        "33 of the first 33 answers",
        "set structured: true",
        "(most often 'I think that it')",
        most=36,
        log_probs=False,
    ),
    "another system_fingerprint": Case(("--chance", "system:fp_2=0.5")),
    "the run asks for a system_fingerprint": Case(
        ("--model", "fake-1", "--at", "3=system:fp_2"),
        "paused",
        ("asks for system_fingerprint",),
        most=72,
        model="fake-1 (system_fingerprint fp_fake)",
    ),
    # Addresses
    "an address of Azure": Case((), url="{}/chat/completions?api-version=2026-01-01"),
    "a port that is none": wrong("is no address", "http://127.0.0.1:99999/v1"),
    "a dead port": wrong("no connection", "http://127.0.0.1:9/v1"),
    "https at a port of http": wrong("check http or https", "https{tail}"),
    "a proxy of another kind": wrong("HTTP_PROXY, HTTPS_PROXY", HTTPS_PROXY="ftp://x:1"),
    "no file of certificates": wrong("SSL_CERT_FILE", SSL_CERT_FILE="/none.pem"),
}
"""The situations of public reports that were known at first."""

REPORTS = {
    "DeepSeek-V3.2-Exp#49": ended(first_token(), "shows no log-probabilities", most=1),
    "text-generation-inference#2108": Case(always(first_token((" great", 0.0)))),
    "rig#788": Case(
        ("--text", '"role": "system"=' + raw(400, [{"error": {
            "code": 400, "status": "INVALID_ARGUMENT",
            "message": "Developer instruction is not enabled for models/gemma-3-27b-it",
        }}])),
        says=("the system message is the beginning of the user's",), refused=1, task=CHAT,
    ),
    "vllm#33425": one_input(raw(400, {"error": {
        "message": "This model's maximum context length is 2048 tokens. However, your request has "
        "2040 input tokens plus 16 'max_tokens'. Please reduce one or the other.",
        "type": "BadRequestError", "param": "input_tokens, max_tokens", "code": 400,
    }})),
    "lettertrace#34": Case(
        ("--at", "5=" + raw(429, [{"error": {
            "code": 429, "status": "RESOURCE_EXHAUSTED",
            "details": [{"@type": "google.rpc.RetryInfo", "retryDelay": "38s"}],
        }}])),
        refused=None,
    ),
    "gemini-cli#10925": ended(
        raw(429, {"error": {
            "code": 429, "status": "RESOURCE_EXHAUSTED",
            "message": "Quota exceeded for quota metric 'Requests per day per user per tier'",
        }}),
        "failed 100 times in a row", "Requests per day per user per tier", most=140,
    ),
    "pi#8511": Case(
        ("--chance", merged(
            finish_reason="stop", native_finish_reason="network_error", logprobs=None,
            message={"content": ""},
        ) + "=0.1"),
        refused=None, exact=False,
    ),
    "gram#3129": Case(
        ("--chance", raw(200, {"id": "gen-1", "choices": []}) + "=0.1"), refused=None, exact=False
    ),
    "ramalama#2343": Case(
        ("--set", 'lists_models="loading"'), "not started", ("HTTP 503", "Loading model"),
        task='chat: {user: "{prompt} {text}", assistant: "It was"}',
    ),
    "litellm#12586": Case(
        always(merged(usage={"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})),
        exact=False,
    ),
    "litellm#17165": ended(
        raw(400, {"error": {
            "message": "litellm.UnsupportedParamsError: ollama_chat does not support parameters: "
            "['logprobs'], for model llama3.1:70b.",
            "type": None, "param": None, "code": "400",
        }}),
        "shows no log-probabilities", most=1,
    ),
    "litellm#5295": Case(
        ("--text", "response_format=" + raw(400, {"error": {
            "message": "Invalid parameter: 'response_format' must be one of 'json_object', 'text'.",
            "type": "invalid_request_error", "param": "response_format", "code": None,
        }})),
        "paused", ("set structured: false",), most=1, log_probs=False,
    ),
    "meridian#898": Case(
        always("says:Here is the label you asked for:\\n\\n**Label:** {}"), log_probs=False
    ),
    "oh-my-pi#9415": Case(
        ("--text", "reasoning_effort=" + raw(400, {"error": {
            "message": "Reasoning is mandatory for this endpoint and cannot be disabled.",
            "code": 400,
        }})),
        "paused", ("does not take reasoning_effort 'none'", "Reasoning is mandatory"), most=1,
        more=", reasoning_effort: none",
    ),
    "SillyTavern#4680": ended(
        first_token(("<think>", -0.001), ("\n", -7.0)), "show none of the label words", "<think>",
        most=36, more=", limits: {concurrency: 4}",
    ),
}  # fmt: skip
"""Reports that were looked for afterwards, of docs/backends/situations.md."""


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
@pytest.mark.parametrize("name", [*CASES, *REPORTS])
def test_situation(run: Run, name: str, command: str) -> None:
    case = (CASES | REPORTS)[name]
    ran = run(command, case)
    rows = ran.server.received
    if case.ends == "not started":
        assert ran.code == 2 or command == "plan"
        assert rows == []
        (line,) = (line for line in ran.text.splitlines() if case.says[0] in line)
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
            assert ran.report["spent"]["queries"] < case.most / 2
    else:
        assert ran.code == 0, ran.text
        refused = [row for row in rows if row.behaviour.rpartition(":")[2].isdigit()]
        if case.ends == "inputs failed":
            assert 0 < len(refused) < len(rows) / 4
        elif case.refused is not None:
            assert len(refused) == case.refused * trials
    for words in case.says:
        assert words in ran.text
        assert case.ends == "paused" or ran.text.count(words) == 1
    assert "caps" not in ran.text.splitlines()[-1]
    if ran.report:
        ran.check_ledger(exact=case.exact)
