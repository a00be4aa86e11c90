"""`fedone compare`: paired trials on the embedded model, kept, resumed and capped."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.backends import ModelClient, predict
from fedone_sdk.backends.build import build_backend
from fedone_sdk.data import load_examples
from fedone_sdk.evaluation.engine import Workspace
from fedone_sdk.local.comparison import contests, entrants_of
from fedone_sdk.spec import BackendSpec, RunSpec, load_yaml
from tests.acceptance.tiny import write_sentences
from tests.console import Fedone, Outcome

ROOT = Path(__file__).parents[2]

RUN = """\
name: tiny
task: {template: "{prompt} {text} It was {mask}.", labels: {0: " terrible", 1: " great"}}
data: {train: train.jsonl, dev: dev.jsonl, num_clients: 4, shots: 3}
prompt:
  length: 2
  vocabulary: {kind: list, candidates: ["", " good", " bad", " really", " so"]}
method: {name: thompson, num_samples: 4, batch_size: 4}
participation: {exchange: losses}
budget: {queries: 16}
rounds: 4
evaluation: {every: 2, examples: 8}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_sentences(tmp_path, dev=24)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def compare(fedone: Fedone, folder: Path) -> Fedone:
    def run(*arguments: object) -> Outcome:
        return fedone("compare", "run.yaml", "--json", "c.json", *arguments)

    return run


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("c.json").read_text())
    return found


def kept(name: str = "tiny") -> dict[tuple[str, int], dict[str, Any]]:
    """The trials, as their files have them."""
    files = Path(".fedone", f"{name}.compare", "trials").glob("*.json")
    results = [json.loads(file.read_text())["result"] for file in files]
    return {(one["entrant"], one["seed"]): one for one in results}


def test_the_report_has_the_model_s_answers(compare: Fedone) -> None:
    Path("dev.jsonl").write_text("".join(Path("train.jsonl").read_text().splitlines(True)[:24]))
    code, out, err = compare("--seeds", 2, "--html", "c.html")
    assert code == 0
    assert err.count("dev rows are also training rows") == 1
    assert "10 of 10 trials to run" in err
    assert "at most 108 training queries, and 156 on the dev split" in err
    found = document()
    assert found["seeds"] == [0, 1]
    assert found["missing"] == []
    assert found["conclusion"] in out
    assert found["conclusion"] in Path("c.html").read_text()
    names = ["thompson", "random", "gs-bdpl", "no-prompt", "no-prompt-bias"]
    assert [one["name"] for one in found["methods"]] == names
    trials, by_name = kept(), {one["name"]: one for one in found["methods"]}
    assert trials.keys() == {(name, seed) for name in names for seed in (0, 1)}
    asyncio.run(_check(trials.values()))
    # Differences are those of the pairs.
    for name in names[1:]:
        for measure, key in ("metric", "difference"), ("loss", "loss_difference"):
            pairs = [
                trials[name, seed][measure] - trials["thompson", seed][measure] for seed in (0, 1)
            ]
            output = by_name[name][key]
            assert output["value"] == pytest.approx(sum(pairs) / 2)
            assert output["low"] <= output["value"] <= output["high"]
            assert output["pairs"] == 2
    assert by_name["thompson"]["difference"] is None
    # Queries are logical ones; an example call is one of a query's four.
    for name in names[:3]:
        assert by_name[name]["queries"] == 16
        assert by_name[name]["example_calls"] == 64
        curve = by_name[name]["trials"][0]["curve"]
        assert [point["queries"] for point in curve] == [0, 8, 16, 16]
        assert by_name[name]["evaluation_queries"] == 3 * 6 + 2 * 2
    assert by_name["no-prompt"]["queries"] == 0
    assert by_name["no-prompt-bias"]["queries"] == 6  # the 24 rows of all clients
    # What no prompt says was asked by the first trial.
    assert by_name["no-prompt"]["spent"]["requests"] == 0
    first, second = (trial["metric"] for trial in by_name["no-prompt"]["trials"])
    assert (first, by_name["no-prompt"]["kind"]) == (second, "baseline")


async def _check(trials: Iterable[dict[str, Any]]) -> None:
    """Asks about each deployed prompt again."""
    spec, dev = RunSpec.load("run.yaml"), list(load_examples("dev.jsonl"))
    async with build_backend(BackendSpec()) as backend:
        for trial in trials:
            task = spec.task if trial["bias"] is None else spec.task.with_bias(trial["bias"])
            again = await predict(backend, task, trial["prompt"], dev, 4)
            assert again.metric == pytest.approx(trial["metric"])
            assert again.mean_loss == pytest.approx(trial["loss"], abs=1e-6)
            assert math.fsum(trial["losses"]) / 24 == pytest.approx(trial["loss"])
            assert trial["curve"][-1]["metric"] == trial["metric"]


