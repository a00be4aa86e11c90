"""Requests per second through `VllmBackend`, compared with raw concurrent HTTP.

Start a server (docs/backends/vllm.md), then:

    python tests/benchmarks/vllm.py --url http://127.0.0.1:8000 --model NAME --tokenizer FOLDER

Raw HTTP posts prepared bodies over aiohttp and discards the responses; the backend tokenises,
serialises, sends and parses. Both alternate within a run, and the order alternates too. With
``--masked`` the server is a RoBERTa with the SDK's plugin.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import aiohttp

from fedone_sdk.backends import Query
from fedone_sdk.backends.vllm import VllmBackend
from fedone_sdk.task import TaskSpec, render

SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).resolve().parents[3] / "shared"))
PROMPT = " A film that many people saw and that critics wrote about at length in the papers."


def main() -> None:
    """Measure every setting and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", help="tokenizer.json, or a folder with it")
    parser.add_argument("--api-key-env", help="variable that holds the server's key")
    parser.add_argument("--masked", action="store_true", help="the server is a RoBERTa")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="inputs per request")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each half of a pair")
    asyncio.run(report(parser.parse_args()))


async def report(args: argparse.Namespace) -> None:
    """Measure, then print Markdown."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| inputs | concurrency | raw requests/s | backend requests/s | ratio | ratios |")
    print("|---|---|---|---|---|---|")
    async with (
        VllmBackend(
            args.model, base_url=args.url, tokenizer=args.tokenizer, api_key_env=args.api_key_env
        ) as backend,
        aiohttp.ClientSession(
            args.url,
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {os.environ.get(args.api_key_env or '', '')}"},
            raise_for_status=True,
        ) as session,
    ):
        for batch_size in args.batch:
            asked = queries(500, batch_size, masked=args.masked)
            await backend.check(asked[0].label_words)
            requests = [await backend._prepared(query) for query in asked]
            bodies = [(request.path, json.dumps(request.body).encode()) for request in requests]
            ask = itertools.cycle([partial(backend.score, query) for query in asked])
            post = itertools.cycle([partial(raw, session, *body) for body in bodies])
            for concurrency in args.concurrency:
                for calls in (ask, post):
                    await rate(calls, concurrency, 0.5)  # Warm-up: connections, vLLM's compiling.
                pairs = []
                for index in range(args.pairs):
                    order = (post, ask) if index % 2 == 0 else (ask, post)
                    rates = {
                        id(calls): await rate(calls, concurrency, args.seconds) for calls in order
                    }
                    pairs.append((rates[id(post)], rates[id(ask)]))
                ratios = [mine / theirs for theirs, mine in pairs]
                print(
                    f"| {batch_size} | {concurrency} "
                    f"| {statistics.median(theirs for theirs, _ in pairs):.1f} "
                    f"| {statistics.median(mine for _, mine in pairs):.1f} "
                    f"| {statistics.median(ratios):.2f} "
                    f"| {' '.join(f'{ratio:.2f}' for ratio in ratios)} |",
                    flush=True,
                )


def queries(num_queries: int, batch_size: int, *, masked: bool) -> list[Query]:
    """Return different mini-batches of SST-2."""
    task = TaskSpec(
        template="{prompt} {sentence} It was" + ("{mask}." if masked else ""),
        labels={"0": " terrible", "1": " great"},
    )
    file = SHARED / "data" / "glue" / "sst2" / "train.jsonl"
    with file.open(encoding="utf-8") as lines:
        rows = itertools.cycle([json.loads(line) for line in itertools.islice(lines, 5000)])
    return [
        Query(
            inputs=tuple(render(task, PROMPT, row) for row in itertools.islice(rows, batch_size)),
            label_words=task.label_words,
        )
        for _ in range(num_queries)
    ]


async def raw(session: aiohttp.ClientSession, path: str, body: bytes) -> None:
    """Post a body, and read the response to its end."""
    async with session.post(
        path, data=body, headers={"Content-Type": "application/json"}
    ) as response:
        await response.read()


async def rate(
    calls: Iterator[Callable[[], Awaitable[object]]], concurrency: int, seconds: float
) -> float:
    """Return calls per second, with `concurrency` of them in flight."""
    start = time.perf_counter()
    done = 0

    async def work() -> None:
        nonlocal done
        while time.perf_counter() - start < seconds:
            await next(calls)()
            done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return done / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
