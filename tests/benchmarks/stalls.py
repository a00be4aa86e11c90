"""Stalls of a busy server's event loop: searches, large alphas, long logs.

Clients in another process work on runs of `thompson` and `random` with full pools, a run with a
large alpha and many small runs. At the same time users read a log of 43 MB, export it and roll a
run back. A heartbeat is due every millisecond. A stall is its delay; `own` is the computing time of
the loop's thread in between, which does not depend on other load of the machine. An idle loop in a
third process shows the delay that the machine adds.

With `--attack`, 40 devices that have used up their leases keep sending `/v1/score` with 16 texts of
20,000 characters, and another one sends a valid request of 20 prompts on 64 such texts. Another
process measures how long `/healthz` takes.

    python -m tests.benchmarks.stalls [--seconds 30] [--attack]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import aiohttp
import structlog

from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.http.guards import Limits
from fedone_sdk.backends import AnswerCache, ModelClient
from fedone_sdk.backends.openai import OpenAIBackend
from fedone_sdk.cli.serve import favour_latency
from fedone_sdk.spec import LimitsSpec, RetrySpec, RunSpec
from fedone_sdk.stores import LogEntry, MemoryStore
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.edge import edge_client

TOKEN, ADMIN = "enrolment-token-7f3a", "admin-token-91bc"
ROWS = [{"text": f"text {row}", "label": row % 2} for row in range(16)]
RUNS: dict[str, tuple[dict[str, Any], int, int]] = {
    "thompson": ({"name": "thompson"}, 20, 200),
    "random": ({"name": "random"}, 20, 200),
    "large": ({"name": "gs-bdpl"}, 50, 10_000),
    **{f"small-{number}": ({"name": "gs-bdpl"}, 20, 200) for number in range(4)},
}
"""Method, length and size of the vocabulary of each run."""

DELAY, OWN = "delay of the loop", "processor time of the loop"
IDLE = "delay of an idle loop in another process"
SENDERS = 40
LONG = "one two " * 2500


def main() -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--attack", action="store_true", help="hostile devices instead")
    parser.add_argument("--clients", help=argparse.SUPPRESS)
    parser.add_argument("--attackers", help=argparse.SUPPRESS)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--idle", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    if args.clients is not None:
        asyncio.run(clients(args.clients))
        return
    if args.attackers is not None:
        asyncio.run(attackers(args.attackers, args.seconds))
        return
    if args.probe is not None:
        print(json.dumps(asyncio.run(probing(args.probe, args.seconds))))
        return
    if args.idle:
        print(json.dumps(asyncio.run(beating(args.seconds))))
        return
    if args.attack:
        rows, rounds = asyncio.run(under_attack(args.seconds)), {}
    else:
        late, own, idle, rounds = asyncio.run(measure(args.seconds))
        rows = {DELAY: late, OWN: own, IDLE: idle}
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| measure | p50, ms | p99, ms | longest, ms |\n|---|---|---|---|")
    for name, values in rows.items():
        p50, *_, p99 = (statistics.quantiles(values * 2, n=100)[i] * 1e3 for i in (49, 98))
        print(f"| {name} | {p50:.1f} | {p99:.1f} | {max(values) * 1e3:.1f} |")
    if rounds:
        print("\nRounds:", ", ".join(f"{name} {count}" for name, count in rounds.items()))


async def beating(seconds: float) -> tuple[list[float], list[float]]:
    """Return the delays of heartbeats, and this thread's computing time in between, seconds."""
    late, own = [], []
    now, end = time.perf_counter(), time.perf_counter() + seconds
    while now < end:
        before, computed = now, time.thread_time()
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        late.append(now - before - 0.001)
        own.append(time.thread_time() - computed)
    return late, own


def spec_of(name: str) -> RunSpec:
    """Return a run without an end."""
    method, length, _ = RUNS[name]
    return RunSpec.model_validate(
        {
            "name": name,
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "prompt": {"length": length, "vocabulary": {"kind": "list", "candidates": ["x", "y"]}},
            "method": {**method, "num_samples": 16, "batch_size": 8},
            "participation": {"exchange": "alpha" if name == "large" else "losses"},
            "rounds": 100_000,
            "evaluation": {"every": 0},
        }
    )


async def measure(seconds: float) -> tuple[list[float], list[float], list[float], dict[str, int]]:
    """Return `beating` on a busy server, the delays of an idle loop, and rounds by run."""
    store, module = MemoryStore(), (sys.executable, "-m", "tests.benchmarks.stalls")
    aggregator = Aggregator(
        store=store, backend=ScriptedBackend(), enrolment_tokens=[TOKEN], admin_token=ADMIN
    )
    async with aggregator, aiohttp.ClientSession() as session:
        url = await aggregator.listen()
        for name, (_, _, size) in RUNS.items():
            words = Vocabulary(candidates=tuple(f" w{index}" for index in range(size)))
            await aggregator.add_run(spec_of(name), words)
        _lengthen(store, "small-0", 43_000_000)
        favour_latency()
        working = await asyncio.create_subprocess_exec(*module, "--clients", url)
        await asyncio.sleep(20)  # until pools hold something, and all is imported
        people = asyncio.create_task(_people(url, session))
        idle = await asyncio.create_subprocess_exec(
            *module, "--idle", "--seconds", str(seconds), stdout=asyncio.subprocess.PIPE
        )
        late, own = await beating(seconds)
        updated, _ = await idle.communicate()
        if people.done():
            people.result()
        people.cancel()
        await asyncio.gather(people, return_exceptions=True)
        working.kill()
        await working.wait()
        rounds = {name: run.state.round for name, run in aggregator.service.runs.items()}
    return late, own, json.loads(updated)[0], rounds


