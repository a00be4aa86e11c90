"""Runs that are calibrated: what devices report, what is found of it, and what is measured."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.aggregator import ServedRun
from fedone_sdk.aggregator.rounds.run_state import decode_snapshot
from fedone_sdk.backends import predict
from fedone_sdk.data import draw_minibatch
from fedone_sdk.local import Federation, simulate
from fedone_sdk.losses import class_means, loss_terms
from fedone_sdk.messages import RunResult, RunTask, Score
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import SERVER, MemoryStore
from fedone_sdk.task import Part, Rendered, TaskSpec
from fedone_sdk.testing import ScriptedBackend, pseudo_log_probs
from fedone_sdk.vocabulary import Vocabulary
from tests.runs import (
    TASK,
    DyingTransport,
    RecordingTransport,
    memory_client,
    run_spec,
    serving,
    train,
)

WORDS = Vocabulary(candidates=(" good", "", " bad", " fine"))
NAMES = (" no", " yes", " so", " it", " be", " to")


def spec_of(
    *,
    kind: str = "labels",
    num_labels: int = 2,
    method: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunSpec:
    labels = {str(label): NAMES[label] for label in range(num_labels)}
    sections: dict[str, Any] = {
        "task": {**TASK, "labels": labels, "metric": "loss"},
        "participation": {"own_models": "trusted", "min_clients": 1},
        "calibration": kind,
        "rounds": 4,
        "evaluation": {"every": 2, "examples": 7},
        **more,
    }
    few = {"name": "random", "num_samples": 5, "batch_size": 8}
    return run_spec(method={**few, **(method or {})}, **sections)


def rows_of(name: str, count: int, num_labels: int = 2) -> list[dict[str, Any]]:
    return [{"text": f"{name} {n}", "label": n % num_labels} for n in range(count)]


def leaning(inputs: Rendered, words: Sequence[str]) -> tuple[float, ...] | None:
    """A model that likes the first label word too well, by 2 nats; and sometimes fails."""
    if any(part.text.endswith("7") for part in inputs):
        return None
    first, *others = pseudo_log_probs(inputs, words)
    return (first - 0.5, *(value - 2.5 for value in others))


@pytest.mark.parametrize("own", [False, True], ids=["through the gateway", "own model"])
@pytest.mark.parametrize(("num_labels", "groups"), [(2, 2), (3, 3), (6, 1)])
async def test_devices_report_the_right_numbers(num_labels: int, groups: int, own: bool) -> None:
    """Against losses by hand, with an example that the model fails on and one that is vetoed."""
    spec = spec_of(num_labels=num_labels, method={"batch_size": 12}, rounds=2)
    data = rows_of("text", 14, num_labels)
    backend = ScriptedBackend(leaning)
    async with serving(backend=None if own else backend) as service:
        run = await service.add_run(spec, WORDS)
        transport = RecordingTransport(service)
        options: dict[str, Any] = {"backend": backend} if own else {}
        async with memory_client(
            service,
            data=data,
            transport=transport,
            before_send=lambda text: None if text == "text 4" else text,
            **options,
        ) as client:
            await client.run_forever()
    assert run.state.status == "completed"
    assert len(transport.updates) == 2
    seen = set()
    for work, update in zip(transport.works, transport.updates, strict=True):
        drawn = [data[index] for index in draw_minibatch(14, 12, work.minibatch_seed)]
        kept = [row for row in drawn if row["text"] not in ("text 4", "text 7")]
        seen.add(len(kept))
        targets = [row["label"] for row in kept]
        assert update.class_counts == tuple(targets.count(label) for label in range(num_labels))
        assert update.scored.scored == len(kept)
        assert update.by_class is not None
        assert work.biases is not None
        assert update.by_class.shape == (5, groups, 2 + num_labels)
        found = iter(update.by_class.values())
        prompts = zip(work.prompts.rows(), work.biases.rows(), update.losses, strict=True)
        for prompt, bias, loss in prompts:
            shown, task = WORDS.text(list(map(int, prompt))), spec.task.with_bias(bias)
            terms = [
                loss_terms(task, pseudo(f"{shown} {row['text']} ", task.label_words), row["label"])
                for row in kept
            ]
            for value in itertools.chain(*class_means(terms, targets, groups)):
                assert next(found) == pytest.approx(value, rel=1e-6, abs=1e-6)
            mean = math.fsum(term[0] for term in terms) / len(terms)
            assert loss == pytest.approx(mean, rel=1e-6)
    first, second = (work.biases for work in transport.works)
    assert not any(first.values())
    assert any(second.values())
    assert min(seen) < 12


def pseudo(text: str, words: Sequence[str]) -> tuple[float, ...]:
    """What `leaning` says of a rendered text."""
    row = leaning((Part("text", text),), words)
    assert row is not None
    return row


BIG = {"num_samples": 40, "batch_size": 30}
"""Three requests to the gateway."""


async def resumed(folder: Path) -> tuple[RunResult, list[Score]]:
    """A device that exits during its work and continues it."""
    spec, data = spec_of(method=BIG, rounds=1), rows_of("row", 31)
    async with serving(backend=ScriptedBackend()) as service:
        run = await service.add_run(spec, WORDS)
        dying = DyingTransport(service, dies_at=3)
        where: dict[str, Any] = {"data": data, "state_dir": folder}
        async with memory_client(service, transport=dying, **where) as client:
            with pytest.raises(asyncio.CancelledError):
                await client.run_once()
        again = RecordingTransport(service)
        async with memory_client(service, transport=again, **where) as client:
            assert (await client.run_once()).outcome == "worked"
        await service.wait(run)
        return run.result(), again.scores


async def test_a_restarted_device_continues_with_its_state(tmp_path: Path) -> None:
    async with serving(backend=ScriptedBackend()) as service:
        run = await service.add_run(spec_of(method=BIG, rounds=1), WORDS)
        async with memory_client(service, data=rows_of("row", 31)) as client:
            await client.run_forever()
        undisturbed = run.result()
    result, scored = await resumed(tmp_path)
    assert len(scored) == 1
    assert result.alpha_sha256 == undisturbed.alpha_sha256
    assert result.prompt == undisturbed.prompt
    assert result.prompt.bias is not None


@pytest.mark.parametrize(
    "change",
    [
        {"task": {"loss": "hinge"}},
        {"task": {"labels": {str(n): f" w{n}" for n in range(5)}}},
        {"calibration": {"kind": "none"}},
    ],
)
async def test_a_server_that_asks_for_too_much_gets_nothing(change: dict[str, Any]) -> None:
    class Lying(RecordingTransport):
        async def task(self, credential: str, run_id: str) -> RunTask:
            document = (await super().task(credential, run_id)).model_dump()
            for key, value in change.items():
                document[key] = {**(document[key] or {}), **value}
            document["task_crc32"] = TaskSpec.model_validate(document["task"]).crc32
            return RunTask.model_validate(document)

    async with serving(backend=ScriptedBackend()) as service:
        await service.add_run(spec_of(), WORDS)
        transport = Lying(service)
        data = rows_of("row", 10)
        async with memory_client(service, data=data, transport=transport) as client:
            turn = await client.run_once()
        assert transport.updates == []
        assert turn.reason is not None
        assert "does not fit its" in turn.reason


def federation_of(spec: RunSpec, num_labels: int = 2) -> Federation:
    everybody = spec.participation.model_copy(update={"min_clients": 4})
    spec = spec.model_copy(update={"participation": everybody})
    shards = tuple(tuple(rows_of(f"client {client}", 12, num_labels)) for client in range(4))
    return Federation(
        spec=spec,
        shards=shards,
        dev=tuple(rows_of("dev", 21, num_labels)),
        vocabulary=WORDS,
        reused_rows=False,
    )


async def test_a_calibrated_run_stores_its_pool() -> None:
    store = MemoryStore()
    await store.open()
    federation, backend = federation_of(spec_of()), ScriptedBackend(leaning)
    result = await simulate(federation, backend=backend, store=store)
    assert result.status == "completed"
    assert result.prompt.bias is not None
    # A rollback would find the earlier pool, curves and all.
    stored = [await store.memory("run", SERVER, number) for number in (2, 4)]
    then, last = (decode_snapshot(arrays) for arrays in stored if arrays is not None)
    assert len(then.memory["rows"]) < len(last.memory["rows"])


@pytest.mark.parametrize("num_labels", [2, 6])
async def test_noised_reports_find_the_bias_of_a_model_that_leans(num_labels: int) -> None:
    spec = spec_of(num_labels=num_labels, privacy={"clip": 4.0, "noise_multiplier": 0.2}, rounds=30)
    federation = federation_of(spec, num_labels)
    result = await simulate(federation, backend=ScriptedBackend(leaning))
    assert result.status == "completed"
    assert result.privacy is not None
    bias = result.prompt.bias
    assert bias is not None
    assert bias[0] == 0.0
    # The model leans to the first label by 2 nats; the noise is the operating system's.
    assert 0.3 < sum(bias[1:]) / (num_labels - 1) < 5.0


async def measured(spec: RunSpec, prompt: str, bias: Sequence[float] | None, **more: Any) -> Any:
    """What `fedone score` would find on the dev split."""
    task = spec.task.with_bias(bias)
    found = await predict(ScriptedBackend(leaning), task, prompt, rows_of("dev", 21), 8, **more)
    return found.metric


async def trained(spec: RunSpec) -> tuple[RunResult, ServedRun]:
    async with serving(backend=ScriptedBackend(leaning)) as service:
        run = await service.add_run(spec, WORDS, dev=rows_of("dev", 21))
        await train(service, run, rows_of("client", 12))
        return run.result(), run


async def test_the_prompt_is_measured_with_its_bias() -> None:
    spec = spec_of()
    result, run = await trained(spec)
    bias = result.prompt.bias
    assert bias is not None
    assert len(bias) == 2
    # The model leans to the first label; the bias takes that back.
    assert bias[0] == 0.0
    assert bias[1] > 0.5
    assert result.metric.after == await measured(spec, result.prompt.text, bias)
    assert result.metric.after < await measured(spec, result.prompt.text, None)
    # No prompt and the untrained one are what they would be without any of this.
    assert result.metric.no_prompt == await measured(spec, "", None)
    untrained = run.prompt(run.machine.initial_state())
    assert untrained.bias is None
    assert result.metric.before == await measured(spec, untrained.text, None)
    assert [report.metric is not None for report in result.history] == [False, True, False, True]
    assert run.prompt() == result.prompt
