"""table2: messages and queries of each method, counted in runs with a scripted model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fedone_paper.methods import Method, method_of
from fedone_paper.settings import Settings
from fedone_paper.soft_trials import count_soft
from fedone_paper.study import Point, Report, Results, Study
from fedone_paper.tables import Column, about, printed, table
from fedone_sdk.evaluation.engine import Result, Trial, Workspace
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.testing import ScriptedBackend

if TYPE_CHECKING:
    from fedone_sdk.client import Transport
    from fedone_sdk.messages import Claim, Receipt

_MB = 2**20
_FLOAT32 = 4


class Table2(Study):
    """Counts of messages of real runs with a scripted model.

    The counts depend only on shapes, so the paper's model is not needed.
    """

    def seeds(self, settings: Settings, point: Point) -> Sequence[int]:
        """Return one seed; no seed if the method does not support the exchange."""
        soft = method_of(self.name, point["row"]).soft
        return (0,) if point["exchange"] == "alpha" or not soft else ()

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the count of a method's messages."""
        row, run = method_of(self.name, point["row"]), self.run(settings)
        shapes = ("hidden_size", "num_layers") if row.soft else ("vocab_size",)
        options = {
            "method": dict(row.method),
            **{name: run[name] for name in ("prompt_len", "rounds", *shapes)},
            "clients_per_round": point["clients_per_round"],
        }
        if row.soft:
            return Trial(key=key, run=count_soft, options=options)
        options |= {"num_clients": 100, "exchange": point["exchange"]}
        return Trial(key=key, run=count_messages, options=options)

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the counts, next to the paper's counts if the number of rounds is equal."""
        shapes, lines = self.run(settings), []
        for row in (method_of(self.name, name) for name in self.grid(settings)["row"]):
            alpha, losses = (
                self.runs(settings, results, row=row.name, exchange=exchange)
                for exchange in ("alpha", "losses")
            )
            lines += [
                _line(row, clients, runs[0], losses.get(clients, {}).get(0))
                for clients, runs in alpha.items()
            ]
        columns: dict[str, Column] = {
            "Method": partial(_cell, "title", "{}"),
            "K*": partial(_cell, "clients", "{}"),
            "Numbers of alpha": partial(_cell, "elements", "{:,}"),
            "FL server MB": partial(_cell, "megabytes", "{}"),
            "FL server queries": partial(_cell, "visits", "{:,}"),
            "LLM queries": partial(_cell, "queries", "{:,}"),
            "On the wire MB, alpha": partial(_cell, "wire_alpha", "{:.2f}"),
            "losses": partial(_cell, "wire_losses", "{:.2f}"),
        }
        compared = not settings.quick
        if compared:
            columns |= {
                "Paper: MB": partial(_cell, "paper_megabytes", "{:.2f}"),
                "FL queries": partial(_cell, "paper_visits", "{:,}"),
                "Paper: LLM queries": partial(_cell, "paper_queries", "{:,}"),
            }
        n, layers, width = (shapes[name] for name in ("prompt_len", "num_layers", "hidden_size"))
        parts = [
            table(None, dict(enumerate(lines)), columns),
            self.text("legend", **shapes) + "\n",
            *([f"{about(self.name)}\n"] if compared else []),
            self.text(
                "p-tuning",
                true=2 * layers * n * width,
                # An input prompt, and n rows of the weights and biases of queries, keys and values
                # in each layer.
                printed=n * width + layers * 3 * n * (width + 1),
            ),
        ]
        return Report(markdown="\n".join(parts))


