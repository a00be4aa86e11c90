"""table-clients: the same tuning with 100, 1,000 and 10,000 clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedone_sdk.experiments.experiment import Report, Result, Results
from fedone_sdk.experiments.federated import CURVE_EXAMPLES
from fedone_sdk.experiments.figures import Line, Panel, drawing
from fedone_sdk.experiments.paper import about, paper_row
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.statistics import compared
from fedone_sdk.experiments.study import METRIC_COLUMNS, Design, Runs, Study
from fedone_sdk.experiments.summary import mean_curve, mean_sd_text, table

__all__ = ["TableClients"]


class TableClients(Study):
    """GS-BDPL on SST-2 with one client per round, chosen from ever more clients."""

    name = "table-clients"
    title = "100, 1,000 and 10,000 clients"
    design = Design(
        base={
            "task": "sst2",
            "method": {"name": "gs-bdpl", "learning_rate": 3e-4},
            "shots": 16,
            "rounds": 100,
        },
        small={
            "method": {"num_samples": 4, "batch_size": 8},
            "prompt_len": 5,
            "rounds": 3,
            "every": 1,
        },
        axes={"num_clients": (100, 1000, 10_000)},
        small_axes={"num_clients": (10, 100, 1000)},
        key="c{num_clients}_s{seed}",
    )

    def report(self, settings: Settings, results: Results) -> Report:
        """The table, and the curves."""
        run, runs = self.run(settings), self.runs(settings, results)
        lines = []
        for clients, found in runs.items():
            x, means, deviations = zip(*mean_curve(list(found.values())), strict=True)
            label = f"{clients:,} clients"
            lines.append(Line(x=x, y=means, error=(deviations, deviations), label=label))
        curves = Panel(lines=lines, x="training queries", y="accuracy of the deployable prompt")
        rows = table(
            "clients",
            runs,
            {
                **METRIC_COLUMNS,
                "the paper": lambda clients, _: paper_row(self.name, "gs-bdpl", [clients])[0],
                "ms per round": lambda _, found: mean_sd_text(_seconds(found), scale=1000),
                "rows shared by clients": lambda _, found: _reused(found),
                "seeds": lambda _, found: str(len(found)),
            },
        )
        head = (
            f"GS-BDPL on SST-2, one client per round, {run['rounds']} rounds, learning rate "
            f"{run['method']['learning_rate']:g}; accuracy (x 100) on the whole dev split. Each "
            f"client holds {run['shots']} rows per class. {_sharing(runs)} A round's time is that "
            "of the whole federation in one process, with the model and the measurements of the "
            "curve; interrupted runs are left out of it. The curves are measured on the same "
            f"{CURVE_EXAMPLES} dev rows. {about(self.name)}\n"
        )
        return Report(
            markdown="\n".join(
                [head, rows, _verdict(runs) + "\n", f"![{self.title}]({self.name}.svg)"]
            ),
            data={str(clients): _data(found) for clients, found in runs.items()},
            figures={self.name: drawing([curves], size=(5.0, 4.0))},
        )


def _round_s(run: Result) -> float:
    seconds: float = run["wall_s"] / run["rounds"]
    return seconds


def _seconds(runs: Mapping[int, Result]) -> list[float]:
    """Of a round, where no answers were known beforehand."""
    return [_round_s(run) for run in runs.values() if not run.get("resumed")]


def _reused(runs: Mapping[int, Result]) -> str:
    reused = {run["reused_rows"] for run in runs.values()}
    return "some" if len(reused) > 1 else "yes" if True in reused else "no"


def _sharing(runs: Runs) -> str:
    """The numbers of clients that have too few rows for disjoint shards."""
    sharing = [f"{clients:,}" for clients, found in runs.items() if _reused(found) != "no"]
    if not sharing:
        return "There were rows enough for disjoint shards."
    return (
        f"There are too few rows for disjoint shards of {' and of '.join(sharing)} clients: their "
        "rows are drawn with replacement over clients, never twice for one client."
    )


def _verdict(runs: Runs) -> str:
    """Whether the number of clients makes a difference, over the seeds that both have."""
    if len(runs) < 2:
        return "There are no runs to compare."
    few, *more = runs
    parts = []
    for clients in more:
        seeds = sorted(runs[few].keys() & runs[clients].keys())
        one, other = ([runs[k][seed]["metric"]["after"] for seed in seeds] for k in (few, clients))
        found = compared(one, other)
        differences = [100 * (b - a) for a, b in zip(one, other, strict=True)]
        parts.append(
            f"{clients:,} against {few:,} clients: {mean_sd_text(differences, scale=1)} points, "
            f"better in {found.fewer} and worse in {found.more} of {len(seeds)} seeds (sign test "
            f"p = {found.p_value:.2g})"
        )
    return f"Tuned accuracy, by seed: {'; '.join(parts)}."


def _data(runs: Mapping[int, Result]) -> dict[str, Any]:
    return {
        str(seed): {
            "metric": run["metric"],
            "queries": run["spent"]["queries"],
            "s_per_round": _round_s(run),
            "reused_rows": run["reused_rows"],
            "communication": run["communication"],
        }
        for seed, run in runs.items()
    }
