"""The edge client: its data, its hooks, its own model, and its retries."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import ServedRun, Service
from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.budget import Budget, Usage
from fedone_sdk.client.session import StopSignal
from fedone_sdk.errors import BackendError, BackendUnavailable, DataError, ProblemError, SpecError
from fedone_sdk.messages import MAX_TEXT_CHARS
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Rendered
from fedone_sdk.testing import ScriptedBackend
from tests import runs
from tests.edge import entries, stored
from tests.runs import TOKEN, RecordingTransport, memory_client, run_spec, until

DATA: list[dict[str, Any]] = [{"text": f"text {n}", "label": n % 2} for n in range(6)]


def spec_of(
    exchange: str = "losses",
    *,
    rounds: int = 3,
    participation: dict[str, Any] | None = None,
    **method: Any,
) -> RunSpec:
    return run_spec(
        method={"batch_size": 5, **method},
        participation={"exchange": exchange, **(participation or {})},
        rounds=rounds,
    )


def serving(
    spec: RunSpec | None = None,
    *,
    backend: LLMBackend | None = None,
    gateway: bool = True,
    **more: Any,
) -> AbstractAsyncContextManager[Service]:
    model = (backend or ScriptedBackend()) if gateway else None
    return runs.serving(spec or spec_of(), backend=model, **more)


def client_of(service: Service, data: Any = DATA, **more: Any) -> EdgeClient:
    return memory_client(service, data=data, **more)


async def worked(client: EdgeClient) -> None:
    async with asyncio.timeout(10):
        await client.run_forever()


def run_of(service: Service) -> ServedRun:
    return service.runs["run"]


def texts(queries: Sequence[Query]) -> set[str]:
    return {part.text for q in queries for x in q.inputs for part in x if part.kind == "field"}


class TestData:
    @pytest.mark.parametrize(
        "data",
        [DATA, tuple(DATA), iter(DATA), (row for row in DATA)],
        ids=["list", "tuple", "iterator", "generator"],
    )
    async def test_iterables(self, data: Any) -> None:
        async with serving() as service, client_of(service, data) as client:
            await worked(client)
            assert run_of(service).state.status == "completed"

    @pytest.mark.parametrize("kind", ["sync", "async"])
    async def test_a_callable_is_called_before_each_assignment(self, kind: str) -> None:
        rows = DATA[:1]
        backend = ScriptedBackend()

        def current() -> list[dict[str, Any]]:
            return rows

        async def current_async() -> Iterator[dict[str, Any]]:
            return iter(rows)

        async with serving(spec_of(rounds=2), backend=backend) as service:
            data = current if kind == "sync" else current_async
            transport = RecordingTransport(service)
            async with client_of(service, data, transport=transport) as client:
                assert (await client.run_once()).outcome == "worked"
                rows = DATA
                assert (await client.run_once()).outcome == "worked"
            assert [claim.num_examples for claim in transport.claims] == [1, 6]
            assert [report.queries for report in run_of(service).history] == [4, 4]
            assert len(texts(backend.asked[4:])) == 5

    async def test_no_data_at_all(self) -> None:
        with pytest.raises(DataError, match="has no examples"):
            EdgeClient("http://x", token=TOKEN, data=[])

    async def test_examples_that_do_not_fit_are_left_alone(self) -> None:
        backend = ScriptedBackend()
        bad: list[dict[str, Any]] = [
            {"text": "no label"},
            {"text": "no label", "label": None},
            {"label": 1},
            {"text": None, "label": 1},
            {"text": "x" * (MAX_TEXT_CHARS + 1), "label": 1},
            {"text": "half a character \ud83d", "label": 1},
        ]
        async with (
            serving(spec_of(), backend=backend) as service,
            client_of(service, [*bad, DATA[0]]) as client,
        ):
            await worked(client)
            assert run_of(service).state.status == "completed"
        assert texts(backend.asked) == {"text 0"}


class TestBeforeSend:
    @pytest.mark.parametrize("kind", ["sync", "async"])
    @pytest.mark.parametrize("exchange", ["alpha", "losses"])
    async def test_redacts_what_leaves_the_device(self, kind: str, exchange: str) -> None:
        backend = ScriptedBackend()

        def redact(text: str) -> str:
            return text.replace("text", "***")

        async def redact_async(text: str) -> str:
            await asyncio.sleep(0)
            return redact(text)

        hook = redact if kind == "sync" else redact_async
        async with (
            serving(spec_of(exchange), backend=backend) as service,
            client_of(service, before_send=hook) as client,
        ):
            await worked(client)
            assert run_of(service).state.status == "completed"
        assert texts(backend.asked) <= {f"*** {n}" for n in range(6)}

    @pytest.mark.parametrize("exchange", ["alpha", "losses"])
    async def test_vetoes_many(self, exchange: str) -> None:
        """If fewer than 80 % can be scored, the work is declined before any query."""
        backend = ScriptedBackend()

        async def veto(text: str) -> str | None:
            return None if text in ("text 3", "text 2") else text

        async with (
            serving(spec_of(exchange), backend=backend) as service,
            client_of(service, DATA[:5], before_send=veto) as client,
        ):
            assert (await client.run_once()).outcome == "declined"
            assert run_of(service).state.account.spent == Usage()
        assert backend.asked == []

    async def test_a_hook_that_fails_is_a_veto(self) -> None:
        backend = ScriptedBackend()

        def fail(text: str) -> str:
            if text == "text 3":
                raise LookupError(f"private: {text}")
            return text

        with capture_logs() as logs:
            async with (
                serving(backend=backend) as service,
                client_of(service, DATA[:5], before_send=fail) as client,
            ):
                await worked(client)
                assert run_of(service).state.status == "completed"
        assert "text 3" not in texts(backend.asked)
        events = [entry for entry in logs if entry["event"] == "before_send failed"]
        assert events[0] == {
            "event": "before_send failed",
            "log_level": "warning",
            "error": "LookupError",
        }


class TestFailedInputs:
    @pytest.mark.parametrize("own", [False, True])
    @pytest.mark.parametrize("exchange", ["alpha", "losses"])
    async def test_few_are_left_out_and_counted(self, own: bool, exchange: str) -> None:
        def answer(inputs: Rendered, words: Sequence[str]) -> tuple[float, ...] | None:
            text = "".join(part.text for part in inputs)
            return None if "text 3" in text and "good" in text else (-1.0, -2.0)

        backend = ScriptedBackend(answer)
        async with serving(spec_of(exchange), backend=backend, gateway=not own) as service:
            transport = RecordingTransport(service)
            options = {"transport": transport, "backend": backend if own else None}
            async with client_of(service, DATA[:5], **options) as client:
                await worked(client)
            assert run_of(service).state.status == "completed"
        updates = transport.updates
        assert {update.scored.scored + update.scored.failed for update in updates} == {5}
        assert max(update.scored.failed for update in updates) == 1
        # Labels 0, 1, 0, (1,) 0: an example counts for all prompts or for none.
        zero, one = 0.3132616875182228, 1.3132616875182228
        for update in updates:
            mean = (3 * zero + one * (2 - update.scored.failed)) / update.scored.scored
            losses = getattr(update, "losses", (getattr(update, "mean_loss", None),))
            assert losses == pytest.approx([mean] * len(losses), abs=1e-6)

    @pytest.mark.parametrize("own", [False, True])
    async def test_too_many(self, own: bool) -> None:
        def answer(inputs: Rendered, words: Sequence[str]) -> tuple[float, ...] | None:
            text = "".join(part.text for part in inputs)
            return None if "text 3" in text or "text 2" in text else (-1.0, -2.0)

        backend = ScriptedBackend(answer)
        async with serving(backend=backend, gateway=not own) as service:
            own_backend = backend if own else None
            async with client_of(service, DATA[:5], backend=own_backend) as client:
                assert (await client.run_once()).outcome == "declined"
            assert run_of(service).state.account.spent.queries == 4  # paid all the same


class Buggy(ScriptedBackend):
    """An app's model with a bug in one of its methods, until it is fixed."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.mended = where, False

    def meet(self, where: str) -> None:
        if where == self.where and not self.mended:
            raise ZeroDivisionError("a private text")

    @property
    def fingerprint(self) -> str:
        self.meet("fingerprint")
        return "scripted"

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        self.meet("check")

    async def quote(self, query: Query) -> Usage:
        self.meet("quote")
        return await super().quote(query)

    async def score(self, query: Query) -> Answer:
        answer = await super().score(query)
        self.meet("score")
        if self.where == "rows" and not self.mended:
            return dataclasses.replace(answer, log_probs=answer.log_probs[1:])
        return answer


