"""Throughput and memory of the transformers backend.

The whole of `score` is timed: tokenising, padding, the forward pass, log-probabilities. Without
`--model` it is roberta-large with random weights, which have the speed of trained ones.

    PYTHONPATH=examples/paper python tests/benchmarks/transformers_backend.py [--device cuda]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from fedone_paper.glue import glue_task
from fedone_sdk import assets
from fedone_sdk.backends import Query
from fedone_sdk.backends.transformers import TransformersBackend
from fedone_sdk.errors import BackendError
from fedone_sdk.task import TaskSpec, render

ROBERTA_LARGE = {
    "vocab_size": 50265,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}
PROMPT = " really good" * 10  # 20 tokens, as in the paper's runs.
WORDS = (
    "the",
    "film",
    "is",
    "a",
    "slow",
    ",",
    "witty",
    "and",
    "very",
    "moving",
    "story",
    "of",
    "nobody",
)


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", help="folder or hub name; default: random roberta-large")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--seconds", type=float, default=5.0, help="per line, at the least")
    args = parser.parse_args()
    with model_at(args.model) as model:
        asyncio.run(measure(model, args))


async def measure(model: str, args: argparse.Namespace) -> None:
    """Measure and print all lines of the table."""
    on_gpu = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    machine = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{args.model or 'roberta-large (random)'}, {machine}, {versions}\n")
    print(f"| dtype | batch | sentences/s | ms/query (p50) | peak {memory_name(on_gpu)} GiB |")
    print("|---|---|---|---|---|")
    tokens: list[float] = []
    for dtype in args.dtypes:
        async with TransformersBackend(model, device=args.device, dtype=dtype) as backend:
            for size in args.batch_sizes:
                tokens += await one_line(backend, dtype, size, args.seconds, on_gpu)
        if on_gpu:
            torch.cuda.empty_cache()
    print(f"\n{statistics.mean(tokens):.0f} tokens an input, special tokens included")


async def one_line(
    backend: TransformersBackend, dtype: str, size: int, seconds: float, on_gpu: bool
) -> list[float]:
    """Measure one batch size after a warm-up; return the mean tokens of an input, if it fits."""
    rng = random.Random(size)
    try:
        task = task_of(backend)
        for _ in range(2):
            await backend.score(query(rng, task, size))
        restart_peak(on_gpu)
        times: list[float] = []
        tokens = 0
        while sum(times) < seconds or not times:
            asked = query(rng, task, size)
            begin = time.perf_counter()
            tokens += (await backend.score(asked)).usage.prompt_tokens
            times.append(time.perf_counter() - begin)
    except BackendError as exc:
        print(f"| {dtype} | {size} | {exc} | | |", flush=True)
        return []
    print(
        f"| {dtype} | {size} | {size * len(times) / sum(times):,.1f} "
        f"| {statistics.median(times) * 1000:,.1f} | {peak_gib(on_gpu):.2f} |",
        flush=True,
    )
    return [tokens / size / len(times)]


def task_of(backend: TransformersBackend) -> TaskSpec:
    """Return SST-2; for a causal model with the answer at the end."""
    task = glue_task("sst2")
    if "text" in backend.answers:
        task = task.model_copy(update={"template": "{prompt} {sentence} It was"})
    return task


def query(rng: random.Random, task: TaskSpec, size: int) -> Query:
    """Return sentences of 5 to 45 words."""
    sentences = [" ".join(rng.choices(WORDS, k=rng.randint(5, 45))) for _ in range(size)]
    inputs = tuple(render(task, PROMPT, {"sentence": sentence}) for sentence in sentences)
    return Query(inputs=inputs, label_words=task.label_words)


@contextmanager
def model_at(model: str | None) -> Iterator[str]:
    """Yield the given model, or roberta-large with random weights and the embedded tokeniser."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = transformers.RobertaConfig(**ROBERTA_LARGE)
        transformers.RobertaForMaskedLM(config).save_pretrained(folder)
        shutil.copyfile(
            assets.path("roberta_mini") / "tokenizer.json", Path(folder, "tokenizer.json")
        )
        yield folder


def memory_name(on_gpu: bool) -> str:
    """Return the name of the memory that `peak_gib` measures."""
    return "GPU" if on_gpu else "process"


def restart_peak(on_gpu: bool) -> None:
    """Reset the peak."""
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def peak_gib(on_gpu: bool) -> float:
    """Return the peak memory since `restart_peak` (on a CPU other than Linux: of all time)."""
    if on_gpu:
        return float(torch.cuda.max_memory_allocated() / 2**30)
    if sys.platform == "linux":
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(status["VmHWM"].split()[0]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30


if __name__ == "__main__":
    main()
