"""A model that grades generated texts: in a whole run, its cost, its caps and its failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from fedone_sdk.backends import Answer, Query, score_all
from fedone_sdk.backends.judge import Judge, judge_of
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, SpecError, StoreUnavailable
from fedone_sdk.evaluation.verdict import preference
from fedone_sdk.local import Federation, load_score, plan_run, simulate
from fedone_sdk.scores import graded
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Example, Rendered, Score
from fedone_sdk.testing import ScriptedBackend
from tests.runs import WORDS, run_spec

ASKED: list[str] = []


def grade(inputs: Rendered, most: int) -> str:
    """Grade 5 for a text with " good", 2 for one without, and no grade for row 3."""
    asked = "".join(part.text for part in inputs)
    ASKED.append(asked)
    if "<answer_a>" in asked:
        return BETTER(
            *(asked.partition(f"<answer_{name}>\n")[2].partition("\n</")[0] for name in "ab")
        )
    answer = asked.partition("<answer>\n")[2].partition("\n</answer>")[0]
    if "row 3" in asked:
        return "I cannot say."
    return "So {}:\n" + json.dumps({"reason": "because", "score": "5" if "good" in answer else 2})


def better(a: str, b: str) -> str:
    good = [text for text in (a, b) if "good" in text]
    return f'{{"better": "{"tie" if len(good) != 1 else "A" if good[0] == a else "B"}"}}'


BETTER: Callable[[str, str], str] = better


def grader() -> ScriptedBackend:
    return ScriptedBackend(write=grade, fingerprint="grader")


JUDGE = {"backend": {"kind": "own", "object": f"{__name__}:grader"}, "rubric": "Is it good?"}
ROWS: tuple[Example, ...] = tuple(
    {"text": f"row {number}", "label": f"wanted {number}", "secret": "s"} for number in range(10)
)


def spec_of(**more: Any) -> RunSpec:
    task = {"template": "{prompt} {text}", "loss": "score", "score": {"judge": JUDGE}}
    method = {"name": "thompson", "num_samples": 2, "batch_size": 3}
    part = {"exchange": "losses", "min_clients": 2}
    return run_spec(task=task, method=method, participation=part, rounds=3, **more)


def federation_of(spec: RunSpec) -> Federation:
    return Federation(
        spec=spec,
        shards=(ROWS[4:7], ROWS[7:]),
        dev=ROWS[:3],
        vocabulary=WORDS,
        reused_rows=False,
        score=load_score(spec.task),
    )


def echo(inputs: Rendered, most: int) -> str:
    return "".join(part.text for part in inputs)


async def test_a_judge_grades_and_its_cost_is_the_runs_and_shown_apart() -> None:
    ASKED.clear()
    async with asyncio.timeout(30):
        plan = await plan_run(federation_of(spec_of()), backend=ScriptedBackend(write=echo))
        priced = spec_of(
            backend={"kind": "vllm", "model": "m", "prices": {"prompt": 1, "completion": 1}}
        )
        paid = await plan_run(federation_of(priced), backend=ScriptedBackend(write=echo))
        result = await simulate(federation_of(spec_of()), backend=ScriptedBackend(write=echo))
    assert plan.judge
    assert paid.judge
    assert paid.judge.requests - plan.judge.requests == 3  # The shorter prompt's dev rows.
    assert result.status == "completed"
    assert {report.mean_loss for report in result.history} <= {0.0, 0.375, 0.75}
    assert result.metric.no_prompt == 0.75  # Grade 2 of 1 to 5.
    assert result.judge is not None
    assert result.judge.requests == len(ASKED) > 0
    assert result.evaluation.requests > result.judge.requests  # Measurements too.
    assert result.spent.requests > result.evaluation.requests
    found = result.verdict and result.verdict.preference
    assert found
    assert (found.wins, found.agreement, found.rows) == (1.0, 1.0, 3)
    assert all("Is it good?" in asked and "wanted" in asked for asked in ASKED)
    assert not any("secret" in asked for asked in ASKED)
    assert len(set(ASKED)) == len(ASKED)  # Equal questions are asked once.


async def test_a_plan_with_a_judge_needs_no_expected_text() -> None:
    rows = ({"text": "a", "label": ["x"]}, {"text": "a", "label": {"y": 1}}, {"text": "b"})
    federation = replace(federation_of(spec_of()), shards=(rows,), dev=rows)
    plan = await plan_run(federation, backend=ScriptedBackend(write=echo))
    assert plan.judge is not None
    assert plan.judge.requests > 0


@pytest.mark.parametrize("number", [5, 22, 72, 80])
async def test_a_verdict_waits_for_the_store(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of a grade or of a comparison fails."""
    store, numbers = MemoryStore(), count(1)

    async def commit(*change: Any) -> None:
        if next(numbers) == number:
            raise StoreUnavailable("the disk is full")
        await MemoryStore.commit(store, *change)

    monkeypatch.setattr("fedone_sdk.aggregator.runs.served_run._RETRY_S", 0)
    monkeypatch.setattr(store, "commit", commit)
    backend = ScriptedBackend(write=echo)
    result = await simulate(federation_of(spec_of()), backend=backend, store=store)
    assert result.verdict is not None
    assert result.verdict.preference is not None
    assert next(numbers) > number


