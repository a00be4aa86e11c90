"""Tables as people export them: dialects, encodings and forms of labels, to be combined."""

from __future__ import annotations

import csv
import io
import json
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Record = tuple[str, ...]

_OPENERS = ("Hello,", "Good morning;", "To whom it may concern:", "Hi -", "One question:")
_SUBJECTS = {
    0: ("the delivery was late", "my parcel is lost", "the courier never came", "wrong address"),
    1: ("the invoice is wrong", "I was charged twice", "please refund me", "the price is too high"),
    2: ("the app crashes", "I cannot log in", "the screen stays black", "the update fails"),
    3: ("great service", "thank you so much", "I love the café", "a wonderful naïve design"),
}
_CLOSERS = ('they said "soon"', "best, Zoë", "since 5|6 May; really", "what now?", "it's\tbad")


@dataclass(frozen=True, slots=True)
class Labels:
    """How each class is written in a table, in turn, and the label that `init` should find."""

    written: Sequence[Sequence[str]]
    meant: Sequence[str]
    blanks: int = 0
    named: Sequence[str] = ()


def _plain(*names: str, blanks: int = 0, named: Sequence[str] = ()) -> Labels:
    return Labels([(name,) for name in names], names, blanks, named)


_NFD = unicodedata.normalize("NFD", "Rückgabe")
_INTENTS = (
    *("card_arrival", "card_linking", "exchange_rate", "cash_withdrawal", "lost_phone", "refund"),
    *("top_up_failed", "verify_identity", "atm_support", "age_limit", "new_pin", "fee"),
)
LABELS: Mapping[str, Labels] = {
    "names": _plain("negative", "positive"),
    "spam": _plain("ham", "spam", blanks=2),
    "numbers": _plain("0", "1"),
    "floats": Labels([("0", "0.0"), ("1", "1.0", "1.0")], ("0", "1.0")),
    "case": Labels([("HAM", "HAM", "ham"), ("Spam ", "Spam", "SPAM")], ("HAM", "Spam")),
    "yes_no": _plain("NO", "yes"),
    "truth": _plain("true", "false", blanks=1),
    "umlauts": Labels([("Rückgabe", "Rückgabe", _NFD), ("Lieferung",)], ("Rückgabe", "Lieferung")),
    "stars": _plain("1", "2", "3", "4", "5"),
    "groups": _plain("comp.graphics", "rec.autos", "sci.space", "talk.politics", blanks=5),
    "coded": _plain("0", "1", "2", named=("World", "Sports", "Business")),
    "intents": _plain(*_INTENTS),
    "codes": _plain(*(f"T{number:02}" for number in range(24))),
    "many": _plain(*(f"product line {number}" for number in range(64))),
}


def records_of(labels: Labels, *, rows: int = 96, seed: int = 0) -> list[Record]:
    """Return a header and rows: an id, a text, the label, and a channel."""
    draw = random.Random(seed)
    rows = max(rows, 5 * len(labels.written))
    named = ("label_text",) if labels.named else ()
    found: list[Record] = [("id", "message", "label", *named, "channel")]
    for number in range(rows):
        at = number % len(labels.written)
        opener, closer = draw.choice(_OPENERS), draw.choice(_CLOSERS)
        text = f"{opener} {draw.choice(_SUBJECTS[at % 4])} {at}, {closer} ({number})"
        spelled = labels.written[at][number // len(labels.written) % len(labels.written[at])]
        name = (labels.named[at],) if labels.named else ()
        found.append((str(number), text, spelled, *name, draw.choice(("web", "phone", ""))))
    for number in range(labels.blanks):
        found.append((str(rows + number), "unlabelled text", "", *named, "web"))
    return found


def _written(delimiter: str = ",", **options: object) -> Callable[[list[Record]], str]:
    def write(records: list[Record]) -> str:
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=delimiter, **options).writerows(records)  # type: ignore[arg-type]
        return text.getvalue()

    return write


def _unquoted(delimiter: str) -> Callable[[list[Record]], str]:
    def write(records: list[Record]) -> str:
        clean = ([cell.replace(delimiter, " ") for cell in record] for record in records)
        return "".join(delimiter.join(record) + "\n" for record in clean)

    return write


def _objects(records: list[Record]) -> list[dict[str, object]]:
    rows = [dict(zip(records[0], record, strict=True)) for record in records[1:]]
    return [{**row, "label": row["label"] or None} for row in rows]


def _multiline(records: list[Record]) -> str:
    head, *rest = records
    return _written()([head, *[(one[0], one[1].replace(" ", "\n", 1), *one[2:]) for one in rest]])


DIALECTS: Mapping[str, tuple[str, Callable[[list[Record]], str]]] = {
    "comma": (".csv", _written()),
    "semicolon": (".csv", _written(";")),
    "bar": (".csv", _written("|")),
    "tab": (".csv", _written("\t")),
    "tsv": (".tsv", _unquoted("\t")),
    "tsv-quoted": (".tsv", _written("\t", quoting=csv.QUOTE_ALL)),
    "all-quoted": (".csv", _written(";", quoting=csv.QUOTE_ALL, lineterminator="\n")),
    "escaped": (".csv", _written(doublequote=False, escapechar="\\", quoting=csv.QUOTE_ALL)),
    "unquoted": (".csv", _unquoted(";")),
    "sep-line": (".csv", lambda records: "sep=;\r\n" + _written(";")(records)),
    "trailing": (".csv", lambda records: _written()([(*one, "", "") for one in records])),
    "multiline": (".csv", _multiline),
    "jsonl": (".jsonl", lambda rows: "\n".join(map(json.dumps, _objects(rows)))),
    "json": (".json", lambda rows: json.dumps(_objects(rows), ensure_ascii=False)),
}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "cp1252")


def write_table(folder: Path, dialect: str, encoding: str, labels: str, *, rows: int = 96) -> Path:
    """Write a table; JSON is always UTF-8."""
    suffix, write = DIALECTS[dialect]
    text = write(records_of(LABELS[labels], rows=rows))
    if suffix.startswith(".json"):
        encoding = "utf-8"
    if encoding == "cp1252":  # has no combining characters
        text = unicodedata.normalize("NFC", text)
    path = folder / f"{dialect}-{encoding}-{labels}{suffix}"
    path.write_bytes(text.encode(encoding))
    return path


COMBINED = [
    (dialect, ENCODINGS[(at + other) // 5 % len(ENCODINGS)], labels)
    for at, labels in enumerate(LABELS)
    for other, dialect in enumerate(DIALECTS)
    if (at + other) % 5 == 3
]
"""40 tables: each form of labels in two or three dialects, each dialect likewise."""
