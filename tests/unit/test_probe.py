"""The duration of a run, from a probe of its first rounds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fedone_sdk.backends import Answer, Query
from fedone_sdk.backends.wrappers import BudgetedBackend, CachedBackend, Wrapper
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError
from fedone_sdk.local import Federation, plan_run, simulate
from fedone_sdk.local.probe import Burst, Probe, by_limits, by_probe, probe_run
from fedone_sdk.local.query_costs import longest_tokens
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
            "method": {"name": "evolution", "num_samples": 4, "batch_size": 3},
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
    plan = await plan_run(federation, backend=probed, probe=True, transport="memory", startup_s=2.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    run = await simulate(federation, backend=CachedBackend(model), transport="memory")
    took_s = loop.time() - began
    assert run.status == "completed"
    assert plan.duration is not None
    assert plan.duration.basis == "probe"
    assert plan.duration.seconds == pytest.approx(2.0 + took_s, rel=0.15)
    assert len(probed.asked) < len(model.asked) / 2
    assert plan.duration.probe_s < 6
    assert run.spent.prompt_tokens <= plan.most.prompt_tokens < plan.worst.prompt_tokens / 20


@on_virtual_time
async def test_a_slow_model_is_timed_by_one_query() -> None:
    model = Local(query_s=60.0)
    found = await probe_run(federation_of(), model, transport="memory")
    assert [burst.queries for burst in found.training] == [1]
    assert found.seconds == pytest.approx(60.0)
    assert not found.evaluation
    assert found.startup_s == pytest.approx(60.0)  # The first pass, which is not measured.
    assert found.round_s == 0.0
    assert len(model.asked) <= 3


@on_virtual_time
async def test_a_short_run_is_timed_to_its_end() -> None:
    model = Local(query_s=0.01)
    found = await probe_run(federation_of(rounds=2), model, transport="memory")
    assert sum(burst.queries for burst in found.training) <= 8
    assert sum(burst.queries for burst in found.evaluation) == 14
    assert found.seconds == pytest.approx(0.01 * found.queries)


@on_virtual_time
async def test_a_model_that_fails_is_a_warning() -> None:
    asked = 0

    def gate(query: Query) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise BackendError("out of memory")

    plan = await plan_run(
        federation_of(), backend=Local(query_s=0.1, gate=gate), probe=True, transport="memory"
    )
    assert plan.duration is None
    assert plan.warnings[0] == "backend: the probe failed: out of memory"


@pytest.mark.parametrize("min_clients", [None, 9])
@on_virtual_time
async def test_clients_that_do_not_come_are_not_waited_for(min_clients: int | None) -> None:
    participation = (
        {"clients_per_round": 9, "exchange": "losses"}
        if min_clients is None
        else {"min_clients": 9}
    )
    federation = federation_of(participation=participation)
    plan = await plan_run(federation, backend=Local(query_s=0.1), probe=True, transport="memory")
    if min_clients is None:
        assert plan.duration is None
        assert plan.warnings[0] == "backend: the probe failed: no query was asked"
    else:
        assert plan.duration is not None
    assert asyncio.get_running_loop().time() < 1100


@on_virtual_time
async def test_wrappers_take_no_part_in_a_probe() -> None:
    model = Local(query_s=0.1)
    cached = CachedBackend(BudgetedBackend(model))
    assert cached.local
    plan = await plan_run(federation_of(), backend=cached, probe=True, transport="memory")
    assert plan.duration is not None
    assert model.asked
    assert (cached.hits, cached.misses) == (0, 0)


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
    assert (plan.most == plan.worst) is not local


# The arithmetic


def bursts(*pairs: tuple[int, int, float]) -> tuple[Burst, ...]:
    return tuple(Burst(queries=q, tokens=t, seconds=s) for q, t, s in pairs)


@pytest.mark.parametrize(
    ("training", "seconds"),
    [
        (bursts((4, 100, 1.0), (4, 300, 3.0)), 50.0),  # by tokens: 0.01 s each
        (bursts((4, 100, 1.0), (8, 100, 2.0)), 25.0),  # by queries: 0.25 s each
        (bursts((4, 0, 1.0)), 25.0),  # a model that counts no tokens
    ],
)
def test_the_duration_uses_the_better_predictor(
    training: tuple[Burst, ...], seconds: float
) -> None:
    probe = Probe(startup_s=1.0, training=training, evaluation=(), round_s=0.5)
    assert probe.training_s(queries=100, tokens=5000, rounds=0) == pytest.approx(seconds)
    assert probe.training_s(queries=100, tokens=5000, rounds=10) == pytest.approx(seconds + 5.0)
    assert probe.evaluation_s(queries=100, tokens=5000) == pytest.approx(seconds)


def test_a_duration_is_the_sum_of_its_parts() -> None:
    probe = Probe(
        startup_s=1.5,
        training=bursts((10, 1000, 2.0)),
        evaluation=bursts((10, 1000, 1.0)),
        round_s=0.1,
    )
    found = by_probe(
        probe,
        startup_s=0.5,
        training=Usage(requests=100, prompt_tokens=10_000),
        evaluation=Usage(requests=50, prompt_tokens=4000, completion_tokens=1000),
        rounds=10,
    )
    assert (found.startup_s, found.training_s, found.evaluation_s) == (2.0, 21.0, 5.0)
    assert found.seconds == 28.0
    assert (found.probe_queries, found.probe_s) == (20, 3.0)


def test_the_rate_limits_of_a_hosted_model() -> None:
    backend = {
        "kind": "openai",
        "model": "m",
        "base_url": "http://127.0.0.1:1",
        "limits": {"requests_per_minute": 60, "tokens_per_minute": 1000},
    }
    spec = federation_of(backend=backend).spec
    found = by_limits(spec, Usage(requests=30, prompt_tokens=1500, completion_tokens=500))
    assert found is not None
    assert (found.basis, found.seconds) == ("rate_limits", 120.0)
    assert by_limits(federation_of().spec, Usage(requests=30)) is None


# The longest rows


async def test_the_longest_rows_and_candidates_bound_every_query() -> None:
    federation = federation_of(clients=2)
    found = await longest_tokens(federation, Local())
    # " very bad" is two words at each of two positions; the longest three rows of client 1; and one
    # more where prompt and row meet.
    assert found.query == (5 + 6 + 7) + 3 * 5
    words = sum(row % 7 for row in range(40))
    assert found.no_prompt == words
    assert found.whole == words + 40 * 5
    assert found.point == found.whole  # all 40 rows
    assert found.total(queries=10, points=2) == 330 + words + 4 * found.whole


async def test_no_row_is_longer_than_the_model_takes() -> None:
    class Short(Local):
        def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
            return Usage(queries=1, requests=1, prompt_tokens=5 * batch_size)

    found = await longest_tokens(federation_of(), Short())
    assert found.query == 15
