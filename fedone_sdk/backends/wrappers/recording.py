"""Recording of requests and answers to a cassette, for audits and for tests without a model."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, cast

from fedone_sdk.backends._codec import dump, dump_answer, dump_error, dump_query
from fedone_sdk.backends._secrets import without_secrets
from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.wrappers.wrapper import Wrapper
from fedone_sdk.budget import NOTHING
from fedone_sdk.clock import Clock, SystemClock
from fedone_sdk.errors import BackendBlocked, SpecError


class RecordingBackend(Wrapper):
    """Appends one JSON line per request to a file, with the query and its answer or error.

    A line has ``time`` (UTC), ``fingerprint``, the query (``want``, ``label_words``, ``inputs`` as
    [kind, text] pairs, ``references``, ``max_tokens``), and ``answer`` or ``error``. It is written
    before the answer is returned; floats read back exactly. `CassetteBackend` replays it.

    The inputs are private texts, so the file is only readable by its owner. Keys and headers are
    never recorded; text that looks like a key is removed from error messages.

    Processes may share a file, because each line is one append.

    Args:
        inner: The inner backend.
        file: The cassette; created if it does not exist, else appended to.
        clock: Clock for the time of each line.

    Raises:
        SpecError: The file cannot be opened for writing.
    """

    def __init__(self, inner: LLMBackend, file: Path, *, clock: Clock | None = None) -> None:
        super().__init__(inner)
        self._path = file
        self._clock = clock if clock is not None else SystemClock()
        self._unwritten: list[bytes] = []
        try:
            self._file = _opened(file)
        except OSError as exc:
            raise SpecError(f"cannot be opened: {exc.strerror}", source=str(file)) from exc
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="cassette")

    async def score(self, query: Query) -> Answer:
        """Return the inner backend's answer, after it is recorded.

        Raises:
            BackendBlocked: An earlier line cannot be written; this query was not sent.
        """
        if self._unwritten:
            await self._retry()
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(self._clock.now(), UTC).isoformat(),
            "fingerprint": self.fingerprint,
            **dump_query(query),
        }
        try:
            answer = await self.inner.score(query)
        except asyncio.CancelledError as exc:
            self._append({**line, "error": _dump_error(exc)})  # Without waiting.
            raise
        except Exception as exc:
            await self._appended({**line, "error": _dump_error(exc)})
            raise
        await self._appended({**line, "answer": dump_answer(answer)})
        return answer

    async def aclose(self) -> None:
        """Write pending lines, then close the file and the inner backend."""
        try:
            await asyncio.to_thread(self._executor.shutdown)
            self._file.close()
        finally:
            await self.inner.aclose()

    def _append(self, line: dict[str, object]) -> Future[None]:
        return self._executor.submit(self._write, line)

    async def _appended(self, line: dict[str, object]) -> None:
        # The answer is paid, so a full disk must not lose it. The next query raises the error.
        with suppress(OSError):
            await asyncio.shield(asyncio.wrap_future(self._append(line)))

    async def _retry(self) -> None:
        try:
            await asyncio.wrap_future(self._executor.submit(self._flush))
        except OSError as exc:
            raise BackendBlocked(
                f"{self._path}: the cassette cannot be written: {exc.strerror}; "
                "free the disk, or run without recording",
                usage=NOTHING,
            ) from exc

    def _write(self, line: dict[str, object]) -> None:
        self._unwritten.append(dump(line) + b"\n")
        self._flush()

    def _flush(self) -> None:
        while self._unwritten:
            written = self._file.write(self._unwritten[0])
            if written < len(self._unwritten[0]):  # The disk is full; the rest is written later.
                self._unwritten[0] = self._unwritten[0][written:]
            else:
                del self._unwritten[0]


def _opened(path: Path) -> BinaryIO:
    file = open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115 (closed by aclose)
    try:
        if path.stat().st_size and not _ends_a_line(path):
            # A crash has truncated the last line; or another process is writing it, which leaves
            # an empty line.
            file.write(b"\n")
    except OSError:
        file.close()
        raise
    return cast(BinaryIO, file)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _dump_error(error: BaseException) -> dict[str, object]:
    # A second safeguard: adapters already remove secrets from their errors.
    return {**dump_error(error), "message": without_secrets(str(error))}
