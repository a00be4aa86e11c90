"""What a run costs and how long it takes, before it is paid for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from fedone_sdk.backends import Answer, AnswerCache, ModelClient, Query, Wrapper
from fedone_sdk.budget import Price, Usage
from fedone_sdk.errors import BackendError
from fedone_sdk.local import Federation, plan_run, simulate
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.virtual_time import on_virtual_time

WORDS = Vocabulary(candidates=(" good", "", " very bad", " fine"))
MANY = Vocabulary(candidates=tuple(f" word{number}" for number in range(50)))
"""So many that no prompt is asked about twice."""


def federation_of(*, rounds: int = 20, clients: int = 3, **more: Any) -> Federation:
    spec = RunSpec.model_validate(
        {
            "name": "probed",
            "task": {"template": "{text}{prompt} {mask}", "labels": {"0": " no", "1": " yes"}},
            "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": [" a", " b"]}},
            "method": {"name": "gs-bdpl", "num_samples": 4, "batch_size": 3},
            "participation": {"exchange": "alpha"},
            "budget": {"queries": 4 * rounds},
            "rounds": rounds,
            "evaluation": {"every": 0},
            "backend": {"kind": "onnx"},
            **more,
        }
    )
    shards = tuple(
        tuple({"text": " w" * (1 + client + row), "label": row % 2} for row in range(6))
        for client in range(clients)
    )
    dev = tuple({"text": " w" * (row % 7), "label": row % 2} for row in range(40))
    return Federation(spec=spec, shards=shards, dev=dev, vocabulary=WORDS, reused_rows=False)


class Local(ScriptedBackend):
    """A local model: one query at a time, so many seconds for each word of it and once more."""

    local = True

    def __init__(self, *, word_s: float = 0.0, query_s: float = 0.0, **more: Any) -> None:
        super().__init__(**more)
        self._word_s, self._query_s = word_s, query_s
        self._turn = asyncio.Lock()

    async def score(self, query: Query) -> Answer:
        usage = await self.quote(query)
        async with self._turn:
            await asyncio.sleep(usage.prompt_tokens * self._word_s + self._query_s)
            self.answered_at = asyncio.get_running_loop().time()
        return replace(await super().score(query), usage=usage.without_queries())

    async def quote(self, query: Query) -> Usage:
        words = sum(len("".join(part.text for part in each).split()) for each in query.inputs)
        return Usage(queries=1, requests=1, prompt_tokens=words)

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        return Usage(queries=1, requests=1, prompt_tokens=1000 * batch_size)


@pytest.mark.parametrize("cost", [{"word_s": 0.004}, {"query_s": 0.15}], ids=str)
@on_virtual_time
async def test_the_plan_estimates_the_duration_of_the_run(cost: dict[str, float]) -> None:
    federation = replace(federation_of(rounds=40), vocabulary=MANY)
    probed, model = Local(**cost), Local(**cost)
    plan = await plan_run(federation, backend=probed, probe=True, startup_s=2.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    run = await simulate(federation, backend=ModelClient(model, cache=AnswerCache()))
    took_s = model.answered_at - began  # Virtual time also jumps to a deadline after the end.
    assert run.status == "completed"
    assert plan.duration is not None
    assert plan.duration.basis == "probe"
    assert plan.duration.seconds == pytest.approx(2.0 + took_s, rel=0.3)
    assert len(probed.asked) < len(model.asked)
    assert plan.duration.probe_s < 5
    assert run.spent.prompt_tokens <= plan.most.prompt_tokens


@on_virtual_time
async def test_a_slow_model_is_timed_by_one_query() -> None:
    model = Local(query_s=60.0)
    plan = await plan_run(federation_of(), backend=model, probe=True)
    assert plan.duration is not None
    assert (plan.duration.probe_queries, plan.duration.probe_s) == (1, pytest.approx(60.0))
    assert len(model.asked) == 2  # The first pass is not measured.


async def test_a_cap_of_nothing_pays_for_no_round() -> None:
    plan = await plan_run(federation_of(budget={"queries": 0}), backend=Local())
    assert plan.warnings[0].startswith("budget: cannot pay one round")


@on_virtual_time
async def test_a_model_that_fails_is_a_warning() -> None:
    def gate(query: Query) -> None:
        raise BackendError("out of memory")

    plan = await plan_run(federation_of(), backend=Local(query_s=0.1, gate=gate), probe=True)
    assert plan.duration is None
    assert plan.warnings[0] == "backend: the probe failed: out of memory"


@on_virtual_time
async def test_wrappers_take_no_part_in_a_probe() -> None:
    model = Local(query_s=0.1)
    cached = ModelClient(model, cache=AnswerCache())
    uneven = federation_of(clients=1).shards[0]
    shards = (uneven, uneven[:1])
    plan = await plan_run(replace(federation_of(), shards=shards), backend=cached, probe=True)
    assert plan.duration is not None
    assert model.asked
    assert cached.cache is not None
    assert (cached.cache.hits, cached.cache.misses) == (0, 0)


@pytest.mark.parametrize(
    ("local", "probe"), [(True, False), (False, True)], ids=["no probe", "hosted"]
)
@on_virtual_time
async def test_a_model_that_must_not_be_probed_is_not(local: bool, probe: bool) -> None:
    model = Local(query_s=0.1)
    model.local = local
    plan = await plan_run(federation_of(), backend=Wrapper(model), probe=probe)
    assert plan.duration is None
    assert not model.asked


async def test_the_rate_limits_of_a_hosted_model() -> None:
    backend = {"kind": "openai", "model": "m", "base_url": "http://127.0.0.1:1"}
    backend |= {"limits": {"requests_per_minute": 60}}
    plan = await plan_run(federation_of(backend=backend), backend=Local())
    assert plan.duration is not None
    assert plan.duration.basis == "rate_limits"
    assert plan.duration.seconds == pytest.approx(plan.expected.requests, abs=0.1)


# The proposer

SLOT = {"name": "instruction", "candidates": ["Judge.", "Decide now."]}


@pytest.mark.parametrize("kind", ["scores", "reflection"])
async def test_the_plan_includes_the_proposer(kind: str) -> None:
    """The run's proposals cost what was planned, although its own model is free."""
    calls = 0

    def write(_: object, max_tokens: int) -> str:
        nonlocal calls
        calls += 1
        return json.dumps([f"Say which, {calls}.", f"Look again, {calls}!"])

    proposer = {"kind": kind, "backend": {"kind": "onnx"}, "every": 2}
    prompt = {"slots": [SLOT], "proposer": proposer}
    task = {"template": "{instruction} {text} {mask}", "labels": {"0": " no", "1": " yes"}}
    federation = federation_of(
        rounds=12,
        prompt=prompt,
        task=task,
        method={"name": "thompson", "num_samples": 4, "batch_size": 3, "halving": 0},
        participation={"exchange": "losses"},
    )
    vocabulary = federation.spec.prompt.build(federation.spec.task, [])
    federation = replace(federation, vocabulary=vocabulary)
    written = ScriptedBackend(write=write)
    writer = ModelClient(written, price=Price(prompt=Decimal(1), completion=Decimal(1)))
    plan = await plan_run(federation, backend=Local(), proposer=writer)
    assert not written.asked
    # Not after the last round; one merge.
    assert plan.proposals == (most := 5 if kind == "scores" else 6)
    without = await plan_run(federation, backend=Local())
    assert "prompt.proposer: its cost is not included" in without.warnings
    run = await simulate(federation, backend=ModelClient(Local()), proposer=writer)
    assert run.spent.usd > 0
    assert plan.proposer is not None
    assert plan.expected.requests - without.expected.requests == most == plan.proposer.requests
    assert calls == 5 if kind == "scores" else 0 < calls <= most  # Not where all rows are right.
    assert run.spent.usd <= plan.most.usd
    assert without.most.usd == 0
