from __future__ import annotations

import asyncio
import gc
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedone_sdk.backends import Answer, AnswerCache, LLMBackend, ModelClient, Query, answers
from fedone_sdk.backends.base import RateLimits
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendUnavailable,
    BudgetExhausted,
    LabelWordError,
    SpecError,
)
from fedone_sdk.task import Part, Rendered

WORDS = (" bad", " good")
PAID = Usage(requests=1, prompt_tokens=7, usd=Decimal("0.01"))


class Oracle(LLMBackend):
    """Answers by the length of the text, when `gate` is open."""

    bounds = frozenset({"queries", "requests", "usd"})

    def __init__(self) -> None:
        self.name = "oracle:1"
        self.asked: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.failed_input = False

    @property
    def fingerprint(self) -> str:
        return self.name

    async def score(self, query: Query) -> Answer:
        text = "".join(part.text for rendered in query.inputs for part in rendered)
        self.asked[text] += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        row = None if self.failed_input else (-float(len(text)), -0.1)
        return Answer(
            log_probs=(row,) * len(query.inputs),
            usage=PAID,
            censored=1,
            model="oracle-2026",
            limits=RateLimits(requests=9),
        )

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        raise LabelWordError(label_words[0], [])

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        return Usage(queries=1, requests=batch_size)


class Caching(ModelClient):
    """A client with a cache only."""

    cache: AnswerCache

    def __init__(self, inner: LLMBackend, file: Path | None = None) -> None:
        super().__init__(inner, cache=AnswerCache(file))


class Told(LLMBackend):
    """Return the given answer; None must not be queried."""

    fingerprint = "told"

    def __init__(self, answer: Answer | None) -> None:
        self.answer = answer

    async def score(self, query: Query) -> Answer:
        assert self.answer is not None, "asked again"
        return self.answer


def ask(text: str, words: tuple[str, ...] = WORDS) -> Query:
    return Query(inputs=((Part("field", text), Part("mask", "")),), label_words=words)


