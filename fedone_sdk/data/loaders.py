"""Reading of labelled rows from files and from the Hugging Face hub."""

from __future__ import annotations

import codecs
import importlib
import json
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from fedone_sdk.data.tables import read_table
from fedone_sdk.errors import DataError, needs_extra, system_errors

_HUB_NAME = re.compile(r"hf:([\w.-]+)/([\w.-]+)(?:/([\w.-]+))?")

_Row = dict[str, Any]
_Rows = Generator[_Row]


def load_examples(
    source: str | Path, *, split: str = "train", folder: str | Path = ""
) -> list[dict[str, Any]]:
    """Read labelled rows.

    Args:
        source: A file (``.jsonl``, ``.ndjson``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``); or
            ``hf:glue/TASK``, or ``hf:ORG/NAME`` with an optional ``/CONFIG``.
        split: The split of a hub data set; a file has only one.
        folder: Base of a relative path.

    Returns:
        One dictionary per row. CSV and TSV values are text (`read_table`).

    Raises:
        DataError: The source is empty or malformed; names the file and the line.
        MissingExtraError: Parquet or the hub needs a package that is not installed.
    """
    is_on_hub = str(source).startswith("hf:")
    name = str(source if is_on_hub else Path(folder, source))
    rows = _hub_rows(name, split) if is_on_hub else _file_rows(Path(name))
    with system_errors(DataError, f"{name}: cannot be read"):
        examples = list(rows)
    if not examples:
        raise DataError(f"{name}: has no rows")
    return examples


def _file_rows(path: Path) -> Iterator[_Row]:
    read = _READERS.get(path.suffix.lower())
    if read is None:
        allowed = ", ".join(_READERS)
        raise DataError(f"{path}: unknown suffix {path.suffix!r} (allowed: {allowed}, or hf:NAME)")
    return read(path)


def _text(path: Path) -> str:
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise DataError(f"{path}:{line}: is not UTF-8 text") from exc


def _jsonl(path: Path) -> _Rows:
    # Only a line feed ends a line: text may contain U+2028.
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            yield _as_row(_parse_json(line.rstrip("\r"), path, number), f"{path}:{number}")


def _json(path: Path) -> _Rows:
    text = _text(path)
    if not text.strip():
        return
    rows = _parse_json(text, path, 1)
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
        raise DataError(f"{where}: bad JSON: {exc.msg} at column {exc.colno}{hint}") from exc
    except (ValueError, RecursionError) as exc:  # a number or nesting beyond Python's limits
        raise DataError(f"{path}:{first_line}: bad JSON: {exc}") from exc


def _as_row(value: Any, where: str) -> _Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: is {_kind(value)}, not a JSON object")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _parquet(path: Path) -> _Rows:
    arrow = _import("pyarrow", "reading Parquet")
    parquet = _import("pyarrow.parquet", "reading Parquet")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except arrow.ArrowException as exc:
        raise DataError(f"{path}: cannot be read as Parquet: {exc}") from exc


def _hub_rows(source: str, split: str) -> _Rows:
    match = _HUB_NAME.fullmatch(source)
    if match is None:
        raise DataError(f"{source}: must be hf:glue/TASK, hf:ORG/NAME or hf:ORG/NAME/CONFIG")
    owner, name, config = match.groups()
    if owner == "glue" and config is None:
        owner, name, config = "nyu-mll", "glue", name
    datasets = _import("datasets", "reading the Hugging Face hub")
    try:
        rows = datasets.load_dataset(f"{owner}/{name}", config, split=split)
        for row in rows:
            yield dict(row)
    except Exception as exc:  # it raises the exceptions of several libraries
        raise DataError(f"{source} (split {split!r}): {exc}") from exc


def _import(module: str, feature: str) -> Any:
    with needs_extra(feature, "data"):
        return importlib.import_module(module)


_READERS: dict[str, Callable[[Path], Iterator[_Row]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": read_table,
    ".tsv": read_table,
    ".parquet": _parquet,
}
