"""Cost of a one-client round: aggregator and trivial edge clients over loopback HTTP.

The aggregator and the clients are separate processes, to measure the CPU of each. The setting is
that of Flower in docs/benchmarks: 4 clients, one per round, alpha of 20 x 200 float32.

    python tests/benchmarks/federation.py [--rounds 300 | --device-only]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_CLIENTS = 4
TOKEN = "benchmark-enrolment-token"


def main() -> None:
    """Run every setting and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument(
        "--device-python",
        default=sys.executable,
        help="interpreter of the device whose import and memory are measured: a base install",
    )
    parser.add_argument("--device-only", action="store_true", help="no rounds, the device alone")
    parser.add_argument("--role", choices=["server", "clients"], help=argparse.SUPPRESS)
    parser.add_argument("--exchange", default="alpha", help=argparse.SUPPRESS)
    parser.add_argument("--store", default="memory", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "server":
        asyncio.run(serve(args.rounds, args.exchange, args.store))
    elif args.role == "clients":
        asyncio.run(work(args.url))
    elif args.device_only:
        report_device(args.device_python)
    else:
        report(args.rounds, args.device_python)


def report(rounds: int, device_python: str) -> None:
    """Measure, then print Markdown."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    columns = ["exchange", "store", "rounds/s", "round p50, ms", "round p99, ms"]
    columns += ["server CPU, ms per round", "client CPU, ms per round", "bytes per round"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for exchange in ("alpha", "losses"):
        for store in ("memory", "sqlite"):
            row = measure(rounds, exchange, store)
            print(f"| {exchange} | {store} | {' | '.join(row)} |", flush=True)
    print()
    report_device(device_python)


def report_device(python: str) -> None:
    """Prints what a device costs at rest, and of that what its libraries cost alone."""
    libraries = (
        "import asyncio, aiohttp, pydantic, structlog\n"
        "class Model(pydantic.BaseModel): number: int = 0"
    )
    with tempfile.TemporaryDirectory() as folder:
        # As where it is installed: nothing is compiled, whatever this shell says.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        for name, code in (
            ("libraries", libraries),
            ("EdgeClient", "from fedone_sdk import EdgeClient"),
        ):
            wall, cpu, rss = zip(*(imported(python, code) for _ in range(21)), strict=True)
            print(
                f"import of {name}: {statistics.median(wall[1:]):.0f} ms (median of 20), "
                f"CPU {min(cpu[1:]):.0f} ms (least of 20), RSS {statistics.median(rss[1:]):.1f} MB"
            )
        rss_mb = device_rss_mb(python)
    print(f"device RSS, losses exchange through the gateway: {rss_mb:.1f} MB")


def measure(rounds: int, exchange: str, store: str) -> list[str]:
    """Return the per-round figures of one setting."""
    with tempfile.TemporaryDirectory() as folder:
        target = store if store == "memory" else str(Path(folder) / "bench.db")
        server = spawn("server", "--rounds", str(rounds), "--exchange", exchange, "--store", target)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        clients = spawn("clients", "--url", url)
        served = json.loads(server.stdout.readline())
        worked = json.loads(clients.communicate(timeout=60)[0])
        server.wait(timeout=60)
    times = served["round_ms"][10:]
    return [
        f"{1000 / statistics.mean(times):.0f}",
        f"{statistics.median(times):.1f}",
        f"{statistics.quantiles(times, n=100)[98]:.1f}",
        f"{served['cpu_ms'] / rounds:.2f}",
        f"{worked['cpu_ms'] / rounds:.2f}",
        f"{served['bytes'] / rounds:.0f}",
    ]


def spawn(role: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a part of the bench as a separate process."""
    command = [sys.executable, __file__, "--role", role, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def cpu_ms() -> float:
    """Return the CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (usage.ru_utime + usage.ru_stime)


async def serve(rounds: int, exchange: str, store: str) -> None:
    """Run the aggregator's process: print its URL, then its figures."""
    import structlog

    from fedone_sdk import Aggregator, RunSpec, Vocabulary
    from fedone_sdk.aggregator.runs.changes import Change
    from fedone_sdk.stores import MemoryStore, SqlStore
    from fedone_sdk.testing import ScriptedBackend

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    spec = RunSpec.model_validate(
        {
            "name": "bench",
            "task": {"template": "{prompt} {text}", "labels": {0: " no", 1: " yes"}},
            "prompt": {"length": 20, "vocabulary": {"kind": "list", "candidates": ["a", "b"]}},
            "method": {"name": "gs-bdpl", "optimizer": "sgd", "learning_rate": 1e-4},
            "participation": {
                "exchange": exchange,
                "min_clients": NUM_CLIENTS,
                "model": "scripted",
            },
            "rounds": rounds,
        }
    )
    vocabulary = Vocabulary(candidates=tuple(f" w{number}" for number in range(200)))
    finished: list[float] = []

    def note(run: object, change: Change) -> None:
        if change.finished is not None:
            finished.append(time.perf_counter())

    async with Aggregator(
        # Trivial clients score locally; the gateway serves only the measured device.
        backend=ScriptedBackend() if rounds == 1 else None,
        store=MemoryStore() if store == "memory" else SqlStore.sqlite(store),
        enrolment_tokens=[TOKEN],
    ) as aggregator:
        aggregator.service.listeners.append(note)
        run = await aggregator.add_run(spec, vocabulary)
        print(await aggregator.listen(), flush=True)
        started = cpu_ms()
        await run.wait()
        result = run.result()
        figures: dict[str, Any] = {
            "cpu_ms": cpu_ms() - started,
            "bytes": result.communication.upload_bytes + result.communication.download_bytes,
            "round_ms": [1000 * (after - before) for before, after in itertools.pairwise(finished)],
        }
        print(json.dumps(figures), flush=True)
        await asyncio.sleep(1)  # long polls return the end


async def work(url: str) -> None:
    """Run the clients' process: trivial clients with their own backend."""
    import structlog

    from fedone_sdk import EdgeClient
    from fedone_sdk.testing import ScriptedBackend

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    examples = [{"text": f"text {number}", "label": number % 2} for number in range(4)]
    backend = ScriptedBackend(lambda rendered, words: (-0.5, -1.0))
    started = cpu_ms()
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            client = EdgeClient(url, token=TOKEN, data=examples, backend=backend)
            group.create_task(run_one(client))
    print(json.dumps({"cpu_ms": cpu_ms() - started}), flush=True)


async def run_one(client: Any) -> None:
    """Run a client to the end."""
    async with client:
        await client.run_forever()


def device_rss_mb(python: str) -> float:
    """Return the peak memory of a process with one edge client."""
    server = spawn("server", "--rounds", "1", "--exchange", "losses")
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    # A separate program: the imports of this one would be counted.
    command = [python, str(Path(__file__).with_name("one_device.py")), url, TOKEN]
    devices = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(NUM_CLIENTS)
    ]
    sizes = [float(device.communicate(timeout=60)[0].split()[-1]) for device in devices]
    server.wait(timeout=60)
    return max(sizes)


def imported(python: str, statement: str) -> tuple[float, float, float]:
    """Return time and CPU time of an import in a new interpreter, ms, and its memory then, MB."""
    code = (
        "import resource, time; wall, cpu = time.perf_counter(), time.process_time()\n"
        f"{statement}\n"
        "print(1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu), "
        "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    wall, cpu, rss = map(float, done.stdout.split())
    return wall, cpu, rss


if __name__ == "__main__":
    main()
