"""table2: what each method sends and asks, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from fedone_paper.accounting import count_messages
from fedone_paper.experiment import Report, Results
from fedone_paper.federated import run_timed
from fedone_paper.methods import METHODS, Method, missing
from fedone_paper.paper import about, printed
from fedone_paper.settings import Settings
from fedone_paper.soft_trials import count_soft, run_soft_timed
from fedone_paper.study import Design, Point, Study
from fedone_paper.summary import Column, table
from fedone_sdk.evaluation.engine import Result, Trial

_MB = 2**20
_FLOAT32 = 4
_TIMED_TASK = "sst2"

# The paper's counts are those of a population of 200.
_BBT_20 = METHODS["bbt"].variant("BBT (population 20)", changes={"num_samples": 20}, name="bbt-20")
_NAMES = ("prompt-tuning", "p-tuning-v2", "bbt-200", "bbt-20", "bdpl", "gs-bdpl")
_ROWS = {name: _BBT_20 if name == "bbt-20" else METHODS[name] for name in _NAMES}
_FEDERATED = tuple(row for row in METHODS.values() if row.federated and not row.slots)

_SHAPES = {
    "prompt_len": 20,
    "vocab_size": 200,
    "hidden_size": 1024,
    "num_layers": 24,
    "rounds": 100,
}
"""The paper's, of RoBERTa-large: n, N, H, L and T."""

_Line = Mapping[str, Any]


