"""Evaluation next to training: its results, its costs, and that training never sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import structlog

from fedone_sdk.aggregator import ServedRun, exported_run
from fedone_sdk.aggregator.prometheus import Metrics
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.backends import Answer, AnswerCache, ModelClient, Query
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendBlocked, BackendUnavailable, StoreUnavailable
from fedone_sdk.messages import RunResult
from fedone_sdk.reports import artefact_of, read_export
from fedone_sdk.reports.pages import costs_of
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Rendered
from fedone_sdk.testing import ScriptedBackend
from tests.runs import WORDS, memory_client, run_spec, serving, train, until

TRAIN = [{"text": f"train {number}", "label": number % 2} for number in range(6)]
DEV = [{"text": f"dev {number}", "label": number % 2} for number in range(10)]


def spec_of(
    *, rounds: int = 4, evaluation: Mapping[str, Any] | None = None, **more: Any
) -> RunSpec:
    return run_spec(
        method={"batch_size": 4, "learning_rate": 0.01},
        rounds=rounds,
        evaluation={"every": 2, "examples": 5, **(evaluation or {})},
        **more,
    )


def text_of(inputs: Rendered) -> str:
    return "".join(part.text for part in inputs)


def is_dev(query: Query) -> bool:
    return "dev" in text_of(query.inputs[0])


async def test_the_result_has_a_verdict() -> None:
    """Also if another process measured no prompt; no query is sent for it."""
    store, backend = MemoryStore(), ScriptedBackend()
    async with serving(backend=backend, store=store) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        await until(lambda: run.state.metric.before is not None)
        assert run.result().verdict is None
    async with serving(backend=backend, store=store) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        (metrics := Metrics()).watch(service)
        biased = run.state.metric.no_prompt_biased
        assert biased is not None  # The fair baseline is there during the run.
        assert f'which="no_prompt_biased"}} {biased}' in metrics.exposition()[0].decode()
        await train(service, run, TRAIN)
        figures = metrics.exposition()[0].decode()
    result = run.result()
    assert sum(map(is_dev, backend.asked)) == 13
    verdict = result.verdict
    assert verdict is not None
    assert (verdict.source, verdict.examples, verdict.bias_from) == ("dev", 10, "dev")
    values = {one.name: one.value for one in verdict.standings}
    assert verdict.against is not None
    gain = verdict.standing(verdict.against).gain  # type: ignore[union-attr]
    assert gain is not None
    for bound in ("value", "low", "high"):
        assert f'fedone_run_gain{{bound="{bound}",run="run"}} {getattr(gain, bound)}' in figures
    assert f'fedone_run_metric{{run="run",which="tuned"}} {values["tuned"]}' in figures
    assert 'fedone_run_spent_usd{run="run"} 0.0' in figures
    assert list(values) == ["chance", "no_prompt", "no_prompt_biased", "untrained", "tuned"]
    metric = result.metric
    assert (values["no_prompt"], values["untrained"]) == (metric.no_prompt, metric.before)
    assert (values["chance"], values["tuned"]) == (0.5, metric.after)
    assert verdict.text
    # It comes back from JSON, and from the store.
    assert RunResult.model_validate_json(result.model_dump_json()) == result
    assert run.prompt(run.state) == result.prompt
    async with serving(backend=backend, store=store) as service:
        again = await service.add_run(spec_of(), WORDS, dev=DEV)
        await service.wait(again)
        assert again.result() == result
    assert sum(map(is_dev, backend.asked)) == 13  # An end is measured once.


async def test_prompts_measured_on_other_texts_are_not_compared() -> None:
    """After a restart with another dev file, even if its labels are the same."""
    store, changed = MemoryStore(), [{**row, "text": f"{row['text']}!"} for row in DEV]
    async with serving(backend=ScriptedBackend(), store=store) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        await until(lambda: run.state.metric.before is not None)
    async with serving(backend=ScriptedBackend(), store=store) as service:
        run = await service.add_run(spec_of(), WORDS, dev=changed)
        await train(service, run, TRAIN)
    assert "not measured on the same dev rows" in str(run.result().verdict)


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        (None, "the server has no dev rows of this run (data.dev)"),
        (1, "the server has no dev rows of this run (data.dev), or the caps do not cover a"),
        (5, "the final prompt is not evaluated yet, or the caps do not cover a measurement"),
    ],
)
async def test_a_run_that_is_not_measured_reports_it(requests: int | None, text: str) -> None:
    budget, dev = (None, ()) if requests is None else ({"requests": requests}, DEV)
    async with serving(backend=ScriptedBackend()) as service:
        run = await service.add_run(spec_of(budget=budget), WORDS, dev=dev)
        await until(lambda: requests != 5 or run.state.metric.no_prompt is not None)
        await train(service, run, TRAIN)
    verdict = run.result().verdict
    assert verdict is not None
    assert (verdict.conclusion, verdict.source) == ("not_measured", None)
    assert verdict.text.startswith(f"not measured: {text}")


class Unpriced(ScriptedBackend):
    bounds = ScriptedBackend.bounds - {"usd"}


async def test_a_price_that_is_not_known_is_null() -> None:
    for backend, usd in (ScriptedBackend(), 0.0), (Unpriced(), None):
        store = MemoryStore()
        async with serving(backend=backend, store=store) as service:
            run = await service.add_run(spec_of(), WORDS, dev=DEV)
            await train(service, run, TRAIN)
            result = run.result()
            document = json.loads(result.model_dump_json())
            accounts = [document[name]["usd"] for name in ("spent", "leased", "evaluation")]
            assert accounts == [usd] * 3
            assert json.loads(run.summary.model_dump_json())["spent"]["usd"] == usd
            assert RunResult.model_validate(document) == result
            assert result.verdict is not None
            assert ("unknown price" in result.verdict.text) is (usd is None)
        # An export says it, too, and so do a report and an artefact.
        reported = read_export(await exported_run(store, "run"))
        assert reported.result == result
        assert json.loads(artefact_of(reported).dump())["ledger"]["spent"]["usd"] == usd
        costs = {name: spent for name, spent, _ in costs_of(reported)}
        assert costs["US dollars"] == ("unknown" if usd is None else "0.0000")

    refuse = Mock(side_effect=BackendBlocked("a wrong key", usage=Usage(requests=1)))
    async with serving(backend=Unpriced(gate=refuse)) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        await until(lambda: run.state.paused and run.state.account.spent.requests > 0)
        assert json.loads(run.result().model_dump_json())["spent"]["usd"] is None


async def test_one_replica_measures_the_whole_dev_split(monkeypatch: pytest.MonkeyPatch) -> None:
    class Follower(MemoryStore):
        leads = False

        async def lead(self) -> bool:
            return self.leads

    monkeypatch.setattr("fedone_sdk.aggregator.model.evaluation._POLL_S", 0)
    backend, store = ScriptedBackend(), Follower()
    async with serving(backend=backend, store=store) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        training = asyncio.create_task(train(service, run, TRAIN))
        await until(lambda: len([1 for report in run.history if report.metric is not None]) == 2)
        assert sum(map(is_dev, backend.asked)) == 4  # the points of its rounds
        assert run.state.metric.no_prompt is run.state.metric.after is None
        # The one that led is gone, with all that it had not measured yet.
        store.leads = service.replicas.is_leader = True
        await training
    assert sum(map(is_dev, backend.asked)) == 13
    assert run.result().verdict is not None


async def test_training_is_the_same_with_and_without() -> None:
    hashes = set()
    for dev in ((), DEV):
        async with serving(backend=ScriptedBackend()) as service:
            run = await service.add_run(spec_of(), WORDS, dev=dev)
            await train(service, run, TRAIN)
            hashes.add(run.result().alpha_sha256)
    assert len(hashes) == 1


@pytest.mark.parametrize("failures", [1, 1000])
async def test_a_model_that_fails_on_it_does_not_stop_training(failures: int) -> None:
    failed = list[Query]()

    def gate(query: Query) -> None:
        if is_dev(query) and len(failed) < failures:
            failed.append(query)
            raise BackendUnavailable("overloaded")

    async with serving(backend=ScriptedBackend(gate=gate)) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        await train(service, run, TRAIN)
    result = run.result()
    assert result.status == "completed"
    assert (result.metric.after is None) is (result.metric.no_prompt is None) is (failures > 1)
    if failures > 1:
        # Failed calls have an unknown cost and are charged in full. No call starts after one.
        # A token a row. The baselines are tried again at the end.
        assert result.evaluation == Usage(queries=19, requests=7, prompt_tokens=7 * 4)


@pytest.mark.parametrize("name", ["commit", "log"])
async def test_it_waits_for_an_absent_store(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    async def fail_once(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise StoreUnavailable("the disk is full")

    def on_change(_: ServedRun, change: Change) -> None:
        if change.ended:
            monkeypatch.setattr(store, name, fail_once)

    async with serving(backend=ScriptedBackend(), store=store) as service:
        service.listeners.append(on_change)
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        await train(service, run, TRAIN)
    assert None not in (run.state.metric.after, run.state.verdict)


class Dear(ScriptedBackend):
    """Bills more than its bound, and reports the model's name."""

    async def score(self, query: Query) -> Answer:
        answer = await super().score(query)
        return replace(answer, usage=answer.usage + Usage(prompt_tokens=90), model="m-1")


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("number", range(1, 12))
async def test_a_commit_that_fails_costs_nothing(
    number: int, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is stored, and only the answer of the store is lost."""
    store, numbers = MemoryStore(), count(1)

    async def commit(*change: Any) -> None:
        fails = next(numbers) == number
        if stored or not fails:
            await MemoryStore.commit(store, *change)
        if fails:
            raise StoreUnavailable("the disk is full")

    monkeypatch.setattr("fedone_sdk.aggregator.runs.served_run._RETRY_S", 0)
    monkeypatch.setattr(store, "commit", commit)
    async with serving(backend=(backend := Dear()), store=store) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV[:4])
        await until(lambda: run.state.metric.before is not None)
    assert (len(backend.asked), run.state.models) == (2, ("m-1",))
    assert run.state.evaluation.leases == run.state.account.leases == {}
    assert run.state.evaluation.spent == Usage(queries=2, requests=2, prompt_tokens=2 * 94)
    assert next(numbers) > number


async def test_examples_that_the_model_fails_on_are_left_out() -> None:
    def answer(inputs: Rendered, words: Sequence[str]) -> tuple[float, ...] | None:
        return None if "dev 0" in text_of(inputs) else (-1.0, -2.0)  # always " no"

    async with serving(backend=ScriptedBackend(answer)) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        await train(service, run, TRAIN)
    assert run.result().metric.after == pytest.approx(4 / 9)


async def test_cache_hits_are_counted() -> None:
    backend = ScriptedBackend()
    async with serving(backend=ModelClient(backend, cache=AnswerCache())) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        await train(service, run, TRAIN)
    result = run.result()
    asked = [rendered for query in backend.asked for rendered in query.inputs]
    assert result.cache.hits > 0
    assert len(asked) + result.cache.hits == 16 * 4 + 3 * 10 + 2 * 5


async def test_training_does_not_wait_and_each_point_is_its_round_s() -> None:
    go = asyncio.Event()

    async def wait(query: Query) -> None:
        if is_dev(query):
            await go.wait()

    async with serving(backend=ScriptedBackend(gate=wait)) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        training = asyncio.create_task(train(service, run, TRAIN))
        await until(lambda: not run.state.running)
        assert run.result().metric.no_prompt is None
        assert not training.done()
        go.set()
        await training
    assert [report.metric is not None for report in run.history] == [False, True, False, True]


async def test_a_bug_in_a_backend_does_not_drain_the_cap() -> None:
    """Each measurement would be charged and meet it again: the third in a row pauses the run."""
    broken = True

    def gate(query: Query) -> None:
        if is_dev(query) and broken:
            raise ZeroDivisionError("division by a secret")

    backend = ScriptedBackend(gate=gate)
    async with serving(backend=backend) as service:
        run = await service.add_run(spec_of(rounds=20, evaluation={"every": 1}), WORDS, dev=DEV)
        client = memory_client(service, data=TRAIN, wait_s=0.0)
        async with asyncio.timeout(10), client:
            while not run.state.paused:
                await client.run_once()
                await asyncio.sleep(0)
            asked = sum(map(is_dev, backend.asked))
            failed = "the evaluation failed 3 times in a row with ZeroDivisionError"
            assert run.state.reason == f"paused: {failed}: see the server's log"
            assert run.state.evaluation.leases == {}
            assert run.state.round < 20
            for _ in range(20):
                await client.run_once()
                await asyncio.sleep(0)
            assert sum(map(is_dev, backend.asked)) == asked
            # Mended and resumed, it ends, and what could not be measured then is measured now.
            broken = False
            await service.resume_run(run)
            await client.run_forever()
            await service.wait(run)
    assert run.result().status == "completed"
    assert run.result().metric.after is not None


async def test_a_traceback_in_the_log_has_no_private_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By default structlog prints the local variables of each frame where rich is installed."""
    pytest.importorskip("rich")
    private = "only the device may read this"

    def gate(query: Query) -> None:
        texts = [text_of(one) + private for one in query.inputs]
        if is_dev(query):
            raise RuntimeError(f"{len(texts)} rows")

    structlog.reset_defaults()
    async with serving(backend=ScriptedBackend(gate=gate)) as service:
        run = await service.add_run(spec_of(evaluation={"every": 0}), WORDS, dev=DEV)
        await train(service, run, TRAIN)
        assert (run.result().status, run.result().metric.after) == ("completed", None)
        assert run.state.account.leases == run.state.evaluation.leases == {}
    printed = capsys.readouterr().out
    assert "RuntimeError: " in printed
    assert private not in printed


async def test_cancelled_while_it_sets_aside_it_leaves_no_lease() -> None:
    async with serving(backend=ScriptedBackend()) as service:
        run = await service.add_run(spec_of(), WORDS, dev=DEV)
        (evaluation,) = service._companions[run.run_id]
        (task,) = evaluation._tasks
        async with run._lock:  # Its reservation waits here.
            for _ in range(10):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert run.state.evaluation.leases == run.state.account.leases == {}
        assert run.state.evaluation.spent == run.state.account.spent == Usage()
