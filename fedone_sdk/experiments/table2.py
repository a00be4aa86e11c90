"""The paper's table of costs: what each method sends and asks, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Any, ClassVar

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.accounting import count_messages
from fedone_sdk.experiments.experiment import Report, Result, Results, Trial
from fedone_sdk.experiments.federated import run_timed
from fedone_sdk.experiments.paper import about, printed
from fedone_sdk.experiments.rows import METHODS, Method, Scale, missing
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.study import Design, Point, Study
from fedone_sdk.experiments.summary import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Table2"]

_MB = 2**20
_FLOAT32 = 4
_KEY = "{row}_{exchange}_k{clients_per_round}"


_BBT_20 = replace(
    METHODS["bbt"],
    name="bbt-20",
    title="BBT (population 20)",
    method={"name": "bbt", "num_samples": 20},
    paper="",  # The paper's counts are those of a population of 200.
)
_ROWS = {
    row.name: row
    for row in (
        METHODS["prompt-tuning"],
        METHODS["p-tuning-v2"],
        METHODS["bbt-200"],
        _BBT_20,
        METHODS["bdpl"],
        METHODS["gs-bdpl"],
    )
}

_SHAPES = {
    "prompt_len": 20,
    "vocab_size": 200,
    "hidden_size": 1024,
    "num_layers": 24,
    "rounds": 100,
}
"""The paper's, of RoBERTa-large: n, N, H, L and T."""

_TIMED_ROUNDS = 10
_TIMED_TASK = "sst2"


class Table2(Study):
    """Counts of messages of real runs with a scripted model, and seconds of runs with a real one.

    How many numbers travel depends on shapes alone, so that no weights of the paper's model are
    needed to count them. Seconds are of the model that was given.
    """

    name: ClassVar[str] = "table2"
    title: ClassVar[str] = "What each method sends, asks and takes"
    needs_data: ClassVar[bool] = False
    default_seeds: ClassVar[int] = 1
    options: ClassVar[tuple[str, ...]] = tuple(_SHAPES)
    design = Design(
        base=_SHAPES,
        small={"rounds": 2},
        axes={"row": tuple(_ROWS), "exchange": ("alpha", "losses"), "clients_per_round": (1, 10)},
        small_axes={"clients_per_round": (1,)},
        key=_KEY,
    )

    def run(self, settings: Settings) -> dict[str, int]:
        """The shapes, with those that the user wants.

        Raises:
            SpecError: One is none.
        """
        shapes: dict[str, int] = super().run(settings)
        for name, text in settings.options.items():
            if not text.isascii() or not text.isdigit() or int(text) < 1:
                raise SpecError(
                    f"--set {name}: must be a whole number above 0, not {text!r}",
                    source="arguments",
                )
            shapes[name] = int(text)
        return shapes

    def seeds(self, settings: Settings, point: Point) -> Sequence[int]:
        """One count of each, where a method has the exchange."""
        asks = _ROWS[point["row"]].access == "black box"
        return (0,) if asks or point["exchange"] == "alpha" else ()

    def trial(self, settings: Settings, key: str, point: Point, seed: int) -> Trial:
        """The count of a method's messages."""
        row, shapes = _ROWS[point["row"]], self.run(settings)
        return Trial(
            key=key,
            run=count_messages,
            options={
                "method": {**row.method, **{name: shapes[name] for name in row.shape}},
                "prompt_len": shapes["prompt_len"],
                "vocab_size": shapes["vocab_size"],
                "num_clients": 100,
                "clients_per_round": point["clients_per_round"],
                "rounds": shapes["rounds"],
                "exchange": point["exchange"],
            },
        )

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """One count per method, exchange and K*; with data, one timed run per method."""
        counts = super().trials(settings, results)
        return [
            *counts,
            *(
                replace(
                    row.trial(
                        _timed_key(row),
                        settings,
                        _timed_scale(settings),
                        _TIMED_TASK,
                        0,
                        *row.rates[:1],
                    ),
                    run=run_timed,
                )
                for row in _timed_rows(settings)
            ),
        ]

    def report(self, settings: Settings, results: Results) -> Report:
        """The counts next to the paper's, which of them are equal, and the seconds."""
        shapes = self.run(settings)
        lines = [
            line
            for row in _ROWS.values()
            for together in self.grid(settings)["clients_per_round"]
            if (line := _line(row, together, results)) is not None
        ]
        compared = shapes == _SHAPES
        parts = [_counts_table(lines, compared), _legend(shapes)]
        if compared:
            parts += [_comparison(lines), f"{about(self.name)}\n"]
        parts.append(_about_p_tuning(shapes))
        timed = _timed(settings, results)
        parts.append(_timed_table(settings, timed))
        return Report(
            markdown="\n".join(parts),
            data={
                "shapes": shapes,
                "counts": lines,
                "paper_p_tuning_elements": _papers_p_tuning(shapes),
                "timed": timed,
            },
            figures={"table2": lambda figure: _draw(figure, lines)},
        )


