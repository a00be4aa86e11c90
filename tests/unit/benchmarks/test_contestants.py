from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.spec import RunSpec
from tests.benchmarks.queries.bench import BenchQueries
from tests.benchmarks.queries.contest import Scale, contest_document, contest_trial
from tests.benchmarks.queries.contestants import (
    BARS,
    BILLED_BARS,
    CONTESTANTS,
    DEFAULT,
    takes_part,
)
from tests.benchmarks.queries.variants import SST2_VARIANTS, VARIANTS, chosen_variants
from tests.unit.experiments.glue import sst2_folder

SCALE = Scale(marks=(100, 2000))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(data=sst2_folder(tmp_path_factory.mktemp("glue")), seeds=2)


def chosen(settings: Settings, **options: str) -> Settings:
    return replace(settings, options=options)


class TestContestants:
    @pytest.mark.parametrize("name", CONTESTANTS)
    def test_is_a_run(self, settings: Settings, name: str) -> None:
        contestant = CONTESTANTS[name]
        run = contest_document(settings, SCALE, SST2_VARIANTS[1], contestant, 3)
        spec = RunSpec.model_validate(run)
        assert spec.budget is not None
        assert (spec.budget.queries, spec.seed) == (contestant.queries or 2000, 3)
        assert spec.data is not None
        assert spec.data.partition.kind == "dirichlet"
        assert spec.prompt.length == contestant.prompt_len
        assert spec.calibration.kind == contestant.calibration

    def test_the_papers_settings(self, settings: Settings) -> None:
        run = contest_document(settings, SCALE, SST2_VARIANTS[0], CONTESTANTS["gs-bdpl-paper"], 0)
        spec = RunSpec.model_validate(run)
        method = spec.method
        assert method.name == "gs-bdpl"
        assert (method.num_samples, method.batch_size, method.tau) == (20, 32, 0.1)
        assert (method.learning_rate, method.optimizer) == (3e-4, "adamw")
        assert (spec.prompt.length, spec.participation.exchange) == (20, "alpha")
        assert spec.participation.server_optimizer == "none"
        assert spec.prompt.vocabulary is not None
        assert not getattr(spec.prompt.vocabulary, "blank", True)

    def test_bars_are_contestants_and_the_default_is_ours(self) -> None:
        assert BARS.keys() <= CONTESTANTS.keys()
        assert BILLED_BARS.keys() <= BARS.keys()
        assert CONTESTANTS[DEFAULT].ours

    def test_the_default_ends_early_and_a_lower_cap_of_the_bench_counts(
        self, settings: Settings
    ) -> None:
        for last, cap in ((2000, 500), (100, 100)):
            scale = Scale(marks=(50, last))
            run = contest_document(settings, scale, SST2_VARIANTS[0], CONTESTANTS[DEFAULT], 0)
            assert (run["budget"], run["rounds"]) == ({"queries": cap}, cap // 10)


class TestVariants:
    def test_sst2_has_three_pairs_two_templates_two_partitions(self) -> None:
        documents = [one.task_document() for one in SST2_VARIANTS]
        assert len(documents) == 12
        assert len({tuple(one["labels"].values()) for one in documents}) == 3
        assert len({one["template"] for one in documents}) == 2
        assert sum(one.dirichlet == 0.1 for one in SST2_VARIANTS) == 6

    @pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
    def test_twins_differ_in_nothing_else(self, variant: object) -> None:
        assert isinstance(variant, type(SST2_VARIANTS[0]))
        twin, base = VARIANTS[variant.twin], VARIANTS[variant.base]
        assert (twin.clients_per_round, twin.attack, twin.dirichlet) == (1, None, variant.dirichlet)
        assert (base.clients_per_round, base.attack, base.dirichlet) == (1, None, None)
        assert twin.task_document() == base.task_document() == variant.task_document()

    def test_patterns_keep_their_order_and_bring_twins(self, settings: Settings) -> None:
        asked = "sst2-bad-film-dir0.1-inverted,sst2-boring-*-iid"
        found, named = chosen_variants(chosen(settings, variants=asked))
        assert named
        assert [one.name for one in found] == [
            "sst2-bad-film-dir0.1",
            "sst2-bad-film-dir0.1-inverted",
            "sst2-boring-was-iid",
            "sst2-boring-film-iid",
        ]

    def test_who_takes_part(self) -> None:
        honest, liars = VARIANTS["sst2-bad-was-iid"], VARIANTS["sst2-bad-was-iid-inverted"]
        parallel = VARIANTS["sst2-terrible-was-iid-k10"]
        assert takes_part("gs-bdpl-paper", honest)
        assert not takes_part("gs-bdpl-paper", parallel)
        assert takes_part("evolution", parallel)
        assert not takes_part("evolution", liars)
        assert takes_part(DEFAULT, liars)


def keys(settings: Settings, results: Mapping[str, object] | None = None) -> list[str]:
    found: dict[str, object] = dict(results or {})
    return [trial.key for trial in BenchQueries().trials(settings, found)]  # type: ignore[arg-type]


class TestTrials:
    def test_seed_by_seed_in_the_order_asked_for(self, settings: Settings) -> None:
        asked = chosen(
            settings, variants="sst2-bad-was-iid,sst2-terrible-was-iid", methods="evolution,default"
        )
        assert keys(asked) == [
            f"{variant}_{method}_s{seed}"
            for seed in (0, 1)
            for variant in ("sst2-bad-was-iid", "sst2-terrible-was-iid")
            for method in ("evolution", DEFAULT)
        ]

    def test_marks_do_not_concern_what_is_not_tuned(self, settings: Settings) -> None:
        def trials(marks: str) -> list[object]:
            asked = chosen(
                settings,
                variants="sst2-bad-was-iid",
                methods="no-prompt,oracle",
                marks=marks,
            )
            return [trial.options for trial in BenchQueries().trials(asked, {})]

        assert trials("100,500") == trials("50")

    def test_the_bare_model_is_calibrated_on_the_same_clients(self, settings: Settings) -> None:
        asked = chosen(settings, variants="sst2-bad-was-dir0.1-random", methods="no-prompt")
        (trial,) = (one for one in BenchQueries().trials(asked, {}) if one.key.endswith("_s0"))
        assert trial.key == "sst2-bad-was-dir0.1_no-prompt_s0"
        assert trial.options["run"]["data"]["partition"]["kind"] == "dirichlet"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"methods": "magic"}, "--set methods: there is no 'magic'; no-prompt, "),
            ({"variants": "sst3-*"}, "--set variants: there is no 'sst3-\\*'; sst2-"),
            ({"marks": "100,50"}, "--set marks: 100,50 must rise"),
            ({"marks": "few"}, "--set marks: 'few' is not a whole number of at least 1"),
            ({"methods": "oracle", "generations": "0"}, "--set generations: '0' is not a whole"),
        ],
    )
    def test_mistakes(self, settings: Settings, options: dict[str, str], message: str) -> None:
        with pytest.raises(SpecError, match=message):
            keys(chosen(settings, **options))

    def test_liars_bring_their_twin_and_need_losses(self, settings: Settings) -> None:
        asked = chosen(
            settings, variants="sst2-bad-was-iid-inverted", methods="gs-bdpl-paper,default"
        )
        twin = "sst2-bad-was-iid"
        assert keys(replace(asked, seeds=1)) == [
            f"{twin}_gs-bdpl-paper_s0",
            f"{twin}_{DEFAULT}_s0",
            f"{twin}-inverted_{DEFAULT}_s0",
        ]

    def test_nobody_lies_with_alpha(self, settings: Settings) -> None:
        liars = VARIANTS["sst2-bad-was-iid-inverted"]
        with pytest.raises(SpecError, match="attacks need the losses exchange"):
            contest_trial("one", settings, SCALE, liars, CONTESTANTS["gs-bdpl-paper"], 0)


def test_a_task_joins_once_the_model_is_above_its_majority(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "mrpc").mkdir()
    for part in ("train", "dev"):
        (tmp_path / "mrpc" / f"{part}.jsonl").write_text("{}\n")
        (tmp_path / "sst2").mkdir(exist_ok=True)
        (tmp_path / "sst2" / f"{part}.jsonl").write_text("{}\n")
    asked = replace(settings, data=tmp_path, options={"methods": DEFAULT}, seeds=1)
    look = "mrpc-iid_no-prompt_s9001"
    found = keys(asked)
    assert look in found
    assert not any(key.startswith("rte") for key in found)
    assert f"mrpc-iid_{DEFAULT}_s0" not in found
    for low, joins in ((0.66, True), (0.64, False)):
        results = {look: {"interval": [low, 0.8], "majority": 0.65}}
        assert (f"mrpc-iid_{DEFAULT}_s0" in keys(asked, results)) is joins
