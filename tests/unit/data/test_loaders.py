"""Loaders: every format gives the same rows, every error is one clear line."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedone_paper.glue import glue_task
from fedone_sdk.data import check_examples, load_examples
from fedone_sdk.errors import DataError, MissingExtraError
from fedone_sdk.task import TaskSpec

SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).parents[4] / "shared"))
ROWS = [{"sentence": 'a "fine" film, really', "label": 1}, {"sentence": "sép\u2028aré", "label": 0}]

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".JSONL"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_jsonl(write: Write, suffix: str, ending: str, bom: bytes) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path = write(f"rows{suffix}", bom + (ending.join([*lines, ""]) + ending).encode())
    assert load_examples(path) == ROWS
    assert load_examples(str(path)) == ROWS


def test_json_array(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_examples(write("rows.json", json.dumps(ROWS))) == ROWS
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_examples("~/rows.json", folder="elsewhere") == ROWS
    assert load_examples(write("bom.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode())) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rows.csv", 'sentence,label\r\n"a ""fine"" film,\nreally",1\r\n\r\nplain,0\r\n',
         ['a "fine" film,\nreally', "plain"]),
        ("rows.tsv",
         '\ufeff\ufeffsentence\tlabel\n"unbalanced\t1\nreturn\rinside\t0\nquotes"\t-1\n',
         ['"unbalanced', "return\rinside", 'quotes"']),
        ("spaced.csv", 'label, sentence\n1, "a, b"\n', ["a, b"]),
        ("old.csv", "label,sentence\n1,„Spaß“ mit Zoë\n".encode("cp1252"), ["„Spaß“ mit Zoë"]),
    ],
)  # fmt: skip
def test_csv_has_quoting_and_tsv_has_none(
    write: Write, name: str, content: str | bytes, text: list[str]
) -> None:
    rows = [{"sentence": sentence, "label": str(1 - at)} for at, sentence in enumerate(text)]
    assert load_examples(write(name, content)) == rows


def test_one_column_has_quoting(write: Write) -> None:
    assert load_examples(write("x.tsv", 'text\n"a"\n"b\nc"\n')) == [{"text": "a"}, {"text": "b\nc"}]


def test_parquet(tmp_path: Path, write: Write) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    assert load_examples(path) == ROWS
    with pytest.raises(DataError, match=r"bad\.parquet: cannot be read as Parquet"):
        load_examples(write("bad.parquet", "no parquet"))
    with pytest.raises(DataError, match="cannot be read"):
        load_examples(tmp_path / "absent.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n{"a": "', r"x\.jsonl:2: bad JSON: .* starting at column 7"),
        ("x.jsonl", '{"a": 1}\n\n[1]\n', r"x\.jsonl:3: is an array, not a JSON object"),
        ("x.jsonl", "null\n", r"x\.jsonl:1: is null, not a JSON object"),
        ("x.jsonl", "[" * 100_000, r"x\.jsonl:1: bad JSON"),
        ("x.jsonl", '{"a": ' + "9" * 5000 + "}", r"x\.jsonl:1: bad JSON"),
        ("x.jsonl", "", r"x\.jsonl: has no rows"),
        ("x.jsonl", "\n \n", r"x\.jsonl: has no rows"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"x\.jsonl:2: is not UTF-8 text"),
        ("x.jsonl", b"\xff\xfe{\x00}\x00", r"x\.jsonl:1: is not UTF-8 text"),
        ("x.json", '[{"a": 1},\n {"a" 2}]', r"x\.json:2: bad JSON: .*column"),
        ("x.json", '{"a": 1}\n{"a": 2}', r"x\.json:2: bad JSON: Extra data.*name it \.jsonl"),
        ("x.json", '{"a": 1}', r"x\.json: is an object, not a JSON array"),
        ("x.json", '[{"a": 1}, 2]', r"x\.json: row 2: is a number, not a JSON object"),
        ("x.json", "[]", r"x\.json: has no rows"),
        ("x.json", " ", r"x\.json: has no rows"),
        ("x.json", b'[\n"\xff"]', r"x\.json:2: is not UTF-8 text"),
        ("x.csv", "a,b\n1,2\n1,2,3\n", r"x\.csv:3: has 3 columns, the header has 2"),
        ("x.csv", 'a,b\n"1","open\n', r"x\.csv:2: bad CSV"),
        ("x.csv", "a,b,a\n1,2,3\n", r"x\.csv:1: two columns share one name"),
        ("x.csv", "a,b\n", r"x\.csv: has no rows"),
        ("x.csv", "a,b\nfür,1\nnaïv,2\n".encode() + b"\xff,1", r"x\.csv:4: is neither UTF-8 nor"),
        ("x.csv", "a,b\n1,2\n".encode("utf-16-le"), r"x\.csv:1: is neither UTF-8 nor"),
        ("x.tsv", "a\tb\nonly\n", r"x\.tsv:2: has 1 columns, the header has 2"),
        ("x.txt", "a", r"x\.txt: unknown suffix '\.txt' \(allowed: \.jsonl, .*\.parquet"),
    ],
)
def test_malformed_files(write: Write, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_examples(write(name, content))


def test_unreadable_files(tmp_path: Path) -> None:
    for suffix in ("jsonl", "json", "csv"):
        with pytest.raises(DataError, match=rf"absent\.{suffix}: cannot be read: No such file"):
            load_examples(tmp_path / f"absent.{suffix}")
        (tmp_path / f"folder.{suffix}").mkdir()
        with pytest.raises(DataError, match=rf"folder\.{suffix}: cannot be read"):
            load_examples(tmp_path / f"folder.{suffix}")


def test_missing_extras(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (write("x.parquet", "x"), "hf:glue/sst2"):
        with pytest.raises(MissingExtraError, match=r"pip install .*pyarrow") as caught:
            load_examples(source)
        assert caught.value.extra == "data"


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf:glue/sst2", ("nyu-mll/glue", "sst2")),
        ("hf:org/some.name", ("org/some.name", None)),
        ("hf:nyu-mll/glue/rte", ("nyu-mll/glue", "rte")),
    ],
)
def test_hub(monkeypatch: pytest.MonkeyPatch, source: str, asked: tuple[str, str | None]) -> None:
    calls: list[Any] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> list[dict[str, Any]]:
        calls.append((path, name, split))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_examples(source, split="validation") == ROWS
    assert calls == [(*asked, "validation")]


def test_hub_failures_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("the hub is away")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"hf:a/b \(split 'train'\): the hub is away") as caught:
        load_examples("hf:a/b")
    assert isinstance(caught.value.__cause__, ConnectionError)
    with pytest.raises(DataError, match="must be hf:"):
        load_examples("hf:just-a-name")


SST2 = glue_task("sst2")


def test_check_accepts_text_labels() -> None:
    check_examples(SST2, [{"sentence": "a", "label": "1", "more": None}], "x.csv")
    check_examples(SST2, ROWS, "x.jsonl")
    task = TaskSpec(template="{prompt} {a}", labels={"x": " x", "y": " y"}, label_field="gold")
    check_examples(task, [{"a": "", "gold": "x"}], "x.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "label": 1}, r"'sentence' is missing \(the row has: text, label\)"),
        ({"sentence": 3, "label": 1}, "'sentence' is int; it must be text"),
        ({"sentence": None, "label": 1}, "'sentence' is NoneType; it must be text"),
        ({"sentence": "\ud800", "label": 1}, "'sentence' has half of a surrogate pair"),
        ({"sentence": "a"}, r"'label' is missing \(the row has: sentence\)"),
        ({"sentence": "a", "label": "1.5"}, "'label' is '1.5', not one of: 0, 1"),
        ({"sentence": "a", "label": -1}, "'label' is -1, not one of: 0, 1"),
        ({}, r"'sentence' is missing \(the row has: nothing\)"),
    ],
)
def test_check_names_row_and_field(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl: row 3: field {message}"):
        check_examples(SST2, [*ROWS, row], "x.jsonl")


UNUSABLE = "cannot be used by task.score: column 'gold'"


@pytest.mark.parametrize(
    ("score", "gold", "problem"),
    [
        ("exact_match", {}, "is missing (the row has: a)"),
        ("number", {"gold": "ten"}, f"{UNUSABLE} has no number"),
        ("exact_match", {"gold": None}, f"{UNUSABLE} must have the expected text, or a list"),
        ("contains", {"gold": []}, UNUSABLE),
        ("rouge_l", {"gold": {}}, UNUSABLE),
        ("json_fields", {"gold": "{"}, f"{UNUSABLE} must have the expected JSON object"),
        ("json_fields", {"gold": 1}, UNUSABLE),
    ],
)
def test_check_reads_references(score: Any, gold: dict[str, Any], problem: str) -> None:
    task = TaskSpec(template="{prompt} {a}", loss="score", score=score, label_field="gold")
    with pytest.raises(DataError, match=re.escape(f"x.jsonl: row 1: field 'gold' {problem}")):
        check_examples(task, [{"a": "", **gold}], "x.jsonl")
    without = task.model_copy(update={"score": {"regex": {"pattern": "x"}}})
    check_examples(without, [{"a": ""}], "x.jsonl")


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")
@pytest.mark.parametrize("name", ["sst2", "cola", "mrpc", "rte", "qnli", "qqp", "mnli"])
def test_real_glue(name: str) -> None:
    path = SHARED / "data" / "glue" / name / "dev.jsonl"
    examples = load_examples(path)
    assert len(examples) >= 277
    check_examples(glue_task(name), examples, path)
