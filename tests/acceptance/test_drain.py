"""`fedone serve` drains: a real process gets SIGTERM while devices work."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.fake_openai.server import FakeOpenAI
from tests.processes import free_port

TOKEN, ADMIN = "enrol-me-please", "an-admin-token"
LATENCY_S = 0.6
PATIENCE_S = 40.0
RUN = """\
name: {name}
task: {{template: "{{prompt}} {{text}} It was", labels: {{0: " terrible", 1: " great"}}}}
prompt: {{length: 3, vocabulary: {{kind: list, candidates: [" good", " bad", " really", " so"]}}}}
method: {{name: gs-bdpl, num_samples: 2, batch_size: 1, optimizer: sgd}}
participation: {{exchange: losses, own_models: charged}}
budget: {{queries: 100000}}
rounds: 10000
"""
CONFIG = """\
listen: 127.0.0.1:{port}
store: fedone.db
auth: {{enrolment_tokens: [{token}], admin_token: {admin}}}
backend: {{kind: openai, base_url: "{model}", model: fake-1, prices: {{prompt: 1, completion: 1}}}}
runs: [{runs}]
log: {{requests: info}}
drain_s: 20
drain_notice_s: {notice_s}
"""


class Gone(Exception):
    """The server no longer answers."""


@dataclass
class Served:
    """A server process, and what its devices have seen."""

    process: asyncio.subprocess.Process
    url: str
    session: aiohttp.ClientSession
    signalled: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    retry_after: list[str] = field(default_factory=list)

    async def call(
        self, method: str, path: str, body: object = None, token: str | None = None
    ) -> tuple[int, str, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.session.request(
            method, f"{self.url}{path}", json=body, headers=headers
        ) as response:
            return response.status, await response.text(), response.headers

    async def device(self, run_id: str) -> None:
        """Work until the server has stopped."""
        _, text, _ = await self.call("POST", "/v1/clients", {}, TOKEN)
        credential = json.loads(text)["credential"]
        try:
            while True:
                await self._work(credential, run_id)
        except Gone:
            self.seen["gone"] += 1

    async def _work(self, credential: str, run_id: str) -> None:
        asked = {"num_examples": 5, "wait_s": 60, "run_id": run_id}
        status, text, headers = await self._counted(
            "claim", "/v1/assignments/claim", asked, credential
        )
        if status == 204:
            self.retry_after.append(headers["Retry-After"])
            await asyncio.sleep(0.05)  # No device is so impatient.
            return
        work = json.loads(text)
        score = {"assignment_id": work["assignment_id"], "examples": [{"text": "fine"}]}
        self.under_way += 1
        _, text, _ = await self._counted("score", "/v1/score", score, credential)
        self.under_way -= 1
        update = {
            "exchange": "losses",
            "num_examples": 5,
            "scored": {"scored": 1},
            "usage": {},
            "model": json.loads(text)["model"],
            "losses": [0.5, 0.25],
        }
        path = f"/v1/assignments/{work['assignment_id']}/update"
        await self._counted("update", path, update, credential)

    async def _counted(
        self, what: str, path: str, body: object, token: str
    ) -> tuple[int, str, Any]:
        when = "after" if self.signalled else "before"
        try:
            status, text, headers = await self.call("POST", path, body, token)
        except aiohttp.ClientConnectorError as exc:
            raise Gone from exc
        except aiohttp.ClientError as exc:
            self.seen[f"{what} {when}: {type(exc).__name__}"] += 1
            raise Gone from exc
        self.seen[f"{what} {when}: {status}"] += 1
        return status, text, headers

    def tell(self) -> None:
        self.signalled = True
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)


@asynccontextmanager
async def serving(
    folder: Path, *, num_runs: int = 1, notice_s: float = 0, latency_s: float = LATENCY_S
) -> AsyncIterator[Served]:
    port = free_port()
    names = [f"run{number}" for number in range(num_runs)]
    for name in names:
        (folder / f"{name}.yaml").write_text(RUN.format(name=name))
    async with (
        FakeOpenAI(models={"fake-1": {}}, latency_s=latency_s) as model,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        (folder / "config.yaml").write_text(
            CONFIG.format(
                port=port,
                token=TOKEN,
                admin=ADMIN,
                model=model.base_url,
                runs=", ".join(f"{name}.yaml" for name in names),
                notice_s=notice_s,
            )
        )
        with (folder / "out").open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fedone_sdk.cli", "serve", "config.yaml"),
                cwd=folder,
                stdout=out,
                stderr=out,
                env=os.environ
                | {"PYTHONPATH": str(Path(__file__).parents[2]), "OPENAI_API_KEY": "none"},
            )
        served = Served(process, f"http://127.0.0.1:{port}", session)
        try:
            await until(lambda: '"event": "serving"' in (folder / "out").read_text(), served)
            yield served
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def until(true: Any, served: Served) -> None:
    # No manual clock reaches into another process.
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            assert served.process.returncode is None, served.seen
            await asyncio.sleep(0.01)


async def test_no_pending_call_is_lost(tmp_path: Path) -> None:
    """Model calls are slow: pending ones are answered, others are not."""
    async with serving(tmp_path, num_runs=4, notice_s=2) as served:
        devices = [asyncio.create_task(served.device(f"run{number % 4}")) for number in range(12)]
        stream = asyncio.create_task(served.call("GET", "/v1/runs/run0/events", token=ADMIN))
        await until(
            lambda: served.seen["update before: 200"] >= 8 and served.under_way >= 2, served
        )
        loop = asyncio.get_running_loop()
        began = loop.time()
        served.tell()
        status = 200
        while status == 200:  # at once, before the next request
            status, text, _ = await served.call("GET", "/readyz")
        assert loop.time() - began < 1
        assert json.loads(text)["checks"]["serving"]["ok"] is False
        assert (await served.call("GET", "/healthz"))[0] == 200
        assert await served.ended() == 0
        await asyncio.gather(*devices)
        message = (await stream)[1]
    assert "event: round" in message
    assert "event: end" not in message
    seen = served.seen
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    answers = [line for line in lines if line["event"] == "request"]
    # Each request that the server started was answered, and the device received the answer. A
    # connection that closes before a request is no answer, and the device retries elsewhere.
    for what in ("score", "update"):
        heard = seen[f"{what} before: 200"] + seen[f"{what} after: 200"]
        assert heard == sum(line["path"].endswith(f"/{what}") for line in answers), seen
    assert {line["status"] for line in answers if line["path"] != "/readyz"} <= {200, 201, 204}
    assert seen["score after: 200"] >= 2
    assert seen["gone"] == len(devices)
    assert seen["claim after: 204"] + seen["claim before: 204"] >= 1
    assert all(int(after) >= 1 for after in served.retry_after)
    events = [line["event"] for line in lines if line not in answers]
    assert events[-2:] == ["stopping", "stopped"]
    assert not [line for line in lines if line["level"] == "error"]


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, notice_s=30, latency_s=30) as served:
        device = asyncio.create_task(served.device("run0"))
        await until(lambda: served.under_way, served)
        served.tell()
        await until(lambda: '"event": "stopping"' in (tmp_path / "out").read_text(), served)
        await asyncio.sleep(0.2)  # Signals within 0.1 s count as one.
        began = asyncio.get_running_loop().time()
        served.tell()
        assert await served.ended() != 0
        assert asyncio.get_running_loop().time() - began < 5
        device.cancel()
        await asyncio.gather(device, return_exceptions=True)
    out = (tmp_path / "out").read_text()
    assert not re.search(rf"{TOKEN}|{ADMIN}", out)
