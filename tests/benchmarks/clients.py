"""What edge clients take: memory, CPU and bytes, of the one in TypeScript and the one in Python.

    bash scripts/test-typescript     # builds the client in TypeScript
    python -m tests.benchmarks.clients [--clients 100 --rounds 100]

One run of the `losses` exchange through the gateway, with a scripted model; the clients are one
process and reach the server through a relay that counts what passes, HTTP headers included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import structlog

TOKEN = "benchmark-enrolment-token"
ROOT = Path(__file__).parents[2]
TEXT = "The strap of number {} broke after a day; I like all the rest of it. " * 2
LABELS = {"0": " bad", "1": " good"}


def main() -> None:
    """Measures and prints a table, or plays the clients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--play", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        url, token, file, count = args.play
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        asyncio.run(play(url, token, [json.loads(line) for line in lines], int(count)))
    else:
        asyncio.run(report(args))


async def play(url: str, token: str, data: list[dict[str, Any]], count: int) -> None:
    """The Python clients' process; as `demo/fleet.ts`."""
    from fedone_sdk import EdgeClient

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    print("loaded", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    clients = [EdgeClient(url, token=token, data=data) for _ in range(count)]
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(client) for client in clients))
        await asyncio.gather(*(client.run_forever() for client in clients))
    print("ended", flush=True)


class Relay:
    """Forwards TCP connections to a port and counts their bytes.

    Attributes:
        port: Where it listens.
        passed: Bytes in both directions.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self.port = 0
        self.passed = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", self._upstream)
        await asyncio.gather(self._pump(reader, there), self._pump(back, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.passed += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()


async def report(args: argparse.Namespace) -> None:
    """Measures and prints Markdown."""
    wrapper = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=wrapper)
    node = await asyncio.to_thread(subprocess.check_output, ["node", "--version"], text=True)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"Node {node.strip()}, {args.rounds} rounds\n",
        flush=True,
    )
    python = [sys.executable, "-m", "tests.benchmarks.clients", "--play"]
    typescript = ["node", str(ROOT / "examples" / "typescript_client" / "dist/demo/fleet.js")]
    columns = {}
    for name, command in (("TypeScript (Node)", typescript), ("Python", python)):
        for clients in (1, args.clients):
            title = f"{name}, {clients} client{'s' * (clients > 1)}"
            columns[title] = await measure(command, clients, args.rounds)
    print("| measure |" + "".join(f" {title} |" for title in columns))
    print("|---|" + "---|" * len(columns))
    for key in next(iter(columns.values())):
        print(f"| {key} |" + "".join(f" {column[key]} |" for column in columns.values()))


async def measure(command: list[str], clients: int, rounds: int) -> dict[str, Any]:
    """Figures of one run."""
    from fedone_sdk.aggregator import Aggregator
    from fedone_sdk.spec import RunSpec
    from fedone_sdk.testing import ScriptedBackend
    from fedone_sdk.vocabulary import Vocabulary

    spec = RunSpec.model_validate(
        {
            "task": {"template": "{prompt} {text} It was {mask}.", "labels": LABELS},
            "prompt": {"length": 20, "vocabulary": {"kind": "list", "candidates": ["a", "b"]}},
            "method": {"name": "gs-bdpl", "num_samples": 20, "batch_size": 32, "optimizer": "sgd"},
            "participation": {"exchange": "losses"},
            "rounds": rounds,
            "evaluation": {"every": 0},
        }
    )
    words = Vocabulary(candidates=tuple(f" word{n}" for n in range(200)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        rows = [{"text": TEXT.format(n, n), "label": n % 2} for n in range(40)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        async with Aggregator(backend=ScriptedBackend(), enrolment_tokens=[TOKEN]) as server:
            url = await server.listen()
            run = await server.add_run(spec, words)
            async with Relay(int(url.rpartition(":")[2])) as relay:
                process = await asyncio.create_subprocess_exec(
                    *(*command, f"http://127.0.0.1:{relay.port}", TOKEN, str(file), str(clients)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    cwd=ROOT,
                )
                found = await watched(process)
                result = run.result()
                passed = relay.passed
    bodies = [result.communication, result.gateway]
    sent = sum(each.upload_bytes + each.download_bytes for each in bodies)
    return found | {
        "rounds": result.rounds,
        "HTTP bodies per round, all clients": f"{sent / rounds:,.0f} bytes",
        "on the wire per round, all clients": f"{passed / rounds:,.0f} bytes",
    }


async def watched(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Lets the clients work, and looks at their memory meanwhile."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"loaded\n"
    seen = psutil.Process(process.pid)
    loaded, peak, cpu = seen.memory_info().rss, 0, 0.0
    process.stdin.write(b"go\n")
    ending = asyncio.create_task(process.stdout.readline())
    while not ending.done():
        peak = max(peak, seen.memory_info().rss)
        cpu = sum(seen.cpu_times()[:2])
        await asyncio.wait([ending], timeout=0.05)
    assert ending.result() == b"ended\n"
    await process.wait()
    return {
        "RSS after loading the client": f"{loaded / 2**20:.0f} MiB",
        "largest RSS": f"{peak / 2**20:.0f} MiB",
        "CPU": f"{cpu:.1f} s",
    }


if __name__ == "__main__":
    main()
