"""A prompt in the tools that store prompts, each with its real package.

Run by scripts/test-trackers, which installs them.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.messages import PromptReport
from fedone_sdk.reports import (
    PromptArtefact,
    artefact_of,
    langfuse_prompt,
    mlflow_prompt,
    promptfoo_config,
)
from fedone_sdk.task import TaskSpec
from tests.fake_openai import FakeModel, FakeOpenAI
from tests.integration.tuned import tuned

pytestmark = pytest.mark.filterwarnings("default")

CHAT = {
    "chat": {"system": "{prompt} Answer in {{one}} word.", "user": "Review: {text}"},
    "labels": {0: " bad", 1: " good"},
}
PLAIN = {"template": "{prompt} Review: {text}\nIt was", "labels": {0: " bad", 1: " good"}}
TEXT = 'Say "so" {here}: <b>\\n'


async def artefact_with(task: dict[str, Any], text: str = TEXT) -> PromptArtefact:
    artefact = artefact_of((await tuned()).run)
    changes = {
        "task": TaskSpec.model_validate(task),
        "prompt": PromptReport(text=text, tokens=(text,), bias=(0.25, -0.25)),
        "models": ("fake-1",),
    }
    return artefact.model_copy(update=changes).signed()


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """MLflow with an empty registry."""
    module = pytest.importorskip("mlflow", reason="scripts/test-trackers installs mlflow")
    monkeypatch.chdir(tmp_path)
    for choose in (module.set_tracking_uri, module.set_registry_uri):
        choose(f"sqlite:///{tmp_path}/mlflow.db")
    yield module
    # MLflow keeps them in this process, and in its environment.
    module.set_registry_uri("")
    module.set_tracking_uri(None)
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "template"])
async def test_mlflow_registers_the_prompt(mlflow: Any, task: dict[str, Any]) -> None:
    artefact = await artefact_with(task)
    document = json.loads(json.dumps(mlflow_prompt(artefact)))
    mlflow.genai.register_prompt(**json.loads(json.dumps(document)))  # It adds to the tags.
    found = mlflow.genai.load_prompt(f"prompts:/{artefact.name}/1")
    assert found.variables == {"text"}
    shown = found.format(text="A {{text}} film.")
    if task is PLAIN:
        assert shown == f"{TEXT} Review: A {{{{text}}}} film.\nIt was"
    else:
        assert shown == [
            {"role": "system", "content": f"{TEXT} Answer in {{one}} word."},
            {"role": "user", "content": "Review: A {{text}} film."},
        ]
    assert found.commit_message == document["commit_message"]
    assert found.tags.items() >= document["tags"].items()
    assert found.tags["fedone.sha256"] == artefact.sha256
    assert json.loads(found.tags["fedone.label_bias"]) == [0.25, -0.25]


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "template"])
async def test_langfuse_takes_the_prompt(task: dict[str, Any]) -> None:
    pytest.importorskip("langfuse", reason="scripts/test-trackers installs langfuse")
    from langfuse.api.prompts import types
    from langfuse.model import ChatPromptClient, TextPromptClient

    document = json.loads(json.dumps(langfuse_prompt(await artefact_with(task))))
    facts = {"version": 1, "labels": [], "tags": document["tags"], "config": document["config"]}
    if task is PLAIN:
        taken: Any = types.CreateTextPromptRequest.model_validate(document)
        prompt: Any = types.Prompt_Text(name=taken.name, prompt=taken.prompt, **facts)
        shown: Any = TextPromptClient(prompt).compile(text="A film.")
        assert shown == f"{TEXT} Review: A film.\nIt was"
    else:
        taken = types.CreateChatPromptRequest.model_validate(document)
        prompt = types.Prompt_Chat(name=taken.name, prompt=taken.prompt, **facts)
        shown = ChatPromptClient(prompt).compile(text="A film.")
        assert [(each["role"], each["content"]) for each in shown] == [
            ("system", f"{TEXT} Answer in {{one}} word."),
            ("user", "Review: A film."),
        ]
    assert document.keys() <= {
        field.alias or name for name, field in type(taken).model_fields.items()
    } | {"commitMessage"}
    assert taken.labels == []


class OneWord(FakeModel):
    """Answers by whether the review has a certain word."""

    def write(self, text: str, num_tokens: int) -> str:
        return " Good, really" if "fine" in text else "bad"


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "template"])
async def test_promptfoo_evaluates_the_prompt(tmp_path: Path, task: dict[str, Any]) -> None:
    program = shutil.which("promptfoo")
    if program is None:
        pytest.skip("scripts/test-promptfoo installs promptfoo")
    text = "Keep {{this}} and {%that%}"
    config = promptfoo_config(await artefact_with(task, text))
    (tmp_path / "prompt.json").write_text(json.dumps(config))
    rows = [('So "fine", {{really}}', 1), ("Not mine", 0), ("fine, but no", 0)]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    async with FakeOpenAI(model=OneWord()) as server:
        process = await asyncio.create_subprocess_exec(
            *(program, "eval", "-c", "prompt.json", "-t", "rows.csv", "-o", "out.json"),
            *("--no-cache", "--no-write", "--no-table"),
            cwd=tmp_path,
            env={
                **os.environ,
                "OPENAI_API_KEY": "none",
                "OPENAI_BASE_URL": server.base_url,
                "PROMPTFOO_CONFIG_DIR": str(tmp_path / "home"),
                "PROMPTFOO_DISABLE_TELEMETRY": "1",
                "PROMPTFOO_DISABLE_UPDATE": "1",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await asyncio.wait_for(process.communicate(), 120)
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["stats"]["errors"] == 0, said.decode()
    passed = {each["vars"]["text"]: each["success"] for each in found["results"]}
    assert [passed[row[0]] for row in rows] == [True, True, False]
    shown = {each["vars"]["text"]: json.loads(each["prompt"]["raw"]) for each in found["results"]}
    for row, _ in rows:
        if task is PLAIN:
            expected = [{"role": "user", "content": f"{text} Review: {row}\nIt was"}]
        else:
            expected = [
                {"role": "system", "content": f"{text} Answer in {{one}} word."},
                {"role": "user", "content": f"Review: {row}"},
            ]
        assert shown[row] == expected
