"""Pools of prompts: several clients per round, and what a server refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedone_sdk.aggregator import RoundMachine, ServedRun
from fedone_sdk.aggregator.rounds.seats import assign, fill
from fedone_sdk.aggregator.rounds.updates import accept
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.local import Federation, simulate
from fedone_sdk.local.federation import Watcher
from fedone_sdk.messages import AlphaAssignment, AlphaUpdate, RunResult, Scored
from fedone_sdk.messages.ndarray import to_wire
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
                "race": 0,  # which the alpha exchange has none of
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
    return await simulate(federation, backend=ScriptedBackend(), transport="memory", watch=watch)


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
        ({"clients_per_round": 2, "exchange": "alpha"}, 1, "clients_per_round"),
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


@pytest.mark.parametrize(
    "memory",
    [
        {"prompts": np.array([[0, 1, 9]]), "total": np.array([0.1]), "count": np.array([1])},
        {"prompts": np.array([[0, 1, 2]]), "total": np.array([0.1, 0.2]), "count": np.array([1])},
        {"prompts": np.array([[0, 1, 2]]), "total": np.array([0.1]), "count": np.array([0])},
        {"prompts": np.array([[0, 1, 2]])},
    ],
    ids=["token out of range", "sizes differ", "never scored", "a part is missing"],
)
def test_a_malformed_pool_is_refused(memory: dict[str, Any]) -> None:
    machine = RoundMachine(
        "run", spec_of(min_clients=1, exchange="alpha"), vocab_size=len(WORDS), blank=0
    )
    seated = machine.step(machine.initial_state(), 0.0, fill, available={0: 4}).state
    assigned = machine.step(seated, 0.0, assign, client=0, assignment_id="a")
    assert isinstance(assigned.reply, AlphaAssignment)
    update = AlphaUpdate(
        num_examples=4,
        scored=Scored(scored=2),
        usage={},  # type: ignore[arg-type]
        model="m",
        alpha=assigned.reply.alpha,
        memory={name: to_wire(values) for name, values in memory.items()},
        mean_loss=0.5,
    )
    arrived = {"assignment_id": "a", "update": update, "body_sha256": "0"}
    with pytest.raises(ProblemError, match="memory"):
        machine.step(assigned.state, 1.0, accept, **arrived)  # type: ignore[arg-type]
