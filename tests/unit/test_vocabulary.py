"""Vocabularies: validation, digests, and candidates from the text."""

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedone_sdk.errors import DataError
from fedone_sdk.vocabulary import (
    FileVocabulary,
    PmiVocabulary,
    Vocabulary,
    VocabularySpec,
    build_vocabulary,
    pmi_ngrams,
)

SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).parents[3] / "shared"))
SST2 = SHARED / "data" / "glue" / "sst2"


def test_text_is_the_concatenation() -> None:
    vocabulary = Vocabulary(candidates=("", " not so", ","))
    assert len(vocabulary) == 3
    assert vocabulary.tokens([1, 0, 2, 1]) == [" not so", "", ",", " not so"]
    assert vocabulary.text([1, 0, 2, 1]) == " not so, not so"
    for index in (-1, 3):
        with pytest.raises(IndexError, match=rf"candidate {index} is not in \[0, 3\)"):
            vocabulary.text([index])


def test_sha256_is_over_canonical_json() -> None:
    vocabulary = Vocabulary(candidates=(" é", '"\n'))
    assert vocabulary.sha256 == hashlib.sha256('[" é","\\"\\n"]'.encode()).hexdigest()
    assert vocabulary.sha256 != Vocabulary(candidates=('"\n', " é")).sha256
    assert vocabulary == Vocabulary(candidates=(" é", '"\n'))
    assert Vocabulary.model_validate_json(vocabulary.model_dump_json()) == vocabulary


