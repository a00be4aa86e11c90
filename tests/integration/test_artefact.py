"""The prompt artefact: its content, its verification, its use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedone_sdk
from fedone_sdk.errors import DataError, ResultError, SpecError
from fedone_sdk.messages import PromptReport
from fedone_sdk.reports import (
    PromptArtefact,
    artefact_of,
    label_examples,
    load_prompt,
    mlflow_prompt,
    read_run,
    ready_text,
)
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import LOG_ZERO, TaskSpec, render
from fedone_sdk.testing import ScriptedBackend
from tests.integration.tuned import ROWS, small, tuned


async def test_what_is_in_it(tmp_path: Path) -> None:
    done = await small()
    run = done.run
    artefact = artefact_of(run)
    assert artefact.prompt == done.result.prompt
    assert artefact.alpha_sha256 == done.result.alpha_sha256
    assert (artefact.model, artefact.sdk_version) == ("scripted", fedone_sdk.__version__)
    assert artefact.ledger.spent == done.result.spent
    assert artefact.evaluation.metric == done.result.metric
    assert artefact.evaluation.examples == 12
    low, high = artefact.evaluation.interval or (1.0, 0.0)
    assert low <= (done.result.metric.after or -1) <= high
    # The same run gives the same file, and the file the same artefact.
    again = artefact_of((await tuned()).run)
    assert again.prompt == artefact.prompt
    assert artefact_of(done.run).dump() == artefact.dump()
    (tmp_path / "prompt.json").write_text(artefact.dump())
    assert load_prompt(tmp_path / "prompt.json") == artefact


async def test_a_prompt_is_used_on_a_row(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("\ufeff" + artefact_of((await small()).run).dump())
    prompt = load_prompt(str(tmp_path / "p.json"))
    row = {name: "a {fine} film" for name in prompt.task.fields}
    text = prompt.render(row)
    assert prompt.prompt.text in text
    assert "a {fine} film" in text
    assert prompt.messages(row) == [{"role": "user", "content": text}]
    chat = {"system": "Judge.{prompt}", "user": "{text}", "assistant": "So:"}
    task = TaskSpec.model_validate({"chat": chat, "labels": {"0": " bad", "1": " good"}})
    told = prompt.model_copy(update={"task": task}).messages({"text": "a film"})
    assert [(one["role"], one["content"]) for one in told] == [
        ("system", f"Judge.{prompt.prompt.text}"),
        ("user", "a film"),
        ("assistant", "So:"),
    ]
    backend = ScriptedBackend()
    found = await prompt.predict(row, backend)
    many = await label_examples(backend, prompt, [row, row])
    assert many.predictions == [found, found]
    assert found.text is None
    with pytest.raises(SpecError, match="the prompt was tuned for"):
        await prompt.predict(row, ScriptedBackend(fingerprint="another"))
    with pytest.raises(DataError, match="an example is str; it must map fields to values"):
        await label_examples(backend, prompt, "a text")  # type: ignore[arg-type]


async def test_an_export_is_lines_of_json_with_the_rounds_and_the_result(tmp_path: Path) -> None:
    done = await small()
    lines = [json.loads(line) for line in done.export.splitlines()]
    kinds = [line["kind"] for line in lines]
    assert (kinds[0], kinds[-1], kinds.count("round")) == ("run", "result", done.result.rounds)
    assert RunSpec.model_validate(lines[0]["spec"]).name == "small"
    (tmp_path / "small.jsonl").write_bytes(done.export)
    run = read_run(tmp_path / "small.jsonl")
    assert run.result == done.result
    assert set(run.outcomes) == {"no_prompt", "before", "after"}
    (tmp_path / "cut.jsonl").write_bytes(b"\n".join(done.export.splitlines()[:-1]))
    with pytest.raises(ResultError, match=r"cut\.jsonl: .*its last line a result"):
        read_run(tmp_path / "cut.jsonl")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a prompt artefact"),
        ('{"format": "fedone-prompt"}', "sha256: differs from the contents; the file was changed"),
    ],
)
def test_what_is_no_artefact(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(SpecError) as raised:
        load_prompt(tmp_path / "p.json")
    assert f"p.json: {problem}" in str(raised.value)


async def test_a_damaged_artefact_is_not_used(tmp_path: Path) -> None:
    artefact = artefact_of((await small()).run)
    for old, new in (" great", " awful"), ('"rounds": ', '"rounds": "a", "more": '):
        (tmp_path / "p.json").write_text(artefact.dump().replace(old, new))
        with pytest.raises(SpecError) as raised:
            load_prompt(tmp_path / "p.json")
        assert raised.value.problems == ["sha256: differs from the contents; the file was changed"]


@pytest.mark.parametrize("content", [b'{"run_id": "r"}', b"\x1f\x8bnonsense", b"[]", b"", b"1\n2"])
def test_files_that_are_no_run(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ResultError, match=r"x: damaged, or not an export of a run"):
        read_run(tmp_path / "x")
    with pytest.raises(ResultError, match="No such file"):
        read_run(tmp_path / "nothing")


# Forms


def test_the_ready_text_is_what_a_model_is_sent() -> None:
    task = TaskSpec(template="{prompt} {{a}} {text} It was {mask}.", labels={0: "x", 1: "y"})
    prompt = " {b} {{c}}"
    text = ready_text(task, prompt).format(text="hello", mask="?")
    parts = render(task, prompt, {"text": "hello"})
    assert text == "".join("?" if part.kind == "mask" else part.text for part in parts)


async def test_the_arguments_of_mlflow_say_where_a_prompt_comes_from() -> None:
    artefact = artefact_of((await small()).run)
    found = mlflow_prompt(artefact)
    assert found["template"] == f"{artefact.prompt.text} {{{{text}}}} It was"
    assert found["name"] == "small"
    metric = artefact.evaluation.metric
    assert found["commit_message"].endswith(
        f"accuracy {metric.no_prompt:.3f} -> {metric.after:.3f}"
    )
    assert found["tags"]["fedone.sha256"] == artefact.sha256
    assert all(isinstance(value, str) for value in found["tags"].values())


@pytest.mark.parametrize("text", ["a {{b", "a {% b"])
async def test_what_mlflow_would_read_as_its_own_is_refused(text: str) -> None:
    artefact = await artefact_with(prompt=PromptReport(text=text, tokens=(text,)))
    with pytest.raises(SpecError, match="which MLflow would interpret"):
        mlflow_prompt(artefact)


# Use


async def artefact_with(**changes: Any) -> PromptArtefact:
    artefact = artefact_of((await small()).run)
    return artefact.model_copy(update=changes)


async def test_labels_are_those_of_the_measurement() -> None:
    """Using the prompt on the dev split gives the accuracy that the run reports."""
    done = await small()
    artefact = artefact_of(done.run)
    dev = ROWS[12:]
    texts = [{"text": row["text"]} for row in dev]
    found = await label_examples(ScriptedBackend(), artefact, texts)
    answers = zip(found.predictions, dev, strict=True)
    right = [one.label == str(row["label"]) for one, row in answers]
    assert sum(right) / len(right) == pytest.approx(done.result.metric.after)
    assert found.usage.requests == -(-len(dev) // artefact.evaluation.batch_size)
    assert all(set(one.scores or ()) == {"0", "1"} for one in found.predictions)


async def test_the_label_bias_is_in_the_labels() -> None:
    artefact = await artefact_with()
    prompt = artefact.prompt.model_copy(update={"bias": (0.0, 100.0)})
    artefact = artefact.model_copy(update={"prompt": prompt})
    found = await label_examples(ScriptedBackend(), artefact, ROWS[:6])
    assert {one.label for one in found.predictions} == {"1"}


async def test_what_the_model_did_not_say() -> None:
    artefact = await artefact_with()
    rows = iter([None, (LOG_ZERO, LOG_ZERO), (-1.0, -2.0)])
    backend = ScriptedBackend(lambda inputs, words: next(rows))
    found = await label_examples(backend, artefact, ROWS[:3])
    assert [one.label for one in found.predictions] == [None, None, "0"]
    assert found.predictions[0].scores is None


async def test_another_model_is_refused_unless_it_is_wanted() -> None:
    artefact = await artefact_with()
    other = ScriptedBackend(fingerprint="other")
    with pytest.raises(SpecError, match="is 'other', but the prompt was tuned for 'scripted'"):
        await label_examples(other, artefact, ROWS[:1])
    assert other.asked == []
    found = await label_examples(other, artefact, ROWS[:1], any_model=True)
    assert len(found.predictions) == 1


async def test_texts_that_are_written() -> None:
    task = TaskSpec(template="{prompt} {text}", loss="score", max_tokens=3)
    artefact = await artefact_with(task=task)
    found = await label_examples(ScriptedBackend(), artefact, ROWS[:2])
    assert [len((one.text or "").split()) for one in found.predictions] == [3, 3]
    assert [one.label for one in found.predictions] == [None, None]
    with pytest.raises(SpecError, match="nll scores a text that is given"):
        await label_examples(
            ScriptedBackend(),
            await artefact_with(task=task.model_copy(update={"loss": "nll"})),
            ROWS[:1],
        )


@pytest.mark.parametrize("prompt", [{"bias": (1.0,)}, {"labels": {}}, {"bias": (999.0, 0.0)}])
async def test_a_prompt_that_does_not_fit_its_task_is_not_loaded(
    prompt: dict[str, Any], tmp_path: Path
) -> None:
    artefact = artefact_of((await small()).run)
    wrong = artefact.model_copy(update={"prompt": artefact.prompt.model_copy(update=prompt)})
    (tmp_path / "p.json").write_text(wrong.signed().dump())
    with pytest.raises(SpecError, match=r"bias|labels"):
        load_prompt(tmp_path / "p.json")