class TestOwnBackend:
    @pytest.mark.parametrize("exchange", ["alpha", "losses"])
    async def test_the_server_needs_no_model(self, exchange: str) -> None:
        own = ScriptedBackend()
        spec = spec_of(exchange, participation={"own_models": "trusted"})
        async with (
            serving(spec, gateway=False) as service,
            client_of(service, backend=own) as client,
        ):
            await worked(client)
            result = run_of(service).result()
        assert (result.status, result.model) == ("completed", "scripted")
        assert result.spent.queries == 12
        # A prompt that stands twice is asked once; it is a query all the same.
        assert result.spent.requests == len(own.asked) <= 12

    @pytest.mark.parametrize("gateway", [False, True])
    async def test_abandoned_work_costs_what_it_may_have_sent(self, gateway: bool) -> None:
        """Whether the server has a model, too, makes no difference."""
        own = ScriptedBackend(lambda inputs, words: None)
        spec = spec_of(participation={"own_models": "charged"})
        spec = spec.model_copy(update={"budget": Budget(queries=8)})
        async with (
            serving(spec, gateway=gateway) as service,
            client_of(service, backend=own) as client,
        ):
            outcomes = [(await client.run_once()).outcome for _ in range(3)]
            state = run_of(service).state
        assert outcomes == ["declined", "declined", "ended"]
        assert (state.status, state.account.spent.queries) == ("budget_exhausted", 8)

    async def test_a_run_without_any_model(self) -> None:
        spec = spec_of(participation={"model": None})
        with pytest.raises(SpecError, match=r"participation\.model: is missing"):
            async with serving(spec, gateway=False):
                pass

    async def test_a_model_that_fails(self) -> None:
        def gate(query: Query) -> None:
            if len(own.asked) > 2:
                raise BackendError("the key is wrong")

        own = ScriptedBackend(gate=gate)
        spec = spec_of(participation={"own_models": "trusted"})
        async with serving(spec, gateway=False) as service:
            async with client_of(service, backend=own) as client:
                assert (await client.run_once()).outcome == "declined"
            assert run_of(service).state.account.spent.queries == 4
            assert run_of(service).state.account.spent.requests == 3

    @pytest.mark.parametrize("where", ["score", "quote", "check", "fingerprint", "rows"])
    async def test_a_model_with_a_bug_gives_the_work_back(self, where: str) -> None:
        """The server gets only the kind, and the client continues once the bug is fixed."""
        own = Buggy(where)
        async with serving(gateway=False) as service:
            transport = RecordingTransport(service)
            options = {"backend": own, "transport": transport}
            with capture_logs() as logs:
                async with client_of(service, **options) as client:
                    turn = await client.run_once()
                    assert turn.outcome == "declined"
                    assert 0 <= turn.next_turn_s <= 1
                    own.mended = True
                    await worked(client)
            assert run_of(service).state.status == "completed"
        (decline,) = transport.declines
        if where == "rows":  # One line says what is wrong.
            assert decline.reason == "the client's model failed"
            (line,) = [entry for entry in logs if entry["event"] == "the device's model failed"]
            assert "answers were given to" in line["reason"]
            return
        assert decline.reason == "the client failed with ZeroDivisionError"
        (events,) = [entry for entry in logs if entry["event"] == "the work failed"]
        assert events["traceback"].rstrip().splitlines()[-1].startswith("ZeroDivisionError")


