"""Prompts of slots, from the run to the device and back: exchanges, wire, growth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fedone_sdk.aggregator import exported_run
from fedone_sdk.aggregator.http.run_routes import likeliest
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.backends import LLMBackend, ModelClient
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, SpecError, StoreUnavailable
from fedone_sdk.local import Federation, simulate
from fedone_sdk.messages import RunResult
from fedone_sdk.reports import artefact_of
from fedone_sdk.reports.source import ReportedRun, read_export
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.stores import Commit, MemoryStore
from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from fedone_sdk.vocabulary import LABELS, Vocabulary

SLOTS = [
    {"name": "instruction", "candidates": ["", "Judge it as {label:0} or {label:1}. ", "Hm. "]},
    {"name": "words", "candidates": ["", " so", " very"], "repeat": 2},
    {"name": "closing", "candidates": [" It was", " In short,"]},
    {"name": "labels", "candidates": [[" good", " bad"], {"0": " up", "1": " down"}]},
]


def spec_of(
    method: str = "gs-bdpl", exchange: str = "alpha", own_models: str | None = None, **more: Any
) -> RunSpec:
    prompt = more.pop("prompt", {"slots": SLOTS})
    participation = {"min_clients": 4, "exchange": exchange, "own_models": own_models}
    document = {
        "name": "slots",
        "task": {
            "template": "{instruction}{words} {text}{closing}",
            "labels": {"0": " no", "1": " yes"},
        },
        "prompt": prompt,
        "method": {"name": method, "num_samples": 6, "batch_size": 2},
        "participation": participation,
        "rounds": 6,
        **more,
    }
    return RunSpec.model_validate(document)


def federation_of(spec: RunSpec) -> Federation:
    shards = tuple(
        tuple({"text": f"text {client}-{row}", "label": row % 2} for row in range(4))
        for client in range(4)
    )
    return Federation(
        spec=spec,
        shards=shards,
        dev=shards[0],
        vocabulary=spec.prompt.build(spec.task),
        reused_rows=False,
    )


async def tuned(spec: RunSpec, backend: LLMBackend | None = None) -> RunResult:
    return await simulate(federation_of(spec), backend=backend or ScriptedBackend())


def test_the_run_names_slots_to_its_task() -> None:
    spec = spec_of()
    assert spec.task.slots == ("instruction", "words", "closing")
    assert spec.task.fields == ("text",)
    assert spec.prompt.length == 5
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("only", ["", "Well: "])
def test_a_slot_may_have_one_candidate(only: str) -> None:
    slots = [{**SLOTS[0], "candidates": [only]}, *SLOTS[1:]]
    spec = spec_of(prompt={"slots": slots})
    assert spec.prompt.build(spec.task).candidates_of("instruction") == (only,)


async def test_the_model_sees_what_the_slots_hold() -> None:
    backend = ScriptedBackend()
    result = await tuned(spec_of(), backend)
    texts = {"".join(part.text for part in query.inputs[0]) for query in backend.asked}
    words = {query.label_words for query in backend.asked}
    assert words == {(" no", " yes"), (" good", " bad"), (" up", " down")}
    assert any(text.startswith("Judge it as up or down. ") for text in texts)
    assert not any("{" in text for text in texts)
    assert all(text.endswith((" It was", " In short,")) for text in texts)
    assert result.prompt.slots is not None
    assert [slot.name for slot in result.prompt.slots] == ["instruction", "words", "closing"]
    assert result.prompt.text == "".join(slot.text for slot in result.prompt.slots)
    assert result.prompt.labels is not None
    assert json.loads(result.prompt.tokens[-1]) == list(result.prompt.labels.values())


async def served(
    spec: RunSpec,
    *,
    own: Callable[[], LLMBackend] | None = None,
    proposer: LLMBackend | None = None,
    gateway: LLMBackend | None = None,
) -> tuple[ReportedRun, Vocabulary]:
    """A run over HTTP, by clients that enrol in their order: its export, and its candidates."""
    federation = federation_of(spec)
    async with AsyncExitStack() as stack:
        loop = await stack.enter_async_context(
            LoopbackFederation(spec, federation.vocabulary, backend=gateway or ScriptedBackend())
        )
        await loop.aggregator.add_run(spec, federation.vocabulary, proposer=proposer)
        clients = []
        for shard in federation.shards:
            client = loop.client(shard, backend=None if own is None else own())
            clients.append(await stack.enter_async_context(client))
            await client.enrol()
        async with asyncio.TaskGroup() as group:
            working = [group.create_task(client.run_forever()) for client in clients]
            await loop.run.ended.wait()
            for task in working:
                task.cancel()
        data = await exported_run(loop.aggregator.service.store, loop.run.run_id)
        return read_export(data), loop.run.vocabulary


@pytest.mark.parametrize("exchange", ["alpha", "losses"])
async def test_a_device_with_its_own_model_fetches_the_slots(exchange: str) -> None:
    spec = spec_of("gs-bdpl", exchange, own_models="charged")
    by_gateway, _ = await served(spec)
    by_itself, _ = await served(spec, own=ScriptedBackend)
    assert by_gateway.result.alpha_sha256 == by_itself.result.alpha_sha256
    assert by_gateway.result.status == by_itself.result.status == "completed"


@pytest.mark.parametrize("method", ["gs-bdpl", "thompson"])
async def test_artefact(method: str) -> None:
    run, _ = await served(spec_of(method, "losses"))
    artefact = artefact_of(run)
    assert artefact.prompt.slots is not None
    assert artefact.prompt.text == "".join(slot.text for slot in artefact.prompt.slots)
    assert artefact.tuned_task.labels == artefact.prompt.labels


WRITTEN = '["Is it good?", "Say {label:0} or {label:1}!", "Is it good?", "Name the {colour}."]'


async def test_proposed_candidates_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the store is away for a moment when they are added."""
    commit, failures = MemoryStore.commit, [StoreUnavailable("away")]

    async def fail_once(store: MemoryStore, run_id: str, version: int, changes: Commit) -> None:
        if failures and json.loads(changes.document)["waiting"]:
            raise failures.pop()
        await commit(store, run_id, version, changes)

    monkeypatch.setattr("fedone_sdk.aggregator.runs.served_run._RETRY_S", 0)
    monkeypatch.setattr(MemoryStore, "commit", fail_once)
    scripted = ScriptedBackend(write=lambda inputs, most: WRITTEN)
    proposer = ModelClient(scripted)
    prompt = {
        "slots": SLOTS,
        "proposer": {"backend": {"kind": "onnx"}, "slot": "instruction", "every": 2},
    }
    spec = spec_of("thompson", "losses", "charged", prompt=prompt, rounds=30)
    models: list[ScriptedBackend] = []

    def own() -> LLMBackend:
        models.append(ScriptedBackend())
        return models[-1]

    run, vocabulary = await served(spec, own=own, proposer=proposer)
    assert vocabulary.candidates_of("instruction")[3:] == (
        "Is it good? ",
        "Say {label:0} or {label:1}! ",
    )
    asked = ["".join(part.text for part in each.inputs[0]) for one in models for each in one.asked]
    assert any(text.startswith("Is it good? ") for text in asked)
    # The model saw aggregates, and what it cost is in the run's account, apart from training.
    said = ["".join(part.text for part in query.inputs[0]) for query in scripted.asked]
    assert all("loss" in text for text in said)
    assert not any("text 0-" in text for text in said)
    assert run.result.evaluation.requests == len(scripted.asked)
    done = run.result.proposer
    assert done is not None
    assert done.spent == run.result.evaluation.without_queries()
    calls = len(scripted.asked)
    assert (done.calls, done.failed, done.added) == (calls, 0, 2)
    assert (failures, done.added + done.dropped) == ([], 4 * calls)


