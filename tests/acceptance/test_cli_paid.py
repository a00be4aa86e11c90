"""`fedone tune` and `fedone plan` with a provider that counts requests and injects failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedone_sdk.budget import Usage
from tests.acceptance.tiny import result_in, write_sentences
from tests.console import Fedone, Outcome
from tests.fake_openai.process import fake_process

RUN = """\
name: paid
task: {{template: "{{prompt}} {{text}} It was", labels: {{0: " terrible", 1: " great"}}}}
data: {{train: train.jsonl, dev: dev.jsonl, num_clients: 4, shots: 3}}
prompt: {{length: 3, vocabulary: {{kind: list, candidates: [" good", " bad", " really", " so"]}}}}
method:
  {{name: gs-bdpl, num_samples: 4, batch_size: 4, optimizer: sgd, learning_rate: 0.01,
   alpha_min: 0.01}}
budget: {budget}
rounds: 6
evaluation: {{every: 3}}
backend:
  {{kind: openai, model: fake-1, base_url: "{url}", api_key_env: PAID_KEY{more},
   retry: {{attempts: 2, max_wait_s: 0.01}}}}
"""


@pytest.fixture
def fedone(fedone: Fedone, monkeypatch: pytest.MonkeyPatch) -> Fedone:
    """With the key, which is never shown."""
    monkeypatch.setenv("PAID_KEY", "sk-right-12345678")

    def run(*arguments: object) -> Outcome:
        outcome = fedone(*arguments)
        assert "sk-right" not in outcome.out + outcome.err
        return outcome

    return run


class Provider:
    """The fake provider in a separate process."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._count = 0

    def start(self, *arguments: str) -> str:
        """Restart it; return its URL."""
        self._count += 1
        log = self._folder / f"provider-{self._count}.jsonl"
        start = fake_process(log, "--key", "sk-right-12345678", *arguments)
        self._server = self._stack.enter_context(start)
        return self._server.url

    @property
    def answered(self) -> int:
        return [row.behaviour for row in self._server.received].count("ok")

    @property
    def received(self) -> int:
        return len(self._server.received)


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[Provider]:
    with ExitStack() as stack:
        yield Provider(tmp_path, stack)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sentences(tmp_path)
    return tmp_path


