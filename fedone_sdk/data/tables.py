"""CSV and TSV files as programs write them: encodings, dialects, and files without a header."""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from fedone_sdk.data.columns import MAX_LABELS, NAMES
from fedone_sdk.errors import DataError

_DELIMITERS = ",;\t|"
_MAX_CELL_CHARS = 2**20
_QUOTED = re.compile(r'".+"', re.DOTALL)

_Quoting = Literal["doubled", "escaped", "none"]
_Records = list[tuple[int, list[str]]]
"""Records of a file, each with the number of its last line."""


def read_table(path: Path) -> Iterator[dict[str, str]]:
    """Read a table with a header, or name its columns ``column1`` ... if it has none.

    The encoding is UTF-8, UTF-16 with a byte order mark, or Windows-1252. The delimiter is a comma,
    semicolon, tab or bar. Texts are quoted as in RFC 4180, or with escaped quotes, or not at all;
    the first form in which all records have as many cells as the header is used. Empty cells after
    the last named column are dropped.

    Raises:
        DataError: No dialect fits; names the file and the line.
    """
    text = decoded(path)
    if named := re.match(r"sep=(.)\r?\n", text):  # The first line of some spreadsheets.
        text = text[named.end() :]
    first = text.partition("\n")[0]
    delimiters = sorted(_DELIMITERS, key=first.count, reverse=True)
    if path.suffix.lower() == ".tsv":
        delimiters = ["\t", *delimiters]
    problem: DataError | None = None
    styles: tuple[_Quoting, ...] = ("doubled", "escaped", "none")
    for delimiter in [mark for mark in delimiters if mark in first] or delimiters[:1]:
        for quoting in styles:
            try:
                return _rows(path, _records(path, text, delimiter, quoting))
            except DataError as exc:
                problem = problem or exc
    assert problem is not None
    raise problem


def decoded(path: Path) -> str:
    """Return the text of a file in UTF-8, UTF-16 with a byte order mark, or Windows-1252."""
    content = path.read_bytes()
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    codec = "utf-16" if content.startswith(marks) else "utf-8-sig"
    try:
        return content.decode(codec)
    except UnicodeDecodeError as exc:
        # Western text has single letters beyond ASCII; longer runs mean another encoding.
        runs = re.findall(rb"[\x80-\xff]+", content)
        if codec == "utf-8-sig" and sum(map(len, runs)) <= 2 * len(runs):
            try:
                return content.decode("cp1252")
            except UnicodeDecodeError:
                pass
        line = content.count(b"\n", 0, exc.start) + 1
        raise DataError(
            f"{path}:{line}: is neither UTF-8 nor Windows-1252 text; save the file as UTF-8"
        ) from exc


def _records(path: Path, text: str, delimiter: str, quoting: _Quoting) -> _Records:
    # A line feed ends a record; csv itself also ends one at a lone carriage return.
    lines = text.removesuffix("\n").split("\n" if "\n" in text else "\r")
    if quoting == "none":
        split = (
            (number, line.rstrip("\r").split(delimiter)) for number, line in enumerate(lines, 1)
        )
        records = [(number, record) for number, record in split if record != [""]]
        cells = (cell for _, record in records for cell in record)
        if delimiter != "\t" and any(map(_QUOTED.fullmatch, cells)):
            raise DataError(f"{path}: some cells are quoted, others are not")
        return records
    csv.field_size_limit(_MAX_CELL_CHARS)
    reader = csv.reader(
        (f"{line}\n" for line in lines),
        delimiter=delimiter,
        escapechar="\\" if quoting == "escaped" else None,
        strict=True,
    )
    try:
        return [(reader.line_num, record) for record in reader if record not in ([], [""])]
    except csv.Error as exc:
        raise DataError(f"{path}:{reader.line_num}: bad CSV: {exc}") from exc


def _rows(path: Path, records: _Records) -> Iterator[dict[str, str]]:
    if not records:
        return iter(())
    number, header = records[0]
    width = max((at for at, name in enumerate(header, 1) if name.strip()), default=0)
    for line, record in records:
        if len(record) < width or any(cell.strip() for cell in record[width:]):
            raise DataError(
                f"{path}:{line}: has {len(record)} columns, the header has {width}; "
                "a text that contains the delimiter needs double quotes"
            )
    header = [name.strip() for name in header[:width]]
    data = [record[:width] for _, record in records[1:]]
    if _is_data(header, data):
        data.insert(0, header)
        header = [f"column{at}" for at in range(1, width + 1)]
    if len(set(header)) < width:
        raise DataError(f"{path}:{number}: two columns share one name in the header {header}")
    return (dict(zip(header, record, strict=True)) for record in data)


def _is_data(header: Sequence[str], data: Sequence[Sequence[str]]) -> bool:
    """Return whether the first record is data: a cell is a label that other records have, too."""
    if any(name.casefold() in NAMES for name in header):
        return False
    for name, *column in zip(header, *data, strict=True):
        counts = Counter(column)
        if name and counts[name] > 1 and len(counts) <= min(MAX_LABELS, len(column) // 2):
            return True
    return False
