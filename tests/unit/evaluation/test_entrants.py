from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.errors import SpecError
from fedone_sdk.evaluation.results import Entrant
from fedone_sdk.local import Federation
from fedone_sdk.local.comparison import METHODS, Contest, default_names, entrants_of
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.vocabulary import Vocabulary

RUN: dict[str, Any] = {
    "name": "tiny",
    "task": {"template": "{prompt} {text} {mask}", "labels": {0: " bad", 1: " good"}},
    "data": {"train": "train.jsonl", "dev": "dev.jsonl", "num_clients": 4},
    "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": [" a", " b"]}},
    "method": {"name": "thompson", "num_samples": 6, "batch_size": 8, "halving": 0.1},
    "participation": {"exchange": "losses"},
    "budget": {"queries": 30},
    "rounds": 10,
}


def entrants(document: dict[str, Any], *names: str) -> list[Entrant]:
    base = validate_spec(RunSpec, document, source="run.yaml")
    return entrants_of(document, base, names)


def test_settings_that_a_method_has_are_taken_over() -> None:
    own, random, gs_bdpl = entrants(RUN, "thompson", "random", "gs-bdpl")
    assert own.notes == random.notes == ()
    settings = random.spec.method.model_dump()
    assert (settings["num_samples"], settings["halving"]) == (6, 0.1)
    settings = gs_bdpl.spec.method.model_dump()
    assert (settings["num_samples"], settings["batch_size"], settings["tau"]) == (6, 8, 0.1)
    # A bias is found by methods with a pool alone.
    assert own.spec.calibration.kind == "labels"
    assert gs_bdpl.spec.calibration.kind == "none"
    assert gs_bdpl.notes == ('calibration.kind "labels" -> "none"',)
    assert {one.spec.budget for one in (own, random, gs_bdpl)} == {own.spec.budget}


def test_settings_of_another_method_are_dropped() -> None:
    document = {
        **RUN,
        "method": {"name": "gs-bdpl", "num_samples": 4, "learning_rate": 0.1, "tau": 0.5},
        "evaluation": {"every": 3},
    }
    bdpl, random = entrants(document, "bdpl", "random")
    assert bdpl.notes == ()
    assert bdpl.spec.method.model_dump()["learning_rate"] == 0.1
    assert random.spec.method.num_samples == 4
    assert random.spec.evaluation.every == 3


def test_a_seed_changes_nothing_else() -> None:
    (one,) = entrants(RUN, "random")
    assert one.seeded(7) == one.spec.model_copy(update={"seed": 7})


@pytest.mark.parametrize(
    ("budget", "most", "biased"),
    [({"queries": 30}, 30, 10), ({"queries": 100}, 60, 10), ({"queries": 7}, 7, 7)],
)
def test_queries_of_a_trial(budget: dict[str, int], most: int, biased: int) -> None:
    def queries(entrant: Entrant) -> int:
        shards = (({},) * 200,)
        federation = Federation(
            spec=entrant.spec,
            shards=shards,
            dev=(),
            vocabulary=Vocabulary(candidates=(" a", " b")),
            reused_rows=False,
        )
        contest = Contest(entrant=entrant, federation=federation, folder=Path(), cache=Path())
        return contest.training_queries

    found = entrants({**RUN, "budget": budget}, "random", "no-prompt", "no-prompt-bias")
    assert [queries(entrant) for entrant in found] == [most, 0, biased]


def test_default() -> None:
    base = validate_spec(RunSpec, RUN, source="run.yaml")
    assert default_names(base) == ("thompson", "random", "gs-bdpl", "no-prompt", "no-prompt-bias")
    hinge = {**RUN, "task": {**RUN["task"], "loss": "hinge"}}
    base = validate_spec(RunSpec, hinge, source="run.yaml")
    assert default_names(base) == ("thompson", "random", "gs-bdpl", "no-prompt")
    # What is proposed can be run.
    entrants(hinge, *default_names(base))
    assert {"gs-bdpl", "bdpl", "random", "thompson"} <= set(METHODS)


@pytest.mark.parametrize(
    ("names", "change", "message"),
    [
        (["magic"], {}, "--methods: 'magic' is not known; allowed: gs-bdpl, "),
        (["random", "random"], {}, "--methods: each name may occur only once"),
        ([], {}, "--methods: each name may occur only once"),
        (
            ["no-prompt-bias"],
            {"task": {**RUN["task"], "bias": [0, 1]}},
            "--methods: no-prompt-bias needs a task without its own bias",
        ),
        (
            ["random"],
            {
                "method": {"name": "gs-bdpl"},
                "participation": {"clients_per_round": 2, "exchange": "alpha"},
            },
            "--methods: random cannot run RUN.yaml (participation.exchange: ",
        ),
    ],
)
def test_mistakes(names: list[str], change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        entrants({**RUN, **change}, *names)
    assert str(error.value).startswith(f"arguments: {message}")
    assert "\n" not in str(error.value)
