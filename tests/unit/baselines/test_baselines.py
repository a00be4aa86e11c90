"""White-box training on small random models: gradients, losses, seeds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedone_sdk.backends import TransformersBackend, predict, query_for
from fedone_sdk.client.options import Trainer
from fedone_sdk.errors import BackendError, DataError, SpecError
from fedone_sdk.glue import glue_task
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.spec import PromptTuningSpec, PTuningV2Spec
from fedone_sdk.task import TaskSpec, example_loss
from tests.weights import random_model

WHY = "the extra `torch` is not installed: pip install 'fedone-sdk[torch]'"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
tokenizers = pytest.importorskip("tokenizers")

from fedone_sdk.baselines import FineTuning, PromptTuning, PTuningV2  # noqa: E402

CLOZE = glue_task("sst2")
ASKED = TaskSpec(
    template="{prompt} Review: {sentence} Sentiment:", labels={"0": " terrible", "1": " great"}
)
GOOD = ("a gorgeous film .", "witty", "great fun , and very , very moving")
BAD = ("dull .", "a terrible waste of time and money", "it never gets going")
ROWS: tuple[dict[str, Any], ...] = tuple(
    {"sentence": sentence, "label": label}
    for label, sentences in ((1, GOOD), (0, BAD))
    for sentence in sentences
)
KINDS: dict[str, Any] = {
    "prompt-tuning": (PromptTuning, PromptTuningSpec(name="prompt-tuning", hidden_size=32)),
    "p-tuning-v2": (
        PTuningV2,
        PTuningV2Spec(name="p-tuning-v2", hidden_size=32, num_layers=2),
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: random_model(tmp_path_factory.mktemp(name), name)
        for name in ("RobertaForMaskedLM", "LlamaForCausalLM")
    }


@pytest.fixture
def roberta(folders: dict[str, Path]) -> Path:
    return folders["RobertaForMaskedLM"]


def backend(model: Path, **options: Any) -> TransformersBackend:
    return TransformersBackend(model, device="cpu", **options)


async def begin(ours: TransformersBackend, kind: Any, length: int = 3) -> Any:
    shape = await ours.soft_shape(kind, length)
    return np.random.default_rng(0).normal(scale=0.3, size=shape).astype(np.float32)


async def mean_loss(ours: TransformersBackend, task: TaskSpec, kind: Any, parameters: Any) -> float:
    """By asking the model, as a black-box method does."""
    query = query_for(task, SoftPrompt.of(kind, parameters), ROWS, backend=ours)
    answer = await ours.score(query)
    losses = [
        example_loss(task, row, example)
        for row, example in zip(answer.log_probs, ROWS, strict=True)
        if row is not None
    ]
    assert len(losses) == len(ROWS)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("model", ["RobertaForMaskedLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("name", KINDS)
async def test_training_lowers_the_loss_that_asking_shows(
    model: str, name: str, folders: dict[str, Path]
) -> None:
    kind, method = KINDS[name]
    method = method.model_copy(update={"learning_rate": 0.1})
    task = CLOZE if model == "RobertaForMaskedLM" else ASKED
    async with backend(folders[model]) as ours:
        trainer: Trainer = kind(ours)
        assert trainer.fingerprint == ours.fingerprint
        start = await begin(ours, kind.kind)
        before = await mean_loss(ours, task, kind.kind, start)
        ask = await ours.score(query_for(task, "", ROWS, backend=ours))
        trained, losses = await trainer.train(task, method, start, [ROWS] * 30, 0)
        after = await mean_loss(ours, task, kind.kind, trained)
        assert (await ours.score(query_for(task, "", ROWS, backend=ours))) == ask
    assert losses[0] == pytest.approx(before, abs=1e-5)
    assert after < 0.5 * before
    assert trained.shape == start.shape
    assert trained.dtype == np.float32


@pytest.mark.parametrize("loss", ["cross_entropy", "hinge"])
@pytest.mark.parametrize("name", KINDS)
async def test_the_gradient_is_that_of_finite_differences(
    name: str, loss: Any, roberta: Path
) -> None:
    """The first step of AdamW is learning_rate * sign(gradient), where that is not tiny."""
    kind, method = KINDS[name]
    method = method.model_copy(update={"learning_rate": 1e-3})
    task = CLOZE.model_copy(update={"loss": loss})
    async with backend(roberta) as ours:
        start = await begin(ours, kind.kind)
        trained, _ = await kind(ours).train(task, method, start, [ROWS], 0)
        moved = (trained - start) / -1e-3
        slopes = []
        for row, column in [(0, 0), (1, 7), (2, 31), (len(start) - 1, 16)]:
            ends = []
            for step in (0.02, -0.02):
                changed = start.copy()
                changed[row, column] += step
                ends.append(await mean_loss(ours, task, kind.kind, changed))
            slopes.append(((ends[0] - ends[1]) / 0.04, moved[row, column]))
    assert any(abs(slope) > 1e-3 for slope, _ in slopes)
    for slope, sign in slopes:
        if abs(slope) > 1e-3:
            assert sign == pytest.approx(np.sign(slope), abs=1e-2)


@pytest.mark.parametrize("name", KINDS)
async def test_parts_of_a_batch_are_one_step(name: str, roberta: Path) -> None:
    kind, method = KINDS[name]
    found = []
    for max_batch in (256, 4):
        async with backend(roberta, max_batch=max_batch) as ours:
            start = await begin(ours, kind.kind)
            found.append(await kind(ours).train(CLOZE, method, start, [ROWS] * 3, 0))
    (whole, losses), (parts, same_losses) = found
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    assert same_losses == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("name", KINDS)
async def test_a_training_can_be_repeated_while_others_ask(name: str, roberta: Path) -> None:
    kind, method = KINDS[name]
    async with backend(roberta) as ours:
        start = await begin(ours, kind.kind)
        trainer, query = kind(ours), query_for(CLOZE, "", ROWS, backend=ours)
        alone = await trainer.train(CLOZE, method, start, [ROWS] * 4, 0)
        answer = await ours.score(query)
        among, meanwhile = await asyncio.gather(
            trainer.train(CLOZE, method, start, [ROWS] * 4, 0), ours.score(query)
        )
    np.testing.assert_array_equal(among[0], alone[0])
    assert among[1] == alone[1]
    assert meanwhile == answer


async def test_a_visit_ends_where_nothing_is_gained(roberta: Path) -> None:
    method = PromptTuningSpec(name="prompt-tuning", hidden_size=32, learning_rate=1e6, patience=2)
    async with backend(roberta) as ours:
        start = await begin(ours, "embeddings")
        _, losses = await PromptTuning(ours).train(CLOZE, method, start, [ROWS] * 40, 0)
    with pytest.raises(ValueError, match="patience"):
        PromptTuningSpec(name="prompt-tuning", hidden_size=32, patience=0)
    assert len(losses) < 40
    assert min(losses[-2:]) >= min(losses[:-2])
    assert min(losses[:-2]) == losses[-3]


async def test_a_label_word_of_several_tokens(folders: dict[str, Path]) -> None:
    task = ASKED.model_copy(update={"labels": {"0": " not good", "1": " great"}})
    kind, method = KINDS["p-tuning-v2"]
    async with backend(folders["LlamaForCausalLM"], multi_token_labels=True, max_batch=4) as ours:
        start = await begin(ours, kind.kind)
        before = await mean_loss(ours, task, kind.kind, start)
        trained, losses = await kind(ours).train(task, method, start, [ROWS] * 10, 0)
        assert losses[0] == pytest.approx(before, abs=1e-5)
        assert await mean_loss(ours, task, kind.kind, trained) < before


async def test_what_does_not_fit_is_refused(roberta: Path) -> None:
    async with backend(roberta) as ours:
        start = await begin(ours, "embeddings")
        trainer = PromptTuning(ours)
        method = KINDS["prompt-tuning"][1]
        generates = TaskSpec(template="{prompt} {sentence}", loss="nll", label_field="label")
        for task, other, wrong in (
            (CLOZE, KINDS["p-tuning-v2"][1], "method.name: 'p-tuning-v2'"),
            (CLOZE, method.model_copy(update={"hidden_size": 64}), "method.hidden_size: 64"),
            (CLOZE.model_copy(update={"loss": "zero_one"}), method, "task.loss: zero_one"),
            (generates, method, "task.loss: nll"),
        ):
            with pytest.raises(SpecError, match=wrong):
                await trainer.train(task, other, start, [ROWS], 0)
        deep = KINDS["p-tuning-v2"][1].model_copy(update={"num_layers": 3})
        with pytest.raises(SpecError, match=r"method.num_layers: 3, but the model has 2"):
            await PTuningV2(ours).train(CLOZE, deep, start, [ROWS], 0)
        with pytest.raises(BackendError, match="is for another model"):
            await trainer.train(CLOZE, method, start[:, :16], [ROWS], 0)
        with pytest.raises(DataError, match="label '7'"):
            await trainer.train(CLOZE, method, start, [[{"sentence": "x", "label": 7}]], 0)


async def test_fine_tuning_returns_a_separate_model(roberta: Path) -> None:
    rows = ROWS * 4
    training = FineTuning(learning_rate=3e-3, batch_size=8, max_epochs=6, held_out=0.25)
    async with backend(roberta) as ours:
        before = await predict(ours, CLOZE, "", rows, 8)
        tuned = await training.fit(ours, CLOZE, rows, seed=3)
        assert (await predict(ours, CLOZE, "", rows, 8)).rows == before.rows
        async with tuned.backend as theirs:
            after = await predict(theirs, CLOZE, "", rows, 8)
            assert theirs.fingerprint.split(":")[1] == ours.fingerprint.split(":")[1]
            assert theirs.fingerprint != ours.fingerprint
    assert before.mean_loss is not None
    assert after.mean_loss is not None
    assert after.mean_loss < 0.5 * before.mean_loss
    assert after.metric == 1.0
    assert tuned.best_epoch == 1 + tuned.held_out_losses.index(min(tuned.held_out_losses))
    assert len(tuned.losses) == len(tuned.held_out_losses) <= 6


async def test_fine_tuning_keeps_the_best_epoch_and_stops(roberta: Path) -> None:
    """At a rate that is far too high nothing is gained for long."""
    training = FineTuning(learning_rate=0.3, batch_size=8, max_epochs=20, patience=2)
    async with backend(roberta) as ours:
        tuned = await training.fit(ours, CLOZE, ROWS * 2, seed=1)
        await tuned.backend.aclose()
    assert len(tuned.losses) == tuned.best_epoch + 2 < 20


async def test_fine_tuning_is_the_same_for_a_seed_only(roberta: Path) -> None:
    """Dropout included, and whatever torch's own generator has drawn before."""
    training = FineTuning(learning_rate=1e-3, batch_size=4, max_epochs=2)
    found = []
    async with backend(roberta) as ours:
        for seed in (5, 5, 6):
            state = torch.random.get_rng_state()
            tuned = await training.fit(ours, CLOZE, ROWS * 2, seed=seed)
            assert torch.equal(torch.random.get_rng_state(), state)
            torch.rand(3)
            found.append((tuned.backend.fingerprint, tuned.losses, tuned.held_out_losses))
            await tuned.backend.aclose()
    assert found[0] == found[1]
    assert found[0] != found[2]


async def test_fine_tuning_refuses_what_it_cannot_do(roberta: Path) -> None:
    async with backend(roberta) as ours:
        with pytest.raises(DataError, match="has one row"):
            await FineTuning().fit(ours, CLOZE, ROWS[:4], seed=0)
        with pytest.raises(DataError, match="no rows"):
            await FineTuning().fit(ours, CLOZE, [], seed=0)
        with pytest.raises(SpecError, match=r"task\.loss: zero_one"):
            await FineTuning().fit(ours, CLOZE.model_copy(update={"loss": "zero_one"}), ROWS)
    for wrong in ({"learning_rate": 0.0}, {"held_out": 1.0}, {"max_epochs": 0}, {"patience": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FineTuning(**wrong)
