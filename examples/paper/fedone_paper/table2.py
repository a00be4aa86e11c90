"""table2: what each method sends and asks, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from fedone_paper.accounting import count_messages
from fedone_paper.methods import Method, method_of
from fedone_paper.paper import about, printed
from fedone_paper.settings import Settings
from fedone_paper.soft_trials import count_soft
from fedone_paper.study import Point, Report, Results, Study
from fedone_paper.summary import Column, table
from fedone_sdk.evaluation.engine import Result, Trial

_MB = 2**20
_FLOAT32 = 4
_Line = Mapping[str, Any]


class Table2(Study):
    """Counts of messages of real runs with a scripted model.

    The counts depend on shapes only, so they need no weights of the paper's model.
    """

    def seeds(self, settings: Settings, point: Point) -> Sequence[int]:
        """One seed, where the method has the exchange."""
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
        """Return the counts next to the paper's."""
        run = self.run(settings)
        shapes = {name: run[name] for name in self.options}
        lines = []
        for row in (method_of(self.name, name) for name in self.grid(settings)["row"]):
            found = {
                exchange: self.runs(settings, results, row=row.name, exchange=exchange)
                for exchange in ("alpha", "losses")
            }
            for clients in found["alpha"]:
                counts = {each: runs[clients][0] for each, runs in found.items() if clients in runs}
                lines.append(_line(row, clients, counts))
        compared = shapes == self.said["base"]
        parts = [
            _counts_table(lines, compared),
            self.text("legend", **shapes) + "\n",
            *([f"{about(self.name)}\n"] if compared else []),
            self.text("p-tuning", true=_true(shapes), printed=_papers_p_tuning(shapes)) + "\n",
        ]
        return Report(
            markdown="\n".join(parts),
        )


def _line(row: Method, clients: int, counts: Mapping[str, Result]) -> _Line:
    """Return a row of the table, of the counts by exchange."""
    alpha = counts["alpha"]
    elements = alpha["elements_up"] // alpha["visits"]
    return {
        "name": row.name,
        "title": row.title,
        "clients_per_round": clients,
        "elements": elements,
        "megabytes": (alpha["elements_down"] + alpha["elements_up"]) * _FLOAT32 / _MB,
        "visits": alpha["visits"],
        "queries": alpha["queries"],
        "trainable_megabytes": elements * _FLOAT32 / _MB,
        "wire_megabytes": {} if row.soft else {each: _wire(one) for each, one in counts.items()},
        "paper": _paper(row, clients),
    }


def _paper(row: Method, clients: int) -> dict[str, Any] | None:
    """Return the paper's numbers at one K*, by its columns, and the sizes on a client."""
    printed_table, name = printed("table2"), row.name if row.paper is None else row.paper
    numbers = printed_table["rows"].get(name, {}).get(clients)
    if numbers is None:
        return None
    sizes = {f"{size}_megabytes": printed_table[size][name] for size in ("trainable", "loaded")}
    return {**dict(zip(printed_table["columns"], numbers, strict=True)), **sizes}


def _papers_p_tuning(shapes: Mapping[str, int]) -> int:
    """Return the numbers that the paper counts for P-tuning v2.

    An input prompt, and in each layer n rows of the weights and biases of queries, keys and values.
    """
    n, H = shapes["prompt_len"], shapes["hidden_size"]
    return n * H + shapes["num_layers"] * 3 * n * (H + 1)


def _wire(result: Result) -> float:
    traffic = result["communication"]
    sent: float = (traffic["upload_bytes"] + traffic["download_bytes"]) / _MB
    return sent


def _counts_table(lines: Sequence[_Line], compared: bool) -> str:
    columns: dict[str, Column] = {
        "Method": lambda _, line: line["title"],
        "K*": lambda _, line: str(line["clients_per_round"]),
        "Numbers of alpha": lambda _, line: f"{line['elements']:,}",
        "Trainable MB per client": lambda _, line: f"{line['trainable_megabytes']:.3f}",
        "FL server MB": lambda _, line: _rounded(line["megabytes"]),
        "FL server queries": lambda _, line: f"{line['visits']:,}",
        "LLM queries": lambda _, line: _count(line["queries"]),
        "On the wire MB, alpha": lambda _, line: _megabytes(line["wire_megabytes"], "alpha"),
        "losses": lambda _, line: _megabytes(line["wire_megabytes"], "losses"),
    }
    if compared:
        columns |= {
            "Paper: trainable MB": _papers(lambda paper: f"{paper['trainable_megabytes']:g}"),
            "MB": _papers(lambda paper: _rounded(paper["megabytes"])),
            "FL queries": _papers(lambda paper: f"{paper['visits']:,}"),
            "Paper: LLM queries": _papers(lambda paper: _count(paper["queries"])),
        }
    return table(None, dict(enumerate(lines)), columns)


def _megabytes(wire: Mapping[str, float], exchange: str) -> str:
    return f"{wire[exchange]:.2f}" if exchange in wire else "-"


def _papers(cell: Any) -> Column:
    return lambda _, line: "-" if line["paper"] is None else cell(line["paper"])


def _rounded(megabytes: float) -> str:
    """Two digits, half rounded up: 15.625 is 15.63."""
    return str(Decimal(megabytes).quantize(Decimal("0.01"), ROUND_HALF_UP))


def _count(number: int | None) -> str:
    return f"{number:,}" if number else "-"


def _true(shapes: Mapping[str, int]) -> int:
    """Return the numbers of P-tuning v2's key and value prefixes."""
    return 2 * shapes["num_layers"] * shapes["prompt_len"] * shapes["hidden_size"]
