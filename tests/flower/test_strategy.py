"""The strategy and the ClientApp with Flower's own messages, over a grid in this process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.errors import SpecError
from fedone_sdk.stores import SqlStore
from fedone_sdk.testing import ScriptedBackend
from tests.flower.federations import GRADIENT, NODES, SEARCH, federation, of_our_own

MISSING = """
import sys
sys.modules["flwr"] = None
import fedone_sdk.flower
from fedone_sdk.errors import MissingExtraError
for name in ("FedOneStrategy", "client_app"):
    try:
        getattr(fedone_sdk.flower, name)
    except MissingExtraError as exc:
        print(exc)
"""


def test_without_flower_the_extra_is_named() -> None:
    run = [sys.executable, "-W", "error", "-c", MISSING]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"fedone_sdk.flower.{name} needs an extra: pip install 'fedone-sdk[flwr]'"
        for name in ("FedOneStrategy", "client_app")
    ]


flwr = pytest.importorskip(
    "flwr.app", reason="Flower conflicts with the cli extra: scripts/test-flower has it"
)


@pytest.fixture(autouse=True)
def _task(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process of Flower, which has the id of its task."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Flower's `Grid` over nodes in this process.

    Args:
        app: The ClientApp.
        configs: Each node's config, by its id.
    """

    def __init__(self, app: Any, configs: dict[int, dict[str, Any]]) -> None:
        self._app = app
        self.contexts = {
            node_id: context_of(node_id, config) for node_id, config in configs.items()
        }
        self.online = list(configs)
        self.replies: dict[str, list[Any]] = {}
        self.sent: dict[int, int] = defaultdict(int)
        self.disturb: Callable[[Any, list[Any]], list[Any]] = lambda message, replies: replies

    def get_node_ids(self) -> Iterable[int]:
        return self.online

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        for message in messages:
            node_id = message.metadata.dst_node_id
            name = f"message-{len(self.replies)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent[node_id] += message.metadata.message_type == "train"
            replies = self.disturb(message, [self._app(message, self.contexts[node_id])])
            self.replies[name] = replies
            yield name

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        asked = list(message_ids)
        pulled = [reply for name in asked for reply in self.replies.get(name, [])]
        self.replies.update({name: [] for name in asked if name in self.replies})
        return pulled


def context_of(node_id: int, config: Any) -> Any:
    return flwr.Context(
        run_id=1, node_id=node_id, node_config=config, state=flwr.RecordDict(), run_config={}
    )


def shards(wanted: Any) -> dict[int, dict[str, Any]]:
    """Configs of nodes whose ids are in another order than their partitions."""
    return {900 - 7 * number: {"partition-id": number} for number in range(NODES)}


def app_of(wanted: Any, **options: Any) -> Any:
    from fedone_sdk.flower import client_app, node_shard

    return client_app(lambda context: node_shard(wanted, context), **options)


def strategy_of(wanted: Any, **options: Any) -> Any:
    from fedone_sdk.flower import FedOneStrategy

    return FedOneStrategy(wanted.spec, wanted.vocabulary, **options)