class Table2(Study):
    """Counts of messages of real runs with a scripted model, and seconds of runs with a real one.

    The counts depend on shapes only, so they need no weights of the paper's model. Seconds are of
    the given model.
    """

    name = "table2"
    title = "What each method sends, asks and takes"
    needs_data = False
    default_seeds = 1
    options = tuple(_SHAPES)
    design = Design(
        base={**_SHAPES, "timed_rounds": 10, "timed_rows": 32},
        small={"rounds": 2, "timed_rounds": 2, "timed_rows": 4},
        axes={"row": tuple(_ROWS), "exchange": ("alpha", "losses"), "clients_per_round": (1, 10)},
        small_axes={"clients_per_round": (1,)},
        key="{row}_{exchange}_k{clients_per_round}",
    )

    def seeds(self, settings: Settings, point: Point) -> Sequence[int]:
        """One seed, where the method has the exchange."""
        return (0,) if point["exchange"] == "alpha" or not _ROWS[point["row"]].soft else ()

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the count of a method's messages."""
        row, run = _ROWS[point["row"]], self.run(settings)
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

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """One count per method, exchange and K*; with data, one timed run per method."""
        run = {
            "task": _TIMED_TASK,
            "seed": 0,
            "num_clients": 20,
            "num_samples": 20,
            "batch_size": self.run(settings)["timed_rows"],
            "rounds": self.run(settings)["timed_rounds"],
            "every": 0,
            "searches": False,
        }
        timed = [
            row.trial(f"timed_{row.name}", settings, run, *row.rates[:1])
            for row in _timed(settings)
        ]
        return [
            *super().trials(settings, results),
            *(
                replace(trial, run=run_soft_timed if "soft" in trial.options else run_timed)
                for trial in timed
            ),
        ]

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the counts next to the paper's, and the seconds."""
        run = self.run(settings)
        shapes = {name: run[name] for name in _SHAPES}
        lines = []
        for name, row in _ROWS.items():
            found = {
                exchange: self.runs(settings, results, row=name, exchange=exchange)
                for exchange in ("alpha", "losses")
            }
            for clients in found["alpha"]:
                counts = {each: runs[clients][0] for each, runs in found.items() if clients in runs}
                lines.append(_line(row, clients, counts))
        timed = [
            {
                "name": row.name,
                "title": row.title,
                "access": row.access,
                "rounds": result["rounds"],
                "seconds_per_round": result["wall_s"] / result["rounds"],
                "loaded_megabytes": result["loaded_bytes"] / _MB,
                "device": result["device"],
            }
            for row in _timed(settings)
            if (result := results.get(f"timed_{row.name}")) and result["rounds"]
        ]
        compared = shapes == _SHAPES
        parts = [
            _counts_table(lines, compared),
            _legend(shapes),
            *([f"{about(self.name)}\n"] if compared else []),
            _about_p_tuning(shapes),
            _timed_table(settings, timed, run["timed_rows"]),
        ]
        return Report(
            markdown="\n".join(parts),
            data={
                "shapes": shapes,
                "counts": lines,
                "paper_p_tuning_elements": _papers_p_tuning(shapes),
                "timed": timed,
            },
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


def _timed(settings: Settings) -> list[Method]:
    """Return the methods whose runs are timed."""
    if settings.data is None:
        return []
    return [row for row in _FEDERATED if missing(row, settings) is None]


def _paper(row: Method, clients: int) -> dict[str, Any] | None:
    """Return the paper's numbers at one K*, by its columns, and the sizes on a client."""
    printed_table, name = printed(Table2.name), row.name if row.paper is None else row.paper
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


def _legend(shapes: Mapping[str, int]) -> str:
    return (
        f"Counted from the messages of runs of {shapes['rounds']} rounds with 100 clients, at "
        f"n = {shapes['prompt_len']}, N = {shapes['vocab_size']}, H = {shapes['hidden_size']} and "
        f"{shapes['num_layers']} layers; the model is scripted, and all else is real. Soft prompts "
        "are tuned in one process, so that their shapes determine the counts. FL server MB "
        "are the numbers of alpha in all assignments and updates, 4 bytes each; MB are 2^20 bytes. "
        "On the wire are whole bodies, what clients fetch once included, of tasks with texts of "
        "one word. FL server queries are updates that the server took, LLM queries those of the "
        "run's account.\n"
    )


def _about_p_tuning(shapes: Mapping[str, int]) -> str:
    true = 2 * shapes["num_layers"] * shapes["prompt_len"] * shapes["hidden_size"]
    return (
        f"P-tuning v2 here sends its key and value prefixes, {true:,} numbers. The paper's table "
        f"counts {_papers_p_tuning(shapes):,} at these shapes: an input prompt, and in each layer "
        "n rows of the weights and biases of queries, keys and values, most of which are sent and "
        "never trained.\n"
    )


def _timed_table(settings: Settings, timed: Sequence[_Line], batch_size: int) -> str:
    if settings.data is None:
        return "Nothing was timed: that needs `--data` (and `--model`).\n"

    def paper(name: str, column: str) -> str:
        found = None if name == "bbt" else _paper(METHODS[name], 1)  # its population was 200
        return "-" if found is None else f"{found[column]}"

    rows = table(
        "Method",
        {line["title"]: line for line in timed},
        {
            "Training, s per 100 rounds": lambda _, line: f"{100 * line['seconds_per_round']:.0f}",
            "Loaded on the client, MB": lambda _, line: (
                f"{line['loaded_megabytes']:.0f}" if line["access"] == "white box" else "0"
            ),
            "Paper: s": lambda _, line: paper(line["name"], "seconds"),
            "MB": lambda _, line: paper(line["name"], "loaded_megabytes"),
        },
    )
    left_out = [f"{row.title} ({why})" for row in _FEDERATED if (why := missing(row, settings))]
    text = (
        f"Of {timed[0]['rounds'] if timed else 0} rounds of {_TIMED_TASK} with one client per "
        f"round, mini-batches of {batch_size} and the given model, from the first assignment to "
        "the last update; without measurements or known answers. What is loaded are the model's "
        "weights (on CUDA, the most that was allocated); a client of a gateway loads none.\n"
    )
    return f"{rows}\n{text}" + (f"\nLeft out: {', '.join(left_out)}.\n" if left_out else "")
