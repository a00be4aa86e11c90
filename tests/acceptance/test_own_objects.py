"""User-defined backends and candidates, named in a file; never in a message."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.messages import RunResult
from tests.console import Fedone
from tests.integration.caller import ADMIN, Server
from tests.integration.test_http import server, spec_of  # noqa: F401

MODULE = """\
from fedone_sdk.testing import ScriptedBackend

CALLS = []


class Liking(ScriptedBackend):
    def __init__(self, word):
        likes, not_so = (-0.1, -2.0), (-2.0, -0.1)
        super().__init__(lambda inputs, words: likes if word in str(inputs) else not_so)


def openings(*, task, texts, endings):
    CALLS.append(len(texts))
    return ["", *(f"{len(task.labels)} labels{ending}" for ending in endings)]
"""
RUN = """\
name: own
task: {template: "{opening} {text} It was {mask}.", labels: {0: " bad", 1: " good"}}
data: {train: rows.jsonl, num_clients: 2}
prompt:
  slots:
    - name: opening
      candidates: {kind: own, object: "fedone_test_own:openings", options: {endings: [":", "."]}}
method: {name: random, num_samples: 3, batch_size: 2}
budget: {queries: 6}
rounds: 2
backend: {kind: own, object: "fedone_test_own:Liking", options: {word: labels}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    rows = "".join(f'{{"text": "row {n}", "label": {n % 2}}}\n' for n in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "fedone_test_own.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("fedone_test_own", None)


def tuned(fedone: Fedone) -> RunResult:
    code, _, err = fedone("tune", "run.yaml", "--json", "r.json")
    assert code == 0, err
    return RunResult.model_validate_json(Path("r.json").read_bytes())


def test_a_run_names_its_own_backend_and_candidates(fedone: Fedone, folder: Path) -> None:
    result = tuned(fedone)
    assert result.status == "completed"
    assert result.prompt.text in ("", "2 labels:", "2 labels.")
    assert (result.spent.queries, result.spent.requests > 0) == (6, True)
    assert sys.modules["fedone_test_own"].CALLS == [8]


def test_entry_points_are_names(
    fedone: Fedone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry_points(*, group: str) -> list[EntryPoint]:
        names = {"fedone.backends": "Liking", "fedone.candidates": "openings"}
        return [EntryPoint("mine", f"fedone_test_own:{names[group]}", group)]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    monkeypatch.syspath_prepend(folder)
    named = re.sub(r"fedone_test_own:\w+", "mine", RUN)
    Path("run.yaml").write_text(named)
    assert tuned(fedone).status == "completed"
    Path("run.yaml").write_text(RUN.replace("fedone_test_own:Liking", "no"))
    err = fedone("tune", "run.yaml", "--fresh").err
    assert err == "run.yaml: backend.object: 'no' must be package.module:object or one of mine\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"backend": {"kind": "own", "object": "fedone_test_own:Liking"}},
         "backend: the run uses the server"),
        ({"method": {"name": "own", "object": "fedone_test_own:Liking"}},
         "method.name: must not be own in a posted run"),
        ({"prompt": {"slots": [{"name": "opening", "candidates": {
            "kind": "own", "object": "fedone_test_own:openings"}}]},
          "task": {"template": "{opening} {text} {mask}", "labels": {0: " no", 1: " yes"}}},
         "kind: must be list, instructions or labels"),
    ],
)  # fmt: skip
async def test_a_posted_run_imports_nothing(
    server: Server,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.syspath_prepend(folder)
    status, problem, _ = await server.call(
        "POST", "/v1/runs", {**spec_of("posted").model_dump(mode="json"), **change}, token=ADMIN
    )
    assert (status, problem["code"]) == (422, "invalid_run")
    assert said in problem["detail"]
    assert "fedone_test_own" not in sys.modules


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("fedone_test_own:Nothing", "backend.object: cannot import 'fedone_test_own:Nothing'"),
        ("builtins:dict", "backend.object: builtins:dict returned a dict, which is not an"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    fedone: Fedone, folder: Path, written: str, said: str
) -> None:
    Path("run.yaml").write_text(RUN.replace("fedone_test_own:Liking", written))
    code, _, err = fedone("tune", "run.yaml")
    assert (code, len(err.splitlines())) == (2, 1)
    assert said in err
