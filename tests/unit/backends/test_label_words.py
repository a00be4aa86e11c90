from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fedone_sdk.backends import LLMBackend, OnnxBackend, Query
from fedone_sdk.backends.build import build_backend
from fedone_sdk.backends.label_words import NUM_WATCHED, LabelWatch, check_label_words
from fedone_sdk.backends.queries import run_each
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard
from fedone_sdk.errors import LabelsNotShown, LabelWordError
from fedone_sdk.task import Part
from tests.fake_openai import FakeModel, FakeOpenAI

UNSEEN = (" wonderful", " horrid")  # The fake model has no such tokens.
SEEN = (" great", " terrible")
ALL_SHOWN = FakeModel([" great", " terrible", " the", " a", " film"])
TOP = [" The", " I"]
MAJORITY = NUM_WATCHED // 2 + 1


def watch() -> LabelWatch:
    return LabelWatch(model="fake-1", url="http://server/v1")


def query(number: int, words: tuple[str, ...] = UNSEEN) -> Query:
    return Query(inputs=((Part("field", f"film {number}"),),), label_words=words)


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(model=ALL_SHOWN) as server:
        yield server


def backend(server: FakeOpenAI, guard: BudgetGuard | None = None, **options: object) -> LLMBackend:
    limits = {"retry": {"max_wait_s": 0.01}, "limits": {"concurrency": 1}}
    return build_backend(server.spec(**limits, **options), guard=guard)


def test_it_refuses_as_soon_as_the_majority_is_certain() -> None:
    watched = watch()
    for number in range(MAJORITY):
        watched.admit(UNSEEN)
        watched.note(UNSEEN, TOP if number else [*TOP, "Horrid"])
    watched.admit(UNSEEN)  # 32 of 33: the other 31 may all show a label word.
    watched.note(UNSEEN, TOP)
    with pytest.raises(LabelsNotShown, match=r"33 of the first 34 answers") as caught:
        watched.admit(UNSEEN)
    assert caught.value.usage == NOTHING
    assert "\n" not in str(caught.value)


def test_one_device_cannot_block_the_others() -> None:
    watched = watch()
    for device in ("a", "b"):
        for _ in range(100):
            watched.note(UNSEEN, TOP, device=("run", device))
    watched.admit(UNSEEN)
    watched.note(UNSEEN, TOP, device=("run", "c"))
    with pytest.raises(LabelsNotShown):
        watched.admit(UNSEEN)


def test_each_set_of_label_words_counts_for_itself() -> None:
    watched = watch()
    for _ in range(MAJORITY):
        watched.note(UNSEEN, TOP)
    watched.admit(SEEN)
    with pytest.raises(LabelsNotShown):
        watched.admit(UNSEEN)


def test_label_words_of_many_callers_take_bounded_memory() -> None:
    watched = watch()
    for number in range(2000):
        watched.note((f" word {number}", " other"), TOP)
    assert len(watched._counts) < 500


def test_devices_see_no_token_and_operators_none_of_a_single_input() -> None:
    watched = watch()
    for number in range(MAJORITY):
        text = "Maria" if number == 5 else " The"
        watched.note(UNSEEN, [text, *TOP])
    with pytest.raises(LabelsNotShown) as caught:
        watched.admit(UNSEEN)
    assert str(caught.value).endswith("(most often ' The')")
    assert "' The'" not in caught.value.summary
    assert "api: chat" in caught.value.summary


def test_a_label_word_of_several_tokens_is_named() -> None:
    words = (" positive", " negative", " 10", " 1")
    watched = watch()
    for number in range(MAJORITY):
        watched.admit(words)
        watched.note(words, [" positive", " Neg", "1", "10" if number == 3 else " the"])
    with pytest.raises(
        LabelsNotShown, match=r"most of the first 33 .* beginning of .* ' negative',"
    ):
        watched.admit(words)
    for number in range(NUM_WATCHED):  # One whole word is enough.
        watched.note(words[:2], ["positive", "neg", *([] if number % 40 else ["negative"])])
    watched.admit(words[:2])


@pytest.mark.parametrize(
    ("shown", "at", "never"), [("great", NUM_WATCHED, [" terrible"]), ("fun", 8, list(SEEN))]
)
def test_label_words_that_no_answer_has_are_logged(shown: str, at: int, never: list[str]) -> None:
    watched = watch()
    with capture_logs() as logs:
        for _ in range(NUM_WATCHED + 1):
            watched.note(SEEN, [shown, " the"])
    assert [(line["answers"], line["words"]) for line in logs] == [(at, never)]


async def test_a_run_stops_after_33_paid_answers_until_it_is_reset(server: FakeOpenAI) -> None:
    guard = BudgetGuard(Budget(requests=1000))
    async with backend(server, guard) as asked:
        answers, failures = await run_each(asked.score, map(query, range(200)), concurrency=1)
        assert len(answers) == MAJORITY == len(server.received)
        assert [type(failure) for failure in failures] == [LabelsNotShown]
        assert all(answer.censored == 2 for answer in answers.values())
        for number in range(200, 203):
            with pytest.raises(LabelsNotShown, match="33 of the first 33"):
                await asked.score(query(number))
        await asyncio.sleep(0.02)  # The retry wrapper's own pause is over.
        with pytest.raises(LabelsNotShown):
            await asked.score(query(203))
        assert len(server.received) == MAJORITY
        assert (await guard.account()).held.requests == MAJORITY
        asked.reset()
        assert (await asked.score(query(204))).censored == 2


async def test_answers_from_the_cache_do_not_count_again(
    server: FakeOpenAI, tmp_path: Path
) -> None:
    cache = str(tmp_path / "answers.db")
    async with backend(server, cache=cache) as asked:
        await run_each(asked.score, map(query, range(30)), concurrency=1)
    async with backend(server, cache=cache) as resumed:
        answers, failures = await run_each(resumed.score, map(query, range(60)), concurrency=1)
        assert not failures
        assert sum(answer.cached for answer in answers.values()) == 30
        # The same queries are known even where new ones are refused.
        await run_each(resumed.score, map(query, range(60, 70)), concurrency=1)
        with pytest.raises(LabelsNotShown):
            await resumed.score(query(70))
        assert (await resumed.score(query(0))).cached


async def test_all_wrong_words_are_named_with_words_that_are_one_token() -> None:
    async with OnnxBackend() as backend:
        words = (" unsatisfactory service", " great", "wonderfullest")
        with pytest.raises(LabelWordError) as caught:
            await check_label_words(backend, words)
        error = caught.value
        assert [error.word, *(other.word for other in error.also)] == [words[0], words[2]]
        assert error.suggested == (" service",)
        assert "(did you mean ' service'?)" in error.problems[0]
        assert len(error.problems) == 2
        for word in error.suggested:
            await backend.check((word,))
        with pytest.raises(LabelWordError) as caught:
            await check_label_words(backend, (" Terrible", " great"))
        assert caught.value.suggested[0] == " terrible"
