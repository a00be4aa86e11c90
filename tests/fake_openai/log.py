"""The provider's log: one line per request, on disk before the answer is sent."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Received:
    """A request that reached the server; `number` counts billed paths, tokens are as billed."""

    number: int
    path: str
    behaviour: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class Log:
    """Appends lines to a file; each is one `write` to O_APPEND, so that none is torn or lost."""

    def __init__(self, file: str | Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, received: Received) -> None:
        row = {key: value for key, value in asdict(received).items() if key not in _NOT_LOGGED}
        os.write(self._descriptor, (json.dumps(row) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


_NOT_LOGGED = {"body", "headers"}


def read_log(file: str | Path) -> list[Received]:
    """All requests in a log file, in the order in which they came."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return [Received(**json.loads(line)) for line in lines]