def test_trials_of_a_seed_see_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in the same mini-batches for every method."""
    texts = [str(row["text"]) for row in load_examples("train.jsonl")]
    batches: list[list[tuple[int, ...]]] = []
    score = ModelClient.score

    async def asked(self: Any, query: Any) -> Any:
        rows = [str(one) for one in query.inputs]
        found = tuple(next((i for i, t in enumerate(texts) if t in row), -1) for row in rows)
        if -1 not in found and found not in batches[-1]:
            batches[-1].append(found)
        return await score(self, query)

    monkeypatch.setattr(ModelClient, "score", asked)
    names = ("thompson", "random", "gs-bdpl", "bdpl")
    entrants = entrants_of(load_yaml("run.yaml"), RunSpec.load("run.yaml"), names)
    for contest in contests(entrants, (0, 1), folder, cache=folder / "answers.sqlite"):
        batches.append([])
        trial = contest.trial("m")
        trial.run(trial.options, Workspace(inputs={}, folder=folder, context=contest))
    of_seeds = batches[:4], batches[4:]
    for of_seed in of_seeds:
        assert len(of_seed[0]) == 4  # one mini-batch per round
        assert all(other == of_seed[0] for other in of_seed)
    assert of_seeds[0][0] != of_seeds[1][0]


def test_the_same_command_continues(compare: Fedone) -> None:
    assert compare("--seeds", 1).code == 0
    first = kept()
    code, _, err = compare("--seeds", 1)
    assert code == 0
    assert "trials to run" not in err
    assert kept() == first
    assert compare("--seeds", 2).code == 0
    assert kept().items() >= first.items()
    # Another method needs only its own trials.
    _, _, err = compare("--seeds", 2, "--methods", "thompson, bdpl")
    assert "2 of 4 trials to run, 2 are finished" in err
    # Another description has none yet.
    Path("run.yaml").write_text(RUN.replace("length: 2", "length: 1"))
    _, _, err = compare("--seeds", 1, "--methods", "random")
    assert "1 of 1 trials to run" in err
    Path("run.yaml").write_text(RUN)
    _, _, err = compare("--seeds", 1, "--only-report")
    assert "trials to run" not in err
    assert document()["missing"] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_ends_costs_no_trial(
    compare: Fedone, folder: Path, number: signal.Signals
) -> None:
    """Finished trials stay as they are."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fedone_sdk.cli", "compare", "run.yaml", "--seeds", "2"]
    trials = folder / ".fedone" / "tiny.compare" / "trials"
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        give_up = time.monotonic() + 120
        while len([*trials.glob("*.json")]) < 2:
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert b"the same command continues" in err
    before = kept()
    assert 2 <= len(before) < 10
    assert compare("--seeds", 2).code == 0
    after = kept()
    assert len(after) == 10
    assert after.items() >= before.items()


def test_requests_of_all_trials_are_capped(compare: Fedone, folder: Path) -> None:
    from fedone_sdk.budget import SqliteLedger

    def spent() -> int:
        account = SqliteLedger(folder / ".fedone" / "tiny.compare" / "ledger.sqlite").account(None)
        return account.held.requests

    first = compare("--seeds", 2, "--requests", 20)
    assert first.code == 2
    assert "--requests, --usd: budget of 20 requests exhausted" in first.err
    assert spent() == 20
    # More may be spent, and what was paid for is not paid for again.
    code, _, err = compare("--seeds", 2, "--requests", 60)
    assert code == 0
    assert "budget of 60 requests exhausted" in err
    assert spent() == 60
    before = kept()
    assert compare("--seeds", 2, "--requests", 60).code == 0
    assert spent() == 60
    assert kept() == before
    assert compare("--seeds", 2, "--requests", 1000).code == 0
    assert document()["missing"] == []
    assert spent() < 1000


def test_one_process_at_a_time(compare: Fedone, folder: Path) -> None:
    from filelock import FileLock

    place = folder / ".fedone" / "tiny.compare"
    place.mkdir(parents=True)
    with FileLock(place / "lock"):
        outcome = compare("--seeds", 1)
    assert outcome.code == 2
    assert outcome.err.endswith("tiny.compare: another process is running this comparison\n")


def test_a_proposer_is_refused(compare: Fedone) -> None:
    slot = "proposer: {backend: {kind: openai, model: m}}\n  slots:\n  - {name: a"
    text = RUN.replace("length: 2\n  vocabulary: {kind: list", slot).replace("{prompt}", "{a}")
    Path("run.yaml").write_text(text)
    assert "proposer: fedone compare does not" in compare("--methods", "thompson").err


@pytest.mark.parametrize(
    ("old", "new", "arguments", "message"),
    [
        ("", "", "--methods magic", "arguments: --methods: 'magic' is not known; allowed: gs-b"),
        ("", "", "--html c.pdf", "arguments: --html: c.pdf must end in .html"),
        ("", "", "--only-report", "arguments: there is nothing to report in .fedone/tiny.compare"),
        (", dev: dev.jsonl", "", "--seeds 1", "run.yaml: data.dev: is required, with rows"),
        ("{queries: 16}", "{queries: 16, requests: 8}", "--seeds 1",
         "thompson, seed 0: the caps on requests, tokens or money were used up"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    compare: Fedone, old: str, new: str, arguments: str, message: str
) -> None:
    Path("run.yaml").write_text(RUN.replace(old, new) if old else RUN)
    code, out, err = compare(*arguments.split())
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(message)
    assert old or err.count("\n") == 1
