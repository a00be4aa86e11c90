"""Devices of the package as Node processes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any


class NodeDevice:
    """A device as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []

    async def wait_for(self, kind: str) -> None:
        """Read until an event of this kind.

        Raises:
            AssertionError: It ended before.
        """
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["kind"] == kind:
                return
        raise AssertionError(f"it ended without {kind!r}: {self.events[-5:]}")

    async def ended(self) -> int:
        """Its exit code, once it is over."""
        with suppress(AssertionError):
            await self.wait_for("no such event")
        return await self.process.wait()


@asynccontextmanager
async def node_device(
    package: Path,
    url: str,
    token: str,
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[NodeDevice]:
    """A device with a state folder, killed if it is still there in the end."""
    file = _written(rows, folder)
    process = await asyncio.create_subprocess_exec(
        *("node", package / "dist" / "demo" / "device.js"),
        *(url, file, folder / "state"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "FEDONE_TOKEN": token, **(env or {})},
    )
    try:
        yield NodeDevice(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _written(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
