"""Tune with a paid API under hard caps: the cost of each request is reserved before it is sent.

export OPENAI_API_KEY=sk-...
python examples/openai_budget.py --requests 2000 --usd 0.50

Before the first paid request, the program prints for how many rounds the caps pay. Set `--rounds`
to a smaller number, so that the caps also pay for measuring the tuned prompt. The program ends with
the prompt, its accuracy and the cost. After a crash the same command continues. Requests that may
have been sent count as spent, so no cap is exceeded. `--base-url` names another service with
OpenAI's API; the prices in this file apply to it.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from fedone_sdk import RunSpec
from fedone_sdk.backends.build import build_backend
from fedone_sdk.local import Federation, plan_run, simulate
from fedone_sdk.stores import SqlStore

DATA = Path(__file__).parent / "zero_one"
WORDS = ["", "Judge", " only", " the", " mood", " of", " this", " short", " honest"]
QUESTION = "Was the customer pleased? Answer yes or no:"
KEPT = Path("openai-budget.db")


def describe(arguments: argparse.Namespace) -> RunSpec:
    """Return the run. Its keys are those of RUN.yaml."""
    return RunSpec.model_validate(
        {
            "name": "paid",
            "task": {
                "template": "{prompt}\n\nReview: {text}\n\n" + QUESTION,
                "labels": {0: " no", 1: " yes"},
            },
            "data": {"train": "train.jsonl", "dev": "dev.jsonl", "num_clients": 3},
            "prompt": {"length": 4, "vocabulary": {"kind": "list", "candidates": WORDS}},
            "method": {"name": "thompson", "num_samples": 8, "batch_size": 4},
            "participation": {"exchange": "losses"},
            "budget": {"requests": arguments.requests, "usd": arguments.usd},
            "rounds": arguments.rounds,
            "evaluation": {"every": 0},
            "backend": {
                "kind": "openai",
                "model": arguments.model,
                "base_url": arguments.base_url,
                # OpenAI's models return log-probabilities only without reasoning.
                "reasoning_effort": "none",
                # US dollars per million tokens
                "prices": {"prompt": 0.10, "completion": 0.50},
                "cache": str(KEPT.with_suffix(".answers").absolute()),
            },
        }
    )


async def tune(spec: RunSpec) -> None:
    """Print the plan, and run until a cap is exhausted or all rounds are done."""
    federation = Federation.load(spec, DATA)
    async with build_backend(spec.backend) as backend:
        plan = await plan_run(federation, backend=backend)
        print(f"the caps buy about {plan.rounds_expected} rounds", flush=True)
        result = await simulate(
            federation,
            backend=backend,
            store=SqlStore.sqlite(KEPT),
            state_dir=KEPT.with_suffix(".clients"),
        )
    print(f"{result.status} after {result.rounds} rounds: {result.prompt.text!r}")
    after = "not measured" if result.metric.after is None else result.metric.after
    print(f"accuracy {result.metric.before} -> {after}")
    spent, cap = result.spent, result.cap
    print(f"spent {spent.requests} of {cap.requests} requests, ${spent.usd:.4f} of ${cap.usd}")


def main() -> None:
    """Read the arguments, and tune."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--usd", type=float, default=0.50)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--model", default="gpt-6-luna")
    parser.add_argument("--base-url", help="URL that ends in /v1; default: OpenAI's")
    asyncio.run(tune(describe(parser.parse_args())))


if __name__ == "__main__":
    main()