def _lengthen(store: MemoryStore, run_id: str, size: int) -> None:
    body = json.dumps({"of": "nothing", "examples": ["x" * 50] * 800})
    count = size // len(body)
    store._logs[run_id] = [
        LogEntry(kind="outcomes", body=body, version=number) for number in range(1, count + 1)
    ]
    store._runs[run_id] = replace(store._runs[run_id], version=count)


async def clients(url: str) -> None:
    """Run one client for each run, without end."""
    async with asyncio.TaskGroup() as group:
        for name in RUNS:
            group.create_task(_client(url, name))


async def _client(url: str, name: str) -> None:
    async with edge_client(url, token=TOKEN, data=ROWS, run_id=name) as client:
        await client.run_forever()


async def _people(url: str, session: aiohttp.ClientSession) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    while True:
        for path in ("/v1/runs", "/v1/runs/small-0/log"):
            async with session.get(f"{url}{path}", headers=headers) as found:
                found.raise_for_status()
                async for _ in found.content.iter_any():
                    pass
        body = {"to_round": 0, "reason": "a client lied"}
        async with session.post(
            f"{url}/v1/runs/small-1/rollback", json=body, headers=headers
        ) as found:
            found.raise_for_status()


async def under_attack(seconds: float) -> dict[str, list[float]]:
    """Return how long `/healthz` takes, the loop's own time, and the delays of an idle loop."""
    module = (sys.executable, "-m", "tests.benchmarks.stalls", "--seconds", str(seconds))
    piped = {"stdout": asyncio.subprocess.PIPE}
    fake = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fake_openai", "--port", "0", **piped
    )
    try:
        assert fake.stdout is not None
        model = (await fake.stdout.readline()).decode().split()[-1]
        backend = ModelClient(
            OpenAIBackend("fake-1", base_url=model, api_key_env=None),
            cache=AnswerCache(),
            retry=RetrySpec(),
            limits=LimitsSpec(),
        )
        spec = RunSpec.model_validate(
            {
                "name": "attacked",
                "task": {"template": "{prompt} {text}", "labels": {0: " no", 1: " yes"}},
                "prompt": {
                    "length": 5,
                    "vocabulary": {"kind": "list", "candidates": [" x", " y", " z"]},
                },
                "method": {"name": "gs-bdpl", "num_samples": 20, "batch_size": 64, "tau": 1.0},
                "participation": {
                    "exchange": "losses",
                    "clients_per_round": SENDERS + 1,
                    "deadline_s": 3600,
                },
                "calibration": "none",
                "evaluation": {"every": 0},
            }
        )
        aggregator = Aggregator(
            store=MemoryStore(), backend=backend, enrolment_tokens=[TOKEN], limits=Limits()
        )
        async with aggregator:
            url = await aggregator.listen()
            await aggregator.add_run(spec)
            favour_latency()
            attacking = await asyncio.create_subprocess_exec(*module, "--attackers", url, **piped)
            assert attacking.stdout is not None
            await attacking.stdout.readline()  # All leases are used up.
            probe = await asyncio.create_subprocess_exec(*module, "--probe", url, **piped)
            idle = await asyncio.create_subprocess_exec(*module, "--idle", **piped)
            late, own = await beating(seconds)
            probed, _ = await probe.communicate()
            idled, _ = await idle.communicate()
            attacking.terminate() if attacking.returncode is None else None
            await attacking.wait()
    finally:
        fake.kill()
        await fake.wait()
    return {
        "response time of `/healthz`": json.loads(probed),
        DELAY: late,
        OWN: own,
        IDLE: json.loads(idled)[0],
    }


async def probing(url: str, seconds: float) -> list[float]:
    """Return how long each request takes, seconds; one that is not answered counts in full."""
    taken, end = [], time.perf_counter() + seconds
    async with aiohttp.ClientSession() as session:
        while (began := time.perf_counter()) < end:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds), session.get(f"{url}/healthz") as found:
                    await found.read()
            taken.append(time.perf_counter() - began)
            await asyncio.sleep(0.005)
    return taken


async def attackers(url: str, seconds: float) -> None:
    """Use up the leases, then send texts that no lease pays for."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def post(path: str, body: Any, token: str) -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {token}"}
            async with session.post(f"{url}{path}", json=body, headers=headers) as found:
                return {} if found.status == 204 else await found.json(content_type=None)

        async def ready() -> tuple[str, str]:
            credential = (await post("/v1/clients", {}, TOKEN))["credential"]
            while True:
                claim = {"num_examples": 64, "wait_s": 5}
                work = await post("/v1/assignments/claim", claim, credential)
                if "assignment_id" in work:
                    return credential, work["assignment_id"]

        found = await asyncio.gather(*(ready() for _ in range(SENDERS + 1)))

        def score(work: str, texts: list[str]) -> dict[str, Any]:
            return {"assignment_id": work, "examples": [{"text": text} for text in texts]}

        for credential, work in found[1:]:
            answer = await post("/v1/score", score(work, ["short"]), credential)
            assert "log_probs" in answer, answer
        print("ready", flush=True)

        async def send(credential: str, work: str) -> None:
            end = time.perf_counter() + seconds
            for number in itertools.takewhile(
                lambda _: time.perf_counter() < end, itertools.count()
            ):
                await post("/v1/score", score(work, [f"{number} {LONG}"[:20_000]] * 16), credential)
                await asyncio.sleep(0.1)

        valid = score(found[0][1], [f"{number} {LONG}"[:20_000] for number in range(64)])
        await asyncio.gather(
            post("/v1/score", valid, found[0][0]), *(send(*one) for one in found[1:])
        )


if __name__ == "__main__":
    main()
