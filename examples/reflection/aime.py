"""Repeat GEPA's AIME-2025 setting with reflection on devices, under a cap in US dollars.

export OPENAI_API_KEY=sk-...
python examples/reflection/aime.py --usd 20

The program downloads the problems and estimates the cost. If the cap is too low, it exits before
the first paid request. It then tunes the prompt and prints its results next to the published ones.
The same command continues an interrupted run. `--base-url` selects another service with OpenAI's
API, and `--prices` sets its prices.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from fedone_sdk import RunSpec, Score
from fedone_sdk.backends.build import build_backend, proposer_of
from fedone_sdk.local import Federation, plan_run, simulate
from fedone_sdk.messages import RunResult
from fedone_sdk.scores import number
from fedone_sdk.stores import SqlStore

_HUB = "https://huggingface.co/datasets"
_PARQUET = "data/train-00000-of-00001.parquet"
FILES = {
    "2022-2024.parquet": (
        f"{_HUB}/AI-MO/aimo-validation-aime/resolve/13f9e12f613e720c2a2b2f345dd04b998a29494d/{_PARQUET}",
        "025484a99fea498e7d0c3b0ee42afcbec0176405c19c5dbf557b9f6ca6445675",
    ),
    "2025.parquet": (
        f"{_HUB}/MathArena/aime_2025/resolve/c94da77eb22bbd6439e62a323bec18493a421302/{_PARQUET}",
        "9f9066ff48ad2e31f9bf1b1ac6d5e80693195f987985f2859f89dd25ffa51c2d",
    ),
}
"""Files with their sources and SHA-256."""

PUBLISHED = {
    "baseline": 49.33,
    "Trace (OptoPrime)": 45.33,
    "TextGrad": 46.67,
    "MIPROv2": 51.33,
    "GEPA": 59.33,
}
"""GPT-4.1 Mini on AIME-2025, % (Agrawal et al. 2025, arXiv 2507.19457, table 2)."""

ROLLOUTS, MINI_BATCH = 1839, 3
"""GEPA's budget of (prompt, problem) pairs (table 1), and its batch size (appendix E.4)."""

INSTRUCTION = "Solve the problem and provide the answer in the correct format."
FORMAT = "\n\nReason step by step. End with a line of the form: ### <the answer, an integer>"


def scored(generated: str, example: Mapping[str, Any]) -> Score:
    """Score an answer by its last number; the feedback has the solution, as in GEPA."""
    found = number("answer")(generated, example)
    assert isinstance(found, Score)
    solution = example.get("solution", "")
    more = "" if found.value == 1 else f"; a worked solution: {solution}"
    return Score(found.value, f"{found.feedback}{more}")


def fetch(folder: Path) -> None:
    """Download missing files, and check the SHA-256 of all files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (url, sha256) in FILES.items():
        file = folder / name
        if not file.exists():
            with urlopen(url, timeout=60) as answer:
                file.write_bytes(answer.read())
        if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != sha256:
            sys.exit(f"{file}: its SHA-256 is {found}, not {sha256} of {url}; delete it")


def describe(arguments: argparse.Namespace) -> RunSpec:
    """Return the run."""
    prices = arguments.prices
    backend = {
        "kind": "openai",
        "base_url": arguments.base_url,
        "api_key_env": "OPENAI_API_KEY" if "OPENAI_API_KEY" in os.environ else None,
        "prices": prices and dict(zip(("prompt", "completion"), prices, strict=True)),
        "timeout_s": 600,
    }
    model = {**backend, "model": arguments.model, "max_input_tokens": 2048}
    writer = {**backend, "model": arguments.writer or arguments.model, "max_input_tokens": 8192}
    slot = {"name": "instruction", "candidates": [INSTRUCTION, ""]}
    return RunSpec.model_validate(
        {
            "name": "aime",
            "task": {
                "chat": {"system": "{instruction}", "user": "{problem}" + FORMAT},
                "loss": "score",
                "score": "aime:scored",
                "label_field": "answer",
                "max_tokens": 4096,
            },
            "data": {"train": "2022-2024.parquet", "dev": "2025.parquet", "num_clients": 15},
            "prompt": {
                "slots": [slot],
                "proposer": {"kind": "reflection", "every": 2, "backend": writer},
            },
            "method": {"name": "thompson", "num_samples": 4, "batch_size": MINI_BATCH},
            "budget": {"usd": arguments.usd, "queries": arguments.rollouts // MINI_BATCH},
            "rounds": 10_000,
            "evaluation": {"every": 0},
            "backend": {**model, "cache": str((arguments.data / "answers.db").absolute())},
        }
    )


async def tune(spec: RunSpec, folder: Path) -> RunResult:
    """Estimate the cost, exit if the cap is too small, and run."""
    federation = Federation.load(spec, folder, score=scored)
    async with (
        build_backend(spec.backend) as backend,
        proposer_of(spec, folder, backend) as proposer,
    ):
        plan = await plan_run(federation, backend=backend, proposer=proposer)
        cap = plan.cap.usd
        if not plan.priced:
            sys.exit("--prices: is required, because the price of a model is not known")
        if cap is None or plan.most.usd > cap:
            sys.exit(
                f"--usd {cap}: is too small: {plan.training_queries * MINI_BATCH} rollouts, their "
                f"reflections and the test cost up to ${plan.most.usd:.2f}; nothing was sent"
            )
        print(f"costs at most ${plan.most.usd:.2f}", flush=True)
        return await simulate(
            federation,
            backend=backend,
            proposer=proposer,
            store=SqlStore.sqlite(folder / "aime.db"),
            state_dir=folder / "clients",
        )


def show(result: RunResult, model: str) -> None:
    """Print the table and the costs."""
    rows = [(f"published, GPT-4.1 Mini: {name}", f"{share}") for name, share in PUBLISHED.items()]
    for one in result.standings:
        if one.value is None or one.name not in ("no_prompt", "untrained", "tuned"):
            continue
        # The metric is the loss, 1 - score.
        high, low = one.interval or (one.value, one.value)
        ends = f"{100 - 100 * low:.1f} to {100 - 100 * high:.1f}"
        rows.append((f"{model}: {one.name}", f"{100 - 100 * one.value:.1f} ({ends})"))
    width = max(len(name) for name, _ in rows)
    print(f"\n{'AIME-2025':{width}}  % right")
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    rollouts, spent = result.spent.queries * MINI_BATCH, result.spent
    print(f"\n{result.status}: {rollouts} rollouts, ${spent.usd:.2f} of ${result.cap.usd}")
    print(f"{len(result.lineage)} texts were written; deployed: {result.prompt.text!r}")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments, and tune."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--usd", type=float, required=True, help="cap of all requests")
    parser.add_argument("--model", default="gpt-4.1-mini")
    parser.add_argument("--writer", help="the model that reflects; default: --model")
    parser.add_argument("--base-url", help="URL that ends in /v1; default: OpenAI's")
    parser.add_argument(
        "--prices",
        nargs=2,
        type=float,
        metavar=("PROMPT", "COMPLETION"),
        help="US dollars per million tokens",
    )
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument("--data", type=Path, default=Path("aime"), help="folder of files and state")
    arguments = parser.parse_args(argv)
    fetch(arguments.data)
    show(asyncio.run(tune(describe(arguments), arguments.data)), arguments.model)


if __name__ == "__main__":
    main()