async def settle() -> None:
    """Lets every ready task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def under_way(count: int) -> tuple[Oracle, Caching, list[asyncio.Task[Answer]]]:
    """Equal queries, of which the first waits for the gate of its model."""
    inner = Oracle()
    inner.gate.clear()
    cached = Caching(inner)
    tasks = [asyncio.create_task(cached.score(ask("a"))) for _ in range(count)]
    await settle()
    return inner, cached, tasks


async def test_a_hit_is_the_same_answer_for_nothing() -> None:
    inner = Oracle()
    cached = Caching(inner)
    first, second = await cached.score(ask("a")), await cached.score(ask("a"))
    assert first == await Oracle().score(ask("a"))
    assert first.usage == PAID
    assert not first.cached
    assert second == replace(first, usage=NOTHING, cached=True, limits=None)
    assert (cached.cache.hits, cached.cache.misses, inner.asked["a"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "other",
    [
        ask("b"),
        ask("a", (" good", " bad")),
        # The same text, but a field may be shortened and a prompt may not.
        Query(inputs=((Part("prompt", "a"), Part("mask", "")),), label_words=WORDS),
        Query(inputs=((Part("mask", ""), Part("field", "a")),), label_words=WORDS),
        replace(ask("a"), want="choice"),
        replace(ask("a"), references=("a",)),
        replace(ask("a"), scope=("run", "client")),
        replace(ask("a"), max_tokens=1),
        Query(
            inputs=((Part("field", ""), Part("field", "a"), Part("mask", "")),), label_words=WORDS
        ),
    ],
)
async def test_another_query_is_sent(other: Query) -> None:
    cached = Caching(Oracle())
    await cached.score(ask("a"))
    assert not (await cached.score(other)).cached


async def test_only_new_inputs_are_asked_for() -> None:
    """Each distinct input is paid once, whatever it comes together with."""

    class Rows(Oracle):
        async def score(self, query: Query) -> Answer:
            texts = [rendered[0].text for rendered in query.inputs]
            self.asked.update(texts)
            return Answer(
                log_probs=tuple((-float(ord(text)),) for text in texts),
                usage=Usage(requests=1, prompt_tokens=len(texts)),
            )

    inner = Rows()
    cached = Caching(inner)
    rng, asked = random.Random(0), set[str]()
    for _ in range(40):
        texts = rng.choices("abcdefghij", k=4)
        query = Query(inputs=tuple((Part("field", text),) for text in texts), label_words=WORDS)
        new = set(texts) - asked
        assert (await cached.quote(query)).requests == len(new)
        answer = await cached.score(query)
        asked |= new
        assert answer.log_probs == tuple((-float(ord(text)),) for text in texts)
        assert (answer.cached, answer.usage.prompt_tokens) == (4 - len(new), len(new))
    assert set(inner.asked.values()) == {1}
    assert (cached.cache.hits, cached.cache.misses) == (160 - len(asked), len(asked))
    # A model whose answers depend on the others is asked for a whole query, or for nothing.
    inner = Rows()
    inner.apart = False
    whole = Caching(inner)
    for texts, paid in (("ab", 2), ("ab", 0), ("aab", 3), ("ba", 2)):
        query = Query(inputs=tuple((Part("field", text),) for text in texts), label_words=WORDS)
        assert (await whole.score(query)).usage.prompt_tokens == paid


async def test_the_model_is_a_part_of_a_query_and_the_payer_is_not() -> None:
    inner = Oracle()
    cached = Caching(inner)
    await cached.score(replace(ask("a"), payer=BudgetGuard(Budget(requests=1))))
    assert (await cached.score(ask("a"))).cached
    inner.name = "oracle:2"
    assert not (await cached.score(ask("a"))).cached


@given(st.lists(st.text(st.characters(), max_size=4), min_size=2, max_size=2, unique=True))
async def test_different_texts_have_different_keys(texts: list[str]) -> None:
    # st.characters() has lone surrogates too: a JSON file may hold them.
    cached = Caching(Oracle())
    for text in texts:
        assert not (await cached.score(ask(text))).cached


async def test_the_least_recently_used_answer_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedone_sdk.backends.answers.MAX_ENTRIES", 2)
    cached = Caching(Oracle())
    for text in "abac":  # c pushes b out: a was used since
        await cached.score(ask(text))
    assert [(await cached.score(ask(text))).cached for text in "acb"] == [True, True, False]


async def test_equal_queries_under_way_share_one_call() -> None:
    inner, cached, tasks = await under_way(5)
    inner.gate.set()
    answers = await asyncio.gather(*tasks)
    assert [answer.cached for answer in answers] == [False, True, True, True, True]
    assert [answer.usage for answer in answers] == [PAID, *[NOTHING] * 4]
    assert len({answer.log_probs for answer in answers}) == 1
    assert (cached.cache.hits, cached.cache.misses, inner.asked["a"]) == (4, 1, 1)


async def test_after_a_cancelled_call_one_waiter_asks_again() -> None:
    inner, cached, tasks = await under_way(4)
    tasks[0].cancel()
    await settle()
    assert inner.asked["a"] == 2
    inner.gate.set()
    answers = await asyncio.gather(*tasks[1:])
    assert tasks[0].cancelled()
    # Exactly one of those who are left reports what the second call cost.
    assert sorted(answer.cached for answer in answers) == [False, True, True]
    assert (cached.cache.hits, cached.cache.misses) == (2, 2)


async def test_a_cancelled_waiter_leaves_the_call_alone() -> None:
    inner, _, (asker, waiter, other) = await under_way(3)
    waiter.cancel()
    await settle()
    assert waiter.cancelled()
    inner.gate.set()
    assert not (await asker).cached
    assert (await other).cached
    assert inner.asked["a"] == 1


async def test_an_error_reaches_all_waiters_and_is_not_cached() -> None:
    inner, cached, tasks = await under_way(3)
    inner.error = BackendUnavailable("busy")
    inner.gate.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, BackendUnavailable) for error in found)
    assert (cached.cache.hits, cached.cache.misses, inner.asked["a"]) == (0, 1, 1)
    inner.error = None
    assert not (await cached.score(ask("a"))).cached


async def test_no_query_is_refused_by_the_budget_of_another() -> None:
    inner = Oracle()
    inner.gate.clear()
    cached = Caching(inner)
    poor, rich = BudgetGuard(Budget(requests=0)), BudgetGuard(Budget(requests=1))
    tasks = [
        asyncio.create_task(cached.score(replace(ask("a"), payer=payer)))
        for payer in (poor, rich, rich)
    ]
    await settle()
    inner.gate.set()
    refused, *answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(refused, BudgetExhausted)
    assert [isinstance(answer, Answer) and answer.cached for answer in answers] == [False, True]


@pytest.mark.filterwarnings("error")
async def test_an_error_without_a_waiter_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    inner = Oracle()
    inner.error = BackendUnavailable("busy")
    with suppress(BackendUnavailable):
        await Caching(inner).score(ask("a"))
    inner.error = None
    gc.collect()  # asyncio complains when the forgotten future dies
    await settle()
    assert not caplog.records


async def test_an_answer_with_a_failed_input_is_not_remembered_and_a_known_one_is_free() -> None:
    inner = Oracle()
    inner.failed_input = True
    cached = Caching(inner)
    assert (await cached.score(ask("a"))).log_probs[0] is None
    assert await cached.quote(ask("a")) == Usage(queries=1, requests=1)
    inner.failed_input = False
    assert (await cached.score(ask("a"))).log_probs[0] is not None
    assert await cached.quote(ask("a")) == Usage(queries=1)
    assert await cached.quote(ask("b")) == Usage(queries=1, requests=1)
    assert (cached.cache.hits, cached.cache.misses) == (0, 2)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


class TestFile:
    async def test_an_answer_is_on_the_disk_before_it_is_given(self, tmp_path: Path) -> None:
        file = tmp_path / "answers.db"
        inner = Oracle()
        async with Caching(inner, file=file) as cached:
            first = await cached.score(ask("a"))
            # Another process, while this one still holds the file open.
            other = Caching(Told(None), file=file)
            other.inner.fingerprint = inner.name  # type: ignore[misc]  # a class attribute
            assert await other.quote(ask("a")) == Usage(queries=1)
            known = await other.score(ask("a"))
            await other.aclose()
        assert known == replace(first, usage=NOTHING, cached=True, limits=None)
        assert (other.cache.hits, other.cache.misses) == (1, 0)
        async with Caching(Oracle(), file=file) as cached:
            assert await cached.score(ask("a")) == known
            assert not (await cached.score(ask("b"))).cached

    @given(
        st.lists(
            st.tuples(st.lists(st.floats(allow_nan=False)), st.text(st.characters())),
            min_size=1,
            max_size=4,
        ),
        st.none() | st.text(max_size=5),
    )
    @settings(max_examples=30)
    async def test_answers_come_back_exactly(
        self, rows: list[tuple[list[float], str]], model: str | None
    ) -> None:
        inputs = tuple((Part("field", str(place)),) for place in range(len(rows)))
        query = Query(inputs=inputs, label_words=WORDS)
        answer = Answer(
            log_probs=tuple(tuple(row) for row, _ in rows),
            texts=tuple(text for _, text in rows),
            model=model,
            censored=len(rows),
            usage=PAID,
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "answers.db")
            async with Caching(Told(answer), file=file) as cached:
                await cached.score(query)
            async with Caching(Told(None), file=file) as cached:
                known = await cached.score(query)
        assert known == replace(answer, usage=NOTHING, cached=len(rows))
        assert repr(known.log_probs) == repr(answer.log_probs)  # -0.0 is not 0.0

    async def test_two_caches_on_one_file_keep_its_locks(self, tmp_path: Path) -> None:
        """Otherwise another process that closes the file deletes the log with later answers."""
        file = tmp_path / "a"
        other = f"import sqlite3; sqlite3.connect({str(file)!r}).execute('SELECT * FROM answers')"
        async with Caching(Oracle(), file=file) as cached, Caching(Oracle(), file=file):
            await cached.score(ask("a"))
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", other], check=True)
            assert set(modes(tmp_path)) == {"a", "a-wal", "a-shm"}

    async def test_evicted_answers_are_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fedone_sdk.backends.answers.MAX_ENTRIES", 1)
        inner = Oracle()
        async with Caching(inner, file=tmp_path / "a") as cached:
            for text in "abcabc":
                await cached.score(ask(text))
        assert (cached.cache.hits, cached.cache.misses, inner.asked.total()) == (3, 3, 3)

    async def test_the_answer_of_a_cancelled_caller_is_kept(self, tmp_path: Path) -> None:
        file = tmp_path / "a"
        inner = Oracle()
        async with Caching(inner, file=file) as cached:
            await cached.score(ask("z"))
            with closing(sqlite3.connect(file, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")  # Holds the writer back.
                call = asyncio.create_task(cached.score(ask("a")))
                while not inner.asked["a"]:
                    await asyncio.sleep(0.001)
                await settle()
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                other.execute("ROLLBACK")
            assert (await cached.score(ask("a"))).cached
        assert inner.asked["a"] == 1

    async def test_a_paid_answer_that_cannot_be_written_is_written_later(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(answers, "PATIENCE_S", 0.01)
        file = tmp_path / "a"
        inner = Oracle()
        async with Caching(inner, file=file) as cached:
            with closing(sqlite3.connect(file, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(BackendBlocked, match=f"{file}.*locked") as caught:
                    await cached.score(ask("a"))
                assert caught.value.usage == PAID
                # Nothing more is asked, and so paid, as long as nothing can be kept.
                with pytest.raises(BackendBlocked) as caught:
                    await cached.score(ask("b"))
                assert caught.value.usage == NOTHING
                other.execute("ROLLBACK")
            assert (await cached.score(ask("a"))).cached
        assert inner.asked == {"a": 1}
        async with Caching(Oracle(), file=file) as cached:
            assert (await cached.score(ask("a"))).cached

    async def test_it_is_private_and_an_answer_that_cannot_be_read_stops_the_run(
        self, tmp_path: Path
    ) -> None:
        file = tmp_path / "a"
        async with Caching(Oracle(), file=file) as cached:
            await cached.score(ask("a"))
            assert set(modes(tmp_path).values()) == {0o600}
            with closing(sqlite3.connect(file)) as other:
                assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
                ((model, answer),) = other.execute("SELECT model, answer FROM answers")
        assert (model, b"oracle-2026" in answer) == ("oracle:1", True)
        assert list(modes(tmp_path)) == ["a"]  # Closing leaves one file.
        with closing(sqlite3.connect(file)) as other, other:
            other.execute("UPDATE answers SET answer = x'7b7d'")
        inner = Oracle()
        async with Caching(inner, file=file) as cached:
            with pytest.raises(BackendBlocked, match=f"{file}.*cannot be read"):
                await cached.score(ask("a"))
        assert not inner.asked

    def test_a_file_of_something_else_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        def refused(file: Path, match: str) -> None:
            before = file.read_bytes() if file.is_file() else b""
            with pytest.raises(SpecError, match=match) as caught:
                Caching(Oracle(), file=file)
            assert caught.value.source == str(file)
            assert file.is_dir() or not file.exists() or file.read_bytes() == before

        text = tmp_path / "text"
        text.write_bytes(b"budget: {queries: 2000}\n" * 100)
        refused(text, "not a database")
        ledger = tmp_path / "ledger"
        with closing(sqlite3.connect(ledger)) as db:
            db.execute("CREATE TABLE spent (used TEXT)")
        refused(ledger, "another program")
        refused(tmp_path, "directory")
        refused(tmp_path / "no" / "folder", "No such file")

    async def test_a_damaged_file_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "a"
        async with Caching(Oracle(), file=file) as cached:
            await asyncio.gather(*(cached.score(ask("x" * n)) for n in range(200)))
        content = bytearray(file.read_bytes())
        content[4096:8192] = random.Random(0).randbytes(4096)
        file.write_bytes(content)
        with pytest.raises(SpecError, match=r"malformed|damaged"):
            Caching(Oracle(), file=file)
