"""The ready scorers and the judge with a real model, from the score to the verdict.

SmolLM2-135M-Instruct answers through llama.cpp, and judges. A model of this size judges badly; the
figures show that all parts work, and how often the judge's two orders agree.

    python -m tests.benchmarks.scorers [--model FILE] [--queries 12]
    fedone score scorers/judge.yaml --slot "instruction=You read complaints." --pairs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import structlog

from fedone_sdk.backends.build import build_backend
from fedone_sdk.backends.local_models import model_path
from fedone_sdk.local import Federation, simulate
from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec

ITEMS = ("kettle", "lamp", "radio", "printer", "heater", "scale")
FAULTS = ("does not switch on", "smells of smoke", "makes a loud noise", "lost its colour")
RUBRIC = "It names the product and its fault, and adds nothing."

SCHEMA = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "price": {"type": "integer"}},
    "required": ["item", "price"],
}

TASKS: dict[str, dict[str, Any]] = {
    "exact_match": {"ask": "Which product is it? One word.", "label_field": "item"},
    "contains": {"ask": "Say what is broken, and how.", "label_field": "words"},
    "number": {"ask": "How many euros did it cost? A number.", "label_field": "price"},
    "token_f1": {"ask": "Name the product and its fault.", "label_field": "summary"},
    "rouge_l": {"ask": "Name the product and its fault.", "label_field": "summary"},
    "json_fields": {
        "ask": "Which product is it, and its price in euros? Answer as JSON.",
        "label_field": "fields",
        "options": {"schema": SCHEMA},
    },
    "regex": {"ask": "Which product is it? One word.", "options": {"pattern": r"^\s*\w+\W*$"}},
    "judge": {"ask": "Say what is broken, and how.", "label_field": "summary"},
}


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Return complaints, with what each scorer compares."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        item, fault, price = rng.choice(ITEMS), rng.choice(FAULTS), rng.randrange(5, 200)
        found.append(
            {
                "text": f"I bought a {item} for {price} euros last week, and now it {fault}.",
                **{"item": item, "price": price, "words": [item, *fault.split()[-1:]]},
                **{"summary": f"The {item} {fault}.", "fields": {"item": item, "price": price}},
            }
        )
    return found


def describe(name: str, model: Path, queries: int, batch_size: int) -> dict[str, Any]:
    """Return the RUN.yaml of a scorer."""
    given = TASKS[name]
    backend = {"kind": "llama_cpp", "model": str(model), "threads": 1}
    options = {"backend": backend, "rubric": RUBRIC} if name == "judge" else given.get("options")
    return {
        "name": name,
        "task": {
            "chat": {"system": "{instruction}", "user": "{text}\n" + given["ask"]},
            "loss": "score",
            "score": name if options is None else {name: options},
            "label_field": given.get("label_field", "item"),
            "max_tokens": 24,
        },
        "data": {"train": "train.jsonl", "dev": "dev.jsonl", "num_clients": 3},
        "prompt": {
            "slots": [
                {
                    "name": "instruction",
                    "candidates": ["", "Answer as briefly as possible.", "You read complaints."],
                }
            ]
        },
        "method": {"name": "thompson", "num_samples": 2, "batch_size": batch_size},
        "budget": {"queries": queries},
        "rounds": queries,
        "evaluation": {"every": 0},
        "backend": backend,
    }


async def run(spec: RunSpec, folder: Path) -> RunResult:
    """Tune once."""
    federation = Federation.load(spec, folder)
    async with build_backend(spec.backend, folder) as backend:
        return await simulate(federation, backend=backend)


def main() -> None:
    """Run all scorers, and print one row of the table for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--queries", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="rows of a mini-batch")
    parser.add_argument("--dev", type=int, default=12, help="rows of the dev split")
    parser.add_argument("--only", choices=TASKS, nargs="*", default=[*TASKS])
    parser.add_argument("--folder", type=Path, default=Path("scorers"))
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    args.folder.mkdir(exist_ok=True)
    for seed, (name, count) in enumerate({"train": 24, "dev": args.dev}.items()):
        lines = "".join(json.dumps(row) + "\n" for row in rows(seed, count))
        (args.folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    model = args.model or model_path("smollm2-135m-instruct")
    print("| score | no prompt | tuned | status | model requests | judge requests | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.only:
        begin, described = time.monotonic(), describe(name, model, args.queries, args.batch)
        (args.folder / f"{name}.yaml").write_text(json.dumps(described))
        result = asyncio.run(run(RunSpec.model_validate(described), args.folder))
        values = {one.name: one.value for one in result.standings}
        found = (values.get(name) for name in ("no_prompt", "tuned"))
        shown = ("-" if value is None else f"{1 - value:.2f}" for value in found)
        judged = 0 if result.judge is None else result.judge.requests
        counts = f"{result.spent.requests - judged}", f"{judged or '-'}"
        seconds = f"{time.monotonic() - begin:.0f}"
        print(f"| {' | '.join((name, *shown, result.status, *counts, seconds))} |", flush=True)
        if result.reason is not None and result.status == "stopped":
            print(result.reason)
        if result.verdict is not None and result.verdict.preference is not None:
            print(f"\nin pairs: {result.verdict.preference}", flush=True)


if __name__ == "__main__":
    main()
