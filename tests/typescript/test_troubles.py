"""Node devices with a real `fedone serve`: kills, restarts, lost answers."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from fedone_sdk import assets
from fedone_sdk.data import load_examples
from fedone_sdk.messages import RunResult
from tests.chaos.proxy import ChaosProxy
from tests.processes import free_port
from tests.typescript.devices import NodeDevice, node_device

pytestmark = pytest.mark.typescript

TOKEN, ADMIN = "enrol-me-please", "an-admin-token"
CANDIDATES = [" good", " bad", " really", " so"]
ROOT = Path(__file__).parents[2]
RUN = f"""\
name: tiny
task: {{template: "{{prompt}} {{text}} It was {{mask}}.", labels: {{0: " terrible", 1: " great"}}}}
prompt: {{length: 3, vocabulary: {{kind: list, candidates: {CANDIDATES}}}}}
method: {{name: gs-bdpl, num_samples: 4, batch_size: 4, optimizer: sgd, learning_rate: 0.01}}
participation:
  {{exchange: losses, clients_per_round: 2, min_clients: 2, deadline_s: 120}}
evaluation: {{every: 0}}
rounds: 24
"""
CONFIG = """\
listen: 127.0.0.1:{port}
store: fedone.db
auth: {{enrolment_tokens: [{token}], admin_token: {admin}}}
runs: [run.yaml]
"""


@asynccontextmanager
async def serve(folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`fedone serve`, killed in the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fedone_sdk.cli", "serve", "config.yaml"),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def result_of(session: aiohttp.ClientSession) -> RunResult | None:
    """Where the run stands; None while the server is away."""
    try:
        async with session.get("/v1/runs/tiny") as response:
            text = await response.text()
            return RunResult.model_validate_json(text) if response.status == 200 else None
    except aiohttp.ClientError:
        return None


async def reached(session: aiohttp.ClientSession, rounds: int) -> RunResult:
    while (found := await result_of(session)) is None or found.rounds < rounds:
        await asyncio.sleep(0.01)  # No manual clock reaches into another process.
    return found


async def undisturbed(rows: list[list[dict[str, object]]], folder: Path, package: Path) -> str:
    """The digest of the same run's alpha without failures.

    The devices are Node processes here, too: `Math.exp` and C's `exp` differ in the last bit.
    """
    port = configured(folder)
    url = f"http://127.0.0.1:{port}"
    headers = {"Authorization": f"Bearer {ADMIN}"}
    async with AsyncExitStack() as stack, aiohttp.ClientSession(url, headers=headers) as session:
        await stack.enter_async_context(serve(folder))
        await reached(session, 0)
        devices = []
        for number, own in enumerate(rows):
            started = node_device(package, url, TOKEN, own, folder / f"device-{number}")
            devices.append(await stack.enter_async_context(started))
            await devices[-1].wait_for("enrolled")
        assert await asyncio.gather(*(device.ended() for device in devices)) == [0, 0]
        return (await reached(session, 24)).alpha_sha256


def configured(folder: Path) -> int:
    """The port of a server whose files are in this new folder."""
    port = free_port()
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN)
    config = CONFIG.format(port=port, token=TOKEN, admin=ADMIN)
    (folder / "config.yaml").write_text(config)
    return port


async def test_kills_restarts_and_lost_answers(tmp_path: Path, package: Path) -> None:
    examples = load_examples(assets.path("companion_feedback") / "train.jsonl")
    rows = [[dict(row) for row in examples[start : start + 15]] for start in (0, 15)]
    expected = await undisturbed(rows, tmp_path / "undisturbed", package)

    folder = tmp_path / "disturbed"
    port = configured(folder)
    url = f"http://127.0.0.1:{port}"
    headers = {"Authorization": f"Bearer {ADMIN}"}
    async with (
        asyncio.timeout(300),
        AsyncExitStack() as stack,
        aiohttp.ClientSession(url, headers=headers) as session,
        ChaosProxy(random.Random(29)) as network,
    ):
        network.upstream = port
        server = await stack.enter_async_context(serve(folder))
        await reached(session, 0)

        async def device(number: int, address: str) -> NodeDevice:
            place = folder / f"device-{number}"
            started = node_device(package, address, TOKEN, rows[number], place)
            return await stack.enter_async_context(started)

        first = await device(0, url)
        await first.wait_for("enrolled")
        other = await device(1, network.url)  # which cuts its connections again and again
        ending = asyncio.create_task(other.ended())

        await reached(session, 4)
        await first.wait_for("assigned")
        first.process.kill()
        first = await device(0, url)

        await reached(session, 9)
        server.kill()
        await server.wait()
        server = await stack.enter_async_context(serve(folder))

        await reached(session, 15)
        first.process.kill()
        server.kill()
        await server.wait()
        server = await stack.enter_async_context(serve(folder))
        first = await device(0, url)

        assert await first.ended() == await ending == 0
        found = await reached(session, 24)
    assert network.cuts > 0
    assert found.status == "completed"
    assert found.alpha_sha256 == expected
    assert {one.client_id for one in found.history} == {found.history[0].client_id}
