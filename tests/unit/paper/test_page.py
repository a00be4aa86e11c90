"""The page on the reproduction: its tables are recomputed from the stored trials alone."""

from __future__ import annotations

import json
import math
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy.stats import binom, binomtest

ROOT = Path(__file__).resolve().parents[3]
SHARED = Path(os.environ.get("FEDONE_SHARED", ROOT.parent / "shared"))
TASKS = ("mnli", "qqp", "sst2", "mrpc", "cola", "qnli", "rte")
TITLES = {
    "no-prompt": "No prompt",
    "manual": "Manual prompt",
    "in-context": "In-context learning",
    "untrained": "Prompt without training",
    "fine-tuning": "Fine-tuning",
    "prompt-tuning": "Prompt tuning",
    "p-tuning-v2": "P-tuning v2",
    "bbt": "BBT",
    "bdpl": "BDPL",
    "gs-bdpl": "GS-BDPL",
}
TUNED = ("prompt-tuning", "p-tuning-v2", "bbt", "bdpl", "gs-bdpl")


@cache
def stored() -> Mapping[str, Mapping[str, Any]]:
    """The JSON files of the archive by their paths, ``NAME/trials/KEY`` for a trial."""
    found = {}
    with tarfile.open(ROOT / "examples" / "paper" / "trials.tar.xz") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                name = member.name.removeprefix("reproduction/").removesuffix(".json")
                found[name] = json.load(file)
    return found


def results(study: str, key: str) -> list[Mapping[str, Any]]:
    """The results of a point in the order of their seeds."""
    place = f"{study}/trials/{key}"
    names = [f"{place}_s{seed}" for seed in range(20)] if place not in stored() else [place]
    return [stored()[name]["result"] for name in names if name in stored()]


def mean_sd(values: Sequence[float], digits: int = 1) -> str:
    numbers = [fmean(values), stdev(values)] if len(values) > 1 else values
    return " ± ".join(f"{number:.{digits}f}" for number in numbers)


def scores(study: str, key: str, which: str = "after") -> str:
    return mean_sd([100 * one["metric"][which] for one in results(study, key)])


def methods() -> Iterator[str]:
    for name, title in TITLES.items():
        cells = [scores("table1", f"{task}_{name}") for task in TASKS]
        yield f"| {title} | {' | '.join(cells)} |"


def constants() -> Iterator[str]:
    """The best answer to all rows, by the task's metric."""
    cells = []
    for task in TASKS:
        file = SHARED / "data" / "glue" / task / "dev.jsonl"
        if not file.exists():
            pytest.skip(f"{file} is absent (FEDONE_SHARED names the folder of shared data)")
        counts = Counter(json.loads(line)["label"] for line in file.read_text().splitlines())
        share = counts[1] / counts.total()
        best = max(counts.values()) / counts.total()
        value = {"qqp": 2 * share / (1 + share), "mrpc": 2 * share / (1 + share), "cola": 0.0}
        cells.append(f"{100 * value.get(task, best):.1f}")
    yield f"| The same answer to all rows | {' | '.join(cells)} |"


def one_or_ten() -> Iterator[str]:
    for name in TUNED:
        one, ten = (results(study, f"sst2_{name}") for study in ("table1", "table-fedavg"))
        gains = [
            100 * (b["metric"]["after"] - a["metric"]["after"])
            for a, b in zip(one, ten, strict=True)
        ]
        seconds = (f"{fmean(run['wall_s'] for run in runs):.0f}" for runs in (one, ten))
        scored = (scores(study, f"sst2_{name}") for study in ("table1", "table-fedavg"))
        each = ", ".join(f"{gain:+.1f}" for gain in gains)
        yield f"| {TITLES[name]} | {' | '.join(scored)} | {each} | {' | '.join(seconds)} |"


def traffic() -> Iterator[str]:
    """Numbers of alpha of an update, and MB of all at K* = 1 and 10; half is rounded up."""
    titles = {"bdpl": "BDPL, GS-BDPL", "bbt-20": "BBT"}
    for name in ("bdpl", "gs-bdpl", "bbt-20", "prompt-tuning", "p-tuning-v2"):
        cells = []
        for count in (1, 10):
            (one,) = results("table2", f"{name}_alpha_k{count}")
            numbers = one["elements_up"] + one["elements_down"]
            cells.append(f"{math.floor(400 * numbers / 2**20 + 0.5) / 100:.2f}")
        title = titles.get(name, titles["bdpl"] if name == "gs-bdpl" else TITLES.get(name))
        yield f"| {title} | {one['elements_up'] // one['visits']:,} | {' | '.join(cells)} |"


