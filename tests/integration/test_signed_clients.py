"""Runs with devices that sign, or have certificates."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Aggregator
from fedone_sdk.client import HttpTransport
from fedone_sdk.testing import ManualClock, ScriptedBackend
from tests.edge import edge_client
from tests.runs import TOKEN, WORDS, run_spec

DATA: list[dict[str, Any]] = [{"text": f"text {n}", "label": n % 2} for n in range(6)]
SPEC = run_spec(method={"batch_size": 5})


async def work(aggregator: Aggregator, client: EdgeClient) -> None:
    run = await aggregator.add_run(SPEC, WORDS)
    async with asyncio.timeout(60), client:
        working = asyncio.create_task(client.run_forever())
        await run.wait()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert (run.result().status, run.result().rounds) == ("completed", 3)


@pytest.mark.parametrize("off_s", [0, 90 * 60, -90 * 60])
async def test_where_signatures_are_required(tmp_path: Path, off_s: float) -> None:
    async with Aggregator(
        backend=ScriptedBackend(), enrolment_tokens=[TOKEN], require_signatures=True
    ) as aggregator:
        url = await aggregator.listen()
        clock = ManualClock(time.time() + off_s)
        client = edge_client(
            url,
            token=TOKEN,
            data=DATA,
            sign=True,
            wait_s=1,
            state_dir=tmp_path / "state",
            transport=HttpTransport(url, clock=clock),
        )
        await work(aggregator, client)
        (enrolled,) = await aggregator.service.access.clients()
        assert enrolled.public_key is not None
