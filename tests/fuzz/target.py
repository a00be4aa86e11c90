"""A live aggregator in its own process, with open work, as a target.

What it keeps is read from its SQLite file by other means than its own, so that "nothing has
changed" does not rest on the code under test.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import base64
import hashlib
import json
import secrets
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.fuzz.wire import Answer, Wire, request

ENROLMENT, ADMIN = "fuzz-enrolment-token-1b0d", "fuzz-admin-token-77aa"
HELD_ROUND, ROUNDS = 3, 8
"""The round in which work is held open, and how many there are."""

_VOLATILE_TABLES = frozenset({"nonces"})
_VOLATILE_KEYS = frozenset({"counters"})

_COMMON = {
    "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
    "prompt": {"length": 3, "vocabulary": {"kind": "list", "candidates": ["x", "y", "z"]}},
    "rounds": ROUNDS,
    "evaluation": {"every": 0},
}
_PART = {"deadline_s": 86_400, "min_clients": 3}
_METHOD = {"name": "gs-bdpl", "num_samples": 4, "batch_size": 2, "optimizer": "sgd"}

RUNS: tuple[dict[str, Any], ...] = (
    {
        **_COMMON,
        "name": "losses",
        "method": _METHOD,
        "participation": {**_PART, "exchange": "losses", "trusted_clients": True},
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
        "name": "random",
        "method": {"name": "random", "num_samples": 4, "batch_size": 2},
        "calibration": "none",
        "participation": {**_PART, "exchange": "losses", "clients_per_round": 2},
    },
)


@dataclass(slots=True)
class Device:
    """A device that works by script: what it answers follows from what it is asked.

    Attributes:
        run: The run that it works for.
        client_id: Its public name.
        credential: Its secret.
        held: The work that it holds back.
    """

    run: str
    client_id: str
    credential: str
    held: dict[str, Any] | None = None

    @property
    def claim(self) -> bytes:
        """Its request for work, which waits a while."""
        body = {"num_examples": 4, "wait_s": 0.5, "run_id": self.run}
        return request(
            "POST", "/v1/assignments/claim", json.dumps(body).encode(), token=self.credential
        )

    def update(self, work: dict[str, Any]) -> dict[str, Any]:
        """Its answer to an assignment."""
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
            "memory": work["memory"],
            "mean_loss": 0.5,
        }


@dataclass(frozen=True, slots=True)
class Signer:
    """A device that must sign its requests.

    Attributes:
        client_id: Its public name.
        credential: Its secret.
        key: Its private key.
    """

    client_id: str
    credential: str
    key: Ed25519PrivateKey

    def headers(self, method: str, path: str, body: bytes) -> dict[str, str]:
        """A signer written from RFC 9421, independent of the code under test."""
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        covered = '("@method" "@path" "@query" "content-digest")'
        nonce = secrets.token_urlsafe(16)
        params = (
            f'{covered};created={int(time.time())};keyid="{self.client_id}";nonce="{nonce}"'
            ';alg="ed25519"'
        )
        target, _, query = path.partition("?")
        base = (
            f'"@method": {method}\n"@path": {target}\n"@query": ?{query}\n'
            f'"content-digest": sha-256=:{digest}:\n"@signature-params": {params}'
        )
        signature = base64.b64encode(self.key.sign(base.encode())).decode()
        return {
            "Content-Digest": f"sha-256=:{digest}:",
            "Signature-Input": f"fedone={params}",
            "Signature": f"fedone=:{signature}:",
        }


@dataclass(slots=True)
class Target:
    """A running server.

    Attributes:
        host: Where it listens.
        port: Where it listens.
        store: Its SQLite file.
        process: It.
        devices: Enrolled devices; three for each run.
        signer: A device that must sign.
        archive: A run of the server, exported.
    """

    host: str
    port: int
    store: Path
    process: psutil.Process
    devices: list[Device] = field(default_factory=list)
    signer: Signer | None = None
    archive: bytes | None = None

    def wire(self, patience_s: float = 20.0) -> Wire:
        """A new connection."""
        return Wire(self.host, self.port, patience_s=patience_s)

    async def ask(self, *args: Any, **more: Any) -> Answer:
        """One well-formed request on a separate connection.

        Raises:
            ConnectionError: The server hung up.
        """
        answer = await self.wire().ask(request(*args, **more))
        if answer is None:
            raise ConnectionError("the server hung up")
        return answer

    async def enrol(self, run: str) -> Device:
        """Enrols a device."""
        answer = await self.ask("POST", "/v1/clients", b'{"name":"fuzz"}', token=ENROLMENT)
        assert answer.status == 201, answer
        document = answer.json()
        return Device(run, document["client_id"], document["credential"])

    async def begin(self) -> None:
        """Enrols the devices, and plays until every run has work open in `HELD_ROUND`."""
        for spec in RUNS:
            for _ in range(3):
                self.devices.append(await self.enrol(spec["name"]))
        async with asyncio.TaskGroup() as group:
            for device in self.devices:
                group.create_task(self._play(device, hold_at=HELD_ROUND))

        self.signer = await self._enrol_signer()
        exported = await self.ask("GET", "/v1/runs/losses/export", token=ADMIN)
        assert exported.status == 200, exported
        self.archive = exported.body

    async def _enrol_signer(self) -> Signer:
        key = Ed25519PrivateKey.generate()
        public = base64.b64encode(key.public_key().public_bytes_raw()).decode()
        body = json.dumps({"name": "signer", "public_key": public}).encode()
        answer = await self.ask("POST", "/v1/clients", body, token=ENROLMENT)
        assert answer.status == 201, answer
        document = answer.json()
        signer = Signer(document["client_id"], document["credential"], key)
        headers = signer.headers("GET", "/v1/runs", b"")
        answer = await self.ask("GET", "/v1/runs", token=signer.credential, headers=headers)
        assert answer.status == 200, answer
        return signer

    async def finish(self) -> dict[str, str]:
        """Plays to the end; the ``alpha_sha256`` of every run."""
        async with asyncio.TaskGroup() as group:
            for device in self.devices:
                group.create_task(self._play(device, hold_at=None))
        found = {}
        for spec in RUNS:
            answer = await self.ask("GET", f"/v1/runs/{spec['name']}", token=ADMIN)
            result = answer.json()
            assert result["status"] == "completed", result
            found[spec["name"]] = result["alpha_sha256"]
        return found

    def holders(self, run: str | None = None) -> list[Device]:
        """The devices that hold work open."""
        return [d for d in self.devices if d.held is not None and run in (None, d.run)]

    async def _play(self, device: Device, hold_at: int | None) -> None:
        wanted = {spec["name"]: _seats(spec) for spec in RUNS}[device.run]
        while True:
            answer = await self.ask_raw(device.claim)
            if answer.status == 410:
                return
            if answer.status == 204:
                if hold_at is not None and len(self.holders(device.run)) == wanted:
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

    async def ask_raw(self, data: bytes) -> Answer:
        """Sends bytes on a connection of their own.

        Raises:
            ConnectionError: The server hung up.
        """
        answer = await self.wire().ask(data)
        if answer is None:
            raise ConnectionError("the server hung up")
        return answer

    def content(self) -> dict[str, list[str]]:
        """All that the server keeps."""
        return content_of(self.store)


def _seats(spec: dict[str, Any]) -> int:
    seats: int = spec["participation"].get("clients_per_round", 1)
    return seats


def content_of(store: Path) -> dict[str, list[str]]:
    """Every row of every table, but for counters of traffic and nonces that were used."""
    connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
    try:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        content = {}
        for (name,) in names:
            if name not in _VOLATILE_TABLES:
                cursor = connection.execute(f'SELECT * FROM "{name}"')  # our own table's name
                columns = [column[0] for column in cursor.description]
                content[name] = sorted(_row(columns, row) for row in cursor)
        return content
    finally:
        connection.close()


def _row(columns: list[str], row: tuple[Any, ...]) -> str:
    values = dict(zip(columns, row, strict=True))
    if "document" in values:
        document = json.loads(values["document"])
        values["document"] = {k: v for k, v in document.items() if k not in _VOLATILE_KEYS}
    return json.dumps(values, sort_keys=True, default=lambda blob: blob.hex())


@asynccontextmanager
async def target(folder: Path, *, gateway: bool = False) -> AsyncIterator[Target]:
    """A server with work open in every run."""
    store = folder / "fuzz.db"
    log = folder / "server.log"
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
        found = Target(host, int(port), store, psutil.Process(process.pid))
        await found.begin()
        yield found
    finally:
        process.kill()
        await process.communicate()


async def _serve(store: Path, gateway: bool) -> None:
    import structlog

    from fedone_sdk import Aggregator, RunSpec, Vocabulary
    from fedone_sdk.aggregator.rounds.rules import Rules
    from fedone_sdk.stores import SqlStore
    from fedone_sdk.testing import ScriptedBackend

    # Standard output is only for the URL: the parent reads one line.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    Rules.CLAIM_TIMEOUT_S = 86_400.0
    async with Aggregator(
        backend=ScriptedBackend() if gateway else None,
        store=SqlStore.sqlite(store),
        enrolment_tokens=[ENROLMENT],
        admin_token=ADMIN,
    ) as aggregator:
        for document in RUNS:
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
