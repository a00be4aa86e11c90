from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.backends import OnnxBackend, predict
from fedone_sdk.data import load_examples
from fedone_sdk.experiments.experiment import Result, Trial, Workspace
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.task import TaskSpec
from tests.benchmarks.queries.attacks import ATTACKS
from tests.benchmarks.queries.bench import BenchQueries
from tests.benchmarks.queries.contest import Scale, contest_trial
from tests.benchmarks.queries.contestants import CONTESTANTS
from tests.benchmarks.queries.results import BARE
from tests.benchmarks.queries.variants import VARIANTS

SMALL = Scale(
    marks=(6, 10, 24),
    num_clients=3,
    shots=4,
    vocab_size=12,
    bias_rows=20,
    method=(("num_samples", 4), ("batch_size", 4)),
    prompt_len=2,
)
VARIANT = VARIANTS["sst2-bad-film-iid"]


def trial(glue: Path, name: str, scale: Scale = SMALL, **options: Any) -> Trial:
    variant = VARIANTS[options.pop("variant", VARIANT.name)]
    settings = Settings(data=glue)
    return contest_trial("one", settings, scale, variant, CONTESTANTS[name], 0, **options)


def done(trial: Trial, folder: Path) -> Result:
    return trial.run(trial.options, Workspace(inputs=trial.inputs, folder=folder))


def test_marks_are_whole_rounds_and_the_account_is_the_runs(glue: Path, tmp_path: Path) -> None:
    found = done(trial(glue, "bdpl-paper"), tmp_path)
    assert [point["mark"] for point in found["curve"]] == [0, 6, 10, 24]
    assert [point["queries"] for point in found["curve"]] == [0, 4, 8, 24]
    assert [point["round"] for point in found["curve"]] == [0, 1, 2, 6]
    last, spent = found["curve"][-1], found["spent"]
    assert (last["queries"], last["requests"]) == (spent["queries"], spent["requests"])
    assert last["tokens"] == spent["prompt_tokens"]
    assert last["requests"] <= last["example_requests"] <= 4 * last["requests"]
    assert found["refit"]["queries"] == 24 + 1
    assert all(point["bias"] is None for point in found["curve"])
    # Nothing is left for another attempt, which would be billed less.
    assert not tmp_path.joinpath("answers.sqlite").exists()


def test_more_marks_change_nothing_else(glue: Path, tmp_path: Path) -> None:
    few = done(trial(glue, "thompson", replace(SMALL, marks=(24,))), tmp_path)
    many = done(trial(glue, "thompson"), tmp_path)
    assert few["curve"] == [many["curve"][0], many["curve"][-1]]


async def test_measures_the_deployable_prompt_with_its_bias(glue: Path, tmp_path: Path) -> None:
    import asyncio

    found = await asyncio.to_thread(done, trial(glue, "thompson"), tmp_path)
    last = found["curve"][-1]
    assert last["bias"] is not None
    assert found["refit"] is None
    task = TaskSpec.model_validate(VARIANT.task_document()).with_bias(last["bias"])
    dev = list(load_examples(glue / "sst2" / "dev.jsonl"))
    async with OnnxBackend(threads=1) as backend:
        prediction = await predict(backend, task, last["prompt"], dev, 32)
    assert last["loss"] == pytest.approx(prediction.mean_loss)
    assert last["metric"] == last["accuracy"] == prediction.metric


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("method", ["random", "random-best"])
def test_attacks_change_the_result(glue: Path, tmp_path: Path, method: str, attack: str) -> None:
    longer = replace(SMALL, marks=(6, 48))
    honest = done(trial(glue, method, longer), tmp_path / "honest")
    lied = trial(glue, method, longer, variant=f"{VARIANT.name}-{attack}")
    liars = {**lied.options, "liars": 1.0}
    found = done(replace(lied, options=liars), tmp_path / "lied")
    assert found["curve"][0] == honest["curve"][0]
    # None of them is refused.
    assert found["curve"][-1]["queries"] == honest["curve"][-1]["queries"]
    # What it hands out in the end may be the same, but not all that it asked on the way.
    assert (found["curve"], found["spent"]) != (honest["curve"], honest["spent"])


def test_no_prompt_and_oracle(glue: Path, tmp_path: Path) -> None:
    settings = Settings(
        data=glue,
        quick=True,
        seeds=1,
        options={"variants": VARIANT.name, "methods": "no-prompt,oracle"},
    )
    bare, oracle = (
        done(trial, tmp_path / trial.key) for trial in BenchQueries().trials(settings, {})
    )
    assert bare["queries"] == 1
    low, high = bare["interval"]
    assert low <= bare["calibrated"]["accuracy"] <= high
    assert 0.5 <= bare["majority"] < 1.0
    assert bare["balanced"] == bare["calibrated"]  # as many of each class
    assert len({bare[kind]["loss"] for kind in BARE}) == len(BARE) - 1
    # No prompt is where the search begins.
    assert oracle["train_loss"] <= oracle["no_prompt_train_loss"]
    assert oracle["generations"] == 1
    assert len(oracle["bias"]) == 2
