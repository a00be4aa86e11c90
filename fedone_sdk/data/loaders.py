"""Reading of labelled rows from files and from the Hugging Face hub."""

from __future__ import annotations

import codecs
import csv
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedone_sdk.data.columns import MAX_LABELS, NAMES
from fedone_sdk.errors import DataError, needs_extra, system_errors
from fedone_sdk.files import user_path

_DELIMITERS = ",;\t|"
_MAX_CELL_CHARS = 2**20
_UNKNOWN = "neither UTF-8 nor Windows-1252 text; save the file as UTF-8"
_HUB_NAME = re.compile(r"hf:([\w.-]+)/([\w.-]+)(?:/([\w.-]+))?")

_MISFITS = {"none": re.compile(r'".+"', re.DOTALL), "doubled": re.compile(r' +"[^"]*"')}
"""For a format of cells, a pattern: a cell that matches it shows that the file has another."""

_Row = dict[str, Any]
_Rows = Generator[_Row]
_Records = list[tuple[int, list[str]]]
"""Records of a table, each with the number of its last line."""


def load_examples(
    source: str | Path, *, split: str = "train", folder: str | Path = ""
) -> list[dict[str, Any]]:
    """Read labelled rows.

    The encoding of CSV and TSV is UTF-8, UTF-16 with a byte order mark, or Windows-1252. The
    delimiter is a comma, semicolon, tab or vertical bar. These formats of cells are tried:
    quotes as in RFC 4180, quotes after spaces, escaped quotes, no quotes. The first in which every
    record has as many cells as the header is used. If the delimiter is a tab, the format with the
    most records is used. Without a header, columns are called ``column1`` ... Empty cells after the
    last named column are dropped.

    Args:
        source: A file (``.jsonl``, ``.ndjson``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``); or
            ``hf:glue/TASK``, or ``hf:ORG/NAME`` with an optional ``/CONFIG``.
        split: The split of a data set on the hub; for files it has no effect.
        folder: The folder of relative paths.

    Returns:
        One dictionary per row. CSV and TSV values are text.

    Raises:
        DataError: The source is empty or malformed; the error names the file and the line.
        MissingExtraError: Parquet or the hub needs a package that is not installed.
    """
    is_on_hub = str(source).startswith("hf:")
    name = str(source if is_on_hub else Path(folder, user_path(source)))
    with system_errors(DataError, f"{name}: cannot be read"):
        examples = list(_hub_rows(name, split) if is_on_hub else _file_rows(Path(name)))
    if not examples:
        raise DataError(f"{name}: has no rows")
    return examples


def _file_rows(path: Path) -> Iterable[_Row]:
    if (read := _READERS.get(path.suffix.lower())) is None:
        allowed = ", ".join(_READERS)
        raise DataError(f"{path}: unknown suffix {path.suffix!r} (allowed: {allowed}, or hf:NAME)")
    return read(path)


def _text(path: Path, *, is_table: bool = False) -> str:
    """Return the text of a file in UTF-8; tables may also be in UTF-16 or in Windows-1252."""
    content = path.read_bytes()
    is_utf16 = is_table and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        # Programs that add to a file may leave a second byte order mark.
        return content.decode("utf-16" if is_utf16 else "utf-8").lstrip("\ufeff")
    except UnicodeDecodeError as exc:
        # In Windows-1252 text, most non-ASCII bytes stand alone, and few of them are UTF-8.
        runs = re.findall(rb"[\x80-\xff]+", content)
        in_utf8 = re.findall(r"[^\0-\x7f]", content.decode(errors="ignore"))
        if is_table and max(sum(map(len, runs)), 4 * len(in_utf8)) <= 2 * len(runs):
            with suppress(UnicodeDecodeError):
                return content.decode("cp1252")
        line = content.count(b"\n", 0, exc.start) + 1
        raise DataError(f"{path}:{line}: is {_UNKNOWN if is_table else 'not UTF-8 text'}") from exc


def _jsonl(path: Path) -> _Rows:
    # Split at line feeds only: `splitlines` would also split at U+2028 within a text.
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            yield _as_row(_parse_json(line.rstrip("\r"), path, number), f"{path}:{number}")


def _json(path: Path) -> _Rows:
    rows = _parse_json(_text(path).rstrip() or "[]", path, 1)
    if not isinstance(rows, list):
        raise DataError(f"{path}: is {_kind(rows)}, not a JSON array of objects")
    for number, row in enumerate(rows, 1):
        yield _as_row(row, f"{path}: row {number}")