def write_run(folder: Path, url: str, *, budget: str = "{queries: 100}", more: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(RUN.format(url=url, budget=budget, more=more))
    return path


def error_lines(err: str) -> list[str]:
    """What is printed, without the log's warnings."""
    return [line for line in err.splitlines() if not line.startswith("[warning")]


def refused(err: str) -> str:
    """The line with the reason of the pause."""
    lines = [line for line in err.splitlines() if line.startswith("paused: ")]
    assert len(lines) == 1
    assert "Traceback" not in err
    return lines[0]


class TestPaused:
    def test_the_same_command_continues_and_pays_nothing_twice(
        self, fedone: Fedone, folder: Path, provider: Provider
    ) -> None:
        # 16 dev examples without a prompt and 16 untrained, then training: during a seat's call.
        run = write_run(folder, provider.start("--at", "60=bad_key"))
        tune = ["tune", run, "--store", folder / "run.db", "--json", folder / "r.json"]
        code, out, err = fedone(*tune)
        assert code == 1
        line = refused(err)
        assert "; continue with: fedone tune " in line
        assert f"--store {folder / 'run.db'}" in line
        assert "stopped (paused: " in out
        assert "prompt so far" in out
        first = result_in(folder / "r.json")
        assert first.status == "stopped"
        assert (first.reason or "") in line
        assert first.metric.after is None
        assert first.leased != Usage()  # The seat is kept; what it has asked counts as spent.
        code, _, err = fedone(*tune)
        assert (code, "paused" in err) == (0, False)
        second = result_in(folder / "r.json")
        assert (second.status, second.spent.queries) == ("completed", 24)
        assert second.metric.after is not None
        assert provider.answered == second.spent.requests - 1  # and the one that was refused

    def test_fresh_starts_over_from_the_answers_that_were_paid(
        self, fedone: Fedone, folder: Path, provider: Provider
    ) -> None:
        run = write_run(folder, provider.start("--at", "60=no_quota"))
        tune = ["tune", run, "--json", folder / "r.json"]
        code, _, err = fedone(*tune, "--fresh")
        assert code == 1
        # The command that continues does not start over.
        assert refused(err).endswith(f"; continue with: fedone {' '.join(map(str, tune))}")
        assert fedone(*tune).code == 0
        first, paid = result_in(folder / "r.json"), provider.received
        assert fedone(*tune, "--fresh").code == 0
        again = result_in(folder / "r.json")
        assert provider.received == paid
        assert (again.spent.requests, again.spent.queries) == (0, first.spent.queries)
        assert again.alpha_sha256 == first.alpha_sha256
        # All its rounds are done: a larger cap would change nothing.
        code, _, err = fedone(*tune, "--cap", 200)
        assert code == 2
        assert "a higher cap gives it no more work" in error_lines(err)[-1]
        assert fedone(*tune, "--cap", 200, "--fresh").code == 0
        assert provider.received == paid
        assert result_in(folder / "r.json").cap.queries == 200


class TestTroubles:
    """Each error is one line that names what to change; paid answers are kept."""

    def test_a_dead_server(self, fedone: Fedone, folder: Path, provider: Provider) -> None:
        url = provider.start("--at", "60=no_quota")
        run = write_run(folder, url)
        tune = ["tune", run, "--store", folder / "run.db", "--json", folder / "r.json"]
        assert fedone(*tune).code == 1
        write_run(folder, "http://127.0.0.1:9/v1")
        code, _, err = fedone(*tune)
        assert code == 2
        (line,) = error_lines(err)
        assert "no connection" in line
        write_run(folder, url)
        code, _, err = fedone(*tune)
        assert code == 0, err
        assert result_in(folder / "r.json").spent.queries == 24


def without_log_probs(run: Path) -> Path:
    """Ask for written answers."""
    text = run.read_text().replace("task: {", "task: {loss: zero_one, ")
    run.write_text(text.replace("retry:", "limits: {concurrency: 4}, log_probs: false, retry:"))
    return run


class TestPlan:
    def test_it_equals_the_spending_of_tune_and_sends_nothing(
        self, fedone: Fedone, folder: Path, provider: Provider
    ) -> None:
        prices = ", prices: {prompt: 1.0, completion: 2.0}"
        run = write_run(folder, provider.start(), more=prices)
        assert fedone("plan", run, "--json", folder / "plan.json").code == 0
        assert provider.answered == 0
        plan = json.loads((folder / "plan.json").read_text())
        assert plan["warnings"] == []
        assert fedone("tune", run, "--json", folder / "r.json").code == 0
        spent = result_in(folder / "r.json").spent
        assert plan["training_queries"] == spent.queries == 24
        # Bytes bound the tokens of a model whose tokeniser is not known, so both are at most.
        assert spent.requests <= plan["expected"]["requests"]
        assert spent.prompt_tokens <= plan["expected"]["prompt_tokens"]
        assert float(spent.usd) <= plan["expected"]["usd"] <= plan["most"]["usd"]

    @pytest.mark.parametrize("trouble", ["dead", "wrong key", "no key"])
    def test_an_unavailable_model_is_a_warning(
        self,
        fedone: Fedone,
        folder: Path,
        provider: Provider,
        monkeypatch: pytest.MonkeyPatch,
        trouble: str,
    ) -> None:
        url = provider.start()
        healthy = fedone("plan", write_run(folder, url), "--json", folder / "healthy.json")
        assert healthy.code == 0
        if trouble == "dead":
            url = "http://127.0.0.1:9/v1"
        elif trouble == "wrong key":
            monkeypatch.setenv("PAID_KEY", "sk-wrong-12345678")
        else:
            monkeypatch.delenv("PAID_KEY")
        code, out, _ = fedone("plan", write_run(folder, url), "--json", folder / "plan.json")
        assert code == 0
        assert "  warning: backend: " in out
        assert "sk-wrong" not in out
        plan, other = (
            json.loads((folder / name).read_text()) for name in ("plan.json", "healthy.json")
        )
        missing = [line for line in plan["warnings"] if "PAID_KEY is not set" in line]
        assert (len(missing), len(plan["warnings"]) - len(missing)) == (trouble == "no key", 1)
        # OpenAI's models are counted here, without asking.
        assert plan["expected"] == other["expected"]

    def test_a_server_that_counts_the_tokens(self, fedone: Fedone, folder: Path) -> None:
        run = write_run(folder, "http://127.0.0.1:9")
        text = run.read_text().replace("kind: openai", "kind: vllm")
        run.write_text(text)
        code, out, _ = fedone("plan", run, "--json", folder / "plan.json")
        assert code == 0
        plan = json.loads((folder / "plan.json").read_text())
        assert plan["training_queries"] == 24
        assert plan["evaluation_queries"] == 3 * 4 + 2 * 4
        assert plan["warnings"][-1].endswith("cannot be counted without this model")
        assert "Traceback" not in out

    def test_a_cap_in_money_without_a_price(
        self, fedone: Fedone, folder: Path, provider: Provider
    ) -> None:
        run = write_run(folder, provider.start(), budget="{usd: 1}")
        code, out, _ = fedone("plan", run)
        assert code == 0
        assert "warning: budget.usd: the price of this model is not known; set backend.pr" in out
        code, _, err = fedone("tune", run)
        assert code == 2
        assert len(error_lines(err)) == 1
        assert "run.yaml: budget.usd: the price of this model is not known" in err
        assert provider.answered == 0


def test_a_price_that_is_not_known_is_not_0(
    fedone: Fedone, folder: Path, provider: Provider
) -> None:
    run = write_run(folder, provider.start())
    code, out, _ = fedone("plan", run, "--json", folder / "plan.json")
    assert code == 0
    assert "unknown: set the model's price in backend.prices" in out
    plan = json.loads((folder / "plan.json").read_text())
    accounts = ("per_query", "most", "expected", "smallest_cap")
    assert [plan[name]["usd"] for name in accounts] == [None] * 4
    code, tuned, _ = fedone("tune", run, "--json", folder / "r.json")
    assert code == 0
    assert json.loads((folder / "r.json").read_text())["spent"]["usd"] is None
    assert "prompt tokens, USD unknown" in tuned
    assert "at an unknown price" in tuned
    assert "0.0000" not in out + tuned


def test_methods_are_compared_after_a_yes(fedone: Fedone, folder: Path, provider: Provider) -> None:
    """The announced requests are those that the provider counts; announcing costs nothing."""
    run = write_run(folder, provider.start(), more=", prices: {prompt: 1, completion: 1}")
    compare = ["compare", run, "--methods", "gs-bdpl,random,no-prompt", "--seeds", 1]
    code, _, err = fedone(*compare, "--json", folder / "c.json")
    assert code == 2
    lines = error_lines(err)
    assert lines[0] == "3 of 3 trials to run"
    assert lines[1] == "  at most 48 training queries, and 48 on the dev split"
    assert lines[3].startswith("  at most ")
    assert "USD 0.0000" not in lines[3]
    assert lines[-1].startswith("arguments: --yes: is required")
    assert provider.answered == 0

    assert fedone(*compare, "--yes", "--json", folder / "c.json").code == 0
    spent = json.loads((folder / "c.json").read_text())["spent"]
    assert spent["requests"] == provider.answered > 0
    assert spent["usd"] > 0
    # It continues without requests: all answers are cached.
    before = provider.received
    assert fedone(*compare).code == 0
    assert provider.received - before <= 1  # a look at the model
