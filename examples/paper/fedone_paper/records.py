"""Results on disk: one JSON file per trial, written atomically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fedone_sdk
from fedone_paper.experiment import Result, Trial, Workspace
from fedone_sdk.errors import ArgumentError
from fedone_sdk.files import replace_file

_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A trial that was run, as its file has it.

    Attributes:
        key: The trial's key.
        function: The name of its function.
        options: Its options, the seed among them.
        inputs: Digests of its inputs by name.
        version: Of the SDK that ran it.
        wall_s: How long it took, seconds.
        result: Its result.
    """

    key: str
    function: str
    options: dict[str, Any]
    inputs: dict[str, str]
    version: str
    wall_s: float
    result: Result

    @property
    def identity(self) -> str:
        """What a trial must have in common with it."""
        return _canonical(self.function, self.options, self.inputs)


class Records:
    """The results of the experiment `name`, in its folder of `out`.

    Workspaces are shared: a trial of the same function, options and inputs finds the answers that
    a trial of another experiment has paid.
    """

    def __init__(self, out: Path, name: str) -> None:
        self._out = out
        self._name = name

    def find(self, trial: Trial) -> Record | None:
        """Return the record with the same function, options and contents of inputs.

        Raises:
            SpecError: An input cannot be read.
        """
        identity = _identity(trial)
        for file in self._file(trial), self._set_aside(trial, identity):
            record = _read(file)
            if record is not None and record.identity == identity:
                return record
        return None

    def keep(self, trial: Trial, result: Result, wall_s: float) -> Record:
        """Write a trial's result.

        A result with other options (a quick run, another model) under the same key is set aside:
        it may have taken hours, and `find` returns it for those options.

        Raises:
            TypeError: The result holds what JSON does not.
            ValueError: It holds a number that JSON does not (NaN, infinity).
        """
        record = Record(
            key=trial.key,
            function=_name(trial),
            options=trial.options,
            inputs=_digests(trial.inputs),
            version=fedone_sdk.__version__,
            wall_s=round(wall_s, 3),
            result=result,
        )
        text = json.dumps(asdict(record), indent=1, ensure_ascii=False, allow_nan=False)
        before = _read(self._file(trial))
        if before is not None and before.identity != record.identity:
            with suppress(FileNotFoundError):  # another process was faster
                self._file(trial).replace(self._set_aside(trial, before.identity))
        write_whole(self._file(trial), text + "\n")
        self._failure_file(trial).unlink(missing_ok=True)
        return record

    def keep_failure(self, trial: Trial, text: str) -> None:
        """Write why a trial failed."""
        write_whole(self._failure_file(trial), text)

    def workspace(self, trial: Trial) -> Workspace:
        """Where the trial works; the same place for the same trial."""
        digest = _short(_identity(trial))
        inputs = {name: path.absolute() for name, path in trial.inputs.items()}
        return Workspace(inputs=inputs, folder=(self._out / "answers" / digest).absolute())

    def _file(self, trial: Trial) -> Path:
        return self._out / (trial.home or self._name) / "trials" / f"{trial.key}.json"

    def _set_aside(self, trial: Trial, identity: str) -> Path:
        return self._file(trial).with_name(f"{trial.key}~{_short(identity)}.json")

    def _failure_file(self, trial: Trial) -> Path:
        return self._file(trial).with_suffix(".failed.txt")


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file atomically, and create the folders above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, content.encode() if isinstance(content, str) else content)


def _read(file: Path) -> Record | None:
    """Return a record; None if the file is missing or no record."""
    try:
        return Record(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _short(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def _name(trial: Trial) -> str:
    return trial.function or f"{trial.run.__module__}:{trial.run.__qualname__}"


def _identity(trial: Trial) -> str:
    return _canonical(_name(trial), trial.options, _digests(trial.inputs))


def _canonical(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def _digests(inputs: Mapping[str, Path]) -> dict[str, str]:
    return {name: _digest(path) for name, path in inputs.items()}


def _digest(path: Path) -> str:
    """Return the digest of a file, or of all files in a folder with their names."""
    try:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        total = hashlib.sha256()
        for file in files:
            stat = file.stat()
            name = file.relative_to(path).as_posix()
            content = _file_digest(file, stat.st_size, stat.st_mtime_ns)
            total.update(f"{name}\0{content}\n".encode())
    except OSError as exc:
        raise ArgumentError(f"{path}: cannot be read: {exc.strerror}") from exc
    return total.hexdigest()[:_DIGITS]


@cache
def _file_digest(file: Path, size: int, mtime_ns: int) -> str:
    """Return the digest of a file, cached until the file changes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
