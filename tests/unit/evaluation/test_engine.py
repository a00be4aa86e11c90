"""Entrants, and the engine of trials: what is run, what is not run again, what a failure costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedone_sdk import __version__
from fedone_sdk.errors import MissingExtraError, SpecError
from fedone_sdk.evaluation.engine import Progress, Records, Session, Trial
from fedone_sdk.evaluation.results import Entrant
from fedone_sdk.local import Federation
from fedone_sdk.local.comparison import METHODS, Contest, default_names, entrants_of
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.vocabulary import Vocabulary
from tests.unit.evaluation.trials import die, double, fail_at_first, not_a_number, number, refuse

ENGINES = [None, pytest.param("local", marks=pytest.mark.slow)]  # Ray starts a cluster.


def run(out: Path, *trials: Trial, name: str = "doubling", **options: Any) -> Session:
    session = Session(Records(out, name), **{"workers": 2, **options})
    session.run(session.find(trials))
    return session


def files(out: Path) -> dict[str, Any]:
    found = (out / "doubling" / "trials").glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in found}


def test_what_is_written(tmp_path: Path) -> None:
    session = run(tmp_path, number(1), number(2, context="some"))
    assert session.results["n2"]["context"] == "some"
    record = files(tmp_path)["n2"]
    assert record["options"] == {"number": 2, "seed": 2}
    assert record["function"] == f"{double.__module__}:double"
    assert (record["result"]["twice"], record["version"]) == (4, __version__)
    assert record["wall_s"] >= 0
    # Both run in one of two processes.
    assert 1 <= len({record["result"]["pid"] for record in files(tmp_path).values()}) <= 2


def test_each_gpu_has_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    session = run(tmp_path, number(1), number(2), workers=None)
    assert {result["gpu"] for result in session.results.values()} == {"4", "7"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_other_options_do_not_cost_what_was_found_before(tmp_path: Path) -> None:
    run(tmp_path, number(1))
    quick = number(1, options={"number": 3, "seed": 1})
    assert run(tmp_path, quick).kept == 0
    for trial, twice in ((number(1), 2), (quick, 6)) * 2:
        again = run(tmp_path, trial)
        assert (again.kept, again.results["n1"]["twice"]) == (1, twice)


def test_a_damaged_result_is_made_anew(tmp_path: Path) -> None:
    run(tmp_path, number(1))
    file = tmp_path / "doubling" / "trials" / "n1.json"
    whole = json.loads(file.read_text())
    for damaged in ("", "{}", "[" * 100_000, file.read_text()[:-9]):
        file.write_text(damaged)
        assert run(tmp_path, number(1)).kept == 0
        assert json.loads(file.read_text())["options"] == whole["options"]


def test_records_share_what_is_paid_and_may_share_results(tmp_path: Path) -> None:
    run(tmp_path, number(1))
    # Of its own: run again, but where the first one has been.
    assert run(tmp_path, number(1), name="other").kept == 0
    file = tmp_path / "other" / "trials" / "n1.json"
    assert json.loads(file.read_text())["result"]["runs"] == 2
    file.unlink()
    assert run(tmp_path, number(1, home="doubling"), name="other").kept == 1
    assert not file.exists()


@pytest.mark.parametrize("ray", ENGINES)
def test_a_failure_costs_nobody_else(tmp_path: Path, ray: str | None) -> None:
    trials = [
        number(1),
        number(2, run=refuse),
        number(3, run=die),
        number(4, run=fail_at_first),
        number(5, run=not_a_number),
        number(6),
        number(7),
    ]
    seen: list[Progress] = []
    session = run(tmp_path, *trials, ray=ray, watch=seen.append)
    assert set(files(tmp_path)) == {"n1", "n6", "n7"}
    died = session.failures.pop("n3")
    assert "by signal 9" in died if ray is None else "WorkerCrashedError" in died
    assert session.failures.pop("n5").startswith("its result is not a JSON value: ")
    assert session.failures == {"n2": "no such thing", "n4": "ZeroDivisionError: once"}
    assert (seen[-1].done, seen[-1].failed) == (3, 4)
    assert "number 6" in {progress.note for progress in seen}
    details = tmp_path / "doubling" / "trials" / "n4.failed.txt"
    assert details.read_text().startswith("Traceback")

    again = run(tmp_path, trials[0], trials[3])
    assert (again.kept, again.failures) == (1, {})
    assert not details.exists()


def test_the_first_failure_may_end_it(tmp_path: Path) -> None:
    session = Session(Records(tmp_path, "doubling"), workers=1)
    trials = [number(1), number(2, run=refuse), number(3)]
    session.run(session.find(trials), stop_at_failure=True)
    assert (set(session.records), set(session.failures)) == ({"n1"}, {"n2"})


HANGING = """
import sys
from pathlib import Path
from fedone_sdk.evaluation.engine import Records, Session
from tests.unit.evaluation.trials import hang, number

