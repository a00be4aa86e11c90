"""Odd rows, texts and arguments neither end an edge client nor leave its device."""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Service
from fedone_sdk.aggregator.http.application import listening
from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.client import ClientEvent, HttpTransport
from fedone_sdk.client.rows import Source
from fedone_sdk.client.transport import Call, _refusal
from fedone_sdk.errors import (
    ArgumentError,
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    DataError,
    MessageError,
    SpecError,
    TransportError,
)
from fedone_sdk.local import MemoryTransport
from fedone_sdk.messages import MAX_TEXT_CHARS, Claim, Enrol, Enrolled
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from tests import runs
from tests.edge import edge_client
from tests.runs import TOKEN, WORDS, RecordingTransport, memory_client, run_spec, until
from tests.virtual_time import now, on_virtual_time

JANE = "My name is Jane Roe"
DATA: list[dict[str, Any]] = [{"text": f"{JANE} {n}", "label": n % 2} for n in range(5)]


def spec_of(rounds: int = 2, **changes: Any) -> RunSpec:
    return run_spec(rounds=rounds, method={"batch_size": 5}, **changes)


def serving(
    spec: RunSpec | None = None, backend: LLMBackend | None = None
) -> AbstractAsyncContextManager[Service]:
    return runs.serving(spec or spec_of(), backend=backend or ScriptedBackend())


def client_of(service: Service, data: Any = DATA, **more: Any) -> EdgeClient:
    return memory_client(
        service, **{"data": data, "transport": RecordingTransport(service), **more}
    )


def round_of(service: Service) -> int:
    return service.runs["run"].state.round


def itself() -> dict[Any, Any]:
    row: dict[Any, Any] = {"text": "fine", "label": 1}
    row["me"] = row
    return row


@pytest.mark.parametrize(
    ("row", "events"),
    [
        ((math.nan, -1.0), "must be finite numbers, not [nan, -1.0]"),
        ((-1.0, -math.inf), "must be finite numbers, not [-1.0, -inf]"),
        ((-1.0,), "1 log-probabilities were given instead of 2"),
    ],
)
async def test_a_model_that_has_gone_wrong(
    tmp_path: Path, row: tuple[float, ...], events: str
) -> None:
    """One log line; the invalid number is not stored, and the next model works."""
    wrong = ScriptedBackend(lambda inputs, words: row)
    async with serving() as service:
        with capture_logs() as logs:
            async with client_of(service, backend=wrong, state_dir=tmp_path) as client:
                assert (await client.run_once()).outcome == "declined"
        (line,) = [line for line in logs if line["event"] == "the device's model failed"]
        assert events in line["reason"]
        assert not any("traceback" in line for line in logs)
        async with client_of(service, backend=ScriptedBackend(), state_dir=tmp_path) as client:
            assert (await client.run_once()).outcome == "worked"


class TestOddData:
    @pytest.mark.parametrize(
        ("data", "events"),
        [
            ("rows.jsonl", "is str; it must be an iterable of rows; load_examples reads a file"),
            ({"text": "a", "label": 0}, "is dict; it must be an iterable of rows"),
            ([("a", 0)], "row 1 is tuple; it must map fields to values"),
            (7, "is int; it must be an iterable of rows"),
        ],
    )
    async def test_another_shape(self, data: Any, events: str) -> None:
        with pytest.raises(DataError, match=re.escape(events)):
            EdgeClient("http://x", token=TOKEN, data=data)
        async with serving() as service, client_of(service, lambda: data) as client:
            with capture_logs() as logs:
                turn = await client.run_once()
                assert turn.outcome == "idle"
            assert turn.next_turn_s > 0
        (line,) = [line for line in logs if line["event"] == "the rows cannot be read"]
        assert events in line["reason"]

    async def test_a_function_that_raises(self) -> None:
        rows: list[Any] = []

        def current() -> Any:
            if not rows:
                raise RuntimeError(JANE)
            return rows

        async with serving() as service, client_of(service, current) as client:
            with capture_logs() as logs:
                assert (await client.run_once()).outcome == "idle"
            assert JANE not in str(logs)
            assert "RuntimeError" in str(logs)
            rows = DATA
            assert (await client.run_once()).outcome == "worked"

    async def test_none_at_all_is_reported_once(self) -> None:
        async with serving() as service, client_of(service, list, wait_s=0.0) as client:
            with capture_logs() as logs:
                assert [(await client.run_once()).outcome for _ in range(3)] == ["idle"] * 3
        assert [line["event"] for line in logs].count(
            "data: this client has no examples now; it needs at least one"
        ) == 1

    @pytest.mark.parametrize("called", [False, True], ids=["rows", "function"])
    async def test_more_than_a_device_holds(self, called: bool) -> None:
        rows = [{"text": "a", "label": 0}] * 100_001
        with capture_logs() as logs:
            source = Source((lambda: iter(rows)) if called else rows)
            assert [len(await source.rows()) for _ in range(2)] == [100_000] * 2
        assert [line["event"] for line in logs] == [
            "data: only the first 100000 rows are used; the others are left out"
        ]


