"""A server whose clock is set while it works: Debian's libfaketime, with a true monotonic clock."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from fedone_sdk.client import Idle
from fedone_sdk.client.transport import HttpTransport
from fedone_sdk.messages import Claim, Enrol
from fedone_sdk.testing import LoopbackFederation
from tests.edge import edge_client
from tests.processes import fetch

ROOT = Path(__file__).parents[2]
LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        LIBRARY is None and os.environ.get("CI") != "true",
        reason="scripts/install-libfaketime installs it",
    ),
]

SERVER = """
import asyncio, json, random, sys
from pathlib import Path
from fedone_sdk.stores import SqlStore
from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from tests.runs import WORDS, run_spec

async def main():
    work = {"deadline_s": 15, "clients_per_round": 2, "min_clients": 2}
    spec = run_spec(rounds=4, participation=work)
    model = ScriptedBackend(gate=lambda _: asyncio.sleep(0.3))
    store = SqlStore.sqlite(sys.argv[1])
    async with LoopbackFederation(spec, WORDS, backend=model, store=store) as served:
        print("URL", served.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[str]:
    """The URL of a server with the clock of the file ``clock``."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, folder / "fedone.db"), env=environment, **pipes
    )
    assert process.stdout is not None
    try:
        url = ""
        while not url.startswith("URL "):
            url = (await process.stdout.readline()).decode()
        yield url.split()[1]
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_nothing_stalls_and_nothing_is_lost(tmp_path: Path) -> None:
    """Two days back and forth, at any moment of the seats, leases and waits of the devices.

    The only lost seat is that of a device that dies: it passes on after its deadline.
    """
    clock = tmp_path / "clock"
    clock.write_text("+0")
    rows = [{"text": f"text {n}", "label": n % 2} for n in range(8)]

    async def device() -> None:
        async with edge_client(url, token=LoopbackFederation.token, data=rows, wait_s=2) as client:
            await client.run_forever()

    async def dies() -> None:
        transport = HttpTransport(url)
        credential = (await transport.enrol(LoopbackFederation.token, Enrol())).credential
        while isinstance(await transport.claim(credential, Claim(num_examples=8)), Idle):
            pass
        await transport.aclose()

    async def sets_the_clock() -> None:
        while True:
            for offset in ("+2d", "-2d", "+0", "-2d", "+2d", "+0"):
                await asyncio.sleep(0.4)
                (tmp_path / "next").write_text(offset)
                (tmp_path / "next").replace(clock)

    async with asyncio.timeout(100), server(tmp_path) as url:
        setting = asyncio.create_task(sets_the_clock())
        async with asyncio.TaskGroup() as devices:
            for work in (dies, device, device, device):
                devices.create_task(work())
        setting.cancel()
        result, seats = [
            json.loads(
                await asyncio.to_thread(fetch, f"{url}/v1/runs/run{path}", token="admin") or ""
            )
            for path in ("", "/seats")
        ]
    assert (result["status"], result["rounds"]) == ("completed", 4)
    assert [lost["reason"] for lost in seats["lost"]] == ["the deadline passed"]
    assert 15 <= result["wall_s"] < 100
