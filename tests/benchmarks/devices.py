"""Load test of one aggregator: thousands of connected devices, many concurrent runs.

The server is a separate process: real HTTP, real store, SQLite on disk with ``synchronous=FULL``.
The devices are one process with a TCP connection per device. They follow the protocol (including
``Retry-After``) and answer with scripted losses, so no model is queried. They are enrolled directly
in the store. Each process is pinned to its own core.

    python -m tests.benchmarks.devices [--devices 10000 --runs 100 --seconds 60 --store sqlite]

Without ``--think`` every device answers at once. This measures the server's throughput, and its
latencies are those of a queue. With ``--think 0.5 2.0`` a device works that long, and latencies
are those that a device would see. Both are measured by default.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

TOKEN = "benchmark-enrolment-token"
CALM_S = 20.0
"""From the last device's connection to the start of the measurement."""


def main() -> None:
    """Run the bench and print a table, or run one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--store", default="sqlite", help="memory, sqlite, postgres or a URL")
    parser.add_argument("--folder", help="where the database lies; a disk, not memory")
    parser.add_argument("--think", type=float, nargs=2, metavar=("LOW", "HIGH"))
    parser.add_argument("--role", choices=["server", "devices", "enrol"], help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    raise_file_limit(2 * args.devices + 500)
    if args.role == "server":
        asyncio.run(serve(args))
    elif args.role == "devices":
        asyncio.run(drive(args))
    elif args.role == "enrol":
        asyncio.run(enrol(args))
    else:
        report(args)


def report(args: argparse.Namespace) -> None:
    """Measure and print Markdown."""
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{args.devices} devices, {args.runs} runs, {args.store}, {args.seconds:.0f} s\n",
        flush=True,
    )
    thinks: list[tuple[float, float]] = [(0.0, 0.0), (0.5, 2.0)]
    if args.think is not None:
        thinks = [(args.think[0], args.think[1])]
    columns = [measure(args, think) for think in thinks]
    print("| measure |" + "".join(f" {column['load']} |" for column in columns))
    print("|---|" + "---|" * len(columns))
    for key in columns[0]:
        if key != "load":
            print(f"| {key} |" + "".join(f" {column[key]} |" for column in columns))


def measure(args: argparse.Namespace, think: tuple[float, float]) -> dict[str, Any]:
    """Return the figures of one load."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, store_url(args, folder) as store:
        common = ["--devices", str(args.devices), "--runs", str(args.runs), "--store", store]
        if store != "memory":
            subprocess.run(
                [sys.executable, "-m", "tests.benchmarks.devices", "--role", "enrol", *common],
                check=True,
            )
        server = start("server", common, core=0)
        assert server.stdout is not None
        assert server.stdin is not None
        url = server.stdout.readline().strip()
        process = psutil.Process(server.pid)
        empty = process.memory_info().rss
        options = ["--url", url, "--think", str(think[0]), str(think[1])]
        options += ["--seconds", str(args.seconds)]
        devices = start("devices", [*common, *options], core=1)
        assert devices.stdout is not None
        assert devices.stdout.readline() == "connected\n"
        connected = process.memory_info().rss
        time.sleep(CALM_S)
        steady = Sampler(process)
        cpu = psutil.Process(devices.pid).cpu_times()
        waited = waited_s(server.pid)
        began = time.perf_counter()
        time.sleep(args.seconds)
        ended = time.perf_counter()
        waited = waited_s(server.pid) - waited
        steady.stop()
        after = psutil.Process(devices.pid).cpu_times()
        server.stdin.write(f"{began} {ended}\n")
        server.stdin.flush()
        served = json.loads(server.stdout.readline())
        seen = json.loads(devices.communicate(timeout=120)[0])
        server.stdin.close()
        server.wait(timeout=60)
    return figures(args, think, served, seen, (began, ended)) | {
        "server CPU": share(steady.cpu_share, 1.0),
        "devices' CPU": share(sum(after[:2]) - sum(cpu[:2]), ended - began),
        "resident memory (RSS) of the server, before any device": mb(empty),
        "RSS with all devices connected": mb(connected),
        "median RSS during the measurement": mb(statistics.median(steady.rss)),
        "largest resident memory (RSS) of the server": mb(1024 * served["peak_kb"]),
        "server's longest pauses to collect garbage": f"{served['gc_ms']} ms",
        "server waited for its core": f"{100 * waited / (ended - began):.1f} % of the time",
        "load average": f"{os.getloadavg()[0]:.1f}",
    }