class TestLog:
    @on_virtual_time
    async def test_one_line_while_it_is_offline(self) -> None:
        waits: list[float] = []

        class Away(MemoryTransport):
            away = True

            async def claim(self, credential: str, message: Claim) -> Any:
                waits.append(message.wait_s)
                if self.away:
                    raise TransportError("http://server: cannot be reached: refused")
                return await super().claim(credential, message)

        async with serving() as service:
            transport = Away(service)
            async with client_of(service, transport=transport) as client:
                with capture_logs() as logs:
                    assert [(await client.run_once()).outcome for _ in range(3)] == ["offline"] * 3
                    transport.away = False
                    assert (await client.run_once()).outcome == "worked"
        lines = [line for line in logs if line["log_level"] != "debug"]
        offline = [line for line in lines if "offline since" in line["event"]]
        assert [line["reason"] for line in offline] == ["http://server: cannot be reached: refused"]
        assert re.fullmatch(r"offline since \d\d:\d\d", offline[0]["event"])
        assert [line["event"] for line in lines].count("online again") == 1
        # The app learns by a short poll that the server is back.
        assert (waits[0] > 0, waits[-1]) == (True, 0.0)

    @pytest.mark.parametrize("answer", [b"<html>login</html>", b"null", b'{"on": true}', b""])
    async def test_a_portal_in_place_of_a_run_is_an_outage(self, answer: bytes) -> None:
        class Portal(MemoryTransport):
            async def send(self, call: Call) -> Any:
                sent = await super().send(call)
                return answer if call.name == "task" and not outcomes else sent

        outcomes: list[str] = []
        async with serving() as service, client_of(service, transport=Portal(service)) as client:
            for _ in range(2):
                outcomes.append((await client.run_once()).outcome)
        assert outcomes == ["offline", "worked"]

    @pytest.mark.parametrize("status", [403, 404, 407, 413, 451])
    @pytest.mark.parametrize("path", ["/v1/score", "/update"])
    async def test_work_that_a_proxy_refuses_is_declined(self, status: int, path: str) -> None:
        """The operator reads why; an aggregator's own 404 or 413 has another form."""

        class Blocked(MemoryTransport):
            async def send(self, call: Call) -> Any:
                if call.name == path.strip("/").removeprefix("v1/"):
                    raise _refusal(path, status, {}, b"<html>blocked</html>")
                return await super().send(call)

        async with serving() as service:
            async with client_of(service, transport=Blocked(service)) as client:
                turn = await client.run_once()
            assert (turn.outcome, turn.reason) == (
                "declined",
                f"{path}: answered {status}, but the answer is not from an aggregator",
            )
            (run,) = service.runs.values()
            assert [seat.phase for seat in run.state.seats] == ["offered"]

    @pytest.mark.parametrize(
        ("status", "kind"),
        [(302, MessageError), (408, TransportError), (425, TransportError), (511, TransportError)],
    )
    def test_answers_of_proxies_that_pass(self, status: int, kind: type[Exception]) -> None:
        assert type(_refusal("/v1/score", status, {}, b"<html>")) is kind


