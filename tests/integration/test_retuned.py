"""Conclusions about a prompt that moves to another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.backends import Answer, AnswerCache, LLMBackend, ModelClient, Query, predict
from fedone_sdk.budget import Usage
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.local import Federation, simulate
from fedone_sdk.local.retune import Retuning, retune_name, retune_spec
from fedone_sdk.messages import PromptReport
from fedone_sdk.reports import PromptArtefact, artefact_of, run_of_archive
from fedone_sdk.reports.retuned import Retuned, measure_retuned
from fedone_sdk.spec import OnnxSpec, PromptSpec, RunSpec, load_backend
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Example, Rendered
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary, build_vocabulary
from tests.integration.tuned import SPEC, small

OLD, NEW = " good", " so"
WORDS = Vocabulary(candidates=(OLD, NEW))
DEV = tuple(
    {"text": f"row {n} is {'fine' if n % 2 else 'bad'}", "label": n % 2} for n in range(200)
)


async def artefact(**changes: Any) -> PromptArtefact:
    found = artefact_of(await run_of_archive((await small()).archive))
    return found.model_copy(update=changes)


async def old_prompt(*, value: float = 1.0, **changes: Any) -> PromptArtefact:
    """An artefact whose prompt is `OLD`, measured at `value` on as many rows."""
    found = await artefact()
    metric = found.evaluation.metric.model_copy(update={"after": value})
    ends = (value - 0.02, min(value + 0.02, 1.0))
    evaluation = found.evaluation.model_copy(
        update={"metric": metric, "interval": ends, "examples": 200}
    )
    prompt = PromptReport(text=OLD, tokens=(OLD,), bias=None)
    given = {"prompt": prompt, "evaluation": evaluation, "calibration": "none", **changes}
    return found.model_copy(update=given)


def cached(model: LLMBackend) -> ModelClient:
    return ModelClient(model, cache=AnswerCache())


def model(right: dict[str, float], shift: float = 0.0) -> ModelClient:
    """A model that is right on a share of the rows, by what its prompt holds."""

    def answer(inputs: Rendered, words: tuple[str, ...]) -> tuple[float, ...]:
        text = "".join(part.text for part in inputs)
        share = next(one for prompt, one in right.items() if prompt in text)
        row = int(text.split("row ")[1].split()[0])
        wrong = row % 100 >= round(100 * share)
        positive = ("fine" in text) is not wrong
        return (-3.0, -0.1 + shift) if positive else (-0.1, -3.0 + shift)

    return cached(ScriptedBackend(answer, fingerprint="next"))


async def found_by(
    backend: ModelClient,
    prompt: PromptArtefact,
    *,
    new: str = NEW,
    biases: dict[str, Any] | None = None,
    known: bool = True,
    finished: bool = True,
) -> Retuned:
    spec = RunSpec.model_validate({**SPEC, "calibration": "none"})
    if known:
        for text in ("", OLD, new):
            await predict(backend, spec.task, text, DEV, spec.method.batch_size)
    return await measure_retuned(
        backend,
        prompt,
        Federation(spec=spec, shards=(), dev=DEV, vocabulary=WORDS, reused_rows=False),
        PromptReport(text=new, tokens=(new,)),
        biases or {},
        finished=finished,
    )


@pytest.mark.parametrize(
    ("old", "new", "holds", "conclusion"),
    [
        (0.95, 0.96, "yes", "no_difference"),
        (0.70, 0.95, "no", "take_new"),
        (0.95, 0.70, "yes", "keep_old"),
        (0.70, 0.71, "no", "no_difference"),
    ],
)
async def test_what_is_concluded(old: float, new: float, holds: str, conclusion: str) -> None:
    backend = model({OLD: old, NEW: new, "": 0.5})
    found = await found_by(backend, await old_prompt(value=0.95))
    assert found.old_prompt.value == pytest.approx(old)
    assert found.new_prompt.value == pytest.approx(new)
    assert found.no_prompt.value == pytest.approx(0.5)
    assert found.change is not None
    assert found.change.value == pytest.approx(old - 0.95)
    assert found.gain is not None
    assert found.gain.value == pytest.approx(new - old)
    assert found.gain.low <= found.gain.value <= found.gain.high
    assert (found.holds, found.conclusion, found.keep) == (holds, conclusion, "as_it_is")


async def test_a_bias_that_is_found_again_saves_the_old_prompt() -> None:
    backend = model({OLD: 0.95, NEW: 0.95, "": 0.5}, shift=6.0)
    biases = {"": (0.0, -6.0), OLD: (0.0, -6.0)}
    found = await found_by(backend, await old_prompt(value=0.95), biases=biases)
    assert found.old_prompt.value == pytest.approx(0.5)
    assert found.old_prompt_biased is not None
    assert found.old_prompt_biased.value == pytest.approx(0.95)
    assert (found.holds, found.holds_biased, found.keep) == ("no", "yes", "biased")
    assert found.gain_by_bias is not None
    assert found.gain_by_bias.low > 0.0
    # The new prompt has no bias here, and is worse for that.
    assert found.conclusion == "keep_old"


async def test_the_same_text_is_kept() -> None:
    found = await found_by(model({OLD: 0.9, "": 0.5}), await old_prompt(), new=OLD)
    assert found.same_prompt
    assert found.conclusion == "keep_old"


async def test_without_rows_no_query_and_no_conclusion() -> None:
    backend = model({OLD: 0.9, NEW: 0.9, "": 0.5})
    found = await found_by(backend, await old_prompt(), known=False)
    assert backend.cache is not None
    assert backend.cache.misses == 0
    assert found.old_prompt.value is None
    assert (found.holds, found.conclusion, found.gain) == ("unknown", "unknown", None)
    assert (await found_by(backend, await old_prompt(), finished=False)).conclusion == "unknown"


async def test_a_model_that_fails_on_a_row_leaves_the_others() -> None:
    class Failing(LLMBackend):
        """Takes one input at a time, as hosted models do, and refuses one row."""

        max_inputs = 1
        inner = ScriptedBackend()

        @property
        def fingerprint(self) -> str:
            return "failing"

        async def score(self, query: Query) -> Answer:
            text = "".join(part.text for part in query.inputs[0])
            if "row 3 " in text:
                return Answer(log_probs=(None,), usage=Usage(requests=1))
            return await self.inner.score(query)

    backend = cached(Failing())
    found = await found_by(backend, await old_prompt())
    assert found.old_prompt.scored == found.new_prompt.scored == 199


# The run


async def test_the_run_starts_with_the_old_prompt_and_without_its_bias() -> None:
    prompt = PromptReport(text=" good bad", tokens=(" good", " bad", ""), bias=(0.0, 2.0))
    old = await artefact(prompt=prompt, calibration="labels")
    spec = retune_spec(
        old, OnnxSpec(), name="n", train="t.jsonl", dev="d.jsonl", num_examples=40, queries=35
    )
    assert spec.prompt.wanted == (" good", " bad", "")
    assert spec.task.bias is None
    assert (spec.calibration.kind, spec.rounds) == ("labels", 4)
    assert spec.budget is not None
    assert spec.budget.queries == 35
    assert spec.data is not None
    assert spec.data.num_clients == 10
    run = RunSpec.model_validate({**SPEC, "data": {"train": "t.jsonl", "dev": "d.jsonl"}})
    spec = retune_spec(old, OnnxSpec(), name="n", run=run)
    assert spec.budget is not None
    assert spec.budget.queries == 48
    assert (spec.method, spec.rounds, spec.data) == (run.method, run.rounds, run.data)
    longer = {**SPEC["prompt"], "length": 5}
    run = run.model_copy(update={"prompt": PromptSpec.model_validate(longer)})
    spec = retune_spec(old, OnnxSpec(), name="n", run=run)
    assert spec.prompt.length == 5
    assert spec.prompt.vocabulary is not None
    assert spec.prompt.vocabulary.blank  # For the positions that the old prompt does not have.


async def test_a_bias_of_the_task_is_the_old_models_too() -> None:
    old = await artefact()
    old = old.model_copy(update={"task": old.task.with_bias((0.0, 1.0))})
    spec = retune_spec(old, OnnxSpec(), name="n", train="t", dev="d", num_examples=40)
    assert spec.task.bias is None
    assert spec.calibration.kind == "labels"


async def test_a_text_that_its_tokens_do_not_make() -> None:
    prompt = PromptReport(text=" better", tokens=(" good",))
    with pytest.raises(SpecError, match="its tokens do not make its text"):
        retune_spec(await artefact(prompt=prompt), OnnxSpec(), name="n", train="t", dev="d")


async def test_names() -> None:
    assert retune_name(await artefact(), "gpt 5/mini") == "small-on-gpt-5-mini"
    assert len(retune_name(await artefact(name="n" * 64), "x")) == 64


def test_a_backend_file_is_a_section_or_a_run(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    for text in ("kind: onnx\n", "backend: {kind: onnx}\n", "name: r\nbackend: {kind: onnx}\n"):
        path.write_text(text)
        assert load_backend(path) == OnnxSpec()


def federation_of(dev: tuple[Example, ...] = (), **changes: Any) -> Federation:
    method = {"name": "thompson", "num_samples": 4, "batch_size": 4}
    spec = RunSpec.model_validate({**SPEC, "method": method, **changes})
    return Federation(
        spec=spec,
        shards=(DEV[:6], DEV[6:12]),
        dev=dev,
        vocabulary=build_vocabulary(spec.prompt.vocabulary, (), wanted=spec.prompt.wanted),
        reused_rows=False,
    )


async def test_biases_are_paid_for_as_evaluation_and_once() -> None:
    federation = federation_of(dev=DEV[12:24])
    backend, store = cached(ScriptedBackend()), MemoryStore()
    evaluated = []
    for _ in range(2):
        move = Retuning(artefact=await old_prompt(), federation=federation)
        result = await simulate(
            federation,
            backend=backend,
            transport="memory",
            store=store,
            first=lambda ask, move=move: move.find_biases(backend, ask),
        )
        evaluated.append(result.evaluation.queries)
        assert set(move.biases) == {"", OLD}
    # Two prompts on 12 rows, four at a time, on top of what the run measures itself.
    assert evaluated[0] == evaluated[1]
    without = await simulate(federation, backend=cached(ScriptedBackend()), transport="memory")
    assert evaluated[0] == without.evaluation.queries + 2 * 3
    assert result.spent.queries <= 48


async def test_caps_that_do_not_pay_for_biases_are_an_error() -> None:
    federation = federation_of(evaluation={"every": 0, "queries": 5})
    backend = cached(ScriptedBackend())
    move = Retuning(artefact=await old_prompt(), federation=federation)
    with pytest.raises(ProblemError, match="5"):
        await simulate(
            federation,
            backend=backend,
            transport="memory",
            first=lambda ask: move.find_biases(backend, ask),
        )
    assert backend.cache is not None
    assert backend.cache.misses == 0
