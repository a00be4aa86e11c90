"""Rows per second of `LlamaCppBackend`, compared with a plain loop and with transformers.

The plain loop passes the same token ids to the same engine, row by row, and reads the
log-probabilities of two tokens; each query of 16 rows computes the shared prefix once. transformers
runs the same weights in float32 (needs torch, accelerate and gguf). The shared prefix is an
instruction, or an instruction with six demonstrations.

    PYTHONPATH=. python tests/benchmarks/llama_cpp.py [--model FILE] [--rows 64] [--no-torch]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from fedone_sdk import assets
from fedone_sdk.backends import LlamaCppBackend, TransformersBackend, query_for
from fedone_sdk.backends.local_models import model_path
from fedone_sdk.task import TaskSpec, form_of

TASK = TaskSpec(
    chat={"user": "{prompt}Feedback: {text}", "assistant": "Sentiment:"},
    labels={0: " negative", 1: " positive"},
)
INSTRUCTION = "Decide whether this feedback about a device is positive or negative.\n\n"
BATCH, REPEATS = 16, 3


def main() -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    model = args.model or model_path("smollm2-135m-instruct")
    lines = (assets.path("companion_feedback") / "train.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in lines.splitlines()]
    words = ["negative", "positive"]
    shots = "".join(
        f"Feedback: {row['text']}\nSentiment: {words[row['label']]}\n\n" for row in rows[-6:]
    )
    prompts = {"none": "", "instruction": INSTRUCTION, "demonstrations": INSTRUCTION + shots}
    print(f"{model.name}, {args.rows} rows, {BATCH} per query, best of {REPEATS}; rows/s\n")
    print(
        "| shared prefix | tokens per row | of these in the shared prefix | backend | plain loop "
        "| backend / plain loop | plain loop without reuse | transformers fp32 |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    asyncio.run(measure(model, prompts, rows[: args.rows], torch=args.torch))


async def measure(
    model: Path, prompts: dict[str, str], rows: list[dict[str, Any]], *, torch: bool
) -> None:
    """Print one line per prompt."""
    folder = tempfile.TemporaryDirectory()
    other = None
    if torch:
        from tests.weights import as_folder

        other = TransformersBackend(as_folder(model, Path(folder.name)), device="cpu")
        await other.check(TASK.label_words, form_of(TASK))
    async with LlamaCppBackend(model) as backend:
        await backend.check(TASK.label_words, form_of(TASK))
        engine, encoder = backend._loaded(), backend._loaded_encoder()
        labels = [token for (token,) in encoder.label_ids(TASK.label_words)]
        for name, prompt in prompts.items():
            queries = [
                query_for(TASK, prompt, rows[at : at + BATCH], backend=backend)
                for at in range(0, len(rows), BATCH)
            ]
            ids = [encoder.encode(parts) for query in queries for parts in query.inputs]
            ours = await best(partial(asked, backend, queries))
            loop, cold = [
                await best(partial(asyncio.to_thread, looped, engine, ids, labels, shares))
                for shares in (True, False)
            ]
            theirs = None if other is None else await best(partial(asked, other, queries))
            shared = num_shared(ids)
            speeds = [len(rows) / seconds for seconds in (ours, loop, cold)]
            fp32 = "-" if theirs is None else f"{len(rows) / theirs:.1f}"
            print(
                f"| {name} | {sum(map(len, ids)) / len(ids):.0f} | {shared} | {speeds[0]:.1f} "
                f"| {speeds[1]:.1f} | {speeds[0] / speeds[1]:.2f} | {speeds[2]:.1f} | {fp32} |",
                flush=True,
            )
    if other is not None:
        await other.aclose()
    folder.cleanup()


def num_shared(ids: list[list[int]]) -> int:
    """Return the number of tokens in the common prefix of all rows."""
    places = zip(*ids, strict=False)
    return sum(1 for _ in takewhile(lambda place: len(set(place)) == 1, places))


async def best(call: Callable[[], Any]) -> float:
    """Return the shortest time of several calls, seconds."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    return min(times)


async def asked(backend: Any, queries: list[Any]) -> None:
    """Score all queries as a run does: quote, then score."""
    for query in queries:
        await backend.quote(query)
        await backend.score(query)


def looped(engine: Any, ids: list[list[int]], labels: list[int], shares: bool) -> None:
    """Score the same token ids, one request each, directly with the engine.

    Args:
        engine: The loaded model.
        ids: Of each row.
        labels: The label tokens; if one is missing from the answer, the row is repeated.
        shares: Whether the rows of a query share the computation of their prefix.
    """
    for number, row in enumerate(ids):
        for num_probs in (256, 4096, engine.num_vocab):
            answer = engine._server.handle_completions(
                {
                    "prompt": [row],
                    "n_predict": 1,
                    "n_probs": num_probs,
                    "samplers": [],
                    "logit_bias": [[labels[0], 1e6]],
                    "cache_prompt": num_probs > 256 or (shares and number % BATCH != 0),
                }
            )
            (choice,) = answer["choices"]
            shown = choice["logprobs"]["content"][0]["top_logprobs"]
            found = {one["id"]: one["logprob"] for one in shown}
            if all(label in found for label in labels):
                break


if __name__ == "__main__":
    main()