def _papers_p_tuning(shapes: Mapping[str, int]) -> int:
    """The numbers that the paper counts for P-tuning v2.

    An input prompt, and in each layer n rows of the weights and biases of queries, keys and values.
    """
    n, H = shapes["prompt_len"], shapes["hidden_size"]  # noqa: N806 (the paper's symbols)
    return n * H + shapes["num_layers"] * 3 * n * (H + 1)


def _line(row: Method, together: int, results: Results) -> dict[str, Any] | None:
    """A row of the table, from the messages that were counted."""
    found = {
        exchange: results[key]
        for exchange in Table2.design.axes["exchange"]
        if (key := _KEY.format(row=row.name, exchange=exchange, clients_per_round=together))
        in results
    }
    if "alpha" not in found:
        return None
    alpha = found["alpha"]
    elements = alpha["elements_down"] + alpha["elements_up"]
    return {
        "name": row.name,
        "title": row.title,
        "clients_per_round": together,
        "elements": alpha["elements_up"] // alpha["visits"],
        "megabytes": elements * _FLOAT32 / _MB,
        "visits": alpha["visits"],
        "queries": alpha["queries"],
        "trainable_megabytes": alpha["elements_up"] // alpha["visits"] * _FLOAT32 / _MB,
        "wire_megabytes": {each: _wire(result) for each, result in found.items()},
        "paper": _paper(row, together),
    }


def _paper(row: Method, together: int) -> dict[str, Any] | None:
    """The paper's numbers at one K*, by its columns, and the sizes on a client."""
    table, name = printed(Table2.name), row.name if row.paper is None else row.paper
    numbers = table["rows"].get(name, {}).get(together)
    if numbers is None:
        return None
    sizes = {f"{size}_megabytes": table[size][name] for size in ("trainable", "loaded")}
    return {**dict(zip(table["columns"], numbers, strict=True)), **sizes}


def _wire(result: Result) -> float:
    traffic = result["communication"]
    sent: float = (traffic["upload_bytes"] + traffic["download_bytes"]) / _MB
    return sent


def _counts_table(lines: Sequence[Mapping[str, Any]], compared: bool) -> str:
    header = ["Method", "K*", "Numbers of alpha", "Trainable MB per client", "FL server MB"]
    header += ["FL server queries", "LLM queries", "On the wire MB, alpha", "losses"]
    if compared:
        header += ["Paper: trainable MB", "MB", "FL queries", "LLM queries"]
    rows = []
    for line in lines:
        wire, paper = line["wire_megabytes"], line["paper"]
        cells = [
            line["title"],
            str(line["clients_per_round"]),
            f"{line['elements']:,}",
            f"{line['trainable_megabytes']:.3f}",
            _rounded(line["megabytes"]),
            f"{line['visits']:,}",
            _count(line["queries"]),
            f"{wire['alpha']:.2f}",
            f"{wire['losses']:.2f}" if "losses" in wire else "-",
        ]
        if compared:
            cells += (
                ["-"] * 4
                if paper is None
                else [
                    f"{paper['trainable_megabytes']:g}",
                    _rounded(paper["megabytes"]),
                    f"{paper['visits']:,}",
                    _count(paper["queries"]),
                ]
            )
        rows.append(cells)
    return markdown_table(header, rows)


def _rounded(megabytes: float) -> str:
    """Two digits, half of the last one up as people round: 15.625 is 15.63."""
    return str(Decimal(megabytes).quantize(Decimal("0.01"), ROUND_HALF_UP))


def _count(number: int | None) -> str:
    return f"{number:,}" if number else "-"


def _legend(shapes: Mapping[str, int]) -> str:
    return (
        f"Counted from the messages of runs of {shapes['rounds']} rounds with 100 clients, at "
        f"n = {shapes['prompt_len']}, N = {shapes['vocab_size']}, H = {shapes['hidden_size']} and "
        f"{shapes['num_layers']} layers; the model is a scripted one, and all else is what a run "
        "with a real one goes through. FL server MB are the numbers of alpha in all assignments "
        "and updates, 4 bytes each; MB are 2^20 bytes. On the wire are whole bodies, what clients "
        "fetch once included, of tasks with texts of a word. FL server queries are updates that "
        "the server took, LLM queries those of the run's account.\n"
    )


