"""The examples run unchanged, except for the model's name and address."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec
from tests.console import Fedone
from tests.fake_openai import FakeModel, FakeOpenAI
from tests.weights import random_model

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M"
WORDS = (
    *(" parcel", " rain", " steps", " car", " sofa"),
    *(" stuck", " twice", " scale", " alert", " it"),
)


@pytest.fixture
def command(fedone: Fedone, monkeypatch: pytest.MonkeyPatch) -> Fedone:
    """Run a command; modules of the examples are imported by their folders."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return fedone


@pytest.fixture
def json_of(command: Fedone) -> Callable[..., Any]:
    """Run a command, which must succeed, and return the JSON that it writes."""

    def run(*arguments: object) -> Any:
        code, out, err = command(*arguments, "--json", "-")
        assert code == 0, err
        return json.loads(out)

    return run


def example(name: str, folder: Path, **changes: str) -> Path:
    """A copy of an example, with some words of its RUN.yaml exchanged."""
    shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / name / "RUN.yaml"
    text = path.read_text()
    for old, new in changes.items():
        assert f"\n  {old}: " in text
        lines = (
            f"  {old}: {new}" if line.startswith(f"  {old}: ") else line
            for line in text.splitlines()
        )
        text = "\n".join(lines)
    path.write_text(text)
    return path


@contextmanager
def serving(server: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Run a server in a thread, because the commands have their own event loops."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(server.stop())
        loop.close()


def check(json_of: Callable[..., Any], run: Path, metric: str) -> RunResult:
    """Plans, tunes, and measures the tuned prompt again."""
    plan = json_of("plan", run)
    assert plan["sufficient"]
    result = RunResult.model_validate(json_of("tune", run))
    assert result.status == "completed"
    assert plan["training_queries"] == 40
    assert 30 < result.spent.queries <= 40  # the halving at the end may ask fewer prompts
    assert result.evaluation.queries == plan["evaluation_queries"]
    assert result.spent.requests <= plan["most"]["requests"]
    assert result.metric.name == metric
    assert None not in (result.metric.no_prompt, result.metric.before, result.metric.after)
    assert [report.metric is not None for report in result.history].count(True) == 2
    scored = json_of("score", run, "--prompt", result.prompt.text)
    assert scored["metric"]["name"] == metric
    assert scored["metric"]["value"] == pytest.approx(result.metric.after)
    assert scored["failed"] == 0
    return result


def test_zero_one(json_of: Callable[..., Any], tmp_path: Path) -> None:
    with serving(FakeOpenAI(log_probs="forbidden", models={"my-chat-model": {}})) as server:
        result = check(json_of, example("zero_one", tmp_path, base_url=server.base_url), "accuracy")
    assert {report.mean_loss * 16 % 1 for report in result.history} == {0.0}  # 4 prompts, 4 rows
    for received in server.received:
        assert "logprobs" not in received.body
        assert "json_schema" in received.body["response_format"]


def test_generation_score(json_of: Callable[..., Any], tmp_path: Path) -> None:
    model = FakeModel(WORDS)
    with serving(FakeOpenAI(model=model, models={"my-model": {}})) as server:
        result = check(
            json_of, example("generation_score", tmp_path, base_url=server.base_url), "loss"
        )
    assert all(0 < report.mean_loss < 1 for report in result.history)
    for received in server.received:
        assert received.body["max_tokens"] == 24
        assert "keywords" not in json.dumps(received.body)


def test_retrieval(json_of: Callable[..., Any], tmp_path: Path) -> None:
    """The passage that answers a question is in front of it, in every request."""
    with serving(FakeOpenAI(model=FakeModel(WORDS), models={"my-model": {}})) as server:
        url = f'base_url: "{server.base_url}", api_key_env: null'
        options = f"{{documents: manual.txt, model: my-model, {url}}}"
        check(json_of, example("retrieval", tmp_path, options=options), "loss")
    asked = [str(received.body["messages"]) for received in server.received]
    assert any("thermostat mean?" in text for text in asked)
    for text in asked:
        assert "snowflake while" in text or "thermostat mean?" not in text


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random causal model."""
    why = "the extra `torch` is not installed: pip install 'fedone-sdk[torch]'"
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=why)
    folder = tmp_path_factory.mktemp("llama")
    return random_model(folder, "LlamaForCausalLM", max_position_embeddings=256)


def test_generation_nll(json_of: Callable[..., Any], tmp_path: Path, causal: Path) -> None:
    result = check(json_of, example("generation_nll", tmp_path, model=str(causal)), "loss")
    assert all(report.mean_loss > 0 for report in result.history)
    assert result.metric.after is not None
    assert result.metric.after != result.metric.no_prompt


def test_generation_score_with_a_model_in_this_process(
    json_of: Callable[..., Any], tmp_path: Path, causal: Path
) -> None:
    run = example("generation_score", tmp_path, max_tokens="4")
    head, _, _ = run.read_text().partition("\nbackend:")
    run.write_text(f"{head}\nbackend: {{kind: transformers, model: {causal}}}\n")
    check(json_of, run, "loss")


def test_the_models_that_the_examples_name(tmp_path: Path) -> None:
    """What stands behind a comment sign is a backend too."""
    for name in ("generation_nll", "generation_score"):
        text = (EXAMPLES / name / "RUN.yaml").read_text()
        head, _, backend = text.partition("\nbackend:\n")
        _, _, other = backend.partition("  # kind:")
        lines = ("  # kind:" + other).replace("  # ", "  ")
        run = tmp_path / f"{name}.yaml"
        run.write_text(f"{head}\nbackend:\n{lines}")
        assert RunSpec.load(run).backend.kind in ("vllm", "transformers")
    assert HUB_MODEL in (EXAMPLES / "generation_nll" / "RUN.yaml").read_text()


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    names = {path.parent.name for path in EXAMPLES.glob("*/RUN.yaml")}
    names |= {path.name for path in EXAMPLES.glob("*.py")}
    names |= {f"{path.parent.name}/app.py" for path in EXAMPLES.glob("*/app.py")}
    names |= {path.parent.name for path in EXAMPLES.glob("*/pyproject.toml")}
    names |= {path.parent.name for path in EXAMPLES.glob("*/package.json")}
    entries = set(re.findall(r"^\| \[([^\]]+)\]", listed, re.MULTILINE))
    assert names <= entries
    assert all((EXAMPLES / entry).exists() for entry in entries)
