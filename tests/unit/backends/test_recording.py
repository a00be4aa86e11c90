from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedone_sdk
from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.backends.cassette import CassetteBackend
from fedone_sdk.backends.wrappers.recording import RecordingBackend
from fedone_sdk.backends.wrappers.split import SplitBackend
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    LabelWordError,
    SpecError,
)
from fedone_sdk.task import Part
from fedone_sdk.testing import ManualClock, ScriptedBackend

WORDS = (" bad", " good")
PAID = Usage(requests=1, prompt_tokens=7, usd=Decimal("0.1"))


def ask(*texts: str, **more: Any) -> Query:
    inputs = tuple((Part("field", text), Part("mask", "")) for text in texts)
    return Query(inputs=inputs, **{"label_words": WORDS, **more})


class Told(LLMBackend):
    """Return the given answers, or raise the given errors, in turn."""

    fingerprint = "told:1"

    def __init__(self, *outcomes: Answer | BaseException) -> None:
        self.outcomes = list(outcomes)

    async def score(self, query: Query) -> Answer:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def answer_of(value: float, **more: Any) -> Answer:
    return Answer(**{"log_probs": ((value, -0.5),), "usage": PAID, **more})


def lines_of(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line]


async def record(file: Path, query: Query, *outcomes: Answer | BaseException) -> None:
    async with RecordingBackend(Told(*outcomes), file) as recording:
        for _ in outcomes:
            try:
                await recording.score(query)
            except (Exception, asyncio.CancelledError):
                continue


floats = st.floats(allow_nan=False)
texts = st.text(st.characters(), max_size=5)  # Lone surrogates too: a JSON file may hold them.
usages = st.builds(
    Usage,
    requests=st.integers(0, 3),
    prompt_tokens=st.integers(0, 2**53),
    usd=st.decimals(0, 10, allow_nan=False),
)
errors = st.one_of(
    st.builds(BackendError, texts, usage=st.none() | usages),
    st.builds(BackendBlocked, texts, usage=st.none() | usages),
    st.builds(
        BackendUnavailable,
        texts,
        usage=st.none() | usages,
        retry_after_s=st.none() | st.floats(0, 1e6),
    ),
    st.builds(LabelWordError, texts, st.lists(texts, max_size=3)),
)
answers = st.builds(
    Answer,
    log_probs=st.lists(st.none() | st.lists(floats, max_size=3).map(tuple), max_size=3).map(tuple),
    usage=usages,
    cached=st.booleans(),
    texts=st.lists(st.none() | texts, max_size=3).map(tuple),
    censored=st.integers(0, 9),
    model=st.none() | texts,
)
queries = st.builds(
    Query,
    inputs=st.lists(
        st.lists(
            st.builds(Part, st.sampled_from(["text", "prompt", "field", "mask"]), texts), max_size=3
        ).map(tuple),
        min_size=1,
        max_size=3,
    ).map(tuple),
    label_words=st.lists(texts, max_size=3).map(tuple),
    want=st.sampled_from(["labels", "choice", "reference", "text"]),
    references=st.lists(texts, max_size=2).map(tuple),
    max_tokens=st.integers(0, 9),
)


async def outcome_of(backend: LLMBackend, query: Query) -> object:
    """What a query comes to, with all facts of an error."""
    try:
        answer = await backend.score(query)
        return answer, repr(answer)  # -0.0 == 0.0, and is not the same.
    except BackendError as exc:
        return type(exc), str(exc), vars(exc)