def figures(
    args: argparse.Namespace,
    think: tuple[float, float],
    served: dict[str, Any],
    seen: dict[str, Any],
    window: tuple[float, float],
) -> dict[str, Any]:
    """Compute the figures of the time within `window`, from both logs."""
    began, ended = window
    seconds = ended - began
    offers: dict[int, list[float]] = {}
    for client, at in served["offers"]:
        offers.setdefault(client, []).append(at)

    claims: list[float] = []
    wakes: list[float] = []
    rounds: list[float] = []
    updates: list[float] = []
    given: dict[int, float] = {}
    polls = away = 0
    for kind, index, sent, received, *more in seen["calls"]:
        if not began <= sent <= received <= ended:
            continue
        if kind == "update":
            updates.append(received - sent)
            if index in given:
                rounds.append(received - given[index] - more[0])
        elif kind == "away":
            away += 1
            claims.append(received - sent)
        elif kind == "poll":
            polls += 1
        else:
            # The latest seat that was offered while it waited; otherwise it was there before.
            woken = max((at for at in offers.get(index, ()) if sent < at < received), default=None)
            if woken is None:
                claims.append(received - sent)
            else:
                wakes.append(received - woken)
            given[index] = sent if woken is None else woken
    idle = seen["idle"]
    per_day = 86400 / seconds
    return {
        "load": "no think time" if think[1] == 0 else f"think {think[0]:g} to {think[1]:g} s",
        "rounds/s": f"{sum(began <= at <= ended for at in served['rounds']) / seconds:.0f}",
        "requests/s": f"{(len(claims) + len(wakes) + len(updates) + polls) / seconds:.0f}",
        "claim answered at once, p50 / p99": quantiles(claims),
        "offer to assignment, p50 / p99": quantiles(wakes),
        "update, p50 / p99": quantiles(updates),
        "durable round, p50 / p99": quantiles(rounds),
        "claims answered with a Retry-After": f"{away / seconds:.0f}/s",
        "long polls that ended without work": f"{polls / seconds:.1f}/s",
        "devices that worked": seen["worked"],
        "idle device": f"{idle['bytes'] * per_day / 1e6:.2f} MB a day, "
        f"{idle['requests'] * per_day:.0f} requests ({idle['devices']} devices)",
        "mean Retry-After": f"{seen['retry_after_s']:.1f} s",
        "new connections": seen["reconnects"],
        "errors": json.dumps(seen["errors"]),
    }


def quantiles(values: list[float]) -> str:
    """Return median and 99th percentile in milliseconds, and the count."""
    if len(values) < 2:
        return "none"
    p99 = statistics.quantiles(values, n=100)[98]
    return f"{1000 * statistics.median(values):.1f} / {1000 * p99:.1f} ms ({len(values)})"


def waited_s(pid: int) -> float:
    """Return how long a process's main thread waited for its core, seconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


def share(cpu_s: float, seconds: float) -> str:
    """Format CPU time."""
    return f"{100 * cpu_s / seconds:.0f} % of a core"


def mb(size: float) -> str:
    """Format bytes."""
    return f"{size / 2**20:.0f} MiB"


class Sampler:
    """Samples a process's memory and CPU on a thread."""

    def __init__(self, process: psutil.Process) -> None:
        self.rss: list[int] = []
        self.cpu_share = 0.0
        self._process = process
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler")
        self._thread.start()

    def _watch(self) -> None:
        began, before = time.perf_counter(), sum(self._process.cpu_times()[:2])
        while not self._done.wait(0.5):
            self.rss.append(self._process.memory_info().rss)
        spent = sum(self._process.cpu_times()[:2]) - before
        self.cpu_share = spent / (time.perf_counter() - began)

    def stop(self) -> None:
        """Stop sampling."""
        self._done.set()
        self._thread.join()


