"""Import of the state files of versions before the database."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from fedone_sdk.client.device_state import Change, change
from fedone_sdk.client.identity import check_secrets

_log = structlog.get_logger(__name__)

PRIVACY_FILE = "privacy.json"

_DAMAGE = (ValueError, TypeError, KeyError, RecursionError)


def import_files(db: sqlite3.Connection, folder: Path, server: str) -> None:
    """Import the state files of a server, and remove them.

    Files of an import that was cut off are imported again; a row that exists is kept. A damaged
    count of epsilon stays where it is, because it must not be lost.

    Raises:
        OSError: A file cannot be read or removed.
        sqlite3.Error: The database cannot be written.
    """
    own = folder / hashlib.sha256(server.encode()).hexdigest()[:16]
    found = [file for file in (folder / PRIVACY_FILE, own / "identity.json") if file.exists()]
    for pattern in ("unsent-*.json", "journal-*.jsonl", "*.memory"):
        # The oldest first, as the rows of the database.
        found += sorted(own.glob(pattern), key=lambda file: file.stat().st_mtime_ns)
    done = []
    with db:
        if found:
            db.execute("BEGIN IMMEDIATE")
        for file in found:
            try:
                for statement, values in [*_rows(file)]:
                    db.execute(statement, {"server": server, **values})
                done.append(file)
            except _DAMAGE as exc:
                _log.warning("damaged state file", file=str(file), error=type(exc).__name__)
                if file.name == "identity.json":
                    file.replace(f"{file}.damaged")
                elif file.name != PRIVACY_FILE:
                    done.append(file)
    for file in done:
        file.unlink()
    if done and own.is_dir() and not any(own.iterdir()):
        own.rmdir()


def _rows(file: Path) -> Iterator[Change]:
    content = file.read_bytes()
    if file.suffix == ".memory":
        yield change(
            "INSERT OR IGNORE INTO memory VALUES (:server, :run_id, :content)",
            run_id=file.stem,
            content=content,
        )
    elif file.suffix == ".jsonl":
        yield from _journal(file.stem.removeprefix("journal-"), content)
    elif file.name == PRIVACY_FILE:
        kept = json.loads(content)
        for target in ("losses", "alpha"):
            precision = float(kept[target])
            if not 0 <= precision < math.inf:
                raise ValueError("not a count")
            yield change(
                "INSERT INTO privacy VALUES (:target, :precision) ON CONFLICT DO UPDATE "
                "SET precision = max(precision, excluded.precision)",
                target=target,
                precision=precision,
            )
    elif file.name == "identity.json":
        kept = json.loads(content)
        names = ("client_id", "credential", "nonce", "private_key")
        found = {name: _text(kept[name]) for name in names}
        check_secrets(found["credential"], found["private_key"])
        yield change(
            "INSERT OR IGNORE INTO identity VALUES "
            "(:server, :client_id, :credential, :nonce, :private_key)",
            **found,
        )
    else:
        kept = json.loads(content)
        yield change(
            # Whether it has noise is not known.
            "INSERT OR IGNORE INTO unsent VALUES "
            "(:server, :assignment_id, :run_id, :round, TRUE, :body, :memory)",
            assignment_id=str(kept["assignment_id"]),
            run_id=str(kept["run_id"]),
            round=int(kept["round"]),
            body=str(kept["update"]),
            memory=base64.b64decode(kept["memory"], validate=True),
        )


def _journal(assignment_id: str, content: bytes) -> Iterator[Change]:
    for line in content.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("cut off")
            yield _entry(assignment_id, json.loads(line))
        except _DAMAGE as exc:
            _log.warning("damaged journal line dropped", error=type(exc).__name__)
            return


def _entry(assignment_id: str, entry: dict[str, Any]) -> Change:
    kind = "losses" if "row" in entry else "noised" if "released" in entry else "charge"
    value = {"losses": entry, "noised": entry.get("released"), "charge": entry.get("spent")}[kind]
    return change(
        # Of a step's charges the last one counts.
        "INSERT OR REPLACE INTO journal VALUES (:server, :assignment_id, :kind, :key, :value)",
        assignment_id=assignment_id,
        kind=kind,
        key=str(entry["key" if kind == "losses" else "step"]),
        value=json.dumps(value),
    )


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError("not text")
    return value
