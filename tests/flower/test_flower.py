"""The Flower app of examples/flower, with Flower itself. Run by scripts/test-flower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

flwr = pytest.importorskip("flwr.app", reason="scripts/test-flower installs flwr")

from fedone_flower.strategy import FedOneStrategy  # noqa: E402
from fedone_flower.task import WORDS  # noqa: E402

from tests.flower.searches import QUERIES, SAMPLES, search, without_flower  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("name", ["thompson", "gs-bdpl"])
def test_in_the_simulation_engine_it_ends_where_the_search_ends(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="scripts/test-flower installs flwr[simulation]")
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples/flower")])
    environment = {**os.environ, "PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0"}
    command = [sys.executable, "-m", "tests.flower.simulated", str(tmp_path), name]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["spent"] == QUERIES // SAMPLES * SAMPLES
    assert found["alpha_sha256"] == without_flower(name)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SuperLink tells a ServerApp about its task, and messages need."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Nodes 7 and 9."""

    def get_node_ids(self) -> list[int]:
        return [9, 7]


def strategy() -> FedOneStrategy:
    return FedOneStrategy(search("random"), WORDS, max_queries=QUERIES, min_nodes=2)


def sent(tuned: FedOneStrategy, number: int) -> list[Any]:
    grid: Any = Grid()
    return list(tuned.configure_train(number, flwr.ArrayRecord(), flwr.ConfigRecord(), grid))


def reply(message: Any, losses: Iterable[float]) -> Any:
    record = flwr.MetricRecord({"losses": list(losses)})
    return flwr.Message(flwr.RecordDict({"losses": record}), reply_to=message)


def test_the_cap_holds_whatever_nodes_do() -> None:
    tuned = strategy()
    counts = [len(sent(tuned, number)) for number in range(1, 9)]
    assert counts == [1] * (QUERIES // SAMPLES) + [0] * (8 - QUERIES // SAMPLES)
    assert tuned.spent <= QUERIES


@pytest.mark.parametrize("losses", [[], [0.5], [0.5] * 5, [0.5, float("nan"), 0.5, 0.5]])
def test_a_bad_reply_changes_nothing(losses: list[float]) -> None:
    tuned = strategy()
    (message,) = sent(tuned, 1)
    assert message.metadata.dst_node_id in (7, 9)
    before = tuned.alpha_sha256
    assert tuned.aggregate_train(1, [reply(message, losses)]) == (None, None)
    assert (tuned.alpha_sha256, tuned.spent) == (before, SAMPLES)
