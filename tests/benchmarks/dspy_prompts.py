"""DSPy's MIPROv2 and GEPA on the quickstart's task and model, with their number of calls.

They run from the dspy package, with any OpenAI-compatible server of the same model:

    python tests/llama_cpp/serve.py MODEL.gguf --port 8080 --alias smollm2 --context 4096
    python tests/benchmarks/dspy_prompts.py --base-url http://127.0.0.1:8080/v1  # pip install dspy

An example call is one request about one example, as in docs/explanation/budgets.md. DSPy has no cap
on calls, so the script counts them. Requests without an example (instruction proposals,
reflections) count too, because they cost as much.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import dspy
from dspy.utils.exceptions import AdapterParseError

FEEDBACK = Path(__file__).parents[2] / "fedone_sdk" / "assets" / "companion_feedback"
LABELS = ("negative", "positive")


class Sentiment(dspy.Signature):
    """The sentiment of the customer review."""

    text: str = dspy.InputField()
    sentiment: Literal["negative", "positive"] = dspy.OutputField()


class Calls(dspy.utils.callback.BaseCallback):
    """Counts requests to the model."""

    def __init__(self) -> None:
        self.count = 0

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        self.count += 1


def main() -> None:
    """Run the optimisers and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--example-calls", type=int, default=960, help="what is aimed at")
    parser.add_argument("--dev", type=int, default=416, help="rows of the dev split")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    calls = Calls()
    # A label in DSPy's output format has 30 tokens, an instruction more.
    model, writer = (
        dspy.LM(
            f"openai/{args.model}",
            api_base=args.base_url,
            api_key="none",
            temperature=0.0,
            max_tokens=max_tokens,
            cache=False,
        )
        for max_tokens in (48, 200)
    )
    # A small model often breaks DSPy's output format. Such an answer counts as wrong.
    dspy.configure(lm=model, callbacks=[calls], max_errors=1_000_000)
    train = rows("train.jsonl")
    random.Random(args.seed).shuffle(train)
    dev = rows("dev.jsonl")[: args.dev]
    size = args.example_calls // 10
    optimisers: dict[str, Callable[[], Any]] = {
        "no optimiser": lambda: dspy.Predict(Sentiment),
        # A tenth for bootstrapping, the rest for trials on mini-batches and two full evaluations.
        "MIPROv2": lambda: dspy.MIPROv2(
            metric=right,
            prompt_model=writer,
            auto=None,
            num_candidates=6,
            num_threads=4,
            seed=args.seed,
        ).compile(
            dspy.Predict(Sentiment),
            trainset=train[:size],
            valset=train[size : 2 * size],
            num_trials=args.example_calls * 6 // 10 // 16,
            minibatch_size=16,
            minibatch_full_eval_steps=args.example_calls,
        ),
        "GEPA": lambda: dspy.GEPA(
            metric=feedback,
            max_metric_calls=args.example_calls,
            reflection_lm=writer,
            num_threads=4,
            seed=args.seed,
        ).compile(dspy.Predict(Sentiment), trainset=train[:size], valset=train[size : 2 * size]),
    }
    print("| optimiser | accuracy | calls while it ran | wall s |\n|---|---|---|---|", flush=True)
    for name, optimise in optimisers.items():
        calls.count, began = 0, time.monotonic()
        try:
            program = optimise()
        except AdapterParseError as exc:  # For instance of the model that writes instructions.
            expected = ", ".join(exc.signature.output_fields)
            print(f"| {name} | no answer has {expected} | {calls.count} | |", flush=True)
            continue
        spent, took = calls.count, time.monotonic() - began
        score = dspy.Evaluate(devset=dev, metric=right, num_threads=4, failure_score=0.0)(program)
        print(f"| {name} | {score.score / 100:.3f} | {spent} | {took:.0f} |", flush=True)


def rows(name: str) -> list[Any]:
    """Return labelled sentences as DSPy examples."""
    found = map(json.loads, (FEEDBACK / name).read_text(encoding="utf-8").splitlines())
    return [
        dspy.Example(text=one["text"], sentiment=LABELS[one["label"]]).with_inputs("text")
        for one in found
    ]


def right(example: Any, prediction: Any, trace: object = None) -> bool:
    """Return whether a prediction is the label."""
    return bool(example.sentiment == prediction.sentiment)


def feedback(
    gold: Any, pred: Any, trace: object = None, pred_name: object = None, pred_trace: object = None
) -> Any:
    """Return the same as a score, with the correct answer as text for the reflection."""
    score = float(right(gold, pred))
    return dspy.Prediction(score=score, feedback=f"The sentiment is {gold.sentiment}.")


if __name__ == "__main__":
    main()
