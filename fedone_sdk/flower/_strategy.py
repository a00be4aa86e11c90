"""FedOne as a Flower Strategy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import INFO

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedone_sdk.backends import LLMBackend
from fedone_sdk.flower._nodes import LONGEST_S, SHORTEST_S, Background, Nodes, message_of
from fedone_sdk.flower.node_server import NodeServer, Tuning
from fedone_sdk.messages import RunResult
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import Store
from fedone_sdk.task import Example, ScoreFunction
from fedone_sdk.vocabulary import Vocabulary


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
        self._result: RunResult | None = None
        self._nodes: Nodes | None = None

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
        with self._serving(grid, timeout) as nodes:
            nodes.wait()
            nodes.run(nodes.server.measure())
            self._rounds(grid, nodes, timeout, result)
            nodes.run(nodes.server.wait())
            self._result = nodes.server.run.result()
            result.arrays = _arrays(nodes.server)
            for report in nodes.server.run.history:
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
        nodes = self._served()
        outgoing = nodes.run(nodes.server.outgoing(nodes.idle))
        deadline_s = self._tuning.spec.participation.deadline_s
        return [
            message_of(node_id, "train", items, deadline_s) for node_id, items in outgoing.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Process replies, in any number and at any time.

        Returns:
            Alpha, and the last round's loss and queries, if a round has ended; else None.
        """
        nodes = self._served()
        rounds = len(nodes.server.run.history)
        for reply in replies:
            nodes.process(reply)
        if len(nodes.server.run.history) <= rounds:
            return None, None
        report = nodes.server.run.history[-1]
        metrics = MetricRecord({"mean-loss": report.mean_loss, "queries": report.queries})
        return _arrays(nodes.server), metrics

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
    def _serving(self, grid: Grid, timeout: float) -> Iterator[Nodes]:
        with Background() as background:
            server = NodeServer(self._tuning)
            background.run(server.__aenter__())
            self._nodes = Nodes(grid, server, background, timeout)
            try:
                yield self._nodes
            finally:
                self._nodes = None
                background.run(server.__aexit__(None, None, None))

    def _served(self) -> Nodes:
        if self._nodes is None:
            raise RuntimeError("call start(grid): it serves the run while it runs")
        return self._nodes

    def _rounds(self, grid: Grid, nodes: Nodes, timeout: float, result: Result) -> None:
        run = nodes.server.run
        pause_s, moved = SHORTEST_S, time.monotonic()
        while not run.ended.is_set():
            nodes.poll()
            number = len(run.history)
            messages = self.configure_train(number + 1, result.arrays, ConfigRecord(), grid)
            sent = sum([nodes.send(message) for message in messages])
            replies = nodes.receive()
            arrays, metrics = self.aggregate_train(number + 1, replies)
            if arrays is not None and metrics is not None:
                result.arrays = arrays
                result.train_metrics_clientapp[len(run.history)] = metrics
                log(INFO, "[ROUND %d] %s", len(run.history), dict(metrics))
            now = time.monotonic()
            if sent or replies:
                pause_s, moved = SHORTEST_S, now
                continue
            if not nodes.waiting and now > moved + timeout:
                raise nodes.too_few()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)


def _arrays(server: NodeServer) -> ArrayRecord:
    return ArrayRecord({"alpha": Array(server.run.state.method.alpha)})
