"""Long work runs in threads, one step of a run at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fedone_sdk.aggregator import RoundMachine
from fedone_sdk.aggregator.concurrency import in_thread, in_thread_if_large
from fedone_sdk.algorithms.prompt_search import PromptSearch
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.benchmarks import stalls
from tests.runs import run_spec

WORDS = ("", " good", " bad", " very", " not", " so")


def spec_of(
    method: str, *, num_samples: int = 6, length: int = 3, exchange: str = "losses"
) -> RunSpec:
    return run_spec(
        task={"template": "{text}{prompt}", "labels": {0: " no", 1: " yes"}},
        prompt={"length": length, "vocabulary": {"kind": "list", "candidates": WORDS}},
        method={"name": method, "num_samples": num_samples, "batch_size": 2},
        participation={
            "min_clients": 2,
            "clients_per_round": 2 if exchange == "losses" else 1,
            "exchange": exchange,
        },
        evaluation={"every": 1},
    )


def federation_of(spec: RunSpec) -> Federation:
    rows = tuple({"text": f"text {row}", "label": row % 2} for row in range(4))
    return Federation(
        spec=spec,
        shards=(rows,) * 3,
        dev=rows,
        vocabulary=Vocabulary(candidates=WORDS),
        reused_rows=False,
    )


class Watched:
    """The threads in which each method is called, and the most steps under way at once."""

    def __init__(self) -> None:
        self.threads: dict[str, set[int]] = {}
        self.at_once = 0
        self._under_way = 0

    def noting(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.threads.setdefault(name, set()).add(threading.get_ident())
            return work(*args, **kwargs)

        return watched

    def counting(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._under_way += 1
            self.at_once = max(self.at_once, self._under_way)
            try:
                time.sleep(0.001)  # So that another step would be seen to begin.
                return work(*args, **kwargs)
            finally:
                self._under_way -= 1

        return watched


@pytest.mark.parametrize("method", ["thompson", "random", "tpe"])
async def test_searches_ask_and_tell_in_other_threads(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "tpe":
        pytest.importorskip("optuna")
    watched = Watched()
    for name in ("ask", "tell"):
        work = watched.noting(name, getattr(PromptSearch, name))
        monkeypatch.setattr(PromptSearch, name, work)
    monkeypatch.setattr(RoundMachine, "handle", watched.counting(RoundMachine.handle))
    result = await simulate(federation_of(spec_of(method)), backend=ScriptedBackend())
    assert result.rounds == 3
    assert watched.threads.keys() == {"ask", "tell"}
    for threads in watched.threads.values():
        assert threading.get_ident() not in threads
    assert watched.at_once == 1


@pytest.mark.parametrize(
    ("spec", "size", "slow"),
    [
        (spec_of("gs-bdpl", num_samples=20), 100, False),
        (spec_of("gs-bdpl", num_samples=20, length=50), 2000, True),
        (spec_of("gs-bdpl", exchange="alpha", length=50), 1000, False),
        (spec_of("gs-bdpl", exchange="alpha", length=50), 2000, True),
        (spec_of("thompson"), 6, True),
    ],
)
def test_a_step_is_slow_by_its_method_and_its_size(spec: RunSpec, size: int, slow: bool) -> None:
    machine = RoundMachine("run", spec, vocab_size=size)
    assert machine.is_slow is slow


async def test_large_work_runs_in_threads_and_small_work_does_not() -> None:
    here = threading.get_ident()
    assert await in_thread(threading.get_ident) != here
    assert await in_thread_if_large(1 << 20, threading.get_ident) != here
    assert await in_thread_if_large(10, threading.get_ident) == here
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


@pytest.mark.heavy
async def test_a_busy_server_does_not_stand_still() -> None:
    """The longest turn of its loop, in its own processor time: the machine may be busy."""
    _, own, _, rounds = await stalls.measure(15.0)
    assert max(own) < 0.05
    del rounds["small-1"]  # rolled back to round 0 again and again
    assert all(rounds.values())