def _comparison(lines: Sequence[Mapping[str, Any]]) -> str:
    """Says which of the paper's numbers came out, to the digits that it gives."""
    equal, others = [], []
    for line in lines:
        paper, where = line["paper"], f"{line['title']} at K* = {line['clients_per_round']}"
        if paper is None:
            continue
        pairs = {
            "MB": (_rounded(line["megabytes"]), _rounded(paper["megabytes"])),
            "FL server queries": (line["visits"], paper["visits"]),
            "LLM queries": (line["queries"] or None, paper["queries"]),
        }
        different = {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}
        if different:
            listed = "; ".join(f"{what} {a}, the paper {b}" for what, (a, b) in different.items())
            others.append(f"{where}: {listed}")
        else:
            equal.append(where)
    text = f"All of the paper's counts come out for: {', '.join(equal) or 'none'}."
    return text + (f" Others: {'. '.join(others)}.\n" if others else "\n")


def _about_p_tuning(shapes: Mapping[str, int]) -> str:
    true = 2 * shapes["num_layers"] * shapes["prompt_len"] * shapes["hidden_size"]
    return (
        f"P-tuning v2 here sends its key and value prefixes, {true:,} numbers. The paper's table "
        f"counts {_papers_p_tuning(shapes):,} at these shapes: an input prompt, and in each layer "
        "n rows of the weights and biases of queries, keys and values, most of which are sent and "
        "never trained.\n"
    )


# Seconds, on the model and data that were given


_FEDERATED = tuple(row for row in METHODS.values() if row.federated)


def _timed_rows(settings: Settings) -> list[Method]:
    if settings.data is None:
        return []
    return [row for row in _FEDERATED if missing(row, settings) is None]


def _timed_scale(settings: Settings) -> Scale:
    few = {"rounds": 2, "batch_size": 4} if settings.quick else {"rounds": _TIMED_ROUNDS}
    return Scale(tasks=(_TIMED_TASK,), every=0, num_clients=20, searches=False, **few)


def _timed_key(row: Method) -> str:
    return f"timed_{row.name}"


def _timed(settings: Settings, results: Results) -> list[dict[str, Any]]:
    found = []
    for row in _timed_rows(settings):
        result = results.get(_timed_key(row))
        if result is not None and result["rounds"]:
            found.append(
                {
                    "name": row.name,
                    "title": row.title,
                    "access": row.access,
                    "rounds": result["rounds"],
                    "seconds_per_round": result["wall_s"] / result["rounds"],
                    "loaded_megabytes": result["loaded_bytes"] / _MB,
                    "device": result["device"],
                }
            )
    return found


def _timed_table(settings: Settings, timed: Sequence[Mapping[str, Any]]) -> str:
    if settings.data is None:
        return "Nothing was timed: that needs `--data` (and `--model`).\n"
    table = markdown_table(
        ["Method", "Training, s per 100 rounds", "Loaded on the client, MB", "Paper: s", "MB"],
        (
            [
                line["title"],
                f"{100 * line['seconds_per_round']:.0f}",
                f"{line['loaded_megabytes']:.0f}" if line["access"] == "white box" else "0",
                *_papers_time(METHODS[line["name"]]),
            ]
            for line in timed
        ),
    )
    left_out = [
        f"{row.title} ({why})" for row in _FEDERATED if (why := missing(row, settings)) is not None
    ]
    rounds = timed[0]["rounds"] if timed else 0
    text = (
        f"Of {rounds} rounds of {_TIMED_TASK} with one client per round, mini-batches of "
        f"{_timed_scale(settings).batch_size} and the given model, from "
        "the first assignment to the last update; nothing was measured, and no answer was known. "
        "What is loaded are the model's weights (on CUDA, the "
        "most that was allocated); a client that asks through a gateway loads none.\n"
    )
    return f"{table}\n{text}" + (f"\nLeft out: {', '.join(left_out)}.\n" if left_out else "")


def _papers_time(row: Method) -> tuple[str, str]:
    """Seconds of training and MB of GPU memory, one client per round, another model and machine."""
    found = None if row.name == "bbt" else _paper(row, 1)  # its population was 200
    return ("-", "-") if found is None else (f"{found['seconds']}", f"{found['loaded_megabytes']}")


def _draw(figure: Figure, lines: Sequence[Mapping[str, Any]]) -> None:
    """What is sent against what is asked, at K* = 1."""
    figure.set_size_inches(6.4, 3.6)
    panel = figure.subplots()
    shown = [line for line in lines if line["clients_per_round"] == 1]
    names = [line["title"] for line in shown]
    places = range(len(shown))
    for shift, exchange in ((-0.2, "alpha"), (0.2, "losses")):
        bars = [line["wire_megabytes"].get(exchange, 0.0) for line in shown]
        panel.barh([place + shift for place in places], bars, height=0.4, label=exchange)
    panel.set_xscale("log")
    panel.set_yticks(list(places), names)
    panel.invert_yaxis()
    panel.set_xlabel("on the wire at K* = 1, MB (2^20 bytes)")
    panel.legend(title="exchange")