@pytest.mark.parametrize(
    ("candidates", "message"),
    [(("a",), "needs at least 2"), (("a", "b", "a"), "'a' is repeated: candidates 0 and 2"),
     (("", ""), "'' is repeated"), (("a", "b" * 4001), "at most 4000 characters"),
     (("a", "\ud800"), r"valid string|unicode"),
     (tuple(map(str, range(65_537))), "at most 65536 items")],
)  # fmt: skip
def test_invalid_vocabularies(candidates: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Vocabulary(candidates=candidates)


def test_specs_are_told_apart_by_kind() -> None:
    adapter: TypeAdapter[PmiVocabulary | FileVocabulary] = TypeAdapter(VocabularySpec)
    assert adapter.validate_python({"kind": "pmi", "size": 50}) == PmiVocabulary(size=50)
    assert adapter.validate_python({"kind": "file", "path": "x"}) == FileVocabulary(path="x")
    for bad in ({"kind": "bpe"}, {"kind": "pmi", "threshold": 1}, {"kind": "pmi", "size": 1}, {}):
        with pytest.raises(ValidationError):
            adapter.validate_python(bad)


def test_tokens() -> None:
    texts = ["The film, the film -- isn't it (the) 2.5 best?", "the film 's end...", "`the end"]
    tokens = pmi_ngrams(texts, max_ngram=1)
    # By frequency, then by text; case is kept, a word brings its space, a mark does not.
    assert tokens[:6] == [" the", " film", " end", " 's", " 2.5", " The"]
    assert {",", "--", "...", " isn't", "?", "(", "`"} <= set(tokens)


def test_blank_comes_first_and_counts() -> None:
    vocabulary = build_vocabulary(PmiVocabulary(size=3, blank=True), ["a a a b b c"])
    assert vocabulary.candidates == ("", " a", " b")


def test_wanted_candidates_are_there_and_count() -> None:
    def built(spec: PmiVocabulary, *wanted: str) -> tuple[str, ...]:
        return build_vocabulary(spec, ["a a a a b b b c c d"], wanted=wanted).candidates

    spec = PmiVocabulary(size=4, blank=True)
    assert built(spec, "Say:", " b", "Say:") == ("", " a", " b", "Say:")
    assert built(spec, " d", "Say:") == ("", " a", " d", "Say:")
    assert built(PmiVocabulary(size=9), "Say:") == (" a", " b", " c", " d", "Say:")
    with pytest.raises(DataError, match="size: 4 is too small for the 3 tokens"):
        built(spec, "1", "2", "3")


# " new york" always together, " the" everywhere.
CITY = ["the new york film", "the old film", "new york", "the plan", "the film the", "see new york"]


def test_pmi_binds_words_that_attract_each_other() -> None:
    candidates = pmi_ngrams(CITY, threshold=1.0, min_count=2)
    assert candidates[0] == " the"
    assert " new york" in candidates
    assert not {" new", " york", " the new", " york film"} & set(candidates)


def test_pmi_value_at_the_threshold() -> None:
    # 17 words, 11 pairs; " new", " york" and " new york" occur 3 times each.
    pmi = math.log((3 / 11) / ((3 / 17) * (3 / 17)))
    for offset, bound in ((-1e-9, True), (1e-9, False)):
        found = pmi_ngrams(CITY, threshold=pmi + offset, min_count=1)
        assert (" new york" in found) == bound


def test_pmi_limits() -> None:
    texts = ["alpha beta gamma delta epsilon"] * 5
    found = pmi_ngrams(texts, threshold=0.0, max_ngram=2)
    assert found == [" alpha beta", " epsilon", " gamma delta"]
    assert len(pmi_ngrams(texts, threshold=0.0, min_count=6)) == 5
    apart = pmi_ngrams(["red wine, white wine"] * 5, threshold=-10.0)
    assert set(apart) == {" red wine", ",", " white wine"}


@example(["1.1a", "'s's", "a's's"])
@given(st.lists(st.text(alphabet="as '\u2019-,.1\n", max_size=30), min_size=1, max_size=20))
def test_every_ngram_occurs(texts: list[str]) -> None:
    candidates = pmi_ngrams(texts, threshold=0.0, min_count=1)
    spaced = [" " + " ".join(text.split()) for text in texts]
    for candidate in candidates:
        assert any(candidate.strip() in text for text in spaced)


def test_too_few_candidates() -> None:
    with pytest.raises(DataError, match="training text: has 1 candidates"):
        build_vocabulary(PmiVocabulary(), ["word word"])
    with pytest.raises(DataError, match="has 0 candidates"):
        build_vocabulary(PmiVocabulary(), [])
    long = "x" * 200  # 201 characters with its space
    assert build_vocabulary(PmiVocabulary(), [f"a b {long}"]).candidates == (" a", " b")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("v.txt", " the\n not so\n,\n"),
        ("v.txt", "\ufeff the\r\n not so\r\n,"),
        ("v.json", json.dumps([" the", " not so", ","])),
    ],
)
def test_files(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(content.encode())
    spec = FileVocabulary(path=name)
    assert build_vocabulary(spec, [], tmp_path).candidates == (" the", " not so", ",")
    short = FileVocabulary(path=str(tmp_path / name), blank=True)
    assert build_vocabulary(short, [], "elsewhere").candidates == ("", " the", " not so", ",")


def test_file_lines_are_verbatim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v.txt").write_text("a \n\n\tb\u2028c\n", encoding="utf-8")
    expected = ("a ", "", "\tb\u2028c")
    assert build_vocabulary(FileVocabulary(path="v.txt"), [], tmp_path).candidates == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    blank = build_vocabulary(FileVocabulary(path="~/v.txt", blank=True), [], "elsewhere")
    assert blank.candidates == ("", "a ", "\tb\u2028c")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.txt", b"a\nb\na\n", r"v\.txt: candidates: 'a' is repeated: candidates 0 and 2"),
        ("v.txt", b"a\n" + b"b" * 4001, r"v\.txt: candidates: number 1: .*at most 4000"),
        ("v.txt", b"a\n", r"v\.txt: has 1 candidates"),
        ("v.txt", b"\xff\n", r"v\.txt: is not UTF-8 text"),
        ("v.json", b"[", r"v\.json: bad JSON"),
        ("v.json", b"[1, 2]", r"v\.json: must be a JSON array of texts"),
        ("v.json", b'{"words": []}', r"v\.json: must be a JSON array of texts"),
        ("v.json", b"3", r"v\.json: must be a JSON array of texts"),
    ],
)
def test_malformed_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        build_vocabulary(FileVocabulary(path=name), [], tmp_path)
    with pytest.raises(DataError, match=r"absent: cannot be read"):
        build_vocabulary(FileVocabulary(path="absent"), [], tmp_path)