async def test_a_proposer_that_fails_costs_its_call_only() -> None:
    def fails(query: object) -> None:
        raise BackendError("out of order", usage=Usage(requests=1))

    prompt = {"slots": SLOTS, "proposer": {"backend": {"kind": "onnx"}, "every": 1}}
    scripted = ScriptedBackend(gate=fails)
    proposer = ModelClient(scripted)
    run, vocabulary = await served(spec_of("random", "losses", prompt=prompt), proposer=proposer)
    assert run.result.status == "completed"
    assert vocabulary.candidates_of("instruction") == tuple(SLOTS[0]["candidates"])
    assert run.result.evaluation.requests == len(scripted.asked)
    done = run.result.proposer
    assert done is not None
    assert (done.calls, done.failed, done.added) == (len(scripted.asked),) * 2 + (0,)
    assert "out of order" in str(done.failure)


def test_a_proposer_needs_a_pool() -> None:
    prompt = {"slots": SLOTS, "proposer": {"backend": {"kind": "onnx"}}}
    with pytest.raises(ValueError, match="tpe, not gs-bdpl"):
        spec_of("gs-bdpl", "losses", prompt=prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"slots": SLOTS, "vocabulary": {"kind": "pmi"}}, "replaces vocabulary"),
        ({"slots": SLOTS, "length": 4}, "length: must be 5, the number of positions"),
        ({"slots": [SLOTS[0], SLOTS[0]]}, "two have the same name"),
        ({"slots": [SLOTS[3]]}, "needs a slot besides labels"),
        ({"slots": [{"name": "mask", "candidates": ["a", "b"]}]}, "must not be prompt or mask"),
        ({"slots": [{"name": "labels", "candidates": {"kind": "pmi"}}]}, "and only there"),
        ({"slots": [SLOTS[0], SLOTS[2]]}, r"needs \{closing\} exactly once"),
    ],
)
def test_impossible_slots(prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        validate_spec(
            RunSpec,
            {
                "task": {"template": "{instruction}{words} {text}", "labels": {0: "a", 1: "b"}},
                "prompt": prompt,
            },
            source="run.yaml",
        ).prompt.build(spec_of().task)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([[" good"]], "has 1 label words, needs 2"),
        ([{"0": " good", "2": " bad"}], "the task has the labels 0, 1"),
        ([[" good", " "]], "is blank"),
    ],
)
def test_label_sets_that_do_not_fit(sets: Sequence[Any], message: str) -> None:
    slots = [*SLOTS[:3], {"name": LABELS, "candidates": sets}]
    spec = spec_of(prompt={"slots": slots})
    with pytest.raises(SpecError, match=message):
        spec.prompt.build(spec.task)


async def test_the_dashboard_names_the_candidates_of_each_position() -> None:
    spec = spec_of("gs-bdpl", "losses")
    vocabulary = spec.prompt.build(spec.task)
    alpha = RoundMachine.of("run", spec, vocabulary).initial_state().method.alpha
    positions = likeliest(alpha, vocabulary, 8)
    assert [len(position.tokens) for position in positions] == [3, 3, 3, 2, 3]
    for position in positions:
        assert sum(token.probability for token in position.tokens) == pytest.approx(1.0, abs=1e-4)
