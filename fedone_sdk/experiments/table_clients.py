"""table-clients: the same tuning with 100, 1,000 and 10,000 clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedone_sdk.experiments.experiment import Experiment, Report, Result, Results, Trial
from fedone_sdk.experiments.federated import CURVE_EXAMPLES, Tuning, tuning_trial
from fedone_sdk.experiments.paper import about, paper_row
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.statistics import compared
from fedone_sdk.experiments.summary import markdown_table, mean_sd, mean_sd_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TableClients"]

_RATE = 3e-4
_SHOTS = 16
_ROUNDS = 100

_Runs = Mapping[int, Mapping[int, Result]]
"""Results by K and seed."""


class TableClients(Experiment):
    """GS-BDPL on SST-2 with one client per round, and ever more clients to choose it from."""

    name = "table-clients"
    title = "100, 1,000 and 10,000 clients"
    default_seeds = 3

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """One per K and seed."""
        samples = {"num_samples": 4, "batch_size": 8} if settings.quick else {}
        return [
            tuning_trial(
                _key(clients, seed),
                settings,
                Tuning(
                    task="sst2",
                    method={"name": "gs-bdpl", "learning_rate": _RATE, **samples},
                    seed=seed,
                    num_clients=clients,
                    shots=_SHOTS,
                    rounds=_rounds(settings),
                    every=1 if settings.quick else 10,
                    prompt_len=5 if settings.quick else 20,
                ),
            )
            for clients in _clients(settings)
            for seed in range(settings.seeds)
        ]

    def report(self, settings: Settings, results: Results) -> Report:
        """The table, and the curves."""
        runs = _runs(settings, results)

        def draw(figure: Figure) -> None:
            figure.set_size_inches(6, 4)
            axes = figure.subplots()
            for clients, found in runs.items():
                x, means, deviations = _curve(list(found.values()))
                axes.errorbar(x, means, deviations, capsize=2, label=f"{clients:,} clients")
            axes.set(xlabel="training queries", ylabel="accuracy of the deployable prompt")
            axes.legend()

        rows = [
            [
                f"{clients:,}",
                *(mean_sd_text(_values(found, name)) for name in ("no_prompt", "before", "after")),
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
            ("**--quick: tiny runs; the numbers mean nothing.** " if settings.quick else "")
            + f"GS-BDPL on SST-2, one client per round, {_rounds(settings)} rounds, learning rate "
            f"{_RATE:g}; accuracy (x 100) on the whole dev split. Each client holds {_SHOTS} rows "
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


def _clients(settings: Settings) -> tuple[int, ...]:
    return (10, 100, 1000) if settings.quick else (100, 1000, 10_000)


def _rounds(settings: Settings) -> int:
    return 3 if settings.quick else _ROUNDS


def _key(clients: int, seed: int) -> str:
    return f"c{clients}_s{seed}"


def _runs(settings: Settings, results: Results) -> _Runs:
    by_clients = {
        clients: {
            seed: results[key]
            for seed in range(settings.seeds)
            if (key := _key(clients, seed)) in results
        }
        for clients in _clients(settings)
    }
    return {clients: runs for clients, runs in by_clients.items() if runs}


def _values(runs: Mapping[int, Result], name: str) -> list[float]:
    return [run["metric"][name] for run in runs.values()]


def _round_s(run: Result) -> float:
    seconds: float = run["wall_s"] / run["rounds"]
    return seconds


def _seconds(runs: Mapping[int, Result]) -> list[float]:
    """Of a round, where no answers were known beforehand."""
    return [_round_s(run) for run in runs.values() if not run.get("resumed")]


def _reused(runs: Sequence[Result]) -> str:
    reused = {run["reused_rows"] for run in runs}
    return "some" if len(reused) > 1 else "yes" if True in reused else "no"


def _sharing(runs: _Runs) -> str:
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


def _curve(runs: Sequence[Result]) -> tuple[list[float], list[float], list[float]]:
    """Mean and deviation of the measured metric over queries, where all runs were measured.

    Without the start, which is measured on other rows: all of them.
    """
    curves = [
        {point["queries"]: point["metric"] for point in run["curve"] if point["round"] >= 0}
        for run in runs
    ]
    grid = sorted(set.intersection(*(set(curve) for curve in curves)))
    sums = [mean_sd(curve[queries] for curve in curves) for queries in grid]
    return grid, [mean for mean, _ in sums], [deviation or 0.0 for _, deviation in sums]


def _verdict(runs: _Runs) -> str:
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
