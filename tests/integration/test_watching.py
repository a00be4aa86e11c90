"""What users see of a run besides its result: identity, seats, lost work, alpha, page."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from aiohttp import web
from pydantic import SecretStr
from structlog.testing import capture_logs

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator.authority import AdminToken
from fedone_sdk.aggregator.http.run_routes import likeliest
from fedone_sdk.aggregator.http.server_routes import FILES
from fedone_sdk.messages import Me, RoundReport, Seats, TokenProbabilities
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import SqlStore
from fedone_sdk.vocabulary import Vocabulary
from tests.integration.caller import ADMIN, TOKEN, Server, served
from tests.runs import run_spec

OPS, LOOK = "ops-c4f2", "look-e06d"
WORDS = Vocabulary(candidates=(" good", " bad", " fine", ""))


def spec_of(**changes: Any) -> RunSpec:
    return run_spec(**{"budget": {"queries": 100}, **changes})


async def decline(server: Server, credential: str, work: dict[str, Any], reason: str) -> None:
    path = f"/v1/assignments/{work['assignment_id']}/decline"
    assert (await server.call("POST", path, {"reason": reason}, token=credential))[0] == 204


async def seats_of(server: Server, token: str = LOOK) -> Seats:
    return Seats.model_validate(await server.ok("GET", "/v1/runs/run/seats", token=token))


def serving(spec: RunSpec | None = None, **settings: Any) -> AbstractAsyncContextManager[Server]:
    return served(
        spec or spec_of(),
        words=WORDS,
        admin_tokens=[
            AdminToken(token=SecretStr(OPS), name="ops", role="operator", runs=("acme-*",)),
            AdminToken(token=SecretStr(LOOK), name="look", role="viewer"),
        ],
        **settings,
    )


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as found:
        yield found


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (ADMIN, Me(name="admin_token", role="admin")),
        (OPS, Me(name="ops", role="operator", runs=("acme-*",))),
        (LOOK, Me(name="look", role="viewer")),
    ],
)
async def test_who_asks(server: Server, token: str, expected: Me) -> None:
    status, document, _ = await server.call("GET", "/v1/me", token=token)
    assert (status, Me.model_validate(document)) == (200, expected)


async def test_a_result_without_its_rounds(server: Server) -> None:
    async with EdgeClient(
        server.url, token=TOKEN, data=[{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    ) as client:
        await client.run_forever()
    path = "/v1/runs/run"
    _, whole, _ = await server.call("GET", path, token=LOOK)
    _, short, _ = await server.call("GET", f"{path}?history=false", token=LOOK)
    assert len(whole["history"]) == 3
    assert short == {**whole, "history": []}
    refused = await server.refused("GET", f"{path}?history=maybe", token=LOOK)
    assert refused == "invalid_message"


class TestSeats:
    async def test_working_and_waiting_clients(self, server: Server) -> None:
        assert (await seats_of(server)) == Seats(round=0, waiting=0, seats=(), lost=())
        first, credential = await server.enrol()
        await server.claim(credential)
        _, other = await server.enrol()
        await server.call(
            "POST", "/v1/assignments/claim", {"num_examples": 5, "wait_s": 0}, token=other
        )
        server.clock.advance(40)
        found = await seats_of(server)
        (seat,) = found.seats
        assert (seat.client_id, seat.phase, seat.number, seat.due_in_s) == (first, "working", 0, 60)
        assert found.waiting == 1

    async def test_lost_work_outlives_a_restart(self, tmp_path: Path) -> None:
        async with serving(store=SqlStore.sqlite(tmp_path / "runs.db")) as server:
            device, credential = await server.enrol()
            work = await server.claim(credential)
            await decline(server, credential, work, "the battery is low")
            await server.claim(credential)
            server.clock.advance(101)
            await server.aggregator.service.replicas.tick()
            before = (await seats_of(server)).lost
        assert [(work.round, work.client_id) for work in before] == [(0, device), (0, device)]
        assert (before[0].reason, before[0].said) == ("the client declined", None)
        assert before[1].reason == "the deadline passed"
        assert [work.at for work in before] == [server.clock.now() - 101, server.clock.now()]
        async with serving(store=SqlStore.sqlite(tmp_path / "runs.db")) as server:
            assert (await seats_of(server)).lost == before


class TestProbabilities:
    async def test_of_an_untrained_run(self, server: Server) -> None:
        _, document, _ = await server.call("GET", "/v1/runs/run/probabilities?top=3", token=LOOK)
        found = TokenProbabilities.model_validate(document)
        assert (found.round, found.vocab_size, len(found.positions)) == (0, 4, 2)
        for position in found.positions:
            assert position.entropy == 2.0
            assert [each.probability for each in position.tokens] == [0.25] * 3

    @pytest.mark.parametrize(
        "top", ["0", "33", "-1", "1.5", "many", "", "٣", "9" * 5000, "0329999"]
    )
    async def test_how_many_is_bounded(self, server: Server, top: str) -> None:
        path = f"/v1/runs/run/probabilities?top={top}"
        assert await server.refused("GET", path, token=LOOK) == "invalid_message"

    def test_the_likeliest_come_first(self) -> None:
        alpha = np.array([[1, 5, 2, 0], [3, 3, 3, 3]], dtype=np.float32)
        first, second = likeliest(alpha, WORDS, top=2)
        assert [(each.token, each.probability) for each in first.tokens] == [
            (" bad", 0.625),
            (" fine", 0.25),
        ]
        expected = -sum(p * math.log2(p) for p in (1 / 8, 5 / 8, 2 / 8))
        assert first.entropy == pytest.approx(expected, abs=1e-6)
        assert [each.token for each in second.tokens] == [" good", " bad"]


async def test_a_round_comes_again_when_its_metric_is_known(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EdgeClient(
        server.url, token=TOKEN, data=[{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    ) as client:
        await client.run_once()
        run = server.aggregator.service.runs["run"]
        headers = {"Authorization": f"Bearer {LOOK}"}
        async with server.session.get(
            f"{server.url}/v1/runs/run/events", headers=headers
        ) as response:
            first = await response.content.readuntil(b"\n\n")
            await run.record_metric(0, 0.75)
            await client.run_forever()
            rest = await response.text()
    data = re.findall(r"event: round\ndata: (.*)", first.decode() + rest)
    reports = [RoundReport.model_validate_json(each) for each in data]
    assert [(each.round, each.metric) for each in reports] == [
        (0, None),
        (0, 0.75),
        (1, None),
        (2, None),
    ]
    monkeypatch.setattr(web.StreamResponse, "write", Mock(side_effect=ConnectionResetError))
    with capture_logs() as logs:
        await server.session.get(f"{server.url}/v1/runs/run/events", headers=headers)
    assert logs == []


class TestPage:
    async def test_a_browser_gets_the_dashboard(self, server: Server) -> None:
        async with server.session.get(
            f"{server.url}/", headers={"Accept": "text/html,*/*;q=0.8"}
        ) as response:
            page = await response.text()
            assert response.content_type == "text/html"
            assert response.headers["Vary"] == "Accept"
            policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "style=" not in page
        assert re.findall(r"<script(?![^>]* src=)", page) == []
        links = re.findall(r'(?:src|href)="(dashboard/[^"]*)"', page)
        assert len(links) >= 5
        for link in links:
            async with server.session.get(f"{server.url}/{link}") as response:
                assert response.status == 200

    async def test_every_file_is_served_and_known_again(self, server: Server) -> None:
        assert {"app.js", "style.css", "uPlot.iife.min.js"} <= FILES.keys()
        for name in FILES:
            url = f"{server.url}/dashboard/{name}"
            async with server.session.get(url) as response:
                assert await response.read() == FILES[name].read_bytes()
                tag = response.headers["ETag"]
            async with server.session.get(url, headers={"If-None-Match": tag}) as response:
                assert (response.status, await response.read()) == (304, b"")

    @pytest.mark.parametrize("name", ["index.html", "uPlot.LICENSE.txt", "..%2ffiles.py", "%00"])
    async def test_no_other_file(self, server: Server, name: str) -> None:
        assert await server.refused("GET", f"/dashboard/{name}") == "not_found"
