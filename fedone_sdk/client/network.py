"""How a device reaches its server: proxies, trust, its certificate, and HTTP requests."""

from __future__ import annotations

import base64
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from yarl import URL

from fedone_sdk.errors import ArgumentError, TransportError

if TYPE_CHECKING:
    from fedone_sdk.client.transport import Transport


def server_url(text: str) -> URL:
    """Parse the base URL of an aggregator.

    Raises:
        SpecError: It is not an http(s) URL, or it has a user or password.
    """
    try:
        url = URL(text)
        (url.raw_host or "").encode("idna")  # as the resolver does
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ArgumentError(f"server: {text!r} is not an http(s) URL")
    if url.user is not None or url.password is not None:
        # aiohttp would send them instead of the credential.
        raise ArgumentError("server: must not have a user or password")
    return url


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """An HTTP proxy: its address without user and password, and a ``Proxy-Authorization``."""

    url: URL
    authorization: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, text: str, key: str = "proxy") -> Proxy:
        """Parse ``http://user:password@host:port`` of an argument or variable, named by `key`.

        Raises:
            SpecError: It is not the URL of an HTTP proxy; the error does not repeat it.
        """
        try:
            url = URL(text)
            if url.scheme not in ("http", "https") or not url.host or url.port is None:
                raise ValueError
        except ValueError:
            raise ArgumentError(
                f"{key}: is not a proxy; allowed is http://[user:password@]host:port"
            ) from None
        secret = None
        if url.user is not None or url.password is not None:
            pair = f"{url.user or ''}:{url.password or ''}".encode()
            secret = "Basic " + base64.b64encode(pair).decode("ascii")
        return cls(url=url.with_user(None).origin(), authorization=secret)

    def options(self, url: URL, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return aiohttp's options of a request through this proxy."""
        options: dict[str, Any] = {"proxy": self.url, "headers": headers}
        if self.authorization is not None:
            secret = {"Proxy-Authorization": self.authorization}
            if url.scheme == "https":
                options["proxy_headers"] = secret
            else:
                options["headers"] = {**headers, **secret}
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How a device reaches its server, and how it identifies itself there.

    Attributes:
        proxy: ``http://[user:password@]host:port`` for all requests.
        trust_env: Without `proxy`: whether ``HTTPS_PROXY``, ``HTTP_PROXY`` and ``NO_PROXY`` (or
            the system's settings, where Python reads them) apply.
        ca_file: Trusted authorities instead of the system's, a PEM file.
        cert_file: The device's certificate for a server that requires one (mTLS), a PEM file.
        key_file: Its private key; None if `cert_file` contains it.
        key_password: The password of the key.
        ssl_context: Trust and certificate by the app, instead of the four above.
        timeout_s: Longest wait for an answer, seconds, in addition to `wait_s`.
        wait_s: How long a claim may wait at the server for work, seconds, from 0 to 60.
        name: Display name that the device enrols with, 1 to 200 characters.
        transport: Replaces HTTP, for tests and other protocols; the attributes of the connection
            above do not apply then.
    """

    proxy: str | None = field(default=None, repr=False)
    trust_env: bool = True
    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    key_password: str | None = field(default=None, repr=False)
    ssl_context: ssl.SSLContext | None = None
    timeout_s: float = 60.0
    wait_s: float = 25.0
    name: str | None = None
    transport: Transport | None = None

    def proxy_for(self, server: URL) -> Proxy | None:
        """Return the proxy for a server; None connects directly.

        Raises:
            SpecError: It is not the URL of an HTTP proxy.
        """
        if self.proxy is not None:
            return Proxy.of(self.proxy)
        # Not aiohttp's `trust_env`: it also reads passwords from ~/.netrc, and fails if it finds
        # one.
        host = f"{server.host}:{server.port}"
        if not self.trust_env or urllib.request.proxy_bypass(host):
            return None
        named = urllib.request.getproxies().get(server.scheme)
        return None if named is None else Proxy.of(named, f"{server.scheme.upper()}_PROXY")

    def context(self) -> ssl.SSLContext | None:
        """Return trust and certificate; None is the system's trust.

        Raises:
            SpecError: A file is missing or malformed.
        """
        files = (self.ca_file, self.cert_file, self.key_file)
        if self.ssl_context is not None:
            if any(file is not None for file in files):
                raise ArgumentError(
                    "ssl_context: stands alone, without ca_file, cert_file and key_file"
                )
            return self.ssl_context
        if self.ca_file is None and self.cert_file is None:
            if self.key_file is not None:
                raise ArgumentError("key_file: goes with cert_file")
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as exc:  # SSLError is one
            raise _unusable("ca_file", self.ca_file, exc) from exc
        if self.cert_file is not None:
            try:
                # Without a password OpenSSL prompts for one on the terminal.
                password = self.key_password or ""
                context.load_cert_chain(self.cert_file, self.key_file, password)
            except OSError as exc:
                raise _unusable("cert_file", self.cert_file, exc) from exc
        return context


def _unusable(key: str, file: str | Path | None, cause: OSError) -> ArgumentError:
    return ArgumentError(f"{key}: {file} cannot be used: {cause}")


class Connection:
    """The HTTP session of one server.

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
