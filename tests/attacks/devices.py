"""Hostile devices against a run: its server's time, its budget, its devices, its prompt."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedone_sdk.aggregator import Service
from fedone_sdk.aggregator.http.guards import Limits
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.backends import Query
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import Decline, LossesAssignment, Tensor
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import ClientRecord
from fedone_sdk.testing import ScriptedBackend
from tests.attacks import Succeeded, attack
from tests.by_hand import Device, claim, enrol, score, update
from tests.integration.caller import TOKEN, served
from tests.processes import fetch, free_port
from tests.runs import TASK, run_spec, serving

LONG = tuple({"text": f"{number} " + "x" * 19_000} for number in range(2))


class Counting(ScriptedBackend):
    """A model that counts the texts it quotes."""

    quoted = 0

    async def quote(self, query: Query) -> Usage:
        self.quoted += len(query.inputs)
        await asyncio.sleep(0)
        return await super().quote(query)


def spec_of(**changes: Any) -> RunSpec:
    """Return a run on a server with a gateway, with the defaults for models on devices."""
    part = {"own_models": None, **changes.pop("participation", {})}
    return run_spec(participation=part, **changes)


async def _refused(call: Any, *codes: str) -> None:
    try:
        await call
    except ProblemError as exc:
        if exc.code not in codes:
            raise
    else:
        raise Succeeded("the request is accepted")


@attack(
    "long texts after the lease is used up",
    before="all texts are quoted first, on the event loop: 1.9 s for 16 x 20,000 characters",
)
async def _freeze(_: Path) -> str:
    model = Counting()
    async with serving(spec_of(), backend=model) as service:
        (client,) = await enrol(service)
        device = Device(service, client)
        await device.claim()
        await device.score()
        before = model.quoted
        for number in range(10):
            texts = tuple({"text": f"{number} {one['text']}"} for one in LONG)
            await _refused(device.score(examples=texts), "lease_exhausted")
    if model.quoted > before:
        raise Succeeded(f"{model.quoted - before} texts are quoted without a lease")
    return "refused before any text is read"


@attack("40 requests at once under one lease", before="328 texts are quoted under a lease of 8")
async def _freeze_at_once(_: Path) -> str:
    model = Counting()
    async with serving(spec_of(), backend=model) as service:
        (client,) = await enrol(service)
        device = Device(service, client)
        work = await device.claim()
        assert work is not None
        texts = [({"text": f"{number} a"}, {"text": f"{number} b"}) for number in range(40)]
        before = model.quoted
        calls = [device.score(examples=two) for two in texts]
        found = await asyncio.gather(*calls, return_exceptions=True)
    answered = sum(not isinstance(one, BaseException) for one in found)
    quoted = model.quoted - before
    if answered != 1 or quoted > 2 * 2 * work.leased_queries:  # To reserve, and for the attempt.
        raise Succeeded(f"{answered} of 40 answered, {quoted} texts quoted")
    return "1 of 40 simultaneous requests is admitted"


@attack(
    "claim with own_model and decline",
    before="the run failed after 51 claims, with 4,080 requests and USD 0.60 spent",
)
async def _drain_own_model(_: Path) -> str:
    async with serving(spec_of(), backend=ScriptedBackend()) as service:
        (client,) = await enrol(service)
        await _refused(claim(service, client, own_model=True), "forbidden")
        state = service.runs["run"].state
    if state.account.spent != NOTHING or not state.running:
        raise Succeeded(f"the run is {state.status}, {state.account.spent} spent")
    return "claims with own_model are refused; nothing spent"


@attack(
    "the same where the run allows own models",
    before="40 declines cost 160 queries, none of which was made",
)
async def _drain_allowed(_: Path) -> str:
    spec = spec_of(participation={"own_models": "charged"}, budget={"queries": 1000})
    async with serving(spec, backend=ScriptedBackend()) as service:
        run, (client,) = service.runs["run"], await enrol(service)
        for _ in range(40):
            await _decline(service, client, own_model=True)
    state = run.state
    if state.account.spent != NOTHING or not state.running:
        raise Succeeded(f"the run is {state.status}, {state.account.spent} spent")
    return "40 declines cost nothing"


async def _decline(service: Service, client: ClientRecord, **fields: Any) -> None:
    work = await claim(service, client, **fields)
    if work is not None:
        message = Decline(reason="no battery")
        await service.work.decline(client, work.assignment_id, message)


async def _work(service: Service, clients: Iterable[ClientRecord], rounds: int = 10_000) -> None:
    """Let honest devices work, one after the other, until the run ends or they get no more."""
    run: ServedRun = service.runs["run"]
    ends = run.state.round + rounds
    for _ in range(50):
        for client in clients:
            if not run.state.running or run.state.round >= ends:
                return
            work = await claim(service, client)
            if work is not None:
                await score(service, client, work)
                await update(service, client, work)


@attack(
    "20 devices that only decline",
    before="2 honest devices complete 40 rounds, the others get 251 seats",
)
async def _crowd(_: Path) -> str:
    async with serving(spec_of(rounds=40), backend=ScriptedBackend()) as service:
        run, clients = service.runs["run"], await enrol(service, 22)
        hostile, honest, declined = clients[:20], clients[20:], 0
        while run.state.running and declined < 500:
            for client in hostile:
                if await claim(service, client) is not None:
                    seat = run.state.seat_of(client.index)
                    assert seat is not None
                    assert seat.assignment_id is not None
                    await service.work.decline(client, seat.assignment_id, Decline(reason="no"))
                    declined += 1
            await _work(service, honest, rounds=1)
        state = run.state
    if state.status != "completed":
        raise Succeeded(
            f"the run is {state.status} after {state.round} rounds, {declined} declines"
        )
    return f"2 honest devices complete 40 rounds; 20 hostile ones get {declined} seats"


@attack("80 devices enrol from one address", before="all 80 enrol")
async def _enrol(_: Path) -> str:
    async with served(spec_of(), limits=Limits()) as server:
        statuses = []
        for _ in range(80):
            status, _, _ = await server.call(
                "POST", "/v1/clients", {}, token="enrolment-token-7f3a"
            )
            statuses.append(status)
        clients = await server.aggregator.service.store.num_clients()
    if clients > 70:
        raise Succeeded(f"{clients} devices from one address in a moment")
    return f"{clients} of 80 devices from one address, then 429"


@attack("large bodies without a lease", before="each is parsed, 100 a second")
async def _bodies(_: Path) -> str:
    async with served(spec_of(), limits=Limits()) as server:
        credential = await server.credential()
        body = b'{"assignment_id": "' + b"x" * 4_000_000 + b'"}'
        status, document, _ = await server.call("POST", "/v1/score", body, token=credential)
        if document["code"] != "assignment_expired":
            raise Succeeded(f"{status} {document['code']}: the body is parsed")
        await server.claim(credential)
        sent = 0
        while status != 429 and sent < 60:
            status, _, _ = await server.call("POST", "/v1/score", body, token=credential)
            sent += 1
    if status != 429:
        raise Succeeded(f"{sent} bodies of 4 MB are parsed in a moment")
    return f"not read without open work; else {sent - 1} bodies of 4 MB a minute"


@attack(
    "20 bodies of 31 MiB at once, by one device with a lease",
    before="all are read: 1.3 GB of memory for 40 of them",
)
async def _unfinished(_: Path) -> str:
    """Bodies that announce 31 MiB, or no length, and do not end."""
    found = []
    async with served(spec_of(participation={"clients_per_round": 2}), limits=Limits()) as server:
        address = server.url.removeprefix("http://").split(":")
        credentials = [await server.credential() for _ in range(2)]
        await asyncio.gather(*(server.claim(one, wait_s=5) for one in credentials))
        sizes = (f"Content-Length: {31 * 2**20}", "Transfer-Encoding: chunked")
        for credential, size in zip(credentials, sizes, strict=True):
            head = (
                f"POST /v1/score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {credential}\r\n"
                "Content-Type: application/json"
            )
            read = 0
            for _ in range(20):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(f"{head}\r\n{size}\r\n\r\n".encode())
                try:
                    async with asyncio.timeout(0.2):
                        line = await reader.readline()
                    assert b" 429 " in line, line
                except TimeoutError:
                    read += 1
                writer.close()
            found.append(read)
    if max(found) > 3:
        raise Succeeded(f"{max(found)} of 20 bodies of 31 MiB are read at once")
    return f"{max(found)} of 20 are read, the others get 429"


@attack("a refusal repeats a device's 8 MB", before="the refusal has 30 MB for a name of 30 MB")
async def _repeated(_: Path) -> str:
    longest = 0
    async with served(spec_of()) as server:
        credential = await server.credential()
        work = await server.claim(credential)
        long, given = "a" * 8_000_000, {"assignment_id": work["assignment_id"]}
        bodies = [
            {**given, "examples": [{long: "x"}]},
            {**given, "examples": [{"text": long}]},
            {**given, long: 1},
            {"assignment_id": long},
        ]
        for body in bodies:
            status, document, _ = await server.call("POST", "/v1/score", body, token=credential)
            assert status == 422, document
            longest = max(longest, len(document["detail"]))
    if longest > 1000:
        raise Succeeded(f"an answer of {longest:,} characters")
    return f"{longest} characters at most"


@attack(
    "silent connections of an unknown caller",
    before="1,100 connections stop the server, /healthz included",
)
async def _silent(folder: Path) -> str:
    port, config = free_port(), folder / "config.yaml"
    config.write_text(
        f"listen: 127.0.0.1:{port}\nbackend: null\nauth: {{enrolment_tokens: [{TOKEN}]}}\n"
    )
    command = f"ulimit -Sn 256; exec {sys.executable} -m fedone_sdk.cli serve {config}"
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", command),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    silent: list[asyncio.StreamWriter] = []
    try:
        async with asyncio.timeout(60):
            while await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/healthz") is None:
                await asyncio.sleep(0.1)
            for _ in range(400):
                silent.append((await asyncio.open_connection("127.0.0.1", port))[1])
        if await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/healthz") is None:
            raise Succeeded("400 silent connections stop a server that may open 256 files")
    finally:
        for writer in silent:
            writer.close()
        process.kill()
        await process.wait()
    return "the server raises its limit of open files, and answers"


@attack(
    "an outage of the model in which honest devices decline",
    before="after it, 3 of 4 are set aside for up to a day",
)
async def _outage(_: Path) -> str:
    """The model fails, and recovers: honest devices decline until then."""
    async with serving(spec_of(rounds=9), backend=ScriptedBackend()) as service:
        run, clients = service.runs["run"], await enrol(service, 4)
        while run.state.lost < 45:
            for client in clients:
                await _decline(service, client)
        await _work(service, clients, rounds=1)
        now = service.clock.now()
        aside = sum(run.state.is_aside(client.index, now) for client in clients)
    if aside:
        raise Succeeded(f"{aside} of 4 honest devices are set aside")
    return "45 declines in a row count once for each device"


@attack(
    "one lie about label probabilities, under privacy", before="the final label bias is 50 nats"
)
async def _bend(_: Path) -> str:
    """One of 11 devices lies once about its labels, in a run with noise."""
    worst = 0.0
    for far in (1e6, -1e6):
        spec = run_spec(
            method={"name": "random", "halving": 0, "num_samples": 4, "batch_size": 4},
            task={**TASK, "metric": "loss"},
            privacy={"clip": 1.0, "noise_multiplier": 1.0},
            defence="standard",
            calibration="labels",
            rounds=22,
        )
        async with serving(spec) as service:
            clients = await enrol(service, 11)
            run = service.runs["run"]
            while run.state.running:
                for client in clients:
                    work = await claim(service, client) if run.state.running else None
                    if not isinstance(work, LossesAssignment):
                        continue
                    lies = run.state.round == 15
                    losses = tuple(0.0 if lies else 0.5 + 0.1 * index for index in range(4))
                    shares = (far, -far) if lies else (0.5, 0.5)
                    flat = itertools.chain(*((loss, 1.0, *shares) for loss in losses))
                    counts = (2.0**31, -(2.0**31)) if lies else (2.0, 2.0)
                    by_class = Tensor.pack(flat, (4, 1, 4), "float32")
                    told = {"losses": losses, "by_class": by_class, "class_counts": counts}
                    await update(service, client, work, **told)
            bias = run.machine.bias(run.state)
        assert bias is not None
        worst = max(worst, *map(abs, bias))
    if worst > 2.0:
        raise Succeeded(f"the final label bias is {worst:.1f} nats")
    return f"the final label bias is off by {worst:.1f} nats"
