"""figure-prompt-length: the metric after training against the number of positions n."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.experiments.experiment import Report, Results
from fedone_sdk.experiments.paper import about
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.statistics import compared
from fedone_sdk.experiments.study import Design, Runs, Study, metric_cells, metrics
from fedone_sdk.experiments.summary import markdown_table, mean_sd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FigurePromptLength"]


class FigurePromptLength(Study):
    """GS-BDPL with one client per round, prompts of several lengths."""

    name = "figure-prompt-length"
    title = "The metric after training against the length of the prompt"
    default_seeds = 5
    takes = ("tasks",)
    design = Design(
        base={"method": {"name": "gs-bdpl", "learning_rate": 3e-4}, "rounds": 100, "every": 0},
        small={"method": {"num_samples": 4, "batch_size": 8}, "num_clients": 10, "rounds": 3},
        axes={"task": ("sst2", "cola", "mrpc"), "prompt_len": (10, 20, 40, 60)},
        small_axes={"task": ("sst2",), "prompt_len": (5, 10)},
        key="{task}_n{prompt_len}_s{seed}",
    )

    def report(self, settings: Settings, results: Results) -> Report:
        """One panel and one table per task."""
        run = self.run(settings)
        tasks = {
            task: runs
            for task in self.grid(settings)["task"]
            if (runs := self.runs(settings, results, task=task))
        }

        def draw(figure: Figure) -> None:
            figure.set_size_inches(1.0 + 4.0 * len(tasks), 3.8)
            panels = figure.subplots(1, len(tasks), squeeze=False)[0]
            for axes, (task, runs) in zip(panels, tasks.items(), strict=True):
                for name, label in ("after", "tuned"), ("before", "untrained"):
                    sums = [mean_sd(metrics(found, name)) for found in runs.values()]
                    axes.errorbar(
                        list(runs),
                        [mean for mean, _ in sums],
                        [deviation or 0.0 for _, deviation in sums],
                        marker="o",
                        capsize=3,
                        label=label,
                    )
                bare = next(iter(next(iter(runs.values())).values()))["metric"]
                axes.axhline(bare["no_prompt"], color="grey", linestyle=":", label="no prompt")
                axes.set(xlabel="positions n", ylabel=bare["name"], title=task)
                axes.set_xticks(list(runs))
            panels[0].legend()

        head = (
            f"GS-BDPL, one client per round, {run['rounds']} rounds, learning rate "
            f"{run['method']['learning_rate']:g}, the same "
            "for every n; the metric (x 100) of the deployable prompt on the whole dev split. "
            "Lines are means over seeds, bars one standard deviation; p values are of one "
            "comparison each, and the best n is chosen by the same seeds. The model takes a "
            "limited number of tokens: where a long prompt leaves too little room, the ends of the "
            f"example's text are cut off. {about(self.name)}\n"
        )
        sections = [_section(task, runs) for task, runs in tasks.items()]
        return Report(
            markdown="\n".join([f"![{self.title}]({self.name}.svg)\n", head, *sections]),
            data={
                task: {
                    str(length): {
                        name: {str(seed): run["metric"][name] for seed, run in found.items()}
                        for name in ("no_prompt", "before", "after")
                    }
                    for length, found in runs.items()
                }
                for task, runs in tasks.items()
            },
            figures={self.name: draw},
        )


def _section(task: str, runs: Runs) -> str:
    metric = next(iter(next(iter(runs.values())).values()))["metric"]["name"]
    rows = [
        [
            str(length),
            *metric_cells(found),
            str(len(found)),
        ]
        for length, found in runs.items()
    ]
    table = markdown_table(["n", "no prompt", "untrained", "tuned", "seeds"], rows)
    return f"## {task} ({metric})\n\n{table}\n{_verdict(runs)}\n"


def _verdict(runs: Runs) -> str:
    """What can be said of the lengths, from the seeds that they share."""
    means = {length: mean_sd(metrics(found, "after"))[0] for length, found in runs.items()}
    best = max(means, key=lambda length: means[length])
    parts = []
    for length, found in runs.items():
        if length == best:
            continue
        seeds = sorted(found.keys() & runs[best].keys())
        # Less is better for `compared`, more for a metric.
        pairs = [
            (-runs[best][seed]["metric"]["after"], -found[seed]["metric"]["after"])
            for seed in seeds
        ]
        against = compared([one for one, _ in pairs], [other for _, other in pairs])
        parts.append(
            f"better than n={length} in {against.fewer} of {len(seeds)} seeds "
            f"(sign test p = {against.p_value:.2g})"
        )
    trained = sum(
        run["metric"]["after"] > run["metric"]["before"]
        for found in runs.values()
        for run in found.values()
    )
    total = sum(map(len, runs.values()))
    against_others = f": {'; '.join(parts)}" if parts else ""
    return (
        f"The best mean is at n={best}{against_others}. Tuning improved on the untrained prompt in "
        f"{trained} of {total} runs."
    )