class TestOddRows:
    @pytest.mark.parametrize(
        "given",
        [None, f"{JANE} \ud83d", "x" * (MAX_TEXT_CHARS + 1), 5],
        ids=["veto", "half", "long", "no text"],
    )
    @pytest.mark.parametrize("own", [False, True])
    async def test_what_the_hook_makes_unfit_is_held_back(self, given: Any, own: bool) -> None:
        def hook(text: str) -> Any:
            return given if text == DATA[3]["text"] else text

        backend = ScriptedBackend()
        async with serving(backend=backend) as service:
            watched = RecordingTransport(service)
            options = {"transport": watched, "before_send": hook}
            async with client_of(service, backend=backend if own else None, **options) as client:
                assert (await client.run_once()).outcome == "worked"
        assert DATA[2]["text"] in repr(backend.asked)
        assert DATA[3]["text"] not in repr(backend.asked)
        assert [(u.scored.scored, u.scored.vetoed) for u in watched.updates] == [(4, 1)]

    async def test_a_reference_text_that_the_hook_empties(self) -> None:
        task = {"template": "{prompt} {text}", "loss": "nll", "metric": "loss"}
        task |= {"label_field": "summary"}
        rows = [{"text": f"{n}", "summary": f"s {n}"} for n in range(5)]
        async with serving(spec_of(task=task)) as service:
            watched = RecordingTransport(service)
            options = {"transport": watched, "before_send": lambda text: text.replace("s 3", "")}
            consent = {"label": "summary", "fields": ["text", "summary"]}
            async with client_of(service, rows, **options, **consent) as client:
                assert (await client.run_once()).outcome == "worked"
        assert [update.scored.vetoed for update in watched.updates] == [1]

    @pytest.mark.parametrize(
        "odd",
        [{"text": "fine", "label": 1, None: ["surplus"], 5: 6}, {"text": "fine", "label": 1, (): 0},
         itself()],
        ids=["none", "tuple", "itself"],
    )  # fmt: skip
    async def test_keys_that_are_no_text(self, odd: Any) -> None:
        async with serving() as service, client_of(service, [odd]) as client:
            await client.run_forever()
            assert service.runs["run"].state.status == "completed"

    async def test_a_step_that_no_message_can_carry_is_given_back(self) -> None:
        names = [f"field{n}" for n in range(17)]
        template = "{prompt} " + " ".join(f"{{{name}}}" for name in names) + " {mask}"
        task = {"template": template, "labels": {0: " no", 1: " yes"}}
        rows = [dict.fromkeys(names, JANE) | {"label": 0}]
        events: list[ClientEvent] = []
        async with serving(spec_of(task=task)) as service:
            watched = RecordingTransport(service)
            options = {"transport": watched, "on_event": events.append}
            async with client_of(service, rows, **options) as client:
                assert (await client.run_once()).outcome == "declined"
        (reason,) = [decline.reason for decline in watched.declines]
        assert reason == events[-1].reason
        assert reason.startswith("the step cannot be sent: examples.0: ")
        assert "Jane" not in reason


SAID = f"HTTP 400 ([{{'input': '{JANE}'}}])"


class TestWhatIsTold:
    """A model that refuses a request quotes it: the texts stay on the device all the same."""

    @pytest.mark.parametrize(
        ("error", "reason"),
        [(BackendError(SAID), "the client's model failed"),
         (BackendUnavailable(SAID), "the client's model is not available now"),
         (BackendBlocked(SAID),
          "the client's model cannot be queried until its configuration changes"),
         (BudgetExhausted(SAID), "the client's budget has nothing left for this")],
        ids=lambda value: type(value).__name__,
    )  # fmt: skip
    async def test_of_a_model_on_the_device(self, error: Exception, reason: str) -> None:
        def gate(query: Query) -> None:
            raise error

        await self.declines_with(reason, ScriptedBackend(gate=gate))

    async def declines_with(self, reason: str, own: LLMBackend) -> None:
        events: list[ClientEvent] = []
        async with serving() as service:
            watched = RecordingTransport(service)
            options = {"transport": watched, "backend": own, "on_event": events.append}
            with capture_logs() as logs:
                async with client_of(service, **options) as client:
                    assert (await client.run_once()).outcome == "declined"
        assert [decline.reason for decline in watched.declines] == [reason]
        assert "Jane" not in repr(events)
        assert events[-1].reason == reason
        assert "Jane" in repr(logs)  # for the people at the device

    async def test_of_a_model_behind_the_gateway(self) -> None:
        def gate(query: Query) -> None:
            raise BackendError("the request was refused", url="http://model", said=SAID)

        events: list[ClientEvent] = []
        async with serving(backend=ScriptedBackend(gate=gate)) as service:
            watched = RecordingTransport(service)
            options = {"transport": watched, "on_event": events.append}
            async with client_of(service, **options) as client:
                assert (await client.run_once()).outcome == "declined"
        assert [decline.reason for decline in watched.declines] == [
            "backend_failed: the request was refused"
        ]
        assert "Jane" not in repr(events)