session = Session(Records(Path(sys.argv[2]), "hanging"), workers=1)
session.run(session.find([number(1, run=hang, options={"fifo": sys.argv[1]})]))
"""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    # Their trials may be paid, and no process takes the results any more.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, "-c", HANGING, str(fifo), str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3]) as parent:
        worker = psutil.Process(int(fifo.read_text()))
        parent.kill()
    _, left = psutil.wait_procs([worker], timeout=30)
    for process in left:
        status = process.status()
        process.kill()
        assert status == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("ray", ENGINES)
def test_sigterm_is_for_the_caller_to_handle(tmp_path: Path, ray: str | None) -> None:
    # Ray puts a handler in place that aborts the process.
    handled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    try:
        run(
            tmp_path,
            number(1),
            ray=ray,
            watch=lambda progress: signal.raise_signal(signal.SIGTERM) if progress.done else None,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled == [signal.SIGTERM]


def test_keys(tmp_path: Path) -> None:
    for key in ("", "../up", "a/b", ".hidden", "x" * 200):
        with pytest.raises(ValueError, match="is not a key of a trial"):
            number(1, key=key)
    with pytest.raises(ValueError, match="share a key"):
        run(tmp_path, number(1), number(1, options={"number": 4}))


def test_a_missing_input(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.txt: cannot be read: No such file"):
        run(tmp_path, number(1, inputs={"text": tmp_path / "absent.txt"}))


def test_a_missing_ray_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*ray"):
        run(tmp_path, number(1), ray="local")


RUN: dict[str, Any] = {
    "name": "tiny",
    "task": {"template": "{prompt} {text} {mask}", "labels": {0: " bad", 1: " good"}},
    "data": {"train": "train.jsonl", "dev": "dev.jsonl", "num_clients": 4},
    "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": [" a", " b"]}},
    "method": {"name": "thompson", "num_samples": 6, "batch_size": 8, "halving": 0.1},
    "participation": {"exchange": "losses"},
    "budget": {"queries": 30},
    "rounds": 10,
}


def entrants(document: dict[str, Any], *names: str) -> list[Entrant]:
    base = validate_spec(RunSpec, document, source="run.yaml")
    return entrants_of(document, base, names)


def test_settings_that_a_method_has_are_taken_over() -> None:
    own, random, gs_bdpl = entrants(RUN, "thompson", "random", "gs-bdpl")
    assert own.notes == random.notes == ()
    settings = random.spec.method.model_dump()
    assert (settings["num_samples"], settings["halving"]) == (6, 0.1)
    settings = gs_bdpl.spec.method.model_dump()
    assert (settings["num_samples"], settings["batch_size"], settings["tau"]) == (6, 8, 0.1)
    # A bias is found by methods with a pool alone.
    assert own.spec.calibration.kind == "labels"
    assert gs_bdpl.spec.calibration.kind == "none"
    assert gs_bdpl.notes == ('calibration.kind "labels" -> "none"',)
    assert {one.spec.budget for one in (own, random, gs_bdpl)} == {own.spec.budget}


def test_settings_of_another_method_are_dropped() -> None:
    document = {
        **RUN,
        "method": {"name": "gs-bdpl", "num_samples": 4, "learning_rate": 0.1, "tau": 0.5},
        "evaluation": {"every": 3},
    }
    bdpl, random = entrants(document, "bdpl", "random")
    assert bdpl.notes == ()
    assert bdpl.spec.method.model_dump()["learning_rate"] == 0.1
    assert random.spec.method.num_samples == 4
    assert random.spec.evaluation.every == 3


@pytest.mark.parametrize(
    ("budget", "most", "biased"),
    [({"queries": 30}, 30, 10), ({"queries": 100}, 60, 10), ({"queries": 7}, 7, 7)],
)
def test_queries_of_a_trial(budget: dict[str, int], most: int, biased: int) -> None:
    def queries(entrant: Entrant) -> int:
        shards = (({},) * 200,)
        federation = Federation(
            spec=entrant.spec,
            shards=shards,
            dev=(),
            vocabulary=Vocabulary(candidates=(" a", " b")),
            reused_rows=False,
        )
        contest = Contest(entrant=entrant, federation=federation, folder=Path(), cache=Path())
        return contest.training_queries

    found = entrants({**RUN, "budget": budget}, "random", "no-prompt", "no-prompt-bias")
    assert [queries(entrant) for entrant in found] == [most, 0, biased]


def test_default() -> None:
    base = validate_spec(RunSpec, RUN, source="run.yaml")
    assert default_names(base) == ("thompson", "random", "gs-bdpl", "no-prompt", "no-prompt-bias")
    hinge = {**RUN, "task": {**RUN["task"], "loss": "hinge"}}
    base = validate_spec(RunSpec, hinge, source="run.yaml")
    assert default_names(base) == ("thompson", "random", "gs-bdpl", "no-prompt")
    # What is proposed can be run.
    entrants(hinge, *default_names(base))
    assert {"gs-bdpl", "bdpl", "random", "thompson"} <= set(METHODS)


@pytest.mark.parametrize(
    ("names", "change", "message"),
    [
        (["magic"], {}, "--methods: 'magic' is not known; allowed: gs-bdpl, "),
        (["random", "random"], {}, "--methods: each name may occur only once"),
        ([], {}, "--methods: needs at least one name"),
        (["no-prompt-bias"], {"task": {**RUN["task"], "bias": [0, 1]}},
         "--methods: no-prompt-bias needs a task without a bias"),
        (["random"], {"method": {"name": "gs-bdpl"},
                      "participation": {"clients_per_round": 2, "exchange": "alpha"}},
         "--methods: random cannot run RUN.yaml (participation.exchange: "),
    ],
)  # fmt: skip
def test_mistakes(names: list[str], change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        entrants({**RUN, **change}, *names)
    assert str(error.value).startswith(f"arguments: {message}")
    assert "\n" not in str(error.value)
