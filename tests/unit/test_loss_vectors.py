"""The wire vectors for losses, prompts and artefacts, which clients in other languages share."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.budget import NOTHING
from fedone_sdk.candidates import prompt_of
from fedone_sdk.losses import class_means, example_loss, loss_terms, num_groups
from fedone_sdk.messages import RunTask, Tensor
from fedone_sdk.reports.artefact import load_prompt
from fedone_sdk.task import Example, Score, render, target_of, words_of
from fedone_sdk.vocabulary import Vocabulary

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS = json.loads((FOLDER / "losses.json").read_text(encoding="utf-8"))
ARTEFACTS = json.loads((FOLDER / "artefacts.json").read_text(encoding="utf-8"))["artefacts"]


def row_of(answer: Any, example: Example) -> Any:
    """Return the answer; of a written one, whether it is a keyword."""
    return Score(float(answer in example["keywords"])) if isinstance(answer, str) else answer


@pytest.mark.parametrize("vector", VECTORS["losses"], ids=lambda vector: vector["name"])
def test_losses(vector: dict[str, Any]) -> None:
    task = RunTask.model_validate_json(vector["run"]).task
    pairs = list(zip(vector["answers"], vector["examples"], strict=True))
    losses = [example_loss(task, row_of(answer, example), example) for answer, example in pairs]
    tolerance = 1e-15 if task.loss == "cross_entropy" else 0.0
    assert losses == pytest.approx(vector["losses"], rel=tolerance, abs=tolerance)
    assert math.fsum(vector["losses"]) / len(losses) == vector["mean"]
    if "by_class" in vector:
        targets = [target for _, row in pairs if isinstance(target := target_of(task, row), int)]
        at = task.with_bias(vector["bias"])
        terms = [loss_terms(at, row, label) for (row, _), label in zip(pairs, targets, strict=True)]
        means = class_means(terms, targets, num_groups(len(task.labels), private=False))
        expected = Tensor.model_validate(vector["by_class"])
        assert expected.shape == (1, len(means), len(means[0]))
        flat = [value for row in means for value in row]
        assert flat == pytest.approx(expected.values().tolist(), rel=1e-6, abs=1e-9)
        assert [targets.count(label) for label in range(len(task.labels))] == vector["class_counts"]


@pytest.mark.parametrize("vector", VECTORS["prompts"], ids=lambda vector: vector["name"])
def test_prompts(vector: dict[str, Any]) -> None:
    task = RunTask.model_validate_json(vector["run"]).task
    vocabulary = Vocabulary.model_validate(vector["vocabulary"])
    prompt = prompt_of(task, vocabulary, vector["indices"])
    rendered = render(task, prompt, vector["example"])
    assert [list(part) for part in rendered] == vector["input"]
    assert list(words_of(task, prompt)) == vector["label_words"]


def test_sums() -> None:
    for vector in VECTORS["sums"]:
        assert math.fsum(vector["values"]) == vector["sum"]


class OneAnswer(LLMBackend):
    """Gives one answer to everything, and keeps what it was asked."""

    answers = frozenset({"labels", "text"})
    fingerprint = "m"
    asked: Query

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def score(self, query: Query) -> Answer:
        self.asked = query
        if isinstance(self._answer, str):
            return Answer(log_probs=((),), texts=(self._answer,), usage=NOTHING)
        return Answer(log_probs=(tuple(self._answer),), usage=NOTHING)


@pytest.mark.parametrize("vector", ARTEFACTS, ids=lambda vector: vector["name"])
async def test_artefacts(vector: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "prompt.json").write_text(vector["artefact"], encoding="utf-8")
    prompt, backend = load_prompt(tmp_path / "prompt.json"), OneAnswer(vector["answer"])
    found = await prompt.predict(vector["row"], backend)
    (asked,) = backend.asked.inputs
    assert [list(part) for part in asked] == vector["input"]
    assert list(backend.asked.label_words) == vector["label_words"]
    for key in ("label", "scores", "text"):
        assert getattr(found, key) == vector[key]
    assert prompt.render(vector["row"]) == vector["rendered"]
    assert prompt.messages(vector["row"]) == vector["messages"]
