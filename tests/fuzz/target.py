"""A live aggregator in its own process, with open work, as a target of bad requests.

Its SQLite file is read without the code under test, so "nothing has changed" is independent of it.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import base64
import json
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ENROLMENT, ADMIN = "fuzz-enrolment-token-1b0d", "fuzz-admin-token-77aa"
HELD_ROUND, ROUNDS = 3, 8
"""The round in which work is held open, and the number of rounds."""

_COMMON = {
    "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
    "prompt": {"length": 3, "vocabulary": {"kind": "list", "candidates": ["x", "y", "z"]}},
    "rounds": ROUNDS,
    "evaluation": {"every": 0},
}
_PART = {"deadline_s": 86_400, "min_clients": 3, "model": "scripted", "own_models": "charged"}
_METHOD = {"name": "gs-bdpl", "num_samples": 4, "batch_size": 2, "optimizer": "sgd"}

RUNS: tuple[dict[str, Any], ...] = (
    {
        **_COMMON,
        "name": "losses",
        "method": _METHOD,
        "participation": {**_PART, "exchange": "losses", "own_models": "trusted"},
        "budget": {"queries": 10_000},
    },
    {
        **_COMMON,
        "name": "alpha",
        "method": {**_METHOD, "local_steps": 2},
        "participation": {**_PART, "exchange": "alpha", "clients_per_round": 2},
    },
    {
        **_COMMON,
        "name": "search",
        "method": {"name": "random", "num_samples": 4, "batch_size": 2},
        "calibration": "none",
        "participation": {**_PART, "exchange": "losses", "clients_per_round": 2},
    },
)


@dataclass(slots=True)
class Device:
    """A device whose answers are a function of the assignment."""

    run: str
    client_id: str
    credential: str
    held: dict[str, Any] | None = None

    def update(self, work: dict[str, Any]) -> dict[str, Any]:
        """Return its answer to an assignment."""
        common = {"num_examples": 4, "scored": {"scored": 2}, "usage": {}, "model": "scripted"}
        if work["exchange"] == "losses":
            prompts = base64.b64decode(work["prompts"]["data"])
            count = work["prompts"]["shape"][0]
            width = len(prompts) // count
            losses = [
                sum(prompts[row * width : (row + 1) * width]) / 8 + 0.25 for row in range(count)
            ]
            return {**common, "exchange": "losses", "losses": losses}
        alpha = array.array("f", base64.b64decode(work["alpha"]["data"]))
        seed = work["steps"][0]["prompt_seed"]
        moved = array.array(
            "f", (value * (1 + (seed >> at % 32 & 3) / 64) for at, value in enumerate(alpha))
        )
        data = base64.b64encode(moved.tobytes()).decode()
        return {
            **common,
            "exchange": "alpha",
            "alpha": {**work["alpha"], "data": data},
            "mean_loss": 0.5,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status, content type and body of a response."""

    status: int
    content_type: str
    body: bytes

    def json(self) -> Any:
        """Return the parsed body."""
        return json.loads(self.body)


@dataclass(slots=True)
class Target:
    """A running server."""

    host: str
    port: int
    store: Path
    session: aiohttp.ClientSession
    devices: list[Device] = field(default_factory=list)

    async def ask(
        self, method: str, path: str, body: bytes | None = None, *, token: str | None = None
    ) -> Answer:
        """Send a well-formed HTTP request."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        async with self.session.request(method, path, data=body, headers=headers) as response:
            return Answer(
                status=response.status,
                content_type=response.content_type,
                body=await response.read(),
            )

    async def begin(self) -> None:
        """Enrol the devices, and play until every run has open work in `HELD_ROUND`."""
        for spec in RUNS:
            for _ in range(3):
                answer = await self.ask("POST", "/v1/clients", b'{"name":"fuzz"}', token=ENROLMENT)
                assert answer.status == 201, answer
                found = answer.json()
                self.devices.append(Device(spec["name"], found["client_id"], found["credential"]))
        async with asyncio.TaskGroup() as group:
            for device in self.devices:
                group.create_task(self._play(device, hold_at=HELD_ROUND))

    async def finish(self) -> dict[str, str]:
        """Play to the end, and return the ``alpha_sha256`` of every run."""
        async with asyncio.TaskGroup() as group:
            for device in self.devices:
                group.create_task(self._play(device, hold_at=None))
        found = {}
        for spec in RUNS:
            result = (await self.ask("GET", f"/v1/runs/{spec['name']}", token=ADMIN)).json()
            assert result["status"] == "completed", result
            found[spec["name"]] = result["alpha_sha256"]
        return found

    def holders(self, run: str | None = None) -> list[Device]:
        """Return the devices with open work."""
        return [d for d in self.devices if d.held is not None and run in (None, d.run)]

    async def _play(self, device: Device, hold_at: int | None) -> None:
        seats = {spec["name"]: spec["participation"].get("clients_per_round", 1) for spec in RUNS}
        claim = json.dumps({"num_examples": 4, "wait_s": 0.5, "run_id": device.run}).encode()
        while True:
            answer = await self.ask("POST", "/v1/assignments/claim", claim, token=device.credential)
            if answer.status == 410:
                return
            if answer.status == 204:
                if hold_at is not None and len(self.holders(device.run)) == seats[device.run]:
                    return
                continue
            assert answer.status == 200, answer
            work = answer.json()
            if hold_at is not None and work["round"] >= hold_at:
                device.held = work
                return
            device.held = None
            path = f"/v1/assignments/{work['assignment_id']}/update"
            body = json.dumps(device.update(work)).encode()
            receipt = await self.ask("POST", path, body, token=device.credential)
            assert receipt.status == 200, receipt

    def content(self) -> dict[str, list[str]]:
        """Return every row of every table."""
        connection = sqlite3.connect(f"file:{self.store}?mode=ro", uri=True)
        try:
            names = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table'"
            ).fetchall()
            return {
                name: sorted(repr(row) for row in connection.execute(f'SELECT * FROM "{name}"'))
                for (name,) in names
            }
        finally:
            connection.close()


@asynccontextmanager
async def target(folder: Path, *, gateway: bool = False) -> AsyncIterator[Target]:
    """Start a server with open work in every run."""
    store, log = folder / "fuzz.db", folder / "server.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fuzz.target", str(store)),
            *(["--gateway"] if gateway else []),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        assert url, log.read_text(encoding="utf-8")
        host, port = url.removeprefix("http://").split(":")
        async with aiohttp.ClientSession(url) as session:
            found = Target(host, int(port), store, session)
            await found.begin()
            yield found
    finally:
        process.kill()
        await process.communicate()


async def _serve(store: Path, gateway: bool) -> None:
    import structlog

    from fedone_sdk import Aggregator, RunSpec, Vocabulary
    from fedone_sdk.aggregator.rounds import RoundMachine
    from fedone_sdk.stores import SqlStore
    from fedone_sdk.testing import ScriptedBackend

    # Standard output is only for the URL: the parent reads one line.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    RoundMachine.CLAIM_TIMEOUT_S = 86_400.0
    async with Aggregator(
        backend=ScriptedBackend() if gateway else None,
        store=SqlStore.sqlite(store),
        enrolment_tokens=[ENROLMENT],
        admin_token=ADMIN,
    ) as aggregator:
        for document in RUNS:
            if gateway:
                document["participation"].pop("model", None)
            spec = RunSpec.model_validate(document)
            await aggregator.add_run(spec, Vocabulary(candidates=(" x", " y", " z")))
        print(await aggregator.listen(), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("--gateway", action="store_true")
    args = parser.parse_args()
    asyncio.run(_serve(args.store, args.gateway))