def _parse_json(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        hint = " (one object per line? name it .jsonl)" if path.suffix.lower() == ".json" else ""
        where = f"{path}:{first_line + exc.lineno - 1}"
        raise DataError(
            f"{where}: bad JSON: {exc.msg.removesuffix(' at')} at column {exc.colno}{hint}"
        ) from exc
    except (ValueError, RecursionError) as exc:  # a number or nesting beyond Python's limits
        raise DataError(f"{path}:{first_line}: bad JSON: {exc}") from exc


def _as_row(value: Any, where: str) -> _Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: is {_kind(value)}, not a JSON object")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _table(path: Path) -> list[_Row]:
    text = _text(path, is_table=True)
    if named := re.match(r"sep=(.)\r?\n", text):  # Some spreadsheets begin with this line.
        text = text[named.end() :]
    first = text.partition("\n")[0]
    if "\0" in first:  # UTF-16 without a byte order mark, UTF-32, or no text.
        raise DataError(f"{path}:1: is {_UNKNOWN}")
    delimiters = sorted(_DELIMITERS, key=first.count, reverse=True)
    if path.suffix.lower() == ".tsv":
        delimiters = ["\t", *delimiters]
    problems: list[DataError] = []
    for delimiter in [mark for mark in delimiters if mark in first] or delimiters[:1]:
        tables: list[list[_Row]] = []
        for quoting in ("doubled", "spaced", "escaped", "none"):
            try:
                tables.append(_table_rows(path, _records(path, text, delimiter, quoting)))
            except DataError as exc:
                problems.append(exc)
            if tables and (delimiter != "\t" or "\t" not in first):
                break
        if tables:  # Two unbalanced quotes would join the lines between them.
            return max(tables, key=len)
    raise problems[0]


def _records(path: Path, text: str, delimiter: str, quoting: str) -> _Records:
    # Records end at line feeds; the csv module would also end them at lone carriage returns.
    lines = text.removesuffix("\n").split("\n" if "\n" in text else "\r")
    if quoting == "none":
        split = ((at, line.rstrip("\r").split(delimiter)) for at, line in enumerate(lines, 1))
        records = [(number, record) for number, record in split if record != [""]]
    else:
        csv.field_size_limit(_MAX_CELL_CHARS)
        reader = csv.reader(
            (f"{line}\n" for line in lines),
            delimiter=delimiter,
            escapechar="\\" if quoting == "escaped" else None,
            skipinitialspace=quoting == "spaced",
            strict=True,
        )
        try:
            records = [(reader.line_num, record) for record in reader if record not in ([], [""])]
        except csv.Error as exc:
            raise DataError(f"{path}:{reader.line_num}: bad CSV: {exc}") from exc
    misfit, cells = _MISFITS.get(quoting), (cell for _, record in records for cell in record)
    if misfit is not None and delimiter != "\t" and any(map(misfit.fullmatch, cells)):
        raise DataError(f"{path}: some cells are quoted, others are not")
    return records


def _table_rows(path: Path, records: _Records) -> list[_Row]:
    if not records:
        return []
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
    return [dict(zip(header, record, strict=True)) for record in data]


def _is_data(header: Sequence[str], data: Sequence[Sequence[str]]) -> bool:
    """Return whether the first record is data: a cell is repeated in its column, like a label."""
    if any(name.casefold() in NAMES for name in header):
        return False
    columns = [(name, Counter(column)) for name, *column in zip(header, *data, strict=True)]
    most = min(MAX_LABELS, len(data) // 2)
    return any(name and counts[name] > 1 and len(counts) <= most for name, counts in columns)


def _parquet(path: Path) -> _Rows:
    arrow, parquet = (_import(name, "reading Parquet") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except arrow.ArrowException as exc:
        raise DataError(f"{path}: cannot be read as Parquet: {exc}") from exc


def _hub_rows(source: str, split: str) -> _Rows:
    if (match := _HUB_NAME.fullmatch(source)) is None:
        raise DataError(f"{source}: must be hf:glue/TASK, hf:ORG/NAME or hf:ORG/NAME/CONFIG")
    owner, name, config = match.groups()
    if owner == "glue" and config is None:
        owner, name, config = "nyu-mll", "glue", name
    datasets = _import("datasets", "reading the Hugging Face hub")
    try:
        yield from map(dict, datasets.load_dataset(f"{owner}/{name}", config, split=split))
    except Exception as exc:  # `load_dataset` raises the exceptions of several libraries.
        raise DataError(f"{source} (split {split!r}): {exc}") from exc


def _import(module: str, feature: str) -> Any:
    with needs_extra(feature, "data"):
        return importlib.import_module(module)


_READERS: dict[str, Callable[[Path], Iterable[_Row]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
