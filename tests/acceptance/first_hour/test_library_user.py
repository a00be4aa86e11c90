"""A library user: aggregator and devices in one program, a model that fails, a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.processes import Start

PROGRAM = '''\
"""Tunes a prompt on notes of this machine."""

import asyncio
import sys

from fedone_sdk import Aggregator, EdgeClient, RunSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary

JANE = "my name is Jane Roe"
DEV = [{"text": f"a public note, {n}", "label": n % 2} for n in range(20)]
ROWS = [{"text": f"{JANE}, {n}", "label": n % 2} for n in range(24)]
SPEC = RunSpec.model_validate(
    {
        "name": "notes",
        "task": {"template": "{prompt} {text} It was {mask}.", "labels": {0: " bad", 1: " good"}},
        "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": [" x", " y"]}},
        "method": {"name": "thompson", "num_samples": 4, "batch_size": 4},
        "participation": {"exchange": "losses"},
        "budget": {"queries": 16},
        "rounds": 10,
        "evaluation": {"every": 0},
    }
)


class Mine(ScriptedBackend):
    """A model, with the bug that the first argument names."""

    async def score(self, query):
        texts = [part.text for rendered in query.inputs for part in rendered]
        private = any(text.startswith(JANE) for text in texts)
        if private and sys.argv[1] == "raises":
            raise RuntimeError("a bug of my own")
        answer = await super().score(query)
        if private and sys.argv[1] == "nan":
            answer = type(answer)(**{**fields(answer), "log_probs": nans(answer.log_probs)})
        return answer


def fields(answer):
    return {name: getattr(answer, name) for name in answer.__dataclass_fields__}


def nans(rows):
    return tuple(tuple(float("nan") for _ in row) for row in rows)


async def main():
    words = Vocabulary(candidates=(" x", " y", " z"))
    async with Aggregator(backend=Mine(), enrolment_tokens=["devices-of-this-test"]) as aggregator:
        run = await aggregator.add_run(SPEC, words, dev=DEV)
        url = await aggregator.listen()
        async with EdgeClient(url, token="devices-of-this-test", data=ROWS) as client:
            for _ in range(20):
                outcome = await client.run_once()
                if outcome in ("ended", "paused") or not run.state.running:
                    break
        if not run.state.paused:
            await run.wait()
        result = run.result()
        print("status:", result.status, "reason:", result.reason)
        print("verdict:", result.verdict and result.verdict.text)


asyncio.run(main())
'''


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return "program.py"


def test_one_program(start: Start, program: str) -> None:
    run = start(program, "works", program=True)
    assert run.ended() == 0, run.err
    assert "status: budget_exhausted" in run.log or "status: completed" in run.log
    (verdict,) = (line for line in run.log.splitlines() if line.startswith("verdict: "))
    assert "over no prompt" in verdict or "no better than guessing" in verdict
    assert "for 16 queries" in verdict
    assert run.err == ""
    assert "Jane" not in run.log


@pytest.mark.parametrize(
    ("bug", "line"),
    [
        ("raises", "RuntimeError: a bug of my own"),
        ("nan", "log-probabilities must be finite numbers, not [nan, nan]"),
    ],
)
def test_a_model_with_a_bug(start: Start, program: str, bug: str, line: str) -> None:
    run = start(program, bug, program=True)
    assert run.ended() == 0, run.err
    assert line in run.log
    assert "[warning  ] run paused" in run.log
    assert "status: stopped reason: " in run.log
    assert "verdict: None" in run.log
    # A traceback shows the code; the texts that the code had at hand stay private.
    assert "Jane" not in run.log + run.err
