"""The engine: what is run, what is not run again, what a failure costs."""

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

from fedone_paper import Experiment, Settings, run_experiment
from fedone_paper.engine import Finished, Progress
from fedone_sdk import __version__
from fedone_sdk.errors import MissingExtraError, SpecError
from tests.unit.paper.trials import (
    Doubling,
    die,
    double,
    fail_at_first,
    not_a_number,
    number,
    refuse,
)

ENGINES = [None, pytest.param("local", marks=pytest.mark.slow)]  # Ray starts a cluster.


def run(experiment: Experiment, out: Path, **options: Any) -> Finished:
    return run_experiment(experiment, Settings(), out=out, **{"workers": 2, **options})


def results(out: Path) -> dict[str, Any]:
    files = (out / "doubling" / "trials").glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in files}


def test_what_is_written(tmp_path: Path) -> None:
    finished = run(Doubling(number(1), number(2)), tmp_path, command="reproduce.py doubling")
    folder = tmp_path / "doubling"
    assert set(finished.files) == {
        folder / f"doubling.{kind}" for kind in ("md", "json", "svg", "png")
    }
    assert all(file.stat().st_size for file in finished.files)
    assert finished.document == json.loads((folder / "doubling.json").read_text())
    assert finished.document is not None
    assert finished.document["data"] == {"total": 6}
    trials: Any = finished.document["trials"]
    assert {key: trial["seed"] for key, trial in trials.items()} == {"n1": 1, "n2": 2}
    text = (folder / "doubling.md").read_text()
    assert text.startswith("# Numbers twice\n\nIn all: 6.\n")
    assert "- Command: `reproduce.py doubling`\n" in text
    assert f"- SDK: {__version__}\n" in text
    assert "- Seeds: 1, 2\n" in text
    record = results(tmp_path)["n2"]
    assert record["options"] == {"number": 2, "seed": 2}
    assert record["result"]["twice"] == 4
    assert record["wall_s"] >= 0


def test_the_same_figure_is_the_same_bytes(tmp_path: Path) -> None:
    first, second = (run(Doubling(number(3)), tmp_path / name) for name in "ab")
    for one, other in zip(first.files, second.files, strict=True):
        if one.suffix in (".svg", ".png"):
            assert one.read_bytes() == other.read_bytes()


