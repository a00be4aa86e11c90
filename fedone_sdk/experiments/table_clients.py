"""table-clients: the same tuning with 100, 1,000 and 10,000 clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedone_sdk.experiments.experiment import Report, Result, Results
from fedone_sdk.experiments.federated import CURVE_EXAMPLES
from fedone_sdk.experiments.paper import about, paper_row
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.statistics import compared
from fedone_sdk.experiments.study import Design, Runs, Study, metric_cells
from fedone_sdk.experiments.summary import markdown_table, mean_curve, mean_sd_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TableClients"]


class TableClients(Study):
    """GS-BDPL on SST-2 with one client per round, and ever more clients to choose it from."""

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

        def draw(figure: Figure) -> None:
            figure.set_size_inches(6, 4)
            axes = figure.subplots()
            for clients, found in runs.items():
                x, means, deviations = zip(*mean_curve(list(found.values())), strict=True)
                axes.errorbar(x, means, deviations, capsize=2, label=f"{clients:,} clients")
            axes.set(xlabel="training queries", ylabel="accuracy of the deployable prompt")
            axes.legend()

        rows = [
            [
                f"{clients:,}",
                *metric_cells(found),
                *paper_row(self.name, "gs-bdpl", [clients]),
                mean_sd_text(_seconds(found), scale=1000, digits=1),
                _reused(list(found.values())),
                str(len(found)),
            ]
            for clients, found in runs.items()
        ]
        table = markdown_table(
            [
                "clients",
                "no prompt",
                "untrained",
                "tuned",
                "the paper",
                "ms per round",
                "rows shared by clients",
                "seeds",
            ],
            rows,
        )
        head = (
            f"GS-BDPL on SST-2, one client per round, {run['rounds']} rounds, learning rate "
            f"{run['method']['learning_rate']:g}; accuracy (x 100) on the whole dev split. Each "
            f"client holds {run['shots']} rows "
            f"per class. {_sharing(runs)} A round's time is that of the whole federation in one "
            "process, the model and the measurements of the curve included; runs that were broken "
            "off in between are left out of it. The curves are measured on the same "
            f"{CURVE_EXAMPLES} dev rows. {about(self.name)}\n"
        )
        return Report(
            markdown="\n".join(
                [head, table, _verdict(runs) + "\n", f"![{self.title}]({self.name}.svg)"]
            ),
            data={str(clients): _data(found) for clients, found in runs.items()},
            figures={self.name: draw},
        )


def _round_s(run: Result) -> float:
    seconds: float = run["wall_s"] / run["rounds"]
    return seconds


def _seconds(runs: Mapping[int, Result]) -> list[float]:
    """Of a round, where no answers were known beforehand."""
    return [_round_s(run) for run in runs.values() if not run.get("resumed")]


def _reused(runs: Sequence[Result]) -> str:
    reused = {run["reused_rows"] for run in runs}
    return "some" if len(reused) > 1 else "yes" if True in reused else "no"


def _sharing(runs: Runs) -> str:
    """Which K had too few rows for disjoint shards."""
    sharing = [
        f"{clients:,}"
        for clients, found in runs.items()
        if any(run["reused_rows"] for run in found.values())
    ]
    if not sharing:
        return "There were rows enough for disjoint shards."
    return (
        f"There are too few rows for disjoint shards of {' and of '.join(sharing)} clients: their "
        "rows are drawn with replacement over clients (all are dealt out evenly, again and again, "
        "never twice to one client)."
    )


def _verdict(runs: Runs) -> str:
    """Whether the number of clients makes a difference, from the seeds that they share."""
    if len(runs) < 2:
        return "There are no runs to compare."
    few, *more = runs
    parts = []
    for clients in more:
        seeds = sorted(runs[few].keys() & runs[clients].keys())
        pairs = [[runs[k][seed]["metric"]["after"] for k in (few, clients)] for seed in seeds]
        differences = [100 * (other - one) for one, other in pairs]
        found = compared([one for one, _ in pairs], [other for _, other in pairs])
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
