from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fedone_sdk import assets
from fedone_sdk.backends.tokens import (
    EstimatedCounter,
    TokenCounter,
    _TiktokenCounter,
    token_counter,
)
from fedone_sdk.errors import BackendError, SpecError
from fedone_sdk.task import Part, Rendered

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")

TOKENIZER = assets.path("roberta_mini") / "tokenizer.json"


def small_encoding() -> Any:
    """Bytes, and a few merges."""
    merges = [b" a", b"go", b"od", b"good", b" good", b"\xc3\xa9", b"\xf0\x9f"]
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {merge: 256 + index for index, merge in enumerate(merges)}
    return tiktoken.Encoding(
        "small",
        pat_str=r" ?[\p{L}]+|[\s\S]",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 300},
    )


COUNTERS: dict[str, TokenCounter] = {
    "estimate": EstimatedCounter(),
    "file": token_counter(model="x", tokenizer=str(TOKENIZER)),
    "tiktoken": _TiktokenCounter(small_encoding()),
}


@pytest.fixture(params=COUNTERS)
def counter(request: pytest.FixtureRequest) -> TokenCounter:
    return COUNTERS[request.param]


@pytest.mark.parametrize("text", ["", "good", " a good film", "é", "\U0001f600!", "<|endoftext|>"])
def test_a_counter_agrees_with_its_tokeniser(text: str) -> None:
    file = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    assert COUNTERS["file"].count(text) == len(file.encode(text, add_special_tokens=False).ids)
    ids = small_encoding().encode(text, disallowed_special=())
    assert COUNTERS["tiktoken"].count(text) == len(ids)
    assert COUNTERS["estimate"].count(text) == math.ceil(len(text.encode()) / 2)


def test_prose_has_fewer_tokens_than_estimated() -> None:
    for page in Path(__file__).parents[3].joinpath("docs", "tutorials").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert COUNTERS["file"].count(text) <= COUNTERS["estimate"].count(text)


@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_an_estimate_covers_the_text(text: str) -> None:
    spans = COUNTERS["estimate"].spans(text)
    assert {index for begin, end in spans for index in range(begin, end)} == {*range(len(text))}
    assert COUNTERS["estimate"].min_tokens(len(spans)) == math.ceil(len(text.encode()) / 16)


def test_special_tokens_in_a_text_are_text() -> None:
    assert COUNTERS["file"].count("<mask>") > 1
    assert COUNTERS["tiktoken"].count("<|endoftext|>") > 1


texts = st.one_of(
    st.text(st.characters(exclude_characters="[]", codec="utf-8"), max_size=80),
    st.builds(lambda word, times: word * times, st.sampled_from((" a", "\U0001f600", "é")),
              st.integers(0, 80)),
)  # fmt: skip


@pytest.mark.parametrize("name", COUNTERS)
@settings(max_examples=50)
@given(first=texts, second=texts)
def test_only_the_ends_of_fields_are_cut(name: str, first: str, second: str) -> None:
    counter = COUNTERS[name]
    parts: Rendered = (
        Part("prompt", "[p] "),
        Part("field", first),
        Part("text", " vs. "),
        Part("field", second),
        Part("text", " It was"),
    )
    (fitted,), _ = counter.fit([parts], 60)
    assert counter.count("".join(part.text for part in fitted)) <= 60
    assert [part for part in fitted if part.kind != "field"] == [
        part for part in parts if part.kind != "field"
    ]
    assert first.startswith(fitted[1].text)
    assert second.startswith(fitted[3].text)
    if counter.count("".join(part.text for part in parts)) <= 60:
        assert fitted == parts


def test_the_longest_field_is_cut_first() -> None:
    parts: Rendered = (Part("field", "x" * 100), Part("field", "y" * 10))
    (fitted,), _ = EstimatedCounter().fit([parts], 40)
    assert [part.text for part in fitted] == ["x" * 70, "y" * 10]


def test_what_does_not_fit_without_its_fields_is_refused(counter: TokenCounter) -> None:
    parts: Rendered = (Part("prompt", " word? " * 30), Part("field", "x"))
    with pytest.raises(BackendError, match="without its text fields, but max_input_tokens is 16"):
        counter.fit([parts], 16)


def test_a_lone_surrogate_is_refused_or_counted() -> None:
    with pytest.raises(BackendError, match="Unicode"):
        COUNTERS["file"].count("\ud800")
    assert COUNTERS["estimate"].count("\ud800") == 2
    assert COUNTERS["tiktoken"].count("\ud800") >= 1


def test_a_folder_names_its_tokeniser() -> None:
    counter = token_counter(model="x", tokenizer=str(TOKENIZER.parent))
    assert counter.exact
    assert counter.count(" great") == 1


def test_a_tokeniser_that_is_none_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(SpecError, match="cannot load the tokeniser"):
        token_counter(model="x", tokenizer=str(file))


def test_tiktoken_counts_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda model: small_encoding())
    with capture_logs() as logs:
        counter = token_counter(model="gpt-x")
    assert counter.exact
    assert counter.count(" good") < 5
    assert not logs


def _offline(model: str) -> object:
    raise ConnectionError("no network")


def _unknown(model: str) -> object:
    raise KeyError(model)


@pytest.mark.parametrize(
    ("function", "load", "reason"),
    [
        ("tiktoken.encoding_for_model", _offline,
         "tiktoken cannot load its vocabulary (ConnectionError)"),
        ("tiktoken.encoding_for_model", _unknown, "tiktoken does not know the model"),
        ("fedone_sdk.backends.tokens.find_spec", lambda name: None, "tiktoken is not installed"),
    ],
)  # fmt: skip
def test_tokens_are_estimated_where_tiktoken_fails(
    monkeypatch: pytest.MonkeyPatch, function: str, load: object, reason: str
) -> None:
    monkeypatch.setattr(function, load)
    with capture_logs() as logs:
        counter = token_counter(model="gpt-x")
    assert not counter.exact
    assert counter.count("good") == 2
    assert [log["reason"] for log in logs] == [reason]


def test_a_download_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def load(model: str) -> object:
        go_on.wait()
        return small_encoding()

    monkeypatch.setattr(tiktoken, "encoding_for_model", load)
    monkeypatch.setattr("fedone_sdk.backends.tokens._TIKTOKEN_TIMEOUT_S", 0.01)
    try:
        with capture_logs() as logs:
            counter = token_counter(model="gpt-x")
    finally:
        go_on.set()
    assert not counter.exact
    assert [log["reason"] for log in logs] == ["tiktoken took over 0.01 s"]


def test_a_million_spaces_do_not_end_the_process() -> None:
    encoding = tiktoken.Encoding(
        "bytes",
        pat_str=r"\s*[\r\n]+|\s+(?!\S)|\s+|\S+",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={},
    )
    spans = _TiktokenCounter(encoding).spans(" " * 1_000_000 + "x")
    assert spans[0] == (0, 1)
    assert spans[-1] == (1_000_000, 1_000_001)
    assert len(spans) == 1_000_001
