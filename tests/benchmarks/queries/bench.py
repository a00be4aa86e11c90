"""The bench of queries: methods x variants x seeds, and their queries to the same loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.experiment import Experiment, Report, Result, Results, Trial
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.table_queries import PILOTS
from tests.benchmarks.queries.contest import Scale, contest_document, contest_trial
from tests.benchmarks.queries.contestants import (
    CONTESTANTS,
    DEFAULT,
    STANDALONE,
    Contestant,
    can_be_attacked,
    chosen_methods,
    takes_part,
)
from tests.benchmarks.queries.no_prompt import no_prompt_trial
from tests.benchmarks.queries.oracle import oracle_trial
from tests.benchmarks.queries.report import draw_curves, written
from tests.benchmarks.queries.results import BenchResults, Runs, VariantResults
from tests.benchmarks.queries.variants import GLUE_VARIANTS, VARIANTS, Variant, chosen_variants

__all__ = ["BenchQueries"]

_MARKS = (10, 20, 30, 50, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000)
_QUICK_MARKS = (8, 16)
_QUICK_EFFORT: dict[str, Any] = {
    "generations": 1,
    "width": 4,
    "children": 2,
    "rows": [8, 16],
    "finalists": 2,
    "elite": 2,
}


class BenchQueries(Experiment):
    """Queries that methods need for the same deployable loss.

    `Settings.options`: ``methods`` and ``variants`` (joined by commas; variants may be patterns
    such as ``sst2-*-iid``), which also set the order; ``marks`` (training queries, ascending,
    joined by commas; the last is the cap); ``generations``, the most of the oracle.

    By default, GLUE's other tasks are included if the calibrated bare model is above the dev
    split's majority class.
    """

    name = "queries"
    title = "Queries that methods need for the same deployable loss"
    default_seeds = 20
    options = ("generations", "marks", "methods", "variants")

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """Yield the trials of other tasks' bare models; then, seed by seed, those of all variants.

        Raises:
            SpecError: There is no data, or an option is invalid.
        """
        return _Plan(settings, results).trials()

    def report(self, settings: Settings, results: Results) -> Report:
        """Write curves, targets, the default's goals, and every row's numbers."""
        plan = _Plan(settings, results)
        bench = plan.bench()
        return Report(
            markdown=written(bench, settings, plan.scale),
            data=bench.data(),
            figures={
                f"{self.name}-{unit}": draw_curves(bench, unit)
                for unit in ("queries", "requests", "tokens")
            },
        )


class _Plan:
    """The required trials and their results so far."""

    def __init__(self, settings: Settings, results: Results) -> None:
        self.settings, self.results = settings, results
        self.scale = _scale(settings)
        self.methods, named_methods = chosen_methods(settings)
        self.chosen, named_variants = chosen_variants(settings)
        self._all_named = named_methods and named_variants
        looks = () if named_variants or settings.quick else GLUE_VARIANTS
        self._looks = [one for one in looks if _has_data(settings, one)]

    @property
    def variants(self) -> list[Variant]:
        """The selected variants, and the tasks whose bare model is above chance."""
        return [*self.chosen, *(one for one in self._looks if self._above_chance(one))]

    def trials(self) -> list[Trial]:
        """The trials that are known to be required."""
        found = {
            trial.key: trial for one in self._looks if (trial := self._no_prompt(one, PILOTS[0]))
        }
        for seed in range(self.settings.seeds):
            for variant in self.variants:
                for trial in self._of_seed(variant, seed):
                    found.setdefault(trial.key, trial)
        return list(found.values())

    def bench(self) -> BenchResults:
        """The results so far."""
        return BenchResults(
            marks=self.scale.marks,
            default=DEFAULT,
            variants=[found for one in self.variants if (found := self._variant(one)).runs],
            skipped={
                one.name: self.results[key]
                for one in self._looks
                if (key := _no_prompt_key(one, PILOTS[0])) in self.results
                and not self._above_chance(one)
            },
        )

    def _of_seed(self, variant: Variant, seed: int) -> list[Trial]:
        found = []
        taking_part = self._contestants(variant)
        for name in self.methods:
            if name in CONTESTANTS:
                if name in taking_part:
                    key, contestant = _key(variant, name, seed), CONTESTANTS[name]
                    found.append(
                        contest_trial(key, self.settings, self.scale, variant, contestant, seed)
                    )
            elif name == "oracle":
                if seed == 0:
                    found.append(self._oracle(VARIANTS[variant.base]))
            else:
                found.append(self._no_prompt(VARIANTS[variant.twin], seed))
        return found

    def _contestants(self, variant: Variant) -> list[str]:
        return [
            name
            for name in self.methods
            if name in CONTESTANTS
            and (self._all_named or takes_part(name, variant))
            and (variant.attack is None or can_be_attacked(CONTESTANTS[name]))
        ]

    # Baselines

    def _no_prompt(self, twin: Variant, seed: int) -> Trial:
        run = self._bare(twin, seed)
        key = _no_prompt_key(twin, seed)
        return no_prompt_trial(key, self.settings, twin.task, run, self.scale.bias_rows)

    def _oracle(self, base: Variant) -> Trial:
        effort = dict(_QUICK_EFFORT) if self.settings.quick else {}
        if (asked := self.settings.options.get("generations")) is not None:
            effort["generations"] = _whole("generations", asked)
        run = self._bare(base, 0, prompt_len=CONTESTANTS[DEFAULT].prompt_len)
        return oracle_trial(_oracle_key(base), self.settings, base.task, run, effort)

    def _bare(self, variant: Variant, seed: int, prompt_len: int = 8) -> dict[str, Any]:
        """Return the run that determines the clients' rows and the candidates, for any method."""
        nothing = Contestant(
            label="no method", method={"name": "gs-bdpl", "num_samples": 2}, blank=True,
            prompt_len=prompt_len,
        )  # fmt: skip
        run = contest_document(self.settings, self.scale, variant, nothing, seed)
        # Independent of the marks, which would otherwise repeat the trial.
        return {**run, "budget": None, "rounds": 1}

    def _above_chance(self, variant: Variant) -> bool:
        found = self.results.get(_no_prompt_key(variant, PILOTS[0]))
        return found is not None and found["interval"][0] > found["majority"]

    # Results

    def _variant(self, variant: Variant) -> VariantResults:
        base, twin = VARIANTS[variant.base], VARIANTS[variant.twin]
        runs = {
            name: Runs(
                label=CONTESTANTS[name].label,
                by_seed=self._by_seed(lambda seed, name=name: _key(variant, name, seed)),
            )
            for name in self._contestants(variant)
        }
        shown = set(self.methods)
        return VariantResults(
            variant=variant,
            runs={name: found for name, found in runs.items() if found.by_seed},
            no_prompt=self._by_seed(lambda seed: _no_prompt_key(twin, seed))
            if shown & set(STANDALONE[:2])
            else {},
            oracle=self.results.get(_oracle_key(base)),
        )

    def _by_seed(self, key: Any) -> dict[int, Result]:
        return {
            seed: self.results[key(seed)]
            for seed in range(self.settings.seeds)
            if key(seed) in self.results
        }


