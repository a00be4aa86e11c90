"""Rows without tuning: no prompt, a manual one, an untrained one, demonstrations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedone_paper.federated import (
    trial_backend,
    tuning_federation,
    untrained_prompt,
)
from fedone_paper.settings import Settings
from fedone_sdk.backends import predict, query_for
from fedone_sdk.data import SplitMix64, check_examples, load_examples
from fedone_sdk.evaluation.engine import Result, Trial, Workspace
from fedone_sdk.glue import glue_task
from fedone_sdk.task import Example, TaskSpec, form_of, render, target_of

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend

_BATCH_SIZE = 32
_TRIED = 500
"""Training rows that are tried as demonstrations, in the order of the draw."""
_MOST_DEMONSTRATIONS = 32
_WHOLE_SHARE = 0.9
"""So many of the dev inputs must keep their whole text next to the demonstrations."""


def prompt_trial(key: str, settings: Settings, task: str, prompt: str) -> Trial:
    """Return the trial that measures a given prompt on the dev split."""
    folder = settings.task_folder(task)
    return Trial(
        key=key,
        run=run_prompt,
        options={"task": settings.preset(task), "prompt": prompt, "backend": settings.backend()},
        inputs={"dev": folder / "dev.jsonl", "model": settings.model_folder},
    )


def run_prompt(options: dict[str, Any], workspace: Workspace) -> Result:
    """Measures ``prompt`` on the dev split."""
    return asyncio.run(
        _measured(glue_task(options["task"]), options["prompt"], options["backend"], workspace)
    )


def run_untrained(options: dict[str, Any], workspace: Workspace) -> Result:
    """Measures the deployable prompt of the untrained state of a ``run``."""
    federation = tuning_federation(options, workspace)
    prompt = untrained_prompt(federation)
    backend = options["run"]["backend"]
    return asyncio.run(_measured(federation.spec.task, prompt, backend, workspace))


def demonstrations_trial(key: str, settings: Settings, task: str, seed: int) -> Trial:
    """Return the trial of in-context learning: solved training rows stand before each input."""
    return Trial(
        key=key,
        run=run_demonstrations,
        options={"task": settings.preset(task), "seed": seed, "backend": settings.backend()},
        inputs=settings.inputs(task),
    )


def run_demonstrations(options: dict[str, Any], workspace: Workspace) -> Result:
    """Measures as many solved rows as fit the model, drawn by ``seed``, as the prompt."""
    task = glue_task(options["task"])
    train: list[Example] = [*load_examples(workspace.inputs["train"])]
    dev: list[Example] = [*load_examples(workspace.inputs["dev"])]
    drawn = [train[row] for row in SplitMix64(options["seed"]).shuffle(range(len(train)))]

    async def work() -> Result:
        async with trial_backend(options["backend"], workspace) as backend:
            chosen = await _demonstrations(backend, task, drawn, dev)
        found = await _measured(task, _text(task, chosen), options["backend"], workspace)
        return {**found, "demonstrations": len(chosen)}

    return asyncio.run(work())


async def _measured(
    task: TaskSpec, prompt: str, backend_document: dict[str, Any], workspace: Workspace
) -> Result:
    began = time.monotonic()
    dev: list[Example] = [*load_examples(workspace.inputs["dev"])]
    check_examples(task, dev, workspace.inputs["dev"])
    async with trial_backend(backend_document, workspace) as backend:
        await backend.check(task.label_words, form_of(task))
        found = await predict(backend, task, prompt, dev, _BATCH_SIZE)
        return {
            "metric": {"name": task.metric, "after": found.metric},
            "mean_loss": found.mean_loss,
            "prompt": prompt,
            "model": backend.fingerprint,
            "spent": found.usage.model_dump(mode="json"),
            "examples": len(dev),
            "wall_s": time.monotonic() - began,
        }


async def _demonstrations(
    backend: LLMBackend, task: TaskSpec, drawn: Sequence[Example], dev: Sequence[Example]
) -> list[Example]:
    """Rows, of each class in turn, that fit next to most of the dev inputs.

    A row that is too long is passed over for the next one of its class.
    """
    lengths = sorted([await _length(backend, task, "", example) for example in dev])
    longest = lengths[min(int(_WHOLE_SHARE * len(lengths)), len(lengths) - 1)]
    room = backend.worst_case(1).prompt_tokens - longest
    by_class: dict[object, list[Example]] = {}
    for example in drawn[:_TRIED]:
        by_class.setdefault(target_of(task, example), []).append(example)
    waiting = [iter(rows) for rows in by_class.values()]
    chosen: list[Example] = []

    async def fits(example: Example) -> bool:
        return await _tokens(backend, task, _text(task, [*chosen, example])) <= room

    count = -1
    while count < len(chosen) < _MOST_DEMONSTRATIONS:
        count = len(chosen)
        for rows in waiting:
            for example in rows:
                if await fits(example):
                    chosen.append(example)
                    break
    return chosen[:_MOST_DEMONSTRATIONS]


def _text(task: TaskSpec, examples: Sequence[Example]) -> str:
    """Solved examples as they stand before an input."""
    return " ".join(_solved(task, example) for example in examples)


def _solved(task: TaskSpec, example: Example) -> str:
    """Return an example in its template, with its label word at the mask or the end."""
    target = target_of(task, example)
    assert isinstance(target, int)
    word = task.label_words[target]
    parts = render(task, "", example)
    text = "".join(word if part.kind == "mask" else part.text for part in parts)
    if all(part.kind != "mask" for part in parts):
        text += word
    # A label word brings its leading space along, which may stand behind another one.
    return " ".join(text.split())


async def _tokens(backend: LLMBackend, task: TaskSpec, text: str) -> int:
    """Return the tokens of a text within the template, at most as many as the model takes."""
    # In the place of a field: what is too long is then cut, as a prompt would not be.
    empty: dict[str, str] = dict.fromkeys(task.fields, "")
    filled = {**empty, task.fields[0]: text}
    return await _length(backend, task, "", filled) - await _length(backend, task, "", empty)


async def _length(backend: LLMBackend, task: TaskSpec, prompt: str, example: Example) -> int:
    """Return the tokens of one input, at most as many as the model takes."""
    quoted = await backend.quote(query_for(task, prompt, [example], backend=backend))
    return quoted.prompt_tokens
