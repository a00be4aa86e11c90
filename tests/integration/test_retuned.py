"""Conclusions about a prompt that moves to another model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.errors import SpecError
from fedone_sdk.evaluation.outcomes import Outcomes
from fedone_sdk.local.retune import RetuneReport, retune_name, retune_report, retune_spec
from fedone_sdk.messages import PromptReport
from fedone_sdk.reports import PromptArtefact, ReportedRun, artefact_of
from fedone_sdk.spec import BackendSpec, PromptSpec, RunSpec, load_backend
from fedone_sdk.task import Bias
from tests.integration.tuned import SPEC, small

OLD, NEW = " good", " so"
DEV = tuple(
    {"text": f"row {n} is {'fine' if n % 2 else 'bad'}", "label": n % 2} for n in range(200)
)


async def artefact(**changes: Any) -> PromptArtefact:
    found = artefact_of((await small()).run)
    return found.model_copy(update=changes)


async def old_prompt(*, value: float = 1.0, rows: int = 200) -> PromptArtefact:
    """An artefact whose prompt is `OLD`, measured at `value` on the old model."""
    found = await artefact()
    metric = found.evaluation.metric.model_copy(update={"after": value})
    half = 0.02 * (200 / rows) ** 0.5
    evaluation = found.evaluation.model_copy(
        update={"metric": metric, "interval": (value - half, min(value + half, 1.0))}
    )
    prompt = PromptReport(text=OLD, tokens=(OLD,), bias=None)
    return found.model_copy(update={"prompt": prompt, "evaluation": evaluation})


def outcomes(which: Any, share: float, *, shift: float = 0.0, rows: int = 200) -> Outcomes:
    """Answers that are right on a share of the rows, but for a shift of the second label."""
    targets = tuple(n % 2 for n in range(rows))
    right = [n % 100 < round(100 * share) for n in range(rows)]
    log_probs = []
    for target, is_right in zip(targets, right, strict=True):
        said = target if is_right else 1 - target
        log_probs.append((-3.0, -0.1 + shift) if said else (-0.1, -3.0 + shift))
    said_labels = tuple(int(row[1] > row[0]) for row in log_probs)
    shown = () if which == "after" else tuple(log_probs)
    return Outcomes(which=which, predicted=said_labels, targets=targets, log_probs=shown)


async def moved(
    old: float,
    new: float,
    *,
    none: float = 0.5,
    before: float = 0.95,
    shift: float = 0.0,
    biases: dict[Any, Bias] | None = None,
    rows: int = 200,
    finished: bool = True,
) -> tuple[RetuneReport, ReportedRun]:
    run = (await small()).run
    result = run.result.model_copy(update={"prompt": PromptReport(text=NEW, tokens=(NEW,))})
    run = replace(
        run,
        result=result,
        untrained=PromptReport(text=OLD, tokens=(OLD,)),
        outcomes={
            "no_prompt": outcomes("no_prompt", none, shift=shift, rows=rows),
            "before": outcomes("before", old, shift=shift, rows=rows),
            "after": outcomes("after", new, rows=rows),
        },
    )
    prompt = await old_prompt(value=before, rows=rows)
    return retune_report(prompt, run, biases or {}, finished=finished), run


@pytest.mark.parametrize(
    ("old", "new", "none", "best"),
    [
        (0.95, 0.96, 0.5, "new_prompt"), (0.95, 0.70, 0.5, "old_prompt"),
        (0.66, 0.76, 0.75, "new_prompt"), (0.66, 0.70, 0.75, "no_prompt"),
    ],
)  # fmt: skip
async def test_the_best_prompt_is_recommended(
    old: float, new: float, none: float, best: str
) -> None:
    found, run = await moved(old, new, none=none)
    assert found.recommended == best
    values = {which: one.value for which, one in found.prompts.items()}
    expected = {"no_prompt": none, "old_prompt": old, "new_prompt": new}
    assert values == pytest.approx(expected)
    for which, one in found.prompts.items():
        assert one.behind is not None
        assert one.behind.value == pytest.approx(max(expected.values()) - expected[which])
        assert one.behind.low <= one.behind.value <= one.behind.high
    made = found.artefact(run)
    assert made.prompt.text == {"no_prompt": "", "old_prompt": OLD, "new_prompt": NEW}[best]
    if best != "new_prompt":
        assert made.evaluation.metric.after == pytest.approx(max(expected.values()))
    assert made.sha256 == made.digest


@pytest.mark.parametrize(
    ("old", "rows", "says"),
    [
        (0.70, 200, "it is worse on the new model"),
        (0.82, 23, "may be worse by up to"),
        (0.95, 200, "may be worse by up to"),
    ],
)
async def test_the_change_of_model_is_worded_as_its_interval(
    old: float, rows: int, says: str
) -> None:
    found, _ = await moved(old, 0.5, rows=rows)
    assert found.change is not None
    assert (found.change.high < 0) is (says == "it is worse on the new model")
    assert says in found.text[0]
    assert "holds," not in " ".join(found.text)


async def test_a_close_second_is_named() -> None:
    found, _ = await moved(0.95, 0.96)
    assert "Its gain over the old prompt as it is" in found.text[-1]
    found, _ = await moved(0.70, 0.96)
    assert found.text[-1].startswith("Recommended: the new prompt")


async def test_a_new_bias_saves_the_old_prompt() -> None:
    biases: dict[Any, Bias] = {"": (0.0, -6.0), OLD: (0.0, -6.0)}
    found, run = await moved(0.95, 0.90, shift=6.0, biases=biases)
    assert found.prompts["old_prompt"].value == pytest.approx(0.5)
    assert found.prompts["old_prompt_biased"].value == pytest.approx(0.95)
    assert found.prompts["no_prompt"].prompt.bias == (0.0, -6.0)
    assert found.recommended == "old_prompt_biased"
    made = found.artefact(run)
    assert (made.prompt.text, made.prompt.bias) == (OLD, (0.0, -6.0))


async def test_a_run_that_is_not_over_recommends_nothing() -> None:
    found, run = await moved(0.95, 0.96, finished=False)
    assert found.recommended is None
    assert found.text[-1] == "No recommendation yet, because the run has not ended."
    with pytest.raises(ValueError, match="no prompt is recommended"):
        found.artefact(run)


# The run


RUN = RunSpec.model_validate({**SPEC, "data": {"train": "t.jsonl", "dev": "d.jsonl"}})


async def test_the_run_starts_with_the_old_prompt_and_without_its_bias() -> None:
    prompt = PromptReport(text=" good bad", tokens=(" good", " bad", ""), bias=(0.0, 2.0))
    old = await artefact(prompt=prompt, calibration="labels")
    spec = retune_spec(old, BackendSpec(), RUN, name="n")
    assert spec.prompt.start_tokens == (" good", " bad", "")
    assert (spec.method, spec.rounds, spec.data) == (RUN.method, RUN.rounds, RUN.data)
    longer = PromptSpec.model_validate({**SPEC["prompt"], "length": 5})
    spec = retune_spec(old, BackendSpec(), RUN.model_copy(update={"prompt": longer}), name="n")
    assert spec.prompt.length == 5
    assert spec.prompt.vocabulary is not None
    assert spec.prompt.vocabulary.blank  # For the positions that the old prompt does not have.
    biased = RUN.model_copy(update={"task": RUN.task.with_bias((0.0, 1.0))})
    assert retune_spec(old, BackendSpec(), biased, name="n").task.bias is None


async def test_a_text_that_its_tokens_do_not_make() -> None:
    prompt = PromptReport(text=" better", tokens=(" good",))
    with pytest.raises(SpecError, match="text must be the joined tokens"):
        retune_spec(await artefact(prompt=prompt), BackendSpec(), RUN, name="n")


async def test_names() -> None:
    assert retune_name(await artefact(), "gpt 5/mini") == "small-on-gpt-5-mini"
    assert len(retune_name(await artefact(name="n" * 64), "x")) == 64


def test_a_backend_file_is_a_section_or_a_run(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    for text in (
        "kind: onnx\n",
        "backend: {kind: onnx}\n",
        "name: r\nbackend: {kind: onnx}\n",
        'task: {template: "{prompt} {x}", labels: {0: a, 1: b}}\n',
    ):
        path.write_text(text)
        assert load_backend(path) == BackendSpec()
