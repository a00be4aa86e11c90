"""Trackers follow a run, and cannot harm it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from fedone_sdk.aggregator.rounds.run_state import FinishedRound
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.errors import MissingExtraError, SpecError
from fedone_sdk.messages import RoundReport, RunResult
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.trackers import TrackedRun, Tracking, find_tracker, tracker
from fedone_sdk.trackers.tracker import params_of
from tests.integration.tuned import SPEC, small, tuned


class Noted:
    """A tracker that keeps what it receives."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.rounds: list[tuple[RoundReport, int]] = []
        self.metrics: list[tuple[str, float, int]] = []
        self.result: RunResult | None = None
        self.ended = 0
        self.threads = {threading.current_thread().name}

    def round(self, report: RoundReport, queries: int) -> None:
        self.rounds.append((report, queries))
        self.threads.add(threading.current_thread().name)

    def metric(self, name: str, value: float, queries: int) -> None:
        self.metrics.append((name, value, queries))

    def end(self, result: RunResult | None) -> None:
        self.result = result
        self.ended += 1


class Fails(Noted):
    """Raises at the second round."""

    def round(self, report: RoundReport, queries: int) -> None:
        if report.round == 1:
            raise OSError("no route to https://me:secret@tracker.example/x")
        super().round(report, queries)


def noting(made: list[Noted], kind: type[Noted] = Noted) -> Callable[[TrackedRun], Noted]:
    def factory(run: TrackedRun) -> Noted:
        made.append(kind(run))
        return made[-1]

    return factory


async def test_a_tracker_receives_all_events_of_a_run() -> None:
    made: list[Noted] = []
    with Tracking({"noted": noting(made)}) as tracking:
        done = await tuned(watch=tracking)
        tracking.end(done.result)
    (noted,) = made
    history = done.result.history
    assert [report.round for report, _ in noted.rounds] == list(range(8))
    assert [queries for _, queries in noted.rounds] == [4, 8, 12, 16, 20, 24, 28, 32]
    # Measured at rounds 4 and 8, and told at the queries of these rounds, however late.
    assert noted.metrics == [
        ("accuracy", history[3].metric, 16),
        ("accuracy", history[7].metric, 32),
    ]
    assert (noted.result, noted.ended) == (done.result, 1)
    assert (noted.run.run_id, noted.run.name) == ("small", "small")
    assert noted.run.params["method.num_samples"] == 4
    assert noted.threads == {"tracker noted"}


async def test_a_failing_tracker_is_logged_once_and_the_run_continues() -> None:
    made: list[Noted] = []

    def broken(run: TrackedRun) -> Noted:
        raise RuntimeError("cannot begin")

    trackers = {"fails": noting(made, Fails), "broken": broken, "noted": noting(made)}
    with capture_logs() as logs, Tracking(trackers) as tracking:
        done = await tuned(watch=tracking)
        tracking.end(done.result)
    assert done.result.alpha_sha256 == (await small()).result.alpha_sha256
    warned = {
        line["tracker"]: line["reason"] for line in logs if "a tracker failed" in line["event"]
    }
    assert warned == {
        "fails": "OSError: no route to https://***@tracker.example/x",
        "broken": "RuntimeError: cannot begin",
    }
    whole = next(noted for noted in made if not isinstance(noted, Fails))
    assert (len(whole.rounds), whole.ended) == (8, 1)


async def test_a_hanging_tracker_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "_PATIENCE_S", 0.01)
    hold, entered = threading.Event(), threading.Event()

    class Hangs(Noted):
        def end(self, result: RunResult | None) -> None:
            entered.set()
            hold.wait()

    made: list[Noted] = []
    with capture_logs() as logs:
        with Tracking({"hangs": noting(made, Hangs)}) as tracking:
            done = await tuned(watch=tracking)
            tracking.end(done.result)
        assert [line["tracker"] for line in logs if "has not finished" in line["event"]] == [
            "hangs"
        ]
    assert done.result.status == "completed"
    assert entered.wait(10)
    hold.set()


async def test_a_run_that_breaks_off_has_no_result() -> None:
    made: list[Noted] = []
    done = await small()
    with Tracking({"noted": noting(made)}) as tracking:
        tracking.begin(TrackedRun(run_id="r", name="r"), metric="accuracy")
        tracking.add(done.result.history[0])
    assert (len(made[0].rounds), made[0].result, made[0].ended) == (1, None, 1)
    with Tracking({"noted": noting(made)}):
        pass  # It never began: no tracker hears of it.
    assert len(made) == 1


async def test_earlier_rounds_are_reported_too() -> None:
    """A run that continues in another process is reported from its beginning."""
    store = MemoryStore()
    first: list[Noted] = []
    with Tracking({"noted": noting(first)}) as tracking:
        tracking.end((await tuned(watch=tracking, store=store)).result)
    second: list[Noted] = []
    with Tracking({"noted": noting(second)}) as tracking:
        tracking.end((await tuned(watch=tracking, store=store)).result)
    assert [queries for _, queries in second[0].rounds] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert second[0].metrics == first[0].metrics


async def test_rounds_after_a_rollback_come_again() -> None:
    made: list[Noted] = []
    done = await small()
    history = list(done.result.history)

    class Run:
        run_id, spec = "small", RunSpec.model_validate(SPEC)
        history: list[RoundReport]

    run = Run()
    with Tracking({"noted": noting(made)}) as tracking:

        def tell(change: Change, until: int) -> None:
            run.history = history[:until]
            tracking(run, change)  # type: ignore[arg-type]

        ended = FinishedRound(report=history[0], record={}, clients=(0,))
        finished = Change(finished=ended)
        tell(finished, 8)
        tell(Change(back_to=2), 2)
        tell(finished, 3)
    rounds = [report.round for report, _ in made[0].rounds]
    assert rounds == [0, 1, 2, 3, 4, 5, 6, 7, 2]
    # What was spent stays spent.
    assert made[0].rounds[-1][1] == 36


def test_parameters_are_flat_and_short() -> None:
    spec = RunSpec.model_validate(
        {**SPEC, "task": {**SPEC["task"], "template": "{prompt} {text}" + "x" * 900}}
    )
    params = params_of(spec)
    assert params["prompt.vocabulary.candidates"] == '[" good", " bad", " really", " so"]'
    assert len(str(params["task.template"])) == 500
    assert params["seed"] == 0
    assert "name" not in params
    assert "data" not in params


def test_a_tracker_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="'nothing' is not one of mlflow, tensorboard, wandb"):
        find_tracker("nothing")
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    for name in ("mlflow", "tensorboard", "wandb"):
        with pytest.raises(MissingExtraError, match=f"pip install '{name}"):
            find_tracker(name)


def test_a_round_that_comes_again_with_its_metric_is_counted_once() -> None:
    made: list[Noted] = []
    first = RoundReport(round=0, client_id="a", queries=4, mean_loss=0.5)
    second = RoundReport(round=1, client_id="a", queries=4, mean_loss=0.4)
    with Tracking({"noted": noting(made)}) as tracking:
        tracking.begin(TrackedRun(run_id="run", name="run"), metric="accuracy")
        for report in (first, second, first.model_copy(update={"metric": 0.75})):
            tracking.add(report)
    (noted,) = made
    assert noted.rounds == [(first, 4), (second, 8)]
    assert noted.metrics == [("accuracy", 0.75, 4)]