class TestRetryAfter:
    @pytest.mark.parametrize(("asked_s", "attempts"), [(1, 5), (15, 1), (3600, 1)])
    @on_virtual_time
    async def test_a_turn_ends_within_seconds(self, asked_s: float, attempts: int) -> None:
        tried: list[float] = []

        class Away(MemoryTransport):
            async def enrol(self, token: str, message: Enrol) -> Enrolled:
                tried.append(now())
                raise TransportError("answered 503", retry_after_s=asked_s)

        async with serving() as service, client_of(service, transport=Away(service)) as client:
            turn = await client.run_once()
            assert turn.outcome == "offline"
            assert asked_s <= turn.next_turn_s <= asked_s + 1
        assert len(tried) == attempts
        assert now() < 20


class TestArguments:
    @pytest.mark.parametrize("around", ["{}\n", "{}\r\n", " {}"])
    async def test_blanks_around_a_token_are_no_part_of_it(self, around: str) -> None:
        async with LoopbackFederation(spec_of(), WORDS, backend=ScriptedBackend()) as served:
            client = EdgeClient(served.url, token=around.format(served.token), data=DATA)
            async with client:
                assert (await client.run_once()).outcome == "worked"

    async def test_each_call_may_have_a_loop_or_a_client_of_its_own(self, tmp_path: Path) -> None:
        async with LoopbackFederation(spec_of(4), WORDS, backend=ScriptedBackend()) as served:
            options: Any = {"token": served.token, "data": DATA, "state_dir": tmp_path}
            for client in 2 * [EdgeClient(served.url, **options) for _ in range(2)]:
                turn = await asyncio.to_thread(asyncio.run, client.run_once())
                assert turn.outcome == "worked"

    @pytest.mark.parametrize("token", ["s3c\nret", "s3c\x00ret", "s3cr\u00e9t", "s3c\x7fret"])
    def test_a_token_that_is_none_is_not_shown(self, token: str) -> None:
        with pytest.raises(SpecError, match=r"^arguments: token: .* printable ASCII$") as excinfo:
            EdgeClient("http://127.0.0.1:9", token=token, data=DATA)
        assert "s3c" not in str(excinfo.value)

    @pytest.mark.parametrize(
        ("argument", "events"),
        [
            ({"wait_s": 100}, "wait_s: .* less than or equal to 60 "),
            ({"wait_s": float("nan")}, "wait_s: .* finite"),
            ({"name": "x" * 201}, "name: .* at most 200 "),
            ({"run_id": "a b!"}, "run_id: .* match pattern"),
            ({"timeout_s": 0}, r"network\.timeout_s: must be above 0, not 0"),
            ({"network": {}}, "network: is dict; it must be Network"),
            ({"backend": "mini"}, "backend: is str; it must be LLMBackend"),
            ({"budget": {"queries": 5}}, r"policy\.budget: is dict; it must be Budget"),
            ({"only_when": True}, r"hooks\.only_when: is bool; it must be a function"),
            ({"on_event": asyncio.sleep}, r"hooks\.on_event: must not be async"),
            (
                {"on_event": type("Sleep", (), {"__call__": asyncio.sleep})()},
                r"hooks\.on_event: must not be async",
            ),
        ],
    )
    def test_what_no_message_can_carry(
        self, tmp_path: Path, argument: dict[str, Any], events: str
    ) -> None:
        with pytest.raises(SpecError, match=f"^arguments: {events}"):
            edge_client("http://h", token=TOKEN, data=DATA, state_dir=tmp_path / "a", **argument)
        assert not (tmp_path / "a").exists()

    @pytest.mark.parametrize("credential", ["s3c\nret", "s3c\u00e9", ""])
    async def test_a_credential_that_is_none(self, credential: str) -> None:
        async def enrol(request: web.Request) -> web.Response:
            return web.json_response({"client_id": "a", "credential": credential})

        async def rotate(request: web.Request) -> web.Response:
            return web.json_response({"credential": credential})

        app = web.Application()
        app.router.add_post("/v1/clients", enrol)
        app.router.add_post("/v1/clients/me/credential", rotate)
        async with listening(app) as url:
            transport = HttpTransport(url)
            for call in (transport.enrol("t", Enrol()), transport.rotate("t")):
                with pytest.raises(MessageError, match="malformed: credential") as excinfo:
                    await call
                assert "s3c" not in str(excinfo.value)
            await transport.aclose()
            async with EdgeClient(url, token=TOKEN, data=DATA) as client:
                assert (await client.run_once()).outcome == "offline"


