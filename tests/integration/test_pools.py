"""Pools of prompts: several clients per round, and what a server refuses."""

from __future__ import annotations

from typing import Any

import pytest

from fedone_sdk.aggregator import ServedRun
from fedone_sdk.errors import SpecError
from fedone_sdk.local import Federation, simulate
from fedone_sdk.local.federation import Watcher
from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary

WORDS = ("", " good", " bad", " very", " not", " so")


def spec_of(*, local_steps: int = 1, **participation: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "task": {"template": "{text}{prompt}", "labels": {0: " no", 1: " yes"}},
            "prompt": {"length": 3, "vocabulary": {"kind": "list", "candidates": WORDS}},
            "method": {
                "name": "random",
                "num_samples": 6,
                "batch_size": 2,
                "race": 0,
                "local_steps": local_steps,
            },
            "participation": {"min_clients": 4, **participation},
            "rounds": 8,
        }
    )


async def run(spec: RunSpec, watch: Watcher | None = None) -> RunResult:
    shards = tuple(
        tuple({"text": f"text {client}-{row}", "label": row % 2} for row in range(4))
        for client in range(4)
    )
    federation = Federation(
        spec=spec,
        shards=shards,
        dev=(),
        vocabulary=Vocabulary(candidates=WORDS),
        reused_rows=False,
    )
    return await simulate(federation, backend=ScriptedBackend(), watch=watch)


async def test_several_clients_a_round_feed_one_pool() -> None:
    mini_batches = 0

    def watch(served: ServedRun, effect: object) -> None:
        nonlocal mini_batches
        mini_batches = len(served.state.method.memory.get("examples", ()))

    first = await run(spec_of(exchange="losses", clients_per_round=3))
    again = await run(spec_of(exchange="losses", clients_per_round=3), watch)
    assert first.spent.queries == 8 * 6 * 3
    assert first.alpha_sha256 == again.alpha_sha256
    assert mini_batches == 8 * 3


@pytest.mark.parametrize(
    ("participation", "local_steps", "key"),
    [
        ({"exchange": "alpha"}, 1, "exchange"),
        ({"clients_per_round": 2, "exchange": "losses"}, 2, "clients_per_round"),
    ],
)
def test_what_pools_cannot_do_is_refused(
    participation: dict[str, Any], local_steps: int, key: str
) -> None:
    with pytest.raises(ValueError, match=f"participation.{key}"):
        spec_of(local_steps=local_steps, **participation)


def test_a_small_pool_is_one_clear_line() -> None:
    document = spec_of().model_dump()
    document["method"]["race"] = 1
    with pytest.raises(SpecError, match=r"^run.yaml: method.race: ") as caught:
        validate_spec(RunSpec, document, source="run.yaml")
    assert "\n" not in str(caught.value)
