"""docs/tutorials/paid-api.md, and the bill next to the practice provider's count."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec
from tests.fake_openai import Received, read_log
from tests.processes import free_port
from tests.tutorials.tutorial import Tutorial


def result(file: Path) -> RunResult:
    return RunResult.model_validate_json(file.read_bytes())


def usd(rows: list[Received]) -> Decimal:
    """What the provider bills, at the page's prices."""
    prompt = sum(row.prompt_tokens for row in rows)
    completion = sum(row.completion_tokens for row in rows)
    return (Decimal("0.15") * prompt + Decimal("0.60") * completion) / 1_000_000


def test_paid_api(tmp_path: Path) -> None:
    port = free_port()
    page = Tutorial("paid-api", tmp_path, changes={"8124": str(port), "s 0.5": "s 0.05"})
    log = page.root / "provider.jsonl"
    page.skip("python3 -m venv")
    (page.root / "paid").mkdir()
    with page.start() as provider:
        provider.reaches(f"http://127.0.0.1:{port}/v1")
        page.shown(provider)
        page.run()
        page.run()
        assert read_log(log) == []  # planning is free

        with page.start() as tuning:
            tuning.reaches("round 1/10")
            assert tuning.ctrl_c() == 130
            page.shown(tuning)
        assert result(page.folder / "result.json").status == "stopped"
        page.run()

        page.run()
        rows = read_log(log)
        run = result(page.folder / "result.json")
        assert (run.status, run.rounds) == ("completed", 10)
        # To the request, the token and the dollar.
        assert run.spent.requests == len(rows)
        assert run.spent.prompt_tokens == sum(row.prompt_tokens for row in rows)
        assert run.spent.completion_tokens == sum(row.completion_tokens for row in rows)
        assert run.spent.usd == usd(rows) < run.cap.usd

        page.run()
        again = result(page.folder / "again.json")
        paid = read_log(log)
        # The Ctrl-C made no other run of it, so everything is known.
        assert (again.prompt, again.alpha_sha256) == (run.prompt, run.alpha_sha256)
        assert again.spent.requests == len(paid) - len(rows) == 0
        assert again.cache.hits > 0

        page.run()
        assert len(read_log(log)) == len(paid) + 1
        assert provider.ctrl_c() == 0
    page.run()
    real = RunSpec.load(page.folder / "run.yaml")
    assert real.backend.model_dump(exclude_defaults=True).keys() == {
        *("kind", "model", "reasoning_effort", "api_key_env", "max_input_tokens", "cache")
    }
    page.skip("export OPENAI_API_KEY=sk-...")
    assert page.rest == []
    artefact = json.loads((page.folder / "prompt.json").read_text())
    assert artefact["prompt"]["text"] == run.prompt.text
