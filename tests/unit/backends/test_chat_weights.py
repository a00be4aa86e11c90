"""The same instruct model in llama.cpp and in transformers gives the same answers.

The quick form of tests/vllm/test_chat.py, which also asks vLLM.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk import assets
from fedone_sdk.backends import LlamaCppBackend, LLMBackend, TransformersBackend, query_for
from fedone_sdk.task import TaskSpec, form_of
from tests.weights import ATTACK, FORMS, as_float32, as_folder

_NEEDED = ("torch", "transformers", "gguf", "accelerate", "xllamacpp")

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in _NEEDED),
    reason="needs the weights in both forms: scripts/test-torch",
)


async def answers(backend: LLMBackend, task: TaskSpec) -> list[Any]:
    lines = (assets.path("companion_feedback") / "dev.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in lines.splitlines()[:8]] + [{"text": ATTACK}]
    await backend.check(task.label_words, form_of(task))
    query = query_for(task, "Judge it. ", rows, backend=backend)
    answer = await backend.score(query)
    assert answer.usage.prompt_tokens == (await backend.quote(query)).prompt_tokens
    return list(answer.log_probs)


async def test_float32_weights_give_the_same_answers(smollm2: Path, tmp_path: Path) -> None:
    folder = as_folder(smollm2, tmp_path / "smollm2")
    exact = as_float32(smollm2, tmp_path / "smollm2-f32.gguf")
    async with (
        TransformersBackend(folder, device="cpu") as torch,
        LlamaCppBackend(exact, max_input_tokens=512) as llama,
        LlamaCppBackend(smollm2, max_input_tokens=512) as quantised,
    ):
        for task in FORMS.values():
            ours, theirs = await answers(llama, task), await answers(torch, task)
            rounded = await answers(quantised, task)
            for a, b, c in zip(ours, theirs, rounded, strict=True):
                # llama.cpp sums the vocabulary in float32, which moves both labels alike.
                assert list(a) == pytest.approx(list(b), abs=1e-3)
                assert a[0] - a[1] == pytest.approx(b[0] - b[1], abs=1e-4)
                # 4-bit weights come with 8-bit activations.
                assert list(a) == pytest.approx(list(c), abs=1.0)
