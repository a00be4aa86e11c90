"""table3 against the fake provider, whose answers are a hash of the question: only costs count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import structlog

from fedone_paper import Report, Settings, find_study
from fedone_sdk.budget import Budget, BudgetGuard, SqliteLedger, Usage
from fedone_sdk.errors import FedOneError, SpecError
from fedone_sdk.evaluation.engine import Result, Trial, Workspace
from tests.fake_openai.process import FakeProcess, fake_process

PRICES = {"prompt": 1.0, "completion": 2.0}
FREE = {"prompt": 0, "completion": 0}


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcess]:
    monkeypatch.setenv("TABLE3_KEY", "sk-right-12345678")
    with fake_process(tmp_path / "provider.jsonl", "--key", "sk-right-12345678") as started:
        yield started


@pytest.fixture
def settings(glue: Path, provider: FakeProcess, tmp_path: Path) -> Settings:
    """SST-2's shape with rows of the SDK's own, and a model free of charge."""
    return Settings(
        data=glue, seeds=1, quick=True, backend_file=backend_file(tmp_path, provider, FREE)
    )


@pytest.fixture
def paid(settings: Settings, provider: FakeProcess, tmp_path: Path) -> Settings:
    """The same model at a price."""
    return replace(settings, backend_file=backend_file(tmp_path, provider, PRICES))


def backend_file(
    folder: Path, provider: FakeProcess, prices: dict[str, float] | None, **more: str
) -> Path:
    said = {
        "kind": "openai",
        "model": "fake-1",
        "base_url": provider.url,
        "api_key_env": "TABLE3_KEY",
        "prices": prices,
        **more,
    }
    file = folder / f"backend-{'paid' if prices else 'unknown'}.yaml"
    file.write_text(json.dumps(said))  # JSON is YAML
    return file


def run(trial: Trial, folder: Path) -> Result:
    found = trial.run(trial.options, Workspace(inputs=trial.inputs, folder=folder / trial.key))
    result: Result = json.loads(json.dumps(found, allow_nan=False))
    return result


def run_all(settings: Settings, folder: Path) -> tuple[dict[str, Result], Report]:
    study = find_study("table3")
    results = {trial.key: run(trial, folder) for trial in study.trials(settings, {})}
    structlog.reset_defaults()
    return results, study.report(settings, results)


def test_the_whole_table(paid: Settings, provider: FakeProcess, tmp_path: Path) -> None:
    results, report = run_all(replace(paid, cap_usd=10.0), tmp_path)
    assert list(results) == [
        "sst2_no-prompt_s0",
        "sst2_no-prompt-bias_s0",
        "sst2_untrained_s0",
        "sst2_bdpl_s0",
        "sst2_gs-bdpl_s0",
        "sst2_default_s0",
    ]
    for label in (
        "No prompt",
        "No prompt, label bias",
        "Prompt without training",
        "FedOne-BDPL",
        "FedOne-GS-BDPL",
        "The SDK's default: instructions, label bias",
    ):
        assert f"| {label} | " in report.markdown
    # What is said to have been spent is what the provider has received.
    spent = [Usage.model_validate(result["spent"]) for result in results.values()]
    total = sum(spent, Usage())
    assert total.requests == len(provider.received)
    assert total.queries == 3 * 3 * 3  # methods, rounds, prompts
    tokens = total.prompt_tokens + 2 * total.completion_tokens
    assert total.usd == Decimal(tokens).scaleb(-6)
    assert results["sst2_no-prompt_s0"]["prompt"] == ""
    assert results["sst2_bdpl_s0"]["status"] == "completed"
    assert "Of the runs 3 rounds were paid for. The first 16 dev rows" in report.markdown
    assert "one accuracy alone is up to 12.5" in report.markdown
    # The paper's numbers stand beside those of a full run only.
    assert "GPT-3.5 Turbo" in report.markdown
    assert "| the paper |" not in report.markdown


async def spend(workspace: Workspace, usd: Decimal) -> None:
    ledger, worst = SqliteLedger(workspace.file("spent.sqlite")), Usage(usd=usd)
    async with BudgetGuard(Budget(usd=usd), ledger=ledger).reserve(worst):
        pass  # Never settled, as by an attempt that was broken off: it counts in full.


class TestCaps:
    def test_queries_are_divided_among_the_runs(self, settings: Settings, tmp_path: Path) -> None:
        tuned = find_study("table3").trials(replace(settings, cap_queries=20), {})[-1]
        found = run(tuned, tmp_path)
        assert (found["spent"]["queries"], found["rounds"]) == (6, 2)
        assert found["status"] == "budget_exhausted"

    def test_money_is_divided_among_the_trials(self, paid: Settings, tmp_path: Path) -> None:
        trials = find_study("table3").trials(replace(paid, cap_usd=6e-4), {})
        assert {trial.options["usd"] for trial in trials} == {"0.0001"}
        with pytest.raises(FedOneError, match=r"budget of 0\.0001 usd exhausted"):
            run(trials[0], tmp_path)

    def test_what_pays_for_nothing_is_refused(self, settings: Settings) -> None:
        with pytest.raises(SpecError, match="--cap: 5 queries do not pay for one round of 3 of"):
            find_study("table3").trials(replace(settings, cap_queries=5), {})

    def test_what_broken_attempts_have_spent_counts(self, paid: Settings, tmp_path: Path) -> None:
        tuned = find_study("table3").trials(replace(paid, cap_usd=6.0), {})[-1]
        workspace = Workspace(inputs=tuned.inputs, folder=tmp_path / tuned.key)
        asyncio.run(spend(workspace, Decimal("0.9999")))
        with pytest.raises(FedOneError, match=r"budget of 1\.0 usd exhausted: 0\.9999 spent"):
            tuned.run(tuned.options, workspace)


def test_refuses_before_it_spends(
    paid: Settings, provider: FakeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table3 = find_study("table3")
    with pytest.raises(SpecError, match=r"--cap-usd: is required: fake-1 in .* costs money"):
        table3.trials(paid, {})
    for prices, more, message in (
        (None, {}, "prices: are required: no price of fake-1 is known"),
        (PRICES, {"modle": "x"}, "backend.modle"),
        (PRICES, {"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
    ):
        wrong = replace(
            paid, cap_usd=1.0, backend_file=backend_file(tmp_path, provider, prices, **more)
        )
        with pytest.raises(FedOneError, match=message):
            table3.trials(wrong, {})
    with pytest.raises(SpecError, match="--backend: is required"):
        table3.trials(replace(paid, backend_file=None), {})
    assert provider.received == []


def test_a_cell_whose_label_words_are_not_shown_says_so(
    settings: Settings, provider: FakeProcess, tmp_path: Path
) -> None:
    settings = replace(settings, options={"dev_rows": "100"})
    results: dict[str, Result] = {}
    trials = {trial.key: trial for trial in find_study("table3").trials(settings, {})}
    unknown = {"labels": {"0": " zyx", "1": " wvu"}}
    for key in "sst2_no-prompt_s0", "sst2_bdpl_s0":
        trial = replace(trials[key], options={**trials[key].options, "question": unknown})
        results[key] = run(trial, tmp_path)
        assert results[key]["metric"] is None
        assert "show none of the label words ' zyx', ' wvu'" in results[key]["refused"]
    spent = [results[key]["spent"]["requests"] for key in results]
    assert sum(spent) == len(provider.received) >= 2 * 33
    text = find_study("table3").report(settings, results).markdown
    assert "| No prompt | - |" in text
    assert "Cells without a number:\n\n- No prompt on sst2: http" in text