def start(role: str, options: list[str], *, core: int) -> subprocess.Popen[str]:
    """Start a part of the bench as a process pinned to one core."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "tests.benchmarks.devices", "--role", role, *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(process.pid, {cores[core % len(cores)]})
    return process


def raise_file_limit(wanted: int) -> None:
    """Raise the limit of open files of this process and its children as far as allowed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


@contextmanager
def store_url(args: argparse.Namespace, folder: str) -> Iterator[str]:
    """Yield the store of a measurement: ``memory``, the path of a file or a URL."""
    if args.store == "sqlite":
        yield str(Path(folder) / "bench.db")
    elif args.store == "postgres":
        from tests.postgres import cluster

        with cluster() as server:
            yield server.url(server.create())
    else:
        yield args.store


# The server


def build_store(target: str) -> Any:
    """Create the store of `store_url`."""
    from fedone_sdk.stores import MemoryStore, SqlStore

    if target == "memory":
        return MemoryStore()
    return SqlStore.at(target) if "://" in target else SqlStore.sqlite(target)


def credential(index: int) -> str:
    """Return the secret of a device of the bench."""
    return f"fedone_benchmark-device-{index:06d}"


async def enrol(args: argparse.Namespace) -> None:
    """Enrol all devices directly in a durable store."""
    store = build_store(args.store)
    await store.open()
    await enrol_in(store, args.devices)
    await store.close()


async def enrol_in(store: Any, count: int) -> None:
    """Enrol devices 0 to `count` - 1, in that order."""
    from fedone_sdk.stores import ClientRecord, TokenRecord

    now, token_sha256 = time.time(), hashlib.sha256(b"benchmark-own-token").hexdigest()
    await store.put_token(TokenRecord(name="bench", token_sha256=token_sha256, created_at=now))
    for index in range(count):
        record = ClientRecord(
            index=-1,
            client_id=f"client-{index:06d}",
            credential_sha256=hashlib.sha256(credential(index).encode()).hexdigest(),
            enrolled_at=now,
        )
        await store.enrol(record, token_sha256, now)