class TestStartAgain:
    async def test_after_a_stop(self) -> None:
        async with serving(spec_of(1000)) as service, client_of(service) as client:
            for wanted in (3, 6):
                working = asyncio.create_task(client.run_forever())
                await until(lambda wanted=wanted: round_of(service) >= wanted)
                client.stop()
                await working
                # Started work was finished.
                assert all(seat.assignment_id is None for seat in service.runs["run"].state.seats)
            assert (await client.run_once()).outcome == "worked"

    async def test_a_stop_before_its_task_has_started(self) -> None:
        async with serving() as service, client_of(service) as client:
            working = asyncio.create_task(client.run_forever())
            client.stop()
            await working
            assert round_of(service) == 0
            await client.run_forever()
            assert service.runs["run"].state.status == "completed"

    async def test_a_stop_is_meant_for_all_at_work(self) -> None:
        asked = asyncio.Event()

        class Idling(MemoryTransport):
            async def claim(self, credential: str, message: Claim) -> Any:
                asked.set()
                await asyncio.sleep(3600)

        async with serving() as service, client_of(service, transport=Idling(service)) as client:
            working = [asyncio.create_task(client.run_forever()) for _ in range(3)]
            await asked.wait()
            client.stop()
            async with asyncio.timeout(5):
                await asyncio.gather(*working)

    async def test_a_stop_ends_one_turn(self) -> None:
        """For an app that calls `run_once`: the next time it is woken, there is work again."""
        async with serving() as service, client_of(service) as client:
            client.stop()
            assert (await client.run_once()).outcome in ("idle", "worked")
            assert (await client.run_once()).outcome == "worked"


async def forever(*_: Any) -> Any:
    """An app's function that ignores its cancellation, and answers after an hour."""
    until = now() + 3600
    while now() < until:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(until - now())


HOOKS = ("data", "only_when", "before_send", "score")
CALLS = ("enrol", "claim", "task", "score", "update")
WAITS = [*HOOKS, "model", *(f"call {name}" for name in CALLS)]


def hanging(service: Service, wait: str) -> EdgeClient:
    """A client one of whose waits never ends."""
    transport = RecordingTransport(service)
    options: dict[str, Any] = {wait: forever} if wait in HOOKS else {}
    if wait == "model":
        options = {"backend": ScriptedBackend(gate=forever)}
    elif wait.startswith("call"):
        setattr(transport, wait.removeprefix("call "), forever)
    return client_of(service, **{"transport": transport, **options})


@pytest.mark.parametrize("wait", WAITS)
@on_virtual_time
async def test_no_wait_holds_up_the_time_of_the_app(wait: str) -> None:
    task = {"task": {"template": "{prompt} {text}", "loss": "score"}} if wait == "score" else {}
    async with serving(spec_of(**task)) as service, hanging(service, wait) as client:
        began = now()
        await client.run_for(25)
        assert 24 <= now() - began <= 25


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
async def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    async with serving() as service, client_of(service) as client:
        with pytest.raises(ArgumentError, match="seconds: must be at least 0"):
            await client.run_for(seconds)


@pytest.mark.parametrize("wait", ["data", "only_when", "call claim"])
@on_virtual_time
async def test_no_wait_before_the_work_holds_up_a_stop(wait: str) -> None:
    async with serving() as service, hanging(service, wait) as client:
        asyncio.get_running_loop().call_later(10, client.stop)
        await client.run_forever()
        assert now() < 12


@pytest.mark.parametrize("wait", ["before_send", "model", "call score"])
@on_virtual_time
async def test_work_that_takes_longer_than_its_deadline_is_declined(wait: str) -> None:
    """The device goes on with other work, whatever the app's function does."""
    async with serving() as service, hanging(service, wait) as client:
        turn = await client.run_once()
        assert turn.outcome == "declined"
        assert turn.reason == "the work took longer than its deadline"
        assert 100 < now() < 3000
