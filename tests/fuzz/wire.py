"""HTTP/1.1 by hand: sends any bytes, reads an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip()

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Wire:
    """Connections to a server, one for each call."""

    def __init__(self, host: str, port: int, *, patience_s: float = 20.0) -> None:
        self._address = (host, port)
        self._patience_s = patience_s

    async def ask(self, data: bytes, *, more_follows_s: float | None = None) -> Answer | None:
        """Sends bytes and reads one answer; None where the server hangs up without one.

        Args:
            data: Whatever is to be sent.
            more_follows_s: The server may wait for more: we hang up after so many seconds.

        Raises:
            TimeoutError: There was neither an answer nor an end.
            Waits: The server waited for more, and it may.
        """
        async with asyncio.timeout(self._patience_s):
            reader, writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        try:
            async with asyncio.timeout(more_follows_s or self._patience_s):
                writer.write(data)
                return await _read(reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            return None
        except TimeoutError:
            if more_follows_s is not None:
                raise Waits from None
            raise
        finally:
            # Not close(): it would wait for a server that does not read what is left.
            writer.transport.abort()


class Waits(Exception):
    """The server waited for the rest of a request until we hung up."""


async def _read(reader: asyncio.StreamReader) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ")[1])
    if status == 100:
        return await _read(reader)
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines[1:] if line)
    }
    if status in (204, 304):
        return Answer(status=status, headers=headers)
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif "event-stream" in headers.get("content-type", ""):
        body = b""  # it does not end: the head is all that is judged
    else:
        body = b"".join([chunk async for chunk in _chunks(reader)])
    return Answer(status=status, headers=headers, body=body)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of a body without a length."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


def request(
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    token: str | None = None,
    headers: dict[str, str] | None = None,
) -> bytes:
    """A well-formed request."""
    sent = {"Host": "localhost"}
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    if body is not None:
        sent |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    sent |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + (body or b"")
