"""The prompt artefact: its content, its verification, its use."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedone_sdk
from fedone_sdk.aggregator.archives.writing import export_run
from fedone_sdk.errors import ArchiveError, SpecError
from fedone_sdk.messages import PromptReport
from fedone_sdk.reports import (
    PromptArtefact,
    artefact_of,
    check_against,
    check_artefact,
    dspy_state,
    in_form,
    label_examples,
    langfuse_prompt,
    mlflow_prompt,
    promptfoo_config,
    read_artefact,
    read_run,
    ready_text,
    run_of_archive,
)
from fedone_sdk.reports.verify import Check
from fedone_sdk.stores import Commit, LogEntry, MemoryStore
from fedone_sdk.task import LOG_ZERO, TaskSpec, render
from fedone_sdk.testing import ScriptedBackend
from tests.integration.tuned import ROWS, small, tuned


def differing(checks: list[Check]) -> set[str]:
    return {check.what for check in checks if check.verdict == "differs"}


def unchecked(checks: list[Check]) -> set[str]:
    return {check.what for check in checks if check.verdict == "not checked"}


async def test_what_is_in_it(tmp_path: Path) -> None:
    done = await small()
    run = await run_of_archive(done.archive)
    artefact = artefact_of(run)
    assert artefact.prompt == done.result.prompt
    assert artefact.alpha_sha256 == done.result.alpha_sha256
    assert run.vocabulary is not None
    assert artefact.vocabulary_sha256 == run.vocabulary.sha256
    assert (artefact.model, artefact.sdk_version) == ("scripted", fedone_sdk.__version__)
    assert artefact.ledger.spent == done.result.spent
    assert artefact.evaluation.metric == done.result.metric
    assert artefact.evaluation.examples == 12
    low, high = artefact.evaluation.interval or (1.0, 0.0)
    assert low <= (done.result.metric.after or -1) <= high
    # The same run gives the same file, and the file the same artefact.
    again = artefact_of(await run_of_archive((await tuned()).archive))
    assert again.prompt == artefact.prompt
    assert artefact_of(await run_of_archive(done.archive)).dump() == artefact.dump()
    (tmp_path / "prompt.json").write_text(artefact.dump())
    assert read_artefact(tmp_path / "prompt.json") == artefact


async def test_it_agrees_with_its_run() -> None:
    done = await small()
    run = await run_of_archive(done.archive)
    artefact = artefact_of(run)
    checks = check_artefact(artefact) + check_against(artefact, run)
    assert {check.verdict for check in checks} == {"ok"}
    assert {"ledger", "alpha", "prompt", "vocabulary", "replay"} <= {c.what for c in checks}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"alpha_sha256": "0" * 64}, {"alpha"}),
        ({"vocabulary_sha256": "0" * 64}, {"vocabulary"}),
        ({"model": "another"}, {"model"}),
        ({"seed": 7}, {"seed"}),
        ({"run_id": "other"}, {"run"}),
        ({"method": "bdpl"}, {"method"}),
        ({"calibration": "labels"}, {"calibration"}),
    ],
)
async def test_a_changed_one_does_not(changes: dict[str, Any], what: set[str]) -> None:
    run = await run_of_archive((await small()).archive)
    artefact = artefact_of(run)
    changed = artefact.model_copy(update=changes)
    assert differing(check_artefact(changed)) == {"digest of the file"}
    assert differing(check_against(changed, run)) == what
    # The file may have a forged digest: the run's digest counts.
    assert differing(check_artefact(changed.signed())) == set()


async def test_another_prompt_ledger_task_or_metric() -> None:
    run = await run_of_archive((await small()).archive)
    artefact = artefact_of(run)

    def changed(**changes: Any) -> set[str]:
        return differing(check_against(artefact.model_copy(update=changes), run))

    prompt = artefact.prompt.model_copy(update={"text": " better"})
    assert changed(prompt=prompt) == {"prompt"}
    assert "prompt is made of its tokens" in differing(
        check_artefact(artefact.model_copy(update={"prompt": prompt}))
    )
    biased = artefact.prompt.model_copy(update={"bias": (0.0, 1.0, 2.0)})
    assert "label bias fits the labels" in differing(
        check_artefact(artefact.model_copy(update={"prompt": biased}))
    )
    assert changed(ledger=artefact.ledger.model_copy(update={"lines": 3})) == {"ledger"}
    spent = artefact.ledger.spent.model_copy(update={"queries": 10_000})
    assert changed(ledger=artefact.ledger.model_copy(update={"spent": spent})) == {"spent"}
    metric = artefact.evaluation.metric.model_copy(update={"after": 1.0})
    evaluation = artefact.evaluation.model_copy(update={"metric": metric})
    assert changed(evaluation=evaluation) == {"evaluation"}
    assert changed(task=artefact.task.model_copy(update={"metric": "f1"})) == {"task"}


async def test_a_log_that_was_changed_does_not_give_this_alpha() -> None:
    run = await run_of_archive((await small()).archive)
    artefact = artefact_of(run)
    assert run.snapshot is not None
    lines = list(run.snapshot.log)
    bodies = {at: json.loads(line.body) for at, line in enumerate(lines) if line.kind == "round"}
    # A round whose prompts were not all the same one.
    place, body = next(
        (at, body) for at, body in bodies.items() if len(set(body["seats"][0]["losses"][0])) > 1
    )
    body["seats"][0]["losses"][0].reverse()
    lines[place] = LogEntry(kind="round", body=json.dumps(body), version=lines[place].version)
    other = replace(run, snapshot=replace(run.snapshot, log=tuple(lines)))
    assert differing(check_against(artefact, other)) == {"ledger", "replay"}


async def test_a_continued_run_keeps_it() -> None:
    """Made in the middle of a run, held against its end."""
    done = await small()
    whole = await run_of_archive(done.archive)
    early: list[bytes] = []

    class Kept(MemoryStore):
        async def commit(self, run_id: str, version: int, commit: Commit) -> None:
            await super().commit(run_id, version, commit)
            if json.loads(commit.document)["round"] == 4 and not early:
                early.append(await export_run(self, run_id))

    store = Kept()
    run = await run_of_archive((await tuned(store=store)).archive)
    artefact = artefact_of(await run_of_archive(early[0]))
    assert (artefact.status, artefact.rounds, run.result.rounds) == ("running", 4, 8)
    checks = check_against(artefact, run)
    assert differing(checks) == set()
    assert unchecked(checks) == {"evaluation"}
    changed = artefact.model_copy(update={"alpha_sha256": whole.result.alpha_sha256})
    assert differing(check_against(changed, run)) == {"alpha"}
    unknown = artefact.model_copy(update={"rounds": 7})
    assert differing(check_against(unknown, run)) == {"alpha"}


async def test_against_a_result_file(tmp_path: Path) -> None:
    done = await small()
    artefact = artefact_of(await run_of_archive(done.archive))
    (tmp_path / "result.json").write_text(done.result.model_dump_json())
    run = await read_run(tmp_path / "result.json")
    checks = check_against(artefact, run)
    assert differing(checks) == set()
    assert unchecked(checks) == {"task", "vocabulary", "ledger", "replay"}
    with pytest.raises(ArchiveError, match="a result file has no task and no log"):
        artefact_of(run)
    other = done.result.model_copy(update={"alpha_sha256": "0" * 64})
    assert differing(check_against(artefact, replace(run, result=other))) == {"alpha"}
    later = done.result.model_copy(update={"rounds": 9})
    assert "alpha" in unchecked(check_against(artefact, replace(run, result=later)))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is no JSON"),
        ("[]", "is no prompt artefact"),
        ('{"format": "fedone-run"}', "is no prompt artefact"),
        ('{"format": "fedone-prompt", "version": 2}', "version: is 2, this fedone-sdk reads 1"),
        ('{"format": "fedone-prompt", "version": 1}', "run_id: Field required"),
    ],
)
def test_what_is_no_artefact(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(SpecError) as raised:
        read_artefact(tmp_path / "p.json")
    assert f"p.json: {problem}" in str(raised.value)


async def test_a_damaged_artefact_is_not_used(tmp_path: Path) -> None:
    artefact = artefact_of(await run_of_archive((await small()).archive))
    (tmp_path / "p.json").write_text(artefact.dump().replace(" great", " awful"))
    with pytest.raises(SpecError, match="the file was changed"):
        read_artefact(tmp_path / "p.json")
    assert read_artefact(tmp_path / "p.json", checked=False).task.labels["1"] == " awful"


async def test_files_that_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"run_id": "r"}')
    with pytest.raises(ArchiveError, match=r"must be an archive .* or a result"):
        await read_run(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(ArchiveError, match="x: the archive is damaged"):
        await read_run(tmp_path / "x")
    with pytest.raises(ArchiveError, match="No such file"):
        await read_run(tmp_path / "nothing")


# Forms


def test_the_ready_text_is_what_a_model_is_sent() -> None:
    task = TaskSpec(template="{prompt} {{a}} {text} It was {mask}.", labels={0: "x", 1: "y"})
    prompt = " {b} {{c}}"
    text = ready_text(task, prompt).format(text="hello", mask="?")
    parts = render(task, prompt, {"text": "hello"})
    assert text == "".join("?" if part.kind == "mask" else part.text for part in parts)


async def test_forms() -> None:
    artefact = artefact_of(await run_of_archive((await small()).archive))
    assert in_form(artefact, "text") == artefact.prompt.text
    assert in_form(artefact, "template") == f"{artefact.prompt.text} {{text}} It was"
    state = json.loads(in_form(artefact, "dspy"))
    assert state == dspy_state(artefact)
    assert state["signature"]["instructions"] == (
        f"{artefact.prompt.text.strip()}\n\nAnswer with exactly one of: terrible, great."
    )
    with pytest.raises(ValueError, match="forms: text, template, dspy, mlflow"):
        in_form(artefact, "yaml")


def lettered(value: object) -> Any:
    """As a file has it."""
    return json.loads(json.dumps(value))


async def test_forms_of_other_tools_say_where_a_prompt_comes_from() -> None:
    artefact = artefact_of(await run_of_archive((await small()).archive))
    mlflow, langfuse = (json.loads(in_form(artefact, form)) for form in ("mlflow", "langfuse"))
    assert mlflow == lettered(mlflow_prompt(artefact))
    assert langfuse == lettered(langfuse_prompt(artefact))
    text = f"{artefact.prompt.text} {{{{text}}}} It was"
    assert (mlflow["template"], langfuse["prompt"]) == (text, text)
    assert (mlflow["name"], langfuse["name"], langfuse["type"]) == ("small", "small", "text")
    metric = artefact.evaluation.metric
    said = f"accuracy {metric.no_prompt:.3f} -> {metric.after:.3f}"
    assert mlflow["commit_message"].endswith(said)
    assert langfuse["commitMessage"] == mlflow["commit_message"]
    assert mlflow["tags"]["fedone.sha256"] == artefact.sha256
    assert all(isinstance(value, str) for value in mlflow["tags"].values())
    assert langfuse["config"]["fedone"]["sha256"] == artefact.sha256
    assert langfuse["config"]["label_words"] == {"0": "terrible", "1": "great"}
    assert langfuse["labels"] == [], "a person promotes it"


async def test_a_promptfoo_configuration_names_the_model_that_answered() -> None:
    artefact = await artefact_with(models=("small-2", "other"))
    config = json.loads(in_form(artefact, "promptfoo"))
    assert config == lettered(promptfoo_config(artefact))
    (provider,), (prompt,) = config["providers"], config["prompts"]
    assert provider["id"] == "openai:chat:small-2"
    assert json.loads(prompt["raw"]) == [
        {"role": "user", "content": f"{artefact.prompt.text} {{{{text}}}} It was"}
    ]


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("mlflow", "a {{b", "'{{', which MLflow does not keep as text"),
        ("mlflow", "a {% b", "'{%', which MLflow does not keep as text"),
        ("langfuse", "a {{b", "'{{', which Langfuse does not keep as text"),
        ("promptfoo", "{% endraw %}", "'endraw', which promptfoo does not keep as text"),
    ],
)
async def test_what_a_tool_would_read_as_its_own_is_refused(
    form: str, text: str, problem: str
) -> None:
    artefact = await artefact_with(prompt=PromptReport(text=text, tokens=(text,)))
    with pytest.raises(SpecError, match=re.escape(problem)):
        in_form(artefact, form)


async def test_a_mask_is_no_question_for_promptfoo() -> None:
    task = TaskSpec(template="{text} It was{prompt} {mask}.", labels={0: " bad", 1: " good"})
    with pytest.raises(SpecError, match=re.escape("fills {mask}; promptfoo asks for answers")):
        promptfoo_config(await artefact_with(task=task))


# Use


async def artefact_with(**changes: Any) -> PromptArtefact:
    artefact = artefact_of(await run_of_archive((await small()).archive))
    return artefact.model_copy(update=changes)


async def test_labels_are_those_of_the_measurement() -> None:
    """Using the prompt on the dev split gives the accuracy that the run reports."""
    done = await small()
    artefact = artefact_of(await run_of_archive(done.archive))
    dev = ROWS[12:]
    texts = [{"text": row["text"]} for row in dev]
    found = await label_examples(ScriptedBackend(), artefact, texts, batch_size=5)
    right = [label == str(row["label"]) for label, row in zip(found.labels, dev, strict=True)]
    assert sum(right) / len(right) == pytest.approx(done.result.metric.after)
    assert found.usage.requests == 3
    assert all(scores is not None and set(scores) == {"0", "1"} for scores in found.scores)


async def test_the_label_bias_is_in_the_labels() -> None:
    artefact = await artefact_with()
    prompt = artefact.prompt.model_copy(update={"bias": (0.0, 100.0)})
    artefact = artefact.model_copy(update={"prompt": prompt})
    found = await label_examples(ScriptedBackend(), artefact, ROWS[:6])
    assert set(found.labels) == {"1"}


async def test_what_the_model_did_not_say() -> None:
    artefact = await artefact_with()
    rows = iter([None, (LOG_ZERO, LOG_ZERO), (-1.0, -2.0)])
    backend = ScriptedBackend(lambda inputs, words: next(rows))
    found = await label_examples(backend, artefact, ROWS[:3])
    assert found.labels == (None, None, "0")
    assert found.scores[0] is None


async def test_another_model_is_refused_unless_it_is_wanted() -> None:
    artefact = await artefact_with()
    other = ScriptedBackend(fingerprint="other")
    with pytest.raises(SpecError, match="is 'other', the prompt was tuned for 'scripted'"):
        await label_examples(other, artefact, ROWS[:1])
    assert other.asked == []
    found = await label_examples(other, artefact, ROWS[:1], any_model=True)
    assert len(found.labels) == 1


async def test_texts_that_are_written() -> None:
    task = TaskSpec(template="{prompt} {text}", loss="score", max_tokens=3)
    artefact = await artefact_with(task=task)
    found = await label_examples(ScriptedBackend(), artefact, ROWS[:2])
    assert all(text is not None and len(text.split()) == 3 for text in found.texts)
    assert found.labels == (None, None)
    with pytest.raises(SpecError, match="nll scores a text that is given"):
        await label_examples(
            ScriptedBackend(),
            await artefact_with(task=task.model_copy(update={"loss": "nll"})),
            ROWS[:1],
        )