class TestOutages:
    async def test_a_model_behind_the_gateway_that_comes_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(StopSignal, "sleep", lambda self, seconds: asyncio.sleep(0))
        failures = 2

        def gate(query: Query) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise BackendUnavailable("overloaded")

        backend = ScriptedBackend(gate=gate)
        async with serving(spec_of(rounds=1), backend=backend) as service:
            async with client_of(service) as client:
                await worked(client)
            result = run_of(service).result()
        assert (result.status, result.spent.queries) == ("completed", 4)
        # Two calls failed at their first request, and began no further one.
        assert result.spent.requests == 2 + 4

    async def test_a_model_that_stays_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(StopSignal, "sleep", lambda self, seconds: asyncio.sleep(0))

        def gate(query: Query) -> None:
            raise BackendUnavailable("overloaded")

        backend = ScriptedBackend(gate=gate)
        async with serving(backend=backend) as service, client_of(service) as client:
            assert (await client.run_once()).outcome == "declined"
            assert run_of(service).state.account.spent.queries == 4
            assert run_of(service).state.account.spent.requests == 5

    async def test_a_server_without_its_clients(self, tmp_path: Path) -> None:
        """It enrols again with its token, and reports an error without one."""
        state = tmp_path / "state"
        async with serving() as service, client_of(service, state_dir=state) as client:
            assert (await client.run_once()).outcome == "worked"
        async with serving() as service:
            async with client_of(service, token=None) as client:
                with pytest.raises(SpecError, match="FEDONE_TOKEN"):
                    await client.run_forever()
            async with client_of(service, state_dir=state, token=None) as client:
                with pytest.raises(ProblemError, match="unauthorized: "):
                    await client.run_forever()
            async with client_of(service, state_dir=state) as client:
                await worked(client)
            assert run_of(service).state.status == "completed"