@given(st.lists(st.tuples(queries, answers | errors), min_size=1, max_size=6))
@settings(max_examples=100)
async def test_a_cassette_gives_what_was_recorded(
    asked: list[tuple[Query, Answer | BackendError]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cassette.jsonl")
        inner = Told(*(outcome for _, outcome in asked))
        async with RecordingBackend(inner, file) as recording:
            recorded = [await outcome_of(recording, query) for query, _ in asked]
        cassette = CassetteBackend(file)
    assert cassette.fingerprint == "told:1"
    assert cassette.answers == {query.want for query, _ in asked}
    for (query, outcome), expected in zip(asked, recorded, strict=True):
        worst = cassette.worst_case(len(query.inputs))
        assert worst.queries == 1
        if outcome.usage is not None:
            assert worst.at_least(outcome.usage) == worst
        assert await outcome_of(cassette, query) == expected


@given(st.lists(st.lists(texts, min_size=1, max_size=3), min_size=1, max_size=5))
@settings(max_examples=30)
async def test_a_scripted_model_replays_itself(batches: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cassette.jsonl")
        async with RecordingBackend(
            ScriptedBackend(lambda rendered, words: (-float(len(rendered[0].text)) / 3, -0.1)), file
        ) as recording:
            found = [await recording.score(ask(*batch)) for batch in batches]
        cassette = CassetteBackend(file)
    assert [await cassette.score(ask(*batch)) for batch in batches] == found


async def test_a_log_line_has_the_request_and_its_status(tmp_path: Path) -> None:
    file = tmp_path / "cassette.jsonl"
    payer = BudgetGuard(Budget(requests=9), name="run-1")
    inner = Told(answer_of(-0.1, model="told-2026", censored=1))
    async with RecordingBackend(inner, file, clock=ManualClock(0.5)) as recording:
        await recording.score(ask("schön", payer=payer))
        # It is there before anything is closed.
        (line,) = lines_of(file)
    assert line == {
        "time": "1970-01-01T00:00:00.500000+00:00",
        "fingerprint": "told:1",
        "want": "labels",
        "label_words": [" bad", " good"],
        "inputs": [[["field", "schön"], ["mask", ""]]],
        "references": [],
        "max_tokens": 0,
        "answer": {
            "log_probs": [[-0.1, -0.5]],
            "texts": [],
            "censored": 1,
            "cached": False,
            "model": "told-2026",
            "usage": {
                "queries": 0,
                "requests": 1,
                "prompt_tokens": 7,
                "completion_tokens": 0,
                "usd": "0.1",
            },
        },
    }
    assert "schön" in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("message", "recorded"),
    [
        ("Incorrect API key provided: sk-proj-ab12***9xYz.", "provided: [removed]"),
        ("header 'Authorization: Bearer abc.def-1' refused", "'Authorization: [removed]' refused"),
        ("https://user:pass@host/v1 is down", "https://[removed]@host/v1 is down"),
        ("bad api_key=0123456789abcdef, sorry", "bad [removed], sorry"),
        ("the task-based risk-assessment is 4 tokens too long", None),
    ],
)
async def test_text_that_looks_like_a_secret_is_removed(
    tmp_path: Path, message: str, recorded: str | None
) -> None:
    file = tmp_path / "cassette.jsonl"
    await record(file, ask("a"), BackendBlocked(message), ValueError(message))
    for line in lines_of(file):
        assert line["error"]["message"].endswith(message if recorded is None else recorded)


async def test_answers_to_the_same_query_come_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "cassette.jsonl"
    busy = BackendUnavailable("busy", retry_after_s=2.0, usage=Usage(requests=1))
    await record(file, ask("a"), busy, answer_of(-1.0), answer_of(-2.0))
    cassette = CassetteBackend(file)
    with pytest.raises(BackendUnavailable, match="busy"):
        await cassette.score(ask("a"))
    found = [(await cassette.score(ask("a"))).log_probs[0] for _ in range(4)]
    assert found == [(-1.0, -0.5), (-2.0, -0.5), (-2.0, -0.5), (-2.0, -0.5)]


async def test_a_request_without_an_answer_is_recorded_and_not_replayed(tmp_path: Path) -> None:
    file = tmp_path / "cassette.jsonl"
    await record(file, ask("a"), asyncio.CancelledError(), KeyError("bug"), answer_of(-1.0))
    found = [line.get("error", {}).get("class") for line in lines_of(file)]
    assert found == ["CancelledError", "KeyError", None]
    assert await CassetteBackend(file).score(ask("a")) == answer_of(-1.0)


async def test_an_error_of_ones_own_is_replayed_as_what_it_is(tmp_path: Path) -> None:
    class NoLogProbs(BackendBlocked):
        pass

    file = tmp_path / "cassette.jsonl"
    await record(file, ask("a"), NoLogProbs("use another model"))
    with pytest.raises(BackendBlocked, match="use another model"):
        await CassetteBackend(file).score(ask("a"))


async def test_a_replay_splits_as_the_recording_did(tmp_path: Path) -> None:
    class Narrow(ScriptedBackend):
        max_inputs = 2

    file = tmp_path / "cassette.jsonl"
    async with SplitBackend(RecordingBackend(Narrow(), file)) as backend:
        found = await backend.score(ask("a", "b", "c"))
    assert len(lines_of(file)) == 2
    cassette = SplitBackend(CassetteBackend(file))
    assert await cassette.score(ask("a", "b", "c")) == found
    assert cassette.worst_case(3) == Usage(queries=1, requests=2, prompt_tokens=3)


@pytest.mark.parametrize(
    "other", [ask("b"), ask("a", "a"), ask("a", want="choice"), ask("a", label_words=(" x",))]
)
async def test_an_unrecorded_query_is_a_clear_error(tmp_path: Path, other: Query) -> None:
    file = tmp_path / "cassette.jsonl"
    await record(file, ask("a"), answer_of(-1.0))
    with pytest.raises(BackendError, match="does not hold this query") as caught:
        await CassetteBackend(file).score(other)
    assert str(file) in str(caught.value)
    assert caught.value.usage == NOTHING


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda line: line.pop(name)


@pytest.mark.parametrize(
    "spoil",
    [
        drop("answer"),
        drop("inputs"),
        drop("fingerprint"),
        lambda line: line.update(answer={}),
        lambda line: line["answer"].update(log_probs=[["x"]]),
        lambda line: line["answer"].update(usage={"requests": -1}),
        lambda line: line.update(inputs=[[["field"]]]),
    ],
)
async def test_a_bad_line_is_named(tmp_path: Path, spoil: Callable[[dict[str, Any]], None]) -> None:
    file = tmp_path / "cassette.jsonl"
    await record(file, ask("a"), answer_of(-1.0), answer_of(-2.0))
    good, bad = lines_of(file)
    spoil(bad)
    file.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n", encoding="utf-8")
    with pytest.raises(SpecError, match="line 2: is not a line of a cassette") as caught:
        CassetteBackend(file)
    assert caught.value.source == str(file)


async def test_an_empty_line_is_passed_over(tmp_path: Path) -> None:
    """A process that opens a file within another's line closes that line."""
    file = tmp_path / "cassette.jsonl"
    await record(file, ask("a"), answer_of(-1.0))
    file.write_bytes(b"\n" + file.read_bytes() + b"\n")
    assert (await CassetteBackend(file).score(ask("a"))).log_probs == answer_of(-1.0).log_probs


@pytest.mark.parametrize("line", [b"{", b" ", b"[]", b"7", b"\xff"])
def test_a_line_that_is_no_json_object_is_named(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "cassette.jsonl"
    file.write_bytes(line + b"\n")
    with pytest.raises(SpecError, match="line 1"):
        CassetteBackend(file)


async def test_two_models_in_one_cassette_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cassette.jsonl"
    await record(file, ask("a"), answer_of(-1.0))
    async with RecordingBackend(ScriptedBackend(), file) as recording:
        await recording.score(ask("a"))
    with pytest.raises(SpecError, match=r"line 2: is of the model 'scripted'.*'told:1'"):
        CassetteBackend(file)


async def test_a_cassette_needs_answers(tmp_path: Path) -> None:
    file = tmp_path / "cassette.jsonl"
    with pytest.raises(SpecError, match="No such file"):
        CassetteBackend(file)
    await record(file, ask("a"), asyncio.CancelledError())
    with pytest.raises(SpecError, match="holds no answers"):
        CassetteBackend(file)


async def test_a_line_that_a_crash_has_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    file = tmp_path / "cassette.jsonl"
    file.write_bytes(b'{"time": "2026-')
    await record(file, ask("a"), answer_of(-1.0))
    with pytest.raises(SpecError, match=r"line 1: .*remove it"):
        CassetteBackend(file)
    file.write_bytes(file.read_bytes().split(b"\n", 1)[1])
    assert await CassetteBackend(file).score(ask("a")) == answer_of(-1.0)


def test_a_folder_is_no_cassette(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="directory"):
        RecordingBackend(ScriptedBackend(), tmp_path)


async def test_a_full_disk_loses_no_answer_and_stops_further_requests(tmp_path: Path) -> None:
    class Full:
        """A file on a disk that takes `room` more bytes."""

        def __init__(self, file: Any, room: int) -> None:
            self.file, self.room = file, room

        def write(self, data: bytes) -> int:
            if self.room == 0:
                raise OSError(28, "No space left on device")
            taken = int(self.file.write(data[: self.room]))
            self.room -= taken
            return taken

        def close(self) -> None:
            self.file.close()

    file = tmp_path / "cassette.jsonl"
    inner = ScriptedBackend()
    async with RecordingBackend(inner, file) as recording:
        full = Full(recording._file, 100)
        recording._file = full  # type: ignore[assignment]  # a double of what is used of it
        paid = await recording.score(ask("a"))
        with pytest.raises(BackendBlocked, match="No space left on device") as caught:
            await recording.score(ask("b"))
        assert caught.value.usage == NOTHING
        assert str(file) in str(caught.value)
        assert len(inner.asked) == 1
        full.room = 10**6
        await recording.score(ask("b"))
    assert len(lines_of(file)) == 2
    assert await CassetteBackend(file).score(ask("a")) == paid


WRITER = """
import asyncio, sys
from pathlib import Path
from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.recording import RecordingBackend
from fedone_sdk.budget import Usage
from fedone_sdk.task import Part

class Told(LLMBackend):
    fingerprint = "told"
    async def score(self, query):
        return Answer(log_probs=((-1.0,),) * len(query.inputs), usage=Usage(requests=1))

async def main():
    async with RecordingBackend(Told(), Path(sys.argv[1])) as recording:
        await asyncio.gather(*(
            recording.score(Query(inputs=((Part("field", f"{sys.argv[2]}.{n} " * 2000),),)))
            for n in range(100)
        ))

asyncio.run(main())
"""


def test_processes_share_a_cassette(tmp_path: Path) -> None:
    file = tmp_path / "cassette.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(Path(fedone_sdk.__file__).parents[1])}
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(file), str(name)], env=environment)
        for name in range(3)
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    found = [line["inputs"][0][0][1].split()[0] for line in lines_of(file)]
    assert sorted(found) == sorted(f"{name}.{n}" for name in range(3) for n in range(100))
    CassetteBackend(file)
