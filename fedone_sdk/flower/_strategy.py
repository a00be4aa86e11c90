"""FedOne as a Flower Strategy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import INFO, WARNING

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedone_sdk.backends import LLMBackend
from fedone_sdk.errors import MessageError, ProblemError, SpecError, one_line
from fedone_sdk.flower.background import Background
from fedone_sdk.flower.node_server import NodeServer, Tuning
from fedone_sdk.flower.wire import RECORD, Item, pack, unpack
from fedone_sdk.messages import RunResult
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import Store
from fedone_sdk.task import Example, ScoreFunction
from fedone_sdk.vocabulary import Vocabulary

_SHORTEST_S, _LONGEST_S = 0.02, 0.5
"""Interval of polling for replies, seconds."""

_LOOK_S = 2.0
"""Interval of polling for new nodes, seconds."""

_READY_TIMEOUT_S = 60.0
"""Longest wait for the last nodes' readiness, seconds."""

_AGAIN_S = 60.0
"""Delay before a node that could not work is asked again, seconds."""


class FedOneStrategy(Strategy):
    """FedOne's rounds over a Flower `Grid`.

    The aggregator's service makes the decisions: client selection, leases, aggregation, the end of
    the budget. The strategy carries its messages to the nodes, whose ClientApp is `client_app`, and
    the replies back.

    Example:
        ```python
        federation = Federation.load(RunSpec.load("RUN.yaml"))
        strategy = FedOneStrategy(
            federation.spec, federation.vocabulary, backend=OnnxBackend(), dev=federation.dev
        )

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            strategy.start(grid)
            print(strategy.run_result.prompt.text)
        ```

    Args:
        spec: The run.
        vocabulary: Its candidates.
        backend: The model that scores for the nodes; None if nodes have their own models. The
            caller closes it.
        dev: Held-out examples for evaluation.
        score: The user's function, for loss ``score``.
        measure: The user's function, for a custom metric.
        store: Stores run and ledger; with a durable one, a restarted ServerApp resumes the run. In
            memory by default. One store belongs to one ServerApp.

    Raises:
        SpecError: An argument that the run needs is missing.
    """

    def __init__(
        self,
        spec: RunSpec,
        vocabulary: Vocabulary,
        *,
        backend: LLMBackend | None = None,
        dev: Sequence[Example] = (),
        score: ScoreFunction | None = None,
        measure: MetricFunction | None = None,
        store: Store | None = None,
    ) -> None:
        self._tuning = Tuning(
            spec=spec,
            vocabulary=vocabulary,
            backend=backend,
            dev=dev,
            score=score,
            measure=measure,
            store=store,
        )
        self._tuning.check()
        self._result: RunResult | None = None
        self._background: Background | None = None
        self._node_server: NodeServer | None = None
        # Message id -> the node that must reply.
        self._open: dict[str, int] = {}
        # Node id -> the node's name in the run.
        self._names: dict[int, str] = {}
        # Node id -> why it cannot work, and when to ask again.
        self._unable: dict[int, tuple[str, float]] = {}
        # The nodes connected according to SuperLink, and the time of that query.
        self._online: set[int] = set()
        self._looked = 0.0

    @property
    def run_result(self) -> RunResult:
        """The result of the run, as in ``fedone tune``.

        Raises:
            RuntimeError: The run has not ended.
        """
        if self._result is None:
            raise RuntimeError("there is no result before start() has returned")
        return self._result

    def summary(self) -> None:
        """Log the run's settings."""
        spec = self._tuning.spec
        log(INFO, "\t├──> run: %s, method: %s", spec.name, spec.method.label)
        log(INFO, "\t├──> rounds: %d, seed: %d", spec.rounds, spec.seed)
        part = spec.participation
        log(INFO, "\t├──> nodes a round: %d, exchange: %s", part.clients_per_round, part.exchange)
        caps = spec.budget.model_dump(exclude_none=True) if spec.budget else {}
        log(INFO, "\t└──> caps: %s", caps or "none")

    def start(self, grid: Grid, *, timeout: float = 3600.0) -> Result:
        """Run until the run's rounds or its budget end.

        Settings that other Flower strategies take here come from the run: the number of rounds, the
        deadline of a node (``participation.deadline_s``), and the rounds of evaluation.

        Args:
            grid: Flower's.
            timeout: Longest wait for the number of nodes that the run needs, seconds.

        Returns:
            The final alpha; and per round, from 1, the mean loss, the queries and, where evaluated,
            the metric on the dev split.

        Raises:
            SpecError: The run is not possible as described, or has too few working nodes.
            LabelWordError: A label word is not one token of the model.
        """
        log(INFO, "Starting %s:", type(self).__name__)
        self.summary()
        result = Result()
        with self._serving() as (background, node_server):
            self._wait_for_nodes(grid, node_server, background, timeout)
            background.run(node_server.measure())
            self._rounds(grid, node_server, background, timeout, result)
            background.run(node_server.wait())
            self._result = node_server.run.result()
            result.arrays = self._arrays(node_server)
            for report in node_server.run.history:
                if report.metric is not None:
                    metrics = MetricRecord({self._result.metric.name: report.metric})
                    result.evaluate_metrics_serverapp[report.round + 1] = metrics
        log(INFO, "Run %s: %s", self._result.status, self._result.reason or "all done")
        return result

    # Flower's hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages for the selected nodes, with their work and the answers so far.

        Their queries are reserved in the run's ledger before they are returned.
        """
        background, node_server = self._hosted()
        idle = (self._names.keys() & self._online) - set(self._open.values())
        outgoing = background.run(node_server.outgoing(idle))
        deadline_s = self._tuning.spec.participation.deadline_s
        return [
            _message(node_id, "train", items, deadline_s) for node_id, items in outgoing.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Process replies, in any number and at any time.

        Returns:
            Alpha, and the last round's loss and queries, if a round has ended; else None.
        """
        background, node_server = self._hosted()
        rounds = len(node_server.run.history)
        for reply in replies:
            self._process(node_server, background, self._node_of(reply), reply)
        if len(node_server.run.history) <= rounds:
            return None, None
        report = node_server.run.history[-1]
        metrics = MetricRecord({"mean-loss": report.mean_loss, "queries": report.queries})
        return self._arrays(node_server), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: evaluation runs on the server's dev split, concurrently."""
        return ()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return None: no messages were sent."""
        return None

    # Lifetime

    @contextmanager
    def _serving(self) -> Iterator[tuple[Background, NodeServer]]:
        with Background() as background:
            node_server = NodeServer(self._tuning)
            background.run(node_server.__aenter__())
            self._background, self._node_server = background, node_server
            try:
                yield background, node_server
            finally:
                self._background = self._node_server = None
                self._open.clear()
                self._names.clear()
                self._unable.clear()
                background.run(node_server.__aexit__(None, None, None))

    def _hosted(self) -> tuple[Background, NodeServer]:
        if self._background is None or self._node_server is None:
            raise RuntimeError("call start(grid): it serves the run while it runs")
        return self._background, self._node_server

    # The loop

    def _rounds(
        self,
        grid: Grid,
        node_server: NodeServer,
        background: Background,
        timeout: float,
        result: Result,
    ) -> None:
        pause_s, moved = _SHORTEST_S, time.monotonic()
        while not node_server.run.ended.is_set():
            self._poll_nodes(grid, node_server, timeout)
            number = len(node_server.run.history)
            messages = self.configure_train(number + 1, result.arrays, ConfigRecord(), grid)
            sent = sum([self._send(grid, message) for message in messages])
            replies = self._receive(grid)
            arrays, metrics = self.aggregate_train(number + 1, replies)
            if arrays is not None and metrics is not None:
                result.arrays = arrays
                result.train_metrics_clientapp[len(node_server.run.history)] = metrics
                log(INFO, "[ROUND %d] %s", len(node_server.run.history), dict(metrics))
            now = time.monotonic()
            if sent or replies:
                pause_s, moved = _SHORTEST_S, now
                continue
            if not self._open and now > moved + timeout:
                raise SpecError(self._too_few(node_server))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def _send(self, grid: Grid, message: Message) -> bool:
        node_id = message.metadata.dst_node_id
        # One at a time: for a batch, SuperLink does not report which message it refused.
        for message_id in grid.push_messages([message]):
            if message_id is not None:
                self._open[message_id] = node_id
                return True
        log(WARNING, "SuperLink did not take a message for node %d", node_id)
        return False

    def _node_of(self, reply: Message) -> int:
        """Return the node of a reply; SuperLink is the sender of a missing one."""
        sender = int(reply.metadata.src_node_id)
        return self._open.pop(reply.metadata.reply_to_message_id, sender)

    def _receive(self, grid: Grid) -> list[Message]:
        return list(grid.pull_messages(list(self._open))) if self._open else []

    # Nodes

    def _wait_for_nodes(
        self, grid: Grid, node_server: NodeServer, background: Background, timeout: float
    ) -> None:
        """Admit the nodes that the first round needs, in the order of their partitions."""
        needed, until = node_server.num_needed, time.monotonic() + timeout
        logged = -1
        while node_server.num_nodes < needed and not node_server.run.ended.is_set():
            connected = len(set(grid.get_node_ids()))
            if connected >= needed:
                self._poll_nodes(grid, node_server, timeout, at_once=True)
                self._admit_first(grid, node_server, background, until)
                if node_server.num_nodes >= needed:
                    break
                if len(self._unable) >= connected:
                    raise SpecError(self._too_few(node_server))
            elif connected != logged:
                logged = connected
                log(INFO, "Waiting for nodes: %d of %d are connected", connected, needed)
            if time.monotonic() > until:
                raise SpecError(self._too_few(node_server))
            time.sleep(_LONGEST_S)
        log(INFO, "%d nodes can work", node_server.num_nodes)

    def _admit_first(
        self, grid: Grid, node_server: NodeServer, background: Background, until: float
    ) -> None:
        """Wait for the readiness of all nodes that were asked, before the first is admitted."""
        arrivals: list[tuple[int, Message]] = []
        last_reply = time.monotonic()
        while self._open:
            replies, now = self._receive(grid), time.monotonic()
            arrivals += [(self._node_of(reply), reply) for reply in replies]
            timed_out = (
                len(arrivals) >= node_server.num_needed and now > last_reply + _READY_TIMEOUT_S
            )
            if replies:
                last_reply = now
            elif timed_out or now > until:
                break  # Nodes without a reply are admitted later.
            else:
                time.sleep(_SHORTEST_S)
        self._admit(node_server, background, arrivals)

    def _poll_nodes(
        self, grid: Grid, node_server: NodeServer, timeout: float, *, at_once: bool = False
    ) -> None:
        """Ask new nodes whether they can work."""
        now = time.monotonic()
        if not at_once and now < self._looked + _LOOK_S:
            return
        self._looked = now
        asked = set(self._open.values())
        self._online = set(grid.get_node_ids())
        for node_id in self._online:
            _, again = self._unable.get(node_id, ("", 0.0))
            if not node_server.is_enrolled(node_id) and node_id not in asked and now >= again:
                self._send(grid, _message(node_id, "query", [], timeout))

    def _process(
        self, node_server: NodeServer, background: Background, node_id: int, reply: Message
    ) -> None:
        """Process one reply."""
        if not node_server.is_enrolled(node_id):
            self._admit(node_server, background, [(node_id, reply)])
            return
        try:
            call = _call(reply)
        except (MessageError, ProblemError) as exc:
            reason: str | None = str(exc)
            background.run(node_server.drop(node_id, str(exc)))
        else:
            reason = background.run(node_server.receive(node_id, call))
        if reason is not None:
            self._reject(node_id, reason)

    def _admit(
        self,
        node_server: NodeServer,
        background: Background,
        replies: Iterable[tuple[int, Message]],
    ) -> None:
        """Admit nodes, in the order of their partitions, or else of their ids."""
        coming: dict[str, tuple[int, int, Item]] = {}
        for node_id, reply in sorted(replies, key=lambda arrival: arrival[0]):
            try:
                call = _call(reply)
            except (MessageError, ProblemError) as exc:
                self._reject(node_id, str(exc))
                continue
            partition = reply.content.config_records[RECORD].get("partition-id")
            name, place = f"node-{node_id}", node_id
            if isinstance(partition, int):
                name, place = f"partition-{partition}", partition
            named = (held for held, known in self._names.items() if known == name)
            holder = next(named, coming[name][1] if name in coming else node_id)
            if holder != node_id and holder in self._online:
                reason = f"its partition-id, {partition}, is node {holder}'s already"
                self._reject(node_id, reason)
                continue
            self._names.pop(holder, None)  # The holder is gone; this node replaces it.
            coming[name] = (place, node_id, call)
        ordered = sorted((place, node, name) for name, (place, node, _) in coming.items())
        arrivals = [(node, name, coming[name][2]) for _, node, name in ordered]
        refused = background.run(node_server.admit(arrivals))
        for node_id, name, _ in arrivals:
            if node_id in refused:
                self._reject(node_id, refused[node_id])
            else:
                self._unable.pop(node_id, None)
                self._names[node_id] = name

    def _reject(self, node_id: int, reason: str) -> None:
        reason = one_line(reason)[:500]
        log(WARNING, "Node %d cannot work: %s", node_id, reason)
        self._unable[node_id] = (reason, time.monotonic() + _AGAIN_S)
        self._names.pop(node_id, None)

    def _too_few(self, node_server: NodeServer) -> str:
        unable = [f"node {node}: {reason}" for node, (reason, _) in self._unable.items()]
        more = f", and {len(unable) - 3} more" if len(unable) > 3 else ""
        needed = node_server.num_needed
        why = f" ({'; '.join(unable[:3])}{more})" if unable else ""
        return f"the run needs {needed} nodes, and {node_server.num_nodes} can work{why}"

    @staticmethod
    def _arrays(node_server: NodeServer) -> ArrayRecord:
        return ArrayRecord({"alpha": Array(node_server.run.state.method.alpha)})


def _message(node_id: int, kind: str, items: list[Item], ttl_s: float) -> Message:
    content = RecordDict({RECORD: ConfigRecord(pack(items))})
    return Message(content, dst_node_id=node_id, message_type=kind, ttl=ttl_s)


def _call(reply: Message) -> Item:
    """Return the call in a node's reply.

    Raises:
        MessageError: Flower has no reply from it, or the reply is not from `client_app`.
        ProblemError: It has another protocol version.
    """
    if reply.has_error():
        raise MessageError(f"no reply; Flower reports: {reply.error.reason}")
    calls = unpack(reply.content.config_records.get(RECORD))
    if len(calls) != 1:
        raise MessageError(f"{RECORD}: a reply holds one call, not {len(calls)}")
    return calls[0]
