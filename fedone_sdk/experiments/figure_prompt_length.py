"""figure-prompt-length: the metric after training against the number of positions n."""

from __future__ import annotations

from fedone_sdk.experiments.experiment import Report, Results
from fedone_sdk.experiments.figures import Line, Panel, drawing
from fedone_sdk.experiments.paper import about
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.statistics import compared
from fedone_sdk.experiments.study import METRIC_COLUMNS, Design, Runs, Study, metrics
from fedone_sdk.experiments.summary import mean_sd, table

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
        head = (
            f"GS-BDPL, one client per round, {run['rounds']} rounds, learning rate "
            f"{run['method']['learning_rate']:g}, the same for every n; the metric (x 100) of the "
            "deployable prompt on the whole dev split. Lines are means over seeds, bars one "
            "standard deviation; p values are of one comparison each, and the best n is chosen by "
            "the same seeds. If a long prompt leaves too little of the model's context, the ends "
            f"of the example's text are cut off. {about(self.name)}\n"
        )
        sections = [_section(task, runs) for task, runs in tasks.items()]
        panels = [_panel(task, runs) for task, runs in tasks.items()]
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
            figures={self.name: drawing(panels, size=(4.0, 3.8))},
        )


def _metric(runs: Runs) -> dict[str, float | str]:
    """Of any run: its name, and the value without a prompt."""
    found: dict[str, float | str] = next(iter(next(iter(runs.values())).values()))["metric"]
    return found


def _panel(task: str, runs: Runs) -> Panel:
    lines = []
    for name, label in ("after", "tuned"), ("before", "untrained"):
        sums = [mean_sd(metrics(each, name)) for each in runs.values()]
        means, deviations = zip(*sums, strict=True)
        spread = [deviation or 0.0 for deviation in deviations]
        lines.append(Line(x=list(runs), y=means, error=(spread, spread), label=label, style="o-"))
    return Panel(
        lines=lines,
        level=float(_metric(runs)["no_prompt"]),
        level_label="no prompt",
        x="positions n",
        y=str(_metric(runs)["name"]),
        title=task,
        ticks={length: str(length) for length in runs},
    )


def _section(task: str, runs: Runs) -> str:
    rows = table("n", runs, {**METRIC_COLUMNS, "seeds": lambda _, found: str(len(found))})
    return f"## {task} ({_metric(runs)['name']})\n\n{rows}\n{_verdict(runs)}\n"


def _verdict(runs: Runs) -> str:
    """What can be said of the lengths, over the seeds that they share."""
    means = {length: mean_sd(metrics(found, "after"))[0] for length, found in runs.items()}
    best = max(means, key=lambda length: means[length])
    parts = []
    for length, found in runs.items():
        if length == best:
            continue
        seeds = sorted(found.keys() & runs[best].keys())
        # Less is better for `compared`, more for a metric.
        one, other = ([-each[s]["metric"]["after"] for s in seeds] for each in (runs[best], found))
        against = compared(one, other)
        parts.append(
            f"better than n={length} in {against.fewer} of {len(seeds)} seeds "
            f"(sign test p = {against.p_value:.2g})"
        )
    each = [run["metric"] for found in runs.values() for run in found.values()]
    improved = sum(metric["after"] > metric["before"] for metric in each)
    against_others = f": {'; '.join(parts)}" if parts else ""
    return (
        f"The best mean is at n={best}{against_others}. Tuning improved on the untrained prompt in "
        f"{improved} of {len(each)} runs."
    )
