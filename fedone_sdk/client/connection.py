"""HTTP requests to one server: its base URL, proxy and trust."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

from fedone_sdk.client.network import Network, server_url
from fedone_sdk.errors import TransportError


class Connection:
    """The HTTP session of one server.

    Args:
        server: Base URL of the aggregator.
        network: Proxy and trust.
        decompress: Whether compressed answers are accepted.

    Attributes:
        base: The base URL.

    Raises:
        SpecError: The URL, the proxy or a certificate cannot be used.
    """

    def __init__(self, server: str, network: Network, *, decompress: bool = True) -> None:
        self.base = server_url(server)
        self._proxy = network.proxy_for(self.base)
        self._ssl = network.context()
        self._decompress = decompress
        self._session: aiohttp.ClientSession | None = None

    def url(self, path: str) -> URL:
        """Return the URL of a path, whose names are quoted."""
        return self.base.joinpath(path.lstrip("/"), encoded=True)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: URL,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,
        params: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; the yielded answer has any status and an unread body.

        Raises:
            TransportError: The server cannot be reached, also while the body is read.
        """
        if self._session is None:
            # Created here, not in __init__: a session belongs to the loop that uses it.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), auto_decompress=self._decompress
            )
        options: dict[str, Any] = {"headers": headers}
        if self._ssl is not None:
            options["ssl"] = self._ssl
        if self._proxy is not None:
            options |= self._proxy.options(url, headers)
        try:
            async with self._session.request(
                method,
                url,
                params=params,
                data=body,
                timeout=timeout,
                allow_redirects=False,  # a redirect would carry the secret elsewhere
                **options,
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            raise TransportError(f"{self.base}: cannot be reached: {reason}") from exc

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