def test_what_is_known_is_not_run_again(tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text("one")
    trials = (number(1), number(2, inputs={"text": text}))
    run(Doubling(*trials), tmp_path)
    before = results(tmp_path)
    seen: list[Progress] = []
    again = run(Doubling(*trials), tmp_path, watch=seen.append)
    assert again.kept == 2
    assert results(tmp_path) == before
    assert [(progress.done, progress.total, progress.kept) for progress in seen] == [(2, 2, 2)]

    # The content counts, not the place or the time.
    moved = tmp_path / "moved.txt"
    text.rename(moved)
    assert run(Doubling(trials[0], number(2, inputs={"text": moved})), tmp_path).kept == 2
    moved.write_text("two")
    assert run(Doubling(trials[0], number(2, inputs={"text": moved})), tmp_path).kept == 1
    assert results(tmp_path)["n2"]["result"]["texts"] == {"text": "two"}

    changed = number(1, options={"number": 1, "seed": 5})
    assert run(Doubling(changed), tmp_path).kept == 0
    assert results(tmp_path)["n1"]["options"]["seed"] == 5
    other = number(1, options=changed.options, run=fail_at_first)
    assert run(Doubling(other), tmp_path).failures == {"n1": "ZeroDivisionError: once"}


def test_other_options_do_not_cost_what_was_found_before(tmp_path: Path) -> None:
    run(Doubling(number(1)), tmp_path)
    quick = number(1, options={"number": 3, "seed": 1})
    assert run(Doubling(quick), tmp_path).kept == 0
    for trial, total in ((number(1), 2), (quick, 6)) * 2:
        again = run(Doubling(trial), tmp_path)
        assert again.kept == 1
        assert again.report is not None
        assert again.report.data == {"total": total}
    assert run(Doubling(number(1, options={"number": 4, "seed": 1})), tmp_path).kept == 0
    assert run(Doubling(quick), tmp_path).kept == 1


def test_a_damaged_result_is_made_anew(tmp_path: Path) -> None:
    run(Doubling(number(1)), tmp_path)
    file = tmp_path / "doubling" / "trials" / "n1.json"
    whole = json.loads(file.read_text())
    for damaged in ("", "{}", file.read_text()[:-9]):
        file.write_text(damaged)
        assert run(Doubling(number(1)), tmp_path).kept == 0
        assert json.loads(file.read_text())["options"] == whole["options"]


def test_experiments_share_what_is_paid_and_may_share_results(tmp_path: Path) -> None:
    class Other(Doubling):
        name = "other"

    run(Doubling(number(1)), tmp_path)
    # Of its own: run again, but where the first one has been.
    assert run(Other(number(1)), tmp_path).kept == 0
    file = tmp_path / "other" / "trials" / "n1.json"
    assert json.loads(file.read_text())["result"]["runs"] == 2
    file.unlink()
    assert run(Other(number(1, home="doubling")), tmp_path).kept == 1
    assert not file.exists()


@pytest.mark.parametrize("ray", ENGINES)
def test_a_failure_costs_nobody_else(tmp_path: Path, ray: Any) -> None:
    if ray is not None:
        pytest.importorskip("ray", reason="the extra ray is not installed")
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
    finished = run(Doubling(*trials), tmp_path, ray=ray, watch=seen.append)
    assert set(results(tmp_path)) == {"n1", "n6", "n7"}
    died = finished.failures.pop("n3")
    assert "by signal 9" in died if ray is None else "WorkerCrashedError" in died
    nan = finished.failures.pop("n5")
    assert nan.startswith("its result is not what JSON holds: ")
    assert finished.failures == {"n2": "no such thing", "n4": "ZeroDivisionError: once"}
    assert (seen[-1].done, seen[-1].failed) == (3, 4)
    details = tmp_path / "doubling" / "trials" / "n4.failed.txt"
    assert details.read_text().startswith("Traceback")
    assert "Failed: `n2`: no such thing" in (tmp_path / "doubling" / "doubling.md").read_text()

    again = run(Doubling(trials[0], trials[3]), tmp_path)
    assert (again.kept, again.failures) == (1, {})
    assert not details.exists()


HANGING = """
import sys
from pathlib import Path
sys.path.insert(0, "examples/paper")
from fedone_paper import Settings, run_experiment
from tests.unit.paper.trials import Doubling, hang, number

trial = number(1, run=hang, options={"fifo": sys.argv[1]})
run_experiment(Doubling(trial), Settings(), out=Path(sys.argv[2]), workers=1)
"""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    # Their trials may be paid ones, and nobody is left to take the results.
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
def test_sigterm_is_for_the_caller_to_handle(tmp_path: Path, ray: Any) -> None:
    # Ray puts a handler in place that aborts the process.
    if ray is not None:
        pytest.importorskip("ray", reason="the extra ray is not installed")
    handled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    try:
        run(
            Doubling(number(1)),
            tmp_path,
            ray=ray,
            watch=lambda progress: signal.raise_signal(signal.SIGTERM) if progress.done else None,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled == [signal.SIGTERM]


def test_nothing_but_failures_gives_no_report(tmp_path: Path) -> None:
    finished = run(Doubling(number(1, run=refuse)), tmp_path)
    assert (finished.report, finished.document, finished.files) == (None, None, ())
    assert finished.failures == {"n1": "no such thing"}


def test_workers_are_used_again_and_side_by_side(tmp_path: Path) -> None:
    run(Doubling(*map(number, range(6))), tmp_path, workers=2)
    pids = {record["result"]["pid"] for record in results(tmp_path).values()}
    assert 1 <= len(pids) <= 2


def test_later_trials_hang_on_earlier_results(tmp_path: Path) -> None:
    def then(found: Any) -> list[Any]:
        return [number(found["n3"]["twice"])]

    finished = run(Doubling(number(3), then=then), tmp_path)
    assert finished.document is not None
    assert finished.document["data"] == {"total": 6 + 12}
    assert run(Doubling(number(3), then=then), tmp_path).kept == 2


def test_keys(tmp_path: Path) -> None:
    for key in ("", "../up", "a/b", ".hidden", "x" * 200):
        with pytest.raises(ValueError, match="is no key of a trial"):
            number(1, key=key)
    with pytest.raises(ValueError, match="share a key"):
        run(Doubling(number(1), number(1, options={"number": 4})), tmp_path)


def test_a_missing_input(tmp_path: Path) -> None:
    trial = number(1, inputs={"text": tmp_path / "absent.txt"})
    with pytest.raises(SpecError, match=r"absent\.txt: cannot be read: No such file"):
        run(Doubling(trial), tmp_path)


def test_missing_extras_are_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "ray", None)
        with pytest.raises(MissingExtraError, match=r"fedone-sdk\[ray\]"):
            run(Doubling(number(1)), tmp_path, ray="local")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"fedone-sdk\[reproduce\]"):
        run(Doubling(number(1)), tmp_path)
    assert not (tmp_path / "doubling").exists()


def test_a_trial_function_is_named_in_its_record(tmp_path: Path) -> None:
    run(Doubling(number(1)), tmp_path)
    assert results(tmp_path)["n1"]["function"] == f"{double.__module__}:double"
