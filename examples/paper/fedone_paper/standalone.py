"""Prompts without tuning: no prompt, a manual or untrained prompt, or demonstrations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedone_paper.federated import trial_backend, tuning_federation, untrained_prompt
from fedone_sdk.backends import predict, query_for
from fedone_sdk.data import SplitMix64, load_examples
from fedone_sdk.evaluation.engine import Result, Workspace
from fedone_sdk.task import Example, TaskSpec, form_of, render, target_of

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend

_BATCH_SIZE = 32
_TRIED = 500
"""Number of drawn training rows that are tried as demonstrations."""
_MOST_DEMONSTRATIONS = 32
_WHOLE_SHARE = 0.9
"""Share of the dev inputs that the demonstrations must not truncate."""


def run_standing(options: dict[str, Any], workspace: Workspace) -> Result:
    """Measure, on the dev split, a prompt that is not tuned.

    Args:
        options: ``run``, of which the task, the dev rows and the seed are used, and ``standing``.
            ``demonstrations``: as many drawn training rows as fit, with their labels, come before
            each input. ``untrained``: the deployable prompt before training. Other values of
            ``standing`` use the option ``prompt``.
        workspace: Has the inputs ``model``, ``train`` and ``dev``.
    """
    return asyncio.run(_measured(options, workspace))


async def _measured(options: dict[str, Any], workspace: Workspace) -> Result:
    began, more = time.monotonic(), {}
    federation, prompt = tuning_federation(options, workspace), options["prompt"]
    task, dev = federation.spec.task, federation.dev
    async with trial_backend(options["run"]["backend"], workspace) as backend:
        await backend.check(task.label_words, form_of(task))
        if options["standing"] == "untrained":
            prompt = untrained_prompt(federation)
        if options["standing"] == "demonstrations":
            train: list[Example] = [*load_examples(workspace.inputs["train"])]
            drawn = SplitMix64(federation.spec.seed).shuffle(train)
            chosen = await _demonstrations(backend, task, drawn, dev)
            prompt, more = _text(task, chosen), {"demonstrations": len(chosen)}
        found = await predict(backend, task, prompt, dev, _BATCH_SIZE)
        return {
            "metric": {"name": task.metric, "after": found.metric},
            "mean_loss": found.mean_loss,
            "prompt": prompt,
            "model": backend.fingerprint,
            "spent": found.usage.model_dump(mode="json"),
            "examples": len(dev),
            **more,
            "wall_s": time.monotonic() - began,
        }


async def _demonstrations(
    backend: LLMBackend, task: TaskSpec, drawn: Sequence[Example], dev: Sequence[Example]
) -> list[Example]:
    """Return rows, of each class in turn, that fit next to most of the dev inputs.

    In place of a row that is too long, the next row of its class is used.
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
    """Return solved examples in their template, with the label word at the mask or the end."""
    words: list[str] = []
    for example in examples:
        word, parts = task.label_words[int(target_of(task, example))], render(task, "", example)
        texts = [word if part.kind == "mask" else part.text for part in parts]
        if all(part.kind != "mask" for part in parts):
            texts.append(word)
        # Split, because a label word begins with a space, and may follow another space.
        words += "".join(texts).split()
    return " ".join(words)


async def _tokens(backend: LLMBackend, task: TaskSpec, text: str) -> int:
    """Return the number of tokens of a text in the template, at most the model's maximum."""
    # The text replaces a field, because long fields are truncated, but long prompts are not.
    empty: dict[str, str] = dict.fromkeys(task.fields, "")
    filled = {**empty, task.fields[0]: text}
    return await _length(backend, task, "", filled) - await _length(backend, task, "", empty)


async def _length(backend: LLMBackend, task: TaskSpec, prompt: str, example: Example) -> int:
    """Return the number of tokens of one input, at most the model's maximum."""
    quoted = await backend.quote(query_for(task, prompt, [example], backend=backend))
    return quoted.prompt_tokens
