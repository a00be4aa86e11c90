"""Tables in any dialect, encoding and form of labels go through `init`, `plan` and `tune`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from fedone_sdk.data import load_examples
from fedone_sdk.data.columns import label_columns, labelled, split, text_columns
from fedone_sdk.errors import DataError
from fedone_sdk.spec import RunSpec
from tests.acceptance.tables import COMBINED, DIALECTS, ENCODINGS, LABELS, write_table
from tests.console import Fedone


@pytest.mark.parametrize("labels", LABELS)
def test_every_form_is_read_alike(tmp_path: Path, labels: str) -> None:
    form = LABELS[labels]
    for dialect, encoding in itertools.product(DIALECTS, ENCODINGS):
        rows = load_examples(write_table(tmp_path, dialect, encoding, labels))
        label = label_columns(rows)[0]
        assert label == ("label_text" if form.named else "label"), dialect
        assert text_columns(rows, label)[0] == "message"
        found = labelled(rows, "message", label)
        assert len(found.rows) == len(rows) - form.blanks
        assert {row["label"] for row in found.rows} == {*(form.named or form.meant)}
        assert "Zoë" in "".join(row["text"] for row in found.rows)


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "encoding", "labels"), COMBINED)
def test_a_table_becomes_a_tuned_prompt(
    fedone: Fedone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dialect: str,
    encoding: str,
    labels: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    table = write_table(tmp_path, dialect, encoding, labels)
    outcome = fedone("init", table, "--model", "roberta-mini", "--queries", 6)
    assert outcome.code == 0, outcome.err
    task = RunSpec.load("run.yaml").task
    assert set(task.labels) == {*(LABELS[labels].named or LABELS[labels].meant)}
    for command in (("plan",), ("tune", "--json", "result.json")):
        outcome = fedone(command[0], "run.yaml", *command[1:])
        assert outcome.code == 0, outcome.err
    assert json.loads(Path("result.json").read_bytes())["spent"]["queries"] == 6


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("ham\thi there\nspam\twin now\n" * 4, ["column1", "column2"]),
        ("text,label\n" + "one,a\ntwo,b\n" * 3, ["text", "label"]),
        ("label,text\n" + "label,about labels\nother,about others\n" * 3, ["label", "text"]),
    ],
)
def test_a_header_is_told_from_a_record(tmp_path: Path, content: str, said: list[str]) -> None:
    path = tmp_path / "table.csv"
    path.write_text(content)
    assert list(load_examples(path)[0]) == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,2,3\n", r"t\.csv:2: has 3 columns, the header has 2; a text that contains"),
        ("текст;тема\n" * 3, r"t\.csv:1: is neither UTF-8 nor Windows-1252 text; save"),
    ],
)
def test_an_unreadable_table_is_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode("cp1251"))
    with pytest.raises(DataError, match=said):
        load_examples(path)


def test_rows_without_a_text_or_a_label_are_left_out() -> None:
    rows = [{"note": f"n{number}", "kind": kind} for number, kind in enumerate("ababababcdefghi")]
    rows = [{"note": "no label"}, {"note": "\ud800", "kind": "a"}, {"kind": "a"}, *rows, rows[0]]
    assert label_columns(rows) == ["kind"]
    assert text_columns(rows, "kind") == ["note"]
    found = labelled(rows, "note", "kind")
    rare = "labels with fewer than 3 rows are left out: 'c', 'd', 'e', 'f', 'g', and 2 more"
    lacking = "3 of 19 rows lack a text or a label and are left out"
    assert found.notes == [lacking, "1 of 19 rows repeat another row and are left out", rare]
    parts = split(found.rows)
    assert sorted(row["text"] for part in parts for row in part) == [f"n{at}" for at in range(8)]
    assert all({row["label"] for row in part} == {"a", "b"} for part in parts)


def test_a_column_of_too_few_or_too_many_labels_is_refused() -> None:
    rows = [{"note": f"n{number}", "kind": str(number % 70)} for number in range(280)]
    with pytest.raises(DataError, match=r"column 'kind' has 70 labels .*; 2 to 64 are needed"):
        labelled(rows, "note", "kind")
    with pytest.raises(DataError, match=r"no column can be the label: .*'kind' has 70"):
        label_columns(rows)
    with pytest.raises(DataError, match=r"0 labels .* are needed; 4 of 6 rows repeat another row"):
        labelled([{"note": "a", "kind": at % 2} for at in range(6)], "note", "kind")