async def serve(args: argparse.Namespace) -> None:
    """Run the aggregator's process: print its URL, then on request its measurements."""
    import structlog

    from fedone_sdk import Aggregator, RunSpec, Vocabulary
    from fedone_sdk.aggregator.runs.changes import Change
    from fedone_sdk.cli.serve import favour_latency

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    offers: list[tuple[int, float]] = []
    rounds: list[float] = []

    def note(run: object, change: Change) -> None:
        offers.extend((client, time.perf_counter()) for client in change.offered)
        if change.finished is not None:
            rounds.append(time.perf_counter())

    pauses: list[tuple[float, float]] = []
    gc.callbacks.append(lambda phase, info: pauses.append((time.perf_counter(), phase == "start")))
    store = build_store(args.store)
    if args.store == "memory":
        await store.open()
        await enrol_in(store, args.devices)
        await store.close()
    vocabulary = Vocabulary(candidates=tuple(f" w{number}" for number in range(200)))
    min_clients = max(1, min(16, args.devices // (2 * args.runs)))
    async with Aggregator(store=store, enrolment_tokens=[TOKEN]) as aggregator:
        aggregator.service.listeners.append(note)
        for number in range(args.runs):
            spec = RunSpec.model_validate(
                {
                    "name": f"bench-{number}",
                    "task": {"template": "{prompt} {text}", "labels": {0: " no", 1: " yes"}},
                    "prompt": {
                        "length": 20,
                        "vocabulary": {"kind": "list", "candidates": ["a", "b"]},
                    },
                    "method": {"name": "gs-bdpl", "optimizer": "sgd", "learning_rate": 1e-4},
                    "participation": {
                        "exchange": "losses",
                        "min_clients": min_clients,
                        "model": "bench",
                    },
                    "evaluation": {"every": 0},
                    "rounds": 1_000_000,
                    "seed": number,
                }
            )
            await aggregator.add_run(spec, vocabulary)
        favour_latency()  # as `fedone serve` does
        print(await aggregator.listen(), flush=True)
        window = await asyncio.to_thread(sys.stdin.readline)
        began, ended = map(float, window.split())
        found = {
            "offers": [entry for entry in offers if began - 60 <= entry[1] <= ended],
            "rounds": [at for at in rounds if began <= at <= ended],
            "gc_ms": sorted(
                (
                    round(1000 * (stopped - started), 1)
                    for (started, first), (stopped, _) in itertools.pairwise(pauses)
                    if first and began <= started <= ended
                ),
                reverse=True,
            )[:5],
            "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        print(json.dumps(found), flush=True)
        await asyncio.to_thread(sys.stdin.read)


# The devices


@dataclass(slots=True)
class Fleet:
    """The shared state of all devices."""

    host: str
    port: int
    think: tuple[float, float]
    loop: asyncio.AbstractEventLoop
    calls: list[tuple[Any, ...]]
    errors: dict[str, int]
    connected: int = 0
    reconnects: int = 0
    connecting: set[asyncio.Task[Any]] = field(default_factory=set)
    measuring: bool = False
    random_state: int = 1

    def connect(self, device: Device) -> asyncio.Task[Any]:
        """Open a device's connection; it claims work at once."""
        made = self.loop.create_connection(lambda: device, self.host, self.port)
        task = self.loop.create_task(made)
        self.connecting.add(task)
        task.add_done_callback(self.connecting.discard)
        return task

    def think_s(self) -> float:
        """Return the working time of the next device."""
        low, high = self.think
        self.random_state = (self.random_state * 6364136223846793005 + 1) % 2**64
        return low + (high - low) * (self.random_state >> 32) / 2**32

    def fail(self, what: str) -> None:
        """Count an unexpected event."""
        self.errors[what] = self.errors.get(what, 0) + 1


class Device(asyncio.Protocol):
    """An edge device as a state machine on one connection."""

    __slots__ = (
        "buffer",
        "bytes",
        "claim",
        "fleet",
        "head",
        "index",
        "requests",
        "sent",
        "think",
        "transport",
        "updating",
        "waits",
        "waits_for_answer",
        "worked",
    )

    def __init__(self, fleet: Fleet, index: int) -> None:
        self.fleet, self.index = fleet, index
        # The headers of aiohttp's client.
        self.head = (
            f"Host: {fleet.host}:{fleet.port}\r\nAuthorization: Bearer {credential(index)}\r\n"
            "Content-Type: application/json\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
            "User-Agent: Python/3.11 aiohttp/3.14.5\r\n"
        )
        body = json.dumps({"num_examples": 32, "wait_s": 25.0})
        self.claim = self._post("/v1/assignments/claim", body)
        self.buffer = b""
        self.transport: asyncio.Transport | None = None
        self.updating = self.worked = self.waits_for_answer = False
        self.sent = self.think = 0.0
        self.bytes = self.requests = 0
        self.waits: list[float] = []

    def _post(self, path: str, body: str) -> bytes:
        size = f"Content-Length: {len(body)}\r\n\r\n"
        return f"POST {path} HTTP/1.1\r\n{self.head}{size}{body}".encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.waits_for_answer = False
        self.transport, self.buffer = transport, b""
        self.fleet.connected += 1
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self.fleet.connected -= 1
        self.transport = None
        if self.waits_for_answer:
            self.fleet.fail(f"connection lost: {type(exc).__name__}")
            self.fleet.loop.call_later(1.0, self.ask)

    def ask(self) -> None:
        """Claim work, over a new connection if the server has closed the idle one."""
        self.updating = False
        if self.transport is None:
            self.fleet.reconnects += 1
            self.fleet.connect(self)
            return
        self.send(self.claim)

    def send(self, request: bytes) -> None:
        """Send a request."""
        assert self.transport is not None
        self.bytes += len(request)
        self.requests += 1
        self.waits_for_answer = True
        self.sent = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        self.buffer = self.buffer + data if self.buffer else data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        status = int(self.buffer[9:12])
        size = 0
        if status != 204:
            at = self.buffer.find(b"Content-Length: ", 0, end) + 16
            size = int(self.buffer[at : self.buffer.find(b"\r\n", at)])
        if len(self.buffer) < end + 4 + size:
            return
        self.waits_for_answer = False
        head, body, self.buffer = self.buffer[:end], self.buffer[end + 4 :], b""
        self.answered(status, head, body)

    def answered(self, status: int, head: bytes, body: bytes) -> None:
        """Continue after a response."""
        fleet, now = self.fleet, time.perf_counter()
        if self.updating:
            if status != 200:
                fleet.fail(f"update {status}")
            elif fleet.measuring:
                record = ("update", self.index, self.sent, now, self.think)
                fleet.calls.append(record)
            self.ask()
        elif status == 200:
            if fleet.measuring:
                fleet.calls.append(("work", self.index, self.sent, now))
            self.worked = True
            self.think = fleet.think_s()
            if self.think:
                fleet.loop.call_later(self.think, self.work, body)
            else:
                self.work(body)
        elif status == 204:
            at = head.find(b"Retry-After: ") + 13
            wait_s = float(head[at:].split(b"\r\n", 1)[0])
            self.waits.append(wait_s)
            if fleet.measuring:
                # A long poll may end slightly early when a run's pool changes.
                kind = "away" if now - self.sent < 20.0 else "poll"
                fleet.calls.append((kind, self.index, self.sent, now))
            fleet.loop.call_later(wait_s, self.ask)
        else:
            fleet.fail(f"claim {status} {body[:200]!r}")
            fleet.loop.call_later(1.0, self.ask)

    def work(self, body: bytes) -> None:
        """Answer an assignment with scripted losses."""
        assignment = json.loads(body)
        seed, count = assignment["minibatch_seed"], assignment["prompts"]["shape"][0]
        losses = [0.5 + ((seed >> at) & 7) / 64 for at in range(count)]
        update = {
            "exchange": "losses",
            "num_examples": 32,
            "scored": {"scored": 32},
            "usage": {},
            "model": "bench",
            "losses": losses,
        }
        self.updating = True
        path = f"/v1/assignments/{assignment['assignment_id']}/update"
        self.send(self._post(path, json.dumps(update)))


async def drive(args: argparse.Namespace) -> None:
    """Run the devices' process."""
    loop = asyncio.get_running_loop()
    host, port = args.url.removeprefix("http://").split(":")
    low, high = args.think
    fleet = Fleet(host=host, port=int(port), think=(low, high), loop=loop, calls=[], errors={})
    devices = [Device(fleet, index) for index in range(args.devices)]
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection here would look like a pause of the server
    for batch in batches(devices, 50):
        await asyncio.gather(*map(fleet.connect, batch))
        await asyncio.sleep(0.02)
    print("connected", flush=True)
    await asyncio.sleep(CALM_S - 1.0)
    fleet.measuring = True
    before = {device.index: (device.bytes, device.requests) for device in devices}
    for device in devices:
        device.waits.clear()
    await asyncio.sleep(args.seconds + 2.0)
    idle = [device for device in devices if not device.worked]
    waits = [wait for device in devices for wait in device.waits]
    span = args.seconds / (args.seconds + 2.0)
    found = {
        "calls": fleet.calls,
        "errors": fleet.errors,
        "reconnects": fleet.reconnects,
        "worked": sum(device.worked for device in devices),
        "retry_after_s": statistics.mean(waits) if waits else 0.0,
        "idle": {
            "devices": len(idle),
            "bytes": span * mean(device.bytes - before[device.index][0] for device in idle),
            "requests": span * mean(device.requests - before[device.index][1] for device in idle),
        },
    }
    print(json.dumps(found), flush=True)


def batches(devices: list[Device], size: int) -> Iterator[list[Device]]:
    """Yield the devices in batches."""
    for at in range(0, len(devices), size):
        yield devices[at : at + size]


def mean(values: Iterable[float]) -> float:
    """Return the mean, or 0 for no values."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


if __name__ == "__main__":
    main()