def clients() -> Iterator[str]:
    for name in ("bdpl", "gs-bdpl"):
        keys = [f"{name}_c{count}" for count in (100, 1000, 10000)]
        for title, which in ("", "after"), (" without training", "before"):
            cells = [scores("table-clients", key, which) for key in keys]
            yield f"| {TITLES[name]}{title} | {' | '.join(cells)} |"


def lengths() -> Iterator[str]:
    for length in (10, 20, 40, 60):
        study, key = "figure-prompt-length", f"sst2_n{length}"
        cells = scores(study, key, "before"), scores(study, key), str(len(results(study, key)))
        yield f"| {length} | {' | '.join(cells)} |"


def toy() -> Iterator[str]:
    """Queries to a test accuracy: the median over seeds, the least and the most."""
    for count in (1, 5, 10, 20, 40):
        runs, cells = results("figure-toy", f"iid_k{count}"), []
        for target in (0.7, 0.8, 0.9):
            firsts = sorted(
                next((q for q, a in points if a >= target), math.inf)
                for run in runs
                for points in [zip(run["queries"], run["accuracy"], strict=True)]
            )
            least, value, most = (
                "never" if math.isinf(one) else f"{one:,}"
                for one in (firsts[0], firsts[(len(firsts) - 1) // 2], firsts[-1])
            )
            cells.append(value if least == most else f"{value} ({least} to {most})")
        ends = mean_sd([100 * run["accuracy"][-1] for run in runs])
        yield f"| {count} | {' | '.join(cells)} | {ends} |"


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower median, and the order statistics that hold the true one in 95 % of cases."""
    ordered, count = sorted(values), len(values)
    below = int(binom.ppf(0.025, count, 0.5))
    return ordered[(count - 1) // 2], ordered[below - 1], ordered[count - below]


def text(queries: float, cap: int) -> str:
    return f"{queries:,.0f}" if math.isfinite(queries) else f"> {cap:,}"


def compared(values: Mapping[int, Sequence[float]], cap: int) -> Iterator[str]:
    """Per K*: reached, median, interval, mean, and pairs that K* = 1 wins."""
    for count, found in values.items():
        value, low, high = (text(one, cap) for one in middle(found))
        reached = sum(map(math.isfinite, found))
        capped = fmean(min(one, cap) for one in found)
        cells = [f"{reached} of {len(found)}", value, low if low == high else f"{low} to {high}"]
        cells.append("> " * (reached < len(found)) + f"{capped:,.0f}")
        pairs = [(a, b) for a, b in zip(values[1], found, strict=True) if a != b]
        fewer = sum(a < b for a, b in pairs)
        against = ""
        if pairs:
            p_value = binomtest(fewer, len(pairs)).pvalue
            against = f"{fewer} of {len(pairs)}, p = {p_value:.1g}"
        yield f"{count} | {' | '.join([*cells, against])} |"


def queries() -> Iterator[str]:
    for name, target in product(("gs-bdpl", "bdpl"), ("expected_loss", "expected_metric")):
        values = {
            count: [
                math.inf if one["reached"][target] is None else one["reached"][target]
                for one in results("table-queries", f"{name}_k{count}")
            ]
            for count in (1, 3, 10, 30)
        }
        for row in compared(values, 2400):
            yield f"| {TITLES[name]}, {target.rpartition('_')[2]} | {row}"


def slots() -> Iterator[str]:
    for place, study in stored().items():
        if not place.startswith("slot-clients/"):
            continue
        cell = place.partition("/")[2]
        for name, share in product(("gs-bdpl", "bdpl"), ("0.5", "0.8")):
            values, rates = {}, {}
            for count, pilots in study[name]["pilots"].items():
                means = {
                    rate: fmean(6000 if one is None else one for one in found[share])
                    for rate, found in pilots.items()
                }
                rate = min(means, key=lambda each: means[each])
                found = study[name]["repeats"][count][rate][share]
                values[int(count)] = [math.inf if one is None else one for one in found]
                rates[int(count)] = rate
            for rate, row in zip(rates.values(), compared(values, 6000), strict=True):
                head = f"{cell}, {TITLES[name]}, {float(share):.0%}"
                yield f"| {head} | {float(rate):g} | {row}"


@pytest.mark.parametrize(
    "rows", [methods, constants, one_or_ten, traffic, clients, lengths, toy, queries, slots]
)
def test_tables_are_those_of_the_stored_trials(rows: Callable[[], Iterator[str]]) -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8").splitlines()
    found = list(rows())
    assert found
    assert [row for row in found if row not in page] == []


def test_no_stored_trial_is_a_quick_one() -> None:
    for name, trial in stored().items():
        if "/trials/" in name and "run" in trial["options"]:
            assert trial["options"]["run"]["data"]["num_clients"] >= 100