def _line(row: Method, clients: int, alpha: Result, losses: Result | None) -> dict[str, Any]:
    """Return a row of the table, with the paper's numbers for this K*, if there are any."""
    elements = alpha["elements_up"] // alpha["visits"]
    sent = Decimal((alpha["elements_down"] + alpha["elements_up"]) * _FLOAT32) / _MB
    paper, name = printed("table2"), row.name if row.paper is None else row.paper
    numbers = paper["rows"].get(name, {}).get(clients, ())
    return {
        "title": row.title,
        "clients": clients,
        "elements": elements,
        # Half rounded up: 15.625 is 15.63.
        "megabytes": sent.quantize(Decimal("0.01"), ROUND_HALF_UP),
        "visits": alpha["visits"],
        "queries": alpha["queries"] or None,
        "wire_alpha": None if row.soft else _wire(alpha),
        "wire_losses": None if losses is None else _wire(losses),
        **{f"paper_{n}": v for n, v in zip(paper["columns"], numbers, strict=False)},
    }


def _wire(result: Result) -> float:
    traffic = result["communication"]
    return float(traffic["upload_bytes"] + traffic["download_bytes"]) / _MB


def _cell(name: str, form: str, _: int, line: Mapping[str, Any]) -> str:
    value = line.get(name)
    return "-" if value is None else form.format(value)


class _Counted:
    """A transport to the aggregator that counts updates (``visits``) and numbers of alpha.

    ``elements_down`` counts the numbers in assignments, ``elements_up`` the numbers in updates.
    """

    def __init__(self, line: Transport, tally: Counter[str]) -> None:
        self._line, self._tally = line, tally
        self._assigned: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    async def claim(self, credential: str, message: Claim) -> Any:
        work: Any = await self._line.claim(credential, message)
        if getattr(work, "exchange", None) == "alpha":
            self._assigned[work.assignment_id] = len(work.alpha.values())
        return work

    async def update(self, credential: str, assignment_id: str, message: Any) -> Receipt:
        receipt = await self._line.update(credential, assignment_id, message)
        self._tally["visits"] += 1
        self._tally["elements_down"] += self._assigned.pop(assignment_id, 0)
        up = len(message.alpha.values()) if message.exchange == "alpha" else 0
        self._tally["elements_up"] += up
        return receipt


def count_messages(options: dict[str, Any], workspace: Workspace) -> Result:
    """Run a method's rounds with a scripted model, and count messages and queries.

    Clients, aggregator, budget and messages are the same as in any other run.

    Args:
        options: ``method`` as in a run, ``prompt_len``, ``vocab_size``, ``num_clients``,
            ``clients_per_round``, ``rounds`` and ``exchange``.
        workspace: Not used.

    Returns:
        ``visits`` (accepted updates), ``elements_down`` and ``elements_up`` (numbers of alpha in
        all assignments and updates), ``queries`` (charged to the run), and ``communication`` as in
        the run's result.
    """
    words = [f" w{number}" for number in range(options["vocab_size"])]
    document = {
        "name": "count",
        "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
        "prompt": {
            "length": options["prompt_len"],
            "vocabulary": {"kind": "list", "candidates": words},
        },
        "method": {"batch_size": 1, **options["method"]},
        "participation": {
            "clients_per_round": options["clients_per_round"],
            "exchange": options["exchange"],
            "min_clients": options["num_clients"],
        },
        "rounds": options["rounds"],
        "evaluation": {"every": 0},
    }
    spec = validate_spec(RunSpec, document, source="trial")
    clients = range(options["num_clients"])
    federation = Federation(
        spec=spec,
        shards=tuple(({"text": f"text {number}", "label": number % 2},) for number in clients),
        dev=(),
        vocabulary=spec.prompt.build(spec.task),
        reused_rows=False,
    )
    tally = Counter(visits=0, elements_down=0, elements_up=0)
    running = simulate(
        federation,
        backend=ScriptedBackend(),
        between=lambda number, line: cast("Transport", _Counted(line, tally)),
    )
    result = asyncio.run(running)
    return {
        "status": result.status,
        "rounds": result.rounds,
        **tally,
        "queries": result.spent.queries,
        "communication": result.communication.model_dump(mode="json"),
        "wall_s": result.wall_s,
    }
