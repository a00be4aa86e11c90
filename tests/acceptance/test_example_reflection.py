"""examples/reflection, with problems of a hidden rule and a server that knows it."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fake_openai import FakeModel, FakeOpenAI

pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))

PROGRAM = Path(__file__).parents[2] / "examples" / "reflection" / "aime.py"
TOPICS = ("bells", "tiles", "coins")


class Solver(FakeModel):
    """Right about a topic with its rule in the instruction; it states a rule when it reflects."""

    def write(self, text: str, num_tokens: int) -> str:
        if text.startswith("You improve one part of a prompt."):
            current = re.findall(r'The current text at .*?: (?:"(.*)"|none)\n', text)[0]
            wrong = re.findall(r"problem: Of (\w+).*\n.*a worked solution: count both ends", text)
            missing = [topic for topic in wrong if f"{topic} both" not in current]
            rules = [f"Count for {topic} both ends." for topic in missing[:1]]
            return json.dumps([" ".join([current, *rules])])
        instruction, _, problem = text.partition("Of ")
        topic, count = re.findall(r"^(\w+).* (\d+) steps", problem)[0]
        right = int(count) + 1 if f"{topic} both" in instruction else int(count)
        return f"So the count is\n### {right}"


@pytest.fixture
def aime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, with problems of the same columns in the place of the published ones."""
    found = importlib.util.spec_from_file_location("aime", PROGRAM)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    files = {}
    for name, numbers, more in (
        ("2022-2024.parquet", range(90), {"solution": "count both ends, as at a fence"}),
        ("2025.parquet", range(100, 130), {}),
    ):
        rows = [
            {"problem": f"Of {TOPICS[n % 3]} at {n + 7} steps of 1.", "answer": n + 8, **more}
            for n in numbers
        ]
        file = tmp_path / f"source-{name}"
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        files[name] = file.as_uri(), hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(module, "FILES", files)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-practice")
    monkeypatch.chdir(tmp_path)
    return module


async def test_a_reader_with_a_key_gets_the_table(
    aime: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeOpenAI(models={"solver": {}}, key="sk-practice", model=Solver()) as server:
        given = ["--model", "solver", "--base-url", server.base_url, "--rollouts", "300"]
        prices = ["--prices", "0.4", "1.6"]

        async def run(*more: str) -> Any:
            return await asyncio.to_thread(aime.main, [*given, *more])

        with pytest.raises(SystemExit, match=r"--usd 0\.01: is too small: 300 rollouts.*nothing"):
            await run("--usd", "0.01", *prices)
        with pytest.raises(SystemExit, match="--prices: is required"):
            await run("--usd", "5")
        assert not server.received
        await run("--usd", "5", *prices)
        out, requests = capsys.readouterr().out, len(server.received)
        await run("--usd", "5", *prices)  # The run is kept.
        assert len(server.received) == requests
        billed = sum(
            0.4 * one.prompt_tokens + 1.6 * one.completion_tokens for one in server.received
        )
    assert re.search(r"^published, GPT-4.1 Mini: GEPA +59\.33$", out, re.MULTILINE)
    shares = dict(re.findall(r"^solver: (\w+) +([\d.]+)", out, re.MULTILINE))
    assert float(shares["untrained"]) == 0.0
    assert float(shares["tuned"]) > 60.0
    assert f"${billed / 1e6:.2f} of $5" in out


def test_a_file_of_other_content_is_refused(aime: ModuleType) -> None:
    (url, _), *_ = aime.FILES.values()
    aime.FILES["2025.parquet"] = url, "0" * 64
    with pytest.raises(SystemExit, match=r"2025\.parquet: its SHA-256 is .*; delete it"):
        aime.main(["--usd", "5"])
