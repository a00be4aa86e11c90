"""Time and memory of a model on a device: Node, a page in Chromium, and the SDK's own engine.

python -m tests.benchmarks.models --rows 16 --queries 5 MODEL.gguf
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from playwright.async_api import async_playwright

from fedone_sdk import assets
from fedone_sdk.backends import LlamaCppBackend, Query, query_for
from tests.browser.stage import CHROMIUM
from tests.typescript.test_models import PROMPTS, as_json, model_page
from tests.weights import FORMS

MODELS = Path(__file__).parents[2] / "examples" / "typescript_client" / "models"


def mean_difference(found: list[Any], expected: list[Any]) -> tuple[float, float]:
    """The mean and the largest difference of log-probabilities, nats."""
    gaps = [
        abs(ours - theirs)
        for one, other in zip(found, expected, strict=True)
        for row, theirs_row in zip(one["logProbs"], other, strict=True)
        for ours, theirs in zip(row, theirs_row, strict=True)
    ]
    return sum(gaps) / len(gaps), max(gaps)


def renderer_mib() -> float:
    """Return the memory of Chromium's largest page, MiB (Pss)."""
    pages = [each for each in psutil.process_iter() if "--type=renderer" in each.cmdline()]
    return max(float(page.memory_full_info().pss) for page in pages) / 2**20


async def python_answers(model: Path, queries: list[Query]) -> tuple[list[Any], float]:
    async with LlamaCppBackend(model, threads=1) as backend:
        await backend.score(queries[0])
        start = time.perf_counter()
        answers = [(await backend.score(query)).log_probs for query in queries]
        return answers, time.perf_counter() - start


async def page_answers(model: Path, queries: list[Any]) -> dict[str, Any]:
    async with model_page(MODELS, model, []) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(f"{url}/page.html#{model.name}")
        await page.evaluate("queries => score(queries)", queries[:1])
        found = await page.evaluate("queries => score(queries)", queries)
        found["mib"] = renderer_mib()
        await browser.close()
        return dict(found)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--queries", type=int, default=5)
    args = parser.parse_args()
    lines = (assets.path("companion_feedback") / "train.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in lines.splitlines()[: args.rows * args.queries]]
    async with LlamaCppBackend(args.model, threads=1) as backend:
        batches = [rows[at : at + args.rows] for at in range(0, len(rows), args.rows)]
        queries = [
            query_for(FORMS["prefilled"], PROMPTS.candidates[1], batch, backend=backend)
            for batch in batches
        ]
    expected, seconds = await python_answers(args.model, queries)
    print(f"load {os.getloadavg()[0]:.1f}; {args.rows} rows per query, 1 thread")
    print(f"llama_cpp backend: {seconds / len(queries):.2f} s per query")
    asked = [as_json(query) for query in queries]
    done = await asyncio.to_thread(
        subprocess.run,
        ["node", MODELS / "dist" / "node.js"],
        input=json.dumps(asked),
        env={**os.environ, "MODEL": str(args.model)},
        capture_output=True,
        text=True,
        check=True,
    )
    for name, found in (
        ("node-llama-cpp", json.loads(done.stdout)),
        ("wllama in Chromium", await page_answers(args.model, asked)),
    ):
        mean, worst = mean_difference(found["answers"], expected)
        print(
            f"{name}: {found['seconds'] / len(asked):.2f} s per query, {found['mib']:.0f} MiB, "
            f"differs by {mean:.4f} nats in the mean, {worst:.4f} at most"
        )


if __name__ == "__main__":
    asyncio.run(main())
