"""Servers on loopback, and a network that loses requests and answers."""

from __future__ import annotations

import asyncio
import random
from typing import Self


class TcpServer:
    """Runs `_serve` for each connection."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.cut_all()
        await self._server.wait_closed()

    async def cut_all(self) -> None:
        """Ends every connection at once."""
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._open.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class ChaosProxy(TcpServer):
    """Forwards TCP connections, and cuts each after a random number of bytes in each direction."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.upstream = 0
        self.cuts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.upstream)
        pumps = [
            asyncio.create_task(self._pump(reader, upstream)),
            asyncio.create_task(self._pump(upstream_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            upstream.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = int(self._rng.expovariate(1 / 4000))
        while data := await reader.read(65536):
            writer.write(data[:left])
            await writer.drain()
            left -= len(data)
            if left < 0:
                self.cuts += 1
                return