def _has_data(settings: Settings, variant: Variant) -> bool:
    return settings.data is not None and (settings.data / variant.task / "train.jsonl").is_file()


def _key(variant: Variant, name: str, seed: int) -> str:
    return f"{variant.name}_{name}_s{seed}"


def _no_prompt_key(twin: Variant, seed: int) -> str:
    return f"{twin.name}_no-prompt_s{seed}"


def _oracle_key(base: Variant) -> str:
    return f"{base.name}_oracle"


def _scale(settings: Settings) -> Scale:
    marks: tuple[int, ...] = _QUICK_MARKS if settings.quick else _MARKS
    if (asked := settings.options.get("marks")) is not None:
        marks = tuple(_whole("marks", text) for text in asked.split(","))
        if list(marks) != sorted(set(marks)):
            raise SpecError(f"--set marks: {asked} must rise", source="arguments")
    if not settings.quick:
        return Scale(marks=marks)
    return Scale(
        marks=marks,
        num_clients=4,
        shots=4,
        vocab_size=20,
        bias_rows=32,
        method=(("num_samples", 4), ("batch_size", 4)),
        prompt_len=3,
    )


def _whole(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise SpecError(
            f"--set {name}: {text!r} is not a whole number of at least 1", source="arguments"
        )
    return number