def failing(message: Any) -> Any:
    """SuperLink's reply for a message without an answer."""
    error = flwr.Error(code=5, reason="Node unavailable")
    reply = flwr.Message(error, reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = 1  # SuperLink itself
    return reply


@pytest.mark.parametrize("changes", [SEARCH, GRADIENT], ids=["losses", "alpha"])
def test_a_run_over_a_grid(changes: dict[str, Any], tmp_path: Path) -> None:
    wanted = federation(tmp_path, **changes)
    own = of_our_own(wanted)
    strategy = strategy_of(wanted, backend=ScriptedBackend(), dev=wanted.dev)
    with pytest.raises(RuntimeError, match="no result before start"):
        _ = strategy.run_result
    result = strategy.start(Grid(app_of(wanted), shards(wanted)))
    assert strategy.run_result.alpha_sha256 == own.alpha_sha256
    assert strategy.run_result.prompt == own.prompt
    assert strategy.run_result.metric == own.metric
    assert list(result.train_metrics_clientapp) == [r.round + 1 for r in own.history]
    assert [m["mean-loss"] for m in result.train_metrics_clientapp.values()] == [
        report.mean_loss for report in own.history
    ]
    assert {n: m["accuracy"] for n, m in result.evaluate_metrics_serverapp.items()} == {
        report.round + 1: report.metric for report in own.history if report.metric is not None
    }
    assert result.arrays["alpha"].numpy().shape[0] == 4


def test_nodes_may_keep_their_state_in_a_folder(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **GRADIENT)
    strategy = strategy_of(wanted, backend=ScriptedBackend())
    folder = tmp_path / "state"
    grid = Grid(app_of(wanted, state_dir=folder), shards(wanted))
    strategy.start(grid)
    assert strategy.run_result.alpha_sha256 == of_our_own(wanted).alpha_sha256
    assert {file.name for file in folder.iterdir()} == {f"partition-{n}" for n in range(NODES)}
    assert not any(context.state for context in grid.contexts.values())


def test_replies_that_come_twice_late_or_never(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **SEARCH, budget={"queries": 30})
    own = of_our_own(wanted)
    strategy = strategy_of(wanted, backend=ScriptedBackend())
    grid = Grid(app_of(wanted), shards(wanted))
    lost: list[int] = []

    def disturb(message: Any, replies: list[Any]) -> list[Any]:
        if message.metadata.message_type == "train" and not lost:
            lost.append(message.metadata.dst_node_id)
            return [failing(message)]
        return replies * 2

    grid.disturb = disturb
    strategy.start(grid)
    result = strategy.run_result
    assert result.spent.queries == 30 == own.spent.queries  # The gateway saw: it had asked nothing.
    assert len(result.history) == 5
    assert grid.sent[lost[0]] == 1  # It is not drawn again before it says that it can work.


def test_models_on_the_nodes_of_which_one_is_killed(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **SEARCH, budget={"queries": 30})
    strategy = strategy_of(wanted)
    grid = Grid(app_of(wanted, backend=lambda context: ScriptedBackend()), shards(wanted))
    lost: list[int] = []

    def disturb(message: Any, replies: list[Any]) -> list[Any]:
        if message.metadata.message_type == "train" and not lost:
            lost.append(message.metadata.dst_node_id)
            return [failing(message)]
        return replies

    grid.disturb = disturb
    strategy.start(grid)
    result = strategy.run_result
    assert (result.spent.queries, result.status) == (30, "budget_exhausted")
    assert len(result.history) == 4  # The lease of the one that died stays spent.


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "node 865: node config: 'partition-id' is missing; it is 0 to 5"),
        (
            {"partition-id": 6},
            "node 865: node config: 'partition-id' is 6; the run's data has 6 shards",
        ),
        ({"partition-id": "five"}, "node 865: node config: 'partition-id' is 'five', and must be"),
        ({"partition-id": 3}, "node 879: its partition-id, 3, is node 865's already"),
    ],
)
def test_a_node_that_is_configured_wrongly(
    config: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    wanted = federation(tmp_path, **SEARCH)
    strategy = strategy_of(wanted, backend=ScriptedBackend())
    nodes = {**shards(wanted), 865: config}
    with pytest.raises(SpecError, match="the run needs 6 nodes, and 5 can work") as raised:
        strategy.start(Grid(app_of(wanted), nodes), timeout=0.01)
    assert f"({complaint}" in str(raised.value)


def test_a_node_with_a_failing_app_reports_only_the_kind_of_error(tmp_path: Path) -> None:
    from fedone_sdk.flower import client_app

    wanted = federation(tmp_path, **SEARCH)

    def data(context: Any) -> Any:
        raise KeyError("private text")

    strategy = strategy_of(wanted, backend=ScriptedBackend())
    with pytest.raises(SpecError, match="KeyError in the node's app; see its log") as raised:
        strategy.start(Grid(client_app(data), shards(wanted)))
    assert "private" not in str(raised.value)


def test_without_a_loader_the_file_of_the_node_config(tmp_path: Path) -> None:
    from fedone_sdk.flower import client_app

    wanted = federation(tmp_path, **SEARCH)
    rows = {"data": str(tmp_path / "rows.jsonl")}
    grid = Grid(client_app(), {900 - number: rows for number in range(NODES)})
    strategy = strategy_of(wanted, backend=ScriptedBackend())
    strategy.start(grid)
    assert strategy.run_result.status == "completed"
    strategy = strategy_of(wanted, backend=ScriptedBackend())
    with pytest.raises(SpecError, match="'data' is missing; start the SuperNode with"):
        strategy.start(Grid(client_app(), shards(wanted)))


def test_the_nodes_that_the_run_needs_are_waited_for(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **SEARCH)
    grid = Grid(app_of(wanted), shards(wanted))
    looks = []

    def online() -> list[int]:
        looks.append(1)
        return list(grid.contexts)[: 2 * len(looks)]

    grid.get_node_ids = online  # type: ignore[method-assign]
    strategy = strategy_of(wanted, backend=ScriptedBackend())
    strategy.start(grid)
    assert strategy.run_result.alpha_sha256 == of_our_own(wanted).alpha_sha256


def test_a_node_that_leaves_has_a_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted SuperNode gets another id from SuperLink, and is the same client."""
    monkeypatch.setattr("fedone_sdk.flower._nodes._LOOK_S", 0.0)
    wanted = federation(tmp_path, **SEARCH)
    grid = Grid(app_of(wanted), shards(wanted))
    left: list[int] = []

    def disturb(message: Any, replies: list[Any]) -> list[Any]:
        if message.metadata.message_type == "train" and not left:
            for node_id in list(grid.contexts):
                left.append(node_id)
                config = grid.contexts[node_id].node_config
                grid.contexts[node_id - 1] = context_of(node_id - 1, config)
            grid.online = [node_id - 1 for node_id in left]
        return replies

    grid.disturb = disturb
    strategy = strategy_of(wanted, backend=ScriptedBackend())
    strategy.start(grid)
    assert strategy.run_result.alpha_sha256 == of_our_own(wanted).alpha_sha256
    assert sum(grid.sent[node_id] for node_id in left) == 1


class _Killed(BaseException):
    """Ends a ServerApp at once."""


def test_a_killed_serverapp_resumes(tmp_path: Path) -> None:
    wanted = federation(tmp_path, **SEARCH, budget={"queries": 30})

    def started(grid: Grid) -> Any:
        store = SqlStore.sqlite(tmp_path / "run.db")
        strategy = strategy_of(wanted, backend=ScriptedBackend(), store=store, dev=wanted.dev)
        strategy.start(grid)
        return strategy.run_result

    first = Grid(app_of(wanted), shards(wanted))

    def disturb(message: Any, replies: list[Any]) -> list[Any]:
        if sum(first.sent.values()) == 5:
            raise _Killed
        return replies

    first.disturb = disturb
    with pytest.raises(_Killed):
        started(first)
    nodes = {400 + number: {"partition-id": number} for number in range(NODES)}
    result, own = started(Grid(app_of(wanted), nodes)), of_our_own(wanted)
    assert (result.status, result.spent.queries) == ("completed", 30)
    assert result.alpha_sha256 == own.alpha_sha256
    assert result.metric == own.metric
    # It had ended: no node is waited for, no query is sent.
    again = started(Grid(app_of(wanted), {}))
    assert (again.alpha_sha256, again.spent) == (result.alpha_sha256, result.spent)


def test_hooks_require_a_started_run(tmp_path: Path) -> None:
    strategy = strategy_of(federation(tmp_path, **SEARCH), backend=ScriptedBackend())
    with pytest.raises(RuntimeError, match=r"call start\(grid\)"):
        strategy.aggregate_train(1, [])
    assert list(strategy.configure_evaluate(1, flwr.ArrayRecord(), flwr.ConfigRecord(), None)) == []
    assert strategy.aggregate_evaluate(1, []) is None


def test_the_guides_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/flower.md").read_text(encoding="utf-8")
    server, client = re.findall(r"^```py\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    wanted = federation(tmp_path, **SEARCH)
    (tmp_path / "run.yaml").write_text(wanted.spec.model_dump_json())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(server, names)
    node: dict[str, Any] = {}
    exec(client, node)
    rows = {"data": str(tmp_path / "rows.jsonl")}
    grid = Grid(node["app"], {900 - number: rows for number in range(NODES)})
    names["main"](grid, grid.contexts[900])
    assert (tmp_path / "run.db").exists()
    assert capsys.readouterr().out.strip()
