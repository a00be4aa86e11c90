"""A short run of bad requests against a live server; ``python -m tests.fuzz.http`` is long."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fuzz.http import attack
from tests.fuzz.target import ENROLMENT, Target, target
from tests.fuzz.wire import Waits, request


@pytest.mark.parametrize("gateway", [False, True], ids=["own models", "gateway"])
async def test_bad_requests_change_nothing(gateway: bool) -> None:
    inputs = int(os.environ.get("FEDONE_FUZZ_INPUTS", "400"))
    report = await attack(inputs, seed=int(gateway), gateway=gateway)
    assert report.inputs == inputs
    assert not report.broken
    assert not report.taken
    assert not report.changed
    assert report.same_alpha
    assert report.slowest_s < 5.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Target]:
    async with target(tmp_path) as found:
        yield found


async def test_slow_senders_do_not_hold_up_others(server: Target) -> None:
    head = b"POST /v1/clients HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    slow = [await asyncio.open_connection(server.host, server.port) for _ in range(200)]
    try:
        for number, (_, writer) in enumerate(slow):
            writer.write(head[: number % len(head) + 1])
        for _ in range(5):
            for _, writer in slow:
                writer.write(b"x")
            began = time.perf_counter()
            answer = await server.ask("POST", "/v1/clients", b"{}", token=ENROLMENT)
            assert answer.status == 201
            assert time.perf_counter() - began < 5.0
    finally:
        for _, writer in slow:
            writer.transport.abort()


async def test_half_an_update_does_not_count(server: Target) -> None:
    device = server.holders("losses")[0]
    assert device.held is not None
    path = f"/v1/assignments/{device.held['assignment_id']}/update"
    body = json.dumps(device.update(device.held)).encode()
    data = request("POST", path, body, token=device.credential)
    for size in (1, len(data) // 2, len(data) - 1):
        with pytest.raises(Waits):
            await server.wire().ask(data[:size], more_follows_s=0.2)
    answers = [await server.ask_raw(data) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].body == answers[1].body


async def test_requests_in_one_breath_are_answered_in_order(server: Target) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    calls = [
        request("GET", "/healthz"),
        request("GET", "/v1/none-such"),
        request("POST", "/v1/clients", b"[]", token=ENROLMENT),
    ]
    writer.write(b"".join(calls))
    statuses = []
    async with asyncio.timeout(20):
        while len(statuses) < len(calls):
            head = await reader.readuntil(b"\r\n\r\n")
            statuses.append(int(head.split(b" ", 2)[1]))
            size = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            await reader.readexactly(int(size))
    writer.transport.abort()
    assert statuses == [200, 404, 422]