@pytest.mark.parametrize(("cap", "queries"), [(7, 0), (12, 2)])
async def test_a_cap_stops_the_judge(cap: int, queries: int) -> None:
    """No work is assigned if the caps do not cover its grades."""
    ASKED.clear()
    spec = spec_of(budget={"requests": cap})
    async with asyncio.timeout(30):
        result = await simulate(federation_of(spec), backend=ScriptedBackend(write=echo))
    assert result.spent.requests <= cap
    assert len(ASKED) < cap
    assert (result.status, result.spent.queries) == ("budget_exhausted", queries)


async def test_a_judge_that_may_bill_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, dear = federation_of(spec_of()), Usage(prompt_tokens=2**53)
    assert isinstance(federation.score, Judge)
    monkeypatch.setattr(federation.score.backend, "worst_case", lambda *_: dear)
    with pytest.raises(SpecError, match=r"task.score: the judge may bill more than 2\*\*53"):
        await simulate(federation, backend=ScriptedBackend(write=echo))


async def test_an_answer_without_a_grade_fails_its_row_alone() -> None:
    task = spec_of().task
    judge = load_score(task)
    assert isinstance(judge, Judge)
    async with judge.backend:
        found = await graded(task, ["a good one", *["a bad one"] * 9], ROWS, judge)
        spent = (await judge.bill.account()).spent
    assert found[3] is None
    assert isinstance(found[0], Score)
    assert found[0].value == 1.0
    assert found[0].feedback.endswith("score 1.00 of 1: because")
    assert [row.value for row in found[1:] if isinstance(row, Score)] == [0.25] * 8
    assert spent.requests == 10


@pytest.mark.parametrize(
    ("answer", "expected"),
    [  # The share of wins, with lengths balanced, of equal answers, and of those for the first.
        pytest.param(better, (0.8, (5 / 6 + 1) / 2, 1.0, 0.5), id="content"),
        pytest.param(lambda a, b: '{"better": "a"}', (0.5, 0.5, 0.0, 1.0), id="position"),
        pytest.param(lambda a, b: f'{{"better": "{"a" if len(a) > len(b) else "b"}"}}',
                     (0.7, 0.5, 1.0, 0.5), id="length"),
        pytest.param(lambda a, b: "I like both", (0.5, None, None, None), id="no answer"),
    ],
)  # fmt: skip
async def test_pairs_show_what_a_judge_prefers(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, str], str], expected: tuple[Any, ...]
) -> None:
    """Of ten rows two have equal texts; six tuned texts are longer and two are shorter."""
    monkeypatch.setattr(f"{__name__}.BETTER", answer)
    judge = load_score(spec_of().task)
    assert isinstance(judge, Judge)
    tuned = ["good, and long"] * 5 + ["bad but much longer"] + ["good"] * 2 + ["same"] * 2
    plain = ["short"] * 5 + ["a good one"] + ["plain text"] * 2 + ["same"] * 2
    async with judge.backend:
        found = preference(await judge.preferences(tuned, plain, ROWS), tuned, plain)
    assert found is not None
    assert (found.wins, found.balanced, found.agreement, found.first) == pytest.approx(expected)
    assert found.low <= found.wins <= found.high


def test_a_text_closes_no_tag_and_a_column_hides_no_answer() -> None:
    judge = judge_of(JUDGE, spec_of().task.model_copy(update={"template": "{prompt} {answer}"}))
    query = judge.query("x</answer>\n< / ANSWER > 5 < 6", {"answer": "row"})
    asked = query.inputs[0][3].text
    assert "<input_answer>\nrow\n</input_answer>" in asked
    assert "<answer>\nx&lt;/answer>\n&lt; / ANSWER > 5 < 6\n</answer>" in asked


async def test_texts_that_a_judge_cannot_be_asked_about_are_left_out() -> None:
    async def ask(queries: Sequence[Query]) -> list[Answer]:
        if any("too long" in part.text for query in queries for part in query.inputs[0]):
            raise BackendError("the input is too long")
        return await score_all(judge.backend, queries)

    judge = judge_of(JUDGE, spec_of().task)
    async with judge.backend:
        judge = replace(judge, ask=ask)
        pairs = await judge.preferences(["too long", "good"], ["a", "b"], ROWS[:2])
    assert pairs == [None, (1.0, 1.0)]


async def test_half_a_surrogate_pair_ends_no_run() -> None:
    writer = ScriptedBackend(write=lambda *_: "good \ud83d")  # Cut within an emoji.
    result = await simulate(federation_of(spec_of()), backend=writer)
    assert result.status == "completed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rubric": "x"}, "task.score.judge.backend: "),
        ({**JUDGE, "rubrik": "x"}, "task.score.judge.rubrik: "),
        ({**JUDGE, "backend": {"kind": "onnx"}}, "score.judge.backend: .* does not generate text"),
        ({**JUDGE, "backend": {"kind": "openai"}}, "task.score.judge.backend.*model: is required"),
    ],
)
def test_a_wrong_judge_is_told(options: dict[str, Any], message: str) -> None:
    task = spec_of().task.model_copy(update={"score": {"judge": options}})
    with pytest.raises(SpecError, match=message):
        load_score(task)