class TestState:
    async def test_identity_survives(self, tmp_path: Path) -> None:
        state = tmp_path / "a" / "state"
        async with serving() as service:
            for _ in range(2):
                async with client_of(service, state_dir=state) as client:
                    assert (await client.run_once()).outcome == "worked"
            async with client_of(service, state_dir=state, token=None) as client:
                assert (await client.run_once()).outcome == "worked"
            assert len(await service.store.clients()) == 1
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        (file,) = state.iterdir()
        assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("state.sqlite3", 0o600)

    @pytest.mark.parametrize("content", [b"\0" * 5000, b"{}" * 5000, b"SQLite format 3\0" * 400])
    async def test_a_damaged_file_is_put_aside(self, tmp_path: Path, content: bytes) -> None:
        """The device enrols again; the damaged file is kept for inspection."""
        file = tmp_path / "state.sqlite3"
        file.write_bytes(content)
        async with serving() as service, client_of(service, state_dir=tmp_path) as client:
            assert (await client.run_once()).outcome == "worked"
        assert (tmp_path / "state.sqlite3.damaged").read_bytes() == content
        assert len(entries(tmp_path, "identity")) == 1

    @pytest.mark.parametrize("keep", [True, False])
    async def test_adamw_memory_of_the_device(self, tmp_path: Path, keep: bool) -> None:
        """In the alpha exchange it is the device's, and outlives a restart."""
        spec = spec_of("alpha", rounds=4, optimizer="adamw", learning_rate=0.1)

        async def alpha_after(restarts: bool) -> str:
            folder = tmp_path / str(restarts)
            async with serving(spec) as service:
                if not restarts:
                    async with client_of(service, state_dir=folder) as client:
                        await worked(client)
                for _ in range(4 * restarts):
                    async with client_of(service, state_dir=folder) as client:
                        assert (await client.run_once()).outcome == "worked"
                    if not keep:
                        stored(folder, "DELETE FROM entries WHERE kind = 'memory'")
                return run_of(service).result().alpha_sha256

        assert (await alpha_after(True) == await alpha_after(False)) == keep
        (memory,) = entries(tmp_path / "False", "memory")
        assert json.loads(memory)[0] == "run"


class TestStop:
    async def test_ends_the_patience_with_a_server_that_is_away(self) -> None:
        client = EdgeClient("http://127.0.0.1:9", token=TOKEN, data=DATA)
        async with client:
            working = asyncio.create_task(client.run_forever())
            tried: list[Any] = []
            enrol = client._session.transport.enrol

            async def watched(*args: Any) -> Any:
                tried.append(args)
                return await enrol(*args)

            client._session.transport.enrol = watched  # type: ignore[method-assign]
            await until(lambda: len(tried) > 1)
            client.stop()
            async with asyncio.timeout(5):
                await working
